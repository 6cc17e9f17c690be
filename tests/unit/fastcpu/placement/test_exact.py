# SPDX-License-Identifier: Apache-2.0
"""Placement beside references: every choice there is, the kubelet's choice, the same in plain Python."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import pytest

from fastcpu import CpuSet, Topology
from fastcpu.errors import PlacementError
from fastcpu.placement import Placer, Policy
from fastcpu.placement.domains import build_tree
from placement_machines import random_machine, regular_machine
from placement_reference import Choices, Machine, PythonPlacer

TESTS = Path(__file__).parents[3]
GOLDEN = TESTS / "golden" / "kubelet-packed.json"
FULL_GOLDEN = TESTS / "golden" / "kubelet-packed-all.json.xz"
CASES, SEEDS = 20_000, 16

LEVELS = ("sockets", "numa_nodes", "l3_caches", "cores")


def random_policy(random: Random, topology: Topology) -> Policy:
    if random.random() < 0.5:
        return Policy()
    types = ["any"] * 4 + (["p-core", "e-core"] if topology.core_type.any() else [])
    return Policy(
        spread=random.choice(["none", "cores"]),
        full_cores=random.choice(["prefer", "require"]),
        numa=random.choice(["pack", "distribute"]),
        core_type=random.choice(types),
    )


def random_free(random: Random, topology: Topology) -> CpuSet:
    online = list(topology.online)
    if random.random() < 0.3:
        start = random.randrange(len(online))
        return CpuSet(online[start : start + 10])
    return CpuSet(random.sample(online, min(len(online), random.randint(1, 10))))


def placed(placer: Placer, free: CpuSet, n: int, policy: Policy) -> CpuSet | None:
    try:
        return placer.place(free, n, policy)
    except PlacementError:
        return None


@pytest.mark.parametrize("seed", range(SEEDS))
def test_is_the_best_of_all_choices(seed):
    random = Random(seed)
    n_cases = possible = 0
    while n_cases < CASES // SEEDS:
        topology = random_machine(random)
        machine, placer = Machine(topology), Placer(topology)
        if not machine.nested():
            continue
        free = random_free(random, topology)
        choices = Choices(machine, free)
        for n in range(1, len(free) + 1):
            policy = random_policy(random, topology)
            expected = choices.best(n, policy)
            assert placed(placer, free, n, policy) == expected, (topology, free, n, policy)
            n_cases += 1
            possible += expected is not None
    assert possible > n_cases * 0.7


@pytest.mark.parametrize("seed", range(4))
def test_counts_right_where_domains_overlap(seed):
    """There the tie-breaks are of no use to compare, but what is counted is still the fewest there can be."""
    random = Random(seed)
    overlapping = cut = 0
    for _ in range(100):
        topology = random_machine(random, crossing=True)
        machine, placer = Machine(topology), Placer(topology)
        if not machine.nested():
            overlapping += 1
            if not build_tree(topology).crossing:
                cut += 1
                continue
        free = random_free(random, topology)
        choices = Choices(machine, free)
        for n in range(1, len(free) + 1):
            for policy in (Policy(), Policy(spread="cores"), Policy(full_cores="require")):
                expected, chosen = choices.best(n, policy), placed(placer, free, n, policy)
                assert (expected is None) == (chosen is None)
                if chosen is not None:
                    domains = 3 if policy.spread == "cores" else 4
                    assert machine.counts(chosen)[:domains] == machine.counts(expected)[:domains]
    assert overlapping > 20 > 5 > cut


@cache
def golden_choices(path: Path) -> dict[str, list]:
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return json.loads(text)


@cache
def golden_machines(path: Path) -> list[Topology]:
    return [decode_machine(machine) for machine in golden_choices(path)["machines"]]


def decode_machine(machine: dict[str, list[str]]) -> Topology:
    groups = {level: [CpuSet.parse(text) for text in machine[level]] for level in LEVELS}
    online = CpuSet().union(*groups["cores"])
    arrays = {level: [0] * len(online) for level in LEVELS}
    for level, sets in groups.items():
        for number, cpus in enumerate(sets):
            for cpu in cpus:
                arrays[level][cpu] = number
    return Topology.from_arrays(online, **arrays)


@pytest.mark.parametrize("path", [GOLDEN, FULL_GOLDEN], ids=["selected", "all"])
def test_is_never_worse_than_the_kubelet(path, announce):
    topologies = golden_machines(path)
    machines, placers = [Machine(t) for t in topologies], [Placer(t) for t in topologies]
    cases = golden_choices(path)["cases"]
    outcome: Counter[str] = Counter()
    for case in cases:
        free, kubelet = CpuSet.parse(case["available"]), CpuSet.parse(case["kubelet"])
        machine = machines[case["topology"]]
        chosen = placers[case["topology"]].place(free, case["count"])
        assert len(chosen) == case["count"] == len(kubelet)
        assert chosen <= free
        ours, theirs = machine.counts(chosen), machine.counts(kubelet)
        assert ours <= theirs, case
        outcome["better" if ours < theirs else "equal"] += 1
        for level, mine, other in zip(("sockets", "NUMA nodes", "L3 caches", "split cores"), ours, theirs, strict=True):
            outcome[f"fewer {level}"] += mine < other
    counts = ", ".join(f"{what} {n}" for what, n in outcome.most_common())
    announce(f"placement beside the kubelet's, {len(cases)} cases: kubelet better 0, {counts}")
    assert outcome["better"] == 209
    assert len(cases) == outcome["better"] + outcome["equal"]


MACHINES = {
    "64 CPUs, two L3 caches a node": {"sockets": 2, "caches": 2, "cores": 8, "threads": 2},
    "128 CPUs, four nodes": {"sockets": 2, "nodes": 2, "caches": 2, "cores": 8, "threads": 2},
    "128 CPUs, four threads a core": {"sockets": 2, "caches": 4, "cores": 4, "threads": 4},
    "128 CPUs, eight threads a core": {"sockets": 2, "caches": 2, "cores": 4, "threads": 8},
    "96 CPUs, one thread a core": {"sockets": 2, "nodes": 2, "caches": 4, "cores": 6},
    "80 CPUs, one L3 cache a socket": {"sockets": 2, "cores": 20, "threads": 2},
}


@pytest.mark.parametrize("shape", MACHINES.values(), ids=MACHINES)
def test_is_what_plain_python_finds(shape):
    topology = regular_machine(**shape)
    placer, python = Placer(topology), PythonPlacer(Machine(topology))
    random = Random(len(topology.online))
    for share in (1, 0.8, 0.5):
        free = CpuSet(cpu for cpu in topology.online if random.random() < share)
        for n in (1, 2, *random.sample(range(3, len(free)), 6), len(free)):
            assert placer.place(free, n) == python.place(free, n), (free, n)
