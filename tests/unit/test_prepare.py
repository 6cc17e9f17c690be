# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import random

import pytest

from driver.errors import ApiError, ClaimError, ClaimPendingError
from driver.names import ClaimUID
from driver.prepare import ClaimReference, PreparedAnswer
from fastcpu import CpuSet


async def reached(event) -> None:
    """Wait for a file operation, which happens in a thread."""
    assert await asyncio.to_thread(event.wait, 10)


async def turns() -> None:
    """Let all other tasks do what they can without a file operation."""
    for _ in range(50):
        await asyncio.sleep(0)


# What a prepare answers and leaves


async def test_a_claim_gets_its_cpus(node, until):
    reference = node.claims.add("a", "2-5")
    assert await node.prepare(reference) == (
        PreparedAnswer(
            request_names=("cpus",),
            pool="node-1",
            device="cpudevnuma000",
            cdi_ids=("dra.k8s.io/cpu=claim-a", "dra.cpu/metadata=a_cpus"),
            share_id="share-a",
        ),
    )
    assert node.agreed() == {"a": "2-5"}
    assert node.metadata_files() == ["a_cpus.json", "dra.cpu_metadata_a_cpus.json"]
    await until(lambda: "a" in node.claims.applied)
    assert node.claims.applied["a"] == [
        {
            "driver": "dra.cpu",
            "pool": "node-1",
            "device": "cpudevnuma000",
            "shareID": "share-a",
            "data": {"cpuset": "2-5"},
        }
    ]
    assert node.metric("prepare_claims_total", result="success") == 1
    assert node.metric("claim_allocated_cpus_sum") == 4


async def test_the_ledger_holds_before_the_record_is_written_and_the_record_is_there_before_the_spec(node, disk):
    record_written, go_on = disk.pause("rename", "claims/")
    spec_written, go_on_too = disk.pause("rename", "dra.k8s.io-cpu_claim-a")
    task = asyncio.create_task(node.prepare(node.claims.add("a", "2-5")))
    await reached(record_written)
    assert (node.held(), node.recorded(), node.specified()) == ({"a": "2-5"}, {}, {})
    go_on.set()
    await reached(spec_written)
    assert (node.recorded(), node.specified()) == ({"a": "2-5"}, {})
    go_on_too.set()
    await task
    assert node.agreed() == {"a": "2-5"}


def two_requests(node, uid: str = "a") -> ClaimReference:
    def result(request: str, device: str, cpus: int, share: str | None) -> dict[str, object]:
        return {
            "request": request,
            "driver": "dra.cpu",
            "pool": "node-1",
            "device": device,
            "consumedCapacity": {"dra.cpu/cpu": str(cpus)},
            **({"shareID": share} if share else {}),
        }

    def config(request: str, cpuset: str) -> dict[str, object]:
        parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": cpuset}}
        return {"source": "FromClaim", "requests": [request], "opaque": {"driver": "dra.cpu", "parameters": parameters}}

    results = [
        result("wide", "cpudevnuma000", 2, "one"),
        {"request": "gpu", "driver": "gpu.example.com", "pool": "x", "device": "y"},
        result("wide", "cpudevnuma001", 3, "two"),
        result("small/one", "cpudevnuma000", 1, None),
    ]
    return node.claims.put(uid, results, [config("wide", "2-3,32-34"), config("small", "9")])


async def test_one_answer_for_each_result_of_ours_under_the_base_request(node, until):
    answers = await node.prepare(two_requests(node))
    claim = "dra.k8s.io/cpu=claim-a"
    assert [(answer.request_names, answer.device, answer.share_id, answer.cdi_ids) for answer in answers] == [
        (("wide",), "cpudevnuma000", "one", (claim, "dra.cpu/metadata=a_wide")),
        (("wide",), "cpudevnuma001", "two", (claim,)),
        (("small",), "cpudevnuma000", None, (claim, "dra.cpu/metadata=a_small")),
    ]
    assert node.agreed() == {"a": "2-3,9,32-34"}
    assert {request: str(cpus) for request, cpus in node.ledger.records["a"].by_request.items()} == {
        "wide": "2-3,32-34",
        "small/one": "9",
    }
    await until(lambda: "a" in node.claims.applied)
    assert [entry["data"] for entry in node.claims.applied["a"]] == [
        {"cpuset": "2-3"},
        {"cpuset": "32-34"},
        {"cpuset": "9"},
    ]


