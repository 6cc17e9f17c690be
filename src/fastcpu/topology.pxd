# SPDX-License-Identifier: Apache-2.0
"""C interface of Topology for other Cython packages: mask rows, and the row of each CPU, without Python objects.

The pointers are valid as long as their Level lives. Their memory is constant.
"""

from libc.stdint cimport int32_t, uint64_t

from fastcpu.cpuset cimport CpuSet

cdef class Level:
    cdef const uint64_t *mask_words     # n_groups rows of n_words words
    cdef const int32_t *row_of_cpu      # n_cpus entries; -1: in no group
    cdef Py_ssize_t n_groups
    cdef Py_ssize_t n_words
    cdef Py_ssize_t n_cpus
    cdef bytes mask_data                # these two own the memory of the pointers and the arrays
    cdef bytes row_data
    cdef readonly tuple ids
    cdef readonly object masks
    cdef readonly object group_of

cdef class Topology:
    cdef readonly Py_ssize_t n_cpus
    cdef readonly Py_ssize_t n_words
    cdef readonly CpuSet online
    cdef readonly CpuSet present
    cdef readonly CpuSet possible
    cdef readonly CpuSet isolated
    cdef readonly bint smt_enabled
    cdef readonly Level cores
    cdef readonly Level l3_caches
    cdef readonly Level dies
    cdef readonly Level numa_nodes
    cdef readonly Level sockets
    cdef readonly Level machine
    cdef readonly object core_type
    cdef readonly object core_id
    cdef readonly object die_id
    cdef readonly tuple memory_nodes
    cdef readonly tuple notes
