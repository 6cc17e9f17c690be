# SPDX-License-Identifier: Apache-2.0
"""Running a command of the sandbox so that it cleans up after itself, however it is asked to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Final

INTERRUPTED: Final = 130


def run_until_interrupted(work: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine to its end, or cancel it at the first SIGINT, SIGTERM or SIGHUP.

    Further signals change nothing: what the coroutine does on its way out must not be cut short.

    Returns
    -------
    int
        What the coroutine returned; 130 if it was interrupted.
    """

    async def guarded() -> int:
        task = asyncio.create_task(work)

        def interrupt() -> None:
            if not task.cancelling():
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, interrupt)
        try:
            return await task
        except asyncio.CancelledError:
            return INTERRUPTED

    return asyncio.run(guarded())
