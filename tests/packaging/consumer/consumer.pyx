# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Another package that uses the C interface of every module of fastcpu; check.py tries it."""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from fastcpu.bits cimport count_bits, popcount
from fastcpu.cpulist cimport INLINE_WORDS, PARSED, WordBuffer, parse
from fastcpu.cpuset cimport CpuSet, from_words, parse_cpulist
from fastcpu.placement.apportion cimport Arena, Party, Stage, apportion, close_arena, open_arena, share
from fastcpu.placement.placer cimport Placer
from fastcpu.placement.search cimport collect, run
from fastcpu.placement.search_state cimport Search, Wishes, apply_wishes, begin, end
from fastcpu.pool cimport CpuPool
from fastcpu.topology cimport Topology


def count_common(CpuSet a, CpuSet b):
    cdef Py_ssize_t i, total = 0
    for i in range(min(a.buffer.n_words, b.buffer.n_words)):
        total += popcount(a.buffer.words[i] & b.buffer.words[i])
    return total


def roundtrip(CpuSet cpus):
    return from_words(cpus.buffer.words, cpus.buffer.n_words)


def read(str text, limit):
    return parse_cpulist(text, limit)


def count_in_text(bytes text):
    """How many CPUs below 1,024 a cpulist has, read without a Python object; None if it is none."""
    cdef uint64_t[INLINE_WORDS] words
    cdef WordBuffer buffer
    cdef Py_ssize_t position
    memset(words, 0, sizeof(words))
    buffer.words, buffer.capacity, buffer.first_word, buffer.n_words = words, INLINE_WORDS, 0, 0
    if parse(text, len(text), INLINE_WORDS * 64, &buffer, &position) != PARSED:
        return None
    return count_bits(words, buffer.first_word, buffer.n_words)


def fits(CpuPool pool, CpuSet cpus, tuple demands):
    return pool.fits(cpus, demands)


def on_one_core(Topology machine, Py_ssize_t a, Py_ssize_t b):
    return machine.cores.row_of_cpu[a] == machine.cores.row_of_cpu[b]


def divide(costs, n):
    """How much each party gives of n; costs[i] has what 1, 2, … of party i cost."""
    cdef Arena arena
    cdef Party[8] parties
    cdef int64_t[8][8] prices
    cdef Stage *stages
    cdef Py_ssize_t i, k, left = n
    shares = []
    for i in range(len(costs)):
        for k in range(len(costs[i])):
            prices[i][k] = costs[i][k]
        parties[i] = Party(costs=&prices[i][0], low=1, high=len(costs[i]), fixed_cost=0, optional=True, source=i)
    open_arena(&arena)
    stages = apportion(&arena, parties, len(costs), n, n)
    if stages == NULL:
        raise MemoryError()
    for i in range(len(costs)):
        shares.append(share(&parties[i], &stages[i], left))
        left -= shares[i]
    close_arena(&arena)
    return shares


def place(Placer placer, CpuSet free, n):
    """The best choice of n CPUs of any type of core, on a machine of up to 1,024 CPUs."""
    cdef uint64_t[INLINE_WORDS] words
    cdef Search search
    cdef Wishes wishes
    memset(words, 0, sizeof(words))
    memset(&wishes, 0, sizeof(Wishes))
    wishes.n = n
    wishes.types = ~0
    try:
        if begin(&search, &placer.machine, free.buffer.words, free.buffer.n_words) < 0:
            raise MemoryError()
        apply_wishes(&search, wishes)
        if run(&search) < 0:
            raise MemoryError()
        collect(&search, words)
        return from_words(words, INLINE_WORDS)
    finally:
        end(&search)
