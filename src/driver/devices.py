# SPDX-License-Identifier: Apache-2.0
"""The devices that a node offers: its topology, cut into groups and described as the Kubernetes API wants it. Pure.

Devices are named for the kernel's ids, so that a device keeps its name when others come and go. Nothing of the hardware
keeps the driver from publishing: what cannot be said in an attribute is left out, and `DeviceModel.warnings` says what
and why. Nothing is ever cut short, because half a list reads like a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from driver.attributes import (
    CACHE_L3_ID,
    CPU_IDS,
    CPU_IDS_STRIDED,
    LARGEST_STRING,
    NET_NUMA_NODE,
    NUM_CPUS,
    NUMA_NODE,
    NUMA_NODE_ID,
    SMT_ENABLED,
    SMT_LAYOUT,
    SMT_LAYOUT_STRIDED,
    SOCKET_ID,
    Attributes,
    LeftOut,
    pcie_attributes,
)
from driver.names import CPU_CAPACITY
from driver.smt_layout import SmtLayout, smt_layout
from fastcpu import CpuSet
from fastcpu.topology import Level, Topology

__all__ = ["INDIVIDUAL", "Device", "DeviceModel", "build_devices", "mask_matrix"]

INDIVIDUAL: Final = "individual"
"""`DeviceModel.group_by` where each device is one CPU."""

_NAME_PREFIXES: Final = {"numanode": "cpudevnuma", "socket": "cpudevsocket", "l3cache": "cpudevl3cache"}
_MACHINE: Final = "cpudevmachine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A group of CPUs that claims take CPUs of.

    Attributes
    ----------
    name : str
        Name in the pool.
    group : int
        Row of `DeviceModel.groups`.
    cpus : CpuSet
        Its allocatable CPUs; at least one.
    attributes : mapping of str to mapping
        The published attributes, as JSON.
    maps_node_allocatable : bool
        Whether the CPUs that claims get count against the node's allocatable CPUs (KEP-5517).
    divisible : bool
        Whether several claims may have it, each with a number of its CPUs; else one claim has the device as it is.
    """

    name: str
    group: int
    cpus: CpuSet
    attributes: Mapping[str, Mapping[str, object]]
    maps_node_allocatable: bool
    divisible: bool = True

    def to_api(self) -> dict[str, object]:
        """Return the device as an item of a ResourceSlice's ``spec.devices``."""
        attributes = {name: dict(value) for name, value in self.attributes.items()}
        device: dict[str, object] = {"name": self.name, "attributes": attributes}
        mapping = {"deviceMultiplier": str(len(self.cpus))}
        if self.divisible:
            count = str(len(self.cpus))
            # A range with a step must leave room for one step, which a single CPU does not.
            amounts = {"validValues": ["1"]} if len(self.cpus) == 1 else {"validRange": {"min": "1", "step": "1"}}
            device["allowMultipleAllocations"] = True
            device["capacity"] = {CPU_CAPACITY: {"value": count, "requestPolicy": {"default": count, **amounts}}}
            mapping = {"capacityKey": CPU_CAPACITY, "capacityMultiplier": "1"}
        if self.maps_node_allocatable:
            device["nodeAllocatableResources"] = {"cpu": {"mapping": mapping}}
        return device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """All devices of a node.

    Attributes
    ----------
    group_by : str
        What a device is a group of; `INDIVIDUAL` if it is one CPU.
    devices : tuple of Device
        In the order of their numbers, which is the order in which the scheduler tries them.
    by_name : mapping of str to Device
        The same, by name.
    groups : ndarray of uint64, shape (n_devices, n_words), C-contiguous, read-only
        The CPUs of each device's group, reserved ones included.
    warnings : tuple of str
        What is not published as it should be, and why; one line each.
    left_out : mapping of str to tuple of str
        Attributes that could not be published in any form, and the devices that lack them.
    """

    group_by: str
    devices: tuple[Device, ...]
    by_name: Mapping[str, Device]
    groups: npt.NDArray[np.uint64]
    warnings: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]]

    def without(self, cpus: CpuSet) -> DeviceModel:
        """Return the model without the devices that have some of these CPUs."""
        devices = tuple(device for device in self.devices if device.cpus.isdisjoint(cpus))
        return replace(self, devices=devices, by_name={device.name: device for device in devices})

    def without_list_attributes(self) -> DeviceModel:
        """Return the model for an API server that refuses attributes with lists of values."""
        devices = tuple(
            replace(
                device,
                attributes={
                    name: attribute
                    for name, attribute in device.attributes.items()
                    if not any(isinstance(value, list) for value in attribute.values())
                },
            )
            for device in self.devices
        )
        return replace(self, devices=devices, by_name={device.name: device for device in devices})


