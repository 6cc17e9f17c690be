# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about the machine in ``/sys``: its topology, and the PCIe roots near each CPU.

A machine may also lie in another folder, or in texts laid over one; here two CPUs, both threads of one core:

>>> from fastcpu.sysfs import read_topology
>>> cpus = "/sys/devices/system/cpu"
>>> texts = {f"{cpus}/online": "0-1", f"{cpus}/cpu0/topology/core_cpus_list": "0-1"}
>>> machine = read_topology("/no-such-folder", texts)
>>> machine
<Topology: 2 of 2 CPUs online, 1 cores, 0 L3 caches, 1 NUMA nodes, 1 sockets>
>>> machine.notes
('no CPU tells its socket; taken as one socket',)
"""

from fastcpu.sysfs.filetree import FileTree, OverlaidTree, SysfsTree, open_tree
from fastcpu.sysfs.pcie import read_pcie_roots
from fastcpu.sysfs.topology import read_topology

__all__ = ["FileTree", "OverlaidTree", "SysfsTree", "open_tree", "read_pcie_roots", "read_topology"]
