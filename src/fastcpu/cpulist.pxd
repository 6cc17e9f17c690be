# SPDX-License-Identifier: Apache-2.0
"""The kernel's list syntax for CPU sets, as C functions over words."""

from libc.stdint cimport uint64_t

cdef enum:
    INLINE_WORDS = 16  # 1,024 CPUs without an allocation of their own

cdef struct WordBuffer:
    uint64_t *words         # capacity words; those from n_words on are 0
    Py_ssize_t capacity     # at least INLINE_WORDS, which says that the words are not on the heap
    Py_ssize_t first_word   # index of the lowest non-zero word; equal to n_words when empty
    Py_ssize_t n_words      # 1 + index of the highest non-zero word

cdef enum ParseStatus:
    PARSED
    NO_MEMORY
    NOT_A_NUMBER
    BEYOND_LIMIT
    REVERSED_RANGE
    BAD_STRIDE
    STRIDE_WITHOUT_RANGE
    UNEXPECTED_CHARACTER

# Makes room for n_words words at least; 0, or -1 without memory.
cdef int reserve(WordBuffer *buffer, Py_ssize_t n_words) noexcept nogil

# Sets first_word and n_words from the words.
cdef void trim(WordBuffer *buffer) noexcept nogil

# Adds the CPUs of an ASCII text, all below limit. On an error position gets the index of the character at fault.
cdef ParseStatus parse(const char *text, Py_ssize_t length, Py_ssize_t limit, WordBuffer *buffer,
                       Py_ssize_t *position) noexcept nogil

# What is wrong with a text that parse() has refused, for the error's text.
cdef str describe(ParseStatus status, str text, Py_ssize_t position, Py_ssize_t limit)

# The list without strides, and with a stride wherever that is shorter.
cdef str format_ranges(const WordBuffer *buffer)
cdef str format_strided(const WordBuffer *buffer)
