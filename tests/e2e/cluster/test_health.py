# SPDX-License-Identifier: Apache-2.0
"""A pod's status tells whether its CPUs can be relied on."""

from __future__ import annotations

import signal

import pytest
import pytest_asyncio

from e2e.cluster.manifests import as_text, claim, cpuset_config, pod
from e2e.endpoints import is_ready

# Both outlive each test, whose pods cannot end without the driver.
pytestmark = pytest.mark.usefixtures("device_class", "driver")


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def driver(undeployed):
    driver = await undeployed.start_driver({"groupBy": "machine", "allocator": "external"})
    await undeployed.wait_driver_ready()
    yield driver
    await driver.terminate()


async def health(cluster):
    """Return how the pod's container says that the claim's devices are, and why."""
    [status] = (await cluster.pod("user"))["status"]["containerStatuses"]
    named = {each["name"]: each["resources"] for each in status.get("allocatedResourcesStatus", ())}
    return [(each["health"], each.get("message", "")) for each in named.get("claim:own", ())]


async def test_connection_to_the_runtime_is_cut(cluster, driver):
    await cluster.apply(as_text(claim("own", config=[cpuset_config("1")]), pod("user", "own")))
    await cluster.wait_running("user")

    async def is_healthy():
        return await health(cluster) == [("Healthy", "")]

    await cluster.until(is_healthy, "the pod's CPUs are healthy")
    socket = cluster.node.nri_socket
    hidden = socket.rename(socket.with_name("hidden"))
    try:
        # The runtime hangs up on a plugin that does not answer, and runs on.
        driver.send_signal(signal.SIGSTOP)
        await cluster.apply(as_text(pod("plain")))
        await cluster.wait_running("plain")
        driver.send_signal(signal.SIGCONT)

        async def is_unhealthy():
            states = await health(cluster)
            return bool(states) and states[0][0] == "Unhealthy"

        await cluster.until(is_unhealthy, "the pod's CPUs are not healthy")
        assert "the container runtime is not connected" in (await health(cluster))[0][1]
        assert not await is_ready(cluster.driver_url)
        assert await cluster.cpus("user") == "1"
        assert await cluster.cpus("plain") == "0-1"
    finally:
        hidden.rename(socket)
    await cluster.until(is_healthy, "the pod's CPUs are healthy again")
    # Whom nobody held to the rest is held to it now.
    await cluster.wait_cpus("plain", "0")