@dataclass(frozen=True, slots=True)
class _Group:
    number: int
    cpus: CpuSet


def build_devices(
    topology: Topology,
    *,
    reserved: CpuSet,
    group_by: str,
    allocator: str,
    pcie_roots: Mapping[int, Sequence[str]] | None,
    node_allocatable_mapping: bool,
) -> DeviceModel:
    """Describe a machine's CPUs as devices of grouped mode.

    Parameters
    ----------
    topology : Topology
        The machine.
    reserved : CpuSet
        CPUs that are not for claims.
    group_by : {"numanode", "socket", "l3cache", "machine"}
        What a device is a group of. CPUs without an L3 cache are grouped by NUMA node where the others are grouped
        by L3 cache; such a group has the number of its lowest CPU.
    allocator : {"external", "cpumanager"}
        Who chooses CPUs. An external one is told each group's CPUs and the machine's SMT siblings.
    pcie_roots : mapping of int to sequence of str, or None
        PCIe roots near to each CPU; None to publish none.
    node_allocatable_mapping : bool
        Whether consumed CPUs count against the node's allocatable CPUs (KEP-5517).

    Returns
    -------
    DeviceModel

    Raises
    ------
    ValueError
        If ``group_by`` is none of these.
    """
    groups, warnings = _groups(topology, group_by)
    groups = [group for group in groups if not group.cpus <= reserved]
    if not groups:
        warnings.append(f"no device is published: all online CPUs ({topology.online}) are reserved")
    left_out = LeftOut()
    layout = smt_layout(topology.cores) if allocator == "external" else None
    devices = []
    for row, group in enumerate(groups):
        prefix = _NAME_PREFIXES.get(group_by)
        name = _MACHINE if prefix is None else f"{prefix}{group.number:03}"
        allocatable = group.cpus - reserved
        attributes = _topology_attributes(topology, group_by, group)
        attributes[NUM_CPUS] = {"int": len(allocatable)}
        attributes[SMT_ENABLED] = {"bool": topology.smt_enabled}
        if layout is not None:
            attributes |= _choice_attributes(name, allocatable, layout, left_out)
        if pcie_roots is not None:
            attributes |= pcie_attributes(name, allocatable, pcie_roots, len(attributes), left_out)
        devices.append(
            Device(
                name=name,
                group=row,
                cpus=allocatable,
                attributes=attributes,
                maps_node_allocatable=node_allocatable_mapping,
            )
        )
    return DeviceModel(
        group_by=group_by,
        devices=tuple(devices),
        by_name={device.name: device for device in devices},
        groups=mask_matrix([group.cpus for group in groups], topology.n_words),
        warnings=(*warnings, *left_out.warnings()),
        left_out={attribute: tuple(names) for attribute, names in left_out.devices.items()},
    )


