# SPDX-License-Identifier: Apache-2.0
"""The node that a driver finds: a machine, a kubelet, a container runtime, and the driver's own process."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.names import DRIVER_NAME
from driver.sandbox.cdidevices import CdiDevices
from driver.sandbox.kubelet import Kubelet
from driver.sandbox.machine import MachineShape, write_machine
from driver.sandbox.offers import default_reserved
from driver.sandbox.plugins import Plugin
from driver.sandbox.ports import reserved_port
from driver.sandbox.runtime import ContainerRuntime
from fastcpu import read_topology
from loadgenerator.apiserver import Api
from loadgenerator.options import Options

_START_S = 60.0
# On a node the CDI specs are below /run, which is in memory.
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
_TICKS = os.sysconf("SC_CLK_TCK")
_KIB = 1024


class DriverEndedError(Exception):
    """The driver ended by itself; the text is the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A driver that is ready.

    Attributes
    ----------
    plugin : Plugin
        Its registration.
    slices : list of dict
        What it published.
    registered_s, published_s : float
        How long after its start it was registered, and all its slices were accepted.
    """

    plugin: Plugin
    slices: list[dict[str, Any]]
    registered_s: float
    published_s: float


class DriverProcess:
    """The driver as the operating system sees it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def resident_mb(self) -> float:
        """The memory that it occupies now, in MB of 10⁶ bytes."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["VmRSS"].split()[0]) * _KIB / 1e6

    @property
    def cpu_s(self) -> float:
        """The CPU time that it has had so far, of all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    async def ended(self) -> None:
        """Wait for its end, which is always too early."""
        status = await self._process.wait()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        raise DriverEndedError(f"the driver ended with status {status}:\n{tail}")

    async def stop(self) -> None:
        """End it as the kubelet ends a pod, only sooner."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class Node:
    """One node; `open` makes it."""

    def __init__(
        self, options: Options, cpus: int, folder: Path, cdi_dir: Path, api: Api, kubeconfig: Path, port: int
    ) -> None:
        self._options = options
        self._port = port
        self._folder = folder
        self._api = api
        self._kubeconfig = kubeconfig
        self.name = f"load-{os.getpid()}-{cpus}"
        self.sysfs_root = folder / "sys" if cpus else Path("/sys")
        self.cdi_dir = options.cdi_dir or cdi_dir
        if cpus:
            sockets = 2 if cpus % 4 == 0 else 1
            write_machine(self.sysfs_root, MachineShape(cpus=cpus, sockets=sockets, numa_nodes=sockets))
        self.cdi_dir.mkdir(parents=True, exist_ok=True)
        self._topology = read_topology(self.sysfs_root)
        self._kubelet = Kubelet(options.kubelet_root or folder / "kubelet")
        (folder / "nri").mkdir()
        self._runtime = ContainerRuntime(
            folder / "nri" / "nri.sock", online=self._topology.online, inject=CdiDevices(self.cdi_dir).inject
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, options: Options, cpus: int, api: Api, kubeconfig: Path) -> AsyncIterator[Node]:
        """Make a node with so many CPUs, or with this machine's if 0, and take it down again."""
        async with AsyncExitStack() as stack:
            folder, cdi_dir = (
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="load-", dir=place)))
                for place in (None, _MEMORY)
            )
            port = stack.enter_context(reserved_port())
            node = cls(options, cpus, folder, cdi_dir, api, kubeconfig, port)
            await api.create_node(node.name)
            stack.push_async_callback(api.forget_node, node.name)
            await stack.enter_async_context(node._kubelet)
            await stack.enter_async_context(node._runtime)
            for number in range(options.containers):
                pod = nri.PodSandbox(
                    id=f"{number:064x}", uid=f"pod-{number}", name=f"pod-{number}", namespace="default"
                )
                await node._runtime.run_pod(pod)
                container = nri.Container(id=f"{number + (1 << 64):064x}", pod_sandbox_id=pod.id, name="main")
                await node._runtime.create_container(container)
                await node._runtime.start_container(container.id)
            yield node

    @asynccontextmanager
    async def driver(self) -> AsyncIterator[tuple[DriverProcess, Started]]:
        """Start the driver, wait until it is ready, and end it again.

        Raises
        ------
        DriverEndedError
            If it ends by itself.
        """
        log = self._folder / "driver.log"
        published = asyncio.create_task(self._published())
        started_at = time.monotonic()
        with log.open("ab") as output:
            process = DriverProcess(
                await asyncio.create_subprocess_exec(
                    *self._command(), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
                ),
                log,
            )
        ended = asyncio.create_task(process.ended())
        ready = asyncio.gather(self._kubelet.wait_registered(DRIVER_NAME, _START_S, since=started_at), published)
        try:
            await asyncio.wait((ended, ready), return_when=asyncio.FIRST_COMPLETED, timeout=_START_S)
            if ended.done():
                ended.result()
            plugin, (published_at, slices) = await ready
            async with asyncio.timeout(_START_S):
                if any("{nri_socket}" in part for part in self._options.command):
                    await self._runtime.synchronized()
            yield (
                process,
                Started(
                    plugin=plugin,
                    slices=slices,
                    registered_s=plugin.registered_at - started_at,
                    published_s=published_at - started_at,
                ),
            )
        finally:
            for waiting in (ended, ready):
                waiting.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)
            await process.stop()

    async def wipe(self) -> None:
        """Delete the slices, as the kubelet does 30 seconds after a driver has gone."""
        await self._api.forget_node(self.name)
        await self._api.create_node(self.name)

    async def _published(self) -> tuple[float, list[dict[str, Any]]]:
        slices = await self._api.wait_published(self.name)
        return time.monotonic(), slices

    def _command(self) -> list[str]:
        reserved = str(default_reserved(self._topology))
        config = self._folder / "config.yaml"
        config.write_text(
            yaml.safe_dump({"allocator": "external", "hostnameOverride": self.name, "reservedCPUs": reserved})
        )
        places = {
            "config": config,
            "reserved": reserved,
            "node": self.name,
            "kubeconfig": self._kubeconfig,
            "kubelet_root": self._kubelet.root,
            "cdi_dir": self.cdi_dir,
            "sysfs_root": self.sysfs_root,
            "nri_socket": self._runtime.socket_path,
            "port": self._port,
        }
        return [part.format_map(places) for part in self._options.command]
