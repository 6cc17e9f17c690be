# SPDX-License-Identifier: Apache-2.0
"""A container with a claim has its CPUs and nobody else has; what it leaves the others get back."""

from __future__ import annotations

import asyncio
import time

import pytest

SUCCEEDS_ON_1 = ("/bin/sh", "-c", "grep -q '^Cpus_allowed_list:.1$' /proc/self/status")


@pytest.fixture
async def node(node):
    await node.start_driver()
    return node


async def test_exclusive_and_shared(node):
    shared_pod, pod = await node.pod("shared"), await node.pod("exclusive")
    shared = await node.cri.run(shared_pod, "main")
    assert await node.cpus(shared) == "0-1"

    claim = node.add_claim("1", pod)
    devices = await node.prepare(claim)
    # Not waited for: no CPU is promised before everybody else has left it.
    assert await node.cpus(shared) == "0"

    exclusive = await node.cri.run(pod, "main", cdi=devices)
    assert await node.cpus(exclusive) == "1"
    assert f"DRA_CPUSET_{claim.uid}=1" in (await node.cri.exec(exclusive, "/bin/env")).splitlines()
    later = await node.cri.run(shared_pod, "later")
    assert [await node.cpus(container) for container in (shared, exclusive, later)] == ["0", "1", "0"]

    await node.cri.end(pod)
    growing = asyncio.create_task(node.wait_cpus(shared, later, cpus="0-1"))
    assert await node.unprepare(claim) == ""
    let_go = time.monotonic()
    await growing
    assert time.monotonic() - let_go < 1


async def test_pod_with_two_claims(node):
    pod = await node.pod()
    devices = [device for cpus in ("0", "1") for device in await node.prepare(node.add_claim(cpus, pod))]
    # Each claim's start guard allows only that claim's CPU; together they let this container in.
    both = await node.cri.run(pod, "both", cdi=devices)
    assert await node.cpus(both) == "0-1"
    one = await node.cri.run(pod, "one", cdi=devices[:1])
    assert await node.cpus(one) == "0"


async def test_container_restart(node):
    shared = await node.cri.run(await node.pod(), "main")
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    first = await node.cri.run(pod, "main", cdi=devices, command=["/bin/true"])
    assert await node.cri.wait_ended(first) == 0
    second = await node.cri.run(pod, "main", cdi=devices, attempt=1)
    assert await node.cpus(second) == "1"
    # The kubelet removes what has ended long after it has started the next one.
    await node.cri.remove(first)
    await node.cri.stop(second)
    third = await node.cri.run(pod, "main", cdi=devices, attempt=2)
    await node.cri.remove(second)
    assert await node.cpus(third) == "1"
    assert await node.cpus(shared) == "0"


async def test_pod_update(node):
    shared = await node.cri.run(await node.pod(), "main")
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    exclusive = await node.cri.run(pod, "main", cdi=devices)
    created = await node.cri.create(pod, "sidecar", cdi=devices)
    for cpus in ("0-1", "0", "1", ""):
        for container in (exclusive, shared, created):
            await node.cri.update(container, cpus=cpus, shares=512)
        assert await node.cpus(exclusive) == "1"
        assert await node.cpus(shared) == "0"
    await node.cri.start(created)
    assert await node.cpus(created) == "1"
    # What has been asked for and is not ours is done.
    assert (await node.cri.status(exclusive)).resources.linux.cpu_shares == 512


async def test_init_container_then_main_and_sidecar_on_one_claim(node):
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    init = await node.cri.run(pod, "init", cdi=devices, command=SUCCEEDS_ON_1)
    assert await node.cri.wait_ended(init) == 0
    sidecar = await node.cri.run(pod, "sidecar", cdi=devices)
    main = await node.cri.run(pod, "main", cdi=devices)
    # A container of the same pod that does not refer to the claim is like any other.
    plain = await node.cri.run(pod, "plain")
    assert [await node.cpus(container) for container in (sidecar, main, plain)] == ["1", "1", "0"]


async def test_second_pod_with_the_same_claim(node):
    first, second = await node.pod("first"), await node.pod("second")
    claim = node.add_claim("1", first, second)
    devices = await node.prepare(claim)
    container = await node.cri.run(first, "main", cdi=devices)
    why = await node.why_not_created(second, "main", cdi=devices)
    assert f"claim default/{claim.name} ({claim.uid}) is used by pod default/first, whose container main" in why
    assert await node.cpus(container) == "1"

    await node.cri.stop(container)
    follower = await node.cri.run(second, "main", cdi=devices)
    assert await node.cpus(follower) == "1"
    why = await node.why_not_created(first, "main", cdi=devices, attempt=1)
    assert "is used by pod default/second" in why
    # What is left of the former owner goes without taking anything along.
    await node.cri.end(first)
    assert await node.cpus(follower) == "1"
    assert "is used by pod default/second" in await node.why_not_created(await node.pod(), "main", cdi=devices)


async def test_second_pod_that_was_reserved_after_the_prepare(node):
    first, second = await node.pod("first"), await node.pod("second")
    claim = node.add_claim("1", first)
    devices = await node.prepare(claim)
    container = await node.cri.run(first, "main", cdi=devices)
    await node.cri.stop(container)
    assert "is not reserved for pod default/second" in await node.why_not_created(second, "main", cdi=devices)
    # The kubelet does not have a claim prepared again for a second pod.
    node.reserve(claim, first, second)
    assert await node.cpus(await node.cri.run(second, "main", cdi=devices)) == "1"


async def test_unprepare_while_the_container_runs(node):
    shared = await node.cri.run(await node.pod(), "main")
    pod = await node.pod("tenacious")
    claim = node.add_claim("1", pod)
    container = await node.cri.run(pod, "main", cdi=await node.prepare(claim))
    why = await node.unprepare(claim)
    assert "the claim's CPUs are in use: container main of pod default/tenacious has not ended" in why
    assert [await node.cpus(container), await node.cpus(shared)] == ["1", "0"]

    # The kubelet asks again, and the container ends meanwhile.
    again = asyncio.create_task(node.unprepare(claim))
    await node.cri.stop(container)
    assert await again == ""
    await node.wait_cpus(shared, cpus="0-1")
