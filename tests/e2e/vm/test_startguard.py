# SPDX-License-Identifier: Apache-2.0
"""The driver is killed, and comes back, on cgroups of version 2."""

from __future__ import annotations

import json
import signal

from e2e.cluster.api import PODS
from e2e.vm.checks import MANAGED, exactly, settings
from e2e.vm.node import ISOLATED, PATIENCE_S
from fastcpu import CpuSet

CPUS = CpuSet.parse("4-5")


async def test_container_that_restarts_while_the_driver_is_dead(node):
    external = settings("external", "numanode")
    await node.use_driver(**external)
    offers = await node.offers()
    owner, [_] = await node.place((offers["cpudevnuma001"], CPUS))
    other, [_] = await node.place((offers["cpudevnuma002"], CpuSet.parse("8,10")))
    sharing = await node.run([])
    ids = await node.running(owner, other, sharing)
    seen = await node.seen()
    await node.stop_driver(signal.SIGKILL)
    for pid in seen[ids[owner][0]].pids:
        await node.vm.call("kill_process", pid=pid)

    def refused(pods):
        [found] = [item for item in pods if item["metadata"]["name"] == owner]
        text = json.dumps(found["status"])
        return text if "its claims allow" in text else ""

    text = await node.api.until(PODS, refused, "the container is refused", PATIENCE_S)
    everything = MANAGED | CpuSet.parse("0")
    lines = [
        f"the container would run on CPUs {cpus}, but its claims allow CPUs {CPUS} only"
        for cpus in (everything, everything - ISOLATED)
    ]
    assert any(line in text for line in lines), text
    assert await node.seen_allowed(ids[other] + ids[sharing]) == {
        container: seen[container].allowed for container in ids[other] + ids[sharing]
    }

    await node.start_driver(**external)
    again = await node.running(owner, other, sharing)
    assert again[other] + again[sharing] == ids[other] + ids[sharing]
    await exactly(node, {again[owner][0]: CPUS, again[other][0]: CpuSet.parse("8,10")}, again[sharing])
