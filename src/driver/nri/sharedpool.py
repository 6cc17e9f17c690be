# SPDX-License-Identifier: Apache-2.0
"""The shared pool: the CPUs of all containers that have no claim.

It is what is online and neither reserved, nor held by a claim, nor isolated by ``isolcpus``; computed from the ledger
whenever it is asked for, so that it is never out of step with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
    """

    def __init__(self, ledger: Ledger, isolated: CpuSet) -> None:
        self._ledger = ledger
        unreserved = ledger.pool.online - ledger.pool.reserved
        self._managed = unreserved
        self._isolated = isolated if unreserved - isolated else CpuSet()
        self._aside: dict[ClaimUID, tuple[CpuSet, float]] = {}

    @property
    def cpus(self) -> CpuSet:
        """The pool as it must be; empty if claims hold all of it."""
        return self._ledger.pool.available - self._isolated

    @property
    def leaves_alone(self) -> bool:
        """Whether no container's CPUs are this driver's business: no CPU is managed, and no claim holds any."""
        return not self._managed and not self._ledger.records

    def without(self, cpus: CpuSet) -> CpuSet:
        """Return what would be left if these CPUs were held too."""
        return self.cpus - cpus

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

    def is_usable(self, cpus: CpuSet) -> bool:
        """Tell whether any of these CPUs is online, as far as is known.

        A container that is held to CPUs of which none is online runs on all others, those of other claims as well: for
        the kernel such a cpuset is none (cgroup-v2, ``cpuset.cpus``).
        """
        return not cpus <= self._ledger.pool.offline

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
        if container.claims and self.is_usable(container.exclusive):
            return container.exclusive
        return CpuSet() if self.leaves_alone else current

    def set_aside(self, uid: ClaimUID, cpus: CpuSet, now: float) -> None:
        """Keep CPUs free for a while that a claim could not be given: what was moved away stays away for the retry."""
        self._aside[uid] = (cpus, now + SET_ASIDE_S)

    def take_back(self, uid: ClaimUID) -> None:
        """Keep nothing free for a claim any more."""
        self._aside.pop(uid, None)

    @property
    def aside_until(self) -> float | None:
        """When the next of what was set aside comes back; None if there is nothing."""
        return min((until for _, until in self._aside.values()), default=None)
