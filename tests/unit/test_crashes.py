# SPDX-License-Identifier: Apache-2.0
"""Kill the driver before each single file operation of what it does, and start it again.

Whatever was done until then, the next driver makes the ledger, the records and the CDI specs agree, gives no CPU to two
claims, and answers the kubelet's retry. Whole processes are killed in the integration tests; here every boundary is.
"""

from __future__ import annotations

import json
from contextlib import suppress

import pytest


@pytest.fixture(params=["external", "cpumanager"])
async def node(node, request):
    """A node whose claims name their CPUs, and one whose driver chooses them: the lowest here, which are the same."""
    if request.param == "cpumanager":
        node.let_the_driver_choose()
        await node.preparer.restore()
    return node


async def run_until_killed(node, disk, operations, work):
    """Run work in a process that dies after so many file operations; return whether it came to its end before."""
    disk.kill_after(operations)
    try:
        await work()
    except BaseException as error:
        if type(error).__name__ != "Killed":
            raise
        return False
    finally:
        disk.repair()
    return True


async def each_boundary(node, disk, set_up, work, check):
    """Kill the work after 0, 1, 2 … operations, until there are enough of them for it to end."""
    for operations in range(1000):
        await set_up()
        finished = await run_until_killed(node, disk, operations, work)
        await node.restart()
        await check(finished)
        if finished:
            assert operations > 5
            return
    raise AssertionError("the work never ends")


async def clean(node):
    for uid in list(node.ledger.records):
        await node.unprepare(node.claims.add(uid, "2-5"))
    assert node.agreed() == {}


async def test_a_crash_in_a_prepare(node, disk):
    reference = node.claims.add("a", "2-5")
    seen = set()

    async def check(finished: bool) -> None:
        held = node.agreed()
        assert held in ({}, {"a": "2-5"})
        assert held or not finished
        seen.add(bool(held))
        # The kubelet asks again, or it has heard meanwhile that the pod is gone.
        answers = await node.prepare(reference)
        assert [answer.device for answer in answers] == ["cpudevnuma000"]
        assert node.agreed() == {"a": "2-5"}
        assert len(node.metadata_files()) == 2
        await node.restart()
        assert await node.prepare(reference) == answers

    await each_boundary(node, disk, lambda: clean(node), lambda: node.prepare(reference), check)
    assert seen == {False, True}


async def test_a_crash_in_a_prepare_of_a_claim_that_is_unprepared_next(node, disk):
    reference = node.claims.add("a", "2-5")

    async def check(finished: bool) -> None:
        await node.unprepare(reference)
        assert node.agreed() == {}
        assert node.metadata_files() == []
        await node.prepare(node.claims.add("b", "2-5"))
        assert node.agreed() == {"b": "2-5"}

    await each_boundary(node, disk, lambda: clean(node), lambda: node.prepare(reference), check)


async def test_a_crash_in_an_unprepare(node, disk):
    reference = node.claims.add("a", "2-5")
    seen = set()

    async def check(finished: bool) -> None:
        held = node.agreed()
        assert held in ({}, {"a": "2-5"})
        assert not held or not finished
        seen.add(bool(held))
        await node.unprepare(reference)
        assert node.agreed() == {}
        assert node.metadata_files() == []

    await each_boundary(node, disk, lambda: node.prepare(reference), lambda: node.unprepare(reference), check)
    assert seen == {False, True}


async def test_a_crash_in_an_unprepare_of_a_claim_that_is_prepared_next(node, disk):
    reference = node.claims.add("a", "2-5")

    async def check(finished: bool) -> None:
        await node.prepare(reference)
        assert node.agreed() == {"a": "2-5"}

    await each_boundary(node, disk, lambda: node.prepare(reference), lambda: node.unprepare(reference), check)


@pytest.mark.parametrize("failing", ["write", "rename"])
async def test_a_crash_while_a_failed_prepare_is_undone(node, disk, failing):
    reference = node.claims.add("a", "2-5")

    async def work() -> None:
        disk.fail(failing, "dra.k8s.io-cpu_claim-a", 28)
        with suppress(Exception):
            await node.prepare(reference)

    async def check(finished: bool) -> None:
        held = node.agreed()
        assert held in ({}, {"a": "2-5"})
        assert not held or not finished
        await node.prepare(reference)
        assert node.agreed() == {"a": "2-5"}

    await each_boundary(node, disk, lambda: clean(node), work, check)


def put_shared_file(node):
    """Write what dra-driver-cpu 0.1 leaves: all claims in one file."""
    devices = [
        {"name": f"claim-{uid}", "containerEdits": {"env": [f"DRA_CPUSET_{uid}={cpulist}"]}}
        for uid, cpulist in {"a": "2-5", "b": "6"}.items()
    ]
    spec = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": devices}
    (node.cdi_folder / "dra.cpu.json").write_text(json.dumps(spec))


async def test_a_crash_while_claims_are_adopted(node, disk):
    reference = node.claims.add("a", "2-5")

    async def set_up() -> None:
        await clean(node)
        put_shared_file(node)

    async def work() -> None:
        node.start()
        await node.preparer.restore()

    async def check(finished: bool) -> None:
        assert node.agreed() == {"a": "2-5", "b": "6"}
        assert not (node.cdi_folder / "dra.cpu.json").exists()
        await node.prepare(reference)
        assert node.agreed() == {"a": "2-5", "b": "6"}

    await each_boundary(node, disk, set_up, work, check)


async def test_a_crash_while_an_adopted_claim_is_verified(node, disk):
    reference = node.claims.add("a", "2-5")

    async def set_up() -> None:
        await clean(node)
        put_shared_file(node)
        await node.restart()

    async def check(finished: bool) -> None:
        assert node.agreed() == {"a": "2-5", "b": "6"}
        assert not finished or not node.ledger.records["a"].adopted
        await node.prepare(reference)
        assert not node.ledger.records["a"].adopted

    await each_boundary(node, disk, set_up, lambda: node.prepare(reference), check)


async def test_a_crash_while_everything_is_restored_after_a_reboot(node, disk):
    references = [node.claims.add("a", "2-5"), node.claims.add("b", "6"), node.claims.add("c", "7")]

    async def set_up() -> None:
        for reference in references:
            await node.prepare(reference)
        for path in node.cdi_folder.iterdir():
            path.unlink()
        (node.records_folder / "c.json").write_text("{")

    async def work() -> None:
        node.start()
        await node.preparer.restore()

    async def check(finished: bool) -> None:
        assert node.agreed() == {"a": "2-5", "b": "6"}
        for reference in references:
            await node.prepare(reference)
        assert node.agreed() == {"a": "2-5", "b": "6", "c": "7"}

    await each_boundary(node, disk, set_up, work, check)
