# SPDX-License-Identifier: Apache-2.0
"""Blocking work of many claims at once: what comes while a thread is busy is done together afterwards.

A thread for each piece of work would be no faster: Python runs one at a time, and to pass on that right costs more than
most pieces do. And what is synced to the disk together, the disk is asked for once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# A disk that takes longer for one claim may be quicker for the next.
_PATIENCE_S: Final = 0.1


class Batches(Generic[_Item, _Result]):
    """Has a function do things in a thread, one batch after the other.

    Nobody waits for long because of somebody else: while a batch takes its time, the next one begins.

    Parameters
    ----------
    work : callable
        Does some things and returns for each of them, in their order, what came of it, or the exception that did. What
        it raises itself came of all of them.
    """

    def __init__(self, work: Callable[[Sequence[_Item]], Sequence[_Result | Exception]]) -> None:
        self._work = work
        self._waiting: list[tuple[_Item, asyncio.Future[_Result]]] = []
        self._is_due = False
        self._patience: asyncio.TimerHandle | None = None

    async def do(self, item: _Item) -> _Result:
        """Have one thing done, as soon as the thread is free; it is done even if the caller is cancelled.

        Returns
        -------
        object
            What came of it; an exception is raised.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        self._waiting.append((item, future))
        if self._patience is None and not self._is_due:
            # When whoever is about to ask for something as well has done so.
            self._is_due = True
            loop.call_soon(self._begin, loop)
        return await future

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = False
        self._patience = None
        if not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        try:
            results = loop.run_in_executor(None, self._work, [item for item, _ in batch])
        except RuntimeError as error:  # the executor takes nothing any more
            results = loop.create_future()
            results.set_exception(error)
        patience = self._patience = loop.call_later(_PATIENCE_S, self._begin, loop)

        def finish(done: asyncio.Future[Sequence[_Result | Exception]]) -> None:
            _hand_out(batch, done)
            if self._patience is patience:
                patience.cancel()
                self._begin(loop)

        results.add_done_callback(finish)


def _hand_out(
    batch: Sequence[tuple[_Item, asyncio.Future[_Result]]], done: asyncio.Future[Sequence[_Result | Exception]]
) -> None:
    if done.cancelled():
        results: Sequence[_Result | BaseException] = [asyncio.CancelledError()] * len(batch)
    elif (error := done.exception()) is not None:
        results = [error] * len(batch)
    else:
        results = done.result()
    for (_, future), result in zip(batch, results, strict=True):
        if future.done():
            continue  # its caller was cancelled
        if isinstance(result, asyncio.CancelledError):
            future.cancel()
        elif isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def each(
    work: Callable[[_Item], _Result],
) -> Callable[[Sequence[_Item]], Sequence[_Result | Exception]]:
    """Make a batch's work of that for a single thing."""

    def one(item: _Item) -> _Result | Exception:
        try:
            return work(item)
        except Exception as error:
            return error

    return lambda items: [one(item) for item in items]
