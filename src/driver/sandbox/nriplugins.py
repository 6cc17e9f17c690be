# SPDX-License-Identifier: Apache-2.0
"""The NRI side of the box's container runtime: lets plugins in, and asks and tells them in the order of their indices.

As in containerd, one lock serialises events, updates that plugins push, and synchronisations; a plugin that does not
answer in time is dropped and the request goes on without it, unless it is a validator. A synchronisation waits until
nothing is being done to any pod or container, and nothing new begins before it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.nri.errors import Code, NriError
from driver.sandbox.nriplugin import NriPlugin, RuntimeTraits


class Host(Protocol):
    """The runtime's pods and containers."""

    def living(self) -> tuple[Sequence[nri.PodSandbox], Sequence[nri.Container]]:
        """Return all pods, and the containers that have been created and have not ended."""

    def apply(self, updates: Sequence[nri.ContainerUpdate], /) -> Sequence[str]:
        """Change containers, and return the ids of those that could not be changed."""


class NriPlugins:
    """The plugins that are connected.

    Parameters
    ----------
    path : Path
        The socket.
    traits : RuntimeTraits
        What plugins are told, and what is demanded of them.
    host : Host
        What they are to know and may change.

    Attributes
    ----------
    lock : Lock
        Held while plugins are asked or told anything, and while their updates are applied.
    connections : int
        How many connections there have been.
    deadlocked : bool
        Whether a plugin has sent updates to a runtime that does not survive that.
    """

    def __init__(self, path: Path, traits: RuntimeTraits, host: Host) -> None:
        self._path = path
        self._traits = traits
        self._host = host
        self._plugins: list[NriPlugin] = []
        self._serving: dict[NriPlugin, asyncio.Task[None]] = {}
        self._accepting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._operations = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self.lock = asyncio.Lock()
        self.connections = 0
        self.deadlocked = False

    async def start(self) -> None:
        """Listen, on a new socket."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def stop(self) -> None:
        """Drop all plugins and stop listening. As with a runtime that was killed, the socket file stays."""
        if self._server is not None:
            self._server.close()
        serving = list(self._serving.values())
        for plugin in self._serving:
            plugin.close("the runtime is stopping")
        if serving:
            await asyncio.wait(serving)
        self._plugins.clear()

    @property
    def synchronized_plugin(self) -> NriPlugin | None:
        """The latest plugin that was synchronised and is still connected."""
        return next((plugin for plugin in reversed(self._plugins) if plugin.connected), None)

    async def synchronized(self) -> NriPlugin:
        """Wait for a plugin that is synchronised, and return it."""
        async with self._changed:
            while (plugin := self.synchronized_plugin) is None:
                await self._changed.wait()
            return plugin

    @asynccontextmanager
    async def operation(self) -> AsyncIterator[None]:
        """Keep plugins from being synchronised while something is being done to a pod or a container."""
        while not self._may_begin.is_set():
            await self._may_begin.wait()
        self._operations += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._operations -= 1
            if not self._operations:
                self._idle.set()

    async def tell(self, event: nri.Event, pod: nri.PodSandbox, container: nri.Container | None = None) -> None:
        """Tell the plugins of an event.

        Raises
        ------
        NriError
            If one refuses it.
        """
        async with self._asking():
            for plugin in self._in_order():
                await plugin.tell(event, pod, container)

    async def create(self, pod: nri.PodSandbox, container: nri.Container) -> nri.LinuxResources:
        """Ask the plugins about a container that is to be created, and return the resources that they give it.

        Raises
        ------
        NriError
            If one refuses it, two give it CPUs, or a validator does not agree or is gone.
        """
        async with self._asking():
            # One that is dropped meanwhile has not agreed.
            validators = [plugin for plugin in self._plugins if plugin.is_validator]
            adjust = nri.ContainerAdjustment()
            updates: list[nri.ContainerUpdate] = []
            given_by = ""
            for plugin in self._in_order(nri.CREATE_CONTAINER):
                request = nri.CreateContainerRequest(pod=pod, container=container)
                answer = await plugin.ask("CreateContainer", request, nri.CreateContainerResponse)
                if answer is None:
                    continue
                if answer.adjust.linux.resources.cpu.cpus:
                    if given_by:
                        raise NriError(
                            Code.UNKNOWN, f"plugins {given_by!r} and {plugin.name!r} both tried to set CPU.Cpus"
                        )
                    given_by = plugin.name
                adjust.MergeFrom(answer.adjust)
                updates += answer.update
            validation = nri.ValidateContainerAdjustmentRequest(pod=pod, container=container, adjust=adjust)
            for plugin in validators:
                await _validate(plugin, validation)
            self._move(updates)
            return adjust.linux.resources

    async def update(
        self, pod: nri.PodSandbox, container: nri.Container, resources: nri.LinuxResources
    ) -> nri.LinuxResources:
        """Ask the plugins about new resources of a container, and return what it is to get in their place.

        Raises
        ------
        NriError
            If one refuses them.
        """
        async with self._asking():
            wanted = nri.LinuxResources()
            wanted.CopyFrom(resources)
            for plugin in self._in_order(nri.UPDATE_CONTAINER):
                request = nri.UpdateContainerRequest(pod=pod, container=container, linux_resources=resources)
                answer = await plugin.ask("UpdateContainer", request, nri.UpdateContainerResponse)
                for update in answer.update if answer is not None else ():
                    if update.container_id == container.id:
                        wanted.MergeFrom(update.linux.resources)
                    else:
                        self._move([update])
            return wanted

    async def stopped(self, pod: nri.PodSandbox, container: nri.Container) -> None:
        """Tell the plugins that a container has ended."""
        async with self._asking():
            for plugin in self._in_order(nri.STOP_CONTAINER):
                request = nri.StopContainerRequest(pod=pod, container=container)
                with suppress(NriError):
                    answer = await plugin.ask("StopContainer", request, nri.StopContainerResponse)
                    self._host.apply(answer.update if answer is not None else ())

    def _move(self, updates: Sequence[nri.ContainerUpdate]) -> None:
        """Carry out the updates of other containers that an answer has."""
        if (failed := self._host.apply(updates)) and self._traits.insists_on_moves:
            raise NriError(Code.UNKNOWN, f"failed to update {', '.join(failed)}")

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        async with self.lock:
            try:
                yield
            finally:
                # Only now: the first request after a validator has died fails.
                self._plugins = [plugin for plugin in self._plugins if plugin.connected]

    def _in_order(self, event: nri.Event | None = None) -> Sequence[NriPlugin]:
        plugins = [plugin for plugin in self._plugins if event is None or plugin.subscribes(event)]
        return sorted(plugins, key=lambda plugin: plugin.registration.plugin_idx)

    async def _push(self, updates: Sequence[nri.ContainerUpdate]) -> Sequence[str]:
        async with self.lock:
            if self._traits.deadlocks:
                self.deadlocked = True
                await asyncio.Event().wait()
            return self._host.apply(updates)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        plugin = NriPlugin(reader, writer, self._traits, self._push)
        accepting = asyncio.current_task()
        assert accepting is not None
        self._serving[plugin] = accepting
        letting_in = asyncio.create_task(self._let_in(plugin))
        try:
            await plugin.run()
        finally:
            letting_in.cancel()
            await asyncio.wait([letting_in])
            del self._serving[plugin]

    async def _let_in(self, plugin: NriPlugin) -> None:
        # One after the other: a plugin that takes its time delays all later ones.
        async with self._accepting:
            try:
                if not await plugin.registered():
                    return  # and it stays connected, for nothing
                await plugin.configure()
                async with self._quiet(), self.lock:
                    self._host.apply(await plugin.synchronize(*self._host.living()))
                    self._plugins.append(plugin)
            except (NriError, TimeoutError) as error:
                plugin.close(str(error) or "the plugin took too long to be let in")
                return
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def _quiet(self) -> AsyncIterator[None]:
        """Wait until nothing is being done, and let nothing begin meanwhile."""
        self._may_begin.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._may_begin.set()


async def _validate(plugin: NriPlugin, request: nri.ValidateContainerAdjustmentRequest) -> None:
    try:
        verdict: Any = await plugin.call(
            "ValidateContainerAdjustment", request, nri.ValidateContainerAdjustmentResponse
        )
    except NriError as error:
        raise NriError(Code.UNKNOWN, f"validator plugin {plugin.name} failed: {error}") from error
    if verdict.reject:
        raise NriError(Code.UNKNOWN, f"validator {plugin.name} rejected container adjustment, reason: {verdict.reason}")
