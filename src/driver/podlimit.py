# SPDX-License-Identifier: Apache-2.0
"""The CPUs that no pod can use, since the cgroup of all pods does not have them.

The kernel lets nothing in a cgroup use more than the cgroup has. What it lacks is therefore given to nobody, just as if
it were offline: `fastcpu.pool.CpuPool` counts it so. What is kept here says which of those CPUs are online all the
same, and why they cannot be used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.wording import not_online, shown, subject
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastcpu.pool import CpuPool


class PodLimit:
    """What the cgroup of all pods was last seen to lack.

    Attributes
    ----------
    outside : CpuSet
        The CPUs that are online, as far as is known, and that it does not have.
    told : str
        What it has, as a clause; empty if it lacks nothing.
    """

    def __init__(self) -> None:
        self.outside = CpuSet()
        self.told = ""

    def set(self, outside: CpuSet, cgroup: str, allowed: CpuSet) -> None:
        """Take note of what it lacks.

        Parameters
        ----------
        outside : CpuSet
            The CPUs that it does not have.
        cgroup : str
            Which cgroup it is, or which one above it narrows it.
        allowed : CpuSet
            The CPUs that it has.
        """
        self.outside = outside
        self.told = allows_only(cgroup, allowed) if outside else ""

    def faults(self, cpus: CpuSet, pool: CpuPool) -> Iterator[str]:
        """Say why CPUs cannot be used, a clause for each reason.

        Parameters
        ----------
        cpus : CpuSet
            CPUs of which none is online and allowed to pods.
        pool : CpuPool
            The node's CPUs.
        """
        if offline := cpus - self.outside:
            yield not_online(offline, pool.online - (pool.offline - self.outside))
        if outside := cpus & self.outside:
            yield self.refusal(outside)

    def refusal(self, outside: CpuSet) -> str:
        """Say that CPUs that it lacks cannot be used, and what it has."""
        return f"{subject(outside)} not allowed to pods: {self.told}"


def allows_only(cgroup: str, allowed: CpuSet) -> str:
    """Say what a cgroup has."""
    return f"cgroup {cgroup} allows only CPUs {shown(allowed)}"
