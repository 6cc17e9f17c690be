# SPDX-License-Identifier: Apache-2.0
"""C interface of Placer, for modules that place CPUs from C."""

from libc.stdint cimport int64_t, uint64_t

from fastcpu.placement.search_state cimport Machine, Search, Wishes
from fastcpu.topology cimport Topology

cdef class Placer:
    cdef readonly Topology topology
    cdef Machine machine
    cdef int64_t *crossing_costs    # of each crossing domain
    cdef unsigned int n_crossing
    cdef list types                 # of core that the machine has, the fastest first: their ranks
    cdef tuple type_sets            # which ranks to try one after the other, as bits

    cdef int fill(self, list domains, list cores, list weights) except -1
    cdef bint find(self, Search *search, Wishes wishes, uint64_t *words) except -1
    cdef tuple only(self, object core_type)
