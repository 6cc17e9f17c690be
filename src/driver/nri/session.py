# SPDX-License-Identifier: Apache-2.0
"""One connection to the runtime: registration, configuration, synchronisation, events, and its end.

The plugin's side is served before the driver registers, since the runtime may configure it before it answers the
registration. What the runtime asks for is handed to the plugin and its answer sent back; nothing is decided here.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.logs import fields
from driver.nri.client import Client
from driver.nri.errors import Code, NriError
from driver.nri.mux import PLUGIN_CONNECTION, RUNTIME_CONNECTION
from driver.nri.runtimes import Runtime, allows_unsolicited_updates
from driver.nri.server import Method, Server
from driver.nri.subscription import VALIDATION, Subscription
from driver.nri.ttrpc import bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from google.protobuf.message import Message

    from driver.nri.mux import Trunk

    Handler = Callable[[Any], Awaitable[Message]]

_log = logging.getLogger(__name__)

PLUGIN_SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"
NRI_VERSION: Final = "v0.12.3"
"""The NRI that this driver was written for; runtimes log it."""

_REQUEST_TIMEOUT_S: Final = 2.0  # of a runtime that does not say
_SHORTEST_REQUEST_TIMEOUT_S: Final = 0.01
_LONGEST_REQUEST_TIMEOUT_S: Final = 3600.0
_MOST_NAMED: Final = 8

_CONTAINER_RPCS: Final = {
    "PostCreateContainer": nri.POST_CREATE_CONTAINER,
    "PostStartContainer": nri.POST_START_CONTAINER,
    "PostUpdateContainer": nri.POST_UPDATE_CONTAINER,
    "RemoveContainer": nri.REMOVE_CONTAINER,
}
_POD_RPCS: Final = ("RunPodSandbox", "PostUpdatePodSandbox", "RemovePodSandbox")


class NriPlugin(Protocol):
    """What the runtime's requests are put to.

    The runtime waits for each answer, and does nothing else with any container meanwhile. Coroutines are cancelled when
    they would answer too late, and when the connection ends. `Refusal` becomes the error that the runtime reports.
    """

    def connected(self, runtime_name: str, runtime_version: str, nri_version: str, request_timeout_s: float) -> None:
        """Take note of a new connection, of which nothing is known yet.

        Parameters
        ----------
        runtime_name, runtime_version, nri_version : str
            What the runtime says of itself; the last is empty before NRI 0.12.
        request_timeout_s : float
            How long the runtime waits for an answer, in seconds.
        """

    def disconnected(self, reason: str) -> None:
        """Take note of the end of the connection; called once after `connected`, when no coroutine runs any more."""

    def synchronize_part(self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]) -> None:
        """Take some of the pods and containers that exist, of which nothing must be kept but what is needed.

        Raises
        ------
        NriError
            If all together are too much. The connection ends then.
        """

    async def synchronize(
        self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]
    ) -> Sequence[nri.ContainerUpdate]:
        """Take the rest of the pods and containers that exist, and return what has to be changed."""

    def synchronized(self) -> None:
        """Take note that the runtime has the answer of `synchronize`: updates may be pushed from now on."""

    async def create_container(
        self, pod: nri.PodSandbox, container: nri.Container
    ) -> tuple[nri.ContainerAdjustment, Sequence[nri.ContainerUpdate]]:
        """Return what to make of a container that is being created, and changes of others."""

    async def update_container(
        self, pod: nri.PodSandbox, container: nri.Container, resources: nri.LinuxResources
    ) -> Sequence[nri.ContainerUpdate]:
        """Return changes, also of the container itself, whose resources the kubelet is about to change."""

    async def stop_container(self, pod: nri.PodSandbox, container: nri.Container) -> Sequence[nri.ContainerUpdate]:
        """Return changes of other containers, now that this one has ended."""

    async def start_container(self, pod: nri.PodSandbox, container: nri.Container) -> None:
        """Take note that a container is being started, or raise `Refusal`; nothing of its image has run yet."""

    def event(self, kind: nri.Event, pod: nri.PodSandbox, container: nri.Container) -> None:
        """Take note of one of the events that nothing is decided at."""

    def pod_stopped(self, pod: nri.PodSandbox) -> None:
        """Take note that a pod's sandbox was stopped."""

    async def validate(self, request: nri.ValidateContainerAdjustmentRequest) -> str | None:
        """Return why a container may not be created with what all plugins have made of it, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things may take, in seconds.

    Attributes
    ----------
    first_retry_s, longest_retry_s : float
        How long to wait before connecting again, at first and at most.
    register_s : float
        For the answer to the registration. The runtime lets plugins in one after the other and grants each five seconds
        to register; whoever gives up is last again.
    configure_s, synchronize_s : float
        For the runtime's next steps. It synchronises when running operations on containers have ended.
    margin_s : float
        How long before the runtime gives up it is answered at the latest.
    """

    first_retry_s: float = 0.2
    longest_retry_s: float = 5.0
    register_s: float = 30.0
    configure_s: float = 10.0
    synchronize_s: float = 60.0
    margin_s: float = 0.25


