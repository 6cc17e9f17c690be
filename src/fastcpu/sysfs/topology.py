# SPDX-License-Identifier: Apache-2.0
"""Reading a machine's topology from sysfs.

The kernel documents the files in ``Documentation/admin-guide/cputopology.rst``,
``Documentation/ABI/stable/sysfs-devices-system-cpu``, ``Documentation/ABI/testing/sysfs-devices-system-cpu`` (caches,
``smt/control``, ``isolated``) and ``Documentation/ABI/stable/sysfs-devices-node``.

A machine cannot be described if its online CPUs are unknown. Everything else that is missing, unreadable, meaningless
or contradictory counts as absent, and `Topology.notes` says so. The rules:

- The ``online`` list decides which CPUs exist. All other lists are cut down to it, since some kernels leave offline
  CPUs in them. Without the file (Linux 2.6) the CPUs are the CPU folders that are not switched off.
- The list of a group's first CPU decides the group; the lists of its other CPUs are not read. A list that lacks its own
  CPU means nothing. Where lists contradict each other, a CPU stays in the group that claimed it first.
- Without a list, CPUs with the same id are a group. The id of a core is (socket, die, cluster, ``core_id``).
- The files of CPUs that an overlay names are read first, the others in ascending order, so an overlay wins over the
  lists of the tree below it.
- With neither a list nor an id, a CPU is a core of its own, in no L3 cache, and in no socket. If no socket is known,
  the machine is one.
- ``-1`` is the kernel's "unknown" in all these files. A ``cluster_id`` of 65535 is the same in 16 bits.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from fastcpu.cpuset import CpuSet
from fastcpu.errors import TopologyError
from fastcpu.sysfs.filetree import (
    CACHE_SHARERS,
    CORE_MEMBERS,
    DIE_MEMBERS,
    NODE_MEMBERS,
    PACKAGE_MEMBERS,
    FileTree,
    open_tree,
)
from fastcpu.sysfs.reader import CPU_FOLDER, NODE_FOLDER, SysfsReader
from fastcpu.topology import EFFICIENCY, PERFORMANCE, STANDARD, Topology

__all__ = ["read_topology"]

# The id of a cache is an unsigned int, on arm64 a hash of the firmware's path or an MPIDR. All ones say "unknown".
_LARGEST_CACHE_ID: Final = 2**32 - 2

_UNKNOWN_CLUSTER: Final = 65535

# Capacities of cores of one kind differ by a few per cent (boost bins, favoured cores); those of two kinds differ by a
# third or more.
_CAPACITY_STEP: Final = 1.2

_SMT_CONTROL: Final = {"on": True, "off": False, "forceoff": False, "notsupported": False, "notimplemented": False}

_CPU_NAME: Final = re.compile("cpu(0|[1-9][0-9]{0,6})")
_NODE_NAME: Final = re.compile("node(0|[1-9][0-9]{0,8})")
_CACHE_NAME: Final = re.compile("index[0-9]{1,3}")


def read_topology(
    root: str | os.PathLike[str] | FileTree = "/sys", overlay: Mapping[str, str] | None = None
) -> Topology:
    """Read the topology of a machine.

    Parameters
    ----------
    root : path or FileTree, default "/sys"
        The folder that stands for ``/sys``, or a tree to read.
    overlay : mapping of str to str, optional
        Texts by absolute ``/sys/...`` path that replace files or add some; see `OverlaidTree`.

    Returns
    -------
    Topology
        Its `Topology.notes` name everything that counts as absent.

    Raises
    ------
    TopologyError
        If the tree does not tell which CPUs are online.
    ValueError
        If a path of the overlay is not in its shortest form below ``/sys``.

    Notes
    -----
    It opens two to five files a core where there are lists, seven a CPU where there are only ids: some 10 to 70 ms for
    1,024 CPUs. CPUs that come or go meanwhile are described as they were found and are no error.

    Examples
    --------
    >>> cpus = "/sys/devices/system/cpu"
    >>> read_topology("/no-such-folder", {f"{cpus}/online": "0-3", f"{cpus}/cpu2/topology/core_cpus_list": "2-3"})
    <Topology: 4 of 4 CPUs online, 3 cores, 0 L3 caches, 1 NUMA nodes, 1 sockets>
    >>> read_topology("/no-such-folder")
    Traceback (most recent call last):
        ...
    fastcpu.errors.TopologyError: /sys/devices/system/cpu/online is missing; expected a list of at least one CPU
    """
    reader = SysfsReader(open_tree(root, overlay))
    online = _read_online(reader)
    present = (reader.cpus(f"{CPU_FOLDER}/present") or CpuSet()) | online
    possible = (reader.cpus(f"{CPU_FOLDER}/possible") or CpuSet()) | present
    overlaid = [cpu for cpu in sorted(_cpus_of_paths(overlay or ())) if cpu in online]
    machine = _MachineReader(reader, online, [*overlaid, *online.difference(overlaid)])
    machine.read_sockets()
    machine.read_dies()
    machine.read_cores()
    machine.read_l3_caches()
    memory_nodes = machine.read_numa_nodes()
    return Topology.from_arrays(
        online,
        present=present,
        possible=possible,
        isolated=reader.cpus(f"{CPU_FOLDER}/isolated"),
        smt_enabled=_read_smt(reader),
        cores=machine.cores,
        l3_caches=machine.l3_caches,
        dies=machine.dies,
        numa_nodes=machine.numa_nodes,
        sockets=machine.sockets,
        core_type=machine.read_core_types(),
        core_id=machine.core_id,
        die_id=machine.die_id,
        memory_nodes=memory_nodes,
        notes=reader.notes,
    )


def _cpus_of_paths(paths: Iterable[str]) -> set[int]:
    names = {path.removeprefix(f"{CPU_FOLDER}/").partition("/")[0] for path in paths}
    return {int(match[1]) for match in map(_CPU_NAME.fullmatch, names) if match}


def _read_online(reader: SysfsReader) -> CpuSet:
    path = f"{CPU_FOLDER}/online"
    text = reader.text(path)
    if text is None:
        online = CpuSet(_switched_on(reader))
        if online:
            reader.note(f"{path} is missing; taken from the CPU folders")
    else:
        online = reader.parse_list(path, text)
    if not online:
        raise TopologyError(path, text, "a list of at least one CPU")
    return online


def _switched_on(reader: SysfsReader) -> Iterable[int]:
    for name in reader.tree.entries(CPU_FOLDER):
        match = _CPU_NAME.fullmatch(name)
        if match and int(match[1]) < reader.limit and reader.number(f"{CPU_FOLDER}/{name}/online") != 0:
            yield int(match[1])


def _read_smt(reader: SysfsReader) -> bool | None:
    path = f"{CPU_FOLDER}/smt/control"
    text = reader.text(path)
    if text is None:
        return None
    if text in _SMT_CONTROL:
        return _SMT_CONTROL[text]
    # Since Linux 6.6 the file has the number of threads in use of each core on POWER.
    if re.fullmatch("[1-9][0-9]{0,3}", text):
        return text != "1"
    reader.refuse(path, text, f"one of {', '.join(_SMT_CONTROL)} or a number of threads")
    return None


_Label = int | tuple[int | None, ...] | None

# What the files of a CPU say about its group in a level: the members and the label of the group. Without members, all
# CPUs with an equal label are a group; without members and label, the CPU is in no group.
_Answer = tuple[CpuSet | None, _Label]
_Group = tuple[CpuSet, _Label]


class _MachineReader:
    """One reading of a machine, level after level; each level uses those that were read before.

    The levels are lists of one number a CPU, -1 for none, as `Topology.from_arrays` takes them.
    """

    def __init__(self, reader: SysfsReader, online: CpuSet, order: Sequence[int]) -> None:
        self._reader = reader
        self._online = online
        self._order = order
        self._n_cpus = online[len(online) - 1] + 1
        self._l3_folder = "index3"
        self.cores = self._nowhere()
        self.core_id = self._nowhere()
        self.l3_caches = self._nowhere()
        self.dies = self._nowhere()
        self.die_id = self._nowhere()
        self.numa_nodes = self._nowhere()
        self.sockets = self._nowhere()

    def read_sockets(self) -> None:
        """Read the sockets. The id of one is the kernel's package id, or its lowest CPU if that is unknown."""
        reader = self._reader

        def ask(cpu: int) -> _Answer:
            folder = f"{CPU_FOLDER}/cpu{cpu}/topology"
            return reader.members(folder, PACKAGE_MEMBERS, cpu), reader.number(f"{folder}/physical_package_id")

        groups = self._partition("socket", ask)
        if not groups:
            reader.note("no CPU tells its socket; taken as one socket")
            groups = [(self._online, None)]
        homeless = self._online.difference(*(members for members, _ in groups))
        if homeless:
            reader.note(f"CPUs {homeless} do not tell their socket; they are in none")
        ids = [label if isinstance(label, int) else members.first for members, label in groups]
        if len(set(ids)) < len(ids):
            reader.note("physical_package_id is not unique; the sockets are numbered by their lowest CPUs")
            ids = [members.first for members, _ in groups]
        for (members, _), socket in zip(groups, ids, strict=True):
            _assign(self.sockets, members, socket)

    def read_dies(self) -> None:
        """Read the dies of each socket; its CPUs without a die id are one die."""
        reader = self._reader
        cpus_by_socket: dict[int, list[int]] = {}
        for cpu in self._online:
            cpus_by_socket.setdefault(self.sockets[cpu], []).append(cpu)
        members_of_socket = {socket: CpuSet(cpus) for socket, cpus in cpus_by_socket.items() if socket >= 0}

        def ask(cpu: int) -> _Answer:
            socket = self.sockets[cpu]
            if socket < 0:
                return None, None
            folder = f"{CPU_FOLDER}/cpu{cpu}/topology"
            die = reader.number(f"{folder}/die_id")
            # Where the architecture has no dies, the list names the CPU alone and means nothing.
            members = None if die is None else reader.members(folder, DIE_MEMBERS, cpu)
            if members is not None:
                members &= members_of_socket[socket]
            return members, (socket, die)

        groups = self._partition("die", ask)
        dies = [label[1] if isinstance(label, tuple) else None for _, label in groups]
        for (members, _), die in zip(groups, dies, strict=True):
            _assign(self.die_id, members, -1 if die is None else die)
        self._assign_unique(self.dies, groups, dies)

    def read_cores(self) -> None:
        """Read the cores. Without lists, CPUs with the same id in one socket, die and cluster are a core."""
        reader = self._reader

        def ask(cpu: int) -> _Answer:
            folder = f"{CPU_FOLDER}/cpu{cpu}/topology"
            members = reader.members(folder, CORE_MEMBERS, cpu)
            core_id = reader.number(f"{folder}/core_id")
            if members is None and core_id is None:
                return CpuSet((cpu,)), None
            if members is None:
                cluster = reader.number(f"{folder}/cluster_id")
                return None, (
                    self.sockets[cpu],
                    self.dies[cpu],
                    None if cluster == _UNKNOWN_CLUSTER else cluster,
                    core_id,
                )
            return members, core_id

        for members, label in self._partition("core", ask):
            core_id = label[-1] if isinstance(label, tuple) else label
            _assign(self.cores, members, members.first)
            _assign(self.core_id, members, -1 if core_id is None else core_id)

    def read_l3_caches(self) -> None:
        """Read the L3 caches. A CPU without one is in no group, and so are the other threads of its core."""
        reader = self._reader
        without: set[int] = set()

        def ask(cpu: int) -> _Answer:
            core = self.cores[cpu]
            folder = None if core in without else self._find_l3(cpu)
            if folder is None:
                without.add(core)
                return None, None
            members = reader.members(folder, CACHE_SHARERS, cpu)
            cache_id = reader.number(f"{folder}/id", _LARGEST_CACHE_ID)
            if members is None and cache_id is not None:
                return None, cache_id
            # Some firmware leaves the list empty. The threads of a core share all its caches.
            return members or CpuSet(c for c in self._online if self.cores[c] == core), cache_id

        groups = self._partition("L3 cache", ask)
        self._assign_unique(self.l3_caches, groups, [label if isinstance(label, int) else None for _, label in groups])

    def read_numa_nodes(self) -> list[int]:
        """Read the NUMA nodes and return those without an online CPU. If there is no node, node 0 has all CPUs."""
        reader = self._reader
        nodes = sorted(int(m[1]) for name in reader.tree.entries(NODE_FOLDER) if (m := _NODE_NAME.fullmatch(name)))
        memory_nodes = []
        unclaimed = self._online
        for node in nodes:
            members = (reader.members(f"{NODE_FOLDER}/node{node}", NODE_MEMBERS) or CpuSet()) & self._online
            claimed = members - unclaimed
            if claimed:
                reader.note(f"NUMA node {node}: CPUs {claimed} of its list are in a node before it already")
                members -= claimed
            if not members:
                memory_nodes.append(node)
            _assign(self.numa_nodes, members, node)
            unclaimed -= members
        if unclaimed == self._online:
            if nodes:
                reader.note("no NUMA node tells its CPUs; taken as one node")
            _assign(self.numa_nodes, self._online, 0)
            return [node for node in memory_nodes if node != 0]
        if unclaimed:
            reader.note(f"CPUs {unclaimed} are in no NUMA node")
        return memory_nodes

    def read_core_types(self) -> list[int]:
        """Read which cores are for performance and which for efficiency, on machines that have both.

        On x86 the CPUs of the performance counters ``cpu_core``, ``cpu_atom`` and ``cpu_lowpower`` decide, which exist
        on hybrid machines only. Elsewhere (arm64 big.LITTLE, RISC-V) ``cpu_capacity`` decides: the largest step between
        neighbouring capacities divides the two kinds, if it is large enough.
        """
        reader = self._reader
        performance = reader.cpus("/sys/devices/cpu_core/cpus")
        efficiency = (reader.cpus("/sys/devices/cpu_atom/cpus") or CpuSet()) | (
            reader.cpus("/sys/devices/cpu_lowpower/cpus") or CpuSet()
        )
        if performance is None and not efficiency:
            performance, efficiency = self._split_by_capacity()
        elif performance is None:
            performance = self._online
        types = [STANDARD] * self._n_cpus
        _assign(types, performance & self._online, PERFORMANCE)
        _assign(types, efficiency & self._online, EFFICIENCY)
        return types

    def _split_by_capacity(self) -> tuple[CpuSet, CpuSet]:
        capacities: dict[int, int] = {}
        for core in sorted({self.cores[cpu] for cpu in self._online}):
            capacity = self._reader.number(f"{CPU_FOLDER}/cpu{core}/cpu_capacity")
            if not capacity:
                return CpuSet(), CpuSet()
            capacities[core] = capacity
        steps = sorted(set(capacities.values()))
        ratio, threshold = max(((high / low, high) for low, high in itertools.pairwise(steps)), default=(1.0, 0))
        if ratio < _CAPACITY_STEP:
            return CpuSet(), CpuSet()
        performance = CpuSet(cpu for cpu in self._online if capacities[self.cores[cpu]] >= threshold)
        return performance, self._online - performance

    def _find_l3(self, cpu: int) -> str | None:
        """Return the folder of the CPU's L3 cache. The number of the last one found is tried first."""
        caches = f"{CPU_FOLDER}/cpu{cpu}/cache"
        if self._is_l3(f"{caches}/{self._l3_folder}"):
            return f"{caches}/{self._l3_folder}"
        for name in sorted(self._reader.tree.entries(caches)):
            if _CACHE_NAME.fullmatch(name) and name != self._l3_folder and self._is_l3(f"{caches}/{name}"):
                self._l3_folder = name
                return f"{caches}/{name}"
        return None

    def _is_l3(self, folder: str) -> bool:
        # Some arm64 firmware gives no type.
        return self._reader.number(f"{folder}/level") == 3 and self._reader.text(f"{folder}/type") in ("Unified", None)

    def _partition(self, level: str, ask: Callable[[int], _Answer]) -> list[_Group]:
        """Divide the CPUs into disjoint groups: ask each CPU that no group has claimed yet."""
        unclaimed = self._online
        groups: list[_Group] = []
        unlisted: dict[_Label, list[int]] = {}
        for cpu in self._order:
            if cpu not in unclaimed:
                continue
            members, label = ask(cpu)
            if members is None:
                unclaimed -= CpuSet((cpu,))
                if label is not None:
                    unlisted.setdefault(label, []).append(cpu)
                continue
            members &= self._online
            claimed = members - unclaimed
            if claimed:
                self._reader.note(f"{level} of CPU {cpu}: CPUs {claimed} of its list are in another one already")
                members -= claimed
            groups.append((members, label))
            unclaimed -= members
        merged = [(members.union(unlisted.pop(label, ())), label) for members, label in groups]
        return merged + [(CpuSet(cpus), label) for label, cpus in unlisted.items()]

    def _assign_unique(self, level: list[int], groups: Sequence[_Group], labels: Sequence[int | None]) -> None:
        """Give the groups their labels as ids if each has a label of its own, else their lowest CPUs."""
        unique = None not in labels and len(set(labels)) == len(labels)
        for (members, _), label in zip(groups, labels, strict=True):
            _assign(level, members, label if unique and label is not None else members.first)

    def _nowhere(self) -> list[int]:
        return [-1] * self._n_cpus


def _assign(level: list[int], cpus: CpuSet, number: int) -> None:
    for cpu in cpus:
        level[cpu] = number
