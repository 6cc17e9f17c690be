# SPDX-License-Identifier: Apache-2.0
"""The sockets, NUMA nodes and L3 caches of a machine as one tree, which placement walks.

On nearly all machines the CPUs of two such domains are nested or disjoint. Any level may be the outer one: an L3 cache
may lie in a NUMA node or contain several, a NUMA node may contain several sockets. Each different set of CPUs is one
domain of the tree, and may be of several levels. Three cases need a rule:

- CPUs without a socket are one socket. CPUs of a socket without a NUMA node are one node. CPUs of a socket and a node
  without an L3 cache are one L3 cache. So a CPU is never preferred because less is known about it.
- A domain is *crossing* if it overlaps a domain of an earlier level and neither contains the other. Only contradictory
  tables of firmware and of virtual machines have such domains. A few of them are left out of the tree, and placement
  tries with and without each. Where they are many, each is cut along what it crosses and counts once for each piece.
- A core whose threads lie in several domains, or are of different types, is one core for each of these. None is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fastcpu.topology import Level, Topology

__all__ = ["Core", "Domain", "DomainTree", "build_tree"]

# Each subset of the crossing domains is one search of the whole machine.
_MOST_CROSSING: Final = 8
_MOST_SEARCHED_CPUS: Final = 1 << 14

SOCKET, NUMA_NODE, L3_CACHE = range(3)

_Labels = Sequence[Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core, or the part of one that lies in one domain.

    Attributes
    ----------
    cpus : tuple of int
        Its online threads, ascending.
    size : int
        How many online threads the whole core has.
    core_type : int
        ``STANDARD``, ``PERFORMANCE`` or ``EFFICIENCY`` of `fastcpu.topology`.
    crossing : int
        Bit i is set if the core lies in domain i of `DomainTree.crossing`.
    """

    cpus: tuple[int, ...]
    size: int
    core_type: int
    crossing: int


@dataclass(slots=True, kw_only=True, eq=False)
class Domain:
    """A set of CPUs that is a socket, a NUMA node, an L3 cache, or several of them at once.

    Attributes
    ----------
    first_cpu : int
        Its lowest online CPU.
    n_cpus : int
        How many online CPUs it has.
    levels : set of int
        Of `SOCKET`, `NUMA_NODE` and `L3_CACHE`. Empty for the machine, and for CPUs whose own domain is crossing.
    children : list of Domain
        The largest domains inside, ascending by their lowest CPU. They have all its CPUs together, or there are none.
    cores : list of Core
        The cores of a domain without children, ascending by their lowest CPU.
    """

    first_cpu: int
    n_cpus: int
    levels: set[int]
    children: list[Domain] = field(default_factory=list)
    cores: list[Core] = field(default_factory=list)

    @property
    def counts_children(self) -> bool:
        """Whether every child is one domain of the most important level that any domain inside is of.

        If so, the best choice is always among those that touch the fewest children.
        """
        below = set[int]().union(*(child.all_levels() for child in self.children))
        return bool(below) and all(min(below) in child.levels for child in self.children)

    def all_levels(self) -> set[int]:
        """Return the levels of this domain and of all inside."""
        return self.levels.union(*(child.all_levels() for child in self.children))


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainTree:
    """All domains of a machine.

    Attributes
    ----------
    root : Domain
        The machine.
    counts : tuple of int
        How many sockets, NUMA nodes and L3 caches there are.
    crossing : tuple of int
        The level of each crossing domain.
    """

    root: Domain
    counts: tuple[int, int, int]
    crossing: tuple[int, ...]


def build_tree(topology: Topology) -> DomainTree:
    """Arrange the domains of a machine.

    Parameters
    ----------
    topology : Topology

    Returns
    -------
    `DomainTree`
    """
    cpus = list(topology.online)
    sockets = _rows(topology.sockets, cpus)
    nodes = _separate(topology.numa_nodes, cpus, sockets)
    caches = _separate(topology.l3_caches, cpus, list(zip(sockets, nodes, strict=True)))
    levels: list[_Labels] = [sockets, nodes, caches]
    crossing = _crossing(levels)
    if len(crossing) > _MOST_CROSSING or len(cpus) << len(crossing) > _MOST_SEARCHED_CPUS:
        _cut(levels)
        crossing = []

    root = Domain(first_cpu=cpus[0], n_cpus=len(cpus), levels=set())
    smallest = _insert(root, cpus, levels, crossing)

    types = topology.core_type.tolist()
    rows = _rows(topology.cores, cpus)
    cores: dict[tuple[int, Domain, int, int], list[int]] = {}
    for i, cpu in enumerate(cpus):
        crossed = sum((levels[level][i] == label) << bit for bit, (level, label) in enumerate(crossing))
        cores.setdefault((rows[i], smallest[i], crossed, types[cpu]), []).append(cpu)
    sizes = Counter(rows)
    for (row, domain, crossed, core_type), threads in cores.items():
        domain.cores.append(Core(cpus=tuple(threads), size=sizes[row], core_type=core_type, crossing=crossed))
    return DomainTree(
        root=root,
        counts=(len(set(levels[SOCKET])), len(set(levels[NUMA_NODE])), len(set(levels[L3_CACHE]))),
        crossing=tuple(level for level, _ in crossing),
    )


