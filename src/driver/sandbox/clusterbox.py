# SPDX-License-Identifier: Apache-2.0
"""The one-node cluster: API server, kubelet, container runtime and machine in one folder, driver processes beside."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import yaml

from driver.config import MAX_SOCKET_PATH_BYTES
from driver.names import CDI_KIND, CPUSET_VARIABLE_PREFIX, DRIVER_NAME
from driver.sandbox.apiserver import ApiServer
from driver.sandbox.apistatus import JsonObject
from driver.sandbox.cdidevices import CdiDevices
from driver.sandbox.cgrouptree import CgroupTree
from driver.sandbox.driverprocess import DriverProcess
from driver.sandbox.guardmodel import run_guard_hooks
from driver.sandbox.kinds import DEVICE_CLASSES, NODES, RESOURCE_SLICES
from driver.sandbox.kubelet import Kubelet
from driver.sandbox.machine import MachineShape, write_machine
from driver.sandbox.nriplugin import RuntimeTraits
from driver.sandbox.plugins import KubeletError, Plugin
from driver.sandbox.ports import reserved_port
from driver.sandbox.runtime import ContainerRuntime
from fastcpu.cpuset import CpuSet
from fastcpu.sysfs import read_topology

# What of a socket's path comes after the box's folder, with room to spare.
_PATH_RESERVE: Final = 60
_SHOWN_LOG_LINES: Final = 20
_DEFAULT_TRAITS: Final = RuntimeTraits()


class ClusterBox:
    """Runs everything around the driver; an asynchronous context manager that leaves nothing behind.

    Parameters
    ----------
    node_name : str
        Name of the one node.
    sysfs_root : Path, optional
        The machine; by default one is generated.
    shape : MachineShape, optional
        The shape of the generated machine.
    cgroup_version : int
        Of the container runtime's cgroups.
    gates : collection of str
        Feature gates of the API server.
    traits : RuntimeTraits
        What the container runtime says of itself, and what it demands of the driver.
    wipe_after_s : float
        How long a driver may be without a connection before the kubelet deletes its slices.
    say : callable, optional
        Called with one line for each thing that the kubelet or the container runtime does.

    Attributes
    ----------
    folder : Path
        Holds all of it; short enough for socket paths.
    api : ApiServer
    kubelet : Kubelet
    runtime : ContainerRuntime
        Valid once the box is entered.
    sysfs_root, cdi_dir, cgroup_root, kubeconfig : Path
    cgroups : CgroupTree
        Valid once the box is entered.
    published_at : float
        `time.monotonic()` of when `wait_published` last saw all slices.
    """

    def __init__(
        self,
        *,
        node_name: str = "test-node",
        sysfs_root: Path | None = None,
        shape: MachineShape | None = None,
        cgroup_version: int = 2,
        gates: Collection[str] = (),
        traits: RuntimeTraits = _DEFAULT_TRAITS,
        wipe_after_s: float = 30.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.node_name = node_name
        self.folder = _short_folder()
        self.api = ApiServer(gates=gates)
        self.kubelet = Kubelet(
            self.folder / "kubelet", wipe_slices=self._wipe_slices, wipe_after_s=wipe_after_s, say=say
        )
        self.cdi_dir = self.folder / "cdi"
        self.cgroup_root = self.folder / "cgroup"
        self.kubeconfig = self.folder / "kubeconfig"
        self.sysfs_root = self.folder / "sys" if sysfs_root is None else sysfs_root
        self._say = say
        self._traits = traits
        self._generated = shape if sysfs_root is not None or shape is not None else MachineShape()
        self._cgroup_version = cgroup_version
        self.cgroups: CgroupTree
        self.runtime: ContainerRuntime
        self.published_at = 0.0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ClusterBox:
        async with AsyncExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            if self._generated is not None:
                write_machine(self.sysfs_root, self._generated)
            self.cdi_dir.mkdir()
            (self.folder / "nri").mkdir()
            await stack.enter_async_context(self.api)
            self.api.write_kubeconfig(self.kubeconfig)
            self.api.create(NODES, {"metadata": {"name": self.node_name}})
            selector = {"cel": {"expression": f'device.driver == "{DRIVER_NAME}"'}}
            self.api.create(DEVICE_CLASSES, {"metadata": {"name": DRIVER_NAME}, "spec": {"selectors": [selector]}})
            await stack.enter_async_context(self.kubelet)
            online = read_topology(self.sysfs_root).online
            self.cgroups = CgroupTree(self.cgroup_root, online, self._cgroup_version)
            self.runtime = ContainerRuntime(
                self.folder / "nri" / "nri.sock",
                traits=self._traits,
                online=online,
                inject=CdiDevices(self.cdi_dir).inject,
                run_hooks=run_guard_hooks,
                cgroups=self.cgroups,
                say=self._say,
            )
            await stack.enter_async_context(self.runtime)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def reserve_port(self) -> int:
        """Return a port of the loopback address that nobody else is given until the box ends."""
        return self._stack.enter_context(reserved_port())

    async def start_driver(
        self,
        settings: Mapping[str, object] | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> DriverProcess:
        """Start a driver process on this node; it is ended with the box at the latest.

        Parameters
        ----------
        settings : mapping of str to object, optional
            Keys of the configuration file; `allocator: external` and the node's name are added.
        flags : sequence of str
            Further flags; the later one of two wins. With `--nri-socket=` it has no container runtime.
        environment : mapping of str to str, optional
            Added to the process's environment.
        """
        config_path = self.folder / "config.yaml"
        config = {"allocator": "external", "hostnameOverride": self.node_name, **(settings or {})}
        config_path.write_text(yaml.safe_dump(config))
        arguments = [
            f"--config={config_path}",
            f"--kubeconfig={self.kubeconfig}",
            f"--kubelet-root-dir={self.kubelet.root}",
            f"--cdi-dir={self.cdi_dir}",
            f"--sysfs-root={self.sysfs_root}",
            f"--cgroup-root={self.cgroup_root}",
            f"--bind-address=127.0.0.1:{self.reserve_port()}",
            self._nri_flag,
            *flags,
        ]
        process = DriverProcess(arguments, self.folder / "driver.log", environment)
        await process.start()
        self._stack.push_async_callback(process.terminate)
        return process

    async def wait_ready(self, process: DriverProcess, timeout_s: float = 60.0) -> tuple[Plugin, list[JsonObject]]:
        """Wait until a driver has registered, published and met the runtime; return its plugin and its slices.

        Raises
        ------
        KubeletError
            If it ends or does not get there in time; the text has the end of its log.
        """
        ended = asyncio.create_task(process.wait(timeout_s))
        ready = asyncio.gather(
            self.kubelet.wait_registered(DRIVER_NAME, timeout_s, since=process.started_at),
            self.wait_published(timeout_s),
            self._wait_connected(process, timeout_s),
        )
        try:
            await asyncio.wait((ended, ready), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                plugin, slices, _ = ready.result()
                return plugin, slices
            raise KubeletError(f"the driver ended with status {ended.result()}")
        except (KubeletError, TimeoutError) as error:
            tail = "\n".join(process.log.splitlines()[-_SHOWN_LOG_LINES:])
            raise KubeletError(f"the driver is not ready: {error or 'no slices or no runtime'}\n{tail}") from error
        finally:
            for waiting in (ended, ready):
                waiting.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)

    async def _wait_connected(self, process: DriverProcess, timeout_s: float) -> None:
        flags = [argument for argument in process.arguments if argument.startswith("--nri-socket=")]
        if flags[-1] == self._nri_flag:
            async with asyncio.timeout(timeout_s):
                await self.runtime.synchronized()

    @property
    def _nri_flag(self) -> str:
        return f"--nri-socket={self.runtime.socket_path}"

    async def wait_published(self, timeout_s: float = 60.0) -> list[JsonObject]:
        """Wait until all slices of the driver's pool are there, and return them in order of their names.

        Raises
        ------
        TimeoutError
            If they do not come.
        """
        slices = await self.api.wait_until(self.complete_slices, timeout_s)
        self.published_at = time.monotonic()
        return slices

    def complete_slices(self) -> list[JsonObject]:
        """Return the slices of the driver's pool in its latest generation; none if some are missing."""
        selector = f"spec.driver={DRIVER_NAME},spec.nodeName={self.node_name}"
        slices = self.api.list(RESOURCE_SLICES, selector)
        latest = max((piece["spec"]["pool"]["generation"] for piece in slices), default=0)
        slices = [piece for piece in slices if piece["spec"]["pool"]["generation"] == latest]
        complete = bool(slices) and len(slices) == slices[0]["spec"]["pool"]["resourceSliceCount"]
        return slices if complete else []

    def _wipe_slices(self, driver: str | None) -> None:
        selector = f"spec.nodeName={self.node_name}" + (f",spec.driver={driver}" if driver is not None else "")
        for piece in self.api.list(RESOURCE_SLICES, selector):
            self.api.delete(RESOURCE_SLICES, piece["metadata"]["name"])


def held_cpus(cdi_dir: Path) -> dict[str, CpuSet]:
    """Return the CPUs of each claim that has a CDI spec, as a container that uses it would be told."""
    held = {}
    for path in sorted(cdi_dir.glob("*.json")):
        try:
            spec = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # its claim is being unprepared
        for device in spec["devices"] if spec["kind"] == CDI_KIND else ():
            for variable in device["containerEdits"].get("env", ()):
                name, _, cpus = variable.partition("=")
                if name.startswith(CPUSET_VARIABLE_PREFIX):
                    held[name.removeprefix(CPUSET_VARIABLE_PREFIX)] = CpuSet.parse(cpus)
    return held


def _short_folder() -> Path:
    """Make a folder for sockets: in the usual place for temporary files, unless its path is too long."""
    usual = tempfile.gettempdir()
    place = usual if len(usual.encode()) + _PATH_RESERVE < MAX_SOCKET_PATH_BYTES else "/tmp"
    return Path(tempfile.mkdtemp(prefix="dracpu-", dir=place))
