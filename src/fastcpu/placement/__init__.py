# SPDX-License-Identifier: Apache-2.0
"""Choose the best of the free CPUs, by rules that leave nothing to chance.

A machine of two NUMA nodes with four cores of two threads each; CPUs n and n + 8 are the threads of one core::

             core   0     1     2     3      4     5     6     7
    NUMA node 0   0 8   1 9  2 10  3 11   ╷ 4 12  5 13  6 14  7 15   NUMA node 1

>>> from fastcpu import CpuSet, Topology
>>> from fastcpu.placement import Placer, Policy
>>> nodes = [0, 0, 0, 0, 1, 1, 1, 1]
>>> placer = Placer(Topology.from_arrays(CpuSet(range(16)), cores=[*range(8)] * 2, numa_nodes=nodes * 2))
>>> free = CpuSet.parse("1-15")  # CPU 0 is in use
>>> str(placer.place(free, 4))  # whole cores, of the node that is in use already
'1-2,9-10'
>>> str(placer.place(free, 8))  # node 1: node 0 has 7 free CPUs
'4-7,12-15'
>>> str(placer.place(free, 3))  # CPU 8 completes a core whose other thread is in use
'1,8-9'
>>> str(placer.place(free, 4, Policy(spread="cores")))  # a thread of each of four cores
'1-3,8'
>>> placer.place(free, 15, Policy(full_cores="require"))
Traceback (most recent call last):
    ...
fastcpu.errors.PlacementError: 15 CPUs cannot be placed: 14 CPUs of whole cores are free; 14 would fit

Notes
-----
A choice *touches* a domain (a socket, NUMA node or L3 cache) or a core if it has a CPU of it. The criteria, the most
important one first; a later one decides only between choices that are equal by all earlier ones:

1. Sockets: the fewest touched.
2. NUMA nodes: the fewest touched.
3. L3 caches: the fewest touched.
4. Split cores: the fewest cores of which the choice has some but not all online threads, since another workload may
   run on the other threads. It does not count whether these are in use now. Where CPUs are spread over cores, split
   cores are the wish, and this criterion is left out.
5. Best fit: the fewest CPUs in touched domains and cores that are wholly free, summed over all levels, so that the
   largest of these stay whole. Then the fewest free CPUs in touched domains and cores, so that the CPUs that remain
   lie together.
6. Lowest CPUs: the most CPUs in the first socket, then in the second, and so on; then the same in the domains inside
   each. Domains and cores are ordered by their lowest online CPU. In the smallest domains wholly free cores come
   first, then those with more free CPUs, then those with lower CPUs. The lowest threads of a core come first.

The wishes of a `Policy` precede all criteria, in this order: the type of the cores, the spread over cores, the spread
over NUMA nodes. Where no single type of core suffices, more CPUs of faster cores are better; this stands between
criteria 4 and 5.

The choice is the exact optimum on every machine, however asymmetric (`fastcpu.placement.search`). It depends on the
arguments alone. Freeing CPUs never makes a request impossible that was possible.

The rules are weaker in two cases. The tables of a machine may contradict themselves, so that domains overlap without
nesting (`fastcpu.placement.domains`). Such domains count in the first four criteria only, and are not evened out if
they are NUMA nodes. Where they are many, each counts once for each piece, and so does a core that lies in several
domains. And where all criteria together need more than 62 bits, from about 8,192 CPUs with hundreds of L3 caches on,
the last part of the fifth is left out.
"""

from fastcpu.placement.placer import Placer, place
from fastcpu.placement.policy import Policy

__all__ = ["Placer", "Policy", "place"]
