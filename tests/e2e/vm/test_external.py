# SPDX-License-Identifier: Apache-2.0
"""Somebody else chooses: a scheduler that reads the slices, or whoever has written the claim."""

from __future__ import annotations

import pytest

from driver.names import DRIVER_NAME
from e2e.cluster.manifests import cpuset_config, request
from e2e.vm.checks import MANAGED, RESERVED, exactly, settings
from e2e.vm.node import ISOLATED
from fastcpu import CpuSet

# Mixed sizes, with and without both threads of a core, and with socket devices across NUMA nodes. One CPU is left.
CHOICES = {
    "numanode": ["1", "2-3", "4", "5", "6", "7", "8", "9", "10-11", "12", "13", "14"],
    "socket": ["1,4", "2", "3", "5", "6", "7", "8,12", "9", "10", "11", "13", "14"],
}


@pytest.fixture(scope="module", params=["socket", "numanode"])
def group_by(request):
    """What devices are groups of; all tests of one run side by side, with one driver."""
    return request.param


async def test_twelve_claims(node, group_by):
    await node.use_driver(**settings("external", group_by))
    sharing = await node.run([], [])
    ids = await node.running(sharing)
    offers = (await node.offers()).values()
    choices = [CpuSet.parse(cpus) for cpus in CHOICES[group_by]]
    places = [(next(offer for offer in offers if offer.cpus >= cpus), cpus) for cpus in choices]
    pods, claims = [], []
    for at in range(0, 6, 2):
        pod, names = await node.place(*places[at : at + 2])
        pods.append(pod)
        claims += names
        ids |= await node.running(pod)
    for at in range(6, 12, 2):
        names = [await named_by_its_claim(node, *place) for place in places[at : at + 2]]
        pods.append(await node.run(*([name] for name in names)))
        claims += names
        ids |= await node.running(pods[-1])
    granted = dict(zip([container for pod in pods for container in ids[pod]], choices, strict=True))
    await exactly(node, granted, ids[sharing])
    assert [await node.granted(claim) for claim in claims] == choices
    await node.end(pods, claims)
    await node.until_seen(*ids[sharing], cpus=MANAGED - ISOLATED)


async def named_by_its_claim(node, offer, cpus):
    """Create a claim that names its CPUs itself, and a device of which the cluster's scheduler can take them."""
    this_device = f'device.attributes["{DRIVER_NAME}"].cpuIDs == "{offer.cpus}"'
    return await node.claim(request(len(cpus), selector=this_device), config=[cpuset_config(str(cpus), "cpus")])


async def test_published_as_this_kernel_reports(node, group_by):
    await node.use_driver(**settings("external", group_by))
    machine = await node.vm.call("machine")
    lists = await node.vm.call("cpu_lists")
    assert (lists["online"], lists["isolated"]) == ("0-15", str(ISOLATED))
    devices = {device["name"]: device for piece in await node.slices() for device in piece["spec"]["devices"]}
    expected = numa_nodes(machine) if group_by == "numanode" else sockets(machine)
    assert {name: CpuSet.parse(cpus["string"]) for name, (cpus, _) in expected.items()} == {
        name: offer.cpus for name, offer in (await node.offers()).items()
    }
    for name, (cpus, attributes) in expected.items():
        count = len(CpuSet.parse(cpus["string"]))
        assert devices[name]["attributes"] == {
            **attributes,
            "dra.cpu/numCPUs": {"int": count},
            "dra.cpu/smtEnabled": {"bool": machine["smt_active"] == "1"},
            "dra.cpu/cpuIDs": cpus,
            "dra.cpu/smtLayout": {"string": layout(machine)},
        }
        assert devices[name]["capacity"]["dra.cpu/cpu"]["value"] == str(count)
    # What is isolated is offered like any other.
    assert any(offer.cpus >= ISOLATED for offer in (await node.offers()).values())


def sockets(machine):
    """Return name, CPUs and attributes of each socket."""
    found = {}
    for cpu, processor in machine["processors"].items():
        found.setdefault(processor["socket"], set()).add(int(cpu))
    return {
        f"cpudevsocket{number:03}": (
            {"string": str(CpuSet(cpus) - RESERVED)},
            {"dra.cpu/socketID": {"int": number}},
        )
        for number, cpus in found.items()
    }


def numa_nodes(machine):
    """Return name, CPUs and attributes of each NUMA node."""
    found = {}
    for number, cpulist in machine["nodes"].items():
        node = {"int": int(number)}
        cpus = CpuSet.parse(cpulist) - RESERVED
        [socket] = {machine["processors"][str(cpu)]["socket"] for cpu in cpus}
        attributes = {
            "resource.kubernetes.io/numaNode": node,
            "dra.cpu/numaNodeID": node,
            "dra.net/numaNode": node,
            "dra.cpu/socketID": {"int": socket},
        }
        found[f"cpudevnuma{int(number):03}"] = ({"string": str(cpus)}, attributes)
    return found


def layout(machine):
    """Write down pairs of siblings as an external scheduler reads them, if all are equally far apart."""
    pairs = {tuple(CpuSet.parse(one["siblings"])) for one in machine["processors"].values()}
    [distance] = {second - first for first, second in pairs}
    return f"{CpuSet(cpu for pair in pairs for cpu in pair)}>{distance}"
