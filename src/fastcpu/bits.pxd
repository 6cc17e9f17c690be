# SPDX-License-Identifier: Apache-2.0
"""Operations on the words of a mask: CPU n is bit n % 64 of word n // 64."""

from libc.stdint cimport uint64_t

cdef extern from *:
    int popcount "__builtin_popcountll"(uint64_t word) nogil
    int trailing_zeros "__builtin_ctzll"(uint64_t word) nogil  # undefined for 0

cdef extern from *:
    """
    #define FASTCPU_ALL_ONES (~(uint64_t)0)
    """
    const uint64_t ALL_ONES "FASTCPU_ALL_ONES"


cdef inline Py_ssize_t count_bits(const uint64_t *words, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """The number of bits set in the words from start up to, not including, stop."""
    cdef Py_ssize_t total = 0, i
    for i in range(start, stop):
        total += popcount(words[i])
    return total


cdef inline void set_bits(uint64_t *words, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
    """Set the bits of the CPUs from first to last, both included; the words must be there."""
    cdef Py_ssize_t low = first >> 6, high = last >> 6, i
    cdef uint64_t low_mask = ALL_ONES << (first & 63)
    cdef uint64_t high_mask = ALL_ONES >> (63 - (last & 63))
    if low == high:
        words[low] |= low_mask & high_mask
        return
    words[low] |= low_mask
    for i in range(low + 1, high):
        words[i] = ALL_ONES
    words[high] |= high_mask


cdef inline bint test_bit(const uint64_t *words, Py_ssize_t n_words, Py_ssize_t cpu) noexcept nogil:
    """Whether the bit of a CPU is set; CPUs beyond the words are not."""
    return (cpu >> 6) < n_words and (words[cpu >> 6] >> (cpu & 63)) & 1
