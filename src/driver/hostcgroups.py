# SPDX-License-Identifier: Apache-2.0
"""The host's cgroups, as far as they can be read: to which CPUs the kernel holds containers, and what parents allow.

In cgroup v1 the controller ``cpuset`` has a hierarchy of its own below the root, also where a cgroup2 hierarchy stands
beside it; in v2 the root is the one hierarchy, and only there it has a file ``cgroup.controllers``. A container's
cgroup is named as in the OCI runtime specification (``linux.cgroupsPath``), in one of two ways: a path, or for runtimes
that leave cgroups to systemd ``slice:prefix:name``, where a slice's name tells those above it (systemd.slice(5)).

A pod that is not given the host's cgroups sees its own in their place. So nothing is taken for an answer that is not
found below the very names that the runtime tells.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from fastcpu import CpuSet
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from pathlib import Path

MAX_CGROUPS_PATH: Final = 4096
"""How long the name of a cgroup can be; a path of the kernel's is no longer."""

_MOST_BYTES: Final = 65536  # the longest honest list, every second of 8,192 CPUs, has 20 kB
_PAGE: Final = 4096  # the kernel answers with at least as much, or with the end of the file
_LONGEST_NAME: Final = 255
_DEEPEST: Final = 32
_V2_ROOT: Final = "cgroup.controllers"
_V1_HIERARCHY: Final = "cpuset"
_V1_FILES: Final = ("cpuset.effective_cpus", "cpuset.cpus")
_V2_FILES: Final = ("cpuset.cpus.effective",)
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SLICE: Final = ".slice"
# As the kubelet calls the cgroup of all pods, at the top or, with a ``--cgroup-root``, further down.
_PODS: Final = ("kubepods", "kubepods.slice")
_PODS_SLICE: Final = "-kubepods.slice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a cgroup allows to those in it.

    Attributes
    ----------
    cpus : CpuSet
        The CPUs; never empty.
    cgroup : str
        The cgroup that narrows it so far, as an absolute path in its hierarchy: the uppermost that allows no more.
    """

    cpus: CpuSet
    cgroup: str


class HostCgroups:
    """The host's cgroups, as far as they can be read.

    Nothing is kept of what was read. A look takes tens of microseconds and never waits: cgroup files are made by the
    kernel when they are read.

    Parameters
    ----------
    root : Path
        Where the host's ``/sys/fs/cgroup`` is seen.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root)
        self._seen = False
        self._pods: list[str] = []

    @property
    def readable(self) -> bool:
        """Whether the host's cgroups are what is seen: that of its pods is there, or was a container's."""
        return self._seen or self.pods_limit() is not None

    def cpus(self, cgroups_path: str) -> CpuSet | None:
        """Return the CPUs that the kernel holds a container's cgroup to now.

        Parameters
        ----------
        cgroups_path : str
            ``linux.cgroups_path`` of the container, as the runtime tells it.

        Returns
        -------
        CpuSet or None
            Empty if nobody can run in it; None if that cannot be read.
        """
        names = split_cgroups_path(cgroups_path)
        cpus = self._cpus(names) if names else None
        self._seen |= cpus is not None
        return cpus

    def parent_cpus(self, cgroups_path: str) -> CpuSet | None:
        """Return the CPUs that a container's parent cgroup, that of its pod, allows; None if that cannot be read.

        Parameters
        ----------
        cgroups_path : str
            ``linux.cgroups_path`` of the container. Its own cgroup need not be there yet.
        """
        names = split_cgroups_path(cgroups_path)
        cpus = self._cpus(names[:-1]) if names else None
        if names and cpus:
            self._seen |= len(names) > 1
            self._learn_pods(names[:-1])
        return cpus or None

    def parent_limit(self, cgroups_path: str) -> Limit | None:
        """Return the same with the name of the cgroup that allows no more."""
        names = split_cgroups_path(cgroups_path)
        return self._limit(names[:-1]) if names else None

    def pods_limit(self) -> Limit | None:
        """Return what the cgroup of all pods allows; None if that cannot be read.

        It is the one that the parents of containers lie in, once any was asked for. Until then it is looked for by the
        names that the kubelet gives it; of two, one may be left from other settings, and the wider counts.
        """
        if self._pods:
            return self._limit(self._pods)
        limits = [limit for name in _PODS if (limit := self._limit([name])) is not None]
        return max(limits, key=lambda limit: len(limit.cpus), default=None)

    def is_of_all_pods(self, limit: Limit) -> bool:
        """Tell whether a limit is that of the cgroup of all pods, or of one above it."""
        names = [name for name in limit.cgroup.split("/") if name]
        return self._pods[: len(names)] == names

    # The parts

    def _learn_pods(self, names: list[str]) -> None:
        for depth, name in enumerate(names):
            if name in _PODS or name.endswith(_PODS_SLICE):
                self._pods = names[: depth + 1]
                return

    def _cpus(self, names: list[str]) -> CpuSet | None:
        limit = self._look(names, upwards=False)
        return None if limit is None else limit.cpus

    def _limit(self, names: list[str]) -> Limit | None:
        limit = self._look(names, upwards=True)
        return limit if limit is not None and limit.cpus else None

    def _look(self, names: list[str], *, upwards: bool) -> Limit | None:
        """Return the CPUs of a cgroup; if asked to go upwards with the uppermost that has the same."""
        with suppress(OSError, ValueError), _Folder(self._root) as folder:
            for name in names:
                folder.enter(name)
            depth = len(names)
            cpus = folder.cpus()
            while cpus is None and depth:
                # In cgroup v2 one need not have the controller, and is held to what the next above is held to.
                folder.leave()
                depth -= 1
                cpus = folder.cpus()
            if cpus is None:
                return None
            while upwards and depth:
                folder.leave()
                if folder.cpus() != cpus:
                    break
                depth -= 1
            return Limit(cpus=cpus, cgroup="/" + "/".join(names[:depth]))
        return None


