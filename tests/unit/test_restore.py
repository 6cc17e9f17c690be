# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import logging
import os

import pytest

from driver.errors import ClaimError
from fastcpu import CpuSet


def put_spec(node, uid: str, cpulist: str, name: str | None = None) -> None:
    """Write a CDI spec as dra-driver-cpu does."""
    device = {"name": f"claim-{uid}", "containerEdits": {"env": [f"DRA_CPUSET_{uid}={cpulist}"]}}
    spec = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": [device]}
    path = node.cdi_folder / (name or f"dra.k8s.io-cpu_claim-{uid}.json")
    if path.exists():
        spec["devices"] += json.loads(path.read_bytes())["devices"]
    path.write_text(json.dumps(spec))


async def test_a_first_start_holds_nothing_and_makes_the_folders(node):
    assert node.agreed() == {}
    assert node.records_folder.is_dir()
    assert node.cdi_folder.is_dir()


async def test_a_restart_holds_what_was_held(node):
    a, b = node.claims.add("a", "2-5"), node.claims.add("b", "40-43", device="cpudevnuma001")
    before = [await node.prepare(a), await node.prepare(b)]
    await node.restart()
    assert node.agreed() == {"a": "2-5", "b": "40-43"}
    assert [await node.prepare(a), await node.prepare(b)] == before
    with pytest.raises(ClaimError, match="CPU 5 is held by claim a"):
        await node.prepare(node.claims.add("c", "5"))


async def test_specs_that_a_reboot_has_lost_are_written_again(node, caplog):
    caplog.set_level(logging.INFO)
    await node.prepare(node.claims.add("a", "2-5"))
    await node.prepare(node.claims.add("b", "6"))
    spec = next(node.cdi_folder.glob("*claim-a.json"))
    content = spec.read_bytes()
    spec.unlink()
    await node.restart()
    assert node.agreed() == {"a": "2-5", "b": "6"}
    assert spec.read_bytes() == content
    assert [line.fields["uid"] for line in caplog.records if line.message == "wrote a CDI spec anew"] == ["a"]


async def test_a_record_wins_over_the_spec(node):
    await node.prepare(node.claims.add("a", "2-5"))
    put_spec(node, "a", "10-13")
    await node.restart()
    assert node.agreed() == {"a": "2-5"}


async def test_a_spec_cut_short_by_a_crash_is_written_again(node):
    await node.prepare(node.claims.add("a", "2-5"))
    spec = next(node.cdi_folder.glob("*claim-a.json"))
    spec.write_bytes(spec.read_bytes()[:40])
    await node.restart()
    assert node.agreed() == {"a": "2-5"}
    assert node.metric("broken_files_total", kind="cdi") == 1


async def test_specs_without_a_record_are_adopted(node):
    reference = node.claims.add("a", "2-5")
    put_spec(node, "a", "2-5")
    put_spec(node, "b", "6-7,0")
    await node.restart()
    assert node.agreed() == {"a": "2-5", "b": "0,6-7"}
    assert all(record.adopted for record in node.ledger.records.values())
    with pytest.raises(ClaimError, match="CPU 7 is held by claim b"):
        await node.prepare(node.claims.add("c", "7-8"))
    # Still adopted after another restart, and prepared like any other once the claim is seen to be the same.
    await node.restart()
    assert node.ledger.records["a"].adopted
    (answer,) = await node.prepare(reference)
    assert (answer.device, answer.share_id, answer.request_names) == ("cpudevnuma000", "share-a", ("cpus",))
    assert answer.cdi_ids[0] == "dra.k8s.io/cpu=claim-a"
    assert not node.ledger.records["a"].adopted
    await node.restart()
    assert not node.ledger.records["a"].adopted
    assert await node.prepare(reference) == (answer,)
    await node.unprepare(node.claims.add("b", "6"))
    assert node.agreed() == {"a": "2-5"}


