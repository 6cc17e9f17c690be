# SPDX-License-Identifier: Apache-2.0
"""The machines and choices that the check is measured on."""

from __future__ import annotations

import numpy as np

from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from rivals import BooleanPool, IntPool, SetPool

SIZES = (64, 256, 512, 1024, 4096, 8192)
KINDS = ("one range", "one range, far end", "eight ranges", "every second CPU")
RIVALS = {"Python sets": SetPool, "Python ints": IntPool, "NumPy booleans": BooleanPool}
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


def rival(name: str, n_cpus: int):
    return RIVALS[name](set(range(n_cpus)), RESERVED, members(n_cpus))


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
