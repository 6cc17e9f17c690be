# SPDX-License-Identifier: Apache-2.0
"""Work on one claim, one after the other and to its end, and waiting for what it needs."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from driver.names import ClaimUID

_T = TypeVar("_T")


class ClaimLocks:
    """A lock for each claim that somebody works on; different claims never wait for each other."""

    def __init__(self) -> None:
        # A lock lives as long as somebody holds it or waits for it: each of them has it in a local variable.
        self._locks: WeakValueDictionary[ClaimUID, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._locks)

    @asynccontextmanager
    async def hold(self, uid: ClaimUID) -> AsyncIterator[None]:
        """Hold a claim's lock.

        Parameters
        ----------
        uid : ClaimUID
            The claim.
        """
        lock = self._locks.setdefault(uid, asyncio.Lock())
        async with lock:
            yield


def is_cancelled() -> bool:
    """Tell, where a task is interrupted, whether it is that itself, and not something that it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def any_of(events: Sequence[asyncio.Event], deadline: float) -> bool:
    """Wait until one of several events is set.

    Parameters
    ----------
    events : sequence of asyncio.Event
        The events.
    deadline : float
        Until when, in the event loop's time.

    Returns
    -------
    bool
        Whether one was.
    """
    loop = asyncio.get_running_loop()
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(
            waits, timeout=max(deadline - loop.time(), 0.0), return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)
    finally:
        for wait in waits:
            wait.cancel()


async def uninterrupted(work: Coroutine[Any, Any, _T]) -> _T:
    """Run something to its end, even if the caller is cancelled meanwhile.

    The caller waits for the end either way, so that whatever lock it holds is held until then; only after that it is
    cancelled.

    Parameters
    ----------
    work : coroutine
        What must not be left half done. If the caller is cancelled, it alone can report how it failed.

    Returns
    -------
    object
        What the work returns.
    """
    task = asyncio.create_task(work)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await _end_of(task)
        except asyncio.CancelledError as cancelled:
            interruption = cancelled
    if interruption is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # asyncio complains about one that nobody has looked at
    raise interruption


def _end_of(task: asyncio.Task[Any]) -> asyncio.Future[None]:
    """Return what is done when a task is, but may be cancelled without it; `asyncio.wait` does this and more."""
    ended = asyncio.get_running_loop().create_future()

    def end(_: asyncio.Task[Any]) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(end)
    return ended
