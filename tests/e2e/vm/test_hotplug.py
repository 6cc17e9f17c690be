# SPDX-License-Identifier: Apache-2.0
"""CPUs go offline and come back, while they are free and while a claim holds them."""

from __future__ import annotations

from contextlib import suppress

import pytest_asyncio

from e2e import waiting
from e2e.cluster.api import EVENTS, PODS, SLICES
from e2e.vm.checks import MANAGED, settings
from e2e.vm.machine import GuestError
from e2e.vm.node import ISOLATED, PATIENCE_S
from fastcpu import CpuSet

# A cgroup with processes in it takes no empty list.
EVERYTHING = "0-15"


@pytest_asyncio.fixture(loop_scope="session")
async def node(node):
    await node.use_driver(**settings("external", "numanode"))
    yield node
    await node.confine_pods(EVERYTHING)
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


async def until_remarked(node, text):
    """Wait until the driver says that it is ready, and nothing besides but this."""

    async def remarked():
        # While slices are being written it is not ready, which this machine calls an error.
        with suppress(GuestError):
            return await node.readiness() == text
        return False

    await waiting.until(remarked, f"the driver says {text!r}", PATIENCE_S, pause_s=0.5)


async def until_given(node, container, cpus):
    """Wait until a container's own cgroup asks for these CPUs, and gets them."""

    async def given():
        seen = (await node.seen())[container]
        return seen.cpuset == seen.effective == seen.allowed == cpus

    await waiting.until(given, f"{container} is given CPUs {cpus}", PATIENCE_S, pause_s=0.5)


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


async def test_while_pods_have_fewer_than_are_online(node):
    """Somebody holds the cgroup of all pods to some CPUs; in cgroup v2 the kernel cuts what is in it without a word."""
    offers = await node.offers()
    sharing = await node.run([])
    [shared] = (await node.running(sharing))[sharing]
    await until_remarked(node, "ok\n")
    await node.confine_pods("0-13")
    await until_remarked(node, "ok\nkubepods: cgroup /kubepods allows only CPUs 0-13\n")
    await until_offered(node, "cpudevnuma003", "12-13")
    await until_given(node, shared, MANAGED - ISOLATED - CpuSet.parse("14-15"))
    pod, [claim] = await node.place((offers["cpudevnuma003"], CpuSet.parse("14")))
    message = "CPU 14 is not allowed to pods: cgroup /kubepods allows only CPUs 0-13"

    def refused(events):
        return [one for one in events if message in one.get("message", "")]

    assert await node.api.until(EVENTS, refused, "the claim is refused", PATIENCE_S)
    await node.end([pod], [claim])

    await node.vm.call("set_online", cpu=13, online=False)
    await until_remarked(node, "ok\nkubepods: cgroup /kubepods allows only CPUs 0-12\n")
    await until_offered(node, "cpudevnuma003", "12")
    later = await node.run([])
    [beside] = (await node.running(later))[later]
    await until_given(node, beside, MANAGED - ISOLATED - CpuSet.parse("13-15"))

    # What was offline is back by itself in version 2, and what was written is not.
    await node.vm.call("set_online", cpu=13, online=True)
    await until_remarked(node, "ok\nkubepods: cgroup /kubepods allows only CPUs 0-13\n")
    await node.confine_pods(EVERYTHING)
    await until_remarked(node, "ok\n")
    await until_offered(node, "cpudevnuma003", "12-15")
    for container in (shared, beside):
        await until_given(node, container, MANAGED - ISOLATED)
    again, _ = await node.place((offers["cpudevnuma003"], CpuSet.parse("14")))
    [exclusive] = (await node.running(again))[again]
    await until_given(node, exclusive, CpuSet.parse("14"))
