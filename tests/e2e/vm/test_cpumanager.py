# SPDX-License-Identifier: Apache-2.0
"""The driver chooses, and the cluster's scheduler decides of which devices: what two CPUs cannot hold."""

from __future__ import annotations

import pytest

from e2e.cluster.api import PODS
from e2e.cluster.manifests import request
from e2e.vm.checks import MANAGED, exactly, settings
from e2e.vm.node import ISOLATED
from fastcpu import CpuSet

SIZES = (2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
SOCKETS = (CpuSet.parse("0-7"), CpuSet.parse("8-15"))
NUMA_NODES = [CpuSet.parse(cpus) for cpus in ("0-3", "4-7", "8-11", "12-15")]


@pytest.mark.parametrize("group_by", ["numanode", "socket"])
async def test_twelve_claims(node, group_by):
    await node.use_driver(**settings("cpumanager", group_by))
    sharing = await node.run([], [])
    ids = await node.running(sharing)
    claims = [await node.claim(request(size)) for size in SIZES]
    pods = []
    for at in range(0, len(claims), 2):
        pods.append(await node.run(claims[at : at + 1], claims[at + 1 : at + 2]))
        ids |= await node.running(pods[-1])
    of_claims = zip([container for pod in pods for container in ids[pod]], claims, strict=True)
    granted = {container: await node.granted(claim) for container, claim in of_claims}
    assert [len(cpus) for cpus in granted.values()] == list(SIZES)
    groups = NUMA_NODES if group_by == "numanode" else SOCKETS
    assert all(any(cpus <= group for group in groups) for cpus in granted.values())
    await exactly(node, granted, ids[sharing])
    await node.end(pods, claims)
    await node.until_seen(*ids[sharing], cpus=MANAGED - ISOLATED)
    assert (await node.metrics())["allocated_cpus"] == 0


async def test_capacity_selector_and_match_attribute(node):
    await node.use_driver(**settings("cpumanager", "numanode"))
    # NUMA node 0 has three CPUs, since one is reserved.
    whole = await node.claim(request(4))
    whole_pod = await node.run([whole])
    await node.running(whole_pod)
    selected = await node.claim(request(1, selector='device.attributes["dra.cpu"].socketID == 1'))
    selected_pod = await node.run([selected])
    await node.running(selected_pod)
    # One after the other they would come to lie on two sockets.
    constraint = {"requests": ["a", "b"], "matchAttribute": "dra.cpu/socketID"}
    matched = await node.claim(request(3, "a"), request(3, "b"), constraints=[constraint])
    matched_pod = await node.run([matched])
    too_large = await node.claim(request(5))
    too_large_pod = await node.run([too_large])
    ids = await node.running(whole_pod, selected_pod, matched_pod)
    pods = {whole_pod: whole, selected_pod: selected, matched_pod: matched}
    granted = {ids[pod][0]: await node.granted(claim) for pod, claim in pods.items()}
    assert granted[ids[whole_pod][0]] == NUMA_NODES[1]
    assert granted[ids[selected_pod][0]] <= NUMA_NODES[2]
    cpus = granted[ids[matched_pod][0]]
    assert cpus <= SOCKETS[1]
    assert [len(cpus & NUMA_NODES[2]), len(cpus & NUMA_NODES[3])] == [3, 3]
    await exactly(node, granted, [])
    assert unschedulable(await node.api.get(f"{PODS}/{too_large_pod}"))


def unschedulable(pod):
    conditions = pod["status"]["conditions"]
    return [one["reason"] for one in conditions if one["type"] == "PodScheduled"] == ["Unschedulable"]
