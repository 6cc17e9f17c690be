# SPDX-License-Identifier: Apache-2.0
"""Whether the published devices can be relied on: their CPUs are online, and the runtime holds containers to them.

The kubelet shows it in the status of the pods that use a device.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from driver.health import RUNTIME
from driver.logs import fields
from fastcpu import CpuSet
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.devices import DeviceModel
    from driver.health import Health
    from fastcpu.filetree import FileTree

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
    tell_offline : callable, optional
        Told which CPUs have gone offline since the start, when that changes.
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
        *,
        tell_offline: Callable[[CpuSet], None] | None = None,
        grace_s: float = 30.0,
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._pool_name = pool_name
        self._tree = tree
        self._health = health
        self._tell_offline = tell_offline
        self._offline = CpuSet()
        self._grace_s = grace_s
        self._interval_s = interval_s
        self._clock = clock
        self._away_since: float | None = None
        self._changed = asyncio.Event()
        self._online_before = self._online()
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
        gone = self._gone()
        if gone != self._offline:
            self._offline = gone
            if self._tell_offline is not None:
                self._tell_offline(gone)
        return tuple(
            DeviceState(
                pool=self._pool_name,
                device=device.name,
                fault="; ".join(filter(None, (_offline(device.cpus & gone), runtime))),
            )
            for device in self._model.devices
        )

    def _runtime_fault(self) -> str:
        if RUNTIME not in self._health.missing():
            self._away_since = None
            return ""
        if self._away_since is None:
            self._away_since = self._clock()
        return _NOT_CONNECTED if self._clock() - self._away_since >= self._grace_s else ""

    def _gone(self) -> CpuSet:
        """Return the CPUs that have gone offline since the start."""
        online = self._online()
        return CpuSet() if online is None or self._online_before is None else self._online_before - online

    def _online(self) -> CpuSet | None:
        """Return the CPUs that are online; None if the kernel does not say."""
        try:
            text = self._tree.read(_ONLINE)
            return None if text is None else CpuSet.parse(text.strip())
        except CpuListError:
            return None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _offline(cpus: CpuSet) -> str:
    return f"CPUs {cpus} are offline" if cpus else ""
