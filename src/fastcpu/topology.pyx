# SPDX-License-Identifier: Apache-2.0
"""Topology, the immutable description of a machine: which logical CPUs share a core, a cache, a die, a node, a socket.

A level (cores, L3 caches, …) divides online CPUs into groups: a CPU is in at most one group of a level, and a CPU that
is offline is in none. A level holds its groups twice: as a matrix of masks with a row for each group, and as the row of
each CPU. Levels need not nest: an L3 cache may span NUMA nodes, and broken firmware tables say anything. CPU numbers
are the kernel's.

This module neither reads files nor guesses: `fastcpu.sysfs.read_topology` turns a sysfs tree into the arrays that
`Topology.from_arrays` takes. A topology never changes after its construction, so threads may share it without locks.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, uint64_t
from libc.string cimport memset
cimport cython

from fastcpu.bits cimport set_bits
from fastcpu.cpuset cimport CpuSet, from_words

import numpy as np

__all__ = ["CORE_TYPE_NAMES", "EFFICIENCY", "PERFORMANCE", "STANDARD", "Level", "Topology"]

STANDARD, PERFORMANCE, EFFICIENCY = range(3)
CORE_TYPE_NAMES = ("standard", "p-core", "e-core")  # their names, in this order

cdef enum:
    LARGEST_LABEL = 2147483647  # sysfs prints the ids of topology files from an int

_LARGEST_ID = 2**32 - 1  # sysfs prints the ids of caches from an unsigned int

# Only this module can name it, so that other code cannot make a half-built object.
cdef object _FROM_HERE = object()


cdef read_only(bytes data, object dtype, tuple shape):
    """An array over bytes, which cannot be made writable."""
    return np.ndarray(shape, dtype=dtype, buffer=data)


@cython.final
@cython.auto_pickle(False)
cdef class Level:
    """One level of a machine: its groups of CPUs, in ascending order of their ids.

    Levels come from a `Topology`. ``len()`` is the number of groups; it may be 0.

    Attributes
    ----------
    ids : tuple of int
        The id of each group, unique and ascending. `Topology` says what they are in each level.
    masks : ndarray of uint64, shape (n_groups, n_words), C-contiguous, read-only
        CPU n is bit ``n % 64`` of word ``n // 64`` of its group's row.
    group_of : ndarray of int32, shape (n_cpus,), read-only
        The row of each CPU's group; -1 for CPUs that are offline or in no group.

    Notes
    -----
    Both arrays are views of the level's own memory and keep it alive.

    Examples
    --------
    >>> from fastcpu import CpuSet, Topology
    >>> sockets = Topology.from_arrays(CpuSet(range(4)), sockets=[36, 36, 2, 2]).sockets
    >>> sockets.ids
    (2, 36)
    >>> [sockets.cpuset(row) for row in range(len(sockets))]
    [CpuSet.parse('2-3'), CpuSet.parse('0-1')]
    >>> sockets.group_of.tolist(), sockets.masks.tolist()
    ([1, 1, 0, 0], [[12], [3]])
    """

    def __cinit__(self, token=None):
        if token is not _FROM_HERE:
            raise TypeError("a Level is made by Topology.from_arrays()")

    def cpuset(self, Py_ssize_t row):
        """Return the CPUs of a group.

        Parameters
        ----------
        row : int
            Position of the group in `ids` and `masks`; not negative.

        Returns
        -------
        CpuSet

        Raises
        ------
        IndexError
            If there is no such row.
        """
        if not 0 <= row < self.n_groups:
            raise IndexError(f"row {row} of a level of {self.n_groups} groups")
        return from_words(self.mask_words + row * self.n_words, self.n_words)

    def __len__(self):
        return self.n_groups

    def __repr__(self):
        return f"<Level of {self.n_groups} groups>"


cdef Level make_level(object ids, Py_ssize_t n_words):
    """A level from one id for each CPU, -1 for none: ndarray of int64, shape (n_cpus,)."""
    cdef Level level = Level.__new__(Level, _FROM_HERE)
    cdef Py_ssize_t cpu, n_bytes
    cdef uint64_t *masks
    unique, rows = np.unique(ids, return_inverse=True)
    if len(unique) and unique[0] < 0:
        unique = unique[1:]
        rows = rows - 1
    level.ids = tuple(unique.tolist())
    level.n_groups = len(level.ids)
    level.n_words = n_words
    level.n_cpus = len(ids)
    level.row_data = rows.astype(np.int32).tobytes()
    level.row_of_cpu = <const int32_t *> PyBytes_AS_STRING(level.row_data)
    n_bytes = level.n_groups * n_words * sizeof(uint64_t)
    level.mask_data = PyBytes_FromStringAndSize(NULL, n_bytes)
    # Bytes are constant once other code can see them, which it cannot yet.
    masks = <uint64_t *> PyBytes_AS_STRING(level.mask_data)
    memset(masks, 0, n_bytes)
    for cpu in range(level.n_cpus):
        if level.row_of_cpu[cpu] >= 0:
            set_bits(masks + level.row_of_cpu[cpu] * n_words, cpu, cpu)
    level.mask_words = masks
    level.masks = read_only(level.mask_data, np.uint64, (level.n_groups, n_words))
    level.group_of = read_only(level.row_data, np.int32, (level.n_cpus,))
    return level


cdef numbers_of_cpus(object values, str name, Py_ssize_t n_cpus, object mask, object largest):
    """Check an argument that gives a number for each CPU; int64, -1 wherever the mask is not set."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    if len(array) > n_cpus:
        raise ValueError(f"{name}: {len(array)} entries for {n_cpus} CPUs")
    if array.size and array.max() > largest:
        raise ValueError(f"{name}: {array.max()} is above {largest}")
    result = np.full(n_cpus, -1, dtype=np.int64)
    result[:len(array)] = np.maximum(array, -1) if array.dtype.kind == "i" else array
    result[~mask] = -1
    return result


