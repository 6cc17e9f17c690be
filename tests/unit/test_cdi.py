# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import os
import stat

import pytest

from driver.cdi import CdiDirectory, encode_spec
from driver.names import ClaimUID
from fastcpu import CpuSet

UID = ClaimUID("3f6c1d2e-0b1a-4c5d-8e9f-a0b1c2d3e4f5")
FILE = f"dra.k8s.io-cpu_claim-{UID}.json"
A, B, C = map(ClaimUID, "abc")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cdi"


@pytest.fixture
def cdi(folder):
    return CdiDirectory(folder)


def names(folder):
    return sorted(os.listdir(folder))


def device(uid: str, cpulist: str) -> dict[str, object]:
    return {"name": f"claim-{uid}", "containerEdits": {"env": [f"DRA_CPUSET_{uid}={cpulist}"]}}


def spec(*devices: object, **changes: object) -> str:
    return json.dumps({"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": list(devices), **changes})


def put(folder, name: str, content: str):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    return folder / name


async def test_the_spec_is_what_dra_driver_cpu_would_have_written(cdi, folder):
    assert cdi.write_now(UID, CpuSet.parse("2-5,64")) is True
    assert names(folder) == [FILE]
    assert json.loads((folder / FILE).read_bytes()) == {
        "cdiVersion": "0.8.0",
        "kind": "dra.k8s.io/cpu",
        "devices": [{"name": f"claim-{UID}", "containerEdits": {"env": [f"DRA_CPUSET_{UID}=2-5,64"]}}],
    }
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o644
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


async def test_the_spec_comes_by_a_rename_of_a_file_that_is_no_spec(cdi, folder, disk):
    cdi.write_now(UID, CpuSet([1]))
    ((_, temporary),) = [call for call in disk.calls if call[0] == "rename"]
    assert os.path.dirname(temporary) == str(folder)
    assert not temporary.endswith((".json", ".yaml"))


async def test_the_same_spec_is_not_written_again(cdi, folder):
    cdi.write_now(UID, CpuSet([1]))
    inode = (folder / FILE).stat().st_ino
    assert cdi.write_now(UID, CpuSet([1])) is False
    assert (folder / FILE).stat().st_ino == inode
    assert cdi.write_now(UID, CpuSet([2])) is True


def test_removing(cdi, folder):
    cdi.write_now(A, CpuSet([1]))
    cdi.write_now(B, CpuSet([2]))
    assert cdi.remove_all_now([A]) == [True]
    assert cdi.remove_all_now([A]) == [False]
    assert names(folder) == ["dra.k8s.io-cpu_claim-b.json"]


def test_removing_where_there_is_no_folder(cdi, folder):
    assert cdi.remove_all_now([A]) == [False]
    assert not folder.exists()


async def test_own_specs_are_found(cdi):
    cdi.write_now(A, CpuSet.parse("2-5"))
    cdi.write_now(B, CpuSet.parse("0-255:1/2"))
    loaded = await cdi.load()
    assert {uid: (str(spec.cpus), spec.elsewhere) for uid, spec in loaded.found.items()} == {
        A: ("2-5", ()),
        B: (str(CpuSet(range(0, 256, 2))), ()),
    }
    assert loaded.broken == []


async def test_a_missing_folder_is_made(cdi, folder):
    loaded = await cdi.load()
    assert (loaded.found, loaded.broken) == ({}, [])
    assert folder.is_dir()


async def test_specs_of_dra_driver_cpu_0_2_with_more_variables_are_found(cdi, folder):
    with_more = device("a", "2-5")
    with_more["containerEdits"]["env"] += ["DRA_CPUSET_ASSIGNED=2-5", 7]
    with_more["annotations"] = {"x": "y"}
    put(folder, "dra.k8s.io-cpu_claim-a.json", spec(with_more))
    loaded = await cdi.load()
    assert loaded.found[A].cpus == CpuSet.parse("2-5")
    assert loaded.found[A].elsewhere == ()
    assert loaded.broken == []


