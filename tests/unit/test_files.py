# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import stat
import threading

import pytest

from driver import files
from driver.files import read_file, remove_files, remove_temporary_files, replace_files_durably

OLD, NEW = b"old content\n", b"new content\n"


def replace_file(path, content, mode=0o644, *, durable=True):
    return files.replace_file(path, content, mode=mode, durable=durable)


def remove_file(path):
    return remove_files(path.parent, path.name)


def names(folder):
    return sorted(os.listdir(folder))


def test_a_file_is_written_with_its_mode_whatever_the_umask(tmp_path):
    path = tmp_path / "a.json"
    before = os.umask(0o077)
    try:
        assert replace_file(path, NEW, 0o644) is True
    finally:
        os.umask(before)
    assert path.read_bytes() == NEW
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert names(tmp_path) == ["a.json"]


def test_content_reaches_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, disk):
    path = tmp_path / "a.json"
    replace_file(path, NEW)
    steps = [(operation, os.path.basename(name)) for operation, name in disk.calls]
    temporary = next(name for operation, name in steps if operation == "write")
    assert steps[-5:] == [
        ("write", temporary),
        ("fsync", temporary),
        ("rename", temporary),
        ("read", tmp_path.name),
        ("fsync", tmp_path.name),
    ]
    assert temporary.startswith(".a.json.")
    assert temporary.endswith(".tmp")


def test_a_disk_that_takes_content_in_pieces_gets_all_of_it(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:3]))
    replace_file(tmp_path / "a.json", NEW)
    assert (tmp_path / "a.json").read_bytes() == NEW


def test_what_can_be_made_again_is_not_waited_for(tmp_path, disk):
    path = tmp_path / "a.json"
    path.write_bytes(OLD)
    assert replace_file(path, NEW, durable=False) is True
    assert replace_file(path, NEW, durable=False) is False
    assert path.read_bytes() == NEW
    assert [operation for operation, _ in disk.calls] == ["read", "open", "write", "rename", "read"]


def test_the_same_content_is_not_written_again(tmp_path, disk):
    path = tmp_path / "a.json"
    replace_file(path, NEW)
    inode = path.stat().st_ino
    disk.calls.clear()
    assert replace_file(path, NEW) is False
    assert path.stat().st_ino == inode
    # An earlier attempt may have failed after its rename, so the folder is synced all the same.
    assert ("fsync", str(tmp_path)) in disk.calls
    assert not [call for call in disk.calls if call[0] in ("write", "rename")]


def test_content_that_begins_the_same_is_written(tmp_path):
    path = tmp_path / "a.json"
    replace_file(path, NEW + b"more")
    assert replace_file(path, NEW) is True
    assert path.read_bytes() == NEW


@pytest.mark.parametrize("there", [b"", OLD])
@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("open", errno.EACCES),
        ("open", errno.EROFS),
        ("write", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("rename", errno.EIO),
    ],
)
def test_a_failure_before_the_rename_leaves_the_old_state(tmp_path, disk, operation, error, there):
    path = tmp_path / "a.json"
    if there:
        path.write_bytes(there)
    disk.fail(operation, ".a.json.", error)
    with pytest.raises(OSError, match=os.strerror(error)):
        replace_file(path, NEW)
    assert names(tmp_path) == (["a.json"] if there else [])
    assert not there or path.read_bytes() == there
    disk.repair()
    assert replace_file(path, NEW) is True
    assert path.read_bytes() == NEW


def test_a_failed_sync_of_the_folder_is_made_up_for_by_a_retry(tmp_path, disk):
    folder = tmp_path / "folder"
    folder.mkdir()
    disk.fail("fsync", "folder$", errno.EIO, times=2)
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            replace_file(folder / "a.json", NEW)
        assert (folder / "a.json").read_bytes() == NEW
    disk.calls.clear()
    assert replace_file(folder / "a.json", NEW) is False
    assert ("fsync", str(folder)) in disk.calls
    assert names(folder) == ["a.json"]


def test_a_temporary_file_that_cannot_be_removed_hides_no_error(tmp_path, disk):
    disk.fail("write", ".a.json.", errno.ENOSPC)
    disk.fail("unlink", ".a.json.", errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        replace_file(tmp_path / "a.json", NEW)
    disk.repair()
    assert len(names(tmp_path)) == 1
    remove_temporary_files(tmp_path, lambda name: name == "a.json")
    assert names(tmp_path) == []


def test_a_link_is_replaced_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(OLD)
    path = tmp_path / "a.json"
    path.symlink_to(target)
    replace_file(path, NEW)
    assert target.read_bytes() == OLD
    assert not path.is_symlink()
    assert path.read_bytes() == NEW


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "missing" / "a.json", NEW)


