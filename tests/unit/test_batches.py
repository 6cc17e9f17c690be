# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from driver.batches import Batches, each


class Work:
    """Doubles numbers; refuses odd ones; can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, numbers):
        self.batches.append(list(numbers))
        self.begun.set()
        assert self.may_end.wait(60)
        return each(self._one)(numbers)

    def _one(self, number: int) -> int:
        if number % 2:
            raise ValueError(number)
        return 2 * number


async def begun(work):
    await asyncio.to_thread(work.begun.wait, 60)
    work.begun.clear()


async def test_what_is_asked_for_at_once_is_done_at_once_and_failures_are_single():
    work = Work()
    batches = Batches(work)
    results = await asyncio.gather(*(batches.do(number) for number in (2, 3, 4)), return_exceptions=True)
    assert results[0::2] == [4, 8]
    assert repr(results[1]) == "ValueError(3)"
    assert work.batches == [[2, 3, 4]]
    assert await batches.do(6) == 12
    assert work.batches == [[2, 3, 4], [6]]


async def test_what_comes_meanwhile_is_done_together_afterwards():
    work = Work()
    batches = Batches(work)
    work.may_end.clear()
    first = asyncio.create_task(batches.do(0))
    await begun(work)
    others = [asyncio.create_task(batches.do(number)) for number in (2, 4, 6)]
    await asyncio.sleep(0)
    work.may_end.set()
    assert await first == 0
    assert await asyncio.gather(*others) == [4, 8, 12]
    assert work.batches == [[0], [2, 4, 6]]


async def test_who_is_cancelled_has_it_done_all_the_same_and_harms_nobody():
    work = Work()
    batches = Batches(work)
    work.may_end.clear()
    first = asyncio.create_task(batches.do(0))
    await begun(work)
    cancelled, other = asyncio.create_task(batches.do(2)), asyncio.create_task(batches.do(4))
    await asyncio.sleep(0)
    first.cancel()
    cancelled.cancel()
    work.may_end.set()
    assert await other == 8
    assert work.batches == [[0], [2, 4]]
    assert first.cancelled()
    assert cancelled.cancelled()


async def test_a_batch_that_fails_as_a_whole_fails_each_and_not_the_next():
    def work(numbers):
        if 1 in numbers:
            raise OSError("no disk")
        return numbers

    batches = Batches(work)
    results = await asyncio.gather(batches.do(1), batches.do(2), return_exceptions=True)
    assert [str(result) for result in results] == ["no disk", "no disk"]
    assert await batches.do(2) == 2


async def test_nobody_waits_for_a_batch_that_takes_its_time():
    work = Work()
    batches = Batches(work)
    work.may_end.clear()
    stuck = asyncio.create_task(batches.do(0))
    await begun(work)
    other = asyncio.create_task(batches.do(2))
    # It begins although the first has not ended, and would not before this.
    await begun(work)
    assert not stuck.done()
    work.may_end.set()
    assert await other == 4
    assert await stuck == 0
    assert work.batches == [[0], [2]]
    assert await batches.do(6) == 12


async def test_what_the_threads_do_not_take_fails_at_once():
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    batches = Batches(Work())
    assert await batches.do(2) == 4
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await batches.do(2)
