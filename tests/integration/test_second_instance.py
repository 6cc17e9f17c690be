# SPDX-License-Identifier: Apache-2.0
"""Two driver processes on the same folders: the second one only waits, and takes over with all that is held."""

from __future__ import annotations

import asyncio
import signal

from driver.names import DRIVER_NAME
from driver.sandbox.plugins import KubeletError

SETTINGS = {"groupBy": "numanode", "reservedCPUs": "0,32"}


def sockets(node):
    folders = (node.plugin_dir, node.box.kubelet.registry_dir)
    return {path: path.stat().st_ino for folder in folders for path in folder.glob("*.sock")}


async def start_second(node, flags=()):
    """Start one more driver and wait until it says that it waits; return the first, which `node` forgets."""
    first = node.process
    await node.start(SETTINGS, flags, wait=False)
    await node.until(lambda: any(line["msg"] == "waiting to be the only instance" for line in node.log()))
    return first


async def prepared(node, claim):
    """Prepare as the kubelet does, which may be between two registrations: the old socket's, and the new one's."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await node.prepare(claim)
            except KubeletError:
                await asyncio.sleep(0.05)


async def test_a_second_instance_serves_nothing_and_takes_over_when_the_first_is_killed(node):
    await node.start(SETTINGS)
    claim = node.add("2-5")
    before = await node.prepare(claim)
    opened = sockets(node)
    assert len(opened) == 2

    first = await start_second(node)
    # What a start would put in order.
    stale = node.records_dir / ".a.json.0123abcd.tmp"
    stale.write_text("")
    reason = f"another instance works on {node.plugin_dir} (pid {first.pid}, since 20"
    status, text = await node.get("/readyz")
    assert status == 503
    assert f"instance: {reason}" in text
    status, text = await node.get("/healthz")
    assert (status, reason in text) == (503, True)
    metrics = await node.metrics()
    assert (metrics["ready"], metrics['condition{condition="instance"}']) == (0, 0)
    assert metrics["resource_claims_active"] == 0
    [line] = [line for line in node.log() if line["msg"] == "waiting to be the only instance"]
    assert reason in line["reason"]

    # It is the first that goes on serving.
    assert sockets(node) == opened
    other = node.add("6")
    assert await node.errors(other) == [""]
    assert await node.unprepare(other) == [""]
    assert (await node.metrics())['prepare_claims_total{result="success"}'] == 0
    assert stale.exists()

    await first.kill9()
    await node.box.kubelet.wait_gone(DRIVER_NAME)
    await node.box.kubelet.wait_registered(DRIVER_NAME)
    assert not stale.exists()
    assert await node.agreed() == {claim.uid: "2-5"}
    assert await prepared(node, claim) == before
    [error] = await node.errors(node.add("5-6", cpus="63"))
    assert f"CPU 5 is held by claim {claim.uid}" in error
    await node.until(lambda: any(line["msg"] == "started" for line in node.log()))
    assert f"pid {node.process.pid}, since 20" in (node.plugin_dir / "instance.lock").read_text()
    await node.box.wait_ready(node.process)
    assert (await node.get("/readyz"))[0] == 200
    assert await node.unprepare(claim) == [""]
    assert node.files() == []


async def test_the_lock_cannot_be_taken_away(node):
    await node.start(SETTINGS)
    (node.plugin_dir / "instance.lock").unlink()
    # Another CDI folder changes nothing either.
    first = await start_second(node, [f"--cdi-dir={node.box.folder / 'other-cdi'}"])
    second = node.process
    assert second.returncode is None
    assert not (node.box.folder / "other-cdi").exists()

    # One that waits ends at once when it is told to, and the first does not notice.
    second.send_signal(signal.SIGTERM)
    assert await second.wait() == 0
    assert await node.errors(node.add("2-5")) == [""]

    # In good order, the next one takes over as well.
    await start_second(node)
    assert await first.terminate() == 0
    await node.box.wait_ready(node.process)
    assert list((await node.agreed()).values()) == ["2-5"]
