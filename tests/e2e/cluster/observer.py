# SPDX-License-Identifier: Apache-2.0
"""Watches from outside, all the time, that every process is where claims let it be.

It knows claims from the API server and processes from the kernel, and nothing from the driver. Two things hold always,
with the driver alive, killed or replaced: a process of a claim runs on exactly the claim's CPUs, and no two claims'
processes run on the same CPU. A process without a claim keeps off the CPUs of claims as long as the driver is there;
what starts or changes while it is away is put right once it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import aiohttp

from driver.names import DRIVER_NAME
from e2e import kernel
from e2e.cluster.api import CLAIMS, JsonObject
from e2e.cluster.cluster import Cluster
from e2e.cluster.deployment import VARIABLE
from e2e.cluster.workloads import CLAIM_VARIABLE
from fastcpu import CpuSet

_PERIOD_S = 0.05
# A start that begins before the driver is back and whose end it does not hear of counts as over after five seconds.
_SETTLED_AFTER_S = 30.0
_SHOWN = 5
_CLAIM = f"{CLAIM_VARIABLE}=".encode()


@dataclass(frozen=True, slots=True)
class Process:
    """A process of an image, as it was seen.

    Attributes
    ----------
    pid : int
    claim : str
        Its claim's name, empty if it has none.
    allowed : CpuSet
        Where it may run.
    """

    pid: int
    claim: str
    allowed: CpuSet

    def lives(self) -> bool:
        """Tell whether it still runs; one that has ended but was not waited for does not."""
        try:
            Path(f"/proc/{self.pid}/exe").readlink()
        except OSError:
            return False
        return True


class Observer:
    """Looks many times a second.

    Parameters
    ----------
    cluster : Cluster
    claims : mapping of str to CpuSet
        The CPUs of claims of which the API server does not tell them.

    Attributes
    ----------
    settled : bool
        Whether processes without a claim must keep off the CPUs of claims now.
    faults : list of str
        What must not be.
    samples, seen : int
        How often it has looked, and how many processes of claims it has seen.
    """

    def __init__(self, cluster: Cluster, claims: Mapping[str, CpuSet]) -> None:
        self._cluster = cluster
        self._cgroups = kernel.cgroups(cluster.node.containerd.cgroup_parent)
        self._claims = dict(claims)
        self.settled = False
        self.faults: list[str] = []
        self.samples = self.seen = 0

    @classmethod
    @asynccontextmanager
    async def watching(
        cls, cluster: Cluster, claims: Mapping[str, CpuSet] = MappingProxyType({})
    ) -> AsyncIterator[Observer]:
        """Watch until the end of the context, and insist on what must hold.

        Raises
        ------
        AssertionError
            At the end, with the first faults, if there were any, or if nothing was seen.
        """
        observer = cls(cluster, claims)
        task = asyncio.create_task(observer._run())
        try:
            yield observer
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert not observer.faults, "\n".join(observer.faults[:_SHOWN])
        assert observer.seen, "not a single process of a claim was seen"

    def disturb(self) -> None:
        """Do not insist any more that processes without a claim keep off the CPUs of claims."""
        self.settled = False

    async def settle(self) -> None:
        """Wait until all keep off, and insist on that from now on."""

        async def settled() -> bool:
            await self._learn()
            return not self._strangers(self.processes())

        await self._cluster.until(settled, "nobody is on CPUs of others", _SETTLED_AFTER_S)
        self.settled = True

    def learn(self, claim: JsonObject) -> None:
        """Take note of the CPUs of a claim as the API server has it, if it tells them."""
        if (cpus := _cpus(claim)) is not None:
            self._claims[claim["metadata"]["name"]] = cpus

    def processes(self) -> list[Process]:
        """Return the processes of all images but sandboxes'; those of claims were looked at before the others."""
        found = []
        for pid, _ in kernel.processes(self._cgroups):
            # It may end while it is looked at.
            with suppress(OSError):
                claim = _claim_in(Path(f"/proc/{pid}/environ").read_bytes())
                if claim is not None:
                    found.append((pid, claim))
        processes = []
        for pid, claim in sorted(found, key=lambda one: not one[1]):
            with suppress(OSError):
                processes.append(Process(pid, claim, kernel.allowed(pid)))
        return processes

    async def _run(self) -> None:
        while True:
            with suppress(aiohttp.ClientError):
                await self._learn()
            self._check()
            await asyncio.sleep(_PERIOD_S)

    async def _learn(self) -> None:
        """Read claims that are new."""
        if any(each.claim and each.claim not in self._claims for each in self.processes()):
            for claim in await self._cluster.api.list(CLAIMS):
                self.learn(claim)

    def _check(self) -> None:
        # Nothing else happens in this process meanwhile.
        processes = self.processes()
        self.samples += 1
        claimed = [each for each in processes if each.claim in self._claims]
        self.seen += len(claimed)
        for each in claimed:
            if each.allowed != self._claims[each.claim]:
                self.faults.append(f"{each} is not on {self._claims[each.claim]}")
        for one in claimed:
            for other in claimed:
                if one.claim < other.claim and not one.allowed.isdisjoint(other.allowed):
                    self.faults.append(f"{one} and {other} are on the same CPUs")
        if self.settled:
            self.faults += self._strangers(processes)

    def _strangers(self, processes: list[Process]) -> list[str]:
        """Return who is on CPUs of a claim without having one, while a process of the claim runs."""
        # Those that run now ran when the others were looked at.
        holders = [each for each in processes if each.claim in self._claims and each.lives()]
        return [
            f"{each} is on CPUs {self._claims[holder.claim]} of {holder}"
            for each in processes
            for holder in holders
            if not each.claim and not each.allowed.isdisjoint(self._claims[holder.claim])
        ]


def _claim_in(environment: bytes) -> str | None:
    """Return the name of a process's claim, empty if it has none; None if the process is of no image that matters."""
    for variable in environment.split(b"\0"):
        if variable.startswith(_CLAIM):
            return variable.removeprefix(_CLAIM).decode()
        if variable.startswith(VARIABLE):
            return ""
    return None


def _cpus(claim: JsonObject) -> CpuSet | None:
    """Return the CPUs that a claim asks for, or that the driver says it has chosen; None if there are none yet."""
    status = claim.get("status", {})
    for devices in (claim["spec"]["devices"], status.get("allocation", {}).get("devices", {})):
        for config in devices.get("config", ()):
            if config["opaque"]["driver"] == DRIVER_NAME:
                return CpuSet.parse(config["opaque"]["parameters"]["cpuConfig"]["cpuset"])
    chosen = [device["data"]["cpuset"] for device in status.get("devices", ()) if device["driver"] == DRIVER_NAME]
    return CpuSet().union(*map(CpuSet.parse, chosen)) if chosen else None
