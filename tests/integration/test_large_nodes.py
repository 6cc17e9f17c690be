# SPDX-License-Identifier: Apache-2.0
"""What a node tells when the driver connects may be hundreds of megabytes; the driver keeps next to nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.sandbox.nriplugin import RuntimeTraits

MIB = 1 << 20
# The transport has one message, and each layer a copy of it.
MOST_GROWTH = 64 * MIB
# How long the box takes to send so much is no business of this test.
PATIENT = RuntimeTraits(request_timeout_s=60.0, most_part_bytes=MIB + MIB // 8, most_per_part=100)


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])


@pytest.mark.parametrize(
    ("containers", "env", "parts"),
    [
        pytest.param(130, ["A=" + "x" * (MIB - 100)], 130, id="large environments"),
        pytest.param(10_000, ["PATH=/bin:/usr/bin", "HOME=/root"], 100, id="many containers"),
    ],
)
async def test_a_driver_stays_small_and_connected_whatever_lives(open_node, containers, env, parts, announce):
    async with open_node(traits=PATIENT) as node:
        runtime = node.box.runtime
        for number in range(containers):
            made = nri.Container(
                id=f"{number:064x}", name="c", pod_sandbox_id="s", env=env, state=nri.CONTAINER_RUNNING
            )
            runtime.containers[made.id] = made
            runtime.cpusets[made.id] = ""
        runtime.pods["s"] = nri.PodSandbox(id="s", name="p", uid="u", namespace="n")
        process = await node.start(flags=("--nri-socket=",))
        before = peak_bytes(process.pid)
        await process.terminate()

        process = await node.start()
        plugin = await runtime.synchronized()
        growth = peak_bytes(process.pid) - before
        announce(
            f"{containers} containers in {plugin.parts} parts: synchronised in {plugin.synchronize_s:.2f} s, "
            f"{before / MIB:.0f} MiB before, {growth / MIB:.0f} MiB more at most"
        )
        assert (runtime.connections, plugin.parts) == (1, parts)
        assert growth < MOST_GROWTH
