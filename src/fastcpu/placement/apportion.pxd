# SPDX-License-Identifier: Apache-2.0
"""Divide a number of CPUs among parties at the least cost."""

from libc.stdint cimport int64_t

# Above every real cost, and two of them still fit in an int64.
cdef extern from *:
    """
    #define FASTCPU_IMPOSSIBLE ((int64_t)0x3fffffffffffffff)
    """
    const int64_t IMPOSSIBLE "FASTCPU_IMPOSSIBLE"

# Memory that is given back all at once.
cdef struct Block:
    Block *previous
    Py_ssize_t size

cdef struct Arena:
    Block *last
    char *free
    Py_ssize_t n_free

cdef struct Party:
    const int64_t *costs    # of low … high CPUs, without fixed_cost
    Py_ssize_t low          # fewest CPUs above 0 that it can give
    Py_ssize_t high         # most CPUs that it can give; at least low
    int64_t fixed_cost      # of giving any
    bint optional           # it may give none, at no cost
    Py_ssize_t source       # the caller's number of the party

# What a party and all parties after it can give together.
cdef struct Stage:
    int64_t *costs          # of low … high CPUs; IMPOSSIBLE where they cannot
    Py_ssize_t low
    Py_ssize_t high

cdef void open_arena(Arena *arena) noexcept nogil
cdef void close_arena(Arena *arena) noexcept nogil

# n_bytes of memory, aligned for any type here and not set to 0; NULL without memory.
cdef void *allocate(Arena *arena, Py_ssize_t n_bytes) noexcept nogil

# The stages of one or more parties and an empty one after the last. The first has the costs of low … high CPUs; low is
# not 0. NULL without memory.
cdef Stage *apportion(Arena *arena, const Party *parties, Py_ssize_t n_parties,
                      Py_ssize_t low, Py_ssize_t high) noexcept nogil

# How many of the CPUs asked of a stage its first party gives: the most of those numbers that cost least.
cdef Py_ssize_t share(const Party *party, const Stage *stage, Py_ssize_t asked) noexcept nogil