cdef integers(object values, str name):
    numbers = tuple(values)
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number <= LARGEST_LABEL:
            raise ValueError(f"{name}: {number!r} is not an int from 0 to {LARGEST_LABEL}")
    return tuple(sorted(set(numbers)))


@cython.final
@cython.auto_pickle(False)
cdef class Topology:
    """The CPUs of a machine and how they are grouped.

    Made by `fastcpu.sysfs.read_topology` or `from_arrays`; immutable.

    Attributes
    ----------
    online, present, possible : CpuSet
        CPUs that are schedulable, that are plugged in, and that can be plugged in; each set contains the one before.
    isolated : CpuSet
        CPUs that the kernel keeps out of general scheduling (``isolcpus=``).
    smt_enabled : bool
        Whether cores run more than one thread.
    n_cpus : int
        Length of all arrays by CPU: one more than the highest possible CPU.
    n_words : int
        Words of 64 CPUs in every mask row.
    cores : Level
        Every online CPU is in exactly one core. The id is the core's lowest CPU, since the kernel's own label
        (`core_id`) repeats from socket to socket.
    l3_caches : Level
        Empty if no L3 is known; a CPU without one (of a low-power core) is in no group. The id is the kernel's cache id
        if every L3 has one and they are unique, else the lowest CPU.
    dies : Level
        A socket without known dies is one die. The id is the kernel's die id if every die has one and they are unique
        in the machine, else the lowest CPU; `die_id` has the kernel's label.
    numa_nodes : Level
        The nodes that have online CPUs; the kernel's ids, which may have gaps.
    sockets : Level
        The id is the kernel's package id, or the lowest CPU where that is missing or negative.
    machine : Level
        One group with all online CPUs; id 0.
    core_type : ndarray of uint8, shape (n_cpus,), read-only
        `STANDARD` (0), `PERFORMANCE` (1) or `EFFICIENCY` (2): an index of `CORE_TYPE_NAMES`, which has the names.
    core_id, die_id : ndarray of int32, shape (n_cpus,), read-only
        The kernel's labels, unique only inside (socket, die) and inside the socket; -1 if unknown.
    memory_nodes : tuple of int
        NUMA nodes without online CPUs, ascending.
    notes : tuple of str
        What was missing, unreadable or contradictory, as sentences for a person.

    Notes
    -----
    An online CPU may be in no L3, NUMA node or socket; it is always in a core and in the machine.
    """

    def __cinit__(self, token=None):
        if token is not _FROM_HERE:
            raise TypeError("a Topology is made by Topology.from_arrays() or fastcpu.sysfs.read_topology()")

    @staticmethod
    def from_arrays(CpuSet online not None, *, cores=None, l3_caches=None, dies=None, numa_nodes=None, sockets=None,
                    core_type=None, core_id=None, die_id=None, CpuSet present=None, CpuSet possible=None,
                    CpuSet isolated=None, smt_enabled=None, memory_nodes=(), notes=()):
        """Make a topology from the id of each CPU's group in each level.

        Parameters
        ----------
        online : CpuSet
            The CPUs to describe; not empty.
        cores, l3_caches, dies, numa_nodes, sockets : array of int, shape (n,), optional
            The id of the group of CPU 0, 1, …: equal for the CPUs of one group, unique in the level, negative for none.
            Entries of CPUs that are not online are ignored. An array may be shorter than the machine, whose other CPUs
            are then in no group, but not longer. Defaults: every CPU is a core, there is no L3, each socket is a die,
            NUMA node 0 and socket 0 have all CPUs.
        core_type : array of int, shape (n,), optional
            0, 1 or 2; default 0.
        core_id, die_id : array of int, shape (n,), optional
            Labels; negative for unknown, which is the default.
        present, possible, isolated : CpuSet, optional
            Default: `online`, `present`, empty.
        smt_enabled : bool, optional
            Default: whether there are more online CPUs than cores.
        memory_nodes : iterable of int
            NUMA nodes without CPUs.
        notes : iterable of str
            See `Topology.notes`.

        Returns
        -------
        Topology

        Raises
        ------
        TypeError
            If something has the wrong type.
        ValueError
            If an array has the wrong shape or range, `online` is empty, an online CPU has no core, or one of `online`,
            `present`, `possible` does not contain the one before.

        Examples
        --------
        One socket of four cores with two threads each, under two L3 caches:

        >>> from fastcpu import CpuSet, Topology
        >>> Topology.from_arrays(CpuSet(range(8)), cores=[0, 1, 2, 3] * 2, l3_caches=[0, 0, 1, 1] * 2)
        <Topology: 8 of 8 CPUs online, 4 cores, 2 L3 caches, 1 NUMA nodes, 1 sockets>
        """
        cdef Topology self = Topology.__new__(Topology, _FROM_HERE)
        if not online:
            raise ValueError("online: a machine has at least one CPU")
        self.online = online
        self.present = online if present is None else present
        self.possible = self.present if possible is None else possible
        self.isolated = CpuSet.__new__(CpuSet) if isolated is None else isolated
        if not online <= self.present:
            raise ValueError(f"online CPUs {online - self.present} are not present")
        if not self.present <= self.possible:
            raise ValueError(f"present CPUs {self.present - self.possible} are not possible")
        self.n_cpus = self.possible[len(self.possible) - 1] + 1
        self.n_words = (self.n_cpus + 63) >> 6

        is_online = np.zeros(self.n_words * 64, dtype=np.bool_)
        bits = np.unpackbits(online.words.view(np.uint8), bitorder="little")
        is_online[:len(bits)] = bits
        is_online = is_online[:self.n_cpus]

        def numbers(values, name, default, largest=_LARGEST_ID):
            return default if values is None else numbers_of_cpus(values, name, self.n_cpus, is_online, largest)

        everywhere = np.where(is_online, 0, -1)
        each = np.where(is_online, np.arange(self.n_cpus), -1)
        nowhere = np.full(self.n_cpus, -1)
        in_cores = numbers(cores, "cores", each)
        if (in_cores[is_online] < 0).any():
            raise ValueError(f"cores: CPU {np.flatnonzero(is_online & (in_cores < 0))[0]} is online and has no core")
        in_sockets = numbers(sockets, "sockets", everywhere)
        self.cores = make_level(in_cores, self.n_words)
        self.l3_caches = make_level(numbers(l3_caches, "l3_caches", nowhere), self.n_words)
        self.dies = make_level(numbers(dies, "dies", in_sockets), self.n_words)
        self.numa_nodes = make_level(numbers(numa_nodes, "numa_nodes", everywhere), self.n_words)
        self.sockets = make_level(in_sockets, self.n_words)
        self.machine = make_level(everywhere, self.n_words)
        types = np.maximum(numbers(core_type, "core_type", nowhere, EFFICIENCY), STANDARD)
        self.core_type = read_only(types.astype(np.uint8).tobytes(), np.uint8, (self.n_cpus,))
        core_id = numbers(core_id, "core_id", nowhere, LARGEST_LABEL).astype(np.int32)
        self.core_id = read_only(core_id.tobytes(), np.int32, (self.n_cpus,))
        die_id = numbers(die_id, "die_id", nowhere, LARGEST_LABEL).astype(np.int32)
        self.die_id = read_only(die_id.tobytes(), np.int32, (self.n_cpus,))
        self.smt_enabled = len(online) > len(self.cores) if smt_enabled is None else smt_enabled
        self.memory_nodes = integers(memory_nodes, "memory_nodes")
        self.notes = tuple([str(note) for note in notes])
        return self

    def __repr__(self):
        return (f"<Topology: {len(self.online)} of {len(self.possible)} CPUs online, {len(self.cores)} cores, "
                f"{len(self.l3_caches)} L3 caches, {len(self.numa_nodes)} NUMA nodes, {len(self.sockets)} sockets>")
