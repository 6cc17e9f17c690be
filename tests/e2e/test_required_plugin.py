# SPDX-License-Identifier: Apache-2.0
"""With the plugin required as documented, nothing starts without the driver, with a claim or without."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from e2e.node import Node

DOCUMENT = (Path(__file__).parents[2] / "docs" / "required-plugin.md").read_text()
SETTINGS = re.search(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)[1]
TOLERATION, ONE_POD = re.findall(r"annotations:\n +(\S+): (\S+)\n```", DOCUMENT)

NOT_PRESENT = 'required plugin "dra.cpu" not present'


@pytest.fixture
async def node(current_containerd):
    async with Node.open(current_containerd, settings=SETTINGS) as node:
        # Before any driver, as when a node starts.
        for form in ("", "/pod", "/container.driver"):
            await node.cri.run(await node.pod(annotations=as_mapping(TOLERATION, form)), "driver")
        other = await node.pod(annotations=as_mapping(TOLERATION, "/container.driver"))
        assert NOT_PRESENT in await node.why_not_created(other, "other")
        assert NOT_PRESENT in await node.why_not_created(await node.pod(), "main")
        await node.start_driver()
        yield node


def as_mapping(annotation, form=""):
    name, value = annotation
    return {name + form: value.strip("\"'")}


async def nothing_starts(node):
    """Try containers without and with a claim while the driver is away, and again when it is back."""
    pod, plain = await node.pod(), await node.pod()
    tolerant = await node.pod(annotations=as_mapping(TOLERATION))
    devices = await node.prepare(node.add_claim("1", pod, tolerant))
    await node.cri.run(plain, "before")
    yield
    errors = [
        await node.why_not_created(*how, attempt=attempt, cdi=cdi)
        for attempt in range(3)
        for how, cdi in (((plain, "plain"), ()), ((pod, "exclusive"), devices))
    ]
    assert all("validator" in error for error in errors), errors
    assert NOT_PRESENT in errors[-1]
    # Who does without the plugin does not do without the start guard.
    stray = await node.cri.create(tolerant, "main", cdi=devices)
    assert "its claims allow CPUs 1 only" in await node.why_not_started(stray)
    yield
    assert await node.cpus(await node.cri.run(plain, "after")) == "0"
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices)) == "1"


async def test_driver_killed(node):
    steps = nothing_starts(node)
    await anext(steps)
    await node.driver.kill9()
    await anext(steps)
    await node.start_driver()
    await anext(steps, None)


async def test_driver_stopped(node):
    steps = nothing_starts(node)
    await anext(steps)
    node.driver.send_signal(signal.SIGSTOP)
    await anext(steps)
    node.driver.send_signal(signal.SIGCONT)
    await node.until(node.is_connected_again, "the driver has been connected again")
    await anext(steps, None)


async def test_pod_that_asks_for_it_by_itself(current_containerd):
    settings = re.sub(r"required_plugins = .*\n", "", SETTINGS)
    async with Node.open(current_containerd, settings=settings) as node:
        assert NOT_PRESENT in await node.why_not_created(await node.pod(annotations=as_mapping(ONE_POD)), "main")
        await node.cri.run(await node.pod(), "main")
