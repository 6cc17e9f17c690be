# SPDX-License-Identifier: Apache-2.0
"""Clusters do not see each other, and leave nothing behind, however they end."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from e2e.cluster.manifests import as_text, pod
from e2e.scratch import leftovers, remove_leftovers

_TESTS = Path(__file__).parents[2]
_RUNS = "kubectl apply --filename=- && kubectl wait --for=condition=Ready pod/main && helm list --all-namespaces"


async def run_cluster(ending):
    """Start a cluster with a pod, as `make cluster` does, end it, and return its exit status, folder and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "e2e.cluster", "sh", "-c", f"{_RUNS} && ctr version && {ending}"),
        env=os.environ | {"PYTHONPATH": str(_TESTS)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate(as_text(pod("main")).encode()))[0].decode()
    print(output)
    assert "pod/main condition met" in output
    return process.returncode, Path(re.search(r"everything is in ([^;]+);", output)[1])


@pytest.mark.parametrize(
    ("ending", "status"), [("exit 3", 3), ("kill -INT $PPID && exec sleep 600", 130)], ids=["left", "interrupted"]
)
async def test_nothing_is_left(cluster, ending, status):
    await cluster.apply(as_text(pod("main")))
    await cluster.wait_running("main")
    pids = await cluster.pids("main")
    found, folder = await run_cluster(ending)
    assert found == status
    assert leftovers(folder) == []
    assert await cluster.pids("main") == pids


async def test_killed(cluster):
    await cluster.apply(as_text(pod("main")))
    await cluster.wait_running("main")
    pids = await cluster.pids("main")
    status, folder = await run_cluster("kill -9 $PPID")
    assert status == -9
    kinds = {line.partition(" ")[0] for line in leftovers(folder)}
    assert kinds == {"process", "mount", "cgroup", "link", str(folder)}
    # As the next run does before it starts.
    await asyncio.to_thread(remove_leftovers)
    assert leftovers(folder) == []
    assert await cluster.pids("main") == pids
    await cluster.kubectl("exec", "main", "--", "true")
