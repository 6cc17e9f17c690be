# SPDX-License-Identifier: Apache-2.0
"""Pods whose environments were written to take the driver away from the node, and a runtime held to few CPUs."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from e2e import kernel
from e2e.cluster.manifests import as_text, claim, cpuset_config, pod, request
from e2e.endpoints import metrics
from fastcpu import CpuSet

# Both outlive each test, whose pods cannot end without the driver.
pytestmark = pytest.mark.usefixtures("device_class", "driver")

# The kernel starts no program with a longer string in its environment, and etcd takes no larger pod.
LONGEST_STRING = (128 << 10) - 1
MOST = 9


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def driver(undeployed):
    driver = await undeployed.start_driver({"groupBy": "machine", "allocator": "external"})
    await undeployed.wait_driver_ready()
    yield driver
    await driver.terminate()


def strides(length):
    """Return a list of CPUs whose every few bytes stand for hundreds of thousands of them."""
    return ("0-1048575:1/3," * (length // 14 + 1))[: length - 1] + "1"


def hostile_pod(name, *names, length=120_000):
    """Return a pod with variables of a claim in its environment, each as long as it says."""
    body = pod(name)
    [container] = body["spec"]["containers"]
    container["env"] = [{"name": each, "value": strides(length - len(each) - 1)} for each in names]
    body["spec"] |= {"automountServiceAccountToken": False, "enableServiceLinks": False}
    return body


def hostile_pods(uid):
    """Return three pods with 120 kB each, one of them of a claim's variable, and one with as much as there can be."""
    return [
        hostile_pod("unknown", "DRA_CPUSET_a"),
        hostile_pod("another", "DRA_CPUSET_b"),
        hostile_pod("forger", f"DRA_CPUSET_{uid}"),
        hostile_pod("most", *(f"DRA_CPUSET_{number}" for number in range(MOST)), length=LONGEST_STRING),
    ]


async def create(cluster, *pods):
    # Unlike "apply" this does not write the whole of it into an annotation as well.
    for body in pods:
        await cluster.kubectl("create", "--filename=-", input=as_text(body))


async def run_owner(cluster):
    """Run a pod with CPU 1 and one without a claim, and return the claim's UID."""
    await cluster.apply(as_text(claim("own", config=[cpuset_config("1")]), pod("owner", "own"), pod("plain")))
    await cluster.wait_running("owner", "plain")
    await cluster.wait_cpus("plain", "0")
    assert await cluster.cpus("owner") == "1"
    return (await cluster.claim("own"))["metadata"]["uid"]


async def test_environments_are_refused_and_cost_nobody_anything(cluster):
    uid = await run_owner(cluster)
    pods = hostile_pods(uid)
    await create(cluster, *pods)
    for body in pods:
        await cluster.wait_event(body["metadata"]["name"], "DRA_CPUSET_")
    # Containers come and go as ever beside them.
    await cluster.delete_pods("owner")
    await cluster.apply(as_text(pod("owner", "own"), pod("later")))
    await cluster.wait_running("owner", "later")
    assert [await cluster.cpus(name) for name in ("owner", "plain", "later")] == ["1", "0", "0"]
    figures = await metrics(cluster.driver_url)
    assert figures["nri_reconnects_total"] == 0
    assert figures["nri_connected"] == figures["ready"] == 1
    statuses = [await cluster.pod(body["metadata"]["name"]) for body in pods]
    assert not [each for each in statuses if any("running" in s["state"] for s in each["status"]["containerStatuses"])]


async def test_environments_of_pods_from_before_keep_no_driver_away(cluster, driver):
    uid = await run_owner(cluster)
    names = ("unknown", "another", "forger", "most")
    driver.send_signal(signal.SIGSTOP)
    try:
        await create(cluster, *hostile_pods(uid))
        # The runtime goes on without a plugin that does not answer.
        await cluster.wait_running(*names)
        assert [await cluster.cpus(name) for name in names] == ["0-1"] * 4
    finally:
        driver.send_signal(signal.SIGCONT)
    for name in names:
        await cluster.wait_cpus(name, "0")
    await cluster.wait_driver_ready()
    before = (await metrics(cluster.driver_url))["nri_reconnects_total"]
    # A driver that is started beside them is ready as well.
    await driver.kill9()
    await driver.start()
    await cluster.wait_driver_ready()
    await cluster.delete_pods("owner")
    await cluster.apply(as_text(pod("owner", "own")))
    await cluster.wait_running("owner")
    assert [await cluster.cpus(name) for name in ("owner", "plain", *names)] == ["1", *["0"] * 5]
    assert before == 1
    assert (await metrics(cluster.driver_url))["nri_reconnects_total"] == 0


def hold(pid, cpus):
    """Hold all threads of a process to some CPUs; those to come inherit that, and so do its children."""
    for _ in range(2):  # one may have been made by one that was not held yet
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cpus)


async def test_a_runtime_under_a_narrower_affinity_is_told(cluster, driver):
    containerd = cluster.node.containerd.pid
    every = os.sched_getaffinity(containerd)
    hold(containerd, {0})
    try:
        await cluster.apply(as_text(claim("all", request(2), config=[cpuset_config("0-1")]), pod("cut", "all")))
        await cluster.wait_running("cut")
    finally:
        hold(containerd, every)
    pid = (await cluster.pids("cut"))["main"]
    assert kernel.cpuset(pid) == CpuSet([0, 1])
    if kernel.allowed(pid) == CpuSet([0, 1]):
        pytest.skip("this machine's runc, or its kernel, lets no container inherit the runtime's affinity")
    assert kernel.allowed(pid) == CpuSet([0])

    async def told():
        return (await metrics(cluster.driver_url))["containers_on_fewer_cpus"] == 1

    await cluster.until(told, "the driver tells of a container on fewer CPUs than it holds")
    [line] = [line for line in driver.log.splitlines() if "started on fewer CPUs than its claims hold" in line]
    assert 'container="container main of pod default/cut"' in line
    assert "cpus=0 claimed=0-1" in line