async def test_a_claim_with_nothing_of_ours_succeeds_with_no_device(node):
    assert await node.prepare(node.claims.put("a", [{"request": "r", "driver": "gpu"}], [])) == ()
    assert await node.prepare(node.claims.put("b", [], [])) == ()
    assert node.agreed() == {}
    assert list(node.records_folder.iterdir()) == list(node.cdi_folder.iterdir()) == []


async def test_a_status_that_is_right_already_is_not_written_again(node, until):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    await until(lambda: "a" in node.claims.applied)
    node.claims.objects["default", "claim-a"]["status"]["devices"] = node.claims.applied.pop("a")
    await node.prepare(reference)
    assert node.status.waiting == 0
    del node.claims.objects["default", "claim-a"]["status"]["devices"]
    await node.prepare(reference)
    await until(lambda: "a" in node.claims.applied)


async def test_what_was_decided_is_logged_under_the_claims_name(node, caplog):
    caplog.set_level(logging.INFO)
    await node.prepare(node.claims.add("a", "2-5"))
    (line,) = [line for line in caplog.records if line.message == "claim prepared"]
    assert {key: str(value) for key, value in line.fields.items()} == {"cpus": "2-5", "devices": "cpudevnuma000:4"}


# Rule 1: the claim


async def test_a_claim_made_again_under_its_name_is_refused(node):
    node.claims.add("a", "2-5")
    stale = ClaimReference(uid=ClaimUID("b"), namespace="default", name="claim-a")
    with pytest.raises(ClaimError, match="has UID 'a', not b"):
        await node.prepare(stale)
    assert node.agreed() == {}
    assert node.metric("prepare_claims_total", result="error") == 1


async def test_a_claim_without_allocation_is_refused(node):
    reference = node.claims.add("a", "2-5")
    del node.claims.objects["default", "claim-a"]["status"]
    with pytest.raises(ClaimError, match="no allocation"):
        await node.prepare(reference)


async def test_a_claim_that_is_gone_is_refused_at_once(node):
    node.wait_s = 10.0
    node.start()
    with pytest.raises(ClaimError, match="claim default/gone does not exist"):
        await node.prepare(ClaimReference(uid=ClaimUID("a"), namespace="default", name="gone"))
    assert len(node.claims.gets) == 1


@pytest.mark.parametrize("status", [0, 401, 403, 429, 500, 503])
async def test_failures_of_the_api_that_may_pass_are_waited_for(node, status):
    node.wait_s = 10.0
    node.start()
    node.claims.failures = [ApiError(status, "for now")]
    await node.prepare(node.claims.add("a", "2-5"))
    assert len(node.claims.gets) == 2
    assert node.agreed() == {"a": "2-5"}


async def test_failures_of_the_api_that_go_on_are_the_answer(node):
    node.wait_s = 0.5
    node.start()
    node.claims.failures = [ApiError(503, "out of order")] * 100
    with pytest.raises(ClaimPendingError, match=r"cannot read the claim for 0\.5 s: out of order"):
        await node.prepare(node.claims.add("a", "2-5"))
    assert 2 <= len(node.claims.gets) <= 4
    assert node.agreed() == {}


async def test_failures_of_the_api_that_stay_are_the_answer_at_once(node):
    node.wait_s = 10.0
    node.start()
    node.claims.failures = [ApiError(400, "makes no sense")]
    with pytest.raises(ClaimError, match="cannot read the claim: makes no sense"):
        await node.prepare(node.claims.add("a", "2-5"))
    assert len(node.claims.gets) == 1


# Rule 7: prepared already


async def test_the_same_again_is_answered_the_same_and_writes_nothing(node, disk):
    reference = node.claims.add("a", "2-5")
    first = await node.prepare(reference)
    disk.calls.clear()
    assert await node.prepare(reference) == first
    assert {operation for operation, _ in disk.calls} <= {"read", "fsync", "mkdir"}
    # Another spelling of the same.
    assert await node.prepare(node.claims.add("a", "5,2-4,2")) == first
    assert node.metric("claim_allocated_cpus_count") == 1


