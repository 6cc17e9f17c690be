# SPDX-License-Identifier: Apache-2.0
"""From a machine's topology to the devices of its ResourceSlices, beside the same with dicts and sets."""

from __future__ import annotations

import pytest

import cases
import rivals
from driver.devices import build_devices
from fastcpu import CpuSet, Topology

LEVELS = {"numanode": "numa_nodes", "l3cache": "l3_caches"}
NAMES = {"numanode": "cpudevnuma", "l3cache": "cpudevl3cache"}


def by_driver(topology: Topology, group_by: str):
    def build() -> list[dict[str, object]]:
        model = build_devices(
            topology,
            reserved=CpuSet(cases.RESERVED),
            group_by=group_by,
            allocator="cpumanager",
            pcie_roots=None,
            node_allocatable_mapping=False,
        )
        return [device.to_api() for device in model.devices]

    return build


def by_sets(topology: Topology, group_by: str):
    """Return the same from plain lists: the socket, NUMA node and L3 cache of each CPU."""
    columns = {
        name: [level.ids[row] for row in level.group_of.tolist()]
        for name, level in (
            ("socket", topology.sockets),
            ("node", topology.numa_nodes),
            (group_by, getattr(topology, LEVELS[group_by])),
        )
    }
    smt = topology.smt_enabled

    def build() -> list[dict[str, object]]:
        groups: dict[int, set[int]] = {}
        for cpu, group in enumerate(columns[group_by]):
            groups.setdefault(group, set()).add(cpu)
        devices = []
        for number in sorted(groups):
            cpus = groups[number]
            allocatable = cpus - cases.RESERVED
            (socket,) = {columns["socket"][cpu] for cpu in cpus}
            (node,) = {columns["node"][cpu] for cpu in cpus}
            attributes = {"resource.kubernetes.io/numaNode": {"int": node}, "dra.cpu/socketID": {"int": socket}}
            if group_by == "l3cache":
                attributes["dra.cpu/cacheL3ID"] = {"int": number}
            else:
                attributes |= {"dra.cpu/numaNodeID": {"int": node}, "dra.net/numaNode": {"int": node}}
            attributes |= {"dra.cpu/numCPUs": {"int": len(allocatable)}, "dra.cpu/smtEnabled": {"bool": smt}}
            count = str(len(allocatable))
            policy = {"default": count, "validRange": {"min": "1", "step": "1"}}
            devices.append(
                {
                    "name": f"{NAMES[group_by]}{number:03}",
                    "attributes": attributes,
                    "allowMultipleAllocations": True,
                    "capacity": {"dra.cpu/cpu": {"value": count, "requestPolicy": policy}},
                }
            )
        return devices

    return build


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("group_by", LEVELS)
@pytest.mark.parametrize("contender", ["dracpu", "Python set"])
def test_build(entry, contender, group_by, n_cpus):
    topology = cases.server(n_cpus)
    build = (by_driver if contender == "dracpu" else by_sets)(topology, group_by)
    devices = entry("Devices", f"topology to devices, by {group_by}", contender, n=n_cpus)(build)
    assert devices == by_driver(topology, group_by)()


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("contender", ["fastcpu", "Python set"])
def test_group(entry, contender, n_cpus):
    """Sort the CPUs of a machine into its L3 caches and write each as a list."""
    caches = [cpu % (n_cpus // 2) // 8 for cpu in range(n_cpus)]
    online = CpuSet(range(n_cpus))

    def by_topology() -> list[str]:
        level = Topology.from_arrays(online, l3_caches=caches).l3_caches
        return [str(level.cpuset(row)) for row in range(len(level))]

    def by_sets() -> list[str]:
        groups: dict[int, set[int]] = {}
        for cpu, cache in enumerate(caches):
            groups.setdefault(cache, set()).add(cpu)
        return [rivals.format_set(groups[number]) for number in sorted(groups)]

    lists = entry("Devices", "CPUs to L3 caches as lists", contender, n=n_cpus)(
        by_topology if contender == "fastcpu" else by_sets
    )
    assert lists == by_sets()
