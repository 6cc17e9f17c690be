# SPDX-License-Identifier: Apache-2.0
"""One NRI plugin that has connected to the box's container runtime, as containerd treats it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import Message

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.nri.client import Client
from driver.nri.errors import Code, NriError
from driver.nri.mux import PLUGIN_CONNECTION, RUNTIME_CONNECTION, Trunk
from driver.nri.server import Method, Server
from driver.nri.ttrpc import MOST_DATA_BYTES

_PLUGIN_SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
_RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"
_REGISTRATION_DEADLINE_S: Final = 5.0
# Of a message within another one: its tag and its length.
_FIELD_BYTES: Final = 6
# Since NRI 0.12 each of these has a call of its own.
_OWN_CALLS: Final = {
    nri.RUN_POD_SANDBOX: "RunPodSandbox",
    nri.STOP_POD_SANDBOX: "StopPodSandbox",
    nri.REMOVE_POD_SANDBOX: "RemovePodSandbox",
    nri.POST_CREATE_CONTAINER: "PostCreateContainer",
    nri.START_CONTAINER: "StartContainer",
    nri.POST_START_CONTAINER: "PostStartContainer",
    nri.POST_UPDATE_CONTAINER: "PostUpdateContainer",
    nri.REMOVE_CONTAINER: "RemoveContainer",
}
# What a plugin may refuse; any other error that it answers to an event is only logged.
_REFUSABLE: Final = frozenset({nri.RUN_POD_SANDBOX, nri.START_CONTAINER})

_Answer = TypeVar("_Answer", bound=Message)
_Object = TypeVar("_Object", nri.PodSandbox, nri.Container)


class PluginGoneError(NriError):
    """The plugin did not answer, and is not connected any more."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTraits:
    """What a runtime says of itself to plugins, and what it demands of them.

    Attributes
    ----------
    name, version : str
        Which runtime it is.
    nri_version : str
        Empty for runtimes before NRI 0.12, which do not tell it and have no calls of their own for most events.
    known_events : int
        The mask of the events that it has.
    request_timeout_s : float
        How long a plugin may take for each answer, in seconds.
    most_per_part : int
        How many pods and how many containers a part of a synchronisation has at most.
    most_part_bytes : int
        How many bytes a part has at most; a pod or a container that has more by itself cannot be told.
    tells_cdi_devices : bool
        Whether it tells a container's CDI devices.
    """

    name: str = "containerd"
    version: str = "v2.4.2"
    nri_version: str = "v0.12.3"
    known_events: int = 0x3FFF
    request_timeout_s: float = 2.0
    most_per_part: int = 1000
    most_part_bytes: int = MOST_DATA_BYTES - 4096
    tells_cdi_devices: bool = True

    @property
    def deadlocks(self) -> bool:
        """Whether it waits for itself for ever when a plugin sends it updates outside of an event.

        Real ones do so only now and then, when an event comes at the same moment; NRI 0.12.1 has mended it.
        """
        return self.nri_version in ("", "v0.12.0")

    @property
    def insists_on_moves(self) -> bool:
        """Whether an operation fails when an answer's updates of other containers do; else that is only logged."""
        return self.name == "cri-o"

    @property
    def heeds_starts(self) -> bool:
        """Whether a plugin can refuse the start of a container."""
        return self.name != "cri-o"


