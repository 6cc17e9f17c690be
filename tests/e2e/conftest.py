# SPDX-License-Identifier: Apache-2.0
"""Nodes with a real containerd, for scenarios that end with asking the kernel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from e2e import programs, scratch

if TYPE_CHECKING:
    from e2e.node import Node


def pytest_sessionstart() -> None:
    if lacks := programs.missing():
        lines = "\n  ".join(lacks)
        raise pytest.UsageError(f"the end-to-end tests cannot run here; missing:\n  {lines}")


@pytest.fixture(scope="session")
def clean_machine() -> None:
    """Nothing is left of earlier runs, however they have ended."""
    scratch.remove_leftovers()


@pytest.fixture(scope="session")
def current_containerd(clean_machine: None) -> Path:
    """The programs of the containerd that most tests use."""
    return programs.build(programs.CONTAINERD)


@pytest.fixture(params=programs.OLDER)
def older(request: pytest.FixtureRequest) -> str:
    """The older lines of containerd, one after another."""
    return str(request.param)


@pytest.fixture
def older_containerd(clean_machine: None, older: str) -> Path:
    """The programs of a containerd of an older line."""
    return programs.build(programs.CONTAINERDS[older])


@pytest.fixture
async def node(current_containerd: Path) -> AsyncIterator[Node]:
    """A node on which no driver has been started yet."""
    from e2e.node import Node

    async with Node.open(current_containerd) as node:
        yield node
