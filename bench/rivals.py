# SPDX-License-Identifier: Apache-2.0
"""The same check with what a Python programmer would reach for instead: sets, ints as bit masks, NumPy booleans.

Each rival reads the kernel's list syntax (without strides, which the benchmarks do not use), and tells whether the
choice is online, not reserved, within the demanded groups with the right count in each, and not taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Demands = Sequence[tuple[int, int]]


def ranges(text: str) -> list[tuple[int, int]]:
    """Read a cpulist as (first, last) pairs."""
    pairs = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        pairs.append((int(first), int(last or first)))
    return pairs


class SetPool:
    """Masks as ``set[int]``."""

    def __init__(self, online: set[int], reserved: set[int], groups: Sequence[set[int]]) -> None:
        self.online = online
        self.reserved = reserved
        self.groups = groups
        self.taken: set[int] = set()

    def check(self, text: str, demands: Demands) -> set[int]:
        cpus: set[int] = set()
        for first, last in ranges(text):
            cpus.update(range(first, last + 1))
        allowed: set[int] = set()
        for group, count in demands:
            if len(cpus & self.groups[group]) != count:
                raise ValueError(group)
            allowed |= self.groups[group]
        if not (cpus <= self.online and cpus.isdisjoint(self.reserved) and cpus <= allowed):
            raise ValueError(text)
        if not cpus.isdisjoint(self.taken):
            raise ValueError(text)
        return cpus


class IntPool:
    """Masks as arbitrarily large ints."""

    def __init__(self, online: set[int], reserved: set[int], groups: Sequence[set[int]]) -> None:
        self.online = sum(1 << cpu for cpu in online)
        self.reserved = sum(1 << cpu for cpu in reserved)
        self.groups = [sum(1 << cpu for cpu in group) for group in groups]
        self.taken = 0

    def check(self, text: str, demands: Demands) -> int:
        cpus = 0
        for first, last in ranges(text):
            cpus |= ((1 << (last - first + 1)) - 1) << first
        allowed = 0
        for group, count in demands:
            if (cpus & self.groups[group]).bit_count() != count:
                raise ValueError(group)
            allowed |= self.groups[group]
        if cpus & ~self.online or cpus & self.reserved or cpus & ~allowed or cpus & self.taken:
            raise ValueError(text)
        return cpus


class BooleanPool:
    """Masks as NumPy arrays with one boolean a CPU."""

    def __init__(self, online: set[int], reserved: set[int], groups: Sequence[set[int]]) -> None:
        self.size = max(online) + 1
        self.online = self._mask(online)
        self.reserved = self._mask(reserved)
        self.groups = [self._mask(group) for group in groups]
        self.taken = np.zeros(self.size, bool)

    def _mask(self, cpus: set[int]) -> np.ndarray:
        mask = np.zeros(self.size, bool)
        mask[sorted(cpus)] = True
        return mask

    def check(self, text: str, demands: Demands) -> np.ndarray:
        cpus = np.zeros(self.size, bool)
        for first, last in ranges(text):
            cpus[first : last + 1] = True
        allowed = np.zeros(self.size, bool)
        for group, count in demands:
            if np.count_nonzero(cpus & self.groups[group]) != count:
                raise ValueError(group)
            allowed |= self.groups[group]
        if (cpus & ~(self.online & ~self.reserved & allowed & ~self.taken)).any():
            raise ValueError(text)
        return cpus
