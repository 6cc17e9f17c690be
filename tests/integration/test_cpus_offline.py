# SPDX-License-Identifier: Apache-2.0
"""CPUs that go offline and come back while the driver runs."""

from __future__ import annotations

import pytest

from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.offers import Offer, allocated_claim, read_offers
from fastcpu import CpuSet

DRIVER = "dra.cpu"
ONLINE = "devices/system/cpu/online"


@pytest.fixture
def set_online(cluster_box):
    def write(cpus: str) -> None:
        # As the kernel's files it is never seen half written.
        path = cluster_box.sysfs_root / ONLINE
        new = path.with_name("new")
        new.write_text(f"{cpus}\n")
        new.replace(path)

    return write


async def wait_offered(cluster_box, cpus: str) -> None:
    """Wait until the first device is published with these CPUs."""

    def offered():
        offers = read_offers(cluster_box.complete_slices())
        return bool(offers) and str(offers[0].cpus) == cpus

    await cluster_box.api.wait_until(offered, 30)


async def test_free_cpu(cluster_box, driver_process, set_online):
    await driver_process({"reservedCPUs": "0,32"})
    await wait_offered(cluster_box, "1-7,33-39")
    device = "cpudevnuma000"

    async def prepare(name: str, cpus: str) -> str:
        offer = Offer(pool=cluster_box.node_name, device=device, cpus=CpuSet())
        body = allocated_claim(name, offer, cpus, len(CpuSet.parse(cpus)))
        metadata = cluster_box.api.put(RESOURCE_CLAIMS, body)["metadata"]
        claim = ClaimName(namespace="default", name=name, uid=metadata["uid"])
        return (await cluster_box.kubelet.prepare(DRIVER, [claim]))[claim.uid].error

    assert await prepare("held", "6-7") == ""
    set_online("0-4,6-63")
    await wait_offered(cluster_box, "1-4,6-7,33-39")
    error = await prepare("gone", "4-5")
    assert "CPU 5 is not online on this node, which has 0-4,6-63" in error
    # What a claim holds stays in the offer: its count is taken off by whoever allocates.
    set_online("0-6,8-63")
    await wait_offered(cluster_box, "1-7,33-39")
    set_online("0-4,6,8-63")
    await wait_offered(cluster_box, "1-4,6-7,33-39")
    set_online("0-63")
    await wait_offered(cluster_box, "1-7,33-39")
    assert await prepare("back", "4-5") == ""


async def test_cpus_for_the_driver_to_choose(cluster_box, driver_process, set_online):
    await driver_process({"reservedCPUs": "0,32", "allocator": "cpumanager", "groupBy": "socket"})
    claims = []

    async def prepare(name: str, count: int) -> str:
        offer = Offer(pool=cluster_box.node_name, device="cpudevsocket000", cpus=CpuSet())
        body = allocated_claim(name, offer, "", count)
        del body["status"]["allocation"]["devices"]["config"]
        metadata = cluster_box.api.put(RESOURCE_CLAIMS, body)["metadata"]
        claims.append(ClaimName(namespace="default", name=name, uid=metadata["uid"]))
        return (await cluster_box.kubelet.prepare(DRIVER, claims[-1:]))[claims[-1].uid].error

    # All that is left of the socket is what is offline.
    set_online("0-1,16-63")
    await cluster_box.api.wait_until(lambda: published_cpus(cluster_box) == [16, 32], 30)
    assert "17 CPUs wanted, but it has only 16, 1,33-47" in await prepare("too-many", 17)
    assert await prepare("all", 16) == ""
    set_online("0-63")
    await cluster_box.api.wait_until(lambda: published_cpus(cluster_box) == [30, 32], 30)
    assert await prepare("back", 14) == ""


def published_cpus(cluster_box) -> list[int]:
    devices = [device for piece in cluster_box.complete_slices() for device in piece["spec"]["devices"]]
    return [device["attributes"]["dra.cpu/numCPUs"]["int"] for device in devices]


async def test_a_device_without_a_cpu_left_is_not_published(cluster_box, driver_process, set_online):
    await driver_process({"cpuDeviceMode": "individual", "reservedCPUs": "4-63"})
    names = [["cpudev000", "cpudev001", "cpudev002", "cpudev003"], ["cpudev000", "cpudev001", "cpudev003"]]

    def devices():
        return [device["name"] for piece in cluster_box.complete_slices() for device in piece["spec"]["devices"]]

    await cluster_box.api.wait_until(lambda: devices() == names[0], 30)
    set_online("0-1,3-63")
    await cluster_box.api.wait_until(lambda: devices() == names[1], 30)
    set_online("0-63")
    await cluster_box.api.wait_until(lambda: devices() == names[0], 30)
