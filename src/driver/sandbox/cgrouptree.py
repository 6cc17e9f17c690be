# SPDX-License-Identifier: Apache-2.0
"""The box's cgroups: files that show of the cpuset controller what the kernel shows below ``/sys/fs/cgroup``.

In version 1 a cgroup may have only what the one above it has, else writing fails; in version 2 it may ask for anything,
and has of it what the one above it has, or all of that if there is nothing in common.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from fastcpu import CpuSet

_ROOT: Final = PurePosixPath("/")


class CgroupTree:
    """The cgroups of one node.

    Parameters
    ----------
    root : Path
        What stands for ``/sys/fs/cgroup``.
    online : CpuSet
        The CPUs of the machine.
    version : int
        1 or 2.
    """

    def __init__(self, root: Path, online: CpuSet, version: int = 2) -> None:
        self._is_v1 = version == 1
        self._folder = root / "cpuset" if self._is_v1 else root
        self._written: dict[PurePosixPath, CpuSet] = {}
        self._effective: dict[PurePosixPath, CpuSet] = {_ROOT: online}
        self._folder.mkdir(parents=True)
        if not self._is_v1:
            (root / "cgroup.controllers").write_text("cpuset\n")
        self._show(_ROOT)

    def effective(self, path: str) -> CpuSet:
        """Return the CPUs on which the processes of a cgroup may run."""
        return self._effective[PurePosixPath(path)]

    def make(self, path: str) -> None:
        """Make a cgroup, and those above it, where they are missing, with all that the ones above have."""
        cgroup = PurePosixPath(path)
        for each in (*reversed(cgroup.parents), cgroup):
            if each not in self._effective:
                # Of version 1 a container's runtime does so; before that, nobody could be in it.
                self._written[each] = self._effective[each.parent] if self._is_v1 else CpuSet()
                self._apply(each)

    def write(self, path: str, cpus: CpuSet) -> None:
        """Hold a cgroup to some CPUs.

        Raises
        ------
        PermissionError
            In version 1, if the one above it has not all of them.
        """
        cgroup = PurePosixPath(path)
        if self._is_v1 and not cpus <= self._effective[cgroup.parent]:
            raise PermissionError(errno.EACCES, f"write {cpus}: permission denied", f"{path}/cpuset.cpus")
        self._written[cgroup] = cpus
        for each in self._below(cgroup):
            self._apply(each)

    def confine(self, path: str, cpus: CpuSet) -> None:
        """Take all other CPUs from a cgroup and those below it, as version 1 does when CPUs go offline."""
        cgroup = PurePosixPath(path)
        self._written[cgroup] = self._effective[cgroup] & cpus
        for each in self._below(cgroup):
            if self._is_v1:
                self._written[each] &= cpus
            self._apply(each)

    def remove(self, path: str) -> None:
        """Remove a cgroup in which nothing is any more."""
        cgroup = PurePosixPath(path)
        for name in os.listdir(self._at(cgroup)):
            (self._at(cgroup) / name).unlink()
        self._at(cgroup).rmdir()
        del self._effective[cgroup], self._written[cgroup]

    def _below(self, cgroup: PurePosixPath) -> Iterator[PurePosixPath]:
        """Yield a cgroup and those below it, none before the one above it."""
        yield from sorted(each for each in self._effective if each.is_relative_to(cgroup))

    def _apply(self, cgroup: PurePosixPath) -> None:
        above = self._effective[cgroup.parent]
        self._effective[cgroup] = (self._written[cgroup] & above) or above
        self._show(cgroup)

    def _show(self, cgroup: PurePosixPath) -> None:
        name = "cpuset.effective_cpus" if self._is_v1 else "cpuset.cpus.effective"
        folder = self._at(cgroup)
        folder.mkdir(exist_ok=True)
        # As the kernel's files it is never seen half written.
        new = folder / "new"
        new.write_text(f"{self._effective[cgroup]}\n")
        new.replace(folder / name)

    def _at(self, cgroup: PurePosixPath) -> Path:
        return self._folder / cgroup.relative_to(_ROOT)