class Session:
    """A connection to the runtime, from its registration to its end.

    Parameters
    ----------
    trunk : Trunk
        The socket, just connected.
    plugin : NriPlugin
        What the requests are put to.
    name, index : str
        The plugin's name and its two digits.
    subscription : Subscription
        Chooses the events.
    timing : Timing
        How long things may take.
    ready : callable
        Called when the runtime has been answered the synchronisation.

    Attributes
    ----------
    configured, synchronized : asyncio.Event
        Set once the runtime has been answered these steps.
    """

    def __init__(
        self,
        trunk: Trunk,
        plugin: NriPlugin,
        *,
        name: str,
        index: str,
        subscription: Subscription,
        timing: Timing,
        ready: Callable[[], None],
    ) -> None:
        self._trunk = trunk
        self._plugin = plugin
        self._name = name
        self._index = index
        self._subscription = subscription
        self._timing = timing
        self._ready = ready
        self.configured = asyncio.Event()
        self.synchronized = asyncio.Event()
        self._client = Client(trunk, RUNTIME_CONNECTION)
        self._server = Server(
            trunk,
            PLUGIN_CONNECTION,
            PLUGIN_SERVICE,
            self._methods(),
            answered=self._after_answer,
            timeout_s=_REQUEST_TIMEOUT_S,
            margin_s=timing.margin_s,
        )
        self._runtime: Runtime | None = None
        self._mask = 0
        # How many parts, pods and containers have been told.
        self._told = (0, 0, 0)
        self._events_accepted = False
        self._complete = False

    async def run(self) -> str:
        """Register the driver and serve the runtime until the connection ends, for whatever reason.

        Returns
        -------
        str
            Why it ended.
        """
        reading = asyncio.create_task(
            self._trunk.run({PLUGIN_CONNECTION: self._server, RUNTIME_CONNECTION: self._client})
        )
        handshake = asyncio.create_task(self._handshake())
        reason = "the driver is stopping"
        try:
            await asyncio.wait((reading, handshake), return_when=asyncio.FIRST_COMPLETED)
            failure = None if reading.done() else handshake.result()
            if failure is not None:
                self._trunk.close(failure)
            reason = await reading
            if failure is None:
                self._learn()
        finally:
            reading.cancel()
            handshake.cancel()
            self._trunk.close(reason)
            self._client.close(reason)
            await self._server.close()
            await asyncio.wait((reading, handshake))
            await self._trunk.closed()
            if self._runtime is not None:
                self._plugin.disconnected(reason)
        return reason

    async def update_containers(self, updates: Sequence[nri.ContainerUpdate], timeout_s: float) -> None:
        """Have the runtime change containers; see `NriConnection.update_containers`."""
        if self._server.serves(asyncio.current_task()):
            raise RuntimeError("the runtime updates no container until the request that is being handled is answered")
        if self._runtime is None or not allows_unsolicited_updates(self._runtime):
            raise RuntimeError(f"an update outside of an event may deadlock this runtime: {self._runtime}")
        answer = await self._client.call(
            RUNTIME_SERVICE,
            "UpdateContainers",
            nri.UpdateContainersRequest(update=updates),
            nri.UpdateContainersResponse,
            timeout_s=timeout_s,
        )
        if answer.failed:
            failed = ", ".join(bounded(update.container_id) for update in answer.failed[:_MOST_NAMED])
            raise NriError(Code.UNKNOWN, f"UpdateContainers: the runtime could not update {failed}")

    async def _handshake(self) -> str | None:
        """Register, wait for the runtime to do its part, and return what went wrong."""
        try:
            await self._client.call(
                RUNTIME_SERVICE,
                "RegisterPlugin",
                nri.RegisterPluginRequest(plugin_name=self._name, plugin_idx=self._index, NRI_version=NRI_VERSION),
                nri.Empty,
                timeout_s=self._timing.register_s,
            )
        except NriError as error:
            # The runtime leaves a connection open on which it has refused the registration, and never uses it.
            return f"the driver could not be registered with the runtime: {error}"
        for step, happened, timeout_s in (
            ("configure the driver after its registration", self.configured, self._timing.configure_s),
            ("synchronise the driver after its configuration", self.synchronized, self._timing.synchronize_s),
        ):
            try:
                async with asyncio.timeout(timeout_s):
                    await happened.wait()
            except TimeoutError:
                return f"the runtime did not {step} within {timeout_s:g} s"
        return None

    def _learn(self) -> None:
        """Conclude from when the runtime has closed the connection whether it knows all events."""
        if self.synchronized.is_set():
            self._subscription.forget()
        elif self._runtime is not None and self._mask & VALIDATION and not self._events_accepted:
            self._subscription.refused(self._runtime)

    def _methods(self) -> dict[str, Method]:
        methods = {
            "Configure": Method(request=nri.ConfigureRequest, answer=self._configure),
            "Synchronize": self._after(self.configured, nri.SynchronizeRequest, self._synchronize),
            "Shutdown": Method(request=nri.Empty, answer=_nothing),
            "UpdatePodSandbox": Method(request=nri.UpdatePodSandboxRequest, answer=_nothing),
        }
        methods |= {rpc: Method(request=nri.PodEvent, answer=_nothing) for rpc in _POD_RPCS}
        asked: tuple[tuple[str, type[Message], Handler], ...] = (
            ("CreateContainer", nri.CreateContainerRequest, self._create_container),
            ("UpdateContainer", nri.UpdateContainerRequest, self._update_container),
            ("StopContainer", nri.StopContainerRequest, self._stop_container),
            ("ValidateContainerAdjustment", nri.ValidateContainerAdjustmentRequest, self._validate),
            ("StartContainer", nri.ContainerEvent, self._start_container),
            ("StopPodSandbox", nri.PodEvent, self._stop_pod_sandbox),
            ("StateChange", nri.StateChangeEvent, self._state_change),
            *((rpc, nri.ContainerEvent, self._teller(kind)) for rpc, kind in _CONTAINER_RPCS.items()),
        )
        for rpc, request, answer in asked:
            methods[rpc] = self._after(self.synchronized, request, answer)
        return methods

    def _after(self, step: asyncio.Event, request: type[Message], answer: Handler) -> Method:
        """Return a method that is refused before a step of the handshake: the plugin would decide without knowledge."""

        async def checked(request: object) -> Message:
            if not step.is_set():
                raise NriError(Code.FAILED_PRECONDITION, "the driver is not configured and synchronised yet")
            return await answer(request)

        return Method(request=request, answer=checked)

    async def _configure(self, request: nri.ConfigureRequest) -> nri.ConfigureResponse:
        runtime = Runtime(
            name=bounded(request.runtime_name),
            version=bounded(request.runtime_version),
            nri_version=bounded(request.NRI_version),
        )
        if request.request_timeout > 0:
            timeout_s = max(request.request_timeout / 1000, _SHORTEST_REQUEST_TIMEOUT_S)
            self._server.timeout_s = min(timeout_s, _LONGEST_REQUEST_TIMEOUT_S)
        self._mask = self._subscription.choose(runtime)
        _log.info(
            "connected to the runtime",
            extra=fields(
                runtime=runtime.name,
                version=runtime.version,
                nri=runtime.nri_version or None,
                events=f"{self._mask:#06x}",
                validator=bool(self._mask & VALIDATION),
                request_timeout_s=self._server.timeout_s,
            ),
        )
        if self._runtime is None:
            self._plugin.connected(runtime.name, runtime.version, runtime.nri_version, self._server.timeout_s)
        self._runtime = runtime
        return nri.ConfigureResponse(events=self._mask)

    async def _synchronize(self, request: nri.SynchronizeRequest) -> nri.SynchronizeResponse:
        self._events_accepted = True
        parts, pods, containers = self._told
        self._told = parts + 1, pods + len(request.pods), containers + len(request.containers)
        if request.more:
            self._plugin.synchronize_part(request.pods, request.containers)
            return nri.SynchronizeResponse(more=True)
        (parts, pods, containers), self._told = self._told, (0, 0, 0)
        updates = await self._plugin.synchronize(request.pods, request.containers)
        self._complete = True
        _log.info(
            "synchronised with the runtime",
            extra=fields(pods=pods, containers=containers, parts=parts, updates=len(updates)),
        )
        return nri.SynchronizeResponse(update=updates)

    async def _create_container(self, request: nri.CreateContainerRequest) -> nri.CreateContainerResponse:
        adjustment, updates = await self._plugin.create_container(request.pod, request.container)
        return nri.CreateContainerResponse(adjust=adjustment, update=updates)

    async def _update_container(self, request: nri.UpdateContainerRequest) -> nri.UpdateContainerResponse:
        updates = await self._plugin.update_container(request.pod, request.container, request.linux_resources)
        return nri.UpdateContainerResponse(update=updates)

    async def _start_container(self, request: nri.ContainerEvent | nri.StateChangeEvent) -> nri.Empty:
        await self._plugin.start_container(request.pod, request.container)
        return nri.Empty()

    async def _stop_container(self, request: nri.StopContainerRequest) -> nri.StopContainerResponse:
        return nri.StopContainerResponse(update=await self._plugin.stop_container(request.pod, request.container))

    async def _validate(
        self, request: nri.ValidateContainerAdjustmentRequest
    ) -> nri.ValidateContainerAdjustmentResponse:
        reason = await self._plugin.validate(request)
        return nri.ValidateContainerAdjustmentResponse(reject=reason is not None, reason=reason or "")

    async def _state_change(self, request: nri.StateChangeEvent) -> nri.Empty:
        if request.event == nri.START_CONTAINER:
            return await self._start_container(request)
        if request.event in _CONTAINER_RPCS.values():
            self._plugin.event(request.event, request.pod, request.container)
        elif request.event == nri.STOP_POD_SANDBOX:
            self._plugin.pod_stopped(request.pod)
        return nri.Empty()

    async def _stop_pod_sandbox(self, request: nri.PodEvent) -> nri.Empty:
        self._plugin.pod_stopped(request.pod)
        return nri.Empty()

    def _teller(self, kind: nri.Event) -> Handler:
        async def tell(request: nri.ContainerEvent) -> nri.Empty:
            self._plugin.event(kind, request.pod, request.container)
            return nri.Empty()

        return tell

    def _after_answer(self, method: str, error: str | None) -> None:
        if method == "Shutdown":
            self._trunk.close("the runtime has shut the driver down")
        elif method in ("Configure", "Synchronize") and error is not None:
            # The runtime is about to close the connection too, but would not say why.
            self._trunk.close(f"{method} failed: {error}")
        elif method == "Configure":
            self.configured.set()
        elif method == "Synchronize" and self._complete:
            self._complete = False
            self.synchronized.set()
            self._ready()
            self._plugin.synchronized()


async def _nothing(_: object) -> nri.Empty:
    return nri.Empty()
