# SPDX-License-Identifier: Apache-2.0
"""The attributes of published devices: their names, their limits, and what becomes of those that exceed them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from fastcpu import CpuSet

LARGEST_STRING: Final = 64
"""Bytes that a string attribute holds."""
LARGEST_VALUE_COUNT: Final = 48
"""Values of attributes that a device may have, the items of lists counted one by one."""

NUMA_NODE: Final = "resource.kubernetes.io/numaNode"
PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
NUMA_NODE_ID: Final = "dra.cpu/numaNodeID"
NET_NUMA_NODE: Final = "dra.net/numaNode"
SOCKET_ID: Final = "dra.cpu/socketID"
CACHE_L3_ID: Final = "dra.cpu/cacheL3ID"
NUM_CPUS: Final = "dra.cpu/numCPUs"
SMT_ENABLED: Final = "dra.cpu/smtEnabled"
CPU_IDS: Final = "dra.cpu/cpuIDs"
CPU_IDS_STRIDED: Final = "dra.cpu/cpuIDsStrided"
SMT_LAYOUT: Final = "dra.cpu/smtLayout"
SMT_LAYOUT_STRIDED: Final = "dra.cpu/smtLayoutStrided"
CPU_ID: Final = "dra.cpu/cpuID"
CORE_ID: Final = "dra.cpu/coreID"
CORE_TYPE: Final = "dra.cpu/coreType"

Attributes = dict[str, Mapping[str, object]]
"""Attributes by name, each as JSON."""

_SHOWN_DEVICES: Final = 3


class LeftOut:
    """Attributes that could not be published, gathered over all devices so that each gives one warning.

    Attributes
    ----------
    devices : mapping of str to list of str
        The devices that lack each attribute.
    """

    def __init__(self) -> None:
        self.devices: defaultdict[str, list[str]] = defaultdict(list)
        self._reasons: dict[str, str] = {}

    def add(self, attribute: str, device: str, reason: str) -> None:
        """Note that a device lacks an attribute, and why."""
        self.devices[attribute].append(device)
        self._reasons.setdefault(attribute, reason)

    def warnings(self) -> Iterator[str]:
        """Yield a line for each attribute."""
        for attribute, devices in self.devices.items():
            yield f"attribute {attribute} is left out of {_named(devices)}: {self._reasons[attribute]}"


def pcie_attributes(
    name: str, cpus: CpuSet, pcie_roots: Mapping[int, Sequence[str]], other_values: int, left_out: LeftOut
) -> Attributes:
    """Return the attribute that lists the PCIe roots near to any of a device's CPUs, if there are any.

    Parameters
    ----------
    name : str
        The device.
    cpus : CpuSet
        Its CPUs.
    pcie_roots : mapping of int to sequence of str
        The roots near to each CPU.
    other_values : int
        How many values its other attributes have.
    left_out : LeftOut
        Told if the list does not fit.
    """
    roots = sorted({root for cpu in cpus for root in pcie_roots.get(cpu, ())})
    if not roots:
        return {}
    room = LARGEST_VALUE_COUNT - other_values
    if len(roots) > room:
        reason = (
            f"it would have {len(roots)} values; {room} of the {LARGEST_VALUE_COUNT} that a device may have are free"
        )
        left_out.add(PCIE_ROOT, name, reason)
        return {}
    longest = max(roots, key=len)
    if len(longest.encode("utf-8", "surrogateescape")) > LARGEST_STRING:
        left_out.add(PCIE_ROOT, name, f"the name {longest!r} is longer than the {LARGEST_STRING} bytes of a string")
        return {}
    return {PCIE_ROOT: {"strings": roots}}


def _named(devices: Sequence[str]) -> str:
    if len(devices) <= _SHOWN_DEVICES:
        return ", ".join(devices)
    return f"{len(devices)} devices from {devices[0]} to {devices[-1]}"
