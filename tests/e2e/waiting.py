# SPDX-License-Identifier: Apache-2.0
"""Waiting for what nobody tells."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float, *, pause_s: float) -> None:
    """Ask again and again until something holds.

    Parameters
    ----------
    condition : callable
    what : str
        What is waited for.
    timeout_s : float
    pause_s : float
        How long to wait before asking again, in seconds.

    Raises
    ------
    AssertionError
        If it does not happen.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise AssertionError(f"waited {timeout_s:g} s in vain: {what}") from None
