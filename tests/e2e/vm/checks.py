# SPDX-License-Identifier: Apache-2.0
"""What must hold of the containers of a node, as its kernel says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from e2e.vm.node import ISOLATED, Node
from fastcpu import CpuSet

RESERVED = CpuSet.parse("0")
MANAGED = CpuSet.parse("1-15")


def settings(allocator: str, group_by: str) -> dict[str, str]:
    """Return the configuration of a driver."""
    return {"allocator": allocator, "groupBy": group_by, "reservedCPUs": str(RESERVED)}


async def exactly(node: Node, granted: Mapping[str, CpuSet], sharing: Collection[str]) -> None:
    """Check that containers are on exactly the CPUs that they were granted, none shared, and others on the rest."""
    seen = await node.seen()
    for container, cpus in granted.items():
        assert (seen[container].allowed, seen[container].cpuset, seen[container].effective) == (cpus, cpus, cpus)
    taken = CpuSet().union(*granted.values())
    assert len(taken) == sum(map(len, granted.values())), "two containers share a CPU"
    rest = MANAGED - taken - ISOLATED
    for container in sharing:
        assert (seen[container].allowed, seen[container].cpuset) == (rest, rest)
