# SPDX-License-Identifier: Apache-2.0
"""Placer.place() beside the straightforward Python version of the same rules, which finds the same CPUs."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from functools import cache
from random import Random

import pytest

import cases
from fastcpu import CpuSet, Topology
from fastcpu.placement import Placer, Policy
from placement_machines import regular_machine
from placement_reference import Machine, PythonPlacer

CHAPTER = "Placement"
CONTENDERS = ["fastcpu", "placement in Python"]
# NUMA nodes a socket and L3 caches a node, of two sockets, eight cores a cache and two threads a core.
SHAPES = {64: (1, 2), 256: (2, 4), 512: (4, 4), 1024: (4, 8)}
# NUMA nodes a socket, cores a cache (None: all of a socket) and threads a core, of two sockets.
OTHER_SHAPES = {
    "four nodes a socket": {"nodes": 4, "cores": 8, "threads": 2},
    "one node a socket": {"nodes": 1, "cores": 8, "threads": 2},
    "caches of four cores": {"nodes": 1, "cores": 4, "threads": 2},
    "four threads a core": {"nodes": 2, "cores": 4, "threads": 4},
    "one thread a core": {"nodes": 1, "cores": 16, "threads": 1},
    "one cache a socket": {"nodes": 1, "cores": None, "threads": 2},
}
POLICIES = {
    "no wishes": Policy(),
    "spread over cores": Policy(spread="cores"),
    "whole cores": Policy(full_cores="require"),
    "spread over nodes": Policy(numa="distribute"),
}


@cache
def machine(n_cpus: int) -> Topology:
    nodes, caches = SHAPES[n_cpus]
    return regular_machine(sockets=2, nodes=nodes, caches=caches, cores=8, threads=2)


def available(topology: Topology, where: str, state: str) -> CpuSet:
    cpus = topology.online if where == "whole machine" else topology.sockets.cpuset(1)
    random = Random(len(cpus))
    return cpus if state == "empty" else CpuSet(cpu for cpu in cpus if random.random() < 0.7)


@pytest.mark.parametrize("n_cpus", SHAPES)
@pytest.mark.parametrize("where", ["whole machine", "one socket"])
@pytest.mark.parametrize("state", ["empty", "fragmented"])
@pytest.mark.parametrize("contender", CONTENDERS)
def test_place(entry, contender, state, where, n_cpus):
    topology = machine(n_cpus)
    free = available(topology, where, state)
    # Not a round number of caches, which would be easier.
    n = len(free) * 2 // 5 + 3
    compare(entry(CHAPTER, f"two fifths of {where}, {state}", contender, n=n_cpus), topology, free, n)


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("state", ["empty", "fragmented"])
@pytest.mark.parametrize("contender", CONTENDERS)
def test_place_eight(entry, contender, state, n_cpus):
    topology = cases.server(n_cpus)
    free = available(topology, "one socket", state)
    compare(entry(CHAPTER, f"eight CPUs of one socket, {state}", contender, n=n_cpus), topology, free, 8)


def compare(benchmark, topology: Topology, free: CpuSet, n: int) -> None:
    placer = Placer(topology)
    if benchmark.extra_info["contender"] == "fastcpu":
        chosen = benchmark(placer.place, free, n)
    else:
        chosen = benchmark.pedantic(PythonPlacer(Machine(topology)).place, (free, n), rounds=3)
    assert len(chosen) == n
    assert chosen == placer.place(free, n)


@pytest.mark.parametrize("n_cpus", [512, 1024])
@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_any_request_within_a_socket(benchmark, capsys, request, shape, n_cpus):
    """Time every number of CPUs, in several states of the socket and with all wishes; print the slowest."""
    benchmark.group = "place as many CPUs as there are"
    parts = OTHER_SHAPES[shape]
    cores = parts["cores"] or n_cpus // 4
    caches = n_cpus // (2 * parts["nodes"] * cores * parts["threads"])
    topology = regular_machine(sockets=2, nodes=parts["nodes"], caches=caches, cores=cores, threads=parts["threads"])
    placer = Placer(topology)
    socket = topology.sockets.cpuset(1)
    random = Random(n_cpus)
    cache_load = [random.random() for _ in range(len(topology.l3_caches))]
    states = {
        "empty": socket,
        "fragmented": CpuSet(cpu for cpu in socket if random.random() < 0.8),
        "half used": CpuSet(cpu for cpu in socket if random.random() < 0.5),
        "unevenly used": CpuSet(c for c in socket if random.random() < cache_load[topology.l3_caches.group_of[c]]),
    }
    assert len(benchmark(placer.place, socket, len(socket))) == len(socket)
    if benchmark.disabled:
        return
    is_smoke = float(request.config.getoption("benchmark_max_time")) < 0.1
    rounds = 1 if is_smoke else 15
    lines = []
    gc.disable()
    try:
        for name, policy in POLICIES.items():
            step = parts["threads"] if policy.full_cores == "require" else 1
            requests = [
                (state, n)
                for state, free in states.items()
                for n in range(step, placeable(topology, free, policy) + 1, step)
            ]
            times = fastest(placer, states, requests, policy, rounds)
            slowest = max(requests, key=lambda request: times[request])
            median = statistics.median(times.values())
            lines.append(f"{name} {median:.1f}, at most {times[slowest]:.1f} ({slowest[1]} CPUs, {slowest[0]})")
    finally:
        gc.enable()
    with capsys.disabled():
        sys.stdout.write(f"\n{n_cpus} CPUs, {shape}: microseconds of one call, median over all requests\n")
        sys.stdout.writelines(f"    {line}\n" for line in lines)


def placeable(topology: Topology, free: CpuSet, policy: Policy) -> int:
    """Return how many CPUs can be placed."""
    if policy.full_cores == "prefer":
        return len(free)
    cores = map(topology.cores.cpuset, range(len(topology.cores)))
    return sum(len(core) for core in cores if core <= free)


def fastest(
    placer: Placer, states: dict[str, CpuSet], requests: list[tuple[str, int]], policy: Policy, rounds: int
) -> dict[tuple[str, int], float]:
    """Time each request in microseconds: the fastest of several rounds, so that a busy machine does not count."""
    times = dict.fromkeys(requests, float("inf"))
    for _ in range(rounds):
        for state, n in requests:
            start = time.perf_counter_ns()
            placer.place(states[state], n, policy)
            times[state, n] = min(times[state, n], (time.perf_counter_ns() - start) / 1000)
    return times