@pytest.mark.parametrize("lost", ["record", "spec", "metadata", "all"])
async def test_what_was_lost_is_written_again(node, lost):
    reference = node.claims.add("a", "2-5")
    first = await node.prepare(reference)
    metadata = node.metadata_files()
    if lost in ("record", "all"):
        (node.records_folder / "a.json").unlink()
    if lost in ("spec", "all"):
        (node.cdi_folder / "dra.k8s.io-cpu_claim-a.json").write_text("{")
    if lost in ("metadata", "all"):
        (node.metadata_folder / "a_cpus.json").unlink()
        (node.cdi_folder / "dra.cpu_metadata_a_cpus.json").unlink()
    assert await node.prepare(reference) == first
    assert node.agreed() == {"a": "2-5"}
    assert node.metadata_files() == metadata


CHANGED = {
    "other CPUs": {"cpuset": "6-9"},
    "fewer CPUs": {"cpuset": "2-4"},
    "another device": {"cpuset": "2-5", "device": "cpudevnuma001"},
    "another share": {"cpuset": "2-5", "changes": {"shareID": "other"}},
    "a wrong count": {"cpuset": "2-5", "count": 9},
    "a missing count": {"cpuset": "2-5", "changes": {"consumedCapacity": {}}},
    "another pool": {"cpuset": "2-5", "changes": {"pool": "node-2"}},
    "a cpuset that is none": {"cpuset": "5-2", "count": 4},
    "reserved CPUs": {"cpuset": "0-3"},
}


@pytest.mark.parametrize("name", CHANGED)
async def test_another_allocation_of_a_prepared_claim_is_refused_before_all_else(node, name):
    first = await node.prepare(node.claims.add("a", "2-5"))
    with pytest.raises(ClaimError, match="is prepared with CPUs 2-5 for another allocation than it has now"):
        await node.prepare(node.claims.add("a", **CHANGED[name]))
    assert node.agreed() == {"a": "2-5"}
    assert await node.prepare(node.claims.add("a", "2-5")) == first


async def test_a_prepared_claim_that_has_nothing_of_ours_any_more_is_refused(node):
    await node.prepare(node.claims.add("a", "2-5"))
    with pytest.raises(ClaimError, match="for another allocation than it has now"):
        await node.prepare(node.claims.put("a", [], []))
    assert node.agreed() == {"a": "2-5"}


# Rules 2-4 are the allocator's; here only that a refusal leaves nothing behind


@pytest.mark.parametrize(
    ("cpuset", "more"),
    [("0-3", {}), ("30-33", {}), ("2-5", {"count": 3}), ("2-5", {"device": "cpudevnuma009"}), ("100", {})],
)
async def test_a_refusal_leaves_nothing_behind(node, cpuset, more):
    with pytest.raises(ClaimError):
        await node.prepare(node.claims.add("a", cpuset, **more))
    assert node.agreed() == {}
    assert node.metadata_files() == []
    await node.prepare(node.claims.add("a", "2-5"))
    assert node.agreed() == {"a": "2-5"}


# Rule 9: waiting for CPUs


async def test_cpus_of_another_claim_are_waited_for(node, until, caplog):
    caplog.set_level(logging.INFO)
    node.wait_s = 10.0
    node.start()
    a, b = node.claims.add("a", "2-5"), node.claims.add("b", "5-6")
    await node.prepare(a)
    waiting = asyncio.create_task(node.prepare(b))
    await until(lambda: "waiting for CPUs" in caplog.text)
    await node.prepare(node.claims.add("c", "7"))  # a change that does not help
    assert not waiting.done()
    await node.unprepare(a)
    await waiting
    assert node.agreed() == {"b": "5-6", "c": "7"}
    assert caplog.text.count("waiting for CPUs") == 1


async def test_the_wait_ends_with_the_holder_named(node):
    node.wait_s = 0.05
    node.start()
    await node.prepare(node.claims.add("a", "2-5"))
    with pytest.raises(ClaimPendingError, match="CPU 5 is held by claim a"):
        await node.prepare(node.claims.add("b", "5-6"))
    assert node.agreed() == {"a": "2-5"}


