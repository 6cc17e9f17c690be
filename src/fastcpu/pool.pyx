# SPDX-License-Identifier: Apache-2.0
"""CpuPool, the CPUs of one node and which of them are reserved, taken and offline: the check that every prepare runs.

All masks are rows of one C-contiguous NumPy array, sized once. A check walks only the words between the lowest and
the highest CPU of the choice, so the check of four neighbours takes as long on 64 CPUs as on 8,192. It allocates only
the set that it returns.

A pool has no lock: callers that share one between threads need their own.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t
from libc.string cimport memcpy
cimport cython

from fastcpu.bits cimport popcount
from fastcpu.cpuset cimport CpuSet, from_words, parse_cpulist

import numpy as np

from fastcpu.errors import CpuCheckError, CpuHoldError

__all__ = ["CpuPool"]

cdef enum:
    SMALLEST_LIMIT = 8192  # a CPU below it that the machine does not have is "not online", not a syntax error


cdef inline Py_ssize_t demanded_group(tuple demands, Py_ssize_t index) except? -1:
    return <Py_ssize_t> (<tuple> demands[index])[0]


cdef inline Py_ssize_t demanded_count(tuple demands, Py_ssize_t index) except? -1:
    return <Py_ssize_t> (<tuple> demands[index])[1]


cdef object explain(CpuPool pool, CpuSet cpus, tuple demands):
    """The error that says all that is wrong with a choice."""
    wanted = {}
    for group, count in demands:
        wanted[group] = wanted.get(group, 0) + count
    inside = CpuSet()
    miscounted = []
    for group, count in wanted.items():
        members = from_words(pool.member_words + <Py_ssize_t> group * pool.n_words, pool.n_words)
        chosen = len(cpus & members)
        if chosen != count:
            miscounted.append((group, count, chosen))
        inside |= members
    online, reserved = pool.online - pool.offline, pool.reserved
    return CpuCheckError(
        cpus,
        unmanaged=cpus - online,
        reserved=cpus & online & reserved,
        outside=(cpus & online) - reserved - inside,
        taken=cpus & pool.taken,
        miscounted=tuple(miscounted),
    )


@cython.final
cdef class CpuPool:
    """The CPUs of a node: which are online, reserved, in which group, and taken.

    Parameters
    ----------
    online : CpuSet
        CPUs that may be given out unless they are reserved.
    reserved : CpuSet
        CPUs that are never given out.
    groups : ndarray of uint64, shape (n_groups, n_words)
        One mask a group, as the rows of a topology level. No CPU may be in two of them. Copied.

    Raises
    ------
    ValueError
        If ``groups`` has another shape or type, two groups share a CPU, or ``online`` has more than ``n_words`` words.

    Notes
    -----
    A group's allocatable CPUs are its online CPUs that are not reserved and have not gone offline since. Reserved CPUs
    beyond ``n_words`` words cannot be in any group and are left out.

    Examples
    --------
    Two NUMA nodes of four CPUs; CPU 0 is reserved:

    >>> from fastcpu import CpuSet, Topology
    >>> nodes = Topology.from_arrays(CpuSet(range(8)), numa_nodes=[0, 0, 0, 0, 1, 1, 1, 1]).numa_nodes
    >>> pool = CpuPool(online=CpuSet(range(8)), reserved=CpuSet([0]), groups=nodes.masks)
    >>> chosen = pool.check("2-4", [(0, 2), (1, 1)])  # two of node 0, one of node 1
    >>> pool.take(chosen)
    >>> pool.available
    CpuSet.parse('1,5-7')
    >>> pool.release(chosen)
    >>> pool.taken
    CpuSet.parse('')
    """

    def __cinit__(self, CpuSet online not None, CpuSet reserved not None, groups):
        cdef Py_buffer view
        groups = np.asarray(groups)
        if groups.dtype != np.uint64 or groups.ndim != 2:
            raise ValueError(f"groups is an array of uint64 with two dimensions, not of {groups.dtype}, {groups.ndim}")
        self.n_groups, self.n_words = groups.shape
        if online.buffer.n_words > self.n_words:
            raise ValueError(f"online CPUs {online} do not fit in {self.n_words} words")
        if self.n_groups and (np.bitwise_or.reduce(groups) != np.bitwise_xor.reduce(groups)).any() \
                or sum(len(CpuSet.from_array(row)) for row in groups) != len(
                    CpuSet.from_array(np.bitwise_or.reduce(groups))):
            raise ValueError("two groups share a CPU")
        self.masks = np.zeros((4 + 2 * self.n_groups, self.n_words), np.uint64)
        self.masks[4:4 + self.n_groups] = groups
        PyObject_GetBuffer(self.masks, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.online_words = <uint64_t *> view.buf
        PyBuffer_Release(&view)
        self.reserved_words = self.online_words + self.n_words
        self.taken_words = self.reserved_words + self.n_words
        self.offline_words = self.taken_words + self.n_words
        self.member_words = self.offline_words + self.n_words
        self.allocatable_words = self.member_words + self.n_groups * self.n_words
        memcpy(self.online_words, online.buffer.words, online.buffer.n_words * sizeof(uint64_t))
        memcpy(self.reserved_words, reserved.buffer.words,
               min(reserved.buffer.n_words, self.n_words) * sizeof(uint64_t))
        self.count_in()

    cdef void count_in(self) noexcept:
        cdef Py_ssize_t group, i
        cdef uint64_t *row
        cdef uint64_t usable
        for i in range(self.n_words):
            usable = self.online_words[i] & ~self.reserved_words[i] & ~self.offline_words[i]
            for group in range(self.n_groups):
                row = self.allocatable_words + group * self.n_words
                row[i] = self.member_words[group * self.n_words + i] & usable

    cdef bint fits(self, CpuSet cpus, tuple demands) except -1:
        cdef Py_ssize_t start = cpus.buffer.first_word
        cdef Py_ssize_t stop = min(cpus.buffer.n_words, self.n_words)
        cdef Py_ssize_t n = len(demands), demanded = 0, group, wanted, found, i, d, e
        cdef bint repeated, met = True
        cdef const uint64_t *words = cpus.buffer.words
        cdef const uint64_t *row
        cdef tuple demand
        for d in range(n):
            demand = demands[d]
            group, wanted = demand
            if not 0 <= group < self.n_groups:
                raise ValueError(f"group {group} is not between 0 and {self.n_groups - 1}")
            if wanted < 0:
                raise ValueError(f"group {group}: {wanted} CPUs cannot be demanded")
            demanded += wanted
        for d in range(n):
            group = demanded_group(demands, d)
            wanted = 0
            repeated = False
            for e in range(n):
                if demanded_group(demands, e) == group:
                    if e < d:
                        repeated = True
                        break
                    wanted += demanded_count(demands, e)
            if repeated:
                continue
            row = self.allocatable_words + group * self.n_words
            found = 0
            for i in range(start, stop):
                found += popcount(words[i] & row[i])
            met = met and found == wanted
        # The groups are disjoint: where their counts add up to the whole choice, no CPU of it is outside them.
        if not met or demanded != cpus.count:
            return False
        for i in range(start, stop):
            if words[i] & self.taken_words[i]:
                return False
        return True

    def check(self, str cpulist not None, demands):
        """Check that a choice of CPUs may be taken.

        Parameters
        ----------
        cpulist : str
            The CPUs, in the kernel's list syntax.
        demands : sequence of (int, int)
            Group (row of ``groups``) and how many of the chosen CPUs must be in it. The demands of one group add up.

        Returns
        -------
        CpuSet
            The choice: online, not reserved, not taken, all within the demanded groups, each with its count.

        Raises
        ------
        CpuListError
            If the text is not in the kernel's syntax.
        CpuCheckError
            If the choice does not fit; it names all that is wrong with it.
        ValueError
            If a demand names a group that does not exist, or a negative count.

        Notes
        -----
        Time: O(length of the text + words between the lowest and the highest CPU × groups demanded).

        Examples
        --------
        >>> import numpy as np
        >>> from fastcpu import CpuSet
        >>> pool = CpuPool(CpuSet(range(8)), reserved=CpuSet([0]), groups=np.array([[0b1111], [0b11110000]], np.uint64))
        >>> pool.take(CpuSet([1]))
        >>> pool.check("0-2", [(0, 3)])
        Traceback (most recent call last):
            ...
        fastcpu.errors.CpuCheckError: cpuset 0-2: CPUs 0 are reserved; CPUs 1 are taken
        """
        cdef CpuSet cpus = parse_cpulist(cpulist, max(<Py_ssize_t> SMALLEST_LIMIT, self.n_words * 64))
        cdef tuple pairs = demands if type(demands) is tuple else tuple(map(tuple, demands))
        if self.fits(cpus, pairs):
            return cpus
        raise explain(self, cpus, pairs)

    def take(self, CpuSet cpus not None):
        """Mark CPUs as taken; all of them or none.

        Parameters
        ----------
        cpus : CpuSet
            CPUs that are not taken. They need not be online, allocatable or in a group, since CPUs that were given
            out under another configuration stay taken.

        Raises
        ------
        CpuHoldError
            If some are taken already, or beyond the pool's ``64 * n_words`` CPUs.
        """
        cdef Py_ssize_t i
        cdef Py_ssize_t stop = min(cpus.buffer.n_words, self.n_words)
        if cpus.buffer.n_words > self.n_words:
            raise CpuHoldError(CpuSet(cpu for cpu in cpus if cpu >= self.n_words * 64),
                               f"are beyond the {self.n_words * 64} CPUs of this pool")
        for i in range(cpus.buffer.first_word, stop):
            if cpus.buffer.words[i] & self.taken_words[i]:
                raise CpuHoldError(cpus & self.taken, "are taken already")
        for i in range(cpus.buffer.first_word, stop):
            self.taken_words[i] |= cpus.buffer.words[i]

    def release(self, CpuSet cpus not None):
        """Mark CPUs as free again; all of them or none.

        Parameters
        ----------
        cpus : CpuSet
            CPUs that are taken.

        Raises
        ------
        CpuHoldError
            If some are not taken.
        """
        cdef Py_ssize_t i
        if cpus.buffer.n_words > self.n_words:
            raise CpuHoldError(cpus - self.taken, "are not taken")
        for i in range(cpus.buffer.first_word, cpus.buffer.n_words):
            if cpus.buffer.words[i] & ~self.taken_words[i]:
                raise CpuHoldError(cpus - self.taken, "are not taken")
        for i in range(cpus.buffer.first_word, cpus.buffer.n_words):
            self.taken_words[i] &= ~cpus.buffer.words[i]

    def set_offline(self, CpuSet cpus not None):
        """Set which CPUs are offline now of those that were online when the pool was made.

        A CPU that is taken stays taken. A CPU that is offline passes no check.

        Parameters
        ----------
        cpus : CpuSet
            Any CPUs; those beyond the pool's ``64 * n_words`` CPUs are left out.
        """
        cdef Py_ssize_t i, stop = min(cpus.buffer.n_words, self.n_words)
        for i in range(self.n_words):
            self.offline_words[i] = cpus.buffer.words[i] if i < stop else 0
        self.count_in()

    @property
    def offline(self):
        """CPUs that have gone offline since the pool was made, as a `CpuSet`."""
        return from_words(self.offline_words, self.n_words)

    @property
    def online(self):
        """CPUs that were online when the pool was made, as a `CpuSet`."""
        return from_words(self.online_words, self.n_words)

    @property
    def reserved(self):
        """Reserved CPUs within the pool's words, as a `CpuSet`."""
        return from_words(self.reserved_words, self.n_words)

    @property
    def taken(self):
        """CPUs that are taken now, as a `CpuSet`."""
        return from_words(self.taken_words, self.n_words)

    @property
    def available(self):
        """CPUs that are online, not reserved and not taken now, as a `CpuSet`."""
        return self.online - self.reserved - self.taken - self.offline

    @property
    def allocatable(self):
        """Allocatable CPUs of each group, ``ndarray of uint64, shape (n_groups, n_words)``, a read-only view."""
        view = self.masks[4 + self.n_groups:]
        view.flags.writeable = False
        return view
