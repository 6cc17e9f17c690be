# SPDX-License-Identifier: Apache-2.0
"""Many claims side by side: each container on exactly its CPUs, none shared, all others on the rest."""

from __future__ import annotations

import asyncio

import pytest

from e2e.vm import api
from e2e.vm.node import ISOLATED, request
from fastcpu import CpuSet

RESERVED = CpuSet.parse("0")
MANAGED = CpuSet.parse("1-15")
SIZES = (2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)


async def check(node, granted, sharing):
    """Check with the kernel that containers have what they were granted, and those that share have the rest."""
    seen = await node.seen()
    for container, cpus in granted.items():
        assert (seen[container].allowed, seen[container].cpuset, seen[container].effective) == (cpus, cpus, cpus)
    taken = CpuSet().union(*granted.values())
    assert len(taken) == sum(map(len, granted.values())), "two containers share a CPU"
    for container in sharing:
        assert seen[container].allowed == seen[container].cpuset == MANAGED - taken - ISOLATED


@pytest.mark.parametrize("group_by", ["numanode", "socket"])
async def test_cpumanager(node, group_by):
    await node.use_driver(allocator="cpumanager", groupBy=group_by, reservedCPUs=str(RESERVED))
    sharing = await node.run([], [])
    claims = [await node.claim(request("cpus", size)) for size in SIZES]
    pods = [await node.run(claims[at : at + 1], claims[at + 1 : at + 2]) for at in range(0, len(claims), 2)]
    ids = await node.running(sharing, *pods)
    granted = {}
    for at, pod in enumerate(pods):
        for container, claim in zip(ids[pod], claims[2 * at : 2 * at + 2], strict=True):
            granted[container] = await node.granted(claim)
    assert [len(cpus) for cpus in granted.values()] == list(SIZES)
    await check(node, granted, ids[sharing])
    await node.end(pods, claims)
    for container in ids[sharing]:
        await node.until_seen(container, MANAGED - ISOLATED)
    assert [item["metadata"]["name"] for item in await node.api.items(api.PODS)] == [sharing]
    await asyncio.sleep(0)
