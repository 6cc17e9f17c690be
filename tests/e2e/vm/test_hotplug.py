# SPDX-License-Identifier: Apache-2.0
"""CPUs go offline and come back, while they are free and while a claim holds them."""

from __future__ import annotations

import pytest_asyncio

from e2e.cluster.api import EVENTS, PODS, SLICES
from e2e.vm.checks import MANAGED, settings
from e2e.vm.node import ISOLATED, PATIENCE_S
from fastcpu import CpuSet


@pytest_asyncio.fixture(loop_scope="session")
async def node(node):
    await node.use_driver(**settings("external", "numanode"))
    yield node
    for cpu in CpuSet.parse((await node.vm.call("cpu_lists"))["offline"]):
        await node.vm.call("set_online", cpu=cpu, online=True)


async def until_offered(node, device, cpus):
    """Wait until a device is published with these CPUs."""

    def offered(slices):
        devices = [found for piece in slices for found in piece["spec"].get("devices", ()) if found["name"] == device]
        return [
            found
            for found in devices
            if found["attributes"]["dra.cpu/cpuIDs"]["string"] == cpus
            and found["capacity"]["dra.cpu/cpu"]["value"] == str(len(CpuSet.parse(cpus)))
        ]

    await node.api.until(SLICES, offered, f"{device} is published with CPUs {cpus}", PATIENCE_S)


async def until_healthy(node, pod, health):
    """Wait until the kubelet says how the devices of a pod are, and return what it says."""

    def told(pods):
        [found] = [item for item in pods if item["metadata"]["name"] == pod]
        return [
            resource.get("message") or "-"
            for status in found["status"]["containerStatuses"]
            for kind in status.get("allocatedResourcesStatus", ())
            for resource in kind["resources"]
            if resource["health"] == health
        ]

    return await node.api.until(PODS, told, f"devices of {pod} are {health}", PATIENCE_S)


async def test_while_free(node):
    sharing = await node.run([])
    [shared] = (await node.running(sharing))[sharing]
    await node.until_seen(shared, cpus=MANAGED - ISOLATED)
    await node.vm.call("set_online", cpu=9, online=False)
    await until_offered(node, "cpudevnuma002", "8,10-11")
    await node.until_seen(shared, cpus=MANAGED - ISOLATED - CpuSet([9]))
    offer = (await node.offers())["cpudevnuma002"]
    pod, [claim] = await node.place((offer, CpuSet.parse("9")))

    def refused(events):
        return [one for one in events if "CPU 9 is not online on this node" in one.get("message", "")]

    assert await node.api.until(EVENTS, refused, "the claim is refused", PATIENCE_S)
    await node.end([pod], [claim])

    await node.vm.call("set_online", cpu=9, online=True)
    await until_offered(node, "cpudevnuma002", "8-11")
    await node.until_seen(shared, cpus=MANAGED - ISOLATED)
    again, _ = await node.place((offer, CpuSet.parse("9")))
    [container] = (await node.running(again))[again]
    assert (await node.seen())[container].allowed == CpuSet.parse("9")


async def test_while_held(node):
    offers = await node.offers()
    held, [claim] = await node.place((offers["cpudevnuma003"], CpuSet.parse("12-13")))
    other, _ = await node.place((offers["cpudevnuma001"], CpuSet.parse("4-5")))
    sharing = await node.run([])
    ids = await node.running(held, other, sharing)
    before = await node.seen()
    await until_healthy(node, held, "Healthy")
    await node.vm.call("set_online", cpu=13, online=False)
    for message in await until_healthy(node, held, "Unhealthy"):
        assert message == f"CPU 13 is offline, held by claim default/{claim}"
    after = await node.seen()
    seen = after.pop(ids[held][0])
    assert (seen.cpuset, seen.effective, seen.allowed) == tuple(map(CpuSet.parse, ("12-13", "12", "12")))
    assert {container: after[container] for container in (*ids[other], *ids[sharing])} == {
        container: before[container] for container in (*ids[other], *ids[sharing])
    }
    await until_healthy(node, other, "Healthy")
    await until_offered(node, "cpudevnuma003", "12-15")

    await node.vm.call("set_online", cpu=13, online=True)
    await until_healthy(node, held, "Healthy")
    await node.until_seen(*ids[held], cpus=CpuSet.parse("12-13"))


async def test_while_it_is_all_that_is_held(node):
    """The kernel lets a container of which no CPU is online run on all that are; the driver keeps it off others'."""
    offers = await node.offers()
    held, _ = await node.place((offers["cpudevnuma003"], CpuSet.parse("13")))
    other, _ = await node.place((offers["cpudevnuma001"], CpuSet.parse("4-5")))
    sharing = await node.run([])
    ids = await node.running(held, other, sharing)
    await node.until_seen(*ids[held], cpus=CpuSet.parse("13"))
    await node.vm.call("set_online", cpu=13, online=False)
    shared = MANAGED - ISOLATED - CpuSet.parse("4-5,13")
    await node.until_seen(*ids[held], *ids[sharing], cpus=shared)
    await until_healthy(node, held, "Unhealthy")
    later, _ = await node.place((offers["cpudevnuma002"], CpuSet.parse("8-11")))
    await node.running(later)
    await node.until_seen(*ids[held], *ids[sharing], cpus=shared - CpuSet.parse("8-11"))
    await node.until_seen(*ids[other], cpus=CpuSet.parse("4-5"))

    await node.vm.call("set_online", cpu=13, online=True)
    await node.until_seen(*ids[held], cpus=CpuSet.parse("13"))
    await node.until_seen(*ids[sharing], cpus=shared - CpuSet.parse("8-11"))
