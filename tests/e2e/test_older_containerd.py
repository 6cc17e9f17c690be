# SPDX-License-Identifier: Apache-2.0
"""Older lines of containerd: until 2.1 NRI has no validators, until 2.2 it does not tell CDI devices.

There the start guard's hook is the mark, and a creation in which the driver does not answer goes on without it.
"""

from __future__ import annotations

import signal

import pytest

from e2e.node import EVERYTHING, Node
from e2e.test_startguard import guard_says, refused


@pytest.fixture
async def node(older, older_containerd):
    async with Node.open(older_containerd) as node:
        await node.start_driver()
        assert f"version={older}." in node.driver.log
        assert f"validator={str(validates(older)).lower()}" in node.driver.log
        yield node


def validates(version):
    return version != "2.1"


async def test_pinning(node):
    shared_pod, pod, other = await node.pod(), await node.pod("owner"), await node.pod("other")
    shared = await node.cri.run(shared_pod, "main")
    claim = node.add_claim("1", pod, other)
    devices = await node.prepare(claim)
    assert await node.cpus(shared) == "0"
    init = await node.cri.run(pod, "init", cdi=devices, command=["/bin/true"])
    assert await node.cri.wait_ended(init) == 0
    exclusive = await node.cri.run(pod, "main", cdi=devices)
    assert await node.cpus(exclusive) == "1"

    for victim in (pod, shared_pod, other):
        why = await node.why_not_created(victim, "forger", env={f"DRA_CPUSET_{claim.uid}": "1"})
        assert "but the container was not given claim" in why
    assert "is used by pod default/owner" in await node.why_not_created(other, "main", cdi=devices)
    for container, cpus in ((exclusive, "1"), (shared, "0")):
        await node.cri.update(container, cpus="0-1", shares=512)
        assert await node.cpus(container) == cpus
    await node.cri.stop(exclusive)
    exclusive = await node.cri.run(other, "main", cdi=devices)
    assert await node.cpus(exclusive) == "1"
    await node.cri.end(other)
    assert await node.unprepare(claim) == ""
    await node.wait_cpus(shared, cpus="0-1")


async def test_driver_killed(node, older):
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    running = await node.cri.run(pod, "running", cdi=devices)
    await node.driver.kill9()
    errors = await refused(node, pod, "main", devices)
    assert len(errors) == 1 + validates(older)
    assert guard_says(errors[-1], "1")
    stray = await node.run_unnoticed(await node.pod(), "main")
    assert await node.cpus(stray) == str(EVERYTHING)
    await node.start_driver()
    await node.wait_cpus(stray, cpus="0")
    assert await node.cpus(running) == "1"
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices)) == "1"


async def test_driver_stopped(node, older):
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    node.driver.send_signal(signal.SIGSTOP)
    errors = await refused(node, pod, "main", devices)
    assert len(errors) == 1 + validates(older)
    assert guard_says(errors[-1], "1")
    node.driver.send_signal(signal.SIGCONT)
    await node.until(node.is_connected_again, "the driver has been connected again")
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices)) == "1"


async def test_containerd_killed(node):
    shared, pod = await node.cri.run(await node.pod(), "main"), await node.pod()
    claim = node.add_claim("1", pod)
    devices = await node.prepare(claim)
    exclusive = await node.cri.run(pod, "main", cdi=devices)
    await node.containerd.kill9()
    await node.containerd.start()
    await node.cri.wait_ready()
    await node.until(node.is_connected_again, "the driver has been connected again")
    assert [await node.cpus(exclusive), await node.cpus(shared)] == ["1", "0"]
    await node.cri.end(pod)
    assert await node.unprepare(claim) == ""
    await node.wait_cpus(shared, cpus="0-1")
