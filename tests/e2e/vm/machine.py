# SPDX-License-Identifier: Apache-2.0
"""A machine of 16 CPUs with a real kernel, in software: QEMU, without the help of the host's processor.

2 sockets, 4 NUMA nodes of 4 CPUs, cores of 2 threads; cgroups of version 2, and all rights. An agent in the guest opens
a connection to this process once the kernel is up; what tests ask for goes over it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from e2e.vm import changes

# What the guest sees of this machine's loopback address.
HOST = "10.0.2.2"

_NODES = 4
_CPUS_PER_NODE = 4
_SMP = "16,sockets=2,cores=4,threads=2"
# The instructions of x86-64-v2, which the driver and NumPy need; what is newer costs more to emulate.
_MODEL = "Nehalem-v1"
_BOOT_S = 300.0
_CALL_S = 900.0
_LONGEST_ANSWER_BYTES = 1 << 26


class GuestError(Exception):
    """Something failed in the guest; the text is the guest's."""


class VirtualMachine:
    """One machine; an asynchronous context manager that boots it, and leaves nothing behind.

    Parameters
    ----------
    base : Path
        What `e2e.vm.disk.base` has built.
    *kernel_arguments : str
        Further arguments on the kernel's command line.

    Attributes
    ----------
    console_path : Path
        What the kernel has said.
    """

    def __init__(self, base: Path, *kernel_arguments: str) -> None:
        self._base = base
        self._kernel_arguments = kernel_arguments
        self._folder = Path(tempfile.mkdtemp(prefix="dracpu-vm-"))
        self.console_path = self._folder / "console.log"
        self._process: asyncio.subprocess.Process | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter
        self._connected = asyncio.Event()

    async def __aenter__(self) -> VirtualMachine:
        try:
            await self._boot()
        except BaseException:
            await self.destroy()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.destroy()

    async def call(self, function: str, /, **arguments: object) -> Any:
        """Call a function of `guest/observe.py` or `guest/processes.py` in the guest, and return its result.

        Raises
        ------
        GuestError
            If it fails there.
        TimeoutError
            If it takes too long.
        """
        request = next(self._ids)
        self._waiting[request] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": request, "call": function, "arguments": arguments})
        self._writer.write(line.encode() + b"\n")
        try:
            async with asyncio.timeout(_CALL_S):
                return await self._waiting[request]
        finally:
            del self._waiting[request]

    async def run(self, *argv: str, stdin: str = "") -> str:
        """Run a program in the guest to its end, and return its output.

        Raises
        ------
        GuestError
            If its status is not 0.
        """
        ended = await self.call("run", argv=argv, stdin=stdin)
        if ended["status"] != 0:
            raise GuestError(f"{' '.join(argv)} ended with {ended['status']}: {ended['stdout']}{ended['stderr']}")
        return str(ended["stdout"])

    async def destroy(self) -> None:
        """Switch it off, and remove what was written."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _boot(self) -> None:
        changing = self._folder / "changes.tar"
        await asyncio.to_thread(changes.write_disk, changing)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_LONGEST_ANSWER_BYTES)
        port = server.sockets[0].getsockname()[1]
        with self.console_path.open("wb") as console:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(changing, f"{HOST}:{port}"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=console,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                # Where the changes to the disk are kept while it runs.
                env={"TMPDIR": str(self._folder), "PATH": "/usr/bin:/bin"},
            )
        ended = asyncio.create_task(self._process.wait())
        connected = asyncio.create_task(self._connected.wait())
        await asyncio.wait((ended, connected), timeout=_BOOT_S, return_when=asyncio.FIRST_COMPLETED)
        server.close()
        ended.cancel()
        connected.cancel()
        if not self._connected.is_set():
            said = "\n".join(self.console_path.read_text(errors="replace").splitlines()[-30:])
            raise GuestError(f"the virtual machine has not come up in {_BOOT_S:g} s; its console says:\n{said}")

    def _command(self, changing: Path, agent: str) -> Sequence[str]:
        # Every other clock is a device that one CPU at a time may ask, and the kernel would distrust this one.
        clock = ("tsc=reliable", "clocksource=tsc")
        kernel = ("console=ttyS0", "quiet", "panic=1", "mitigations=off", *clock, f"DRACPU_AGENT={agent}")
        nodes = []
        for node in range(_NODES):
            first = node * _CPUS_PER_NODE
            nodes += ["-object", f"memory-backend-ram,id=m{node},size=1G"]
            nodes += ["-numa", f"node,nodeid={node},memdev=m{node},cpus={first}-{first + _CPUS_PER_NODE - 1}"]
        return [
            "qemu-system-x86_64",
            *("-accel", "tcg,thread=multi", "-cpu", _MODEL, "-smp", _SMP, "-m", f"{_NODES}G", *nodes),
            *("-kernel", str(self._base / "vmlinuz"), "-initrd", str(self._base / "initrd.gz")),
            *("-append", " ".join((*kernel, *self._kernel_arguments))),
            # What is written is gone in the end, so nobody has to wait until it is on a disk.
            *("-drive", f"file={self._base / 'root.img'},if=virtio,format=raw,snapshot=on,cache=unsafe"),
            *("-drive", f"file={changing},if=virtio,format=raw,readonly=on"),
            *("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="),
            *("-display", "none", "-serial", "stdio", "-monitor", "none", "-no-reboot"),
        ]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._connected.set()
        while line := await reader.readline():
            answer = json.loads(line)
            waiting = self._waiting.get(answer["id"])
            if waiting is None or waiting.done():
                continue  # whoever asked has given up
            if "error" in answer:
                waiting.set_exception(GuestError(answer["error"]))
            else:
                waiting.set_result(answer["result"])
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(GuestError("the virtual machine is gone"))
        writer.close()