async def test_claims_in_the_shared_file_of_dra_driver_cpu_0_1_are_found_and_moved_out(cdi, folder):
    shared = put(
        folder, "dra.cpu.json", spec(device("a", "2-5"), device("b", "6"), device("c", "7"), annotations={"ü": "😀"})
    )
    loaded = await cdi.load()
    assert {uid: str(found.cpus) for uid, found in loaded.found.items()} == {A: "2-5", B: "6", C: "7"}
    assert loaded.found[A].elsewhere == (shared,)
    for uid in (A, B):
        assert await cdi.take_over(uid, loaded.found[uid].cpus, loaded.found[uid].elsewhere) is True
    assert json.loads(shared.read_text())["devices"] == [device("c", "7")]
    assert "😀" in shared.read_text()  # as an escaped surrogate pair the runtime could not read it
    assert await cdi.take_over(C, CpuSet([7]), (shared,)) is True
    assert names(folder) == [f"dra.k8s.io-cpu_claim-{uid}.json" for uid in "abc"]
    assert await cdi.take_over(C, CpuSet([7]), ()) is False
    again = await cdi.load()
    assert {uid: (str(found.cpus), found.elsewhere) for uid, found in again.found.items()} == {
        A: ("2-5", ()),
        B: ("6", ()),
        C: ("7", ()),
    }


async def test_the_empty_shared_file_of_dra_driver_cpu_0_1_is_no_fault(cdi, folder):
    shared = put(folder, "dra.cpu.json", spec())
    loaded = await cdi.load()
    assert (loaded.found, loaded.broken) == ({}, [])
    assert shared.exists()


async def test_a_device_that_stands_twice_counts_with_all_its_cpus(cdi, folder):
    # The runtime resolves it to neither, and a container may have either.
    other = put(folder, "other.json", spec(device("a", "6"), device("a", "7")))
    put(folder, "dra.k8s.io-cpu_claim-a.json", spec(device("a", "2-5")))
    loaded = await cdi.load()
    assert loaded.found[A].cpus == CpuSet.parse("2-7")
    assert loaded.found[A].elsewhere == (other,)
    assert [file.reason for file in loaded.broken] == ["device claim-a stands in several places"] * 2
    await cdi.take_over(A, CpuSet.parse("2-7"), (other,))
    assert names(folder) == ["dra.k8s.io-cpu_claim-a.json"]
    again = await cdi.load()
    assert (again.found[A].cpus, again.broken) == (CpuSet.parse("2-7"), [])


async def test_a_device_in_the_file_of_another_claim_is_found_where_it_stands(cdi, folder):
    path = put(folder, "dra.k8s.io-cpu_claim-b.json", spec(device("a", "2-5")))
    loaded = await cdi.load()
    assert loaded.found[A].elsewhere == (path,)
    assert B not in loaded.found
    await cdi.take_over(A, CpuSet.parse("2-5"), (path,))
    assert names(folder) == ["dra.k8s.io-cpu_claim-a.json"]


DEVICES = [
    (7, "devices[0] is a whole number; expected an object"),
    ({"name": 7}, "devices[0].name is a whole number; expected a string"),
    ({"name": "gpu0", "containerEdits": {}}, "devices[0].name is 'gpu0'; expected claim-<claim UID>"),
    ({"name": "claim-", "containerEdits": {}}, "claim UID '' is malformed"),
    ({"name": "claim-../../etc/passwd"}, "claim UID '../../etc/passwd' is malformed"),
    ({"name": "claim-a"}, "devices[0].containerEdits is missing; expected an object"),
    ({"name": "claim-a", "containerEdits": {"env": {}}}, "devices[0].containerEdits.env is an object; expected a list"),
    ({"name": "claim-a", "containerEdits": {"env": []}}, "devices[0] gives DRA_CPUSET_a no CPUs"),
    ({"name": "claim-a", "containerEdits": {"env": ["DRA_CPUSET_b=1"]}}, "devices[0] gives DRA_CPUSET_a no CPUs"),
    (device("a", ""), "devices[0] gives DRA_CPUSET_a no CPUs"),
    (device("a", "dynamic"), "devices[0]: DRA_CPUSET_a: cpulist 'dynamic'"),
    (device("a", "0-4294967295"), "devices[0]: DRA_CPUSET_a: cpulist '0-4294967295'"),
    (device("a", "0-1048575:1/3," * 100_000 + "1"), "it has 100000 strides; expected plain ranges"),
]


@pytest.mark.parametrize(("wrong", "reason"), DEVICES, ids=[reason for _, reason in DEVICES])
async def test_a_device_that_makes_no_sense_is_reported_and_the_others_are_found(cdi, folder, wrong, reason):
    path = put(folder, "dra.cpu.json", spec(wrong, device("b", "6")))
    before = path.read_bytes()
    loaded = await cdi.load()
    assert list(loaded.found) == [B]
    assert [file.path for file in loaded.broken] == [path]
    assert reason in loaded.broken[0].reason
    await cdi.take_over(B, CpuSet([6]), (path,))
    assert json.loads(path.read_bytes())["devices"] == json.loads(before)["devices"][:1]


