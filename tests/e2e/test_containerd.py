# SPDX-License-Identifier: Apache-2.0
"""The tests' own containerd leaves nothing behind, and several of it do not see each other."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from e2e.containerd import Containerd
from e2e.cri import Cri
from e2e.scratch import leftovers, remove_leftovers

# What a test run looks like that is killed.
_DIES = """
import asyncio, os, sys
from pathlib import Path
from e2e.containerd import Containerd
from e2e.cri import Cri

async def die():
    containerd = Containerd(Path(sys.argv[1]), Path(sys.argv[2]))
    print(containerd.folder, flush=True)
    async with containerd, Cri(containerd.socket, containerd.cgroup_parent) as cri:
        await cri.run(await cri.run_pod("pod"), "main")
        os._exit(9)

asyncio.run(die())
"""


async def test_side_by_side(current_containerd, older_containerd, tmp_path):
    async with (
        Containerd(current_containerd, tmp_path) as one,
        Containerd(older_containerd, tmp_path) as other,
        Cri(one.socket, one.cgroup_parent) as first,
        Cri(other.socket, other.cgroup_parent) as second,
    ):
        container = await first.run(await first.run_pod("pod"), "main")
        assert await second.containers() == {}
        await second.run(await second.run_pod("pod"), "main")
        await other.destroy()
        assert leftovers(other.folder) == []
        await first.exec(container, "/bin/true")
    assert leftovers(one.folder) == []


async def test_tests_that_are_killed(current_containerd, tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _DIES,
        current_containerd,
        tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 9
    folder = Path(output.decode().strip())
    kinds = {line.partition(" ")[0] for line in leftovers(folder)}
    assert kinds == {"process", "mount", "cgroup", str(folder)}
    remove_leftovers()
    assert leftovers(folder) == []
