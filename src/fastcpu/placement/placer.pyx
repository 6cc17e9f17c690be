# SPDX-License-Identifier: Apache-2.0
"""Placer: one machine made ready for quick choices, and the order in which choices are tried."""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free as free_memory
from libc.string cimport memset
cimport cython

from fastcpu.cpuset cimport CpuSet, from_words
from fastcpu.placement.apportion cimport IMPOSSIBLE, allocate
from fastcpu.placement.search cimport collect, run
from fastcpu.placement.search_state cimport Core, Domain, Search, Weights, Wishes, apply_wishes, begin, end, leave_out
from fastcpu.topology cimport Topology

import operator
from itertools import combinations
from math import prod

from fastcpu.errors import PlacementError
from fastcpu.placement.domains import NUMA_NODE, build_tree
from fastcpu.placement.policy import Policy
from fastcpu.topology import CORE_TYPE_NAMES, EFFICIENCY, PERFORMANCE, STANDARD

__all__ = ["Placer", "place"]

_DEFAULT = Policy()
_FASTEST_FIRST = (PERFORMANCE, STANDARD, EFFICIENCY)


cdef list criterion_weights(object counts, object n_cpus, object n_threaded_cores, object n_types):
    """The cost of one unit of each criterion, the most important first; 0 for those that must be left out.

    The criteria are the digits of a number. No digit overflows: each criterion has a largest value.
    """
    largest = [*counts, n_threaded_cores, (n_types - 1) * n_cpus, 4 * n_cpus, 4 * n_cpus]
    kept = len(largest)
    while prod([value + 1 for value in largest[:kept]]) >= IMPOSSIBLE:
        kept -= 1
    return [prod([value + 1 for value in largest[i + 1:kept]]) if i < kept else 0 for i in range(len(largest))]


