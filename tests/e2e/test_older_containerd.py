# SPDX-License-Identifier: Apache-2.0
"""Older lines of containerd: until 2.1 NRI has no validators, until 2.2 it does not tell CDI devices.

There the start guard's hook is the mark, and a creation in which the driver does not answer goes on without it. Until
2.3 the driver must not have containers moved but in its answers: others leave a claim's CPUs with the creation of its
first container, and get them back with a later one.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from contextlib import contextmanager

import pytest

from e2e import kernel
from e2e.cri import CriError
from e2e.node import EVERYTHING, Node
from e2e.test_startguard import guard_says, refused

NOT_STARTED = "(which is created but not started) could not be moved away"


@pytest.fixture
async def node(older, older_containerd):
    async with Node.open(older_containerd) as node:
        await node.start_driver()
        assert f"version={older}." in node.driver.log
        assert f"validator={str(validates(older)).lower()}" in node.driver.log
        assert (await node.metrics())["nri_unsolicited_updates"] == 0
        yield node
        assert not node.containerd.was_pushed_to


def validates(version):
    return version != "2.1"


@contextmanager
def immovable(pid, cpus):
    """Keep a process's cgroup on CPUs: one in a cgroup below, as a container that runs containers has it, uses them."""
    folder = kernel.cgroup(pid)
    if (folder / "cgroup.controllers").exists():
        pytest.skip("cgroups of version 2 take CPUs away whatever is below them")
    below = folder / "below"
    below.mkdir()
    try:
        for name, text in (("cpuset.mems", (folder / "cpuset.mems").read_text()), ("cpuset.cpus", cpus)):
            (below / name).write_text(text)
        yield
    finally:
        below.rmdir()


async def created_at_last(node, pod, devices):
    """Create a container as the kubelet does, again and again while others could not be moved away yet."""
    attempts = itertools.count(1)
    created = []

    async def is_created():
        try:
            created.append(await node.cri.create(pod, "main", cdi=devices, attempt=next(attempts)))
        except CriError as error:
            assert "could not be moved away" in str(error)  # noqa: PT017
        return bool(created)

    await node.until(is_created, f"others are off the CPUs of pod {pod.name}")
    return created[0]


async def test_pinning(node):
    shared_pod, pod, other = await node.pod(), await node.pod("owner"), await node.pod("other")
    shared = await node.cri.run(shared_pod, "main")
    claim = node.add_claim("1", pod, other)
    devices = await node.prepare(claim)
    assert await node.cpus(shared) == "0-1"
    # Whoever comes from now on, or changes, keeps off the claim's CPUs.
    later = await node.cri.run(shared_pod, "later")
    assert await node.cpus(later) == "0"
    await node.cri.update(later, cpus="0-1", shares=512)
    assert await node.cpus(later) == "0"

    init = await node.cri.create(pod, "init", cdi=devices, command=["/bin/true"])
    assert await node.cpus(shared) == "0"
    await node.cri.start(init)
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
    last = await node.cri.run(await node.pod(), "last")
    await node.wait_cpus(shared, later, last, cpus="0-1")


async def test_one_creation_moves_all_others(node):
    shared_pod, pod = await node.pod(), await node.pod()
    shared = [await node.cri.run(shared_pod, f"c{number}") for number in range(12)]
    exclusive = await node.cri.create(pod, "main", cdi=await node.prepare(node.add_claim("1", pod)))
    assert [await node.cpus(container) for container in shared] == ["0"] * len(shared)
    await node.cri.start(exclusive)
    assert await node.cpus(exclusive) == "1"


async def test_prepare_waits_for_a_container_that_is_to_be_started(node):
    waiting = await node.cri.create(await node.pod("waiting"), "main")
    pod = await node.pod()
    preparing = asyncio.create_task(node.prepare(node.add_claim("1", pod)))

    async def holds_a_cpu():
        return (await node.metrics())["allocated_cpus"] == 1

    await node.until(holds_a_cpu, "the claim holds a CPU")
    assert not preparing.done()
    await node.cri.start(waiting)
    devices = await preparing
    # Who runs is not waited for.
    assert await node.cpus(waiting) == "0-1"
    exclusive = await node.cri.run(pod, "main", cdi=devices)
    assert [await node.cpus(exclusive), await node.cpus(waiting)] == ["1", "0"]


async def test_creation_refused_while_another_is_to_be_started(node):
    pod, stray_pod = await node.pod(), await node.pod("stray")
    devices = await node.prepare(node.add_claim("1", pod))
    await node.driver.kill9()
    stray = await node.create_unnoticed(stray_pod, "main")
    await node.start_driver()
    # The driver cannot know whether its start has begun, with the CPUs that it was created with.
    why = await node.why_not_created(pod, "main", cdi=devices)
    assert f"container main of pod default/stray {NOT_STARTED}" in why
    await node.cri.start(stray)
    exclusive = await created_at_last(node, pod, devices)
    await node.cri.start(exclusive)
    assert [await node.cpus(exclusive), await node.cpus(stray)] == ["1", "0"]


async def test_start_refused_while_another_could_not_be_moved(node):
    shared, pod = await node.cri.run(await node.pod("nested"), "main"), await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    with immovable(await node.cri.pid(shared), "1"):
        failed = await node.cri.create(pod, "main", cdi=devices)
        assert "container main of pod default/nested" in await node.why_not_started(failed)
        assert await node.cri.wait_ended(failed) == 128
        assert await node.cpus(shared) == "0-1"
    exclusive = await created_at_last(node, pod, devices)
    await node.cri.start(exclusive)
    assert [await node.cpus(exclusive), await node.cpus(shared)] == ["1", "0"]


async def test_driver_killed_between_creation_and_start(node):
    shared, pod = await node.cri.run(await node.pod(), "main"), await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    with immovable(await node.cri.pid(shared), "1"):
        exclusive = await node.cri.create(pod, "main", cdi=devices)
        await node.driver.kill9()
        # Nobody has looked whether the other one has left.
        await node.cri.start(exclusive)
        assert [await node.cpus(exclusive), await node.cpus(shared)] == ["1", "0-1"]
    await node.start_driver()
    await node.wait_cpus(shared, cpus="0")
    assert await node.cpus(exclusive) == "1"


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
    last = await node.cri.run(await node.pod(), "last")
    await node.wait_cpus(shared, last, cpus="0-1")
