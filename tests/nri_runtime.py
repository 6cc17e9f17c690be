# SPDX-License-Identifier: Apache-2.0
"""A container runtime, as far as an NRI plugin can tell: containers without processes, and what their cpusets would be.

It behaves as containerd does where that matters to a plugin that sets cpusets. One lock serialises events, updates and
synchronisations. A plugin that does not answer in time is dropped, and the container goes on without it, unless the
plugin is a validator. A container is in one of three windows in which an update answers OK without lasting effect: it
is being created (not known yet), being started (its specification changes, its cgroup does not) or being updated (the
answer that is applied afterwards wins).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.nri.client import Client
from driver.nri.errors import Code, NriError
from driver.nri.mux import PLUGIN_CONNECTION, RUNTIME_CONNECTION, Trunk
from driver.nri.server import Method, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from google.protobuf.message import Message

PLUGIN_SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"

# Since NRI 0.12 each of these has an RPC of its own.
_TOLD: Final = {
    nri.POST_CREATE_CONTAINER: "PostCreateContainer",
    nri.START_CONTAINER: "StartContainer",
    nri.POST_START_CONTAINER: "PostStartContainer",
    nri.POST_UPDATE_CONTAINER: "PostUpdateContainer",
    nri.REMOVE_CONTAINER: "RemoveContainer",
}
# Of a failed call: nobody answered. Any other code is the plugin's answer.
_NO_ANSWER: Final = frozenset({Code.UNAVAILABLE})


class RefusedError(Exception):
    """The runtime does not do what it was asked for, since a plugin would not have it."""


class PluginConnection:
    """A plugin that has connected.

    Parameters
    ----------
    runtime : NriRuntime
        Who accepted it.
    reader, writer : StreamReader, StreamWriter
        The socket.
    """

    def __init__(self, runtime: NriRuntime, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._runtime = runtime
        self._trunk = Trunk(reader, writer)
        self._client = Client(self._trunk, PLUGIN_CONNECTION)
        methods = {
            "RegisterPlugin": Method(request=nri.RegisterPluginRequest, answer=self._register),
            "UpdateContainers": Method(request=nri.UpdateContainersRequest, answer=self._update_containers),
        }
        self._server = Server(
            self._trunk,
            RUNTIME_CONNECTION,
            RUNTIME_SERVICE,
            methods,
            answered=lambda *_: None,
            timeout_s=60.0,
            margin_s=0.0,
        )
        self.registered = asyncio.Event()
        self.registration = nri.RegisterPluginRequest()
        self.refused = False
        self.events = 0
        self.synchronized = False
        self._own_rpcs = runtime.own_rpcs

    async def run(self) -> None:
        """Serve the plugin until the connection ends."""
        try:
            reason = await self._trunk.run({PLUGIN_CONNECTION: self._client, RUNTIME_CONNECTION: self._server})
            self._client.close(reason)
        finally:
            await self._server.close()
            await self._trunk.closed()

    def close(self, reason: str) -> None:
        """Drop the plugin."""
        self.synchronized = False
        self._trunk.close(reason)
        self._client.close(reason)

    @property
    def is_validator(self) -> bool:
        """Whether a creation fails that the plugin did not agree to."""
        return self.subscribes(nri.VALIDATE_CONTAINER_ADJUSTMENT)

    def subscribes(self, event: int) -> bool:
        """Whether the plugin has asked for an event."""
        return bool(self.events & 1 << (event - 1))

    async def call(self, method: str, request: Message, answer: type[Message]) -> Any:
        """Call the plugin.

        Raises
        ------
        NriError
            With what the plugin answered, or ``UNAVAILABLE`` if it did not answer and was therefore dropped.
        """
        timeout_s = self._runtime.request_timeout_s
        try:
            # The client waits a little longer: an answer that says DEADLINE_EXCEEDED is not the same as none.
            async with asyncio.timeout(timeout_s):
                return await self._client.call(PLUGIN_SERVICE, method, request, answer, timeout_s=timeout_s + 0.05)
        except TimeoutError:
            self.close("the plugin did not answer in time")
            raise NriError(Code.UNAVAILABLE, "context deadline exceeded") from None
        except NriError as error:
            if error.code in _NO_ANSWER:
                self.synchronized = False
            raise

    async def configure(self) -> None:
        """Configure the plugin, and drop it if it asks for what this runtime does not have."""
        runtime = self._runtime
        request = nri.ConfigureRequest(
            runtime_name=runtime.name,
            runtime_version=runtime.version,
            registration_timeout=5000,
            request_timeout=int(1000 * runtime.request_timeout_s),
            NRI_version=runtime.nri_version,
        )
        self.events = (await self.call("Configure", request, nri.ConfigureResponse)).events or runtime.known_events
        if self.events & ~runtime.known_events:
            self.close("invalid plugin events")
            raise NriError(Code.INVALID_ARGUMENT, f"invalid plugin events: {self.events:#x}")

    async def synchronize(self, pods: list[nri.PodSandbox], containers: list[nri.Container]) -> list[Any]:
        """Tell the plugin of all that exists, in parts, and return what it wants changed."""
        size = self._runtime.most_per_part
        while True:
            more = len(pods) > size or len(containers) > size
            request = nri.SynchronizeRequest(pods=pods[:size], containers=containers[:size], more=more)
            answer = await self.call("Synchronize", request, nri.SynchronizeResponse)
            if not more:
                return list(answer.update)
            if answer.update or not answer.more:
                self.close("plugin does not handle split sync requests")
                raise NriError(Code.INTERNAL, "plugin does not handle split sync requests")
            pods, containers = pods[size:], containers[size:]

    async def tell(self, event: int, pod: nri.PodSandbox, container: nri.Container) -> None:
        """Tell the plugin of an event; only that of a container's start can be refused.

        Raises
        ------
        NriError
            If the plugin answered with an error.
        """
        if not self.subscribes(event):
            return
        try:
            if self._own_rpcs:
                try:
                    await self.call(_TOLD[event], nri.ContainerEvent(pod=pod, container=container), nri.Empty)
                except NriError as error:
                    if error.code != Code.UNIMPLEMENTED:
                        raise
                    self._own_rpcs = False
                else:
                    return
            await self.call("StateChange", nri.StateChangeEvent(event=event, pod=pod, container=container), nri.Empty)
        except NriError as error:
            if event == nri.START_CONTAINER and error.code not in _NO_ANSWER:
                raise

    async def _register(self, request: nri.RegisterPluginRequest) -> nri.Empty:
        self.registration = request
        self.refused = not (len(request.plugin_idx) == 2 and request.plugin_idx.isdigit())
        self.registered.set()
        if self.refused:
            raise NriError(Code.UNKNOWN, f"invalid plugin index {request.plugin_idx!r}")
        return nri.Empty()

    async def _update_containers(self, request: nri.UpdateContainersRequest) -> nri.UpdateContainersResponse:
        async with self._runtime.lock:
            if self._runtime.apply(request.update):
                raise NriError(Code.UNKNOWN, "NRI update of some containers failed")
        return nri.UpdateContainersResponse()


class NriRuntime:
    """A runtime that listens for plugins and has one of them at a time.

    Parameters
    ----------
    path : Path
        The socket.
    name, version, nri_version : str
        What it says of itself.
    known_events : int
        The mask of the events that it has.
    request_timeout_s : float
        How long a plugin may take for each answer, in seconds.
    most_per_part : int
        How many pods and how many containers a part of a synchronisation has at most.

    Attributes
    ----------
    pods, containers : dict
        What exists, by id. A container's specified cpuset is in its message.
    cpusets : dict
        What the cgroups of running containers hold, by container id.
    broken : set of str
        Ids of containers whose updates fail.
    plugin : PluginConnection or None
        The plugin, once synchronised and as long as it answers.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str = "containerd",
        version: str = "v2.4.2",
        nri_version: str = "v0.12.3",
        known_events: int = 0x3FFF,
        request_timeout_s: float = 2.0,
        most_per_part: int = 1000,
    ) -> None:
        self._path = path
        self.name = name
        self.version = version
        self.nri_version = nri_version
        self.known_events = known_events
        self.request_timeout_s = request_timeout_s
        self.most_per_part = most_per_part
        self.own_rpcs = bool(nri_version)
        self.pods: dict[str, nri.PodSandbox] = {}
        self.containers: dict[str, nri.Container] = {}
        self.cpusets: dict[str, str] = {}
        self.broken: set[str] = set()
        self.lock = asyncio.Lock()
        self.plugin: PluginConnection | None = None
        self.connections = 0
        self._starting: set[str] = set()
        self._accepting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._serving: dict[PluginConnection, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Listen, on a new socket."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def stop(self) -> None:
        """Drop the plugin and stop listening. As with a runtime that was killed, the socket file stays."""
        if self._server is not None:
            self._server.close()
        serving = list(self._serving.values())
        for plugin in self._serving:
            plugin.close("the runtime is stopping")
        if serving:
            await asyncio.wait(serving)
        self.plugin = None

    async def synchronized(self) -> PluginConnection:
        """Wait for a plugin, and return it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.plugin is not None and self.plugin.synchronized)
        assert self.plugin is not None
        return self.plugin

    async def run_pod(self, pod: nri.PodSandbox) -> None:
        """Run a pod's sandbox."""
        async with self.lock:
            self.pods[pod.id] = pod

    async def create_container(self, container: nri.Container, between: Callable[[], Any] | None = None) -> None:
        """Create a container in its pod.

        Parameters
        ----------
        container : Container
            The container as the kubelet wants it.
        between : callable, optional
            Awaited when the plugin has answered and the container is not known yet.

        Raises
        ------
        RefusedError
            If the plugin will not have it.
        """
        pod = self.pods[container.pod_sandbox_id]
        created = nri.Container()
        created.CopyFrom(container)
        try:
            async with self.lock:
                await self._adjust(pod, created)
        except NriError as error:
            await self._undo(pod, created)
            raise RefusedError(f"failed to get NRI adjustment for container: {error}") from error
        if between is not None:
            await between()
        created.state = nri.CONTAINER_CREATED
        self.containers[created.id] = created
        await self._tell(nri.POST_CREATE_CONTAINER, pod, created)

    async def start_container(self, identity: str, between: Callable[[], Any] | None = None) -> None:
        """Start a container with the cpuset that its specification had when this began.

        Raises
        ------
        RefusedError
            If the plugin will not have it.
        """
        container = self.containers[identity]
        pod = self.pods[container.pod_sandbox_id]
        self._starting.add(identity)
        try:
            cpus = container.linux.resources.cpu.cpus
            try:
                await self._tell(nri.START_CONTAINER, pod, container)
            except NriError as error:
                await self.stop_container(identity)
                raise RefusedError(str(error)) from error
            if between is not None:
                await between()
            self.cpusets[identity] = cpus
            container.state = nri.CONTAINER_RUNNING
            await self._tell(nri.POST_START_CONTAINER, pod, container)
        finally:
            self._starting.discard(identity)

    async def update_container(
        self, identity: str, resources: nri.LinuxResources, between: Callable[[], Any] | None = None
    ) -> None:
        """Change a container's resources as the kubelet wants it.

        Raises
        ------
        RefusedError
            If the plugin will not have it.
        """
        container = self.containers[identity]
        pod = self.pods[container.pod_sandbox_id]
        wanted = nri.ContainerUpdate(container_id=identity)
        wanted.linux.resources.CopyFrom(resources)
        async with self.lock:
            plugin = self._listening(nri.UPDATE_CONTAINER)
            if plugin is not None:
                request = nri.UpdateContainerRequest(pod=pod, container=container, linux_resources=resources)
                try:
                    answer = await plugin.call("UpdateContainer", request, nri.UpdateContainerResponse)
                except NriError as error:
                    if error.code not in _NO_ANSWER:
                        raise RefusedError(str(error)) from error
                else:
                    for update in answer.update:
                        if update.container_id == identity:
                            wanted.linux.resources.MergeFrom(update.linux.resources)
                    self.apply(each for each in answer.update if each.container_id != identity)
        if between is not None:
            await between()
        self.apply([wanted])
        await self._tell(nri.POST_UPDATE_CONTAINER, pod, container)

    async def stop_container(self, identity: str) -> None:
        """End a container."""
        container = self.containers[identity]
        container.state = nri.CONTAINER_STOPPED
        self.cpusets.pop(identity, None)
        await self._stopped(self.pods[container.pod_sandbox_id], container)

    async def remove_container(self, identity: str) -> None:
        """Forget a container, which is ended first if it lives."""
        if self.containers[identity].state != nri.CONTAINER_STOPPED:
            await self.stop_container(identity)
        container = self.containers.pop(identity)
        container.state = nri.CONTAINER_UNKNOWN
        await self._tell(nri.REMOVE_CONTAINER, self.pods[container.pod_sandbox_id], container)

    def apply(self, updates: Iterable[nri.ContainerUpdate]) -> list[str]:
        """Change containers, and return the ids of those that could not be changed."""
        failed = []
        for update in updates:
            container = self.containers.get(update.container_id)
            if container is None or container.state == nri.CONTAINER_STOPPED:
                continue
            if update.container_id in self.broken:
                failed += [] if update.ignore_failure else [update.container_id]
                continue
            container.linux.resources.MergeFrom(update.linux.resources)
            running = container.state == nri.CONTAINER_RUNNING and update.container_id not in self._starting
            if running and (cpus := update.linux.resources.cpu.cpus):
                self.cpusets[update.container_id] = cpus
        return failed

    def _listening(self, event: int) -> PluginConnection | None:
        plugin = self.plugin
        return plugin if plugin is not None and plugin.synchronized and plugin.subscribes(event) else None

    async def _adjust(self, pod: nri.PodSandbox, created: nri.Container) -> None:
        plugin = self._listening(nri.CREATE_CONTAINER)
        if plugin is None:
            return
        adjust = nri.ContainerAdjustment()
        try:
            request = nri.CreateContainerRequest(pod=pod, container=created)
            answer = await plugin.call("CreateContainer", request, nri.CreateContainerResponse)
        except NriError as error:
            if error.code not in _NO_ANSWER or plugin.is_validator:
                raise
        else:
            adjust = answer.adjust
            self.apply(answer.update)
        if plugin.is_validator:
            validation = nri.ValidateContainerAdjustmentRequest(pod=pod, container=created, adjust=adjust)
            verdict = await plugin.call(
                "ValidateContainerAdjustment", validation, nri.ValidateContainerAdjustmentResponse
            )
            if verdict.reject:
                raise NriError(Code.UNKNOWN, f"validator rejected container adjustment, reason: {verdict.reason}")
        created.linux.resources.MergeFrom(adjust.linux.resources)

    async def _undo(self, pod: nri.PodSandbox, created: nri.Container) -> None:
        await self._stopped(pod, created)
        await self._tell(nri.REMOVE_CONTAINER, pod, created)

    async def _stopped(self, pod: nri.PodSandbox, container: nri.Container) -> None:
        async with self.lock:
            if (plugin := self._listening(nri.STOP_CONTAINER)) is not None:
                request = nri.StopContainerRequest(pod=pod, container=container)
                with suppress(NriError):
                    self.apply((await plugin.call("StopContainer", request, nri.StopContainerResponse)).update)

    async def _tell(self, event: int, pod: nri.PodSandbox, container: nri.Container) -> None:
        async with self.lock:
            if (plugin := self._listening(event)) is not None:
                await plugin.tell(event, pod, container)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        plugin = PluginConnection(self, reader, writer)
        serving = asyncio.create_task(plugin.run())
        letting_in = asyncio.create_task(self._let_in(plugin))
        self._serving[plugin] = serving
        await asyncio.wait([serving])
        del self._serving[plugin]
        letting_in.cancel()
        await asyncio.wait([letting_in])

    async def _let_in(self, plugin: PluginConnection) -> None:
        # Plugins are let in one after the other.
        async with self._accepting:
            try:
                async with asyncio.timeout(5):
                    await plugin.registered.wait()
                if plugin.refused:
                    return  # and it stays connected, for nothing
                await plugin.configure()
                async with self.lock:
                    living = [each for each in self.containers.values() if each.state != nri.CONTAINER_STOPPED]
                    self.apply(await plugin.synchronize(list(self.pods.values()), living))
                    plugin.synchronized = True
                    self.plugin = plugin
            except (NriError, TimeoutError) as error:
                plugin.close(str(error))
                return
        async with self._changed:
            self._changed.notify_all()