def _groups(topology: Topology, group_by: str) -> tuple[list[_Group], list[str]]:
    """Cut the machine into groups with unique numbers, in their order."""
    warnings: list[str] = []
    if group_by == "machine":
        return [_Group(0, topology.online)], warnings
    if group_by == "l3cache":
        level = topology.l3_caches
    elif group_by in ("numanode", "socket"):
        level = topology.numa_nodes if group_by == "numanode" else topology.sockets
    else:
        raise ValueError(f"groupBy {group_by!r} is not numanode, socket, l3cache or machine")
    groups = [_Group(number, level.cpuset(row)) for row, number in enumerate(level.ids)]
    rest = topology.online.difference(*(group.cpus for group in groups))
    if rest and group_by == "l3cache":
        groups += [_Group(cpus.first, cpus) for cpus in _by_numa_node(topology, rest)]
        warnings.append(f"CPUs {rest} have no L3 cache; they are grouped by NUMA node")
    elif rest:
        where = "NUMA node" if group_by == "numanode" else "socket"
        warnings.append(f"CPUs {rest} are in no {where} and are not published; another groupBy would publish them")
    if len({group.number for group in groups}) < len(groups):
        groups = [_Group(group.cpus.first, group.cpus) for group in groups]
        warnings.append(
            "the id of an L3 cache is the lowest CPU of a group without one; all have their lowest CPU's number"
        )
    return sorted(groups, key=lambda group: group.number), warnings


def _by_numa_node(topology: Topology, cpus: CpuSet) -> Iterator[CpuSet]:
    nodes = [topology.numa_nodes.cpuset(row) & cpus for row in range(len(topology.numa_nodes))]
    return (found for found in (*nodes, cpus.difference(*nodes)) if found)


def _topology_attributes(topology: Topology, group_by: str, group: _Group) -> Attributes:
    if group_by == "machine":
        return {}
    if group_by == "numanode":
        numa_node, socket = group.number, _shared(topology.sockets, group.cpus)
    elif group_by == "socket":
        numa_node, socket = None, group.number
    else:
        numa_node, socket = _shared(topology.numa_nodes, group.cpus), _shared(topology.sockets, group.cpus)
    numbers = {
        NUMA_NODE: numa_node,
        SOCKET_ID: socket,
        CACHE_L3_ID: group.number if group_by == "l3cache" else None,
        NUMA_NODE_ID: numa_node if group_by == "numanode" else None,
        NET_NUMA_NODE: numa_node if group_by == "numanode" else None,
    }
    return {name: {"int": number} for name, number in numbers.items() if number is not None}


def _shared(level: Level, cpus: CpuSet) -> int | None:
    """Return the id of the one group that has all the CPUs."""
    row = int(level.group_of[cpus.first])
    return level.ids[row] if row >= 0 and cpus <= level.cpuset(row) else None


def _choice_attributes(name: str, cpus: CpuSet, layout: SmtLayout, left_out: LeftOut) -> Attributes:
    """Return what an allocator needs that chooses CPUs itself."""
    attributes: Attributes = {}
    for attribute, plain, strided_attribute, strided in (
        (CPU_IDS, str(cpus), CPU_IDS_STRIDED, cpus.strided()),
        (SMT_LAYOUT, layout.plain, SMT_LAYOUT_STRIDED, layout.strided),
    ):
        if plain is not None and len(plain) <= LARGEST_STRING:
            attributes[attribute] = {"string": plain}
        elif strided is not None and len(strided) <= LARGEST_STRING:
            attributes[strided_attribute] = {"string": strided}
        elif strided is None:
            left_out.add(attribute, name, "there are cores whose CPU numbers have no common distance")
        else:
            reason = f"it would need {len(strided)} bytes even as {strided_attribute}; a string holds {LARGEST_STRING}"
            left_out.add(attribute, name, reason)
    return attributes


def mask_matrix(rows: Sequence[CpuSet], n_words: int) -> npt.NDArray[np.uint64]:
    """Return groups of CPUs as a read-only matrix, a row for each."""
    matrix = np.zeros((len(rows), n_words), np.uint64)
    for row, cpus in zip(matrix, rows, strict=True):
        row[: len(cpus.words)] = cpus.words
    matrix.flags.writeable = False
    return matrix