async def test_an_undone_prepare_frees_its_cpus_for_one_that_waits(node, disk):
    node.wait_s = 10.0
    node.start()
    paused, go_on = disk.pause("write", "claims/.a.json")
    disk.fail("write", "claims/.a.json", errno.ENOSPC)
    first = asyncio.create_task(node.prepare(node.claims.add("a", "2-5")))
    await reached(paused)
    second = asyncio.create_task(node.prepare(node.claims.add("b", "2-5")))
    go_on.set()
    with pytest.raises(ClaimError, match=os.strerror(errno.ENOSPC)):
        await first
    await second
    assert node.agreed() == {"b": "2-5"}


async def test_other_claims_do_not_wait_for_one_that_does(node, disk):
    paused, go_on = disk.pause("fsync", "claims/.a.json")
    first = asyncio.create_task(node.prepare(node.claims.add("a", "2-5")))
    await reached(paused)
    await node.prepare(node.claims.add("b", "6"))
    await node.unprepare(node.claims.add("b", "6"))
    assert not first.done()
    go_on.set()
    await first


async def test_concurrent_calls_for_one_claim_are_one_after_the_other(node):
    reference = node.claims.add("a", "2-5")
    answers = await asyncio.gather(*(node.prepare(reference) for _ in range(8)))
    assert len(set(answers)) == 1
    assert node.metric("claim_allocated_cpus_count") == 1
    assert node.agreed() == {"a": "2-5"}
    gc.collect()
    assert len(node.preparer._locks) == 0


# Failures of the disk

PREPARE_STEPS = [
    ("open", "claims/.a.json"),
    ("write", "claims/.a.json"),
    ("fsync", "claims/.a.json"),
    ("rename", "claims/.a.json"),
    ("open", "dra.k8s.io-cpu_claim-a"),
    ("write", "dra.k8s.io-cpu_claim-a"),
    ("rename", "dra.k8s.io-cpu_claim-a"),
]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize(("operation", "part"), PREPARE_STEPS)
async def test_a_prepare_that_cannot_write_leaves_nothing(node, disk, operation, part, error):
    reference = node.claims.add("a", "2-5")
    disk.fail(operation, part, error)
    with pytest.raises(ClaimError, match=f"cannot write the claim's files: .*{os.strerror(error)}"):
        await node.prepare(reference)
    assert node.agreed() == {}
    assert [path.name for folder in (node.records_folder, node.cdi_folder) for path in folder.iterdir()] == []
    disk.repair()
    await node.prepare(reference)
    assert node.agreed() == {"a": "2-5"}


@pytest.mark.parametrize("folder", ["records_folder", "cdi_folder"])
async def test_a_folder_that_went_is_made_again_or_nothing_is_left(node, disk, folder):
    reference = node.claims.add("a", "2-5")
    getattr(node, folder).rmdir()
    disk.fail("mkdir", getattr(node, folder).name, errno.EACCES)
    with pytest.raises(ClaimError, match=os.strerror(errno.EACCES)):
        await node.prepare(reference)
    assert node.held() == {}
    disk.repair()
    await node.prepare(reference)
    assert node.agreed() == {"a": "2-5"}


async def test_a_record_that_is_not_durable_is_undone(node, disk):
    reference = node.claims.add("a", "2-5")
    disk.fail("fsync", "plugin/claims$", errno.EIO, times=1)
    with pytest.raises(ClaimError, match=os.strerror(errno.EIO)):
        await node.prepare(reference)
    assert node.agreed() == {}
    await node.prepare(reference)
    assert node.agreed() == {"a": "2-5"}


UNDO_STEPS = [("unlink", "dra.k8s.io-cpu_claim-a.json"), ("unlink", "claims/a.json"), ("fsync", "plugin/claims")]


