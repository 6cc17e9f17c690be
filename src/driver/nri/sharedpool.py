# SPDX-License-Identifier: Apache-2.0
"""The shared pool: the CPUs of all containers that have no claim.

It is what is online and neither reserved, nor held by a claim, nor isolated by ``isolcpus``; computed from the ledger
whenever it is asked for, so that it is never out of step with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from driver.podlimit import PodLimit
from fastcpu import CpuSet

if TYPE_CHECKING:
    from driver.ledger import Ledger
    from driver.names import ClaimUID
    from driver.nri.container import Container

SET_ASIDE_S: Final = 120.0
"""The kubelet repeats a failed prepare after 60 to 90 s."""


class SharedPool:
    """The CPUs for containers without a claim.

    Parameters
    ----------
    ledger : Ledger
        Who holds which CPUs.
    isolated : CpuSet
        The CPUs that the kernel was told to keep free. If that is all that is not reserved, it means nothing here.
    limit : PodLimit, optional
        The CPUs that no pod can use.
    """

    def __init__(self, ledger: Ledger, isolated: CpuSet, limit: PodLimit | None = None) -> None:
        self._ledger = ledger
        self._limit = PodLimit() if limit is None else limit
        unreserved = ledger.pool.online - ledger.pool.reserved
        self._managed = unreserved
        self._isolated = isolated if unreserved - isolated else CpuSet()
        self._aside: dict[ClaimUID, tuple[CpuSet, float]] = {}

    @property
    def cpus(self) -> CpuSet:
        """The pool as it must be; empty if claims hold all of it.

        Where pods cannot use any of it, it is what it would be if they could: a container that is held to that runs in
        cgroup v2 on what its cgroup has, as without the driver, and in v1 the kernel says what is wrong.
        """
        within = self._within
        if within or not self._limit.outside:
            return within
        pool = self._ledger.pool
        offline = pool.offline - self._limit.outside
        return pool.online - pool.reserved - pool.taken - offline - self._isolated

    @property
    def leaves_alone(self) -> bool:
        """Whether no container's CPUs are this driver's business: no CPU is managed, and no claim holds any."""
        return not self._managed and not self._ledger.records

    def without(self, cpus: CpuSet) -> CpuSet:
        """Return what would be left if these CPUs were held too."""
        return self._within - cpus

    def current(self, now: float) -> CpuSet:
        """Return the pool for containers: as it must be, and if possible without what was set aside.

        Parameters
        ----------
        now : float
            The present time, in seconds of a monotonic clock.
        """
        self._aside = {uid: aside for uid, aside in self._aside.items() if aside[1] > now}
        cpus = self.cpus
        left = cpus - CpuSet().union(*(aside for aside, _ in self._aside.values()))
        return left or cpus

    def is_usable(self, cpus: CpuSet, allowed: CpuSet | None = None) -> bool:
        """Tell whether any of these CPUs is online and allowed, as far as is known.

        A container that is held to CPUs of which none is runs on all others that its parent cgroup has, those of other
        claims as well: for the kernel such a cpuset is none (cgroup-v2, ``cpuset.cpus``).

        Parameters
        ----------
        cpus : CpuSet
            The CPUs.
        allowed : CpuSet, optional
            What the parent cgroup allows, if that is known.
        """
        return not cpus <= self._ledger.pool.offline and not (allowed is not None and allowed.isdisjoint(cpus))

    def why_unusable(self, cpus: CpuSet) -> str:
        """Say of a claim that none of its CPUs is usable, why, and what can be done about it."""
        if cpus <= self._limit.outside:
            return f"has CPUs {cpus}, none of which pods may use: {self._limit.told}; give it more, or delete the pod"
        return f"has CPUs {cpus}, none of which is online: switch them on, or delete the pod"

    def within(self, allowed: CpuSet | None, current: CpuSet) -> CpuSet:
        """Return what a container of the shared pool gets whose parent cgroup does not allow everything.

        Parameters
        ----------
        allowed : CpuSet or None
            What it allows; None if that is not known.
        current : CpuSet
            What `current` has returned.

        Returns
        -------
        CpuSet
            All of the pool if it allows nothing of it.
        """
        return current if allowed is None else (current & allowed) or current

    def wanted(self, container: Container, current: CpuSet) -> CpuSet:
        """Return the CPUs that a container is to have; empty if nothing can be done about it.

        Parameters
        ----------
        container : Container
            The container.
        current : CpuSet
            What `current` has returned.
        """
        if container.unread:
            return CpuSet()
        if container.claims and self.is_usable(container.exclusive, container.allowed):
            return container.exclusive
        return CpuSet() if self.leaves_alone else self.within(container.allowed, current)

    def set_aside(self, uid: ClaimUID, cpus: CpuSet, now: float) -> None:
        """Keep CPUs free for a while that a claim could not be given: what was moved away stays away for the retry."""
        self._aside[uid] = (cpus, now + SET_ASIDE_S)

    def take_back(self, uid: ClaimUID) -> None:
        """Keep nothing free for a claim any more."""
        self._aside.pop(uid, None)

    @property
    def _within(self) -> CpuSet:
        """What of the pool pods can use."""
        return self._ledger.pool.available - self._isolated

    @property
    def aside_until(self) -> float | None:
        """When the next of what was set aside comes back; None if there is nothing."""
        return min((until for _, until in self._aside.values()), default=None)
