# SPDX-License-Identifier: Apache-2.0
"""The box's container runtime: containers without processes, and what the kernel would hold each of them to.

Towards NRI plugins and CDI it behaves as containerd does where that matters for cpusets. Each container has the cpuset
that is stored for it and, from the moment in which its cgroup would be made, the one in effect. There are three windows
in which an update that a plugin pushes is answered OK and yet does not last: while the container is being created it is
not known yet; while it is being started only what is stored changes; and the answer to an update that the kubelet wants
is carried out last.

Nothing is executed, so neither are the hooks of containers: the CPUs of a generated machine do not exist. What the
start guard would find can be modelled instead, see `driver.sandbox.guardmodel`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.nri.errors import NriError
from driver.sandbox.cgrouptree import CgroupTree
from driver.sandbox.nriplugin import NriPlugin, RuntimeTraits
from driver.sandbox.nriplugins import NriPlugins
from fastcpu.cpuset import CpuSet

Between = Callable[[], Awaitable[object]]
"""Awaited while an operation is in its window."""

_DEFAULT_TRAITS: Final = RuntimeTraits()


class RefusedError(Exception):
    """The runtime did not do what it was asked for; the text is what the kubelet would be told."""


async def _at_once() -> None:
    """Leave a window as soon as possible."""


class ContainerRuntime:
    """The runtime of one node.

    Parameters
    ----------
    socket_path : Path
        Where NRI plugins connect.
    traits : RuntimeTraits
        What it says of itself.
    online : CpuSet
        What a container without a cpuset runs on.
    inject : callable, optional
        Adds to a container what its CDI devices bring; raises `RefusedError` if there is no such device.
    run_hooks : callable, optional
        Called with a container that is being started and the CPUs it would run on; raises `RefusedError` if one of its
        hooks would not let it.
    cgroups : CgroupTree, optional
        The node's cgroups; by default nothing but its cpuset holds a container.
    say : callable
        Called with one line for each container whose CPUs change.

    Attributes
    ----------
    pods : dict of str to PodSandbox
        By id.
    containers : dict of str to Container
        By id; the cpuset in the message is the one that is stored.
    cpusets : dict of str to str
        The cpusets in effect, by the id of each container that has a cgroup.
    broken : set of str
        Ids of containers whose updates fail.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        traits: RuntimeTraits = _DEFAULT_TRAITS,
        online: CpuSet | None = None,
        inject: Callable[[nri.Container], None] = lambda container: None,
        run_hooks: Callable[[nri.Container, CpuSet], None] = lambda container, cpus: None,
        cgroups: CgroupTree | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.socket_path = socket_path
        self.pods: dict[str, nri.PodSandbox] = {}
        self.containers: dict[str, nri.Container] = {}
        self.cpusets: dict[str, str] = {}
        self.broken: set[str] = set()
        self._online = CpuSet() if online is None else online
        self._inject = inject
        self._run_hooks = run_hooks
        self._cgroups = cgroups
        self._say = say
        self._traits = traits
        self._tells_cdi_devices = traits.tells_cdi_devices
        self._plugins = NriPlugins(socket_path, traits, self)
        self._changed = asyncio.Event()
        self._starting: set[str] = set()
        # Those whose end plugins have not been told yet.
        self._end_owed: set[str] = set()

    # Plugins

    async def start(self) -> None:
        """Let plugins connect."""
        await self._plugins.start()

    async def stop(self) -> None:
        """Drop all plugins, as a runtime that is killed does. Containers live on, and the socket file stays."""
        await self._plugins.stop()

    async def __aenter__(self) -> ContainerRuntime:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def lock(self) -> asyncio.Lock:
        """What serialises all that plugins are asked, told, and have changed."""
        return self._plugins.lock

    @property
    def deadlocked(self) -> bool:
        """Whether a plugin has sent updates outside of an event to a runtime that does not survive that."""
        return self._plugins.deadlocked

    @property
    def connections(self) -> int:
        """How many connections of plugins there have been."""
        return self._plugins.connections

    @property
    def plugin(self) -> NriPlugin | None:
        """The latest plugin that was synchronised and is still connected."""
        return self._plugins.synchronized_plugin

    async def synchronized(self) -> NriPlugin:
        """Wait for a plugin that has been synchronised and is connected, and return it."""
        return await self._plugins.synchronized()

    # What the kernel knows

    def effective(self, identity: str) -> CpuSet:
        """Return the CPUs on which the processes of a container may run."""
        cpus = CpuSet.parse(self.cpusets[identity])
        # One that a test has put there may have no cgroup.
        if self._cgroups is not None and (path := self.containers[identity].linux.cgroups_path):
            return self._cgroups.effective(path)
        return cpus or self._online

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something comes true about the cpusets in effect.

        Raises
        ------
        TimeoutError
            If it does not in time.
        """
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._changed.wait()

    # What the kubelet asks for

    async def run_pod(self, pod: nri.PodSandbox) -> None:
        """Make a pod's sandbox.

        Raises
        ------
        RefusedError
            If a plugin will not have it.
        """
        async with self._plugins.operation():
            try:
                await self._plugins.tell(nri.RUN_POD_SANDBOX, pod)
            except NriError as error:
                raise RefusedError(f"failed to run pod sandbox: {error}") from error
            self.pods[pod.id] = pod
            pod.linux.cgroup_parent = pod.linux.cgroup_parent or f"/kubepods/burstable/pod{pod.uid or pod.id}"
            if self._cgroups is not None:
                self._cgroups.make(pod.linux.cgroup_parent)

    async def remove_pod(self, identity: str) -> None:
        """Remove a pod's sandbox with all of its containers."""
        for container in [each.id for each in self.containers.values() if each.pod_sandbox_id == identity]:
            await self.remove_container(container)
        async with self._plugins.operation():
            pod = self.pods[identity]
            await self._plugins.tell(nri.STOP_POD_SANDBOX, pod)
            del self.pods[identity]
            if self._cgroups is not None:
                self._cgroups.remove(pod.linux.cgroup_parent)
            await self._plugins.tell(nri.REMOVE_POD_SANDBOX, pod)

    async def run_container(
        self, pod_id: str, name: str, *, env: Mapping[str, str] | None = None, cdi_devices: Iterable[str] = ()
    ) -> str:
        """Create a container, start it, and return its id.

        Raises
        ------
        RefusedError
            If it cannot be created or started. It is removed again then.
        """
        container = nri.Container(id=secrets.token_hex(32), pod_sandbox_id=pod_id, name=name)
        container.env.extend(f"{key}={value}" for key, value in (env or {}).items())
        container.CDI_devices.extend(nri.CDIDevice(name=device) for device in cdi_devices)
        await self.create_container(container)
        try:
            await self.start_container(container.id)
        except RefusedError:
            await self.remove_container(container.id)
            raise
        return container.id

    async def create_container(self, container: nri.Container, between: Between = _at_once) -> None:
        """Create a container in its pod.

        Parameters
        ----------
        container : Container
            The container as the kubelet wants it.
        between : callable
            Awaited when the plugins have answered and the container is not known yet.

        Raises
        ------
        RefusedError
            If a plugin will not have it, or there is no such CDI device.
        """
        async with self._plugins.operation():
            pod = self.pods[container.pod_sandbox_id]
            created = nri.Container()
            created.CopyFrom(container)
            created.linux.cgroups_path = f"{pod.linux.cgroup_parent}/{created.id}"
            self._inject(created)
            if not self._tells_cdi_devices:
                del created.CDI_devices[:]
            try:
                resources = await self._plugins.create(pod, created)
            except NriError as error:
                # What plugins know of it is undone.
                await self._plugins.stopped(pod, created)
                await self._plugins.tell(nri.REMOVE_CONTAINER, pod, created)
                raise RefusedError(
                    f"failed to create containerd container: failed to get NRI adjustment for container: {error}"
                ) from error
            created.linux.resources.MergeFrom(resources)
            await between()
            created.state = nri.CONTAINER_CREATED
            created.created_at = time.time_ns() if self._traits.nri_version else 0
            self.containers[created.id] = created
            self._end_owed.add(created.id)
            await self._plugins.tell(nri.POST_CREATE_CONTAINER, pod, created)

    async def start_container(self, identity: str, between: Between = _at_once) -> None:
        """Start a container with the cpuset that is stored now.

        Parameters
        ----------
        identity : str
            The container's id.
        between : callable
            Awaited twice: when its cgroup is made and plugins have not been told yet, and before they are told that it
            runs.

        Raises
        ------
        RefusedError
            If a hook or a plugin will not have it. It has ended then.
        """
        async with self._plugins.operation():
            container = self.containers[identity]
            pod = self.pods[container.pod_sandbox_id]
            self._starting.add(identity)
            try:
                try:
                    self._put_in_effect(container, container.linux.resources.cpu.cpus)
                    self._run_hooks(container, self.effective(identity))
                except RefusedError:
                    # Plugins are not told of it before the kubelet removes the container.
                    self._end(container)
                    raise
                await between()
                try:
                    await self._plugins.tell(nri.START_CONTAINER, pod, container)
                except NriError as error:
                    if self._traits.heeds_starts:
                        await self._stop(container)
                        raise RefusedError(f"failed to start container: {error}") from error
                await between()
                container.state = nri.CONTAINER_RUNNING
                await self._plugins.tell(nri.POST_START_CONTAINER, pod, container)
            finally:
                self._starting.discard(identity)

    async def update_container(self, identity: str, resources: nri.LinuxResources, between: Between = _at_once) -> None:
        """Change a container's resources as the kubelet wants it.

        Parameters
        ----------
        identity : str
            The container's id.
        resources : LinuxResources
            What the kubelet wants; 0 and empty mean no change.
        between : callable
            Awaited when the plugins have answered and nothing is changed yet.

        Raises
        ------
        RefusedError
            If a plugin will not have it, or it cannot be done.
        """
        async with self._plugins.operation():
            container = self.containers[identity]
            pod = self.pods[container.pod_sandbox_id]
            try:
                wanted = await self._plugins.update(pod, container, resources)
            except NriError as error:
                raise RefusedError(f"NRI container update failed: {error}") from error
            await between()
            failed = self.apply([nri.ContainerUpdate(container_id=identity, linux={"resources": wanted})])
            if failed:
                raise RefusedError(f"failed to update resources of container {identity}")
            await self._plugins.tell(nri.POST_UPDATE_CONTAINER, pod, container)

    async def stop_container(self, identity: str) -> None:
        """End a container."""
        async with self._plugins.operation():
            await self._stop(self.containers[identity])

    async def remove_container(self, identity: str) -> None:
        """Forget a container, which is ended first if it lives."""
        async with self._plugins.operation():
            container = self.containers[identity]
            await self._stop(container)
            del self.containers[identity]
            container.state = nri.CONTAINER_UNKNOWN
            await self._plugins.tell(nri.REMOVE_CONTAINER, self.pods[container.pod_sandbox_id], container)

    # What plugins ask for

    def living(self) -> tuple[Sequence[nri.PodSandbox], Sequence[nri.Container]]:
        """Return all pods, and the containers that have been created and have not ended."""
        living = [each for each in self.containers.values() if each.state != nri.CONTAINER_STOPPED]
        return list(self.pods.values()), living

    def apply(self, updates: Iterable[nri.ContainerUpdate]) -> list[str]:
        """Change containers, and return the ids of those that could not be changed; unknown ones are passed over."""
        failed = []
        for update in updates:
            identity = update.container_id
            container = self.containers.get(identity)
            if container is None or container.state == nri.CONTAINER_STOPPED:
                continue
            if identity in self.broken:
                failed += [] if update.ignore_failure else [identity]
                continue
            container.linux.resources.MergeFrom(update.linux.resources)
            running = container.state == nri.CONTAINER_RUNNING and identity not in self._starting
            if running and (cpus := update.linux.resources.cpu.cpus):
                try:
                    self._put_in_effect(container, cpus)
                except RefusedError:
                    failed += [] if update.ignore_failure else [identity]
        return failed

    def _put_in_effect(self, container: nri.Container, cpus: str) -> None:
        before = self.effective(container.id) if container.id in self.cpusets else None
        if self._cgroups is not None and (path := container.linux.cgroups_path):
            self._cgroups.make(path)
            try:
                self._cgroups.write(path, CpuSet.parse(cpus))
            except PermissionError as error:
                raise RefusedError(f"failed to write {cpus!r}: {error.filename}: permission denied") from error
        self.cpusets[container.id] = cpus
        if self.effective(container.id) == before:
            return
        pod = self.pods[container.pod_sandbox_id]
        self._say(f"{pod.namespace}/{pod.name}, container {container.name}: CPUs {self.effective(container.id)}")
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _end(self, container: nri.Container) -> None:
        container.state = nri.CONTAINER_STOPPED
        path = container.linux.cgroups_path
        if self.cpusets.pop(container.id, None) is not None and self._cgroups is not None and path:
            self._cgroups.remove(path)
        self._tell_change()

    async def _stop(self, container: nri.Container) -> None:
        self._end(container)
        if container.id in self._end_owed:
            self._end_owed.discard(container.id)
            await self._plugins.stopped(self.pods[container.pod_sandbox_id], container)
