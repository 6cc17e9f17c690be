# SPDX-License-Identifier: Apache-2.0
"""When preparing claims asks the runtime for what, and what becomes of a claim when the runtime will not."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from driver.errors import ClaimError, RuntimePendingError
from driver.names import ClaimUID
from driver.runtime import NoRuntime
from fastcpu import CpuSet


class Runtime:
    """Notes what it is asked for, with what was held, recorded and specified then; does not want what it is told to."""

    def __init__(self, node) -> None:
        self.node = node
        self.asked: list[tuple[str, object, dict[str, str], dict[str, str], dict[str, str]]] = []
        self.unwilling: dict[str, Exception] = {}
        self.shut: list[tuple[str, str]] = []
        self.open_again: list[str] = []
        self.deadlines: list[float] = []
        self.known = True
        self.clear = False
        self.changed = asyncio.Event()

    def _ask(self, what: str, about: object) -> None:
        node = self.node
        self.asked.append((what, about, node.held(), node.recorded(), node.specified()))
        if what in self.unwilling:
            raise self.unwilling[what]

    def steps(self) -> list[str]:
        return [what for what, *_ in self.asked]

    def state_at(self, what: str) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        return next((held, recorded, specified) for step, _, held, recorded, specified in self.asked if step == what)

    def change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def admit(self, cpus: CpuSet) -> None:
        self._ask("admit", str(cpus))

    def learn(self, uid: ClaimUID, claim: object) -> None:
        self._ask("learn", uid)

    def is_clear(self, record) -> bool:
        return self.clear

    async def confirm(self, record, deadline: float) -> None:
        self.deadlines.append(deadline)
        await asyncio.sleep(0)
        self._ask("confirm", record.uid)

    async def unused(self, uid: ClaimUID, deadline: float) -> None:
        self.deadlines.append(deadline)
        await asyncio.sleep(0)
        self._ask("unused", uid)

    @contextmanager
    def barred(self, uid: ClaimUID, why: str) -> Iterator[None]:
        self.shut.append((uid, why))
        try:
            yield
        finally:
            self.open_again.append(uid)

    def released(self, uid: ClaimUID) -> None:
        self._ask("released", uid)

    def spare(self, record) -> None:
        self._ask("spare", record.uid)


@pytest.fixture
async def runtime(node) -> Runtime:
    """The runtime of `node`."""
    node.runtime = Runtime(node)
    await node.restart()
    return node.runtime


A = {"a": "2-5"}


async def test_others_are_moved_away_when_there_is_a_record_and_before_there_is_a_spec(node, runtime):
    await node.prepare(node.claims.add("a", "2-5"))
    assert runtime.steps() == ["admit", "learn", "confirm"]
    assert runtime.state_at("admit") == ({}, {}, {})
    assert runtime.state_at("confirm") == (A, A, {})
    assert runtime.shut == [("a", "is still being prepared")]
    assert runtime.open_again == ["a"]
    assert node.agreed() == A


async def test_where_nobody_is_to_be_moved_the_files_are_written_at_once_and_the_runtime_is_asked_again(node, runtime):
    runtime.clear = True
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    assert runtime.steps() == ["admit", "learn", "confirm"]
    assert runtime.state_at("confirm") == (A, A, A)
    assert runtime.open_again == ["a"]
    assert node.agreed() == A
    await node.unprepare(reference)
    runtime.unwilling["confirm"] = RuntimePendingError("a container has come back that has these CPUs")
    with pytest.raises(ClaimError, match="has come back"):
        await node.prepare(reference)
    assert node.agreed() == {}
    assert node.metadata_files() == []
    assert runtime.steps()[-2:] == ["released", "spare"]


async def test_a_claim_whose_record_cannot_be_written_gets_no_spec_beside_others_that_can(node, runtime, disk):
    runtime.clear = True
    disk.fail("rename", "/.b.json.", errno.ENOSPC)
    preparing = (node.prepare(node.claims.add(uid, cpus)) for uid, cpus in (("a", "2-5"), ("b", "6-7"), ("c", "8-9")))
    _, failed, _ = await asyncio.gather(*preparing, return_exceptions=True)
    assert "No space left" in str(failed)
    assert node.agreed() == {"a": "2-5", "c": "8-9"}


async def test_a_claim_whose_cpus_cannot_be_freed_holds_nothing_and_they_are_spared_for_the_retry(node, runtime):
    runtime.unwilling["confirm"] = RuntimePendingError("container c of pod p could not be moved away")
    reference = node.claims.add("a", "2-5")
    with pytest.raises(ClaimError, match="container c of pod p could not be moved away"):
        await node.prepare(reference)
    assert node.agreed() == {}
    assert runtime.steps() == ["admit", "learn", "confirm", "released", "spare"]
    assert runtime.open_again == ["a"]
    runtime.unwilling.clear()
    await node.prepare(reference)
    assert node.agreed() == A


async def test_a_disk_that_fails_after_others_were_moved_away_gives_them_their_cpus_back(node, runtime, disk):
    disk.fail("rename", "dra.k8s.io-cpu_claim-a", errno.ENOSPC)
    with pytest.raises(ClaimError, match="No space left"):
        await node.prepare(node.claims.add("a", "2-5"))
    assert node.agreed() == {}
    assert runtime.steps() == ["admit", "learn", "confirm", "released"]


async def test_cpus_that_others_cannot_do_without_are_waited_for_and_never_held(node, runtime, until):
    node.preparer._wait_s = 30.0
    runtime.unwilling["admit"] = RuntimePendingError("would leave no CPU")
    preparing = asyncio.create_task(node.prepare(node.claims.add("a", "2-5")))
    await until(lambda: runtime.asked)
    for _ in range(3):
        runtime.change()
        await until(lambda: runtime.steps()[-1] == "admit")
        assert node.held() == {}
    runtime.unwilling.clear()
    runtime.change()
    await preparing
    assert node.agreed() == A


async def test_changes_of_the_runtime_are_nothing_to_a_claim_that_waits_for_another(node, runtime, until):
    await node.prepare(node.claims.add("a", "2-5"))
    node.preparer._wait_s = 30.0
    chosen = []
    choose = node.preparer._allocator.choose
    node.preparer._allocator.choose = lambda *arguments: chosen.append(1) or choose(*arguments)
    waiting = asyncio.create_task(node.prepare(node.claims.add("b", "5-6")))
    await until(lambda: chosen)
    for _ in range(10):
        runtime.change()
        await asyncio.sleep(0)
    assert len(chosen) == 1
    await node.unprepare(node.claims.add("a", "2-5"))
    await waiting
    assert node.agreed() == {"b": "5-6"}


async def test_a_claim_that_is_prepared_again_is_confirmed_again_and_stays_held_whatever_comes_of_it(node, runtime):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    await node.prepare(reference)
    assert runtime.steps() == ["admit", "learn", "confirm", "learn", "confirm"]
    runtime.unwilling["confirm"] = RuntimePendingError("the container runtime is not connected")
    with pytest.raises(ClaimError, match="is not connected"):
        await node.prepare(reference)
    assert node.agreed() == A
    assert "released" not in runtime.steps()


async def test_a_claim_in_use_is_not_unprepared_and_no_container_may_come_meanwhile(node, runtime):
    reference = node.claims.add("a", "2-5")
    await node.prepare(reference)
    runtime.unwilling["unused"] = RuntimePendingError("container c of pod p has not ended")
    with pytest.raises(ClaimError, match="container c of pod p has not ended"):
        await node.unprepare(reference)
    assert node.agreed() == A
    assert runtime.shut[-1] == ("a", "is being unprepared")
    assert runtime.open_again == ["a", "a"]
    runtime.unwilling.clear()
    await node.unprepare(reference)
    assert node.agreed() == {}
    assert runtime.steps()[-2:] == ["unused", "released"]
    assert runtime.state_at("unused") == (A, A, A)
    assert runtime.asked[-1][2:] == ({}, {}, {})


async def test_an_unprepare_of_a_claim_that_holds_nothing_waits_for_nobody(node, runtime):
    await node.unprepare(node.claims.add("a", "2-5"))
    assert runtime.steps() == ["released"]


async def test_both_wait_as_long_as_there_is_time_for_the_call(node, runtime):
    node.preparer._wait_s = 7.0
    reference = node.claims.add("a", "2-5")
    before = asyncio.get_running_loop().time()
    await node.prepare(reference)
    await node.unprepare(reference)
    after = asyncio.get_running_loop().time()
    assert all(before + 7 <= deadline <= after + 7 for deadline in runtime.deadlines)
    assert len(runtime.deadlines) == 2


async def test_a_claim_is_released_without_being_asked_for_only_if_it_is_an_orphan_and_not_in_use(node, runtime):
    async def yes(record) -> bool:
        return True

    async def no(record) -> bool:
        return False

    assert not await node.preparer.release_if(ClaimUID("a"), yes)
    await node.prepare(node.claims.add("a", "2-5"))
    assert not await node.preparer.release_if(ClaimUID("a"), no)
    runtime.unwilling["unused"] = RuntimePendingError("in use")
    assert not await node.preparer.release_if(ClaimUID("a"), yes)
    assert node.agreed() == A
    assert runtime.deadlines[-1] <= asyncio.get_running_loop().time()
    runtime.unwilling.clear()
    assert await node.preparer.release_if(ClaimUID("a"), yes)
    assert node.agreed() == {}
    assert node.metadata_files() == []


async def test_without_enforcement_nothing_is_asked_and_nothing_is_known(make_record):
    runtime = NoRuntime()
    runtime.admit(CpuSet(range(64)))
    runtime.learn(ClaimUID("a"), {})
    assert runtime.is_clear(make_record("a"))
    await runtime.confirm(make_record("a"), 0.0)
    await runtime.unused(ClaimUID("a"), 0.0)
    with runtime.barred(ClaimUID("a"), "is gone"):
        runtime.released(ClaimUID("a"))
    runtime.spare(make_record("a"))
    assert not runtime.known
    assert not runtime.changed.is_set()
