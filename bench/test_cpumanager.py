# SPDX-License-Identifier: Apache-2.0
"""The driver's own choice for one claim: from its decoded JSON to CPUs, all that happens before anything is held."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

import cases
from driver.claims import decode_claim
from driver.cpumanager import CpuManagerAllocator
from driver.devices import build_devices
from driver.names import claim_uid
from fastcpu import CpuSet, Topology
from fastcpu.pool import CpuPool
from placement_reference import Machine, PythonPlacer

NODE = "node"
UID = claim_uid("9f0d2a1e-0000-4000-8000-000000000001")
RESULTS = {
    "one request": [("cpus", 0, 8)],
    "four requests, two devices": [("a", 0, 2), ("b", 0, 4), ("c", 1, 4), ("d", 1, 1)],
}


def allocator(topology: Topology, used: float) -> tuple[CpuManagerAllocator, CpuPool]:
    """Return an allocator, and its pool, on a machine of which a part is taken, at random but always the same."""
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
    return CpuManagerAllocator(model, pool, NODE, topology, {}), pool


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


def by_driver(topology: Topology, kind: str, used: float):
    choose = allocator(topology, used)[0].choose
    return lambda raw: choose(decode_claim(raw, UID), nobody).cpus


def by_reference(topology: Topology, kind: str, used: float):
    """Return the same choice by the straightforward placement, told at once what is asked of each socket."""
    free = allocator(topology, used)[1].available
    placer = PythonPlacer(Machine(topology))
    asked = Counter()
    for _, socket, cpus in RESULTS[kind]:
        asked[socket] += cpus
    sockets = {socket: topology.sockets.cpuset(socket) & free for socket in asked}
    return lambda raw: CpuSet().union(*(placer.place(sockets[socket], n) for socket, n in asked.items()))


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("used", [0.0, 0.5], ids=["empty", "half used"])
@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("contender", ["dracpu", "placement in Python"])
def test_decode_and_choose(entry, contender, kind, used, n_cpus):
    contend = by_driver if contender == "dracpu" else by_reference
    job = f"JSON to CPUs that the driver chooses, {kind}, {'half used' if used else 'empty'}"
    run, benchmark = contend(cases.server(n_cpus), kind, used), entry("Claims", job, contender, n=n_cpus)
    # The slow one only as often as its figure needs.
    once = partial(run, claim(kind))
    chosen = benchmark(once) if contender == "dracpu" else benchmark.pedantic(once, rounds=3)
    assert chosen == by_driver(cases.server(n_cpus), kind, used)(claim(kind))
