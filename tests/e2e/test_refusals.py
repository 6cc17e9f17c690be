# SPDX-License-Identifier: Apache-2.0
"""What must not be let in is not let in, changes nothing, and says why."""

from __future__ import annotations

import asyncio
import uuid

from e2e.node import EVERYTHING
from fastcpu import CpuSet


async def test_forged_and_copied_environment(node):
    await node.start_driver()
    shared = await node.cri.run(await node.pod(), "main")
    pod = await node.pod("owner")
    claim = node.add_claim("1", pod)
    devices = await node.prepare(claim)
    stranger = uuid.uuid4()
    forged = {
        # Copied from the pod that has the claim, into another pod and into a container beside.
        f"DRA_CPUSET_{claim.uid}": ("1", "but the container was not given claim default/claim-"),
        f"DRA_CPUSET_{claim.uid.upper()}": ("1", "no claim of that UID is prepared"),
        f"DRA_CPUSET_{stranger}": ("0-1", "no claim of that UID is prepared"),
        "DRA_CPUSET_": ("1", "claim UID '' is malformed"),
        "DRA_CPUSET_../../etc": ("1", "is malformed"),
    }
    for before_and_after in range(2):
        for name, (value, reason) in forged.items():
            for victim in (pod, await node.pod()):
                why = await node.why_not_created(victim, "forger", env={name: value}, attempt=before_and_after)
                assert reason in why, (name, why)
        for value in ("", "0", "0-1", "1,", "0-4000000000"):
            why = await node.why_not_created(pod, "forger", env={f"DRA_CPUSET_{claim.uid}": value})
            assert f"DRA_CPUSET_{claim.uid}" in why, (value, why)
        if not before_and_after:
            exclusive = await node.cri.run(pod, "main", cdi=devices)
        assert [await node.cpus(container) for container in (exclusive, shared)] == ["1", "0"]
    # A CDI spec's variable replaces the pod's own.
    overridden = await node.cri.run(pod, "overridden", cdi=devices, env={f"DRA_CPUSET_{claim.uid}": "0-1"})
    assert await node.cpus(overridden) == "1"
    # One claim of one's own does not help to another's CPUs.
    why = await node.why_not_created(pod, "both", cdi=devices, env={f"DRA_CPUSET_{stranger}": "0"})
    assert "no claim of that UID is prepared" in why
    metrics = await node.metrics()
    assert metrics["allocated_cpus"] == 1


async def test_foreign_pod(node):
    await node.start_driver()
    pod = await node.pod("owner")
    claim = node.add_claim("1", pod)
    devices = await node.prepare(claim)
    why = await node.why_not_created(await node.pod("thief"), "main", cdi=devices)
    assert f"claim default/{claim.name} ({claim.uid}) is not reserved for pod default/thief" in why
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices)) == "1"


async def test_claim_that_would_leave_nothing_for_those_who_run(node):
    await node.start_driver()
    shared = await node.cri.run(await node.pod(), "main")
    claim = node.add_claim("0-1")
    assert "would leave no CPU for the 1 container" in await node.why_not_prepared(claim)
    assert await node.cpus(shared) == "0-1"
    await node.cri.remove(shared)
    await node.prepare(claim)


async def test_container_without_a_claim_when_claims_hold_everything(node):
    await node.start_driver()
    pod = await node.pod()
    claim = node.add_claim("0-1", pod)
    devices = await node.prepare(claim)
    why = await node.why_not_created(pod, "plain")
    assert "no CPU is left for container plain" in why
    exclusive = await node.cri.run(pod, "main", cdi=devices)
    assert await node.cpus(exclusive) == "0-1"
    await node.cri.end(pod)
    assert await node.unprepare(claim) == ""
    assert await node.cpus(await node.cri.run(await node.pod(), "plain")) == "0-1"


async def test_exclusive_container_beside_one_that_can_go_nowhere(node):
    await node.start_driver()
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("0-1", pod))
    await node.driver.kill9()
    stray = await node.run_unnoticed(await node.pod("stray"), "main")
    await node.start_driver()
    why = await node.why_not_created(pod, "main", cdi=devices)
    assert "container main of pod default/stray could not be moved away from them yet" in why
    assert await node.cpus(stray) == str(EVERYTHING)
    await node.cri.stop(stray)
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices, attempt=1)) == "0-1"


async def test_reserved_cpus_and_the_last_one(node):
    await node.start_driver(managed=CpuSet([1]))
    shared = await node.cri.run(await node.pod(), "main")
    assert await node.cpus(shared) == "1"
    pod = await node.pod()
    preparing = asyncio.create_task(node.prepare(node.add_claim("1", pod)))
    await node.wait_logged("would leave no CPU for the 1 container")
    await node.cri.stop(shared)
    exclusive = await node.cri.run(pod, "main", cdi=await preparing)
    assert await node.cpus(exclusive) == "1"


async def test_no_managed_cpus(node):
    await node.start_driver(managed=CpuSet())
    container = await node.cri.run(await node.pod(), "main")
    assert await node.cpus(container) == str(EVERYTHING)
    await node.cri.update(container, cpus="1")
    assert await node.cpus(container) == "1"
