# SPDX-License-Identifier: Apache-2.0
"""Placement written from the rules in `fastcpu.placement` alone, twice: slow and clearly correct, and merely slow.

`Choices` looks at every choice there is, on machines with a dozen free CPUs. A choice is a row of NumPy arrays: bit i
of its number is the i-th free CPU. Domains are taken as the topology has them, so it counts right where they overlap
without nesting. `PythonPlacer` is what one would write in Python to get the same on larger machines.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from operator import add

import numpy as np

from fastcpu import CpuSet, Topology
from fastcpu.placement import Policy
from fastcpu.topology import EFFICIENCY, PERFORMANCE, STANDARD

TYPES = (PERFORMANCE, STANDARD, EFFICIENCY)
OF_TYPE = {"p-core": PERFORMANCE, "e-core": EFFICIENCY}

Cpus = frozenset[int]


def groups(labels: dict[int, object]) -> list[Cpus]:
    """Return the CPUs of each label, ascending by the lowest."""
    found: dict[object, set[int]] = {}
    for cpu in sorted(labels):
        found.setdefault(labels[cpu], set()).add(cpu)
    return [frozenset(cpus) for cpus in found.values()]


class Machine:
    """The domains of a machine, as sets of CPUs."""

    def __init__(self, topology: Topology) -> None:
        online = set(topology.online)

        def rows(level) -> dict[int, int]:
            return {cpu: int(level.group_of[cpu]) for cpu in online}

        sockets = rows(topology.sockets)
        nodes = {cpu: row if row >= 0 else ("none", sockets[cpu]) for cpu, row in rows(topology.numa_nodes).items()}
        caches = {
            cpu: row if row >= 0 else ("none", sockets[cpu], nodes[cpu])
            for cpu, row in rows(topology.l3_caches).items()
        }
        self.online = frozenset(online)
        self.sockets, self.nodes, self.caches = groups(sockets), groups(nodes), groups(caches)
        self.cores = groups(rows(topology.cores))
        self.type_of = {cpu: int(topology.core_type[cpu]) for cpu in online}
        self.types = [kind for kind in TYPES if kind in self.type_of.values()]

    def counts(self, cpus: Iterable[int]) -> tuple[int, int, int, int]:
        """Count the sockets, NUMA nodes, L3 caches and split cores of a choice."""
        chosen = set(cpus)
        touched = [sum(not group.isdisjoint(chosen) for group in level) for level in self.levels]
        return (*touched, sum(0 < len(core & chosen) < len(core) for core in self.cores))

    @property
    def levels(self) -> tuple[list[Cpus], list[Cpus], list[Cpus]]:
        return self.sockets, self.nodes, self.caches

    def nested(self) -> bool:
        """Tell whether no two domains overlap without nesting."""
        domains = {group for level in self.levels for group in level}
        return all(not a & b or a <= b or b <= a for a, b in combinations(domains, 2)) and all(
            not core & domain or core <= domain for core in self.cores for domain in domains
        )


def inside(outer: Cpus, domains: set[Cpus]) -> list[Cpus]:
    """Return the largest domains within another one, ascending by their lowest CPU."""
    candidates = [domain for domain in domains if domain < outer]
    return sorted((a for a in candidates if not any(a < b for b in candidates)), key=min)


class Choices:
    """All choices from one set of free CPUs."""

    def __init__(self, machine: Machine, free: CpuSet) -> None:
        self.machine = machine
        self.free = sorted(free)
        self.numbers = np.arange(1 << len(self.free), dtype=np.uint32)
        self.sizes = self.count(machine.online)
        domains = [[group for group in level if group & set(self.free)] for level in machine.levels]
        self.cores = [core for core in machine.cores if core & set(self.free)]
        in_core = {core: self.count(core) for core in self.cores}
        self.in_core = in_core
        self.in_node = [self.count(node) for node in domains[1]]
        self.node_cpus = domains[1]
        every = [*domains, self.cores]
        touched = [[self.count(group) > 0 for group in level] for level in every]
        n_free = [[len(group & set(self.free)) for group in level] for level in every]
        nothing = np.zeros(len(self.numbers), np.int64)
        self.touched = [sum(level, nothing) for level in touched[:3]]
        self.split = sum(((n > 0) & (n < len(core)) for core, n in in_core.items()), nothing)
        self.slow = sum(
            (rank * self.count({cpu for cpu in self.free if machine.type_of[cpu] == kind})
             for rank, kind in enumerate(machine.types)), nothing)  # fmt: skip
        self.whole = nothing.copy()
        self.loose = nothing.copy()
        for groups_, free_of, touched_of in zip(every, n_free, touched, strict=True):
            for group, n, touches in zip(groups_, free_of, touched_of, strict=True):
                self.whole += touches * (len(group) if n == len(group) else 0)
                self.loose += touches * n

    def count(self, cpus: Iterable[int]) -> np.ndarray:
        """Count for each choice how many of some CPUs it has."""
        counted = set(cpus)
        mask = np.uint32(sum(1 << i for i, cpu in enumerate(self.free) if cpu in counted))
        return np.bitwise_count(self.numbers & mask).astype(np.int64)

    def best(self, n: int, policy: Policy) -> CpuSet | None:
        """Return the best choice of n CPUs, or None if there is none."""
        machine = self.machine
        if policy.core_type == "any":
            type_sets = [c for k in range(1, len(machine.types) + 1) for c in combinations(machine.types, k)]
        else:
            type_sets = [(OF_TYPE[policy.core_type],)]
        for types in type_sets:
            rows = self.possible(n, policy, {cpu for cpu in self.free if machine.type_of[cpu] in types})
            if len(rows):
                chosen = int(self.numbers[self.choose(rows, policy)])
                return CpuSet(cpu for i, cpu in enumerate(self.free) if chosen >> i & 1)
        return None

    def possible(self, n: int, policy: Policy, usable: set[int]) -> np.ndarray:
        """Return the rows of the choices that the policy allows."""
        allowed = (self.sizes == n) & (self.count(usable) == n)
        able = {core: len(core & usable) for core in self.cores}
        low = dict.fromkeys(self.cores, 0)
        if policy.full_cores == "require":
            able = {core: size if size == len(core) else 0 for core, size in able.items()}
            for core, counted in self.in_core.items():
                allowed &= (counted == 0) | (counted == len(core))
        elif policy.spread == "cores":
            layers = next((m for m in range(1, n + 1) if sum(min(a, m) for a in able.values()) >= n), None)
            if layers is None:
                return np.array([], np.intp)
            low = {core: min(a, layers - 1) for core, a in able.items()}
            able = {core: min(a, layers) for core, a in able.items()}
            for core, counted in self.in_core.items():
                allowed &= (low[core] <= counted) & (counted <= able[core])
        rows = np.flatnonzero(allowed)
        if policy.numa == "distribute" and len(rows):
            rows = self.most_even(rows, n, low, able, policy)
        return rows

    def most_even(self, rows, n, low, able, policy) -> np.ndarray:
        sizes = {size for size in able.values() if size}
        unit = sizes.pop() if policy.full_cores == "require" and len(sizes) == 1 else 1
        bounds = [
            (sum(low[c] for c in self.cores if c <= node), sum(able[c] for c in self.cores if c <= node))
            for node in self.node_cpus
        ]
        shares = [b for b in range(0, n + 1, unit) if sum(min(max(b, x), y) for x, y in bounds) <= n]
        slack = np.zeros(len(rows), np.int64)
        for (x, y), counted in zip(bounds, self.in_node, strict=True):
            fewest, most = (min(max(b, x), y) for b in (shares[-1], shares[-1] + unit))
            slack = np.maximum(slack, np.maximum(fewest - counted[rows], counted[rows] - most))
        return rows[slack == slack.min()]

    def choose(self, rows: np.ndarray, policy: Policy) -> int:
        """Return the row of the best choice."""
        criteria = [*self.touched, self.slow, self.whole, self.loose]
        if policy.spread == "none" or policy.full_cores == "require":
            criteria.insert(3, self.split)
        for criterion in criteria:
            values = criterion[rows]
            rows = rows[values == values.min()]
        domains = {group for level in self.machine.levels for group in level}
        rows = self.prefer_first(rows, self.machine.online, domains)
        # What is left differs in nothing but which threads of a core it has.
        return min(rows, key=lambda row: [i for i in range(len(self.free)) if int(self.numbers[row]) >> i & 1])

    def prefer_first(self, rows: np.ndarray, outer: Cpus, domains: set[Cpus]) -> np.ndarray:
        children = inside(outer, domains)
        for child in children:
            rows = self.most(rows, self.count(child))
        for child in children:
            rows = self.prefer_first(rows, child, domains)
        if children:
            return rows
        alike: dict[tuple[int, bool, int], list[Cpus]] = {}
        for core in self.cores:
            if core <= outer:
                n = len(core & set(self.free))
                rank = self.machine.types.index(self.machine.type_of[min(core)])
                alike.setdefault((rank, n < len(core), -n), []).append(core)
        for key in sorted(alike):
            rows = self.most(rows, sum(self.in_core[core] for core in alike[key]))
        for key in sorted(alike):
            for core in alike[key]:
                rows = self.most(rows, self.in_core[core])
        return rows

    @staticmethod
    def most(rows: np.ndarray, counted: np.ndarray) -> np.ndarray:
        values = counted[rows]
        return rows[values == values.max()]


class PythonPlacer:
    """Places without wishes, on a machine whose domains are nested and whose cores are of one type."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.domains = {group for level in machine.levels for group in level}

    def place(self, free: CpuSet, n: int) -> CpuSet:
        cpus = set(free)
        return CpuSet(self.best(self.machine.online, cpus, n)[n][1])

    def best(self, domain: Cpus, free: set[int], most: int) -> dict[int, tuple[tuple[int, ...], Cpus]]:
        """Return cost and CPUs of the best choice of every number of CPUs in a domain."""
        children = [child for child in inside(domain, self.domains) if child & free]
        parts = [self.best(child, free, most) for child in children] or self.alike(domain, free)
        total = {0: ((0,) * 6, frozenset())}
        for part in reversed(parts):
            joined: dict[int, tuple[tuple[int, ...], Cpus]] = {}
            # More of the earlier part first: of equal choices the first one stays.
            for given in sorted(part, reverse=True):
                cost, cpus = part[given]
                for rest, (rest_cost, rest_cpus) in total.items():
                    both = tuple(map(add, cost, rest_cost))
                    if given + rest <= most and (given + rest not in joined or both < joined[given + rest][0]):
                        joined[given + rest] = both, cpus | rest_cpus
            total = joined
        n_free = len(domain & free)
        units = [int(domain in level) for level in self.machine.levels]
        own = (*units, 0, sum(units) * n_free * (n_free == len(domain)), sum(units) * n_free)
        return {
            n: (tuple(map(add, cost, own)) if n else cost, cpus) for n, (cost, cpus) in total.items()
        }  # fmt: skip

    def alike(self, domain: Cpus, free: set[int]) -> list[dict[int, tuple[tuple[int, ...], Cpus]]]:
        """Return for cores that are alike the best choice of every number of CPUs."""
        classes: dict[tuple[bool, int], list[int]] = {}
        for core in self.machine.cores:
            usable = core & free
            if usable and core <= domain:
                classes.setdefault((len(usable) < len(core), -len(usable)), []).extend(sorted(usable))
        parts = []
        for (shared, negative), cpus in sorted(classes.items()):
            size = -negative
            part = {0: ((0,) * 6, frozenset[int]())}
            for n in range(1, len(cpus) + 1):
                touched = -(-n // size)
                split = touched if shared else int(n % size > 0)
                part[n] = (0, 0, 0, split, 0 if shared else touched * size, touched * size), frozenset(cpus[:n])
            parts.append(part)
        return parts