@pytest.mark.parametrize(("operation", "part"), UNDO_STEPS)
@pytest.mark.parametrize("then", ["prepare", "unprepare", "restart"])
async def test_what_cannot_be_undone_stays_held(node, disk, caplog, operation, part, then):
    reference = node.claims.add("a", "2-5")
    paused, go_on = disk.pause("rename", "dra.k8s.io-cpu_claim-a")  # the record is written by now
    task = asyncio.create_task(node.prepare(reference))
    await reached(paused)
    disk.fail("rename", "dra.k8s.io-cpu_claim-a", errno.ENOSPC)
    disk.fail(operation, part, errno.EIO)
    go_on.set()
    with pytest.raises(ClaimError, match=os.strerror(errno.ENOSPC)):
        await task
    assert node.held() == {"a": "2-5"}
    assert "cannot undo, the CPUs stay held" in caplog.text
    with pytest.raises(ClaimPendingError, match="CPU 5 is held by claim a"):
        await node.prepare(node.claims.add("b", "5"))
    with pytest.raises(ClaimError):
        await node.prepare(reference)
    assert node.held() == {"a": "2-5"}
    disk.repair()
    if then == "unprepare":
        await node.unprepare(reference)
        assert node.agreed() == {}
        return
    if then == "restart":
        await node.restart()
        assert node.agreed() in ({}, {"a": "2-5"})
    await node.prepare(reference)
    assert node.agreed() == {"a": "2-5"}


async def test_metadata_that_cannot_be_written_stops_nothing(node, disk, caplog):
    disk.fail("write", "metadata", errno.ENOSPC)
    reference = node.claims.add("a", "2-5")
    (answer,) = await node.prepare(reference)
    assert answer.cdi_ids == ("dra.k8s.io/cpu=claim-a",)
    assert node.agreed() == {"a": "2-5"}
    assert "the claim gets no device metadata" in caplog.text
    disk.repair()
    (answer,) = await node.prepare(reference)
    assert answer.cdi_ids == ("dra.k8s.io/cpu=claim-a", "dra.cpu/metadata=a_cpus")


@pytest.mark.parametrize("part", ["claims/.a.json", "dra.k8s.io-cpu_claim-a"])
async def test_a_repeated_prepare_that_cannot_restore_is_an_error_and_keeps_the_cpus(node, disk, part):
    reference = node.claims.add("a", "2-5")
    first = await node.prepare(reference)
    (node.records_folder / "a.json").unlink()
    (node.cdi_folder / "dra.k8s.io-cpu_claim-a.json").unlink()
    disk.fail("write", part, errno.ENOSPC)
    with pytest.raises(ClaimError, match=r"the claim holds CPUs 2-5, but cannot write its files: .*No space"):
        await node.prepare(reference)
    assert node.held() == {"a": "2-5"}
    disk.repair()
    assert await node.prepare(reference) == first
    assert node.agreed() == {"a": "2-5"}


async def test_an_adopted_claim_whose_record_cannot_be_written_stays_adopted(node, disk):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    (node.records_folder / "a.json").unlink()
    await node.restart()
    disk.fail("write", "claims/", errno.ENOSPC)
    with pytest.raises(ClaimError, match="the claim holds CPUs 2-5, but cannot write its files"):
        await node.prepare(reference)
    assert node.ledger.records["a"].adopted
    disk.repair()
    await node.prepare(reference)
    assert not node.ledger.records["a"].adopted
    assert node.agreed() == {"a": "2-5"}


# Unprepare


async def test_unprepare_takes_everything_back(node):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    await node.unprepare(reference)
    assert node.agreed() == {}
    assert node.metadata_files() == []
    assert list(node.records_folder.iterdir()) == list(node.cdi_folder.iterdir()) == []
    await node.unprepare(reference)
    assert node.metric("unprepare_claims_total", result="success") == 2
    await node.prepare(node.claims.add("b", "2-5"))
    assert node.agreed() == {"b": "2-5"}


async def test_unprepare_asks_the_api_server_nothing(node):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    node.claims.objects.clear()
    node.claims.gets.clear()
    await node.unprepare(reference)
    assert node.claims.gets == []
    assert node.agreed() == {}


async def test_only_the_uid_counts_in_an_unprepare(node):
    await node.prepare(node.claims.add("a", "2-5"))
    await node.unprepare(ClaimReference(uid=ClaimUID("a"), namespace="elsewhere", name="other"))
    assert node.agreed() == {}
    assert node.metadata_files() == []


