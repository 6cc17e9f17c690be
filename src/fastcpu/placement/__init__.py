# SPDX-License-Identifier: Apache-2.0
"""Choose CPUs where the driver may choose: the best ones there are, by rules that leave nothing to chance.

Of all choices of n free CPUs the best one is taken. Of two choices that one is better which is so by the first of
these criteria in which they differ. A domain (a socket, NUMA node or L3 cache) or a core is *touched* by a choice
that has a CPU of it.

1. Sockets: the fewest touched.
2. NUMA nodes: the fewest touched.
3. L3 caches: the fewest touched.
4. Split cores: the fewest cores of which the choice has some but not all online threads. What counts is that somebody
   else may run on the rest of the core, whether it is in use already or not. With CPUs spread over cores this is what
   was wished for, and not looked at.
5. Best fit: the fewest CPUs in touched domains and cores that are wholly free, summed over all levels, so that the
   largest whole ones stay whole; then the fewest free CPUs in touched ones, whole or not, so that what is left over
   lies together.
6. Lowest CPUs: the most CPUs in the first socket, then in the second, …; then the same in the domains inside each. In
   the smallest domains cores with equally many free CPUs are taken in order, wholly free ones and those with more
   free CPUs first; of each core the lowest threads. Domains and cores are ordered by their lowest online CPU.

Before all of them come the wishes of a `Policy`, in this order: the type of the cores, the spread over cores, the
spread over NUMA nodes. Where no single type of core suffices, the choice with more CPUs of faster cores is better if
the first four criteria do not differ.

The choice is the exact optimum on every machine, however asymmetric (`fastcpu.placement.search`), and depends on
nothing but the arguments. Freeing CPUs never makes a request impossible that was possible.

There are limits, where the tables of a machine contradict themselves (`fastcpu.placement.domains`): domains that
overlap without nesting are only counted by the first four criteria and not by the fifth, and not evened out if they are
NUMA nodes; if there are many they count once for each piece, and so does a core that lies in several domains. And where
the criteria do not fit into 62 bits together, from about 8,192 CPUs with hundreds of L3 caches on, the end of the fifth
is left out.
"""

from fastcpu.placement.placer import Placer, place
from fastcpu.placement.policy import Policy

__all__ = ["Placer", "Policy", "place"]
