# SPDX-License-Identifier: Apache-2.0
"""Claims for which the driver chooses: kube-scheduler by capacity, selectors and constraints, then the kernel."""

from __future__ import annotations

import pytest
import pytest_asyncio

from e2e.cluster.manifests import as_text, claim, pod, request
from fastcpu import CpuSet

NUMA_NODE = 'device.attributes["resource.kubernetes.io"].numaNode'
SOCKET = 'device.attributes["dra.cpu"].socketID'
UNSCHEDULABLE = "cannot allocate all claims"


# Both outlive each test, whose pods cannot end without the driver.
pytestmark = pytest.mark.usefixtures("device_class", "driver")


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def driver(undeployed):
    """A process: a pod of the driver's would keep one of the two CPUs."""
    driver = await undeployed.start_driver({"groupBy": "numanode"})
    await undeployed.wait_driver_ready()
    yield driver
    await driver.terminate()


def same(attribute, *requests):
    return {"requests": list(requests), "matchAttribute": attribute}


def different(attribute, *requests):
    return {"requests": list(requests), "distinctAttribute": attribute}


async def consumed(cluster, name):
    """Return what each result of an allocated claim consumes."""
    results = (await cluster.claim(name))["status"]["allocation"]["devices"]["results"]
    return [result["consumedCapacity"]["dra.cpu/cpu"] for result in results]


async def told(cluster, name):
    """Return the CPUs that a claim's status tells, once it does."""

    async def is_told():
        return "devices" in (await cluster.claim(name))["status"]

    await cluster.until(is_told, f"the status of claim {name} tells its CPUs")
    return [device["data"]["cpuset"] for device in (await cluster.claim(name))["status"]["devices"]]


async def test_capacity(cluster):
    await cluster.apply(as_text(claim("one"), pod("one", "one"), claim("three", request(3)), pod("three", "three")))
    await cluster.wait_running("one")
    cpus = await cluster.cpus("one")
    assert await told(cluster, "one") == [cpus]
    assert len(CpuSet.parse(cpus)) == 1
    await cluster.wait_event("three", UNSCHEDULABLE)
    # The other CPU, and then there is none.
    await cluster.apply(as_text(claim("two"), pod("two", "two")))
    await cluster.wait_running("two")
    assert {cpus, await cluster.cpus("two")} == {"0", "1"}
    await cluster.apply(as_text(claim("four"), pod("four", "four")))
    await cluster.wait_event("four", UNSCHEDULABLE)
    await cluster.delete_pods("one")
    await cluster.wait_running("four")
    assert await cluster.cpus("four") == cpus
    assert await consumed(cluster, "four") == ["1"]


async def test_all_of_a_device(cluster):
    await cluster.apply(as_text(claim("all", request(None)), pod("user", "all")))
    await cluster.wait_running("user")
    assert await consumed(cluster, "all") == ["2"]
    assert await cluster.cpus("user") == "0-1"


async def test_selector(cluster):
    fits = claim("fits", request(1, selector=f"{NUMA_NODE} == 0 && {SOCKET} == 0"))
    does_not = claim("does-not", request(1, selector=f"{NUMA_NODE} == 1"))
    await cluster.apply(as_text(fits, pod("fits", "fits"), does_not, pod("does-not", "does-not")))
    await cluster.wait_running("fits")
    assert await cluster.cpus("fits") in ("0", "1")
    await cluster.wait_event("does-not", UNSCHEDULABLE)


@pytest.mark.parametrize("attribute", ["resource.kubernetes.io/numaNode", "dra.cpu/socketID"])
async def test_constraint(cluster, attribute):
    requests = request(1, "first"), request(1, "second")
    together = claim("together", *requests, constraints=[same(attribute, "first", "second")])
    apart = claim("apart", *requests, constraints=[different(attribute, "first", "second")])
    await cluster.apply(as_text(apart, pod("apart", "apart")))
    # All CPUs are of one node and one socket.
    await cluster.wait_event("apart", UNSCHEDULABLE)
    await cluster.apply(as_text(together, pod("together", "together")))
    await cluster.wait_running("together")
    assert await consumed(cluster, "together") == ["1", "1"]
    assert await cluster.cpus("together") == "0-1"
    assert sorted(await told(cluster, "together")) == ["0", "1"]


@pytest.mark.parametrize(("asked", "gets"), [("0", "1"), ("1.5", "2"), ("500m", "1")])
async def test_no_fraction_reaches_the_node(cluster, asked, gets):
    await cluster.apply(as_text(claim("fraction", request(asked)), pod("user", "fraction")))
    await cluster.wait_running("user")
    assert await consumed(cluster, "fraction") == [gets]
    assert len(CpuSet.parse(await cluster.cpus("user"))) == int(gets)
