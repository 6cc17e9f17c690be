# SPDX-License-Identifier: Apache-2.0
"""A private containerd: everything it has lies in one folder, and nothing of it is left in the end.

Several run side by side, beside the machine's own too: sockets, state, runc's state and the parent of all cgroups are
each one's own. Containers and their shims outlive a containerd on purpose, so they are looked for when it is taken
down, also those of an earlier run that was killed itself.
"""

from __future__ import annotations

import asyncio
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

from e2e.images import IMAGE, write_archive

# Short, for sockets; with the process id of the tests, so that others can tell whether it is in use.
_FOLDERS = Path("/tmp")
_PREFIX = "dracpu-e2e-"
_CGROUPS = Path("/sys/fs/cgroup")
_START_S = 60.0
_END_S = 20.0

_CONFIG = """\
version = 3
root = "{folder}/root"
state = "{folder}/state"

[grpc]
  address = "{folder}/containerd.sock"

[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"

[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = "{folder}/nri.sock"
  plugin_path = "{folder}/nri-plugins"
  plugin_config_path = "{folder}/nri-conf"
{validator}
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{image}"

[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  cdi_spec_dirs = ["{cdi_dir}"]
  # Lowering a score takes a right that not even root has everywhere.
  restrict_oom_score_adj = true

  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{folder}/cni"]
    conf_dir = "{folder}/cni"

  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"

    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
      Root = "{folder}/runc"
"""


class Containerd:
    """One containerd; an asynchronous context manager that starts it and leaves nothing behind.

    Parameters
    ----------
    programs : Path
        The folder with containerd, its shim and ctr.
    cdi_dir : Path
        Where it looks for CDI specs.
    settings : str
        Further settings of NRI, as TOML: the documented ones that make plugins required.

    Attributes
    ----------
    folder : Path
        Holds all of it.
    socket, nri_socket : Path
    cgroup_parent : str
        The parent of all pods' cgroups.
    log_path : Path
    """

    def __init__(self, programs: Path, cdi_dir: Path, *, settings: str = "") -> None:
        self._programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_FOLDERS))
        self._process: asyncio.subprocess.Process | None = None
        self.socket = self.folder / "containerd.sock"
        self.nri_socket = self.folder / "nri.sock"
        self.cgroup_parent = f"/{self.folder.name}"
        self.log_path = self.folder / "containerd.log"
        text = _CONFIG.format(folder=self.folder, image=IMAGE, cdi_dir=cdi_dir, validator=settings)
        (self.folder / "containerd.toml").write_text(text)

    async def __aenter__(self) -> Containerd:
        try:
            await self.start()
            archive = self.folder / "image.tar"
            await asyncio.to_thread(write_archive, archive)
            await self._ctr("images", "import", str(archive))
        except BaseException:
            await self.destroy()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.destroy()

    @property
    def log(self) -> str:
        """All that it has written so far."""
        return self.log_path.read_text(errors="replace")

    async def start(self) -> None:
        """Start it, also after it was stopped or killed, and wait until it serves.

        Raises
        ------
        RuntimeError
            If it ends instead; the text has the end of its log.
        TimeoutError
            If it does neither.
        """
        environment = {"PATH": f"{self._programs}:{os.environ.get('PATH', os.defpath)}", "HOME": "/root"}
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                self._programs / "containerd",
                f"--config={self.folder / 'containerd.toml'}",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        async with asyncio.timeout(_START_S):
            while not await self._serves():
                if self._process.returncode is not None:
                    tail = "\n".join(self.log.splitlines()[-10:])
                    raise RuntimeError(f"containerd ended with status {self._process.returncode}:\n{tail}")
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End it in good order; its containers run on."""
        await self._end(signal.SIGTERM)

    async def kill9(self) -> None:
        """End it without a warning; its containers run on."""
        await self._end(signal.SIGKILL)

    async def destroy(self) -> None:
        """End it with all its containers, and remove all that it has made."""
        await self.kill9()
        if self.folder.exists():
            await asyncio.to_thread(_remove, self.folder)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(number)
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _serves(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(self.socket)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True

    async def _ctr(self, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(
            self._programs / "ctr",
            f"--address={self.socket}",
            "--namespace=k8s.io",
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"ctr {' '.join(arguments)}: {output.decode(errors='replace')}")


def remove_leftovers() -> None:
    """Remove what earlier runs have left that were killed before they could clean up."""
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        owner = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", folder.name)
        if owner is not None and not Path("/proc", owner[1]).exists():
            _remove(folder)


def leftovers(folder: Path) -> list[str]:
    """Return what is there because of a containerd's folder: processes, mounts, cgroups, sockets, the folder itself."""
    return [
        *(f"process {pid}" for pid in _processes(folder)),
        *(f"mount {point}" for point in _mounts(folder)),
        *(f"cgroup {path}" for path in _cgroups(folder)),
        *([str(folder)] if folder.exists() else []),
    ]


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _END_S
    while processes := set(_processes(folder)):
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {sorted(processes)} of {folder} do not end")
        time.sleep(0.02)
    for point in _mounts(folder):
        subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)
    for path in _cgroups(folder):
        _remove_cgroup(path, deadline)
    for path in _shim_sockets(folder):
        path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # others may clean up after the same dead run
        shutil.rmtree(folder)


def _processes(folder: Path) -> Iterator[int]:
    """Find all processes of a containerd: itself, its shims, its driver, and those of all containers."""
    arguments = {
        f"--config={folder}/containerd.toml".encode(),
        f"{folder}/containerd.sock".encode(),
        f"--nri-socket={folder}/nri.sock".encode(),
    }
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):
                if not arguments.isdisjoint(Path(entry.path, "cmdline").read_bytes().split(b"\0")):
                    yield int(entry.name)
    for path in _cgroups(folder):
        with suppress(OSError):
            yield from map(int, (path / "cgroup.procs").read_text().split())


def _mounts(folder: Path) -> list[str]:
    """Return the mount points in a folder, the innermost first."""
    points = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in reversed(points) if point.startswith(f"{folder}/")]


def _cgroups(folder: Path) -> list[Path]:
    """Return the cgroups below the parent that is named after a folder, in all hierarchies, the innermost first."""
    roots = [_CGROUPS, *(path for path in _CGROUPS.iterdir() if path.is_dir() and not path.is_symlink())]
    found = []
    for root in roots:
        for path, _, _ in os.walk(root / folder.name, topdown=False):
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
    for path in folder.glob("state/io.containerd.runtime.v2.task/*/*/bootstrap.json"):
        with suppress(OSError, ValueError, KeyError):
            yield Path(json.loads(path.read_bytes())["address"].removeprefix("unix://"))
