# SPDX-License-Identifier: Apache-2.0
"""Driver and runtime end and come back under running pods."""

from __future__ import annotations

import asyncio

import pytest

from driver.sandbox.kinds import RESOURCE_CLAIMS
from e2e.node import EVERYTHING


@pytest.fixture
async def node(node):
    await node.start_driver()
    return node


async def test_driver_killed_and_started_again(node):
    shared = await node.cri.run(await node.pod(), "main")
    pod = await node.pod("owner")
    claim = node.add_claim("1", pod)
    devices = await node.prepare(claim)
    exclusive = await node.cri.run(pod, "main", cdi=devices)
    created = await node.cri.create(pod, "created", cdi=devices)
    await node.driver.kill9()
    assert [await node.cpus(exclusive), await node.cpus(shared)] == ["1", "0"]
    # What was created with its CPUs starts with them, and the start guard agrees.
    await node.cri.start(created)
    assert await node.cpus(created) == "1"
    stray = await node.run_unnoticed(await node.pod("stray"), "main")
    assert await node.cpus(stray) == str(EVERYTHING)
    moved = await node.cri.create(await node.pod(), "main")

    await node.start_driver()
    await node.wait_cpus(stray, cpus="0")
    assert (await node.metrics())['nri_corrected_containers_total{cpu_allocation_mode="shared"}'] >= 1
    assert [await node.cpus(container) for container in (exclusive, created, shared)] == ["1", "1", "0"]
    # Created while nobody was there, started now: it must not start where it was created.
    await node.cri.start(moved)
    await node.wait_cpus(moved, cpus="0")

    # Everything is known again: whose the claim is, that it is in use, and how it goes on.
    node.reserve(claim, pod, other := await node.pod())
    assert "is used by pod default/owner" in await node.why_not_created(other, "main", cdi=devices)
    await node.cri.stop(exclusive)
    again = await node.cri.run(pod, "main", cdi=devices, attempt=1)
    assert await node.cpus(again) == "1"
    await node.cri.end(pod)
    assert await node.unprepare(claim) == ""
    await node.wait_cpus(stray, shared, moved, cpus="0-1")


async def test_driver_killed_while_the_pool_should_grow(node):
    shared = await node.cri.run(await node.pod(), "main")
    claim = node.add_claim("1")
    await node.prepare(claim)
    assert await node.cpus(shared) == "0"
    assert await node.unprepare(claim) == ""
    await node.restart_driver()
    await node.wait_cpus(shared, cpus="0-1")


@pytest.mark.parametrize("how", ["stop", "kill9"])
async def test_containerd_restarted(node, how):
    shared_pod, pod = await node.pod(), await node.pod("owner")
    shared = await node.cri.run(shared_pod, "main")
    claim = node.add_claim("1", pod)
    devices = await node.prepare(claim)
    exclusive = await node.cri.run(pod, "main", cdi=devices)
    pids = [await node.cri.pid(container) for container in (exclusive, shared)]

    await getattr(node.containerd, how)()
    await node.until(node.is_not_ready, "the driver misses the runtime")
    _, text = await node.readiness()
    assert "runtime" in text
    assert (await node.metrics())["nri_connected"] == 0
    # As a kubelet does that starts again too. The driver waits for the runtime.
    preparing = asyncio.create_task(node.prepare(claim))
    await node.containerd.start()
    await node.cri.wait_ready()
    await node.wait_ready()
    assert (await node.metrics())["nri_reconnects_total"] == 1
    assert await preparing == devices

    assert [await node.cri.pid(container) for container in (exclusive, shared)] == pids
    assert [await node.cpus(exclusive), await node.cpus(shared)] == ["1", "0"]
    await node.cri.stop(exclusive)
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices, attempt=1)) == "1"
    assert await node.cpus(await node.cri.run(shared_pod, "later")) == "0"
    await node.cri.end(pod)
    assert await node.unprepare(claim) == ""
    await node.wait_cpus(shared, cpus="0-1")


async def test_both_gone_while_a_container_ends(node):
    shared = await node.cri.run(await node.pod(), "main")
    pod = await node.pod()
    claim = node.add_claim("1", pod)
    await node.cri.run(pod, "main", cdi=await node.prepare(claim))
    await node.driver.kill9()
    await node.cri.end(pod)
    await node.containerd.kill9()
    await node.containerd.start()
    await node.cri.wait_ready()
    await node.start_driver()
    # Nobody has unprepared it.
    assert await node.cpus(shared) == "0"
    assert await node.unprepare(claim) == ""
    await node.wait_cpus(shared, cpus="0-1")


async def test_claims_that_are_gone_when_the_driver_comes_back(node):
    pod = await node.pod()
    used, unused = node.add_claim("1", pod), node.add_claim("0", pod)
    devices = await node.prepare(used)
    await node.prepare(unused)
    container = await node.cri.run(pod, "main", cdi=devices)
    await node.driver.kill9()
    for claim in (used, unused):
        node.box.api.delete(RESOURCE_CLAIMS, claim.name)
    await node.start_driver()
    await node.until(lambda: holds(node, 1), "the claim that nobody uses is released")
    assert await node.cpus(container) == "1"
    assert await node.cpus(await node.cri.run(await node.pod(), "main")) == "0"
    await node.cri.stop(container)
    assert await node.unprepare(used) == ""
    assert await holds(node, 0)


async def holds(node, cpus):
    return (await node.metrics())["allocated_cpus"] == cpus
