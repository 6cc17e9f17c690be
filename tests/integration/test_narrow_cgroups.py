# SPDX-License-Identifier: Apache-2.0
"""Cgroups that allow fewer CPUs than are online, and what the driver process makes of them."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.sandbox.clusterbox import ClusterBox
from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.machine import MachineShape
from driver.sandbox.offers import Offer, allocated_claim, read_offers
from driver.sandbox.runtime import RefusedError
from fastcpu import CpuSet

DRIVER = "dra.cpu"
DEVICE = "cpudevnuma000"


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


class Node:
    """A box of 8 CPUs, of which CPU 0 is reserved."""

    def __init__(self, box: ClusterBox) -> None:
        self.box = box

    async def start_driver(self, *flags: str, **settings: str) -> None:
        port = self.box.reserve_port()
        self.url = f"http://127.0.0.1:{port}"
        own = [f"--bind-address=127.0.0.1:{port}", "--start-guard=false", *flags]
        self.driver = await self.box.start_driver({"reservedCPUs": "0", **settings}, own)
        await self.box.wait_ready(self.driver)

    async def run(self, pod: str) -> str:
        """Run a container without a claim in a pod of its own."""
        sandbox = nri.PodSandbox(id=f"sandbox-{pod}", name=pod, uid=pod, namespace="default")
        await self.box.runtime.run_pod(sandbox)
        return await self.box.runtime.run_container(sandbox.id, "main")

    async def wait_cpus(self, container: str, text: str) -> None:
        await self.box.runtime.wait_until(lambda: self.box.runtime.effective(container) == cpus(text), 60)

    async def prepare(self, name: str, cpuset: str, count: int = 0) -> str:
        offer = Offer(pool=self.box.node_name, device=DEVICE, cpus=CpuSet())
        body = allocated_claim(name, offer, cpuset, count or len(cpus(cpuset)))
        if not cpuset:
            del body["status"]["allocation"]["devices"]["config"]
        metadata = self.box.api.put(RESOURCE_CLAIMS, body)["metadata"]
        self.claim = ClaimName(namespace="default", name=name, uid=metadata["uid"])
        return (await self.box.kubelet.prepare(DRIVER, [self.claim]))[self.claim.uid].error

    async def unprepare(self) -> str:
        return (await self.box.kubelet.unprepare(DRIVER, [self.claim]))[self.claim.uid]

    async def wait_offered(self, text: str) -> None:
        def offered() -> bool:
            offers = read_offers(self.box.complete_slices())
            return bool(offers) and offers[0].cpus == cpus(text)

        await self.box.api.wait_until(offered, 60)

    async def readiness(self) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/readyz") as answer:
            return answer.status, await answer.text()

    async def wait_readiness(self, text: str) -> None:
        """Wait until the driver is ready and says so much of it, after the next look at the latest."""
        async with asyncio.timeout(60):
            while await self.readiness() != (200, text):  # noqa: ASYNC110, it tells nobody
                await asyncio.sleep(0.05)


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
async def node(request):
    shape = MachineShape(cpus=8, sockets=1, numa_nodes=1, threads_per_core=1)
    async with ClusterBox(shape=shape, cgroup_version=request.param) as box:
        box.cgroups.make("/kubepods/burstable")
        yield Node(box)


@pytest.mark.parametrize("allocator", ["external", "cpumanager"])
async def test_narrow_at_the_start(node, allocator):
    node.box.cgroups.confine("/kubepods", cpus("0-5"))
    await node.start_driver(allocator=allocator)
    assert await node.readiness() == (200, "ok\nkubepods: cgroup /kubepods allows only CPUs 0-5\n")
    assert node.driver.log.count("kubepods allows only CPUs 0-5") == 1
    if allocator == "external":
        await node.wait_offered("1-5")
        error = await node.prepare("outside", "5-6")
        assert "CPU 6 is not allowed to pods: cgroup /kubepods allows only CPUs 0-5; " in error
        assert await node.prepare("inside", "4-5") == ""
    else:
        error = await node.prepare("too-many", "", 6)
        assert "it has only 5, 1-5; CPUs 6-7 are not allowed to pods: cgroup /kubepods allows only CPUs 0-5" in error
        assert await node.prepare("inside", "", 2) == ""
    container = await node.run("web")
    assert node.box.runtime.effective(container) <= cpus("1-5")
    assert len(node.box.runtime.effective(container)) == 3


async def test_narrowed_and_widened_while_the_driver_runs(node):
    await node.start_driver()
    container = await node.run("web")
    await node.wait_cpus(container, "1-7")
    # As version 1 has it when a CPU goes offline; and in version 2 somebody writes it.
    node.box.cgroups.confine("/kubepods", cpus("0-5"))
    await node.wait_readiness("ok\nkubepods: cgroup /kubepods allows only CPUs 0-5\n")
    await node.wait_offered("1-5")
    another = await node.run("another")
    await node.wait_cpus(another, "1-5")
    assert "CPU 6 is not allowed to pods" in await node.prepare("outside", "6")

    node.box.cgroups.write("/kubepods", cpus("0-7"))
    node.box.cgroups.write("/kubepods/burstable", cpus("0-7"))
    for pod in ("web", "another"):
        node.box.cgroups.write(f"/kubepods/burstable/pod{pod}", cpus("0-7"))
    await node.wait_readiness("ok\n")
    await node.wait_offered("1-7")
    await node.wait_cpus(container, "1-7")
    await node.wait_cpus(another, "1-7")
    assert await node.prepare("inside", "6") == ""
    await node.wait_cpus(container, "1-5,7")


async def test_a_class_of_pods(node):
    await node.start_driver()
    node.box.cgroups.confine("/kubepods/burstable", cpus("0-3"))
    container = await node.run("web")
    await node.wait_cpus(container, "1-3")
    await node.wait_readiness("ok\ncgroups: cgroup /kubepods/burstable allows only CPUs 0-3\n")
    assert await node.prepare("outside", "3-4") == ""
    await node.wait_cpus(container, "1-2")


async def test_a_class_of_pods_all_of_whose_cpus_are_with_claims(node):
    await node.start_driver()
    node.box.cgroups.confine("/kubepods/burstable", cpus("2-3"))
    assert await node.prepare("a", "2-3") == ""
    with pytest.raises(RefusedError, match=r"cgroup of its pod allows only CPUs 2-3; CPUs 2-3 are held by claim "):
        await node.run("web")
    assert await node.unprepare() == ""
    # As a kubelet that tries again.
    container = await node.box.runtime.run_container("sandbox-web", "main")
    await node.wait_cpus(container, "2-3")
    # Version 1 refuses to move it, and 2 leaves it where it is.
    why = "UpdateContainers: NRI update of some containers failed", "whose cgroup allows only CPUs 2-3"
    error = await node.prepare("b", "2-3")
    assert any(f"container main of pod default/web ({each}) could not be moved away yet" in error for each in why)
    await node.wait_cpus(container, "2-3")


async def test_a_pod_that_sees_its_own_cgroups_only(node):
    await node.start_driver("--cgroup-root=/proc")
    node.box.cgroups.confine("/kubepods", cpus("0-5"))
    assert await node.prepare("outside", "6") == ""
    assert await node.readiness() == (200, "ok\n")


async def test_a_container_of_a_claim_that_has_lost_a_cpu_gets_it_back(node):
    """In version 1 the kernel gives it back to nothing; in version 2 to all."""
    await node.start_driver()
    assert await node.prepare("a", "4-5") == ""
    pod = nri.PodSandbox(id="sandbox-p", name="p", uid="p", namespace="default")
    body = node.box.api.get(RESOURCE_CLAIMS, "a")
    body["status"]["reservedFor"] = [{"resource": "pods", "name": "p", "uid": "p"}]
    node.box.api.put(RESOURCE_CLAIMS, body)
    await node.box.runtime.run_pod(pod)
    devices = [f"dra.k8s.io/cpu=claim-{node.claim.uid}"]
    container = await node.box.runtime.run_container(pod.id, "main", cdi_devices=devices)
    assert node.box.runtime.effective(container) == cpus("4-5")
    node.box.cgroups.confine("/kubepods", cpus("0-4"))
    await node.wait_readiness("ok\nkubepods: cgroup /kubepods allows only CPUs 0-4\n")
    assert node.box.runtime.effective(container) == cpus("4")
    for cgroup in ("/kubepods", "/kubepods/burstable", "/kubepods/burstable/podp"):
        node.box.cgroups.write(cgroup, cpus("0-7"))
    await node.wait_cpus(container, "4-5")
    await node.wait_readiness("ok\n")
