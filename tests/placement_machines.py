# SPDX-License-Identifier: Apache-2.0
"""Machines for the tests and benchmarks of placement: regular ones, and random ones as odd as they come."""

from __future__ import annotations

from random import Random

from fastcpu import CpuSet, Topology
from fastcpu.topology import EFFICIENCY, PERFORMANCE, STANDARD


def regular_machine(
    *, sockets: int = 1, nodes: int = 1, caches: int = 1, cores: int = 1, threads: int = 1
) -> Topology:  # fmt: skip
    """Return a machine with so many NUMA nodes a socket, L3 caches a node, cores a cache and threads a core.

    CPUs are numbered as on most servers: the first thread of every core, then the second of every core, ….
    """
    n_cores = sockets * nodes * caches * cores
    core = list(range(n_cores)) * threads
    return Topology.from_arrays(
        CpuSet(range(n_cores * threads)),
        cores=core,
        l3_caches=[c // cores for c in core],
        numa_nodes=[c // (cores * caches) for c in core],
        sockets=[c // (cores * caches * nodes) for c in core],
    )


def random_machine(random: Random, *, crossing: bool = False) -> Topology:
    """Return a small machine: asymmetric, with offline CPUs, several types of core, missing L3 caches, sparse ids, ….

    Domains are nested in one way or another, with few exceptions; `crossing` lets many overlap.
    """
    columns, threads = _cores(random)
    slots = [(core, thread) for core, n in enumerate(threads) for thread in range(n)]
    numbering = random.choice(["adjacent", "strided", "random"])
    if numbering == "strided":
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    elif numbering == "random":
        random.shuffle(slots)
    ids = sorted(random.sample(range(250), len(slots))) if random.random() < 0.3 else list(range(len(slots)))

    if random.random() < 0.15:
        without = {cache for cache in columns["l3_caches"] if random.random() < 0.5}
        columns["l3_caches"] = [-1 if cache in without else cache for cache in columns["l3_caches"]]
    if random.random() < 0.1:
        columns["numa_nodes"] = [0] * len(threads)
    elif random.random() < 0.05:
        columns["numa_nodes"] = [node if node % 2 else -1 for node in columns["numa_nodes"]]
    if crossing:
        for level in ("numa_nodes", "l3_caches"):
            column = columns[level]
            columns[level] = [random.choice(column) if random.random() < 0.15 else group for group in column]
    # Domains come in the order of their CPUs, not of their ids.
    order = random.sample(range(40), 40)
    columns["sockets"] = [order[socket] for socket in columns["sockets"]]

    arrays = {level: [-1] * (ids[-1] + 1) for level in ("cores", *columns)}
    for cpu, (core, _) in zip(ids, slots, strict=True):
        arrays["cores"][cpu] = core
        for level, column in columns.items():
            arrays[level][cpu] = column[core]
    arrays["core_type"] = [max(kind, 0) for kind in arrays["core_type"]]
    offline = {cpu for cpu in ids[1:] if random.random() < 0.2} if random.random() < 0.5 else set()
    return Topology.from_arrays(CpuSet(set(ids) - offline), possible=CpuSet(range(ids[-1] + 1)), **arrays)


def _cores(random: Random) -> tuple[dict[str, list[int]], list[int]]:
    """Return the domains and the type of each core, and how many threads it has."""
    largest = random.choice([1, 2, 2, 2, 4, 4, 8])
    hybrid = random.random() < 0.2
    nesting = random.choice(["caches in nodes", "caches in nodes", "nodes in caches", "equal"])
    n_cpus = random.randint(4, 26)
    columns: dict[str, list[int]] = {"sockets": [], "numa_nodes": [], "l3_caches": [], "core_type": []}
    threads: list[int] = []
    socket = node = cache = 0
    while sum(threads) < n_cpus:
        for _ in range(random.randint(1, 2)):
            for _ in range(random.randint(1, 3)):
                for _ in range(random.randint(1, 4)):
                    kind = random.choice([PERFORMANCE, PERFORMANCE, EFFICIENCY, STANDARD]) if hybrid else STANDARD
                    threads.append(1 if kind == EFFICIENCY else largest)
                    for level, value in zip(columns, (socket, node, cache, kind), strict=True):
                        columns[level].append(value)
                cache += nesting != "nodes in caches"
                node += nesting != "caches in nodes"
            cache += nesting == "nodes in caches"
            node += nesting == "caches in nodes"
        socket += random.random() < 0.85
    return columns, threads
