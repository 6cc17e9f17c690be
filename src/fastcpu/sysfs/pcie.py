# SPDX-License-Identifier: Apache-2.0
"""Which PCIe root complexes are near each CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Final

from fastcpu.cpuset import CpuSet
from fastcpu.sysfs.filetree import FileTree, open_tree
from fastcpu.sysfs.reader import SysfsReader

__all__ = ["read_pcie_roots"]

_DEVICES: Final = "/sys/devices"

# drivers/pci/probe.c prints "pci%04x:%02x"; a domain that the kernel invents for a hidden bus (VMD) has five digits.
_ROOT: Final = re.compile("pci([0-9a-f]{4,8}:[0-9a-f]{2})")

_BUS_AFFINITY: Final = ("cpulistaffinity", "cpuaffinity")
_DEVICE_AFFINITY: Final = ("local_cpulist", "local_cpus")


def read_pcie_roots(
    root: str | os.PathLike[str] | FileTree = "/sys", overlay: Mapping[str, str] | None = None
) -> dict[int, tuple[str, ...]]:
    """Read the PCIe root complexes that are local to each CPU.

    Parameters
    ----------
    root : path or FileTree, default "/sys"
        As for `read_topology`.
    overlay : mapping of str to str, optional
        As for `read_topology`.

    Returns
    -------
    dict of int to tuple of str
        The names of the roots (``pci0000:00``), ascending, by CPU. CPUs without a local root are left out.

    Notes
    -----
    A root's local CPUs are the ``cpulistaffinity`` of its bus, or its mask ``cpuaffinity``, or the local CPUs of its
    devices together. A root without these files is near no CPU. Where the firmware does not say which CPUs are near a
    root, the kernel names all online CPUs. See ``Documentation/ABI/testing/sysfs-bus-pci``.

    Examples
    --------
    >>> bus = "/sys/devices/pci0000:40/pci_bus/0000:40"
    >>> read_pcie_roots("/no-such-folder", {f"{bus}/cpulistaffinity": "2-3"})
    {2: ('pci0000:40',), 3: ('pci0000:40',)}
    """
    reader = SysfsReader(open_tree(root, overlay))
    roots_of_cpu: dict[int, list[str]] = {}
    for name in sorted(reader.tree.entries(_DEVICES)):
        match = _ROOT.fullmatch(name)
        if match:
            for cpu in _local_cpus(reader, name, match[1]):
                roots_of_cpu.setdefault(cpu, []).append(name)
    return {cpu: tuple(names) for cpu, names in roots_of_cpu.items()}


def _local_cpus(reader: SysfsReader, name: str, bus: str) -> CpuSet:
    cpus = reader.members(f"{_DEVICES}/{name}/pci_bus/{bus}", _BUS_AFFINITY)
    if cpus is None:
        cpus = CpuSet().union(*_local_cpus_of_devices(reader, f"{_DEVICES}/{name}", bus))
    return cpus


def _local_cpus_of_devices(reader: SysfsReader, folder: str, bus: str) -> Iterator[CpuSet]:
    for name in reader.tree.entries(folder):
        if name.startswith(f"{bus}:"):
            cpus = reader.members(f"{folder}/{name}", _DEVICE_AFFINITY)
            if cpus is not None:
                yield cpus