async def test_an_adopted_claim_that_is_to_have_other_cpus_is_refused_and_stays_held(node):
    put_spec(node, "a", "2-6")
    await node.restart()
    reference = node.claims.add("a", "2-5")
    with pytest.raises(ClaimError, match=r"to have CPUs 2-5, but .* gives it 2-6; expected the same"):
        await node.prepare(reference)
    assert node.agreed() == {"a": "2-6"}
    assert node.ledger.records["a"].adopted
    await node.unprepare(reference)
    assert node.agreed() == {}
    await node.prepare(reference)
    assert node.agreed() == {"a": "2-5"}


async def test_an_adopted_claim_that_is_to_have_nothing_of_ours_is_refused(node):
    put_spec(node, "a", "2-5")
    await node.restart()
    with pytest.raises(ClaimError, match=r"to have CPUs none, but .* gives it 2-5"):
        await node.prepare(node.claims.put("a", [], []))
    assert node.agreed() == {"a": "2-5"}


async def test_the_shared_file_of_dra_driver_cpu_0_1_becomes_a_file_for_each_claim(node):
    for uid, cpulist in {"a": "2-5", "b": "6", "c": "40"}.items():
        put_spec(node, uid, cpulist, "dra.cpu.json")
    await node.restart()
    assert node.agreed() == {"a": "2-5", "b": "6", "c": "40"}
    assert not (node.cdi_folder / "dra.cpu.json").exists()


@pytest.mark.parametrize("operation", ["write", "rename", "unlink"])
async def test_a_start_that_cannot_move_a_claim_out_of_a_shared_file_loses_nothing(node, disk, caplog, operation):
    for uid, cpulist in {"a": "2-5", "b": "6"}.items():
        put_spec(node, uid, cpulist, "dra.cpu.json")
    disk.fail(operation, "dra.cpu.json", errno.EIO)
    await node.restart()
    assert node.held() == node.recorded() == {"a": "2-5", "b": "6"}
    assert "a prepared claim has no CDI spec" in caplog.text
    disk.repair()
    await node.restart()
    assert node.agreed() == {"a": "2-5", "b": "6"}
    assert not (node.cdi_folder / "dra.cpu.json").exists()


async def test_a_claim_without_record_stays_where_the_runtime_finds_it(node, disk, caplog):
    put_spec(node, "a", "2-5", "dra.cpu.json")
    disk.fail("write", "claims", errno.ENOSPC)
    await node.restart()
    assert node.held() == {"a": "2-5"}
    assert node.recorded() == {}
    assert (node.cdi_folder / "dra.cpu.json").exists()
    assert "an adopted claim has no record" in caplog.text
    disk.repair()
    await node.restart()
    assert node.agreed() == {"a": "2-5"}


async def test_a_broken_record_is_reported_and_its_spec_adopted(node, caplog):
    reference = node.claims.add("a", "2-5")
    answer = await node.prepare(reference)
    record = node.records_folder / "a.json"
    record.write_bytes(record.read_bytes()[:-20])
    await node.restart()
    assert node.agreed() == {"a": "2-5"}
    assert node.ledger.records["a"].adopted
    assert node.metric("broken_files_total", kind="record") == 1
    (line,) = [line for line in caplog.records if line.message == "a file cannot be used"]
    assert line.levelno == logging.ERROR
    assert line.fields["path"] == node.records_folder / "a.json.corrupt"
    assert await node.prepare(reference) == answer
    await node.unprepare(reference)
    assert node.agreed() == {}
    assert list(node.records_folder.iterdir()) == []


async def test_records_win_over_a_changed_configuration(node, caplog):
    a, b = node.claims.add("a", "2-5"), node.claims.add("b", "6")
    before = [await node.prepare(a), await node.prepare(b)]
    await node.restart(group_by="socket", reserved="0-3")
    assert node.agreed() == {"a": "2-5", "b": "6"}
    assert node.metric("record_mismatches_total", reason="reserved") == 1
    assert node.metric("record_mismatches_total", reason="device") == 2
    reserved = [line for line in caplog.records if "reserved" in getattr(line, "fields", {})]
    assert [(line.fields["uid"], str(line.fields["reserved"])) for line in reserved] == [("a", "2-3")]
    answers = [await node.prepare(a), await node.prepare(b)]
    assert answers == before
    await node.unprepare(a)
    assert node.agreed() == {"b": "6"}


