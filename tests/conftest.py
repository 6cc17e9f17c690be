# SPDX-License-Identifier: Apache-2.0
"""Fixtures that tests of several modules share: the box's API server, machines, a whole box with driver processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from driver.sandbox.apiserver import ApiServer
from driver.sandbox.clusterbox import ClusterBox
from driver.sandbox.driverprocess import DriverProcess
from driver.sandbox.kubelet import Kubelet
from driver.sandbox.machine import MachineShape, write_machine

_ANNOUNCED = "announced"

# How long an example takes says how busy the machine is. What fixtures of one test bring is not changed by examples.
settings.register_profile(
    "dracpu", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("dracpu")


@pytest.fixture
def announce(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Print lines of a test at the end of the run, where they are seen from whichever process it ran in."""
    return lambda lines: record_property(_ANNOUNCED, lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have announced."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    announced = [(report, lines) for report in reports for name, lines in report.user_properties if name == _ANNOUNCED]
    if announced:
        terminalreporter.section("what tests have measured")
    for _, lines in sorted(announced, key=lambda one: one[0].nodeid):
        terminalreporter.write_line(str(lines))


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder with a path short enough for Unix sockets, which hold 107 bytes; `tmp_path` is often longer."""
    folder = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def machine_tree(tmp_path: Path) -> Callable[..., Path]:
    """Write the sysfs tree of a machine: `machine_tree(cpus=64, numa_nodes=2, …)`, see `MachineShape`."""

    def write(**shape: object) -> Path:
        root = Path(tempfile.mkdtemp(prefix="machine", dir=tmp_path))
        return write_machine(root, MachineShape(**shape))

    return write


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    """The box's API server, running in the test's own loop."""
    async with ApiServer() as server:
        yield server


@pytest.fixture
async def kubelet(short_tmp: Path) -> AsyncIterator[Kubelet]:
    """A kubelet with an empty root folder, which looks for plugins and is fast to try again."""
    async with Kubelet(short_tmp / "kubelet", first_retry_s=0.05) as node:
        yield node


@pytest.fixture
async def cluster_box() -> AsyncIterator[ClusterBox]:
    """A one-node cluster on a generated machine of 64 CPUs: 2 sockets, 4 NUMA nodes, two threads a core."""
    async with ClusterBox(shape=MachineShape(cpus=64, numa_nodes=4)) as box:
        yield box


@pytest.fixture
async def driver_process(cluster_box: ClusterBox) -> Callable[..., Awaitable[DriverProcess]]:
    """Start the real driver in `cluster_box` and wait until it is registered and has published.

    `await driver_process({"groupBy": "socket"}, flags=(…), environment={…})`; `wait=False` only starts it.
    """

    async def start(
        settings: dict[str, object] | None = None,
        *,
        flags: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        wait: bool = True,
    ) -> DriverProcess:
        process = await cluster_box.start_driver(settings, flags, environment)
        if wait:
            await cluster_box.wait_ready(process)
        return process

    return start
