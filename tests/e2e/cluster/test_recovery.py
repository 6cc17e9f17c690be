# SPDX-License-Identifier: Apache-2.0
"""All that can be away and come again does so under running pods, with the driver deployed as its users do it.

Each time the kernel is asked whether containers keep or regain exactly their CPUs, the node whether anything is left
behind, and in the end the claim's pod is deleted, which takes a driver that works.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress

import pytest_asyncio

from e2e import scratch
from e2e.cluster.api import PODS
from e2e.cluster.deployment import Deployment
from e2e.cluster.observer import Observer
from e2e.cluster.workloads import create_claim, create_pod

EXTERNAL = {"allocator": "external", "groupBy": "machine"}
GUARD = "the container would run on CPUs 0-1, but its claims allow CPUs 1 only"
# Of a pod that only a driver can end: long enough to end otherwise.
STAYS_S = 5.0


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def release(shared_cluster, driver_image):
    """The chart's release, from the first test to the last."""
    await shared_cluster.install_chart({"driverConfig": EXTERNAL})
    yield Deployment(shared_cluster)
    await shared_cluster.uninstall_chart()


@pytest_asyncio.fixture(loop_scope="session")
async def driver(release, cluster):
    """The deployed driver, and a pod `owner` with CPU 1 for itself beside a pod `web`; nothing is left in the end."""
    await release.wait_ready()
    await create_claim(cluster, "exclusive", "1")
    await create_pod(cluster, "web")
    await create_pod(cluster, "owner", "exclusive")
    await cluster.wait_running("web", "owner")
    await cluster.wait_cpus("web", "0")
    assert await cluster.cpus("owner") == "1"
    [record], [spec] = release.records().values(), release.specs().values()
    assert record["cpus"] == "1"
    assert spec["devices"][0]["containerEdits"]["hooks"]
    yield release
    await cluster.clear()
    await cluster.until(lambda: nothing_left(release), f"nothing is left of {release.claim_files()}")


async def nothing_left(driver):
    return not driver.claim_files() and (await driver.metrics())["allocated_cpus"] == 0


async def delete_owner(cluster):
    """Delete the pod with the CPU; then the other one has all."""
    await cluster.delete_pods("owner")
    await cluster.wait_cpus("web", "0-1")


async def main_pid(cluster, pod):
    return (await cluster.pids(pod))["main"]


async def kill_main(cluster, pod):
    """Let a container end as by a crash, and return its process."""
    pid = await main_pid(cluster, pod)
    os.kill(pid, signal.SIGKILL)
    return pid


async def wait_again(cluster, pod, before):
    """Wait until the kubelet has started a container again."""

    async def again():
        # What the API server still says may be over.
        with suppress(OSError):
            return (await cluster.pids(pod)).get("main", before) != before
        return False

    await cluster.until(again, f"the container of {pod} was started again")


async def wait_published(cluster):
    async def published():
        return [len(each["spec"]["devices"]) for each in await cluster.slices()] == [1]

    await cluster.until(published, "the driver's one device is published")


async def test_kubelet_restarted(cluster, driver):
    async with Observer.watching(cluster) as observer:
        await observer.settle()
        shared, pid = await main_pid(cluster, "web"), driver.pid
        await cluster.node.kubelet.kill9()
        # What ends meanwhile is started again once there is a kubelet.
        before = await kill_main(cluster, "owner")
        await cluster.node.kubelet.start()
        await cluster.node.wait_ready()
        await wait_again(cluster, "owner", before)
        assert await cluster.cpus("owner") == "1"
        assert [await main_pid(cluster, "web"), driver.pid] == [shared, pid]
        # A kubelet that starts deletes all slices of its node.
        await wait_published(cluster)
        await delete_owner(cluster)


async def test_containerd_restarted(cluster, driver):
    async with Observer.watching(cluster) as observer:
        await observer.settle()
        pids = [await main_pid(cluster, pod) for pod in ("web", "owner")]
        await cluster.node.containerd.kill9()
        await driver.wait_not_ready()
        before = await kill_main(cluster, "owner")
        observer.disturb()
        await cluster.node.containerd.start()
        await driver.wait_ready()
        await wait_again(cluster, "owner", before)
        await observer.settle()
        assert await main_pid(cluster, "web") == pids[0]
        assert await cluster.cpus("owner") == "1"
        await create_pod(cluster, "later")
        await cluster.wait_running("later")
        assert await cluster.cpus("later") == "0"
        await delete_owner(cluster)


async def test_api_server_restarted(cluster, driver):
    async with Observer.watching(cluster) as observer:
        await observer.settle()
        before = await main_pid(cluster, "owner")
        await cluster.control_plane.stop_api_server()
        # The kubelet goes on without it, and so must the driver.
        os.kill(before, signal.SIGKILL)
        await cluster.until(lambda: living(observer, "exclusive", before), "the container was started again")
        await cluster.control_plane.start_api_server()
        await wait_again(cluster, "owner", before)
        assert await cluster.cpus("owner") == "1"
        await driver.wait_ready()
        await wait_published(cluster)
        await delete_owner(cluster)


