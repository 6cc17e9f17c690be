# SPDX-License-Identifier: Apache-2.0
"""C interface of CpuPool for modules that choose CPUs from it; each mask has n_words words."""

from libc.stdint cimport uint64_t

from fastcpu.cpuset cimport CpuSet

cdef class CpuPool:
    cdef readonly Py_ssize_t n_words
    cdef readonly Py_ssize_t n_groups
    cdef object masks                 # ndarray of uint64, shape (4 + 2 * n_groups, n_words); owns what follows
    cdef uint64_t *online_words
    cdef uint64_t *reserved_words
    cdef uint64_t *taken_words
    cdef uint64_t *offline_words
    cdef uint64_t *member_words       # n_groups rows: the CPUs of each group
    cdef uint64_t *allocatable_words  # n_groups rows: its online CPUs that are not reserved

    # Computes allocatable_words anew, after another mask has changed.
    cdef void count_in(self) noexcept

    # Whether each group demanded has as many of the CPUs as demanded, no CPU is outside them, and none is taken.
    cdef bint fits(self, CpuSet cpus, tuple demands) except -1