cdef tuple fitting_sizes(const Search *search):
    """The next smaller and the next larger number of CPUs than asked for that whole cores can give."""
    # Bit k says that some cores have k CPUs together; no C integer has as many bits.
    cdef object possible = 1, n = search.wishes.n, size
    cdef Py_ssize_t c
    for c in range(search.machine.n_cores):
        size = search.usable[c] * search.unit
        possible |= possible << size
    smaller = possible & ((1 << n) - 1)
    larger = possible >> n
    sizes = [smaller.bit_length() - 1] if smaller > 1 else []
    if larger:
        sizes.append(n + (larger & -larger).bit_length() - 1)
    return tuple(sizes)


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class Placer:
    """Chooses CPUs of one machine. It arranges the machine's domains once, for quick choices.

    Parameters
    ----------
    topology : Topology
        The machine.

    Attributes
    ----------
    topology : Topology
        The machine.

    Notes
    -----
    A placer never changes and keeps nothing from one call to the next, so threads may share it.

    Examples
    --------
    >>> from fastcpu import CpuSet, Topology
    >>> placer = Placer(Topology.from_arrays(CpuSet(range(8)), cores=[0, 1, 2, 3] * 2))
    >>> placer.place(CpuSet(range(8)), 2)
    CpuSet.parse('0,4')
    """

    def __cinit__(self, Topology topology not None):
        tree = build_tree(topology)
        domains, cores = [], []
        self.topology = topology
        self.n_crossing = len(tree.crossing)
        list_domain(tree.root, -1, domains, cores)
        self.types = [core_type for core_type in _FASTEST_FIRST if any(core.core_type == core_type for core in cores)]
        weights = criterion_weights(tree.counts, len(topology.online), sum([core.size > 1 for core in cores]),
                                    len(self.types))
        self.machine.n_domains = len(domains)
        self.machine.n_cores = len(cores)
        self.machine.domains = <Domain *> calloc(self.machine.n_domains, sizeof(Domain))
        self.machine.cores = <Core *> calloc(self.machine.n_cores, sizeof(Core))
        self.machine.cpus = <Py_ssize_t *> calloc(len(topology.online), sizeof(Py_ssize_t))
        self.machine.core_of_cpu = <Py_ssize_t *> calloc(topology.n_cpus, sizeof(Py_ssize_t))
        self.crossing_costs = <int64_t *> calloc(self.n_crossing + 1, sizeof(int64_t))
        if self.machine.domains == NULL or self.machine.cores == NULL or self.machine.cpus == NULL \
                or self.machine.core_of_cpu == NULL or self.crossing_costs == NULL:
            raise MemoryError()
        self.machine.weights = Weights(split=weights[3], slow=weights[4], whole=weights[5], loose=weights[6])
        for index, level in enumerate(tree.crossing):
            self.crossing_costs[<Py_ssize_t> index] = weights[level]
        self.fill(domains, cores, weights)
        self.type_sets = tuple([sum([1 << rank for rank in chosen]) for length in range(1, len(self.types) + 1)
                                for chosen in combinations(range(len(self.types)), length)])

    cdef int fill(self, list domains, list cores, list weights) except -1:
        """Write the listed domains and cores into the arrays."""
        cdef Py_ssize_t i, position = 0
        cdef Domain *domain
        cdef Core *core
        for i in range(self.machine.n_domains):
            domain = &self.machine.domains[i]
            described, domain.parent, domain.end, domain.first_core, domain.end_core = domains[i]
            domain.n_cpus = described.n_cpus
            domain.n_levels = len(described.levels)
            domain.cost = sum([weights[level] for level in described.levels])
            domain.is_numa_node = NUMA_NODE in described.levels
            domain.counts_children = described.counts_children
        for i in range(self.machine.n_cores):
            core = &self.machine.cores[i]
            described = cores[i]
            core.first = position
            core.n_cpus = len(described.cpus)
            core.size = described.size
            core.rank = self.types.index(described.core_type)
            core.crossing = described.crossing
            self.machine.largest_core = max(self.machine.largest_core, core.n_cpus)
            for cpu in described.cpus:
                self.machine.cpus[position] = cpu
                self.machine.core_of_cpu[<Py_ssize_t> cpu] = i
                position += 1
        return 0

    def __dealloc__(self):
        free_memory(self.machine.domains)
        free_memory(self.machine.cores)
        free_memory(self.machine.cpus)
        free_memory(self.machine.core_of_cpu)
        free_memory(self.crossing_costs)

    cdef bint find(self, Search *search, Wishes wishes, uint64_t *words) except -1:
        """Write the best choice into the words; 0 if there is none."""
        cdef int64_t least = IMPOSSIBLE, cost, crossing_cost
        cdef unsigned int all_crossing = (1 << self.n_crossing) - 1, subset, i
        # A crossing domain costs as much as any other of its level. It costs that by being in the subset, used or not.
        for subset in range(1 << self.n_crossing):
            crossing_cost = 0
            for i in range(self.n_crossing):
                if (subset >> i) & 1:
                    crossing_cost += self.crossing_costs[i]
            apply_wishes(search, wishes)
            if search.n_usable < wishes.n:
                return False
            if crossing_cost >= least or not leave_out(search, all_crossing & ~subset):
                continue
            cost = run(search)
            if cost < 0:
                raise MemoryError()
            if cost < IMPOSSIBLE and crossing_cost + cost < least:
                least = crossing_cost + cost
                memset(words, 0, self.topology.n_words * sizeof(uint64_t))
                collect(search, words)
        return least < IMPOSSIBLE

    def place(self, CpuSet free not None, n, policy=_DEFAULT):
        """Choose the best of the free CPUs.

        Parameters
        ----------
        free : CpuSet
            The CPUs to choose from, all of them online. All other CPUs count as in use. To choose from one group of a
            machine, pass the free CPUs of the group.
        n : int
            How many CPUs to choose; at least 1.
        policy : Policy
            The wishes beside the number.

        Returns
        -------
        CpuSet
            Exactly n of the free CPUs.

        Raises
        ------
        PlacementError
            If the free CPUs do not suffice for n and the policy.
        ValueError
            If n is less than 1, or a free CPU is not online.

        Notes
        -----
        Time and memory are bounded by O(free CPUs × n), whichever CPUs are free. With c crossing domains (see
        `fastcpu.placement.domains`) the time is 2^c times as much, for machines of at most 16,384 / 2^c CPUs.

        Examples
        --------
        >>> from fastcpu import CpuSet, Topology
        >>> placer = Placer(Topology.from_arrays(CpuSet(range(8)), cores=[0, 1, 2, 3] * 2))
        >>> placer.place(CpuSet.parse("1-7"), 3)  # a whole core, and CPU 4, whose core is in use already
        CpuSet.parse('1,4-5')
        """
        cdef Search search
        cdef Wishes wishes
        cdef uint64_t *words
        cdef CpuSet online = self.topology.online
        number = operator.index(n)
        if number < 1:
            raise ValueError(f"{n} CPUs cannot be placed; at least 1")
        if not free <= online:
            raise ValueError(f"free CPUs {free - online} are not online")
        memset(&wishes, 0, sizeof(Wishes))
        wishes.n = min(number, len(online) + 1)
        wishes.spread = policy.spread == "cores"
        wishes.whole_cores = policy.full_cores == "require"
        wishes.distribute = policy.numa == "distribute"
        type_sets = self.type_sets if policy.core_type == "any" else self.only(CORE_TYPE_NAMES.index(policy.core_type))
        try:
            if begin(&search, &self.machine, free.buffer.words, free.buffer.n_words) < 0:
                raise MemoryError()
            words = <uint64_t *> allocate(&search.memory, self.topology.n_words * sizeof(uint64_t))
            if words == NULL:
                raise MemoryError()
            for types in type_sets:
                wishes.types = types
                if self.find(&search, wishes, words):
                    return from_words(words, self.topology.n_words)
            apply_wishes(&search, wishes)
            if wishes.whole_cores:
                fitting = fitting_sizes(&search)
            else:
                fitting = (search.n_usable,) if search.n_usable > 0 else ()
            raise PlacementError(number, search.n_usable, fitting, wishes.whole_cores, policy.core_type)
        finally:
            end(&search)

    cdef tuple only(self, object core_type):
        return (1 << self.types.index(core_type) if core_type in self.types else 0,)


