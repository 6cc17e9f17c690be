# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process: the only authority on where it may run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fastcpu import CpuSet

_CGROUPS = Path("/sys/fs/cgroup")
_CPUSETS = _CGROUPS / "cpuset"
_KIB = 1024


def allowed(pid: int) -> CpuSet:
    """Return the CPUs on which a process may run.

    Raises
    ------
    OSError
        If it does not exist any more.
    """
    return CpuSet.parse(_status(pid)["Cpus_allowed_list"])


def resident_bytes(pid: int) -> int:
    """Return the memory that a process occupies.

    Raises
    ------
    OSError
        If it does not exist any more.
    """
    return int(_status(pid)["VmRSS"].split()[0]) * _KIB


def is_v1() -> bool:
    """Tell whether processes are held to CPUs by cgroups of version 1."""
    return _CPUSETS.is_dir()


def cgroups(parent: str) -> Path:
    """Return the folder of a cgroup in the hierarchy that holds processes to CPUs, in cgroups of either version."""
    return (_CPUSETS if is_v1() else _CGROUPS) / parent.lstrip("/")


def cgroup(pid: int) -> Path:
    """Return the folder of a process's cgroup in that hierarchy.

    Raises
    ------
    OSError
        If the process does not exist any more.
    """
    return cgroups(cgroup_path(pid))


def cgroup_path(pid: int) -> str:
    """Return the path of a process's cgroup in that hierarchy, as a runtime would name it.

    Raises
    ------
    OSError
        If the process does not exist any more.
    """
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    paths = {controllers: path for _, controllers, path in lines}
    return paths["cpuset"] if "cpuset" in paths else paths[""]


def cpuset(pid: int) -> CpuSet:
    """Return the cpuset of a process's cgroup.

    Raises
    ------
    OSError
        If the process does not exist any more.
    """
    folder = cgroup(pid)
    text = (folder / "cpuset.cpus").read_text().strip()
    # In version 2 it is empty where nobody has restricted it.
    return CpuSet.parse(text or (folder / "cpuset.cpus.effective").read_text().strip())


def processes(folder: Path) -> Iterator[tuple[int, Path]]:
    """Find the processes of a cgroup and of all below it, each with its own cgroup."""
    for path, _, _ in os.walk(folder):
        # It may be removed while it is looked at.
        with suppress(OSError):
            for pid in Path(path, "cgroup.procs").read_text().split():
                yield int(pid), Path(path)


def _status(pid: int) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
