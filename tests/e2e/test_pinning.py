# SPDX-License-Identifier: Apache-2.0
"""A container with a claim has its CPUs and nobody else has; what it leaves the others get back."""

from __future__ import annotations

import time

import pytest


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
    assert await node.unprepare(claim) == ""
    let_go = time.monotonic()
    await node.wait_cpus(shared, "0-1")
    await node.wait_cpus(later, "0-1")
    assert time.monotonic() - let_go < 1
