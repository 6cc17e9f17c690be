# SPDX-License-Identifier: Apache-2.0
"""The same work with what a Python programmer would reach for instead: sets, ints, NumPy booleans, roaring bitmaps.

Each rival reads the kernel's list syntax (without strides, which the benchmarks do not use), and tells whether a
choice is online, not reserved, within the demanded groups with the right count in each, and not taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from pyroaring import BitMap

Demands = Sequence[tuple[int, int]]


def ranges(text: str) -> list[tuple[int, int]]:
    """Read a cpulist as (first, last) pairs."""
    pairs = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        pairs.append((int(first), int(last or first)))
    return pairs


def write_ranges(pairs: Iterable[tuple[int, int]]) -> str:
    """Write (first, last) pairs as a cpulist."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def runs(ascending: Iterable[int]) -> list[tuple[int, int]]:
    """Join ascending numbers to (first, last) pairs."""
    pairs = []
    first = last = -2
    for cpu in ascending:
        if cpu != last + 1:
            if last >= 0:
                pairs.append((first, last))
            first = cpu
        last = cpu
    if last >= 0:
        pairs.append((first, last))
    return pairs


def parse_set(text: str) -> set[int]:
    cpus: set[int] = set()
    for first, last in ranges(text):
        cpus.update(range(first, last + 1))
    return cpus


def format_set(cpus: set[int]) -> str:
    return write_ranges(runs(sorted(cpus)))


def make_int(cpus: Iterable[int]) -> int:
    mask = 0
    for cpu in cpus:
        mask |= 1 << cpu
    return mask


def parse_int(text: str) -> int:
    mask = 0
    for first, last in ranges(text):
        mask |= ((1 << (last - first + 1)) - 1) << first
    return mask


def list_int(mask: int) -> list[int]:
    return [cpu for cpu, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]


def format_int(mask: int) -> str:
    return write_ranges(runs(list_int(mask)))


def make_booleans(cpus: Iterable[int], size: int) -> np.ndarray:
    mask = np.zeros(size, bool)
    mask[np.fromiter(cpus, int)] = True
    return mask


def parse_booleans(text: str, size: int) -> np.ndarray:
    mask = np.zeros(size, bool)
    for first, last in ranges(text):
        mask[first : last + 1] = True
    return mask


def format_booleans(mask: np.ndarray) -> str:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return write_ranges((first, end - 1) for first, end in zip(edges[::2], edges[1::2], strict=True))


def parse_roaring(text: str) -> BitMap:
    cpus = BitMap()
    for first, last in ranges(text):
        cpus.add_range(first, last + 1)
    return cpus


def format_roaring(cpus: BitMap) -> str:
    return write_ranges(runs(cpus))


class SetPool:
    """Masks as ``set[int]``."""

    def __init__(self, online: set[int], reserved: set[int], groups: Sequence[set[int]]) -> None:
        self.online = online
        self.reserved = reserved
        self.groups = groups
        self.taken: set[int] = set()

    def check(self, text: str, demands: Demands) -> set[int]:
        cpus = parse_set(text)
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
        self.online = make_int(online)
        self.reserved = make_int(reserved)
        self.groups = [make_int(group) for group in groups]
        self.taken = 0

    def check(self, text: str, demands: Demands) -> int:
        cpus = parse_int(text)
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
        self.online = make_booleans(online, self.size)
        self.reserved = make_booleans(reserved, self.size)
        self.groups = [make_booleans(group, self.size) for group in groups]
        self.taken = np.zeros(self.size, bool)

    def check(self, text: str, demands: Demands) -> np.ndarray:
        cpus = parse_booleans(text, self.size)
        allowed = np.zeros(self.size, bool)
        for group, count in demands:
            if np.count_nonzero(cpus & self.groups[group]) != count:
                raise ValueError(group)
            allowed |= self.groups[group]
        if (cpus & ~(self.online & ~self.reserved & allowed & ~self.taken)).any():
            raise ValueError(text)
        return cpus


class RoaringPool:
    """Masks as compressed bitmaps of pyroaring."""

    def __init__(self, online: set[int], reserved: set[int], groups: Sequence[set[int]]) -> None:
        self.online = BitMap(online)
        self.reserved = BitMap(reserved)
        self.groups = [BitMap(group) for group in groups]
        self.taken = BitMap()

    def check(self, text: str, demands: Demands) -> BitMap:
        cpus = parse_roaring(text)
        allowed = BitMap()
        for group, count in demands:
            if cpus.intersection_cardinality(self.groups[group]) != count:
                raise ValueError(group)
            allowed |= self.groups[group]
        if not (cpus <= self.online and cpus.isdisjoint(self.reserved) and cpus <= allowed):
            raise ValueError(text)
        if not cpus.isdisjoint(self.taken):
            raise ValueError(text)
        return cpus
