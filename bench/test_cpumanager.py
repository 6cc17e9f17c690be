# SPDX-License-Identifier: Apache-2.0
"""The driver's own choice for one claim: from its decoded JSON to CPUs, all that happens before anything is held."""

from __future__ import annotations

import random

import pytest

from driver.claims import decode_claim
from driver.cpumanager import CpuManagerAllocator
from driver.devices import build_devices
from driver.names import claim_uid
from fastcpu import CpuSet, Topology
from fastcpu.pool import CpuPool

SIZES = (64, 256, 512, 1024)
NODE = "node"
UID = claim_uid("9f0d2a1e-0000-4000-8000-000000000001")
RESULTS = {
    "one request": [("cpus", 0, 8)],
    "four requests, two devices": [("a", 0, 2), ("b", 0, 4), ("c", 1, 4), ("d", 1, 1)],
}


def machine(n_cpus: int) -> Topology:
    """Return two sockets of NUMA nodes of 64 CPUs and L3 caches of 16, siblings half the machine apart."""
    n_cores = n_cpus // 2
    core = [cpu % n_cores for cpu in range(n_cpus)]
    return Topology.from_arrays(
        CpuSet(range(n_cpus)),
        cores=core,
        l3_caches=[number // 8 for number in core],
        numa_nodes=[number // min(32, n_cores // 2) for number in core],
        sockets=[number * 2 // n_cores for number in core],
    )


def allocator(topology: Topology, used: float) -> CpuManagerAllocator:
    """Return an allocator on a machine of which a part is taken, at random but always the same."""
    reserved = CpuSet([0])
    model = build_devices(
        topology,
        reserved=reserved,
        group_by="socket",
        allocator="cpumanager",
        pcie_roots=None,
        node_allocatable_mapping=False,
    )
    pool = CpuPool(topology.online, reserved, model.groups)
    cpus = list(topology.online - reserved)
    pool.take(CpuSet(random.Random(5).sample(cpus, int(len(cpus) * used))))
    return CpuManagerAllocator(model, pool, NODE, topology, {})


def claim(kind: str) -> dict[str, object]:
    results = [
        {
            "request": request,
            "driver": "dra.cpu",
            "pool": NODE,
            "device": f"cpudevsocket{socket:03}",
            "shareID": "7f0d2a1e-0000-4000-8000-000000000002",
            "consumedCapacity": {"dra.cpu/cpu": str(cpus)},
        }
        for request, socket, cpus in RESULTS[kind]
    ]
    parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"placement": {"fullCores": "prefer"}}}
    config = {"source": "FromClass", "opaque": {"driver": "dra.cpu", "parameters": parameters}}
    return {
        "metadata": {"namespace": "default", "name": "claim", "uid": UID},
        "spec": {"devices": {"requests": [{"name": request, "exactly": {}} for request, _, _ in RESULTS[kind]]}},
        "status": {"allocation": {"devices": {"results": results, "config": [config]}}},
    }


def nobody(cpus: CpuSet) -> dict[object, CpuSet]:
    return {}


@pytest.mark.parametrize("n_cpus", SIZES)
@pytest.mark.parametrize("used", [0.0, 0.5], ids=["empty", "half used"])
@pytest.mark.parametrize("kind", RESULTS)
def test_choose(benchmark, kind, used, n_cpus):
    benchmark.group = f"choose, {kind}, {'half used' if used else 'empty'}"
    chooser = allocator(machine(n_cpus), used)
    asked = decode_claim(claim(kind), UID)
    choice = benchmark(chooser.choose, asked, nobody)
    assert len(choice.cpus) == sum(cpus for _, _, cpus in RESULTS[kind])


@pytest.mark.parametrize("kind", RESULTS)
def test_decode_and_choose(benchmark, kind):
    benchmark.group = f"decode and choose, {kind}, 512 CPUs half used"
    chooser = allocator(machine(512), 0.5)
    raw = claim(kind)
    choice = benchmark(lambda: chooser.choose(decode_claim(raw, UID), nobody))
    assert len(choice.cpus) == sum(cpus for _, _, cpus in RESULTS[kind])
