# SPDX-License-Identifier: Apache-2.0
"""The parts on the runtime's side, put together: what answers it, what pushes, and the connection that both use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from driver.nri.connection import ConnectionMetrics, NriConnection
from driver.nri.enforcement import Enforcement
from driver.nri.parents import ParentCgroups
from driver.nri.plugin import PluginMetrics, RuntimePlugin
from driver.nri.pushes import Pushes, PushMetrics
from driver.nri.reservations import ClaimSource, Reservations
from driver.nri.sharedpool import SharedPool

if TYPE_CHECKING:
    from driver.health import Health
    from driver.hostcgroups import HostCgroups
    from driver.ledger import Ledger
    from driver.nri.session import Timing
    from driver.podlimit import PodLimit
    from fastcpu import CpuSet


class RuntimeMetrics(ConnectionMetrics, PluginMetrics, PushMetrics, Protocol):
    """What counts all of it."""


class RuntimeSide:
    """Everything that holds containers to their CPUs.

    Parameters
    ----------
    socket_path : str
        Where the runtime listens.
    ledger : Ledger
        Who holds which CPUs.
    isolated : CpuSet
        The CPUs that the kernel was told to keep free.
    claims : ClaimSource
        The API server.
    cgroups : Cgroups
        What the kernel says of containers.
    health : Health
        Told, as the condition ``runtime``, whether the runtime is connected, and which containers cannot have their
        CPUs.
    metrics : RuntimeMetrics
        What counts.
    start_guard : bool
        Whether the claims' CDI specs have the start guard's hook.
    limit : PodLimit, optional
        The CPUs that no pod can use.
    timing : Timing, optional
        How long things on the connection may take.

    Attributes
    ----------
    enforcement : Enforcement
        What is known, and a `driver.runtime.Runtime`.

    Raises
    ------
    ConfigError
        If the path is too long for a socket.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        ledger: Ledger,
        isolated: CpuSet,
        claims: ClaimSource,
        cgroups: HostCgroups,
        health: Health,
        metrics: RuntimeMetrics,
        start_guard: bool,
        limit: PodLimit | None = None,
        timing: Timing | None = None,
    ) -> None:
        pool = SharedPool(ledger, isolated, limit)
        self.enforcement = Enforcement(ledger, pool, Reservations(claims), cgroups=cgroups)
        self._plugin = RuntimePlugin(self.enforcement, metrics, cgroups=cgroups, start_guard=start_guard)
        self._parents = ParentCgroups(cgroups, self.enforcement, health)
        self._pushes = Pushes(self.enforcement, metrics, health)
        self._connection = NriConnection(socket_path, self._plugin, health=health, metrics=metrics, timing=timing)

    async def run(self) -> None:
        """Stay connected, answer the runtime, and push what becomes necessary, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connection.run())
            tasks.create_task(self._plugin.run())
            tasks.create_task(self._pushes.run(self._connection.update_containers))
            tasks.create_task(self._parents.run())

    def cpus_changed(self) -> None:
        """Take note that CPUs have come or gone."""
        self._parents.look_soon()
        self.enforcement.notify()

    def close(self) -> None:
        """Let no prepare or unprepare wait for the runtime any more: the driver is stopping."""
        self.enforcement.close()
