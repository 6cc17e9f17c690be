# SPDX-License-Identifier: Apache-2.0
"""Where the driver chooses the CPUs itself, containers are held to its choice as to anybody's."""

from __future__ import annotations

import pytest

SETTINGS = {"allocator": "cpumanager", "groupBy": "numanode"}


@pytest.fixture
async def node(node):
    await node.start_driver(settings=SETTINGS)
    return node


async def test_chosen_kept_over_restarts_and_given_back(node):
    shared = await node.cri.run(await node.pod(), "main")
    pod = await node.pod()
    claim = node.add_claim_of(1, pod)
    devices = await node.prepare(claim)
    # Of two CPUs that are as good as each other the lower one is taken, on every run.
    assert await node.cpus(shared) == "1"
    first = await node.cri.run(pod, "main", cdi=devices)
    assert await node.cpus(first) == "0"

    await node.restart_driver(settings=SETTINGS)
    assert await node.prepare(claim) == devices
    assert [await node.cpus(first), await node.cpus(shared)] == ["0", "1"]
    await node.cri.stop(first)
    again = await node.cri.run(pod, "main", cdi=devices, attempt=1)
    assert await node.cpus(again) == "0"

    await node.cri.end(pod)
    assert await node.unprepare(claim) == ""
    await node.wait_cpus(shared, cpus="0-1")


async def test_the_start_guard_knows_the_choice(node):
    pod = await node.pod()
    devices = await node.prepare(node.add_claim_of(1, pod))
    await node.driver.kill9()
    container = await node.create_unnoticed(pod, "main", cdi=devices)
    assert "but its claims allow CPUs 0 only" in await node.why_not_started(container)


async def test_the_last_cpu_stays_with_the_containers_that_share(node):
    shared = await node.cri.run(await node.pod(), "main")
    error = await node.why_not_prepared(node.add_claim_of(2))
    assert "the 1 container that has no claim" in error
    assert await node.cpus(shared) == "0-1"


async def test_an_opaque_cpuset_is_refused(node):
    error = await node.why_not_prepared(node.add_claim("1"))
    assert "allocator: external" in error