def _rows(level: Level, cpus: list[int]) -> list[int]:
    rows = level.group_of.tolist()
    return [rows[cpu] for cpu in cpus]


def _separate(level: Level, cpus: list[int], around: _Labels) -> _Labels:
    """Return a label of each CPU's group; CPUs in no group are one group in each group of the levels around."""
    return [(row, outer if row < 0 else None) for row, outer in zip(_rows(level, cpus), around, strict=True)]


def _overlapping(outer: _Labels, inner: _Labels) -> set[Hashable]:
    """Return the inner groups that overlap an outer group without nesting."""
    outer_sizes, inner_sizes = Counter(outer), Counter(inner)
    return {
        b for (a, b), both in Counter(zip(outer, inner, strict=True)).items() if outer_sizes[a] > both < inner_sizes[b]
    }


def _crossing(levels: list[_Labels]) -> list[tuple[int, Hashable]]:
    """Return the level and the label of each domain without which the others are nested or disjoint."""
    sockets, nodes, caches = levels
    crossing_nodes = _overlapping(sockets, nodes)
    # A node that is left out crosses no cache: each of its CPUs is a group of its own here.
    kept_nodes = [(i, node) if node in crossing_nodes else node for i, node in enumerate(nodes)]
    crossing_caches = _overlapping(sockets, caches) | _overlapping(kept_nodes, caches)
    return [(NUMA_NODE, node) for node in dict.fromkeys(nodes) if node in crossing_nodes] + [
        (L3_CACHE, cache) for cache in dict.fromkeys(caches) if cache in crossing_caches
    ]


def _cut(levels: list[_Labels]) -> None:
    """Cut each crossing domain along the domains that it crosses."""
    sockets, nodes, caches = levels
    crossing = _overlapping(sockets, nodes)
    nodes = [(node, socket) if node in crossing else node for node, socket in zip(nodes, sockets, strict=True)]
    crossing = _overlapping(sockets, caches) | _overlapping(nodes, caches)
    caches = [
        (cache, socket, node) if cache in crossing else cache
        for cache, socket, node in zip(caches, sockets, nodes, strict=True)
    ]
    levels[NUMA_NODE:] = [nodes, caches]


def _insert(root: Domain, cpus: list[int], levels: list[_Labels], crossing: list[tuple[int, Hashable]]) -> list[Domain]:
    """Build the tree below the root; return the domain without children that each CPU is in."""
    found: dict[tuple[int, ...], set[int]] = {}
    for level, labels in enumerate(levels):
        members: dict[Hashable, list[int]] = {}
        for i, label in enumerate(labels):
            members.setdefault(label, []).append(i)
        for label, positions in members.items():
            if (level, label) not in crossing:
                found.setdefault(tuple(positions), set()).add(level)

    smallest = [root] * len(cpus)
    # From large to small: the smallest domain of a CPU so far is the domain around the next one.
    for group in sorted(found, key=lambda group: (-len(group), group[0])):
        domain = Domain(first_cpu=cpus[group[0]], n_cpus=len(group), levels=found[group])
        smallest[group[0]].children.append(domain)
        for i in group:
            smallest[i] = domain
    rest: dict[Domain, Domain] = {}
    for i, domain in enumerate(smallest):
        if domain.children:
            if domain not in rest:
                rest[domain] = Domain(first_cpu=cpus[i], n_cpus=0, levels=set())
            smallest[i] = rest[domain]
            smallest[i].n_cpus += 1
    for domain, without in rest.items():
        domain.children.append(without)
    _sort_children(root)
    return smallest


def _sort_children(domain: Domain) -> None:
    domain.children.sort(key=lambda child: child.first_cpu)
    for child in domain.children:
        _sort_children(child)
