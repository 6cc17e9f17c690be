# SPDX-License-Identifier: Apache-2.0
"""Machines that do not exist, as sysfs trees: the files a kernel would show on a server of that shape.

CPUs are numbered as servers do it: first one thread of every core, socket by socket and NUMA node by NUMA node, then
the second thread of every core in the same order. On a machine with 256 CPUs and two threads a core, CPU 0 and CPU 128
are siblings.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fastcpu.cpuset import CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShape:
    """The shape of a regular server.

    Attributes
    ----------
    sockets, numa_nodes, cpus : int
        How many of each there are in the machine; `cpus` counts threads.
    threads_per_core : int
    cores_per_l3 : int
        The last L3 of a NUMA node has fewer cores if they cannot be divided evenly.
    isolated : str
        The CPUs of the boot option ``isolcpus=``, as a cpulist.

    Raises
    ------
    ValueError
        If the parts cannot be divided evenly.
    """

    sockets: int = 2
    numa_nodes: int = 8
    cpus: int = 256
    threads_per_core: int = 2
    cores_per_l3: int = 8
    isolated: str = ""

    def __post_init__(self) -> None:
        if min(self.sockets, self.numa_nodes, self.cpus, self.threads_per_core, self.cores_per_l3) < 1:
            raise ValueError("a machine has at least one of everything")
        if self.numa_nodes % self.sockets:
            raise ValueError(f"{self.numa_nodes} NUMA nodes cannot be divided among {self.sockets} sockets")
        if self.cpus % (self.numa_nodes * self.threads_per_core):
            raise ValueError(
                f"{self.cpus} CPUs cannot be divided into cores of {self.threads_per_core} threads "
                f"in {self.numa_nodes} NUMA nodes"
            )

    @property
    def cores(self) -> int:
        """How many cores the machine has."""
        return self.cpus // self.threads_per_core

    def threads(self, cores: range) -> CpuSet:
        """Return all CPUs of some cores, which are numbered from 0 through the machine."""
        return CpuSet(thread * self.cores + core for thread in range(self.threads_per_core) for core in cores)


def write_machine(root: Path, shape: MachineShape | None = None) -> Path:
    """Write the tree of a machine and return its root, which stands for ``/sys``.

    Parameters
    ----------
    root : Path
        The folder to write to; it must not exist or be empty.
    shape : MachineShape, optional
        By default 2 sockets, 8 NUMA nodes and 256 CPUs.
    """
    shape = MachineShape() if shape is None else shape
    cpu_folder = root / "devices/system/cpu"
    cpu_folder.mkdir(parents=True)
    everything = str(shape.threads(range(shape.cores)))
    smt = shape.threads_per_core > 1
    _write_files(
        cpu_folder,
        {
            "online": everything,
            "present": everything,
            "possible": everything,
            "offline": "",
            "isolated": shape.isolated,
            "kernel_max": str(max(8191, shape.cpus - 1)),
        },
    )
    (cpu_folder / "smt").mkdir()
    _write_files(cpu_folder / "smt", {"active": str(int(smt)), "control": "on" if smt else "notsupported"})
    _write_nodes(root / "devices/system/node", shape)

    cores_per_node = shape.cores // shape.numa_nodes
    cores_per_socket = shape.cores // shape.sockets
    l3_id = 0
    for node in range(shape.numa_nodes):
        node_cores = range(node * cores_per_node, (node + 1) * cores_per_node)
        socket = node_cores.start // cores_per_socket
        package = str(shape.threads(range(socket * cores_per_socket, (socket + 1) * cores_per_socket)))
        for first in range(node_cores.start, node_cores.stop, shape.cores_per_l3):
            l3_cores = range(first, min(first + shape.cores_per_l3, node_cores.stop))
            cache = {
                "id": str(l3_id),
                "level": "3",
                "type": "Unified",
                "size": "32768K",
                "shared_cpu_list": str(shape.threads(l3_cores)),
            }
            l3_id += 1
            for core in l3_cores:
                siblings = shape.threads(range(core, core + 1))
                topology = {
                    "physical_package_id": str(socket),
                    "die_id": "0",
                    "cluster_id": "65535",
                    "core_id": str(core % cores_per_socket),
                    "core_cpus_list": str(siblings),
                    "die_cpus_list": package,
                    "package_cpus_list": package,
                }
                for cpu in siblings:
                    _write_cpu(f"{cpu_folder}/cpu{cpu}", topology, cache, node)
    return root


def _write_cpu(folder: str, topology: dict[str, str], cache: dict[str, str], node: int) -> None:
    os.makedirs(f"{folder}/topology")
    os.makedirs(f"{folder}/cache/index3")
    _write_files(Path(folder, "topology"), topology)
    _write_files(Path(folder, "cache/index3"), cache)
    os.symlink(f"../../node/node{node}", f"{folder}/node{node}")


def _write_nodes(folder: Path, shape: MachineShape) -> None:
    folder.mkdir()
    nodes = str(CpuSet(range(shape.numa_nodes)))
    _write_files(folder, dict.fromkeys(("online", "possible", "has_cpu", "has_memory"), nodes))
    cores = shape.cores // shape.numa_nodes
    nodes_per_socket = shape.numa_nodes // shape.sockets
    for node in range(shape.numa_nodes):
        distances = [
            10 if other == node else 12 if other // nodes_per_socket == node // nodes_per_socket else 32
            for other in range(shape.numa_nodes)
        ]
        (folder / f"node{node}").mkdir()
        _write_files(
            folder / f"node{node}",
            {
                "cpulist": str(shape.threads(range(node * cores, (node + 1) * cores))),
                "distance": " ".join(str(distance) for distance in distances),
                "meminfo": f"Node {node} MemTotal:       67108864 kB",
            },
        )


def _write_files(folder: Path, texts: dict[str, str]) -> None:
    # Plain system calls: a large machine has a hundred thousand files.
    for name, text in texts.items():
        descriptor = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        os.write(descriptor, f"{text}\n".encode())
        os.close(descriptor)
