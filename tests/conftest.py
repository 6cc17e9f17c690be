# SPDX-License-Identifier: Apache-2.0
"""Fixtures that tests of several modules share: the box's API server, machines, the driver as a process, a kubelet."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from driver.sandbox.apiserver import ApiServer


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder with a path short enough for Unix sockets, which hold 107 bytes; `tmp_path` is often longer."""
    folder = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    """The box's API server, running in the test's own loop."""
    async with ApiServer() as server:
        yield server
