# SPDX-License-Identifier: Apache-2.0
"""Containers whose start fails: the runtime tells a plugin nothing of that until they are removed."""

from __future__ import annotations

NOT_THERE = ("/no/such/program",)


async def test_a_claim_of_a_container_that_never_started_is_given_back_with_its_pod(node):
    await node.start_driver()
    shared = await node.cri.run(await node.pod(), "main")
    pod, next_pod = await node.pod("first"), await node.pod("next")
    claim = node.add_claim("1", pod, next_pod)
    devices = await node.prepare(claim)
    failed = await node.cri.create(pod, "main", cdi=devices, command=NOT_THERE)
    assert "no such file" in await node.why_not_started(failed)
    # The kubelet makes another one in its place, and keeps the old one.
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices, attempt=1)) == "1"
    await node.cri.stop_pod(pod)
    assert await node.cpus(await node.cri.run(next_pod, "main", cdi=devices)) == "1"
    await node.cri.stop_pod(next_pod)
    assert await node.unprepare(claim) == ""
    await node.wait_cpus(shared, cpus="0-1")


async def test_a_container_that_never_started_makes_no_prepare_fail(node):
    await node.start_driver()
    pod = await node.pod("failed")
    failed = await node.cri.create(pod, "main", command=NOT_THERE)
    assert "no such file" in await node.why_not_started(failed)
    await node.prepare(node.add_claim("1", await node.pod()))
