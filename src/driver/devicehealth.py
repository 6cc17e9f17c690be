# SPDX-License-Identifier: Apache-2.0
"""Whether the devices can be relied on: CPUs are online, pods may use them, the runtime holds containers to them.

A CPU that goes offline while it is free is withdrawn: it is given to nobody, and published no more. One that a claim
holds stays that claim's, and makes its device unhealthy, which the kubelet shows in the status of the pods that use the
device. Either is as before once the CPU is back. The same becomes of a CPU that is online, but that the cgroup of all
pods does not have: in cgroup v1 the kernel leaves it so after a CPU was offline, until somebody writes it back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from driver.health import PODS_CGROUP, RUNTIME
from driver.logs import fields
from driver.podlimit import PodLimit
from driver.wording import subject
from fastcpu import CpuSet
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.devices import DeviceModel
    from driver.health import Health
    from driver.hostcgroups import Limit
    from driver.ledger import Ledger
    from fastcpu.sysfs import FileTree

_log = logging.getLogger(__name__)

_ONLINE: Final = "/sys/devices/system/cpu/online"
_NOT_CONNECTED: Final = "the container runtime is not connected, so that no container can be held to its CPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """How a device is.

    Attributes
    ----------
    pool, device : str
        Which device.
    fault : str
        What is wrong with it; empty if nothing is.
    """

    pool: str
    device: str
    fault: str


class DeviceHealth:
    """Watches over the devices.

    Parameters
    ----------
    model : DeviceModel
        The devices.
    pool_name : str
        The name of their pool.
    tree : FileTree
        Where the kernel says which CPUs are online.
    health : Health
        Knows, as the condition ``runtime``, whether the runtime is connected; told what pods cannot use.
    ledger : Ledger
        Who holds which CPUs. Its pool is told which CPUs have gone offline.
    tell_pool : callable, optional
        Called when the pool has been told of other CPUs.
    withdraw : callable, optional
        Told which CPUs are not to be published, when that changes.
    limit : PodLimit, optional
        Told which CPUs pods cannot use.
    read_limit : callable, optional
        Returns what the cgroup of all pods has; None if that cannot be read.
    grace_s : float
        How long the runtime may be away before the devices are unhealthy, in seconds.
    interval_s : float
        How often to look, in seconds.
    clock : callable
        The present time in seconds.
    """

    def __init__(
        self,
        model: DeviceModel,
        pool_name: str,
        tree: FileTree,
        health: Health,
        ledger: Ledger,
        *,
        tell_pool: Callable[[], None] = lambda: None,
        withdraw: Callable[[CpuSet], None] = lambda cpus: None,
        limit: PodLimit | None = None,
        read_limit: Callable[[], Limit | None] = lambda: None,
        grace_s: float = 30.0,
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._pool_name = pool_name
        self._tree = tree
        self._health = health
        self._ledger = ledger
        self._tell_pool = tell_pool
        self._withdraw = withdraw
        self._withdrawn = CpuSet()
        self._limit = PodLimit() if limit is None else limit
        self._read_limit = read_limit
        self._lacking: CpuSet | None = None
        self._grace_s = grace_s
        self._interval_s = interval_s
        self._clock = clock
        self._away_since: float | None = None
        self._changed = asyncio.Event()
        self.closed = False
        self._states = self._look()

    @property
    def states(self) -> tuple[DeviceState, ...]:
        """How all devices are, in the order in which they are published."""
        return self._states

    @property
    def changed(self) -> asyncio.Event:
        """An event that the next change sets, and that is never used again after that."""
        return self._changed

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._interval_s)

    def look(self) -> None:
        """Look now."""
        states = self._look()
        if states == self._states:
            return
        faults = [state.fault for state in states if state.fault]
        if faults:
            _log.warning("devices are unhealthy", extra=fields(unhealthy=len(faults), of=len(states), reason=faults[0]))
        else:
            _log.info("all devices are healthy again", extra=fields(devices=len(states)))
        self._states = states
        self._notify()

    def close(self) -> None:
        """Let nobody wait for a change any more: the driver is stopping."""
        self.closed = True
        self._notify()

    def _look(self) -> tuple[DeviceState, ...]:
        runtime = self._runtime_fault()
        pool = self._ledger.pool
        offline = self._gone()
        if offline != pool.offline - self._limit.outside:
            _log.info("CPUs have gone offline or come back", extra=fields(offline=offline, held=offline & pool.taken))
        self._look_at_limit(offline)
        gone = offline | self._limit.outside
        if gone != pool.offline:
            pool.set_offline(gone)
            self._tell_pool()
        withdrawn = (gone & pool.online) - pool.taken
        if withdrawn != self._withdrawn:
            self._withdrawn = withdrawn
            self._withdraw(withdrawn)
        return tuple(
            DeviceState(
                pool=self._pool_name,
                device=device.name,
                fault="; ".join([*self._lost(device.cpus & gone & pool.taken), *runtime]),
            )
            for device in self._model.devices
        )

    def _look_at_limit(self, offline: CpuSet) -> None:
        """Find out which CPUs pods cannot use although they are online."""
        pool = self._ledger.pool
        limit = self._read_limit()
        # Many a node keeps pods away from what is reserved for the system.
        for_claims = (pool.online - pool.reserved) | pool.taken
        lacking = for_claims - offline - limit.cpus if limit is not None else CpuSet()
        # What is online and what cgroups have is not read in one moment: a CPU that comes or goes is not outside.
        outside = lacking if self._lacking is None else lacking & self._lacking
        self._lacking = lacking
        if limit is None or not outside:
            self._limit.set(CpuSet(), "", CpuSet())
        else:
            self._limit.set(outside, limit.cgroup, limit.cpus)
        self._health.remark(PODS_CGROUP, self._limit.told)

    def _lost(self, cpus: CpuSet) -> Iterator[str]:
        """Say which claims have lost which CPUs."""
        for uid, lost in self._ledger.holders(cpus).items() if cpus else ():
            holder = f"held by claim {self._ledger.records[uid].claim}"
            if offline := lost - self._limit.outside:
                yield f"{subject(offline)} offline, {holder}"
            if outside := lost & self._limit.outside:
                yield f"{self._limit.refusal(outside)}, {holder}"

    def _runtime_fault(self) -> list[str]:
        if RUNTIME not in self._health.missing():
            self._away_since = None
            return []
        if self._away_since is None:
            self._away_since = self._clock()
        return [_NOT_CONNECTED] if self._clock() - self._away_since >= self._grace_s else []

    def _gone(self) -> CpuSet:
        """Return the CPUs that have gone offline since the start, and those of claims that were so before."""
        online = self._online()
        pool = self._ledger.pool
        return pool.offline - self._limit.outside if online is None else (pool.online | pool.taken) - online

    def _online(self) -> CpuSet | None:
        """Return the CPUs that are online; None if the kernel does not say."""
        try:
            text = self._tree.read(_ONLINE)
            # None at all cannot be: one runs this.
            return None if text is None else CpuSet.parse(text.strip()) or None
        except CpuListError:
            return None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