async def test_records_win_over_a_changed_machine(node, tmp_path):
    a = node.claims.add("a", "2-5,31")
    await node.prepare(a)
    record = node.records_folder / "a.json"
    record.write_text(record.read_text().replace("2-5,31", "2-5,500,9000"))
    await node.restart()
    assert node.ledger.records["a"].cpus == CpuSet.parse("2-5,500,9000", limit=10_000)
    assert node.pool.taken == CpuSet.parse("2-5")
    assert node.metric("record_mismatches_total", reason="offline") == 1
    assert node.recorded() == node.specified() == {"a": "2-5,500,9000"}
    await node.unprepare(a)
    assert node.agreed() == {}


async def test_overlapping_records_are_both_held(node):
    await node.prepare(node.claims.add("a", "2-5"))
    put_spec(node, "b", "5-6")
    await node.restart()
    assert node.agreed() == {"a": "2-5", "b": "5-6"}
    assert node.metric("record_mismatches_total", reason="overlap") == 1
    await node.unprepare(node.claims.add("b", "5-6"))
    assert node.agreed() == {"a": "2-5"}
    assert node.pool.taken == CpuSet.parse("2-5")


async def test_metadata_without_a_record_goes(node):
    a, b = node.claims.add("a", "2-5"), node.claims.add("b", "6")
    await node.prepare(a)
    await node.prepare(b)
    (node.records_folder / "b.json").unlink()
    next(node.cdi_folder.glob("*cpu_claim-b.json")).unlink()
    await node.restart()
    assert node.metadata_files() == ["a_cpus.json", "dra.cpu_metadata_a_cpus.json"]


async def test_temporary_files_of_a_crash_are_cleared_away(node):
    left = [
        node.records_folder / ".a.json.0123abcd.tmp",
        node.cdi_folder / ".dra.k8s.io-cpu_claim-a.json.0123abcd.tmp",
        node.cdi_folder / ".dra.cpu_metadata_a_cpus.json.0123abcd.tmp",
    ]
    for path in left:
        path.touch()
    await node.restart()
    assert [path for path in left if path.exists()] == []
    assert node.agreed() == {}


@pytest.mark.parametrize("folder", ["records_folder", "cdi_folder"])
@pytest.mark.parametrize("operation", ["listdir", "mkdir"])
async def test_a_start_that_cannot_know_who_holds_what_fails_and_may_be_tried_again(node, disk, folder, operation):
    await node.prepare(node.claims.add("a", "2-5"))
    node.start()
    disk.fail(operation, getattr(node, folder).name, errno.EACCES)
    if operation == "mkdir":
        for path in getattr(node, folder).iterdir():
            path.unlink()
        getattr(node, folder).rmdir()
    for _ in range(2):
        with pytest.raises(PermissionError, match=os.strerror(errno.EACCES)):
            await node.preparer.restore()
        assert node.held() == {}
    disk.repair()
    await node.preparer.restore()
    assert node.agreed() == {"a": "2-5"}


async def test_a_start_on_a_full_disk_holds_everything(node, disk, caplog):
    await node.prepare(node.claims.add("a", "2-5"))
    for path in node.cdi_folder.iterdir():
        path.unlink()
    disk.fail("write", "", errno.ENOSPC)
    await node.restart()
    assert node.held() == {"a": "2-5"}
    assert "a prepared claim has no CDI spec" in caplog.text
    disk.repair()
    await node.prepare(node.claims.add("a", "2-5"))
    assert node.agreed() == {"a": "2-5"}
