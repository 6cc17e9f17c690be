# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about the machine in ``/sys``: its topology, and which PCIe roots are near which CPUs."""

from fastcpu.sysfs.filetree import FileTree, OverlaidTree, SysfsTree, open_tree
from fastcpu.sysfs.pcie import read_pcie_roots
from fastcpu.sysfs.topology import read_topology

__all__ = ["FileTree", "OverlaidTree", "SysfsTree", "open_tree", "read_pcie_roots", "read_topology"]