async def living(observer, claim, before):
    """Tell whether a claim has processes, and they are new ones."""
    pids = [each.pid for each in observer.processes() if each.claim == claim]
    return bool(pids) and before not in pids


async def test_driver_killed_again_and_again_while_its_pods_restart(cluster, driver):
    async with Observer.watching(cluster) as observer:
        await observer.settle()
        shared = await main_pid(cluster, "web")
        observer.disturb()
        # The kubelet starts it again at once for the first time, and then lets it wait.
        killing = asyncio.create_task(keep_killing(driver))
        await cluster.until(driver.waits, "the kubelet waits before it starts the driver again")
        before = await kill_main(cluster, "owner")
        await cluster.wait_event("owner", GUARD)
        killing.cancel()
        await driver.wait_ready()
        await observer.settle()
        await wait_again(cluster, "owner", before)
        assert await cluster.cpus("owner") == "1"
        assert await main_pid(cluster, "web") == shared
        await delete_owner(cluster)


async def keep_killing(driver):
    while True:
        driver.kill9()
        await asyncio.sleep(0.1)


async def test_chart_upgraded(cluster, driver, announce):
    async with Observer.watching(cluster) as observer:
        await observer.settle()
        pids = [await main_pid(cluster, pod) for pod in ("web", "owner")]
        replacement = Replacement(driver)
        watching = asyncio.create_task(replacement.watch())
        observer.disturb()
        await cluster.install_chart({"driverConfig": {"groupBy": "numanode"}, "args": {"logLevel": 4}})
        watching.cancel()
        await observer.settle()
        assert (replacement.containers, replacement.most_at_a_time) == (2, 1)
        announce(f"no driver ran for {replacement.away_s:.1f} s while a chart upgrade replaced its pod")
        assert [await main_pid(cluster, pod) for pod in ("web", "owner")] == pids
        assert [await cluster.cpus(pod) for pod in ("web", "owner")] == ["0", "1"]
        # Its device is of another kind now, and another allocator works; it keeps what it was given.
        before = await kill_main(cluster, "owner")
        await wait_again(cluster, "owner", before)
        assert await cluster.cpus("owner") == "1"
        await delete_owner(cluster)
    await cluster.install_chart({"driverConfig": EXTERNAL})


class Replacement:
    """Sees how one container of the driver comes after the other."""

    def __init__(self, driver):
        self._driver = driver
        self._seen = set()
        self.most_at_a_time = 0
        self.away_s = 0.0

    @property
    def containers(self):
        return len(self._seen)

    async def watch(self):
        before = time.monotonic()
        while True:
            now = self._driver.processes()
            self._seen |= now.keys()
            self.most_at_a_time = max(self.most_at_a_time, len(now))
            before, last = time.monotonic(), before
            self.away_s += 0 if now else before - last
            await asyncio.sleep(0.02)


async def test_pods_wait_for_a_driver_that_is_away(cluster, driver):
    async with Observer.watching(cluster) as observer:
        await observer.settle()
        observer.disturb()
        await cluster.uninstall_chart()
        assert await cluster.cpus("owner") == "1"
        await cluster.api.delete(f"{PODS}/owner")
        await cluster.until(lambda: ended(cluster, "owner"), "the container has ended")
        # Nothing could say that something never happens. What it waits for is only done by a driver.
        await asyncio.sleep(STAYS_S)
        assert (await cluster.pod("owner"))["metadata"]["deletionTimestamp"]
        assert len(driver.records()) == len(driver.specs()) == 1
        await cluster.install_chart({"driverConfig": EXTERNAL})
        await observer.settle()
        await delete_owner(cluster)
        await wait_published(cluster)


async def ended(cluster, pod):
    return all("terminated" in each["state"] for each in (await cluster.pod(pod))["status"]["containerStatuses"])


async def test_node_rebooted(cluster, driver):
    async with Observer.watching(cluster) as observer:
        await observer.settle()
        observer.disturb()
        uids = [(await cluster.pod(pod))["metadata"]["uid"] for pod in ("web", "owner")]
        records = driver.records()
        await cluster.node.crash()
        assert [each for each in scratch.leftovers(cluster.node.folder) if not each.startswith("/")] == []
        assert driver.records() == records
        await cluster.node.boot()
        await driver.wait_ready()
        await wait_published(cluster)
        await wait_again(cluster, "owner", 0)
        await wait_again(cluster, "web", 0)
        await observer.settle()
        assert [await cluster.cpus(pod) for pod in ("web", "owner")] == ["0", "1"]
        assert [(await cluster.pod(pod))["metadata"]["uid"] for pod in ("web", "owner")] == uids
        await delete_owner(cluster)
