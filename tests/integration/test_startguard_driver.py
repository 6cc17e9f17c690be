# SPDX-License-Identifier: Apache-2.0
"""The driver process and its start guard: what it puts where when it starts, and what it says of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.sandbox.clusterbox import ClusterBox
from driver.sandbox.driverprocess import DriverProcess

UID = "3f6c1d2e-0b1a-4c5d-8e9f-a0b1c2d3e4f5"
# What dra-driver-cpu writes.
SPEC = {
    "cdiVersion": "0.8.0",
    "kind": "dra.k8s.io/cpu",
    "devices": [{"name": f"claim-{UID}", "containerEdits": {"env": [f"DRA_CPUSET_{UID}=2-5"]}}],
}


class Driver:
    """A driver that looks for a runtime which is not there: it starts, but never gets ready."""

    def __init__(self, box: ClusterBox, start: Callable[..., Awaitable[DriverProcess]]) -> None:
        self.program = box.kubelet.root / "plugins" / "dra.cpu" / "start-guard"
        self.spec = box.cdi_dir / f"dra.k8s.io-cpu_claim-{UID}.json"
        self._box = box
        self._start = start

    async def start(self, *flags: str) -> None:
        address = f"127.0.0.1:{self._box.reserve_port()}"
        self._url = f"http://{address}"
        flags = (f"--nri-socket={self._box.folder}/nri.sock", f"--bind-address={address}", *flags)
        self.process = await self._start(flags=flags, wait=False)
        async with asyncio.timeout(60):
            while await self.get("/healthz") is None:  # noqa: ASYNC110, another process tells nobody
                await asyncio.sleep(0.05)

    async def get(self, path: str, status: int = 200) -> str | None:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(self._url + path) as answer:
                    return await answer.text() if answer.status == status else None
            except aiohttp.ClientConnectionError:
                return None

    async def works(self) -> bool:
        """Whether the metric and the readiness both say that the guard does."""
        ok = "dra_cpu_start_guard_ok 1.0" in await self.get("/metrics")
        assert ok == ("startguard" not in await self.get("/readyz", 503))
        return ok

    def hooks(self) -> list[object] | None:
        (device,) = json.loads(self.spec.read_bytes())["devices"]
        return device["containerEdits"].get("hooks")


@pytest.fixture
def driver(cluster_box, driver_process) -> Driver:
    return Driver(cluster_box, driver_process)


def hook(program: Path) -> dict[str, object]:
    return {
        "hookName": "createRuntime",
        "path": str(program),
        "args": ["dracpu-start-guard", "v1", UID, "2-5"],
        "env": ["LC_ALL=C"],
        "timeout": 10,
    }


async def test_specs_get_the_hook_when_the_driver_starts_and_lose_it_when_it_is_turned_off(driver):
    driver.spec.write_text(json.dumps(SPEC))
    await driver.start()
    assert await driver.works()
    assert driver.program.exists()
    assert driver.hooks() == [hook(driver.program)]
    await driver.process.kill9()

    await driver.start("--start-guard=false")
    assert driver.hooks() is None
    assert json.loads(driver.spec.read_bytes()) == SPEC
    assert "the start guard is off" in driver.process.log
    assert "dra_cpu_start_guard_ok 0.0" in await driver.get("/metrics")
    assert "startguard" not in await driver.get("/readyz", 503)
    await driver.process.kill9()

    await driver.start()
    assert driver.hooks() == [hook(driver.program)]


async def test_a_guard_that_does_not_work_is_told_and_the_driver_goes_on(driver):
    driver.spec.write_text(json.dumps(SPEC))
    driver.program.mkdir(parents=True)
    await driver.start()
    assert not await driver.works()
    assert "cannot install the start guard" in await driver.get("/readyz", 503)
    assert driver.hooks() == [hook(driver.program)]  # refused rather than not pinned
    await driver.process.terminate()

    driver.program.rmdir()
    await driver.start()
    assert await driver.works()


# Notes


async def figures(node) -> tuple[float, float]:
    metrics = await node.metrics()
    return metrics["containers_on_fewer_cpus"], metrics["starts_on_fewer_cpus_total"]


async def wait_figures(node, living: int, all_of_them: int) -> None:
    async with asyncio.timeout(60):
        while await figures(node) != (living, all_of_them):  # noqa: ASYNC110, the driver tells nobody
            await asyncio.sleep(0.05)


def told(process: DriverProcess, since: int = 0) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in process.log[since:].splitlines()]
    return [line for line in lines if "started on fewer CPUs" in line["msg"]]


async def test_a_container_that_the_guard_has_noted_is_told_after_each_start_of_the_driver(node):
    process = await node.start(flags=["--start-guard"])
    runtime = node.box.runtime
    await runtime.run_pod(nri.PodSandbox(id="s", name="pod", namespace="default", uid="u"))
    noted = await runtime.run_container("s", "noted")
    await runtime.run_container("s", "other")
    folder = node.plugin_dir / "guard-notes"
    await node.until(folder.exists)
    assert await figures(node) == (0, 0)
    # As the guard does it.
    (folder / f".{noted}").write_text("v1\t0\t0-1\n")
    (folder / f".{noted}").rename(folder / noted)
    await wait_figures(node, 1, 1)
    [line] = told(process)
    assert line["level"] == "WARNING"
    assert line["container"] == "container noted of pod default/pod"
    assert (line["id"], line["cpus"], line["claimed"]) == (noted, "0", "0-1")

    await process.kill9()
    begin = len(process.log)
    process = await node.start(flags=["--start-guard"])
    await wait_figures(node, 1, 1)
    assert len(told(process, begin)) == 1
    await runtime.remove_container(noted)
    await wait_figures(node, 0, 1)
    assert (folder / noted).exists()  # for a minute
    assert len(told(process, begin)) == 1


@pytest.mark.parametrize("flag", ["--start-guard=false", "--nri-socket="])
async def test_without_the_guard_nobody_looks_for_notes(node, flag):
    await node.start(flags=["--start-guard", flag])
    await node.until(lambda: '"started"' in node.process.log)
    assert not (node.plugin_dir / "guard-notes").exists()
    assert await figures(node) == (0, 0)