FILES = [
    ("", "Expecting value"),
    ('{"kind": "dra.k8s.io/cpu", "devi', "Unterminated string"),
    ("[" * 200_000, "recursion"),
    ("[]", "the spec is a list; expected an object"),
    (spec(kind=7), "kind is a whole number; expected a string"),
    (spec(kind="gpu.example.com/gpu"), "kind is 'gpu.example.com/gpu'; expected dra.k8s.io/cpu"),
    (" " * (4 << 20) + "{}", "Larger than 4194304 bytes"),
]


@pytest.mark.parametrize(("content", "reason"), FILES, ids=[reason for _, reason in FILES])
async def test_a_broken_file_counts_only_if_it_has_our_name(cdi, folder, content, reason):
    ours = put(folder, FILE, content)
    theirs = put(folder, "vendor.json", content)
    loaded = await cdi.load()
    assert loaded.found == {}
    assert [file.path for file in loaded.broken] == [ours]
    assert reason in loaded.broken[0].reason
    assert theirs.read_text() == ours.read_text() == content


async def test_a_broken_file_of_our_kind_counts_whatever_its_name(cdi, folder):
    path = put(folder, "vendor.json", spec(devices={}))
    loaded = await cdi.load()
    assert [(file.path, file.reason) for file in loaded.broken] == [(path, "devices is an object; expected a list")]


async def test_files_of_others_are_neither_read_into_nor_touched(cdi, folder):
    others = {
        "vendor.json": spec(device("a", "1"), kind="vendor.com/gpu"),
        "dra.cpu_metadata_a_cpus.json": spec({"name": "a_cpus", "containerEdits": {}}, kind="dra.cpu/metadata"),
        "broken.json": "{",
        "spec.yaml": "kind: dra.k8s.io/cpu",
        ".vendor.json.0123abcd.tmp": "{",
        "spec.123.tmp": "{",
    }
    for name, content in others.items():
        put(folder, name, content)
    (folder / "fifo.json").unlink(missing_ok=True)
    os.mkfifo(folder / "fifo.json")
    (folder / "folder.json").mkdir()
    loaded = await cdi.load()
    assert (loaded.found, loaded.broken) == ({}, [])
    for name, content in others.items():
        assert (folder / name).read_text() == content


async def test_temporary_files_of_a_crash_are_cleared_away(cdi, folder):
    put(folder, f".{FILE}.0123abcd.tmp", "{")
    put(folder, ".dra.cpu.json.0123abcd.tmp", "{")
    await cdi.load()
    assert names(folder) == []


@pytest.mark.parametrize("changed", [None, "{", "[]", spec(devices=7), spec(device("b", "6"))])
async def test_a_file_that_was_changed_since_loading_is_not_spoilt(cdi, folder, changed):
    path = put(folder, "dra.cpu.json", spec(device("a", "2-5")))
    loaded = await cdi.load()
    path.unlink()
    if changed is not None:
        path.write_text(changed)
    await cdi.take_over(A, CpuSet.parse("2-5"), loaded.found[A].elsewhere)
    assert (path.read_text() if path.exists() else None) == changed
    assert (folder / "dra.k8s.io-cpu_claim-a.json").read_bytes() == encode_spec(A, CpuSet.parse("2-5"))


@pytest.mark.parametrize(
    ("operation", "error"),
    [("mkdir", errno.EROFS), ("open", errno.EACCES), ("write", errno.ENOSPC), ("rename", errno.EIO)],
)
async def test_a_spec_that_cannot_be_written_is_an_error_and_no_file(cdi, folder, disk, operation, error):
    disk.fail(operation, folder.name, error)
    with pytest.raises(OSError, match=os.strerror(error)):
        cdi.write_now(A, CpuSet([1]))
    disk.repair()
    assert not folder.exists() or names(folder) == []


def test_a_spec_that_cannot_be_removed_is_an_error(cdi, folder, disk):
    cdi.write_now(A, CpuSet([1]))
    disk.fail("unlink", "claim-a", errno.EROFS)
    [failure] = cdi.remove_all_now([A])
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        raise failure
    assert names(folder) == ["dra.k8s.io-cpu_claim-a.json"]


async def test_a_folder_that_cannot_be_listed_is_an_error(cdi, folder, disk):
    folder.mkdir()
    disk.fail("listdir", folder.name, errno.EACCES)
    with pytest.raises(PermissionError):
        await cdi.load()
