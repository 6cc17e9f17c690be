# SPDX-License-Identifier: Apache-2.0
"""Find the best CPUs for one request in the domains of a machine."""

from libc.stdint cimport int64_t, uint64_t

from fastcpu.placement.search_state cimport Search

# The least cost of a choice that meets the wishes; IMPOSSIBLE if there is none, -1 without memory.
cdef int64_t run(Search *search) noexcept nogil

# Sets the bits of the choice that the last run() found; it must have found one.
cdef void collect(Search *search, uint64_t *words) noexcept nogil
