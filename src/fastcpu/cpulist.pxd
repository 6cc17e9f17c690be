# SPDX-License-Identifier: Apache-2.0
"""The kernel's list syntax for CPU sets, as C functions over words."""

from libc.stdint cimport uint64_t

cdef enum:
    INLINE_WORDS = 16  # 1,024 CPUs without an allocation of their own

cdef struct WordBuffer:
    uint64_t *words         # zeroed up to capacity beyond what was set
    Py_ssize_t capacity     # words that fit; INLINE_WORDS: the buffer is not on the heap
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

# Grows the buffer to at least n_words words; 0, or -1 without memory.
cdef int reserve(WordBuffer *buffer, Py_ssize_t n_words) noexcept nogil

# Sets first_word and n_words from the words.
cdef void trim(WordBuffer *buffer) noexcept nogil

# Adds the CPUs of the text to the buffer; position is the character at fault.
cdef ParseStatus parse(const char *text, Py_ssize_t length, Py_ssize_t limit, WordBuffer *buffer,
                       Py_ssize_t *position) noexcept nogil

cdef str describe(ParseStatus status, str text, Py_ssize_t position, Py_ssize_t limit)

cdef str format_ranges(const WordBuffer *buffer)
cdef str format_strided(const WordBuffer *buffer)
