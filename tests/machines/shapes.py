# SPDX-License-Identifier: Apache-2.0
"""Invented machines: a shape, the sysfs files that a kernel would show of it, and the topology that it is."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from fastcpu import CpuSet

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"


class TextTree:
    """A file tree in memory, which counts what is read of it."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = dict(texts)
        self.reads = 0
        self._folders: dict[str, set[str]] = {}
        for path in texts:
            while path != "/sys":
                path, name = posixpath.split(path)
                self._folders.setdefault(path, set()).add(name)

    def read(self, path: str) -> str | None:
        self.reads += 1
        return self.texts.get(path)

    def entries(self, path: str) -> Sequence[str]:
        self.reads += 1
        return list(self._folders.get(path, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One logical CPU; each group is named by any number that is unique in the machine."""

    cpu: int
    core: int
    l3: int
    die: int
    node: int
    socket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A machine, and how its kernel shows it."""

    threads: tuple[Thread, ...]
    offline: frozenset[int] = frozenset()
    names: str = "new"  # new, old, both: lists by their names; masks: no lists; ids: neither
    lists_of_offline: bool = False  # lists have offline CPUs in them
    online_file: bool = True
    package_ids: Mapping[int, int] | None = None  # by socket; None: -1
    die_ids: bool = True
    l3: str = "ids"  # ids, repeated (ids), some (ids), nameless, none
    node_ids: Mapping[int, int] | None = None  # by node; None: no NUMA
    memory_nodes: tuple[int, ...] = ()
    end: str = "\n"

    @property
    def online(self) -> tuple[Thread, ...]:
        return tuple(thread for thread in self.threads if thread.cpu not in self.offline)

    def files(self) -> dict[str, str]:
        """Return the text of every file by its path."""
        texts = {}
        cpus = [thread.cpu for thread in self.threads]
        texts[f"{CPU}/present"] = texts[f"{CPU}/possible"] = self._list(cpus)
        if self.online_file:
            texts[f"{CPU}/online"] = self._list(thread.cpu for thread in self.online)
        for thread in self.threads:
            texts[f"{CPU}/cpu{thread.cpu}/online"] = f"{int(thread.cpu not in self.offline)}\n"
        for thread in self.online:
            folder = f"{CPU}/cpu{thread.cpu}"
            texts |= {f"{folder}/topology/{name}": text for name, text in self._topology(thread)}
            texts |= {f"{folder}/cache/{name}": text for name, text in self._caches(thread)}
        if self.node_ids is not None:
            for node, number in self.node_ids.items():
                members = [thread.cpu for thread in self._listed() if thread.node == node]
                texts[f"{NODE}/node{number}/{'cpumap' if self.names == 'masks' else 'cpulist'}"] = self._members(
                    members
                )
            texts |= {f"{NODE}/node{number}/cpulist": self.end for number in self.memory_nodes}
        return texts

    def topology(self) -> dict[str, dict[int, set[int]]]:
        """Return the groups of each level by their ids."""
        sockets = self._groups(lambda thread: thread.socket)
        dies = self._groups(lambda thread: thread.die) if self.die_ids else sockets
        l3 = {} if self.l3 == "none" else self._groups(lambda thread: thread.l3)
        nodes = self._groups(lambda thread: thread.node)
        l3_ids = [self._l3_id(number) for number in l3]
        l3_unique = None not in l3_ids and len(set(l3_ids)) == len(l3_ids)
        die_ids = [self._die_id(number) for number in dies]
        dies_unique = self.die_ids and len(set(die_ids)) == len(die_ids)
        package_ids = self.package_ids
        node_ids = self.node_ids
        return {
            "cores": {min(cpus): cpus for cpus in self._groups(lambda thread: thread.core).values()},
            "l3_caches": {self._l3_id(n) if l3_unique else min(cpus): cpus for n, cpus in l3.items()},
            "dies": {self._die_id(n) if dies_unique else min(cpus): cpus for n, cpus in dies.items()},
            "numa_nodes": {0: {thread.cpu for thread in self.online}}
            if node_ids is None
            else {node_ids[n]: cpus for n, cpus in nodes.items()},
            "sockets": {package_ids[n] if package_ids else min(cpus): cpus for n, cpus in sockets.items()},
            "machine": {0: {thread.cpu for thread in self.online}},
        }

    def cpuless_nodes(self) -> tuple[int, ...]:
        """Return the nodes without online CPUs, ascending."""
        used = {thread.node for thread in self.online}
        idle = [number for node, number in (self.node_ids or {}).items() if node not in used]
        return tuple(sorted([*idle, *self.memory_nodes])) if self.node_ids is not None else ()

    def _groups(self, key: Callable[[Thread], int]) -> dict[int, set[int]]:
        groups: dict[int, set[int]] = {}
        for thread in self.online:
            groups.setdefault(key(thread), set()).add(thread.cpu)
        return groups

    def _die_id(self, die: int) -> int:
        """Return the number of a die inside its socket."""
        socket = next(thread.socket for thread in self.threads if thread.die == die)
        return sorted({thread.die for thread in self.threads if thread.socket == socket}).index(die)

    def _l3_id(self, l3: int) -> int | None:
        if self.l3 == "nameless" or (self.l3 == "some" and l3 == self.online[0].l3):
            return None
        return l3 // 2 if self.l3 == "repeated" else l3 * 3 + 1

    def _listed(self) -> tuple[Thread, ...]:
        return self.threads if self.lists_of_offline else self.online

    def _topology(self, thread: Thread):
        same = {
            "core": [t.cpu for t in self._listed() if t.core == thread.core],
            "die": [t.cpu for t in self._listed() if t.die == thread.die],
            "package": [t.cpu for t in self._listed() if t.socket == thread.socket],
        }
        if self.names in ("new", "both"):
            yield from ((f"{level}_cpus_list", self._list(cpus)) for level, cpus in same.items())
        if self.names in ("old", "both"):
            yield "thread_siblings_list", self._list(same["core"])
            yield "core_siblings_list", self._list(same["package"])
        if self.names == "old":
            yield "die_cpus_list", self._list(same["die"])
        if self.names == "masks":
            yield from ((f"{level}_cpus", self._mask(cpus)) for level, cpus in same.items())
        yield "physical_package_id", f"{self.package_ids[thread.socket] if self.package_ids else -1}\n"
        if self.die_ids:
            yield "die_id", f"{self._die_id(thread.die)}\n"
        # The same core_id in each die, and in each cluster where these are the L3s
        cores = sorted({t.core for t in self.threads if t.l3 == thread.l3})
        yield "core_id", f"{cores.index(thread.core) * 4}\n"
        yield "cluster_id", f"{thread.l3}\n"

    def _caches(self, thread: Thread):
        yield "index0/level", "1\n"
        yield "index0/type", "Data\n"
        if self.l3 == "none":
            return
        index = f"index{2 + thread.core % 2}"  # not always the same
        yield f"{index}/level", "3\n"
        yield f"{index}/type", "Unified\n"
        number = self._l3_id(thread.l3)
        if number is not None:
            yield f"{index}/id", f"{number}\n"
        name = "shared_cpu_map" if self.names == "masks" else "shared_cpu_list"
        yield f"{index}/{name}", self._members([t.cpu for t in self._listed() if t.l3 == thread.l3])

    def _members(self, cpus) -> str:
        return self._mask(cpus) if self.names == "masks" else self._list(cpus)

    def _list(self, cpus) -> str:
        return f"{CpuSet(cpus)}{self.end}"

    def _mask(self, cpus) -> str:
        bits = f"{sum(1 << cpu for cpu in cpus):x}"
        bits = bits.zfill(-(-len(bits) // 8) * 8)
        return ",".join(bits[i : i + 8] for i in range(0, len(bits), 8)) + self.end


@st.composite
def shapes(draw) -> Shape:
    """Draw any machine and any way to show it."""
    counts = st.integers(1, 3)
    threads_of_core = draw(st.sampled_from(([1], [2], [4], [8], [1, 2])))
    places = []
    n_cores = n_l3 = n_dies = 0
    n_sockets = draw(counts)
    for socket in range(n_sockets):
        for _ in range(draw(st.integers(1, 2))):
            for _ in range(draw(st.integers(1, 2))):
                for _ in range(draw(counts)):
                    places += [(n_cores, n_l3, n_dies, socket)] * draw(st.sampled_from(threads_of_core))
                    n_cores += 1
                n_l3 += 1
            n_dies += 1
    numbers = draw(
        st.one_of(
            st.just(list(range(len(places)))),
            st.permutations(range(len(places))),
            st.lists(st.integers(0, 300), min_size=len(places), max_size=len(places), unique=True),
        )
    )
    node_of = draw(st.sampled_from((lambda p: p[3], lambda p: p[2], lambda p: p[3] // 2, lambda p: p[0] % 2)))
    threads = tuple(
        Thread(cpu=cpu, core=place[0], l3=place[1], die=place[2], node=node_of(place), socket=place[3])
        for cpu, place in zip(numbers, places, strict=True)
    )
    nodes = sorted({thread.node for thread in threads})
    unique_ids = st.lists(st.integers(0, 10_000), min_size=len(nodes) + 2, max_size=len(nodes) + 2, unique=True)
    node_ids = draw(unique_ids)
    names = draw(st.sampled_from(("new", "old", "both", "masks", "ids")))
    packages = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n_sockets, max_size=n_sockets, unique=True))
    has_nodes = draw(st.booleans())
    return Shape(
        threads=threads,
        offline=frozenset(draw(st.sets(st.sampled_from(numbers), max_size=len(numbers) - 1)))
        if len(numbers) > 1
        else frozenset(),
        names=names,
        lists_of_offline=draw(st.booleans()),
        online_file=draw(st.booleans()),
        package_ids=dict(enumerate(packages)) if names == "ids" or draw(st.booleans()) else None,
        die_ids=draw(st.booleans()),
        l3=draw(st.sampled_from(("ids", "repeated", "some", "nameless", "none"))),
        node_ids=dict(zip(nodes, node_ids, strict=False)) if has_nodes else None,
        memory_nodes=tuple(node_ids[len(nodes) :]) if has_nodes else (),
        end=draw(st.sampled_from(("\n", "\n\0"))),
    )


def large(n_cpus: int = 1024, **changes: object) -> Shape:
    """Return a machine of two sockets, eight nodes and two threads a core, numbered as x86 does it."""
    half = n_cpus // 2

    def share(cpu: int, groups: int) -> int:
        return cpu % half * groups // half

    threads = tuple(
        Thread(cpu=c, core=c % half, l3=share(c, 64), die=share(c, 8), node=share(c, 8), socket=share(c, 2))
        for c in range(n_cpus)
    )
    shape = Shape(threads=threads, package_ids={0: 0, 1: 1}, node_ids={node: node for node in range(8)})
    return replace(shape, **changes)
