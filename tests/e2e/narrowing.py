# SPDX-License-Identifier: Apache-2.0
"""Take CPUs from cgroups, and give them back, as the kernel and administrators do."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from e2e import kernel

_TROUBLESHOOTING = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_PODS = "/sys/fs/cgroup/cpuset/kubepods*"


def make(folder: Path) -> None:
    """Make a cgroup, and those above it, with all that their parents have, where they are missing."""
    if folder.is_dir():
        return
    make(folder.parent)
    folder.mkdir()
    if kernel.is_v1():
        # A new one has nothing in version 1, and takes no process.
        for name in ("cpuset.mems", "cpuset.cpus"):
            (folder / name).write_text((folder.parent / name).read_text())


def confine(folder: Path, cpus: str) -> None:
    """Hold a cgroup and all in it to some CPUs, as the kernel does in version 1 when the others go offline."""
    if not kernel.is_v1():
        (folder / "cpuset.cpus").write_text(cpus)
        return
    # None may have more than the one above it has.
    for path, _, _ in os.walk(folder, topdown=False):
        Path(path, "cpuset.cpus").write_text(cpus)


def widen(pods: Path) -> None:
    """Give the cgroup of all pods all CPUs, as the documents say that it is done."""
    if not kernel.is_v1():
        # One with processes in it takes no empty list.
        (pods / "cpuset.cpus").write_text((kernel.cgroups("/") / "cpuset.cpus.effective").read_text())
        return
    [command] = [
        line for line in re.findall(r"^\$ (find .*)$", _TROUBLESHOOTING.read_text(), re.MULTILINE) if _PODS in line
    ]
    subprocess.run(command.replace(_PODS, str(pods)), shell=True, check=True)