class _Folder:
    """A cgroup's folder, first that of the hierarchy's root. No link is followed on the way down."""

    def __init__(self, root: str) -> None:
        is_v2 = os.access(f"{root}/{_V2_ROOT}", os.F_OK)
        self._files = _V2_FILES if is_v2 else _V1_FILES
        self._descriptor = os.open(root if is_v2 else f"{root}/{_V1_HIERARCHY}", _FOLDER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def enter(self, name: str) -> None:
        """Go into a cgroup of this one."""
        inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._descriptor)
        os.close(self._descriptor)
        self._descriptor = inner

    def leave(self) -> None:
        """Go to the cgroup that this one is in."""
        self.enter("..")

    def cpus(self) -> CpuSet | None:
        """Return the CPUs that its processes are held to; None if no file says so."""
        for name in self._files:
            with suppress(OSError, CpuListError):
                return CpuSet.parse(self._read(name))
        return None

    def _read(self, name: str) -> str:
        # O_NONBLOCK: a named pipe in a copy of a tree must not hold up the reader.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._descriptor)
        try:
            content = chunk = os.read(descriptor, _MOST_BYTES + 1)
            while len(chunk) >= _PAGE and len(content) <= _MOST_BYTES:
                chunk = os.read(descriptor, _MOST_BYTES + 1)
                content += chunk
        finally:
            os.close(descriptor)
        if len(content) > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"Larger than {_MOST_BYTES} bytes", name)
        return content.decode("latin-1").strip()


def split_cgroups_path(text: str) -> list[str] | None:
    """Return the names of a container's cgroup and of those above it, from the hierarchy's root down.

    Parameters
    ----------
    text : str
        ``linux.cgroupsPath`` of an OCI runtime's configuration, whoever wrote it.

    Returns
    -------
    list of str or None
        None if it names no cgroup, or none that one could find: a relative path is below a cgroup that only the runtime
        knows.
    """
    if len(text) > MAX_CGROUPS_PATH or "\0" in text:
        return None
    if text.startswith("/"):
        names = [name for name in text.split("/") if name not in ("", ".")]
    else:
        parts = text.split(":")
        if len(parts) != 3 or not parts[2]:
            return None
        slice_name, prefix, name = parts
        above = _expand_slice(slice_name or "system.slice")
        if above is None:
            return None
        unit = name if name.endswith(_SLICE) else f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
        names = [*above, unit]
    if not names or len(names) > _DEEPEST or not all(_is_name(name) for name in names):
        return None
    return names


def _expand_slice(name: str) -> list[str] | None:
    """Return a slice and those above it, the uppermost first; none for the root's."""
    stem = name.removesuffix(_SLICE)
    if stem == name or len(name) > _LONGEST_NAME:
        return None
    if stem == "-":
        return []
    parts = stem.split("-")
    if not all(parts) or len(parts) > _DEEPEST:
        return None
    return ["-".join(parts[: depth + 1]) + _SLICE for depth in range(len(parts))]


def _is_name(name: str) -> bool:
    return name != ".." and "/" not in name and len(name.encode(errors="replace")) <= _LONGEST_NAME
