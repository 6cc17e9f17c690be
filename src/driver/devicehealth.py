# SPDX-License-Identifier: Apache-2.0
"""Whether the devices can be relied on: their CPUs are online, and the runtime holds containers to them.

A CPU that goes offline while it is free is withdrawn: it is given to nobody, and published no more. One that a claim
holds stays that claim's, and makes its device unhealthy, which the kubelet shows in the status of the pods that use the
device. Either is as before once the CPU is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from driver.health import RUNTIME
from driver.logs import fields
from driver.wording import subject
from fastcpu import CpuSet
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.devices import DeviceModel
    from driver.health import Health
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
        Knows, as the condition ``runtime``, whether the runtime is connected.
    ledger : Ledger
        Who holds which CPUs. Its pool is told which CPUs have gone offline.
    tell_pool : callable, optional
        Called when the pool has been told of other CPUs.
    withdraw : callable, optional
        Told which CPUs are not to be published, when that changes.
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
        gone = self._gone()
        if gone != pool.offline:
            _log.info("CPUs have gone offline or come back", extra=fields(offline=gone, held=gone & pool.taken))
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
                fault="; ".join([*self._offline(device.cpus & gone & pool.taken), *runtime]),
            )
            for device in self._model.devices
        )

    def _offline(self, cpus: CpuSet) -> Iterator[str]:
        """Say which claims have lost which CPUs."""
        for uid, lost in self._ledger.holders(cpus).items() if cpus else ():
            yield f"{subject(lost)} offline, held by claim {self._ledger.records[uid].claim}"

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
        return pool.offline if online is None else (pool.online | pool.taken) - online

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
