# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process: the only authority on where it may run."""

from __future__ import annotations

from pathlib import Path

from fastcpu import CpuSet

_CGROUPS = Path("/sys/fs/cgroup")


def allowed(pid: int) -> CpuSet:
    """Return the CPUs on which a process may run.

    Raises
    ------
    OSError
        If it does not exist any more.
    """
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return CpuSet.parse(fields["Cpus_allowed_list"])


def cpuset_path(pid: int) -> Path:
    """Return the file that holds the cpuset of a process's cgroup, in cgroups of either version.

    Raises
    ------
    OSError
        If the process does not exist any more.
    """
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpuset" in controllers.split(","):
            return _CGROUPS / "cpuset" / path.lstrip("/") / "cpuset.cpus"
    return _CGROUPS / path.lstrip("/") / "cpuset.cpus"


def cpuset(pid: int) -> CpuSet:
    """Return the cpuset of a process's cgroup as it was written.

    Raises
    ------
    OSError
        If the process does not exist any more.
    """
    return CpuSet.parse(cpuset_path(pid).read_text().strip())
