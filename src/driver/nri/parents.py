# SPDX-License-Identifier: Apache-2.0
"""Keeps up with what the kernel makes of containers' cgroups, and of those that they are in.

A container cannot have more than its pod's cgroup has, nor that more than those above it: the kernel refuses it in
cgroup v1, and cuts it without a word in v2. Nobody tells when a cgroup becomes narrower or wider, neither the kernel,
which does it when a CPU goes offline, nor whoever writes it. So all are read again every few seconds, a few at a time.

In cgroup v1 the kernel takes a CPU that goes offline out of every single cgroup, and puts it back into none. So a
container is given its CPUs anew that has fewer than it was given and its parent has.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from driver.health import POD_CGROUPS
from driver.hostcgroups import split_cgroups_path
from driver.logs import fields
from driver.podlimit import allows_only
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Collection

    from driver.health import Health
    from driver.hostcgroups import HostCgroups, Limit
    from driver.nri.container import Container
    from driver.nri.enforcement import Enforcement

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 5.0
_AT_A_TIME: Final = 16
_MOST_TOLD: Final = 3
# Anybody may read it, so no pod is named.
_OF_PODS: Final = "cgroups of single pods allow fewer CPUs than their containers should have; the log names the pods"


class ParentCgroups:
    """The task that reads them.

    Parameters
    ----------
    cgroups : HostCgroups
        The host's.
    enforcement : Enforcement
        What is known of the containers.
    health : Health
        Told which cgroups allow less than the shared pool has.
    interval_s : float
        How often to read them, in seconds.
    """

    def __init__(
        self, cgroups: HostCgroups, enforcement: Enforcement, health: Health, *, interval_s: float = _INTERVAL_S
    ) -> None:
        self._cgroups = cgroups
        self._enforcement = enforcement
        self._health = health
        self._interval_s = interval_s
        self._soon = asyncio.Event()
        # The pods whose own cgroups were narrow when last looked at.
        self._narrow_pods: Collection[str] = ()
        # What containers had left, by id, that were to be given their CPUs anew and have not more yet.
        self._shrunk: dict[str, CpuSet] = {}

    def look_soon(self) -> None:
        """Do not wait for the next round: CPUs have come or gone."""
        self._soon.set()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self._soon.clear()
            await self.look()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._soon.wait()
            except TimeoutError:
                pass

    async def look(self) -> None:
        """Look at all once."""
        seen: dict[str, CpuSet | None] = {}
        narrow: dict[str, tuple[Container, Limit]] = {}
        shrunk: dict[str, CpuSet] = {}
        changed = False
        for index, container in enumerate(list(self._enforcement.containers)):
            if index % _AT_A_TIME == 0:
                await asyncio.sleep(0)
            before = container.allowed
            self._enforcement.look_at_parent(container, seen)
            changed |= container.allowed != before
            if left := self._left(container):
                shrunk[container.id] = left
                # Once: where it helps nothing it is not tried for ever.
                if left != self._shrunk.get(container.id):
                    _log.info(
                        "the kernel has taken CPUs from a container", extra=fields(container=container, left=left)
                    )
                    container.shrunk(left)
                    changed = True
            if container.pod.sandbox not in narrow and self._is_narrow(container):
                limit = self._cgroups.parent_limit(container.cgroups_path)
                # What all pods lack is told by whoever looks at the devices.
                if limit is not None and not self._cgroups.is_of_all_pods(limit):
                    narrow[container.pod.sandbox] = (container, limit)
        self._shrunk = shrunk
        self._tell(narrow)
        if changed:
            self._enforcement.notify()

    def _left(self, container: Container) -> CpuSet:
        """Return what a container has left that has lost CPUs which its parent has; nothing if it has lost none."""
        if container.allowed is None or not container.is_settled:
            return CpuSet()
        left = self._cgroups.cpus(container.cgroups_path) or CpuSet()
        lost = left < container.given & container.allowed
        return left if lost or left == self._shrunk.get(container.id) else CpuSet()

    def _is_narrow(self, container: Container) -> bool:
        """Tell whether a container cannot have all CPUs that it should have, on account of the cgroups above it."""
        cpus = container.exclusive if container.claims else self._enforcement.pool.cpus
        return container.allowed is not None and not cpus <= container.allowed

    def _tell(self, narrow: dict[str, tuple[Container, Limit]]) -> None:
        of_pods = {sandbox: found for sandbox, found in narrow.items() if _is_of_pod(*found)}
        new = [found for sandbox, found in of_pods.items() if sandbox not in self._narrow_pods]
        if new:
            told = [f"{container}: {allows_only(limit.cgroup, limit.cpus)}" for container, limit in new[:_MOST_TOLD]]
            _log.warning(
                "pods whose own cgroups do not have all CPUs that their containers should have",
                extra=fields(pods=len(new), reason="; ".join(told)),
            )
        self._narrow_pods = of_pods.keys()
        others = {
            allows_only(limit.cgroup, limit.cpus) for sandbox, (_, limit) in narrow.items() if sandbox not in of_pods
        }
        remarks = [*sorted(others)[:_MOST_TOLD], *([_OF_PODS] if of_pods else [])]
        self._health.remark(POD_CGROUPS, "; ".join(remarks))


def _is_of_pod(container: Container, limit: Limit) -> bool:
    """Tell whether it is the pod's own cgroup that narrows a container, rather than one of several pods."""
    names = split_cgroups_path(container.cgroups_path)
    return names is not None and limit.cgroup == "/" + "/".join(names[:-1])
