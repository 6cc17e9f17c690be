# SPDX-License-Identifier: Apache-2.0
"""The kubelet's cgroup of all pods loses a CPU that stays online, with the driver as users deploy it."""

from __future__ import annotations

import aiohttp
import pytest
import pytest_asyncio

from e2e import kernel, narrowing
from e2e.cluster.manifests import as_text, claim, cpuset_config, pod


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def deployed(shared_cluster, driver_image):
    await shared_cluster.install_chart({"driverConfig": {"groupBy": "machine", "allocator": "external"}})
    await shared_cluster.until(shared_cluster.slices, "slices are published")


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(cluster, deployed):
    yield cluster
    narrowing.widen(pods_cgroup(cluster))


def pods_cgroup(cluster):
    return kernel.cgroups(cluster.node.containerd.cgroup_parent) / "kubepods"


async def wait_readiness(cluster, text):
    """Wait until the driver's pod is ready, and says so much of it."""

    async def told():
        async with aiohttp.ClientSession() as session, session.get(f"{cluster.deployed_url}/readyz") as answer:
            return (answer.status, await answer.text()) == (200, text)

    await cluster.until(told, f"the driver says {text!r}")


async def wait_offered(cluster, cpus):
    async def offered():
        [piece] = await cluster.slices()
        [device] = piece["spec"]["devices"]
        return device["attributes"]["dra.cpu/cpuIDs"] == {"string": cpus}

    await cluster.until(offered, f"CPUs {cpus} are published")


async def test_all_pods(cluster):
    await cluster.apply(as_text(pod("before")))
    await cluster.wait_running("before")
    await cluster.wait_cpus("before", "0-1")
    await wait_readiness(cluster, "ok\n")

    narrowing.confine(pods_cgroup(cluster), "0")
    allows = f"cgroup {cluster.node.containerd.cgroup_parent}/kubepods allows only CPUs 0"
    await wait_readiness(cluster, f"ok\nkubepods: {allows}\n")
    await wait_offered(cluster, "0")
    await cluster.apply(as_text(pod("meanwhile")))
    await cluster.wait_running("meanwhile")
    await cluster.wait_cpus("meanwhile", "0")
    await cluster.apply(as_text(claim("outside", config=[cpuset_config("1")]), pod("user", "outside")))
    await cluster.wait_event("user", f"CPU 1 is not allowed to pods: {allows}")
    assert (await cluster.driver_log()).count("not as it should be") == 1

    narrowing.widen(pods_cgroup(cluster))
    await wait_readiness(cluster, "ok\n")
    await wait_offered(cluster, "0-1")
    # The kubelet asks again, and then nobody else is on the claim's CPU.
    await cluster.wait_running("user")
    assert await cluster.cpus("user") == "1"
    await cluster.wait_cpus("before", "0")
    await cluster.wait_cpus("meanwhile", "0")
    await cluster.delete_pods("user")
    await cluster.wait_cpus("before", "0-1")
    await cluster.wait_cpus("meanwhile", "0-1")


async def test_the_driver_can_change_no_cgroup(cluster):
    """Root may write what it owns, were it not mounted read-only: with cgroup v1 each controller by itself."""
    path = "/run/dracpu/cgroup" + ("/cpuset/cpuset.cpus" if kernel.is_v1() else "/cgroup.procs")
    code = f"open({path!r}, 'a')"
    command = ("exec", "--namespace=kube-system", "daemonset/dracpu", "--", "python3", "-c", f"open({path!r}); {code}")
    with pytest.raises(RuntimeError, match="Read-only file system"):
        await cluster.kubectl(*command)
