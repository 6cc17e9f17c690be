# SPDX-License-Identifier: Apache-2.0
"""Read and write the kernel's list syntax for CPU sets.

The syntax is that of the kernel's bitmap lists (``Documentation/admin-guide/kernel-parameters.rst``): numbers and
ranges ``a-b`` with commas between, and ``a-b:used/group`` for the first ``used`` of every ``group`` CPUs from ``a``
on. The time to read a text is proportional to its length. The limit bounds the factor: one range sets at most
``limit / 64`` words.
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from fastcpu.bits cimport ALL_ONES, popcount, set_bits, trailing_zeros

cdef extern from "Python.h":
    str PyUnicode_DecodeASCII(const char *text, Py_ssize_t length, const char *errors)


cdef int reserve(WordBuffer *buffer, Py_ssize_t n_words) noexcept nogil:
    cdef Py_ssize_t capacity
    cdef uint64_t *words
    if n_words <= buffer.capacity:
        return 0
    capacity = n_words if n_words > 2 * buffer.capacity else 2 * buffer.capacity
    if buffer.capacity == INLINE_WORDS:
        # Not calloc: it passes by glibc's per-thread cache of free blocks, which costs more than clearing a kilobyte.
        words = <uint64_t *> malloc(capacity * sizeof(uint64_t))
        if words == NULL:
            return -1
        memcpy(words, buffer.words, INLINE_WORDS * sizeof(uint64_t))
    else:
        words = <uint64_t *> realloc(buffer.words, capacity * sizeof(uint64_t))
        if words == NULL:
            return -1
    memset(words + buffer.capacity, 0, (capacity - buffer.capacity) * sizeof(uint64_t))
    buffer.words = words
    buffer.capacity = capacity
    return 0


cdef void trim(WordBuffer *buffer) noexcept nogil:
    cdef Py_ssize_t first = 0, stop = buffer.n_words
    while stop > 0 and buffer.words[stop - 1] == 0:
        stop -= 1
    while first < stop and buffer.words[first] == 0:
        first += 1
    buffer.first_word = first
    buffer.n_words = stop


cdef inline bint is_space(char c) noexcept nogil:
    return c == 32 or 9 <= c <= 13


cdef inline bint is_digit(char c) noexcept nogil:
    return 48 <= c <= 57


cdef inline ParseStatus read_number(const char *text, Py_ssize_t end, Py_ssize_t limit, Py_ssize_t *at,
                                    Py_ssize_t *number) noexcept nogil:
    """Read a number below limit at a position, and move the position behind it; on an error the position stays."""
    cdef Py_ssize_t i = at[0], value = 0
    if i == end or not is_digit(text[i]):
        return NOT_A_NUMBER
    while i < end and is_digit(text[i]):
        value = value * 10 + (text[i] - 48)
        if value >= limit:
            return BEYOND_LIMIT
        i += 1
    at[0] = i
    number[0] = value
    return PARSED


cdef void set_strided(uint64_t *words, Py_ssize_t first, Py_ssize_t last, Py_ssize_t used,
                      Py_ssize_t group) noexcept nogil:
    """Set the bits of the first used of every group CPUs from first to last."""
    cdef Py_ssize_t start, i, phase
    cdef uint64_t low = 0, high = 0, word
    cdef uint64_t pattern[2]
    if used == group:
        set_bits(words, first, last)
        return
    if group > 64:
        start = first
        while start <= last:
            set_bits(words, start, start + used - 1 if start + used - 1 < last else last)
            start += group
        return
    # The pattern repeats after group ≤ 64 bits, so each word of the result lies in its first 128 bits, at some phase.
    pattern[0] = pattern[1] = 0
    start = 0
    while start < 128:
        set_bits(pattern, start, start + used - 1 if start + used - 1 < 127 else 127)
        start += group
    low, high = pattern[0], pattern[1]
    word = low << (first & 63)
    if first >> 6 == last >> 6:
        words[first >> 6] |= word & (ALL_ONES >> (63 - (last & 63)))
        return
    words[first >> 6] |= word
    phase = (64 - (first & 63)) % group
    for i in range((first >> 6) + 1, (last >> 6) + 1):
        word = low if phase == 0 else (low >> phase) | (high << (64 - phase))
        if i == last >> 6:
            word &= ALL_ONES >> (63 - (last & 63))
        words[i] |= word
        phase = (phase + 64) % group


cdef ParseStatus parse(const char *text, Py_ssize_t length, Py_ssize_t limit, WordBuffer *buffer,
                       Py_ssize_t *position) noexcept nogil:
    cdef Py_ssize_t at = 0, end = length, first = 0, last = 0, used = 0, group = 0, start
    cdef Py_ssize_t low = buffer.first_word, high = buffer.n_words
    cdef bint strided
    cdef ParseStatus status
    while at < end and is_space(text[at]):
        at += 1
    while end > at and is_space(text[end - 1]):
        end -= 1
    if at == end:
        return PARSED
    if low == high:
        low = limit
    while True:
        strided = False
        start = at
        status = read_number(text, end, limit, &at, &first)
        if status != PARSED:
            break
        last = first
        if at < end and text[at] == b"-":
            at += 1
            status = read_number(text, end, limit, &at, &last)
            if status != PARSED:
                break
            if last < first:
                at = start
                status = REVERSED_RANGE
                break
            if at < end and text[at] == b":":
                at += 1
                start = at
                status = read_number(text, end, limit + 1, &at, &used)
                if status != PARSED:
                    break
                if at == end or text[at] != b"/":
                    status = BAD_STRIDE
                    break
                at += 1
                status = read_number(text, end, limit + 1, &at, &group)
                if status != PARSED:
                    break
                if used == 0 or used > group:
                    at = start
                    status = BAD_STRIDE
                    break
                strided = True
        elif at < end and text[at] == b":":
            status = STRIDE_WITHOUT_RANGE
            break
        if (last >> 6) >= buffer.capacity and reserve(buffer, (last >> 6) + 1) < 0:
            status = NO_MEMORY
            break
        if (first >> 6) < low:
            low = first >> 6
        if (last >> 6) >= high:
            high = (last >> 6) + 1
        if strided:
            set_strided(buffer.words, first, last, used, group)
        else:
            set_bits(buffer.words, first, last)
        if at == end:
            break
        if text[at] != b",":
            status = UNEXPECTED_CHARACTER
            break
        at += 1
    position[0] = at
    buffer.first_word = low
    buffer.n_words = high
    if status == PARSED:
        trim(buffer)  # the last CPU of a range with a stride need not be in the set
    return status


cdef str describe(ParseStatus status, str text, Py_ssize_t position, Py_ssize_t limit):
    if status == NOT_A_NUMBER:
        if position >= len(text.rstrip(" \t\n\v\f\r")):
            return "the text ends where a CPU number should be"
        return f"{text[position]!r} is not a digit; expected a CPU number as in '0-3,8' or '0-31:2/4'"
    if status == BEYOND_LIMIT:
        return f"the number is too large; the highest CPU number is {limit - 1}"
    if status == REVERSED_RANGE:
        return "the range is reversed; write the lower CPU first"
    if status == BAD_STRIDE:
        return "the stride is not 'used/group' with 1 ≤ used ≤ group"
    if status == STRIDE_WITHOUT_RANGE:
        return "a stride needs a range, as in '0-31:2/4'"
    return f"unexpected {text[position]!r}; expected ',' or the end of the text"


cdef struct Run:
    Py_ssize_t first
    Py_ssize_t length


cdef Py_ssize_t count_runs(const WordBuffer *buffer) noexcept nogil:
    cdef Py_ssize_t runs = 0, i
    cdef uint64_t carry = 0, word
    for i in range(buffer.first_word, buffer.n_words):
        word = buffer.words[i]
        runs += popcount(word & ~((word << 1) | carry))
        carry = word >> 63
    return runs


cdef void find_runs(const WordBuffer *buffer, Run *runs) noexcept nogil:
    cdef Py_ssize_t cpu = buffer.first_word << 6, end = buffer.n_words << 6, found = 0
    cdef uint64_t word
    while cpu < end:
        word = buffer.words[cpu >> 6] >> (cpu & 63)
        if word == 0:
            cpu = ((cpu >> 6) + 1) << 6
            continue
        cpu += trailing_zeros(word)
        runs[found].first = cpu
        while cpu < end:
            word = ~buffer.words[cpu >> 6] >> (cpu & 63)
            if word != 0:
                cpu += trailing_zeros(word)
                break
            cpu = ((cpu >> 6) + 1) << 6
        runs[found].length = cpu - runs[found].first
        found += 1


cdef inline Py_ssize_t digits(Py_ssize_t number) noexcept nogil:
    cdef Py_ssize_t n = 1
    while number >= 10:
        number //= 10
        n += 1
    return n


cdef inline char *put_number(char *out, Py_ssize_t number) noexcept nogil:
    cdef Py_ssize_t n = digits(number), i
    for i in range(n - 1, -1, -1):
        out[i] = <char> (48 + number % 10)
        number //= 10
    return out + n


cdef inline char *put_run(char *out, Run run) noexcept nogil:
    out = put_number(out, run.first)
    if run.length > 1:
        out[0] = b"-"
        out = put_number(out + 1, run.first + run.length - 1)
    return out


cdef inline Py_ssize_t run_width(Run run) noexcept nogil:
    if run.length == 1:
        return digits(run.first)
    return digits(run.first) + 1 + digits(run.first + run.length - 1)


cdef enum:
    WIDEST_ITEM = 48  # four numbers of up to ten digits, their signs and the comma


cdef str format_ranges(const WordBuffer *buffer):
    return format_runs(buffer, False)


cdef str format_strided(const WordBuffer *buffer):
    return format_runs(buffer, True)


cdef str format_runs(const WordBuffer *buffer, bint strided):
    cdef Py_ssize_t n = count_runs(buffer)
    cdef Run *runs
    cdef char *text
    cdef char *out
    if n == 0:
        return ""
    runs = <Run *> malloc(n * sizeof(Run))
    text = <char *> malloc(n * WIDEST_ITEM)
    try:
        if runs == NULL or text == NULL:
            raise MemoryError()
        find_runs(buffer, runs)
        out = write_items(text, runs, n, strided)
        return PyUnicode_DecodeASCII(text, out - text - 1, NULL)
    finally:
        free(runs)
        free(text)


cdef char *write_items(char *out, const Run *runs, Py_ssize_t n, bint strided) noexcept nogil:
    cdef Py_ssize_t i = 0, j, used, group, last, plain, width
    while i < n:
        if strided and i + 1 < n:
            used = runs[i].length
            group = runs[i + 1].first - runs[i].first
            j = i
            plain = run_width(runs[i])
            while j + 1 < n and runs[j + 1].first - runs[j].first == group and runs[j].length == used \
                    and runs[j + 1].length <= used:
                j += 1
                plain += 1 + run_width(runs[j])
            last = runs[j].first + runs[j].length - 1
            width = digits(runs[i].first) + digits(last) + digits(used) + digits(group) + 3
            if width < plain:
                out = put_number(out, runs[i].first)
                out[0] = b"-"
                out = put_number(out + 1, last)
                out[0] = b":"
                out = put_number(out + 1, used)
                out[0] = b"/"
                out = put_number(out + 1, group)
                out[0] = b","
                out += 1
                i = j + 1
                continue
        out = put_run(out, runs[i])
        out[0] = b","
        out += 1
        i += 1
    return out