async def test_an_unprepare_under_the_name_of_another_claim_leaves_that_alone(node):
    await node.prepare(node.claims.add("a", "2-5"))
    await node.unprepare(ClaimReference(uid=ClaimUID("b"), namespace="default", name="claim-a"))
    assert node.agreed() == {"a": "2-5"}
    assert len(node.metadata_files()) == 2


async def test_an_unknown_claim_is_no_error_and_its_strays_go(node):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    node.start()  # one that has not looked at its files
    await node.unprepare(reference)
    assert node.agreed() == {}
    assert node.metadata_files() == []


UNPREPARE_STEPS = [
    ("unlink", "dra.k8s.io-cpu_claim-a"),
    ("fsync", "cdi"),
    ("unlink", "claims/a.json"),
    ("fsync", "claims"),
]


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize(("operation", "part"), UNPREPARE_STEPS)
async def test_what_cannot_be_removed_stays_held_until_it_can(node, disk, operation, part, error):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    disk.fail(operation, part, error)
    for _ in range(2):
        with pytest.raises(ClaimError, match=f"its CPUs 2-5 stay held: .*{os.strerror(error)}"):
            await node.unprepare(reference)
        assert node.held() == {"a": "2-5"}
    disk.repair()
    await node.unprepare(reference)
    assert node.agreed() == {}


@pytest.mark.parametrize(("operation", "part"), UNPREPARE_STEPS)
async def test_a_prepare_after_a_failed_unprepare_makes_it_whole_again(node, disk, operation, part):
    reference = node.claims.add("a", "2-5")
    first = await node.prepare(reference)
    disk.fail(operation, part, errno.EIO)
    with pytest.raises(ClaimError):
        await node.unprepare(reference)
    disk.repair()
    assert await node.prepare(reference) == first
    assert node.agreed() == {"a": "2-5"}


async def test_a_stray_spec_that_cannot_be_removed_is_an_error(node, disk):
    disk.fail("unlink", "dra.k8s.io-cpu_claim-a", errno.EROFS)
    with pytest.raises(ClaimError, match=r"it holds no CPUs: .*Read-only"):
        await node.unprepare(node.claims.add("a", "2-5"))


async def test_metadata_that_cannot_be_removed_stops_nothing(node, disk):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    disk.fail("unlink", "metadata", errno.EROFS)
    await node.unprepare(reference)
    assert node.agreed() == {}
    disk.repair()
    await node.restart()
    assert node.metadata_files() == []


async def test_the_status_of_an_unprepared_claim_is_not_written(node):
    node.claims.may_apply.clear()
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    assert node.status.waiting == 1
    await node.unprepare(reference)
    assert node.status.waiting == 0
    node.claims.may_apply.set()
    await turns()
    assert node.claims.applied == {}


# Cancelled calls


async def test_a_call_cancelled_while_it_waits_for_cpus_holds_nothing(node, until, caplog):
    caplog.set_level(logging.INFO)
    node.wait_s = 10.0
    node.start()
    await node.prepare(node.claims.add("a", "2-5"))
    waiting = asyncio.create_task(node.prepare(node.claims.add("b", "5-6")))
    await until(lambda: "waiting for CPUs" in caplog.text)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert node.agreed() == {"a": "2-5"}
    assert node.metric("prepare_claims_total", result="unknown") == 1


@pytest.mark.parametrize(("operation", "part"), [*PREPARE_STEPS, ("rename", "a_cpus.json")])
async def test_a_prepare_cancelled_while_it_writes_is_finished_before_the_next_begins(node, disk, operation, part):
    reference = node.claims.add("a", "2-5")
    paused, go_on = disk.pause(operation, part)
    cancelled = asyncio.create_task(node.prepare(reference))
    await reached(paused)
    cancelled.cancel()
    retry = asyncio.create_task(node.prepare(reference))
    await turns()  # the retry gets its chance to see what is half made
    assert not retry.done()
    assert not cancelled.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert len(await retry) == 1
    assert node.agreed() == {"a": "2-5"}
    assert node.metric("claim_allocated_cpus_count") == 1


