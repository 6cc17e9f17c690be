# SPDX-License-Identifier: Apache-2.0
"""The machines, CPU sets and choices that everything is measured on."""

from __future__ import annotations

import numpy as np

from fastcpu import CpuSet, Topology
from fastcpu.pool import CpuPool

SIZES = (64, 512, 1024, 8192)
KINDS = ("one range", "one range, far end", "eight ranges", "every second CPU")
GROUPS = 2
RESERVED = {0}


def members(n_cpus: int) -> list[set[int]]:
    """Return the CPUs of each group: two halves."""
    half = n_cpus // GROUPS
    return [set(range(start, start + half)) for start in range(0, n_cpus, half)]


def pool(n_cpus: int) -> CpuPool:
    groups = np.zeros((GROUPS, n_cpus // 64), np.uint64)
    for row, cpus in zip(groups, members(n_cpus), strict=True):
        words = CpuSet(cpus).words
        row[: len(words)] = words
    return CpuPool(CpuSet(range(n_cpus)), CpuSet(RESERVED), groups)


def choice(kind: str, n_cpus: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the text of a choice and its demands."""
    half = n_cpus // GROUPS
    if kind == "one range":
        return "2-5", ((0, 4),)
    if kind == "one range, far end":
        return f"{n_cpus - 6}-{n_cpus - 3}", ((1, 4),)
    if kind == "eight ranges":
        step = half // 8
        return ",".join(f"{half + i * step}-{half + i * step + 1}" for i in range(8)), ((1, 16),)
    cpus = range(half, n_cpus, 2)
    return ",".join(map(str, cpus)), ((1, len(cpus)),)


def server(n_cpus: int) -> Topology:
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
