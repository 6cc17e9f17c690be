# SPDX-License-Identifier: Apache-2.0
"""What is measured: starts, the latency of calls at a steady rate, and how much goes through at full speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from driver.sandbox.plugins import Plugin
from loadgenerator.apiserver import Api
from loadgenerator.claims import Checker, ClaimMaker, LoadClaim
from loadgenerator.node import DriverProcess


@dataclass(slots=True)
class Times:
    """How long calls of one kind took, in seconds."""

    seconds: list[float] = field(default_factory=list)

    async def measure(self, call: Awaitable[object]) -> object:
        """Await a call and take its time."""
        started = time.perf_counter()
        result = await call
        self.seconds.append(time.perf_counter() - started)
        return result

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile in milliseconds."""
        return float(np.percentile(self.seconds, percent)) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """What calls of one size took at a steady rate.

    Attributes
    ----------
    per_call : int
        Claims in each call.
    get, prepare, unprepare : Times
        Bare GETs of the claims of a call side by side; the calls.
    """

    per_call: int
    get: Times
    prepare: Times
    unprepare: Times

    @property
    def ratio(self) -> float:
        """The median prepare as a multiple of the median bare GET."""
        return self.prepare.percentile_ms(50) / self.get.percentile_ms(50)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What went through at full speed.

    Attributes
    ----------
    claims : int
        How many were prepared and unprepared.
    concurrency : int
        How many at the same time.
    hold_s : float
        How long each stayed prepared.
    per_second : float
        Claims prepared and unprepared in a second.
    cpu_ms : float
        CPU time of the driver for each claim, prepare and unprepare together.
    prepare, unprepare : Times
    """

    claims: int
    concurrency: int
    hold_s: float
    per_second: float
    cpu_ms: float
    prepare: Times
    unprepare: Times


class Load:
    """Load on one driver.

    Parameters
    ----------
    api : Api
    plugin : Plugin
        The driver as the kubelet has registered it.
    process : DriverProcess
    maker : ClaimMaker
    checker : Checker
    """

    def __init__(self, api: Api, plugin: Plugin, process: DriverProcess, maker: ClaimMaker, checker: Checker) -> None:
        self._api = api
        self._plugin = plugin
        self._process = process
        self._maker = maker
        self._checker = checker

    async def latency(self, per_call: int, calls: int, rate: float) -> Latency:
        """Fetch, prepare and unprepare claims at a rate at which no call waits for another.

        Each call has claims of its own. Fetching stands between the calls, so that all three see the same machine.

        Raises
        ------
        WrongAnswerError
        """
        claims = await self._maker.make(per_call * calls)
        times = Latency(per_call=per_call, get=Times(), prepare=Times(), unprepare=Times())
        pace = _Pace(rate)
        for start in range(0, len(claims), per_call):
            batch = claims[start : start + per_call]
            await pace.next()
            await times.get.measure(asyncio.gather(*(self._api.get_claim(claim.name.name) for claim in batch)))
            await pace.next()
            await self._prepare(batch, times.prepare)
            await pace.next()
            await self._unprepare(batch, times.unprepare)
        return times

    async def throughput(self, count: int, concurrency: int, hold_s: float) -> Throughput:
        """Prepare and unprepare claims as fast as the driver answers, one claim in a call.

        Raises
        ------
        WrongAnswerError
        """
        claims = await self._maker.make(count)
        prepare, unprepare = Times(), Times()

        async def worker() -> None:
            while claims:
                batch = [claims.pop()]
                await self._prepare(batch, prepare)
                await asyncio.sleep(hold_s)
                await self._unprepare(batch, unprepare)

        cpu_s, started = self._process.cpu_s, time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
        took = time.perf_counter() - started
        return Throughput(
            claims=count,
            concurrency=concurrency,
            hold_s=hold_s,
            per_second=count / took,
            cpu_ms=(self._process.cpu_s - cpu_s) / count * 1e3,
            prepare=prepare,
            unprepare=unprepare,
        )

    async def _prepare(self, batch: Sequence[LoadClaim], times: Times) -> None:
        answers = await self._call(self._plugin.prepare, batch, times)
        for claim in batch:
            self._checker.prepared(claim, answers[claim.name.uid])

    async def _unprepare(self, batch: Sequence[LoadClaim], times: Times) -> None:
        errors = await self._call(self._plugin.unprepare, batch, times)
        for claim in batch:
            self._checker.unprepared(claim, errors[claim.name.uid])

    @staticmethod
    async def _call(method: Callable, batch: Sequence[LoadClaim], times: Times):
        names = [(claim.name.namespace, claim.name.uid, claim.name.name) for claim in batch]
        return await times.measure(method(names))


class _Pace:
    """Moments at equal distances; one that is missed is not made up for."""

    def __init__(self, rate: float) -> None:
        self._interval_s = 1 / rate
        self._due = 0.0

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._due = max(self._due + self._interval_s, now)
        await asyncio.sleep(self._due - now)
