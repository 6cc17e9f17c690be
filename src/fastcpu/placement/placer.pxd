# SPDX-License-Identifier: Apache-2.0
"""C interface of Placer for modules that place CPUs from C."""

from libc.stdint cimport int64_t, uint64_t

from fastcpu.placement.search_state cimport Machine, Search, Wishes
from fastcpu.topology cimport Topology

cdef class Placer:
    cdef readonly Topology topology
    cdef Machine machine
    cdef int64_t *crossing_costs    # of each crossing domain
    cdef unsigned int n_crossing
    cdef list types                 # core types of the machine, the fastest first; the index of one is its rank
    cdef tuple type_sets            # which ranks a choice may take, as bits; the sets to try one after the other

    # Writes the listed domains and cores into the arrays.
    cdef int fill(self, list domains, list cores, list weights) except -1
    # Writes the best choice into the words; 0 if there is none.
    cdef bint find(self, Search *search, Wishes wishes, uint64_t *words) except -1
    # The type sets of one core type; no rank if the machine has no such core.
    cdef tuple only(self, object core_type)