@pytest.mark.parametrize(("operation", "part"), UNPREPARE_STEPS)
async def test_an_unprepare_cancelled_while_it_removes_is_finished_before_the_next_begins(node, disk, operation, part):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    paused, go_on = disk.pause(operation, part)
    cancelled = asyncio.create_task(node.unprepare(reference))
    await reached(paused)
    cancelled.cancel()
    again = asyncio.create_task(node.prepare(reference))
    await turns()
    assert not again.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await again
    assert node.agreed() == {"a": "2-5"}


async def test_a_cancelled_prepare_that_fails_is_undone(node, disk):
    reference = node.claims.add("a", "2-5")
    paused, go_on = disk.pause("write", "dra.k8s.io-cpu_claim-a")
    disk.fail("write", "dra.k8s.io-cpu_claim-a", errno.ENOSPC)
    cancelled = asyncio.create_task(node.prepare(reference))
    await reached(paused)
    cancelled.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert node.agreed() == {}


# Many claims at once


async def test_no_cpu_has_two_holders_at_any_moment(node, monkeypatch):
    chance = random.Random(7)
    node.wait_s = 5.0
    node.start()
    references = []
    for number in range(60):
        first = chance.randrange(2, 28)
        references.append(node.claims.add(f"c{number}", f"{first}-{first + chance.randrange(4)}"))
    changes = []

    def watch(method: str) -> None:
        change = getattr(node.ledger, method)

        def watched(argument: object) -> None:
            change(argument)
            changes.append(method)
            held = [cpu for record in node.ledger.records.values() for cpu in record.cpus]
            assert len(held) == len(set(held))
            assert CpuSet(held) == node.pool.taken

        monkeypatch.setattr(node.ledger, method, watched)

    async def live(reference: ClaimReference) -> None:
        answers = await asyncio.gather(node.prepare(reference), node.prepare(reference))
        assert answers[0] == answers[1]
        assert reference.uid in node.held()
        await node.unprepare(reference)

    watch("hold")
    watch("release")
    await asyncio.gather(*(live(reference) for reference in references))
    assert sorted(changes) == ["hold"] * 60 + ["release"] * 60
    assert node.agreed() == {}


@pytest.mark.parametrize("seed", range(8))
async def test_any_sequence_with_failures_and_restarts_keeps_what_was_promised(node, disk, seed):
    """What was answered as prepared is held until somebody unprepares it, whatever fails."""
    chance = random.Random(seed)
    references = {
        uid: node.claims.add(uid, cpus)
        for uid, cpus in {"a": "2-5", "b": "5-7", "c": "8", "d": "9-12", "e": "12", "f": "2"}.items()
    }
    promised: dict[str, str] = {}
    for _ in range(60):
        disk.repair()
        if chance.random() < 0.5:
            operation = chance.choice(["open", "write", "fsync", "rename", "unlink", "mkdir", "read"])
            part = chance.choice(["", "claims", "cdi", "metadata"])
            disk.fail(
                operation, part, chance.choice([errno.EIO, errno.ENOSPC, errno.EACCES]), times=chance.choice([1, 2, 9])
            )
        uid = chance.choice(list(references))
        action = chance.choice(["prepare", "prepare", "unprepare", "restart"])
        try:
            if action == "prepare":
                await node.prepare(references[uid])
                promised[uid] = node.held()[uid]
            elif action == "unprepare":
                # Half unprepared it is held for now, but whether its files are there after a restart is open.
                is_held = uid in promised
                promised.pop(uid, None)
                await node.unprepare(references[uid])
                is_held = False
            else:
                disk.repair()
                await node.restart()
                node.agreed()
        except ClaimError:
            assert action != "unprepare" or not is_held or uid in node.held()
        held = node.held()
        assert promised.items() <= held.items()
        assert sum(len(record.cpus) for record in node.ledger.records.values()) == len(node.pool.taken)
    disk.repair()
    await node.restart()
    assert promised.items() <= node.agreed().items()
    for reference in references.values():
        await node.unprepare(reference)
    assert node.agreed() == {}
    assert node.metadata_files() == []
