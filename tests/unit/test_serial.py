# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import gc

import pytest

from driver.names import ClaimUID
from driver.serial import ClaimLocks, any_of, uninterrupted

A, B = ClaimUID("a"), ClaimUID("b")


async def test_work_on_one_claim_is_done_one_after_the_other(until):
    locks, steps, gate = ClaimLocks(), [], asyncio.Event()

    async def work(name: str) -> None:
        async with locks.hold(A):
            steps.append(f"{name} begins")
            await gate.wait()
            steps.append(f"{name} ends")

    first, second = asyncio.create_task(work("first")), asyncio.create_task(work("second"))
    await until(lambda: steps)
    await asyncio.sleep(0)
    assert steps == ["first begins"]
    gate.set()
    await asyncio.gather(first, second)
    assert steps == ["first begins", "first ends", "second begins", "second ends"]


async def test_different_claims_do_not_wait_for_each_other():
    locks = ClaimLocks()
    async with asyncio.timeout(60), locks.hold(A), locks.hold(B):
        assert len(locks) == 2


async def test_no_lock_is_left_when_nobody_uses_it():
    locks = ClaimLocks()

    async def fail() -> None:
        async with locks.hold(A):
            raise ValueError

    async with locks.hold(B):
        waiting = asyncio.create_task(fail())
        cancelled = asyncio.create_task(fail())
        await asyncio.sleep(0)
        cancelled.cancel()
    for task in (waiting, cancelled):
        with pytest.raises((ValueError, asyncio.CancelledError)):
            await task
    del task, waiting, cancelled
    gc.collect()
    assert len(locks) == 0


async def test_a_cancelled_waiter_does_not_disturb_the_others():
    locks, entered = ClaimLocks(), []

    async def work(name: str) -> None:
        async with locks.hold(A):
            entered.append(name)

    async with locks.hold(A):
        cancelled, other = asyncio.create_task(work("cancelled")), asyncio.create_task(work("other"))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert entered == []
    await other
    assert entered == ["other"]


async def test_uninterrupted_work_returns_and_raises_as_it_is():
    async def fail() -> None:
        raise ValueError("reason")

    assert await uninterrupted(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(ValueError, match="reason"):
        await uninterrupted(fail())


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_waits_for_the_end_of_the_work(fails, until):
    steps, gate = [], asyncio.Event()

    async def work() -> None:
        steps.append("begins")
        await gate.wait()
        steps.append("ends")
        if fails:
            raise ValueError("only the work itself can tell")

    async def call() -> None:
        try:
            await uninterrupted(work())
        finally:
            steps.append("caller ends")

    caller = asyncio.create_task(call())
    await until(lambda: steps)
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert steps == ["begins"]
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert steps == ["begins", "ends", "caller ends"]


async def test_one_of_several_events_is_enough():
    one, other = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(any_of((one, other), loop.time() + 10))
    await asyncio.sleep(0)
    assert not waiting.done()
    other.set()
    assert await waiting
    assert await any_of((one, other), loop.time() - 1)
    assert not await any_of((one,), loop.time() + 0.01)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
