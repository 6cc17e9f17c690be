# SPDX-License-Identifier: Apache-2.0
"""A one-node Kubernetes that the tests share, for scenarios that end with asking the kernel."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.cluster.cluster import CHART, NAMESPACE, RELEASE, Cluster

_HERE = Path(__file__).parent
_FAILED = pytest.StashKey[bool]()
_SHOWN_LOG_LINES = 200


def pytest_sessionstart() -> None:
    if shutil.which("mmdebstrap") is None:
        raise pytest.UsageError(
            "the driver's image cannot be made here; missing:\n  mmdebstrap: apt-get install mmdebstrap"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What serves all tests belongs to one event loop.
    shared = pytest.mark.asyncio(loop_scope="session")
    for item in items:
        if item.path.is_relative_to(_HERE) and pytest_asyncio.is_async_test(item):
            item.add_marker(shared, append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def shared_cluster(clean_machine: None) -> AsyncIterator[Cluster]:
    """The one cluster of all tests that leave it as they found it."""
    async with Cluster.open(say=lambda line: print(f"\n{line}", file=sys.stderr)) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def driver_image(shared_cluster: Cluster) -> None:
    """The driver's image, known to the node."""
    await shared_cluster.import_driver_image()


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def undeployed(shared_cluster: Cluster) -> Cluster:
    """The shared cluster without a driver, for tests that start it as a process."""
    await shared_cluster.uninstall_chart()
    return shared_cluster


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def device_class(undeployed: Cluster) -> AsyncIterator[None]:
    """The chart's DeviceClass, for drivers that are not deployed by it."""
    text = await undeployed.helm("template", RELEASE, str(CHART), "--show-only=templates/deviceclass.yaml")
    await undeployed.apply(text)
    yield
    # Helm takes over nothing that it did not make.
    await undeployed.kubectl("delete", "--filename=-", input=text)


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(shared_cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """The shared cluster; the test's pods and claims are removed, and shown if it failed."""
    yield shared_cluster
    if request.node.stash.get(_FAILED, False):
        await show(shared_cluster)
    await shared_cluster.clear()


async def show(cluster: Cluster) -> None:
    """Print what helps to understand a failure."""
    for what in (("describe", "pods"), ("get", "resourceclaims,resourceslices", "--output=yaml")):
        print(await cluster.kubectl(*what))
    try:
        log = await cluster.driver_log()
    except RuntimeError as error:
        print(error, await cluster.kubectl("describe", "pods", f"--namespace={NAMESPACE}"), sep="\n")
        log = cluster.driver.log if hasattr(cluster, "driver") else ""
    print("\n".join(log.splitlines()[-_SHOWN_LOG_LINES:]))
    print(cluster.node.kubelet.log_tail)
