# SPDX-License-Identifier: Apache-2.0
"""A private containerd: everything it has lies in one folder, and nothing of it is left in the end.

Several run side by side, beside the machine's own too: sockets, state, runc's state and the parent of all cgroups are
each one's own. Containers and their shims outlive a containerd on purpose, so they go with the folder.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from e2e import scratch, waiting
from e2e.command import call
from e2e.images import IMAGE, write_archive
from e2e.program import Program

_DUMP_S = 30.0
# The last that it says of it.
_DUMPED = "goroutine stack dump written to"

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
  socket_path = "{nri_socket}"
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
    folder : Path, optional
        A folder of `scratch`, or one below it, that this one may have for itself.
    cpus : str
        The CPUs that it may run on itself, as systemd's ``CPUAffinity=`` has it; empty for all.

    Attributes
    ----------
    folder : Path
        Holds all of it.
    socket, nri_socket : Path
        The latter in a folder of its own, which containers of plugins can mount.
    cgroup_parent : str
        The parent of all pods' cgroups.
    log_path : Path
    """

    def __init__(
        self, programs: Path, cdi_dir: Path, *, settings: str = "", folder: Path | None = None, cpus: str = ""
    ) -> None:
        self._programs = programs
        self.folder = scratch.new_folder() if folder is None else folder
        self.socket = self.folder / "containerd.sock"
        self.nri_socket = self.folder / "nri" / "nri.sock"
        self.cgroup_parent = scratch.cgroup_parent(self.folder)
        self.log_path = self.folder / "containerd.log"
        affinity = ("taskset", "--cpu-list", cpus) if cpus else ()
        self._program = Program(
            (*affinity, programs / "containerd", f"--config={self.folder / 'containerd.toml'}"),
            self.log_path,
            self._serves,
            {
                "PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}",
                "HOME": "/root",
                "TMPDIR": str(self.folder),
                **scratch.mark(self.folder),
            },
        )
        text = _CONFIG.format(
            folder=self.folder, nri_socket=self.nri_socket, image=IMAGE, cdi_dir=cdi_dir, validator=settings
        )
        (self.folder / "containerd.toml").write_text(text)

    async def __aenter__(self) -> Containerd:
        try:
            await self.start()
            await self.import_image(write_archive)
        except BaseException:
            await self.destroy()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.destroy()

    @property
    def pid(self) -> int:
        """The id of its process; valid once started."""
        return self._program.pid

    @property
    def log(self) -> str:
        """All that it has written so far."""
        return self._program.log

    @property
    def was_pushed_to(self) -> bool:
        """Whether a plugin has ever had containers updated outside of an event."""
        return "requested container updates" in self.log

    async def start(self) -> None:
        """Start it, also after it was stopped or killed, and wait until it serves.

        Raises
        ------
        RuntimeError
            If it ends or does not serve; the text has the end of its log.
        """
        await self._program.start()

    async def stop(self) -> None:
        """End it in good order; its containers run on."""
        await self._program.stop()

    async def kill9(self) -> None:
        """End it without a warning; its containers run on."""
        await self._program.kill9()

    async def goroutines(self) -> str:
        """Return what each of its goroutines does, as Go's runtime writes it; it answers although all of them wait.

        Raises
        ------
        AssertionError
            If it does not write that.
        """
        path = self.folder / f"containerd.{self.pid}.stacks.log"
        path.unlink(missing_ok=True)
        said = self.log.count(_DUMPED)
        os.kill(self.pid, signal.SIGUSR1)

        async def written() -> bool:
            return self.log.count(_DUMPED) > said

        await waiting.until(written, f"goroutines in {path}", _DUMP_S, pause_s=0.05)
        return path.read_text()

    async def import_image(self, archive: Path | Callable[[Path], None]) -> None:
        """Make an image known to it.

        Parameters
        ----------
        archive : Path or callable
            An archive of an image, or what writes one to a path.
        """
        if not isinstance(archive, Path):
            write, archive = archive, self.folder / "image.tar"
            await asyncio.to_thread(write, archive)
        await self.ctr("images", "import", str(archive))

    async def ctr(self, *arguments: str) -> str:
        """Call ctr, and return what it prints.

        Raises
        ------
        RuntimeError
            If it fails; the text has what it printed.
        """
        return await call((self._programs / "ctr", f"--address={self.socket}", "--namespace=k8s.io"), arguments)

    async def destroy(self) -> None:
        """End it with all its containers, and remove all that it has made."""
        await self.kill9()
        if self.folder.exists():
            await asyncio.to_thread(scratch.remove, self.folder)

    async def _serves(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(self.socket)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True
