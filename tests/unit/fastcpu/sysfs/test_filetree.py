# SPDX-License-Identifier: Apache-2.0
"""Trees on disk with what may lie in them, and overlays over them."""

from __future__ import annotations

import os

import pytest

from fastcpu.sysfs.filetree import MAX_FILE_SIZE, OverlaidTree, SysfsTree, open_tree
from machines.shapes import TextTree


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices/online").write_text("0-3\n")
    (tmp_path / "devices/empty").write_text("")
    return tmp_path


def test_files_and_folders(folder):
    tree = SysfsTree(folder)
    assert tree.read("/sys/devices/online") == "0-3\n"
    assert tree.read("/sys/devices/empty") == ""
    assert sorted(tree.entries("/sys/devices")) == ["empty", "online"]
    assert list(tree.entries("/sys")) == ["devices"]


def test_what_cannot_be_read(folder):
    (folder / "loop").symlink_to("loop")
    (folder / "error").symlink_to("/proc/self/mem")  # EIO, as from a device that is gone
    os.mkfifo(folder / "pipe")
    tree = SysfsTree(folder)
    for name in ("missing", "devices", "devices/online/below", "loop", "error"):
        assert tree.read(f"/sys/{name}") is None
    assert tree.read("/sys/pipe") == ""  # and does not wait for a writer
    for name in ("missing", "devices/online", "loop"):
        assert list(tree.entries(f"/sys/{name}")) == []


@pytest.mark.parametrize("size", [4095, 4096, 4097, MAX_FILE_SIZE - 1, MAX_FILE_SIZE])
def test_texts_up_to_the_bound_are_whole(folder, size):
    (folder / "large").write_text("x" * size)
    assert SysfsTree(folder).read("/sys/large") == "x" * size


def test_a_file_without_end(folder):
    (folder / "zero").symlink_to("/dev/zero")
    assert MAX_FILE_SIZE < len(SysfsTree(folder).read("/sys/zero")) <= 2 * MAX_FILE_SIZE + 1


def test_a_kernel_hands_out_a_page_at_a_time(folder, monkeypatch):
    (folder / "large").write_text("0123456789" * 1000)
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, size: read(descriptor, min(size, 4096)))
    assert SysfsTree(folder).read("/sys/large") == "0123456789" * 1000


def test_bytes_that_are_no_text(folder):
    (folder / "binary").write_bytes(bytes(range(256)))
    assert SysfsTree(folder).read("/sys/binary") == "".join(map(chr, range(256)))


def test_descriptors_are_closed(folder):
    tree = SysfsTree(folder)
    before = len(os.listdir("/proc/self/fd"))
    for name in ("devices/online", "devices", "missing"):
        tree.read(f"/sys/{name}")
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_overlay_replaces_and_adds(folder):
    tree = OverlaidTree(
        SysfsTree(folder),
        {"/sys/devices/online": "0-7", "/sys/devices/system/cpu/cpu9/topology/core_id": "1", "/sys/devices/more": ""},
    )
    assert tree.read("/sys/devices/online") == "0-7"
    assert tree.read("/sys/devices/more") == ""
    assert tree.read("/sys/devices/system/cpu/cpu9/topology/core_id") == "1"
    assert tree.read("/sys/devices/system/cpu/cpu9/topology/die_id") is None
    assert tree.read("/sys/devices/system/cpu/cpu9") is None
    assert sorted(tree.entries("/sys/devices")) == ["empty", "more", "online", "system"]
    assert list(tree.entries("/sys/devices/system/cpu")) == ["cpu9"]
    assert list(tree.entries("/sys/devices/system/cpu/cpu9/topology")) == ["core_id"]
    assert list(tree.entries("/sys/devices/system/node")) == []


@pytest.mark.parametrize(
    ("overlaid", "hidden", "seen"),
    [
        ("topology/package_cpus_list", [], ["core_siblings_list", "physical_package_id", "core_cpus_list"]),
        ("topology/core_siblings_list", ["package_cpus_list"], ["package_cpus", "physical_package_id"]),
        (
            "topology/physical_package_id",
            ["package_cpus_list", "core_siblings"],
            ["die_id", "core_id", "core_cpus_list"],
        ),
        ("topology/core_id", ["core_cpus_list", "thread_siblings_list", "core_cpus"], ["package_cpus_list", "die_id"]),
        ("topology/die_id", ["die_cpus_list", "die_cpus"], ["core_cpus_list"]),
        ("cache/index3/id", ["shared_cpu_list", "shared_cpu_map"], ["level"]),
        ("cache/index3/level", [], ["shared_cpu_list", "shared_cpu_map", "id"]),
        ("cpumap", ["cpulist"], ["distance"]),
    ],
)
def test_an_overlay_hides_what_would_be_asked_before_it(overlaid, hidden, seen):
    place, _, name = f"/sys/devices/x/{overlaid}".rpartition("/")
    base = TextTree({f"{place}/{other}": "below" for other in (*hidden, *seen, name)})
    tree = OverlaidTree(base, {f"{place}/{name}": "above"})
    assert tree.read(f"{place}/{name}") == "above"
    assert [tree.read(f"{place}/{other}") for other in hidden] == [None] * len(hidden)
    assert [tree.read(f"{place}/{other}") for other in seen] == ["below"] * len(seen)
    assert [tree.read(f"/sys/devices/y/{other}") for other in hidden] == [None] * len(hidden)


def test_overlaid_files_do_not_hide_each_other():
    texts = {f"/sys/cpu0/topology/{name}": name for name in ("package_cpus_list", "physical_package_id")}
    tree = OverlaidTree(TextTree({}), texts)
    assert [tree.read(path) for path in texts] == ["package_cpus_list", "physical_package_id"]


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/sys", "/sys/", "/proc/cpuinfo", "sys/devices/x", "/sys/devices/", "/sys//devices", "/sys/a/../b"),
        *("/sys/./a", "/sys/../etc/passwd", "/sysfs/a", "//sys/a", "/sys/a\0b"),
    ],
)
def test_overlay_paths_are_below_sys(path):
    with pytest.raises(ValueError, match="is not an absolute path below /sys in its shortest form"):
        OverlaidTree(TextTree({}), {path: ""})


def test_an_overlay_path_is_a_file_or_a_folder():
    with pytest.raises(ValueError, match="'/sys/a/b' is both a file and a folder"):
        OverlaidTree(TextTree({}), {"/sys/a/b/c/d": "", "/sys/a/b": ""})


def test_an_overlay_is_copied():
    texts = {"/sys/a": "1"}
    tree = OverlaidTree(TextTree({}), texts)
    texts["/sys/a"] = "2"
    assert tree.read("/sys/a") == "1"


def test_open_tree(folder):
    memory = TextTree({})
    assert open_tree(memory, None) is memory
    assert open_tree(memory, {}) is memory
    assert isinstance(open_tree(str(folder), None), SysfsTree)
    assert open_tree(folder, {"/sys/a": "1"}).read("/sys/devices/online") == "0-3\n"
