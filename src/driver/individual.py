# SPDX-License-Identifier: Apache-2.0
"""Individual mode: every allocatable CPU is a device, and what the scheduler picks is what the claim gets.

The mode is deprecated. It is there for nodes that still have claims of it: grouped mode with ``allocator: external``
lets a scheduler name exact CPUs as well, with a device for each group in place of one for each CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from driver.allocators import Choice, Holders, find_device
from driver.attributes import (
    CACHE_L3_ID,
    CORE_ID,
    CORE_TYPE,
    CPU_ID,
    NET_NUMA_NODE,
    NUMA_NODE,
    NUMA_NODE_ID,
    SMT_ENABLED,
    SOCKET_ID,
    Attributes,
    LeftOut,
    pcie_attributes,
)
from driver.claims import AllocatedClaim
from driver.devices import INDIVIDUAL, Device, DeviceModel, mask_matrix
from driver.errors import ClaimError, ClaimPendingError
from driver.podlimit import PodLimit
from driver.wording import held_by, subject
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from fastcpu.topology import CORE_TYPE_NAMES, Level, Topology

__all__ = ["IndividualAllocator", "build_individual_devices"]

_NAME_PREFIX: Final = "cpudev"
_NO_L3_CACHE: Final = -1


def build_individual_devices(
    topology: Topology,
    *,
    reserved: CpuSet,
    pcie_roots: Mapping[int, Sequence[str]] | None,
    node_allocatable_mapping: bool,
) -> DeviceModel:
    """Describe each of a machine's allocatable CPUs as a device.

    Parameters
    ----------
    topology : Topology
        The machine.
    reserved : CpuSet
        CPUs that are not for claims.
    pcie_roots : mapping of int to sequence of str, or None
        PCIe roots near to each CPU; None to publish none.
    node_allocatable_mapping : bool
        Whether devices count against the node's allocatable CPUs (KEP-5517).

    Returns
    -------
    DeviceModel

    Notes
    -----
    Devices are numbered through the allocatable CPUs core by core, the core of the lowest CPU first, because schedulers
    take devices in this order: claims for two get siblings. A device's name therefore says nothing of its CPU, and may
    mean another one when `reserved` or the CPUs that are online change.
    """
    left_out = LeftOut()
    devices = []
    for index, cpu in enumerate(_core_by_core(topology.cores, topology.online - reserved)):
        name = f"{_NAME_PREFIX}{index:03}"
        attributes = _attributes(topology, cpu)
        if pcie_roots is not None:
            attributes |= pcie_attributes(name, CpuSet([cpu]), pcie_roots, len(attributes), left_out)
        devices.append(
            Device(
                name=name,
                group=index,
                cpus=CpuSet([cpu]),
                attributes=attributes,
                maps_node_allocatable=node_allocatable_mapping,
                divisible=False,
            )
        )
    warnings = list(left_out.warnings())
    if not devices:
        warnings.append(f"no device is published: all online CPUs ({topology.online}) are reserved")
    return DeviceModel(
        group_by=INDIVIDUAL,
        devices=tuple(devices),
        by_name={device.name: device for device in devices},
        groups=mask_matrix([device.cpus for device in devices], topology.n_words),
        warnings=tuple(warnings),
        left_out={attribute: tuple(names) for attribute, names in left_out.devices.items()},
    )


def _core_by_core(cores: Level, cpus: CpuSet) -> Iterator[int]:
    placed: set[int] = set()
    for cpu in cpus:
        if cpu not in placed:
            siblings = cores.cpuset(int(cores.group_of[cpu])) & cpus
            placed.update(siblings)
            yield from siblings


def _attributes(topology: Topology, cpu: int) -> Attributes:
    numa_node = _id(topology.numa_nodes, cpu)
    cache = _id(topology.l3_caches, cpu)
    core = int(topology.core_id[cpu])
    numbers = {
        NUMA_NODE: numa_node,
        NUMA_NODE_ID: numa_node,
        NET_NUMA_NODE: numa_node,
        SOCKET_ID: _id(topology.sockets, cpu),
        CACHE_L3_ID: _NO_L3_CACHE if cache is None else cache,
        CORE_ID: core if core >= 0 else _id(topology.cores, cpu),
        CPU_ID: cpu,
    }
    attributes: Attributes = {name: {"int": number} for name, number in numbers.items() if number is not None}
    attributes[CORE_TYPE] = {"string": CORE_TYPE_NAMES[topology.core_type[cpu]]}
    attributes[SMT_ENABLED] = {"bool": topology.smt_enabled}
    return attributes


def _id(level: Level, cpu: int) -> int | None:
    """Return the id of a CPU's group, if it is in one."""
    row = int(level.group_of[cpu])
    return level.ids[row] if row >= 0 else None


class IndividualAllocator:
    """Gives a claim the CPUs that its devices are.

    Consumed capacities and opaque parameters mean nothing in this mode and are not looked at.

    Parameters
    ----------
    model : DeviceModel
        The node's devices.
    pool : CpuPool
        The node's CPUs.
    node_name : str
        Name of the node, which is the name of its resource pool.
    limit : PodLimit, optional
        The CPUs that no pod can use.
    """

    def __init__(self, model: DeviceModel, pool: CpuPool, node_name: str, limit: PodLimit | None = None) -> None:
        self._model = model
        self._pool = pool
        self._node_name = node_name
        self._limit = PodLimit() if limit is None else limit

    def choose(self, claim: AllocatedClaim, holders: Holders, held: CpuSet | None = None) -> Choice:
        """Look up the CPUs of a claim's devices; see `driver.allocators.Allocator.choose`.

        CPUs that the claim itself holds already count as taken only where another claim holds them, too.
        """
        by_request: dict[str, CpuSet] = {}
        chosen = CpuSet()
        for result in claim.results:
            device = find_device(self._model, self._node_name, result)
            if not device.cpus.isdisjoint(chosen):
                raise ClaimError(
                    f'request "{result.request}", device {device.name}: it is allocated to this claim twice; '
                    "expected a device of its own for each result, since a device is one CPU"
                )
            chosen |= device.cpus
            by_request[result.request] = by_request.get(result.request, CpuSet()) | device.cpus
        if unusable := (chosen & self._pool.offline) - (held or CpuSet()):
            raise ClaimError("; ".join(self._limit.faults(unusable, self._pool)))
        taken = chosen & self._pool.taken
        others = {uid: cpus for uid, cpus in holders(taken).items() if uid != claim.uid} if taken else {}
        strange = taken - (held or CpuSet())
        if others or strange:
            conflicts = list(held_by(others)) or [f"{subject(strange)} held already"]
            raise ClaimPendingError(f"the claim's devices overlap with those of other claims: {'; '.join(conflicts)}")
        return Choice(cpus=chosen, by_request=by_request)
