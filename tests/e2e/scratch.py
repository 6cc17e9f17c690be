# SPDX-License-Identifier: Apache-2.0
"""Folders that real programs run in, and how nothing of them is left in the end.

What belongs to a folder are the processes that carry its name in their environment, the containers in the cgroup that
is named after it, and all that they have mounted or left elsewhere on the machine. So several may be in use at once,
and what a test run leaves that is killed itself can be found by the next one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Short, for sockets; with the process id of the tests, so that others can tell whether it is in use.
_FOLDERS = Path("/tmp")
_PREFIX = "dracpu-e2e-"
_MARK = "DRACPU_E2E_FOLDER"
_CGROUPS = Path("/sys/fs/cgroup")
# The kubelet has one place for links to logs, whatever else it is told.
_LOG_LINKS = Path("/var/log/containers")
_END_S = 20.0


def new_folder() -> Path:
    """Make a folder that belongs to this process."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_FOLDERS))


def mark(folder: Path) -> dict[str, str]:
    """Return what a process needs in its environment to belong to a folder, or to one that contains it."""
    return {_MARK: str(folder)}


def cgroup_parent(folder: Path) -> str:
    """Return the cgroup in which all containers of a folder have to be."""
    return f"/{folder.relative_to(_FOLDERS)}"


def cgroup_hierarchies() -> list[Path]:
    """Return where cgroups are mounted: one place, or one for each controller in version 1."""
    places = [_CGROUPS] if (_CGROUPS / "cgroup.procs").exists() else _CGROUPS.iterdir()
    return [path for path in places if (path / "cgroup.procs").exists() and not path.is_symlink()]


def remove_leftovers() -> None:
    """Remove what earlier runs have left that were killed before they could clean up."""
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        owner = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", folder.name)
        if owner is not None and not Path("/proc", owner[1]).exists():
            remove(folder)


def leftovers(folder: Path) -> list[str]:
    """Return what is there because of a folder: processes, mounts, cgroups, links, the folder itself."""
    return [
        *(f"process {pid}" for pid in processes(folder)),
        *(f"mount {point}" for point in _mounts(folder)),
        *(f"cgroup {path}" for path in _cgroups(folder)),
        *(f"link {path}" for path in _log_links(folder)),
        *([str(folder)] if folder.exists() else []),
    ]


def clear(folder: Path) -> None:
    """End and remove all that belongs to a folder, but leave its files.

    Raises
    ------
    RuntimeError
        If some processes do not end.
    """
    deadline = time.monotonic() + _END_S
    while found := set(processes(folder)):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {sorted(found)} of {folder} do not end")
        time.sleep(0.02)
    for point in _mounts(folder):
        subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)
    for path in _cgroups(folder):
        _remove_cgroup(path, deadline)
    for path in (*_shim_sockets(folder), *_log_links(folder)):
        path.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove a folder and all that belongs to it."""
    clear(folder)
    with suppress(FileNotFoundError):  # others may clean up after the same dead run
        shutil.rmtree(folder)


def processes(folder: Path) -> Iterator[int]:
    """Find all processes of a folder: what was started there, what that has started, and those of all containers."""
    name = f"{_MARK}={folder}".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):
                variables = Path(entry.path, "environ").read_bytes().split(b"\0")
                if any(variable == name or variable.startswith(name + b"/") for variable in variables):
                    yield int(entry.name)
    for path in _cgroups(folder):
        with suppress(OSError):
            yield from map(int, (path / "cgroup.procs").read_text().split())


def _mounts(folder: Path) -> list[str]:
    """Return the mount points in a folder, the innermost first."""
    points = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in reversed(points) if point.startswith(f"{folder}/")]


def _cgroups(folder: Path) -> list[Path]:
    """Return the cgroups of a folder in all hierarchies, the innermost first."""
    found = []
    for root in cgroup_hierarchies():
        for path, _, _ in os.walk(root / cgroup_parent(folder).lstrip("/"), topdown=False):
            found.append(Path(path))
    return found


def _remove_cgroup(path: Path, deadline: float) -> None:
    # The kernel may need a moment after the last process of a cgroup has ended.
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _shim_sockets(folder: Path) -> Iterator[Path]:
    """Find the sockets of shims, which lie in a folder of the whole machine."""
    for depth in ("", "*/"):
        for path in folder.glob(f"{depth}state/io.containerd.runtime.v2.task/*/*/bootstrap.json"):
            with suppress(OSError, ValueError, KeyError):
                yield Path(json.loads(path.read_bytes())["address"].removeprefix("unix://"))


def _log_links(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in _LOG_LINKS.iterdir() if str(path.readlink()).startswith(f"{folder}/")]
    return []