def test_removing(tmp_path, disk):
    path = tmp_path / "a.json"
    path.write_bytes(OLD)
    assert remove_file(path) is True
    assert disk.calls[-1] == ("fsync", str(tmp_path))
    assert remove_file(path) is False
    assert remove_file(tmp_path / "missing" / "a.json") is False


def test_removing_several_takes_one_wait_for_the_disk(tmp_path, disk):
    (tmp_path / "a").touch()
    (tmp_path / "c").touch()
    disk.calls.clear()
    assert remove_files(tmp_path, "a", "b") is True
    assert names(tmp_path) == ["c"]
    assert [operation for operation, _ in disk.calls] == ["unlink", "unlink", "read", "fsync", "listdir"]


@pytest.mark.parametrize(("operation", "part"), [("unlink", "a.json"), ("fsync", "")])
def test_a_failed_removal_is_an_error_until_it_is_durable(tmp_path, disk, operation, part):
    path = tmp_path / "a.json"
    path.write_bytes(OLD)
    disk.fail(operation, part, errno.EIO, times=2)
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            remove_file(path)
    remove_file(path)
    assert names(tmp_path) == []


def test_reading(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="Larger than 4 bytes"):
        read_file(path, 4)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "missing", 5)


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("folder", "fifo", "link", "endless"):
        with pytest.raises(OSError, match=name):
            read_file(tmp_path / name, 10)


def test_only_our_own_temporary_files_are_swept(tmp_path):
    left = [
        ".b.json.0123abcd.tmp",
        ".a.json.tmp",
        "a.json.0123abcd.tmp",
        ".a.json.0123abcd.tmp2",
        "spec.123.tmp",
        ".tmp",
    ]
    for name in [*left, ".a.json.0123abcd.tmp", ".a.json.ffffffff.tmp"]:
        (tmp_path / name).touch()
    (tmp_path / ".a.json.11111111.tmp").mkdir()  # cannot be unlinked
    remove_temporary_files(tmp_path, lambda name: name == "a.json")
    assert names(tmp_path) == sorted([*left, ".a.json.11111111.tmp"])
    remove_temporary_files(tmp_path / "missing", lambda name: True)


def test_several_files_are_replaced_and_their_folder_is_synced_once(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (synced.append(os.readlink(f"/proc/self/fd/{descriptor}")), real(descriptor))
    )
    folder = tmp_path / "new"
    contents = [(f"{number}.json", NEW) for number in range(20)]
    assert files.replace_files_durably(folder, contents, mode=0o640, folder_mode=0o750) == [True] * 20
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == dict(contents)
    assert synced[-1] == str(folder)
    assert synced.count(str(folder)) == 1
    assert len(synced) == 21
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert stat.S_IMODE((folder / "7.json").stat().st_mode) == 0o640
    # Nothing is new: only an earlier attempt's rename may still have to be synced.
    synced.clear()
    assert files.replace_files_durably(folder, contents, mode=0o640, folder_mode=0o750) == [False] * 20
    assert synced == [str(folder)]


def test_of_several_files_each_fails_for_itself(tmp_path):
    (tmp_path / "b").mkdir()
    contents = [("a", NEW), ("b", NEW), ("c/d", NEW), ("e", NEW)]
    (tmp_path / "c").write_text("no folder")
    a, b, c, e = files.replace_files_durably(tmp_path, contents, mode=0o600, folder_mode=0o700)
    assert (a, e) == (True, True)
    assert isinstance(b, IsADirectoryError)
    assert isinstance(c, OSError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "e"]


def test_a_folder_that_cannot_be_synced_fails_all(tmp_path, monkeypatch):
    def fail(folder):
        raise OSError("no disk")

    monkeypatch.setattr(files, "_sync_folder", fail)
    outcomes = files.replace_files_durably(tmp_path, [("a", NEW), ("b", NEW)], mode=0o600, folder_mode=0o700)
    assert [str(outcome) for outcome in outcomes] == ["no disk"] * 2
    outcomes = files.remove_groups_of_files(tmp_path, [("a",), ("b", "c")])
    assert [str(outcome) for outcome in outcomes] == ["no disk"] * 2


def test_of_several_removals_each_fails_for_itself(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "b").mkdir()
    (tmp_path / "d").touch()
    a, b, c, d = files.remove_groups_of_files(tmp_path, [("a", "x"), ("b",), ("c",), ("d",)])
    assert (a, c, d) == (True, False, True)
    assert isinstance(b, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("left", [0, 1, 3])
def test_files_are_synced_also_where_no_more_threads_can_be_started(tmp_path, monkeypatch, disk, left):
    started = []
    start = threading.Thread.start

    def scarce(thread):
        if len(started) == left:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    contents = [(f"{number}.json", NEW) for number in range(8)]
    assert replace_files_durably(tmp_path, contents, mode=0o600, folder_mode=0o700) == [True] * 8
    assert names(tmp_path) == [name for name, _ in contents]
    assert [operation for operation, _ in disk.calls].count("fsync") == 9