cdef void list_domain(object domain, object parent, list domains, list cores) except *:
    """List a domain and all inside in preorder, as (domain, parent, end, first core, end core), and their cores."""
    index, first_core = len(domains), len(cores)
    domains.append(None)
    cores.extend(domain.cores)
    for child in domain.children:
        list_domain(child, index, domains, cores)
    domains[index] = (domain, parent, len(domains), first_core, len(cores))


def place(Topology topology not None, CpuSet free not None, n, policy=_DEFAULT):
    """Choose the best of the free CPUs of a machine.

    Each call arranges the domains of the machine anew, which takes much longer than the choice. For more than one
    choice on a machine make a `Placer`; `Placer.place` has the details.

    Parameters
    ----------
    topology : Topology
        The machine.
    free : CpuSet
        The CPUs to choose from.
    n : int
        How many CPUs to choose.
    policy : Policy
        The wishes beside the number.

    Returns
    -------
    CpuSet
        Exactly n of the free CPUs.

    Raises
    ------
    PlacementError
        If the free CPUs do not suffice for n and the policy.
    ValueError
        If n is less than 1, or a free CPU is not online.

    Examples
    --------
    >>> from fastcpu import CpuSet, Topology
    >>> place(Topology.from_arrays(CpuSet(range(8)), numa_nodes=[0, 0, 0, 0, 1, 1, 1, 1]), CpuSet.parse("2-7"), 3)
    CpuSet.parse('4-6')
    """
    return Placer(topology).place(free, n, policy)
