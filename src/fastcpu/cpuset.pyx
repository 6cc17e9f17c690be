# SPDX-License-Identifier: Apache-2.0
"""CpuSet, the immutable set of logical CPUs that all other modules take and return.

CPU n is bit ``n % 64`` of word ``n // 64``. The words end with the highest non-zero one, so equal sets have equal
words. The set also knows its lowest non-zero word, so that operations on a few CPUs of a large machine skip the empty
words below. A set of CPUs below 1,024 is one allocation.

A set never changes after its construction, so threads may share it without locks.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.slice cimport PySlice_AdjustIndices, PySlice_Unpack
from libc.stdint cimport uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy
cimport cython

from fastcpu.bits cimport count_bits, popcount, set_bits, test_bit, trailing_zeros
from fastcpu.cpulist cimport NO_MEMORY, PARSED, ParseStatus, describe, format_ranges, format_strided, parse, reserve, \
    trim

import operator
from collections.abc import Set

import numpy as np

from fastcpu.errors import CpuListError

cdef extern from "Python.h":
    bint PyUnicode_IS_ASCII(str text)
    void *PyUnicode_1BYTE_DATA(str text)
    Py_ssize_t PyUnicode_GET_LENGTH(str text)

__all__ = ["DEFAULT_LIMIT", "MAX_CPUS", "CpuSet"]

# x86 and POWER kernels are built for at most 8,192 CPUs (CONFIG_NR_CPUS). The ceiling leaves room for larger ones and
# bounds a mask, whatever a text asks for, to 128 KiB.
cdef enum:
    CPU_CEILING = 1 << 20
    CPU_LIMIT = 8192

MAX_CPUS = CPU_CEILING
DEFAULT_LIMIT = CPU_LIMIT


cdef inline CpuSet empty_set():
    return CpuSet.__new__(CpuSet)


cdef inline CpuSet finish(CpuSet cpus):
    """Complete a set whose words have been written."""
    trim(&cpus.buffer)
    cpus.count = count_bits(cpus.buffer.words, cpus.buffer.first_word, cpus.buffer.n_words)
    return cpus


cdef inline int grow(CpuSet cpus, Py_ssize_t n_words) except -1:
    if reserve(&cpus.buffer, n_words) < 0:
        raise MemoryError()
    cpus.buffer.n_words = n_words
    return 0


cdef CpuSet from_words(const uint64_t *words, Py_ssize_t n_words):
    cdef CpuSet cpus = empty_set()
    grow(cpus, n_words)
    memcpy(cpus.buffer.words, words, n_words * sizeof(uint64_t))
    return finish(cpus)


cdef CpuSet parse_cpulist(str text, Py_ssize_t limit):
    cdef CpuSet cpus
    cdef Py_ssize_t position = 0
    cdef ParseStatus status
    if text is None:
        raise TypeError("a cpulist is a str, not None")
    if not PyUnicode_IS_ASCII(text):
        position = next(i for i, c in enumerate(text) if ord(c) > 127)
        raise CpuListError(text, position, f"{text[position]!r} is not an ASCII character")
    cpus = empty_set()
    status = parse(<const char *> PyUnicode_1BYTE_DATA(text), PyUnicode_GET_LENGTH(text), limit, &cpus.buffer,
                   &position)
    if status == PARSED:
        cpus.count = count_bits(cpus.buffer.words, cpus.buffer.first_word, cpus.buffer.n_words)
        return cpus
    if status == NO_MEMORY:
        raise MemoryError()
    raise CpuListError(text, position, describe(status, text, position, limit))


cdef Py_ssize_t check_limit(object limit) except -1:
    cdef Py_ssize_t value = operator.index(limit)
    if not 1 <= value <= CPU_CEILING:
        raise ValueError(f"limit {value} is not between 1 and {CPU_CEILING}")
    return value


cdef Py_ssize_t cpu_number(object cpu) except -1:
    try:
        number = operator.index(cpu)
    except TypeError:
        raise TypeError(f"a CPU is an int, not {cpu!r}") from None
    if not 0 <= number < CPU_CEILING:
        raise ValueError(f"CPU {number} is not between 0 and {CPU_CEILING - 1}")
    return number


cdef CpuSet as_cpuset(object cpus):
    """The set of what a named set method was given: a CpuSet or an iterable of ints."""
    cdef CpuSet result
    cdef Py_ssize_t number
    if isinstance(cpus, CpuSet):
        return cpus
    if isinstance(cpus, (str, bytes, bytearray)):
        raise TypeError("CPUs are given as ints; CpuSet.parse() reads a cpulist")
    result = empty_set()
    for cpu in cpus:
        number = cpu_number(cpu)
        if (number >> 6) >= result.buffer.n_words:
            grow(result, (number >> 6) + 1)
        set_bits(result.buffer.words, number, number)
    return finish(result)


cdef enum Operation:
    UNION
    INTERSECTION
    DIFFERENCE
    SYMMETRIC_DIFFERENCE


cdef CpuSet combine(CpuSet a, CpuSet b, Operation operation):
    cdef CpuSet result = empty_set()
    cdef Py_ssize_t common = min(a.buffer.n_words, b.buffer.n_words), i
    cdef Py_ssize_t length = max(a.buffer.n_words, b.buffer.n_words)
    cdef CpuSet longer = a if a.buffer.n_words >= b.buffer.n_words else b
    cdef uint64_t *out
    cdef const uint64_t *x = a.buffer.words
    cdef const uint64_t *y = b.buffer.words
    if operation == INTERSECTION:
        length = common
    elif operation == DIFFERENCE:
        length = a.buffer.n_words
        longer = a
    grow(result, length)
    out = result.buffer.words
    if operation == UNION:
        for i in range(common):
            out[i] = x[i] | y[i]
    elif operation == INTERSECTION:
        for i in range(common):
            out[i] = x[i] & y[i]
    elif operation == DIFFERENCE:
        for i in range(common):
            out[i] = x[i] & ~y[i]
    else:
        for i in range(common):
            out[i] = x[i] ^ y[i]
    if length > common:
        memcpy(out + common, longer.buffer.words + common, (length - common) * sizeof(uint64_t))
    return finish(result)


cdef bint is_subset(CpuSet a, CpuSet b) noexcept:
    cdef Py_ssize_t i
    if a.count > b.count or a.buffer.n_words > b.buffer.n_words:
        return False
    for i in range(a.buffer.first_word, a.buffer.n_words):
        if a.buffer.words[i] & ~b.buffer.words[i]:
            return False
    return True


cdef bint is_disjoint(CpuSet a, CpuSet b) noexcept:
    cdef Py_ssize_t i
    for i in range(max(a.buffer.first_word, b.buffer.first_word), min(a.buffer.n_words, b.buffer.n_words)):
        if a.buffer.words[i] & b.buffer.words[i]:
            return False
    return True


cdef bint is_equal(CpuSet a, CpuSet b) noexcept:
    return a.count == b.count and a.buffer.n_words == b.buffer.n_words and memcmp(
        a.buffer.words, b.buffer.words, a.buffer.n_words * sizeof(uint64_t)) == 0


cdef Py_ssize_t nth_cpu(CpuSet cpus, Py_ssize_t n) noexcept:
    """The n-th lowest CPU, 0-based; n is below the number of CPUs."""
    cdef Py_ssize_t i = cpus.buffer.first_word
    cdef uint64_t word = cpus.buffer.words[i]
    while n >= popcount(word):
        n -= popcount(word)
        i += 1
        word = cpus.buffer.words[i]
    while n > 0:
        word &= word - 1
        n -= 1
    return (i << 6) + trailing_zeros(word)


@cython.final
@cython.no_gc
@cython.freelist(32)
cdef class CpuSet:
    """An immutable set of logical CPUs, by the kernel's numbers.

    It behaves as a ``frozenset[int]`` does: algebra, comparisons, iteration (ascending), ``len``, ``in`` and hashing.
    Operators take another ``CpuSet``; the named methods also take iterables of ints. A ``CpuSet`` equals only another
    ``CpuSet``. It supports the buffer protocol (read-only, format ``Q``) and pickling.

    Parameters
    ----------
    cpus : iterable of int, optional
        CPU numbers from 0 to ``MAX_CPUS - 1``; repeats are harmless.

    Raises
    ------
    TypeError
        If something in ``cpus`` is not an integer.
    ValueError
        If a number is negative or too large.

    Examples
    --------
    >>> CpuSet.parse("0-3,8") | CpuSet([9])
    CpuSet.parse('0-3,8-9')
    >>> str(CpuSet(range(0, 8, 2)))
    '0,2,4,6'
    >>> reserved, chosen = CpuSet([0, 32]), CpuSet.parse("30-33")
    >>> chosen & reserved, chosen.isdisjoint(reserved), len(chosen - reserved)
    (CpuSet.parse('32'), False, 3)
    >>> chosen[0], chosen[-1], chosen[::2], list(chosen)
    (30, 33, CpuSet.parse('30,32'), [30, 31, 32, 33])
    """

    def __cinit__(self, cpus=()):
        cdef CpuSet other
        self.buffer.words = self.inline_words
        self.buffer.capacity = INLINE_WORDS
        if cpus is not ():
            other = as_cpuset(cpus)
            grow(self, other.buffer.n_words)
            memcpy(self.buffer.words, other.buffer.words, other.buffer.n_words * sizeof(uint64_t))
            finish(self)

    def __dealloc__(self):
        if self.buffer.capacity > INLINE_WORDS:
            free(self.buffer.words)

    @staticmethod
    def parse(str text not None, *, limit=CPU_LIMIT):
        """Read the kernel's list syntax.

        Parameters
        ----------
        text : str
            Numbers, ranges ``a-b`` and strides ``a-b:used/group`` with commas between. Repeats and overlaps are
            harmless. White space may stand at both ends; a text of white space alone is the empty set.
        limit : int, default 8192
            CPU numbers are below it; from 1 to ``MAX_CPUS``.

        Returns
        -------
        CpuSet

        Raises
        ------
        CpuListError
            If the text is anything else; it says what is wrong and where.

        Notes
        -----
        The time is proportional to the length of the text, whatever numbers it names. The syntax is the kernel's
        (``Documentation/admin-guide/kernel-parameters.rst``, "cpu lists") without its symbolic names ``all`` and ``N``,
        which mean nothing without a machine.

        Examples
        --------
        >>> CpuSet.parse("0-15:2/4")  # two of every four CPUs
        CpuSet.parse('0-1,4-5,8-9,12-13')
        >>> CpuSet.parse("0-3,9-8")
        Traceback (most recent call last):
            ...
        fastcpu.errors.CpuListError: cpulist '0-3,9-8', character 5: the range is reversed; write the lower CPU first
        """
        if limit is CPU_LIMIT:
            return parse_cpulist(text, CPU_LIMIT)
        return parse_cpulist(text, check_limit(limit))

    @staticmethod
    def from_array(array):
        """Make a set from an array of words or of booleans.

        Parameters
        ----------
        array : buffer of uint64 or bool, one-dimensional
            64 CPUs a word as in `words`, or one boolean a CPU; the data is copied.

        Returns
        -------
        CpuSet

        Raises
        ------
        TypeError
            If the items are neither native ``uint64`` nor ``bool``.
        ValueError
            If the array is not one-dimensional, or longer than ``MAX_CPUS`` CPUs.

        Examples
        --------
        >>> import numpy as np
        >>> CpuSet.from_array(np.array([0b1100, 1], np.uint64))
        CpuSet.parse('2-3,64')
        >>> CpuSet.from_array(np.array([False, True, True]))
        CpuSet.parse('1-2')
        """
        cdef CpuSet result
        cdef bytes data
        cdef Py_ssize_t n, cpu
        cdef const char *flags
        view = memoryview(array)
        if view.ndim != 1:
            raise ValueError(f"expected one dimension, got shape {view.shape}")
        n = view.shape[0]
        data = view.tobytes()
        if view.format in ("Q", "L", "@Q", "@L", "=Q") and view.itemsize == sizeof(uint64_t):
            if n > CPU_CEILING >> 6:
                raise ValueError(f"{n} words are more than {CPU_CEILING >> 6}")
            return from_words(<const uint64_t *> PyBytes_AS_STRING(data), n)
        if view.format != "?":
            raise TypeError(f"expected items of uint64 or bool, got format {view.format!r}")
        if n > CPU_CEILING:
            raise ValueError(f"{n} CPUs are more than {CPU_CEILING}")
        flags = PyBytes_AS_STRING(data)
        result = empty_set()
        grow(result, (n + 63) >> 6)
        for cpu in range(n):
            if flags[cpu]:
                result.buffer.words[cpu >> 6] |= <uint64_t> 1 << (cpu & 63)
        return finish(result)

    @property
    def words(self):
        """The mask as ``ndarray of uint64, shape (n_words,)``, a read-only view that keeps the set alive.

        It ends with the highest non-zero word.

        Examples
        --------
        >>> CpuSet.parse("2-3,64").words
        array([12,  1], dtype=uint64)
        """
        return np.asarray(memoryview(self))

    @property
    def first(self):
        """The lowest CPU; ``ValueError`` for an empty set."""
        if self.count == 0:
            raise ValueError("an empty CpuSet has no first CPU")
        return nth_cpu(self, 0)

    def strided(self):
        """Format as the kernel's list with strides wherever that is shorter.

        Returns
        -------
        str
            What `parse` reads back to the same set; never longer than ``str(self)``.

        Examples
        --------
        >>> CpuSet(range(0, 64, 2)).strided()
        '0-62:1/2'
        """
        return format_strided(&self.buffer)

    def union(self, *others):
        """Return the CPUs of this set and of all others (iterables of int)."""
        cdef CpuSet result = self
        for other in others:
            result = combine(result, as_cpuset(other), UNION)
        return result

    def intersection(self, *others):
        """Return the CPUs that are in this set and in all others (iterables of int)."""
        cdef CpuSet result = self
        for other in others:
            result = combine(result, as_cpuset(other), INTERSECTION)
        return result

    def difference(self, *others):
        """Return the CPUs of this set that are in no other (iterables of int)."""
        cdef CpuSet result = self
        for other in others:
            result = combine(result, as_cpuset(other), DIFFERENCE)
        return result

    def symmetric_difference(self, other):
        """Return the CPUs that are in exactly one of this set and the other (an iterable of int)."""
        return combine(self, as_cpuset(other), SYMMETRIC_DIFFERENCE)

    def issubset(self, other):
        """Tell whether every CPU of this set is in the other (an iterable of int)."""
        return is_subset(self, as_cpuset(other))

    def issuperset(self, other):
        """Tell whether every CPU of the other (an iterable of int) is in this set."""
        return is_subset(as_cpuset(other), self)

    def isdisjoint(self, other):
        """Tell whether this set and the other (an iterable of int) have no CPU in common."""
        return is_disjoint(self, as_cpuset(other))

    def __or__(self, other):
        if not isinstance(self, CpuSet) or not isinstance(other, CpuSet):
            return NotImplemented
        return combine(self, other, UNION)

    def __and__(self, other):
        if not isinstance(self, CpuSet) or not isinstance(other, CpuSet):
            return NotImplemented
        return combine(self, other, INTERSECTION)

    def __sub__(self, other):
        if not isinstance(self, CpuSet) or not isinstance(other, CpuSet):
            return NotImplemented
        return combine(self, other, DIFFERENCE)

    def __xor__(self, other):
        if not isinstance(self, CpuSet) or not isinstance(other, CpuSet):
            return NotImplemented
        return combine(self, other, SYMMETRIC_DIFFERENCE)

    def __eq__(self, other):
        if not isinstance(other, CpuSet):
            return NotImplemented
        return is_equal(self, other)

    def __le__(self, other):
        if not isinstance(other, CpuSet):
            return NotImplemented
        return is_subset(self, other)

    def __lt__(self, other):
        if not isinstance(other, CpuSet):
            return NotImplemented
        return self.count < (<CpuSet> other).count and is_subset(self, other)

    def __ge__(self, other):
        if not isinstance(other, CpuSet):
            return NotImplemented
        return is_subset(other, self)

    def __gt__(self, other):
        if not isinstance(other, CpuSet):
            return NotImplemented
        return self.count > (<CpuSet> other).count and is_subset(other, self)

    def __hash__(self):
        cdef uint64_t mixed = <uint64_t> self.buffer.first_word
        cdef Py_ssize_t i
        for i in range(self.buffer.first_word, self.buffer.n_words):
            mixed = (mixed ^ self.buffer.words[i]) * <uint64_t> 0x9E3779B97F4A7C15
            mixed ^= mixed >> 32
        return <Py_hash_t> (mixed >> 2)

    def __len__(self):
        return self.count

    def __bool__(self):
        return self.count != 0

    def __contains__(self, cpu):
        try:
            number = operator.index(cpu)
        except TypeError:
            return False
        return 0 <= number < CPU_CEILING and test_bit(self.buffer.words, self.buffer.n_words, number)

    def __iter__(self):
        cdef Py_ssize_t i
        cdef uint64_t word
        for i in range(self.buffer.first_word, self.buffer.n_words):
            word = self.buffer.words[i]
            while word:
                yield (i << 6) + trailing_zeros(word)
                word &= word - 1

    def __getitem__(self, index):
        """The CPU at a position in ascending order, or the set of those of a slice."""
        cdef Py_ssize_t start, stop, step, n
        if not isinstance(index, slice):
            n = operator.index(index)
            if n < 0:
                n += self.count
            if not 0 <= n < self.count:
                raise IndexError(f"position {index} in a CpuSet of {self.count}")
            return nth_cpu(self, n)
        PySlice_Unpack(index, &start, &stop, &step)
        n = PySlice_AdjustIndices(self.count, &start, &stop, step)
        if n == self.count:
            return self
        if step < 0:
            start += (n - 1) * step
            step = -step
        return take_positions(self, start, n, step)

    def __str__(self):
        return format_ranges(&self.buffer)

    def __repr__(self):
        return f"CpuSet.parse({format_ranges(&self.buffer)!r})"

    def __reduce__(self):
        return restore, (PyBytes_FromStringAndSize(<char *> self.buffer.words,
                                                   self.buffer.n_words * sizeof(uint64_t)),)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if flags & PyBUF_WRITABLE == PyBUF_WRITABLE:
            raise BufferError("a CpuSet is read-only")
        self.view_shape[0] = self.buffer.n_words
        view.buf = self.buffer.words
        view.obj = self
        view.len = self.buffer.n_words * sizeof(uint64_t)
        view.itemsize = sizeof(uint64_t)
        view.readonly = 1
        view.ndim = 1
        view.format = NULL
        if flags & PyBUF_FORMAT:
            view.format = b"Q"
        view.shape = self.view_shape if flags & PyBUF_ND else NULL
        view.strides = &view.itemsize if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL


cdef CpuSet take_positions(CpuSet cpus, Py_ssize_t start, Py_ssize_t n, Py_ssize_t step):
    """The CPUs at n positions from start on, every step-th."""
    cdef CpuSet result = empty_set()
    cdef Py_ssize_t position = 0, i, cpu
    cdef uint64_t word
    if n == 0:
        return result
    grow(result, (nth_cpu(cpus, start + (n - 1) * step) >> 6) + 1)
    for i in range(cpus.buffer.first_word, result.buffer.n_words):
        word = cpus.buffer.words[i]
        while word and n > 0:
            if position == start:
                cpu = (i << 6) + trailing_zeros(word)
                set_bits(result.buffer.words, cpu, cpu)
                start += step
                n -= 1
            word &= word - 1
            position += 1
    return finish(result)


def restore(bytes data not None):
    """Rebuild a pickled set from its words."""
    if len(data) % sizeof(uint64_t) or len(data) > CPU_CEILING // 8:
        raise ValueError(f"{len(data)} bytes are no pickled CpuSet")
    return from_words(<const uint64_t *> PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data) // sizeof(uint64_t))


Set.register(CpuSet)
