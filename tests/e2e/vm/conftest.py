# SPDX-License-Identifier: Apache-2.0
"""One virtual machine and one control plane for all tests: a boot takes a minute and a half."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from e2e import programs, scratch
from e2e.vm import disk

if TYPE_CHECKING:
    from e2e.vm.node import Node


def pytest_sessionstart() -> None:
    if lacks := disk.missing():
        lines = "\n  ".join(lacks)
        raise pytest.UsageError(f"the virtual machine cannot run here; missing:\n  {lines}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # They share the machine, and so the event loop that its connection belongs to.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def machine() -> AsyncIterator[Node]:
    """The node, as the tests before have left it."""
    from e2e.cluster.controlplane import ControlPlane
    from e2e.vm.machine import VirtualMachine
    from e2e.vm.node import ISOLATED, Node

    scratch.remove_leftovers()
    kubernetes, containerd = programs.build(programs.KUBERNETES), programs.build(programs.CONTAINERD)
    base = disk.base(kubernetes, containerd)
    async with (
        ControlPlane(kubernetes) as control_plane,
        VirtualMachine(base, f"isolcpus={ISOLATED}") as vm,
        Node.open(vm, control_plane) as node,
    ):
        yield node


@pytest_asyncio.fixture(loop_scope="session")
async def node(machine: Node, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    """The node without pods and claims."""
    yield machine
    await machine.show_logs()
    await machine.end_all()
