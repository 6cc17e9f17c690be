# SPDX-License-Identifier: Apache-2.0
"""What programs say of themselves over HTTP."""

from __future__ import annotations

import aiohttp

_PREFIX = "dra_cpu_"


async def is_ok(url: str) -> bool:
    """Tell whether an address answers, with status 200."""
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(url) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


async def is_ready(url: str) -> bool:
    """Tell whether the driver at an address says that it is ready."""
    return await is_ok(f"{url}/readyz")


async def metrics(url: str) -> dict[str, float]:
    """Return all metrics of the driver at an address, as `read_metrics` does."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        return read_metrics(await answer.text())


def read_metrics(text: str) -> dict[str, float]:
    """Return all metrics of the driver by name and labels as they are written, without their common prefix."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(_PREFIX)]
    return {name.removeprefix(_PREFIX): float(value) for name, value in lines}
