# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from libc.stdint cimport uint64_t

from fastcpu.bits cimport popcount
from fastcpu.cpuset cimport CpuSet, from_words


def count_common(CpuSet a, CpuSet b):
    cdef Py_ssize_t i, total = 0
    for i in range(min(a.buffer.n_words, b.buffer.n_words)):
        total += popcount(a.buffer.words[i] & b.buffer.words[i])
    return total


def roundtrip(CpuSet cpus):
    return from_words(cpus.buffer.words, cpus.buffer.n_words)
