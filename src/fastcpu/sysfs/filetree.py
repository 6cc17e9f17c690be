# SPDX-License-Identifier: Apache-2.0
"""File trees: the part of a file system that a reader of sysfs needs.

`FileTree` is the interface: the text of a file, the names in a folder. Paths are absolute ``/sys/...`` paths, wherever
the tree lies. `SysfsTree` reads a folder of the file system. `OverlaidTree` lays texts over another tree, so that a
machine can be completed or invented. A file that cannot be read counts as absent: sysfs files come and go with CPUs
(``ENOENT``, ``ENODEV``), give no answer while a CPU goes offline (``EINVAL``), or belong to root (``EACCES``).
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

__all__ = [
    "CACHE_SHARERS",
    "CORE_MEMBERS",
    "DIE_MEMBERS",
    "MAX_FILE_SIZE",
    "NODE_MEMBERS",
    "PACKAGE_MEMBERS",
    "FileTree",
    "OverlaidTree",
    "SysfsTree",
    "open_tree",
]

# The longest file that a kernel writes is a list of every second of 8,192 CPUs, 20 kB.
MAX_FILE_SIZE: Final = 65536

# sysfs answers with whole pages of 4 KiB or more; a shorter answer is the end of the file.
_PAGE: Final = 4096

# Files of one folder with the same meaning, the preferred first: lists before masks, the names of Linux 5.3 and later
# before older ones (Documentation/ABI/stable/sysfs-devices-system-cpu).
PACKAGE_MEMBERS: Final = ("package_cpus_list", "core_siblings_list", "package_cpus", "core_siblings")
CORE_MEMBERS: Final = ("core_cpus_list", "thread_siblings_list", "core_cpus", "thread_siblings")
DIE_MEMBERS: Final = ("die_cpus_list", "die_cpus")
CACHE_SHARERS: Final = ("shared_cpu_list", "shared_cpu_map")
NODE_MEMBERS: Final = ("cpulist", "cpumap")

_PREFERENCES: Final = (
    (*PACKAGE_MEMBERS, "physical_package_id"),
    (*CORE_MEMBERS, "core_id"),
    (*DIE_MEMBERS, "die_id"),
    (*CACHE_SHARERS, "id"),
    NODE_MEMBERS,
)


class FileTree(Protocol):
    """Where files are read from."""

    def read(self, path: str) -> str | None:
        """Return the text of a file, or None if it cannot be read.

        A text longer than ``MAX_FILE_SIZE`` characters may be cut anywhere beyond that.
        """

    def entries(self, path: str) -> Sequence[str]:
        """Return the names in a folder in any order; none if it cannot be read."""


class SysfsTree:
    """A folder of the file system, usually ``/sys`` itself.

    Parameters
    ----------
    root : path
        The folder that stands for ``/sys``.
    """

    def __init__(self, root: str | os.PathLike[str] = "/sys") -> None:
        self._root = os.fspath(root).rstrip("/")

    def read(self, path: str) -> str | None:
        """Return the text of a file, or None if it cannot be read."""
        try:
            # O_NONBLOCK: a named pipe in a recorded tree must not block the reader.
            descriptor = os.open(self._root + path.removeprefix("/sys"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            data = chunk = os.read(descriptor, MAX_FILE_SIZE + 1)
            while len(chunk) >= _PAGE and len(data) <= MAX_FILE_SIZE:
                chunk = os.read(descriptor, MAX_FILE_SIZE + 1)
                data += chunk
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return data.decode("latin-1")

    def entries(self, path: str) -> Sequence[str]:
        """Return the names in a folder; none if it cannot be read."""
        try:
            return os.listdir(self._root + path.removeprefix("/sys"))
        except OSError:
            return ()


class OverlaidTree:
    """A tree with texts laid over it, for files and folders that may or may not exist in the tree below.

    An overlaid file also hides the files beside it in the tree below that have the same meaning and that a reader would
    prefer: ``core_siblings_list`` hides ``package_cpus_list``, and ``physical_package_id`` hides each list of the
    package's CPUs. So an overlay decides, whichever of the names it uses.

    Parameters
    ----------
    base : FileTree
        The tree below.
    texts : mapping of str to str
        The text of each file by its absolute ``/sys/...`` path; copied.

    Raises
    ------
    ValueError
        If a path is not absolute, not below ``/sys``, not in its shortest form, or both a file and a folder.

    Examples
    --------
    >>> tree = OverlaidTree(SysfsTree("/no-such-folder"), {"/sys/devices/system/cpu/online": "0-3"})
    >>> tree.read("/sys/devices/system/cpu/online"), tree.read("/sys/devices/system/cpu/present")
    ('0-3', None)
    >>> tree.entries("/sys/devices/system")
    ['cpu']
    """

    def __init__(self, base: FileTree, texts: Mapping[str, str]) -> None:
        self._base = base
        self._texts = dict(texts)
        self._folders: dict[str, set[str]] = {}
        for path in self._texts:
            if not path.startswith("/sys/") or posixpath.normpath(path) != path or "\0" in path:
                raise ValueError(f"overlay path {path!r} is not an absolute path below /sys in its shortest form")
            while path != "/sys":
                path, name = posixpath.split(path)
                self._folders.setdefault(path, set()).add(name)
        for path in self._texts:
            if path in self._folders:
                raise ValueError(f"overlay path {path!r} is both a file and a folder")
        self._hidden = frozenset(path for text_path in self._texts for path in _preferred(text_path))

    def read(self, path: str) -> str | None:
        """Return the overlaid text, else the one of the tree below, or None."""
        text = self._texts.get(path)
        if text is not None or path in self._hidden:
            return text
        return self._base.read(path)

    def entries(self, path: str) -> Sequence[str]:
        """Return the names in the folder, overlaid ones among them."""
        return [*{*self._base.entries(path), *self._folders.get(path, ())}]


def _preferred(path: str) -> Iterator[str]:
    """Yield the files beside this one that have the same meaning and that a reader prefers."""
    folder, name = posixpath.split(path)
    for names in _PREFERENCES:
        if name in names:
            yield from (f"{folder}/{other}" for other in names[: names.index(name)])


def open_tree(root: str | os.PathLike[str] | FileTree, overlay: Mapping[str, str] | None) -> FileTree:
    """Return the tree at a root, a folder or already a tree, under an overlay if there is one."""
    tree = SysfsTree(root) if isinstance(root, (str, os.PathLike)) else root
    return OverlaidTree(tree, overlay) if overlay else tree
