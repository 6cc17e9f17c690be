# SPDX-License-Identifier: Apache-2.0
"""C interface of CpuSet for other Cython packages: read the words, make a set from words or from text."""

from libc.stdint cimport uint64_t

from fastcpu.cpulist cimport INLINE_WORDS, WordBuffer

cdef class CpuSet:
    cdef WordBuffer buffer                        # constant from when others can see the set
    cdef uint64_t inline_words[INLINE_WORDS]
    cdef Py_ssize_t count                         # number of CPUs
    cdef Py_ssize_t view_shape[1]                 # n_words, for the buffer protocol

# A new set of the CPUs whose bits are set; the words are copied.
cdef CpuSet from_words(const uint64_t *words, Py_ssize_t n_words)

# A new set from the kernel's list syntax, of CPUs below limit; raises CpuListError.
cdef CpuSet parse_cpulist(str text, Py_ssize_t limit)