class NriPlugin:
    """A connected plugin.

    Parameters
    ----------
    reader, writer : StreamReader, StreamWriter
        The socket.
    traits : RuntimeTraits
        The runtime.
    update : callable
        Awaited with the updates that the plugin pushes; returns the ids of containers that could not be updated.

    Attributes
    ----------
    registration : RegisterPluginRequest
        How the plugin has registered itself.
    events : int
        The mask of the events to which it has subscribed.
    connected : bool
        Whether it is still connected.
    slowest_s : float
        The longest that it took for an answer, in seconds; whoever measures sets it to 0 before.
    parts : int
        In how many parts it was told what exists.
    synchronize_s : float
        How long it took for all of them, in seconds.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        traits: RuntimeTraits,
        update: Callable[[Sequence[nri.ContainerUpdate]], Awaitable[Sequence[str]]],
    ) -> None:
        self._traits = traits
        self._update = update
        self._trunk = Trunk(reader, writer)
        self._client = Client(self._trunk, PLUGIN_CONNECTION)
        methods = {
            "RegisterPlugin": Method(request=nri.RegisterPluginRequest, answer=self._register),
            "UpdateContainers": Method(request=nri.UpdateContainersRequest, answer=self._update_containers),
        }
        self._server = Server(
            self._trunk,
            RUNTIME_CONNECTION,
            _RUNTIME_SERVICE,
            methods,
            answered=lambda method, succeeded: None,
            # The runtime takes its time, whatever its plugin's patience.
            timeout_s=60.0,
            margin_s=0.0,
        )
        self._registered = asyncio.Event()
        self._refused = False
        self._has_own_calls = bool(traits.nri_version)
        self.registration = nri.RegisterPluginRequest()
        self.events = 0
        self.connected = True
        self.slowest_s = 0.0
        self.parts = 0
        self.synchronize_s = 0.0

    async def run(self) -> None:
        """Serve the plugin until the connection ends."""
        try:
            reason = await self._trunk.run({PLUGIN_CONNECTION: self._client, RUNTIME_CONNECTION: self._server})
            self.close(reason)
        finally:
            await self._server.close()
            await self._trunk.closed()

    def close(self, reason: str) -> None:
        """Drop the plugin."""
        self.connected = False
        self._trunk.close(reason)
        self._client.close(reason)

    @property
    def name(self) -> str:
        """The plugin's index and name."""
        return f"{self.registration.plugin_idx}-{self.registration.plugin_name}"

    @property
    def is_validator(self) -> bool:
        """Whether a creation fails that the plugin does not agree to."""
        return self.subscribes(nri.VALIDATE_CONTAINER_ADJUSTMENT)

    def subscribes(self, event: int) -> bool:
        """Whether the plugin has asked for an event."""
        return bool(self.events & 1 << (event - 1))

    async def registered(self) -> bool:
        """Wait until the plugin registers itself, and tell whether that was accepted.

        Raises
        ------
        TimeoutError
            If it does not in time.
        """
        async with asyncio.timeout(_REGISTRATION_DEADLINE_S):
            await self._registered.wait()
        return not self._refused

    async def call(self, method: str, request: Message, answer: type[_Answer]) -> _Answer:
        """Call the plugin.

        Raises
        ------
        PluginGoneError
            If it did not answer. It is dropped then.
        NriError
            With the error that it answered.
        """
        timeout_s = self._traits.request_timeout_s
        started = time.perf_counter()
        try:
            # The client itself waits longer: an answer that says DEADLINE_EXCEEDED is not the same as none.
            async with asyncio.timeout(timeout_s):
                return await self._client.call(_PLUGIN_SERVICE, method, request, answer, timeout_s=timeout_s + 1)
        except TimeoutError:
            self.close("the plugin did not answer in time")
            raise PluginGoneError(f"{method}: context deadline exceeded") from None
        except NriError as error:
            if self.connected:
                raise
            raise PluginGoneError("ttrpc: closed") from error
        finally:
            self.slowest_s = max(self.slowest_s, time.perf_counter() - started)

    async def configure(self) -> None:
        """Configure the plugin, and learn its events.

        Raises
        ------
        NriError
            If it answers with an error, or asks for events that this runtime does not have.
        """
        traits = self._traits
        request = nri.ConfigureRequest(
            runtime_name=traits.name,
            runtime_version=traits.version,
            registration_timeout=int(1000 * _REGISTRATION_DEADLINE_S),
            request_timeout=int(1000 * traits.request_timeout_s),
            NRI_version=traits.nri_version,
        )
        self.events = (await self.call("Configure", request, nri.ConfigureResponse)).events or traits.known_events
        if self.events & ~traits.known_events:
            raise NriError(Code.INVALID_ARGUMENT, f"invalid plugin events: {self.events:#x}")

    async def synchronize(
        self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]
    ) -> Sequence[nri.ContainerUpdate]:
        """Tell the plugin of all that exists, in parts, and return what it wants changed.

        Raises
        ------
        NriError
            If it answers with an error, or a part with anything but that it waits for more.
        TimeoutError
            If all parts together take too long.
        """
        parts = self._parts(pods, containers)
        self.parts = len(parts)
        started = time.perf_counter()
        async with asyncio.timeout(self._traits.request_timeout_s):
            for request in parts:
                answer = await self.call("Synchronize", request, nri.SynchronizeResponse)
                if request.more and (answer.update or not answer.more):
                    raise NriError(Code.INTERNAL, "plugin does not handle split sync requests")
        self.synchronize_s = time.perf_counter() - started
        return answer.update

    def _parts(
        self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]
    ) -> Sequence[nri.SynchronizeRequest]:
        """Return the messages of a synchronisation, each as large as it may be."""
        parts: list[nri.SynchronizeRequest] = []
        left_pods, left_containers = deque(pods), deque(containers)
        while left_pods or left_containers or not parts:
            part = nri.SynchronizeRequest()
            left = self._traits.most_part_bytes
            # One of each in turn: a container may come before its pod.
            while (pod := self._next(left_pods, len(part.pods), left)) is not None:
                part.pods.append(pod)
                left -= pod.ByteSize() + _FIELD_BYTES
                if (container := self._next(left_containers, len(part.containers), left)) is not None:
                    part.containers.append(container)
                    left -= container.ByteSize() + _FIELD_BYTES
            while (container := self._next(left_containers, len(part.containers), left)) is not None:
                part.containers.append(container)
                left -= container.ByteSize() + _FIELD_BYTES
            part.more = bool(left_pods or left_containers)
            if part.more and not (part.pods or part.containers):
                raise NriError(Code.RESOURCE_EXHAUSTED, "a pod or a container is larger than a message may be")
            parts.append(part)
        return parts

    def _next(self, left: deque[_Object], taken: int, n_bytes: int) -> _Object | None:
        """Take the next object for a part, if it has room for it."""
        if not left or taken == self._traits.most_per_part or left[0].ByteSize() + _FIELD_BYTES > n_bytes:
            return None
        return left.popleft()

    async def tell(self, event: nri.Event, pod: nri.PodSandbox, container: nri.Container | None = None) -> None:
        """Tell the plugin of an event, if it has asked for it.

        Raises
        ------
        NriError
            If it answers the start of a container or of a pod with an error.
        """
        if not self.subscribes(event):
            return
        # The message of a pod's event is that of a container's without a container.
        message = nri.ContainerEvent(pod=pod, container=container)
        try:
            if self._has_own_calls:
                try:
                    await self.call(_OWN_CALLS[event], message, nri.Empty)
                except NriError as error:
                    if error.code != Code.UNIMPLEMENTED:
                        raise
                    # For the rest of the connection, and of all events.
                    self._has_own_calls = False
                else:
                    return
            state_change = nri.StateChangeEvent(event=event, pod=pod, container=container)
            await self.call("StateChange", state_change, nri.Empty)
        except PluginGoneError:
            return
        except NriError:
            if event in _REFUSABLE:
                raise

    async def ask(self, method: str, request: Message, answer: type[_Answer]) -> _Answer | None:
        """Call the plugin, and go on without an answer if it has gone.

        Raises
        ------
        NriError
            With the error that it answered.
        """
        with suppress(PluginGoneError):
            return await self.call(method, request, answer)
        return None

    async def _register(self, request: nri.RegisterPluginRequest) -> nri.Empty:
        if self._registered.is_set():
            return nri.Empty()  # without any effect, also of one that was refused
        self.registration = request
        name, index = request.plugin_name, request.plugin_idx
        self._refused = not (name and len(index) == 2 and index.isascii() and index.isdigit())
        self._registered.set()
        if self._refused:
            raise NriError(Code.UNKNOWN, f"invalid plugin name {name!r} or index {index!r}")
        return nri.Empty()

    async def _update_containers(self, request: nri.UpdateContainersRequest) -> nri.UpdateContainersResponse:
        if await self._update(request.update):
            # An error loses the list of those that failed.
            raise NriError(Code.UNKNOWN, "NRI update of some containers failed")
        return nri.UpdateContainersResponse()
