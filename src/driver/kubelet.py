# SPDX-License-Identifier: Apache-2.0
"""The driver as the kubelet sees it: plugin registration and the DRA service, each on a Unix socket.

What the services say is elsewhere (`driver.draservice`, `driver.healthservice`); here it is served.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import quote

import grpc

from driver.apis import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    pluginregistration_pb2,
    pluginregistration_pb2_grpc,
)
from driver.draservice import DraServicer, bounded, one_line
from driver.errors import ConfigError
from driver.health import REGISTERED
from driver.healthservice import HealthServicer
from driver.logs import fields, operation
from driver.names import DRIVER_NAME
from driver.sockets import SocketFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from driver.draservice import ClaimPreparer
    from driver.health import Health
    from driver.healthservice import DeviceStates

_log = logging.getLogger(__name__)

# The kubelet takes the first entry of each kind that it knows, so the newest comes first.
_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
_FIRST_RETRY_SECONDS: Final = 0.1
_LONGEST_RETRY_SECONDS: Final = 5.0
_LONGEST_CALL_SECONDS: Final = 45.0  # the kubelet gives up then


class KubeletPlugin:
    """The two sockets on which the kubelet finds the driver.

    Parameters
    ----------
    dra_socket, registration_socket : Path
        Where the sockets shall be; missing folders are made.
    preparer : ClaimPreparer
        What the DRA service calls for each claim, for different claims at the same time.
    devices : DeviceStates
        What the health service tells of.
    health : Health
        Told, as the condition ``registered``, whether the kubelet has accepted the driver.
    check_interval_s : float
        How often to look whether the socket files are still there, in seconds.

    Raises
    ------
    ConfigError
        If a socket cannot have one of the paths.
    """

    def __init__(
        self,
        *,
        dra_socket: Path,
        registration_socket: Path,
        preparer: ClaimPreparer,
        devices: DeviceStates,
        health: Health,
        check_interval_s: float = 2.0,
    ) -> None:
        def dra_server() -> _Server:
            server = grpc.aio.server()
            dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(  # type: ignore[no-untyped-call]
                DraServicer(dra_v1_pb2, preparer), server
            )
            dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(  # type: ignore[no-untyped-call]
                DraServicer(dra_v1beta1_pb2, preparer), server
            )
            dra_health_v1_pb2_grpc.add_DRAResourceHealthServicer_to_server(  # type: ignore[no-untyped-call]
                HealthServicer(dra_health_v1_pb2, devices), server
            )
            dra_health_v1alpha1_pb2_grpc.add_DRAResourceHealthServicer_to_server(  # type: ignore[no-untyped-call]
                HealthServicer(dra_health_v1alpha1_pb2, devices), server
            )
            return server

        def registration_server() -> _Server:
            server = _ThreadServer()
            pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(  # type: ignore[no-untyped-call]
                _Registration(str(dra_socket), health, asyncio.get_running_loop()), server.grpc_server
            )
            return server

        self._dra = _Endpoint(dra_socket, dra_server)
        self._registration = _Endpoint(registration_socket, registration_server)
        self._devices = devices
        self._health = health
        self._check_interval_s = check_interval_s
        self._guard: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the sockets, the one for registration last, and keep them there.

        What may pass by itself, such as a folder that cannot be written yet, is tried again for ever.

        Raises
        ------
        ConfigError
            If something that is not a socket stands in a socket's place.
        """
        self._health.require(REGISTERED, "waiting for the kubelet to register the driver")
        await self._dra.open_patiently()
        await self._registration.open_patiently()
        self._guard = asyncio.create_task(self._keep_open())

    async def stop(self, grace_s: float = 5.0) -> None:
        """Remove both sockets, end the streams of health, let running calls finish, and stop.

        Parameters
        ----------
        grace_s : float
            How long running calls may take; what is left then is cancelled.
        """
        if self._guard is not None:
            self._guard.cancel()
            with suppress(asyncio.CancelledError):
                await self._guard
            self._guard = None
        self._devices.close()
        # In this order: once the registration socket is gone the kubelet hangs up, whatever is still being answered.
        await self._dra.close(grace_s)
        await self._registration.close(grace_s)

    async def _keep_open(self) -> None:
        """Open a socket again whose file is gone: nobody could connect to it any more."""
        while True:
            await asyncio.sleep(self._check_interval_s)
            await self._dra.reopen_if_lost()
            if await self._registration.reopen_if_lost():
                self._health.set_missing(REGISTERED, "waiting for the kubelet to register the driver again")


class _Server(Protocol):
    """What `grpc.aio.Server` has that an endpoint needs."""

    def add_insecure_port(self, address: str) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float | None) -> None: ...


class _ThreadServer:
    """A gRPC server with a thread of its own, for what must be answered in time whatever the event loop is doing."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="registration")
        self.grpc_server = grpc.server(self._thread)

    def add_insecure_port(self, address: str) -> int:
        return self.grpc_server.add_insecure_port(address)

    async def start(self) -> None:
        self.grpc_server.start()

    async def stop(self, grace: float | None) -> None:
        stopped = self.grpc_server.stop(grace)
        await asyncio.to_thread(stopped.wait)
        self._thread.shutdown(wait=False)


class _Endpoint:
    """A gRPC server on a socket file, and how to open it anew."""

    def __init__(self, path: Path, make_server: Callable[[], _Server]) -> None:
        self._file = SocketFile(path)
        self._make_server = make_server
        self._server: _Server | None = None
        self._retiring: dict[asyncio.Task[None], _Server] = {}
        self._complaint = ""

    async def open_patiently(self) -> None:
        """Open the socket; try again for ever what may pass by itself."""
        wait = _FIRST_RETRY_SECONDS
        while True:
            try:
                return await self._open()
            except (OSError, RuntimeError) as error:  # gRPC's failure to bind is a RuntimeError
                self._complain(f"cannot open the socket: {one_line(error)}")
            await asyncio.sleep(wait)
            wait = min(wait * 2, _LONGEST_RETRY_SECONDS)

    async def reopen_if_lost(self) -> bool:
        """Open the socket anew if its file is gone; return whether it was done."""
        if self._file.is_ours():
            return False
        lost = self._server
        try:
            if self._file.is_taken():
                # Two processes that replace each other's socket for ever would serve nobody.
                self._complain("another process has put its own socket here")
                return False
            await self._open()
        except (ConfigError, OSError, RuntimeError) as error:
            self._complain(f"the socket file is gone and cannot be made again: {one_line(error)}")
            return False
        _log.warning("the socket file was gone, opened the socket again", extra=fields(path=self._file.path))
        if lost is not None:
            # Calls that are running on the old server are answered; its clients then connect to the new one.
            task = asyncio.create_task(lost.stop(grace=_LONGEST_CALL_SECONDS))
            self._retiring[task] = lost
            task.add_done_callback(self._retiring.pop)
        return True

    async def close(self, grace_s: float) -> None:
        """Remove the socket file, give running calls some time to finish, and stop."""
        self._file.remove()
        servers = [*self._retiring.values()]
        if self._server is not None:
            servers.append(self._server)
            self._server = None
        await asyncio.gather(*(server.stop(grace=grace_s) for server in servers), *self._retiring)

    async def _open(self) -> None:
        server = self._make_server()
        try:
            self._file.stage()
            # gRPC reads the path as part of a URI, in which a percent sign and others are special.
            server.add_insecure_port("unix:" + quote(str(self._file.staged)))
            await server.start()
            self._file.publish()
        except BaseException:
            self._file.discard()
            await server.stop(grace=None)
            raise
        self._server = server
        self._complaint = ""
        _log.info("socket open", extra=fields(path=self._file.path))

    def _complain(self, complaint: str) -> None:
        """Log what is wrong, once as long as it stays the same."""
        if complaint != self._complaint:
            self._complaint = complaint
            _log.error(complaint, extra=fields(path=self._file.path))


class _Registration:
    """Adapter for `pluginregistration.Registration`; runs in a thread of its own.

    The kubelet gives GetInfo one second, however many claims it asks for at the same time.
    """

    def __init__(self, endpoint: str, health: Health, loop: asyncio.AbstractEventLoop) -> None:
        self._info = pluginregistration_pb2.PluginInfo(
            type="DRAPlugin", name=DRIVER_NAME, endpoint=endpoint, supported_versions=_SERVICES
        )
        self._health = health
        self._loop = loop

    def GetInfo(
        self, request: pluginregistration_pb2.InfoRequest, context: object
    ) -> pluginregistration_pb2.PluginInfo:
        with operation("get-info"):
            _log.debug("told the kubelet what this plugin is")
            return self._info

    def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: object
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        # An error as answer would make the kubelet forget the plugin; it tries again by itself either way.
        with operation("notify-registration"):
            if request.plugin_registered:
                _log.info("registered with the kubelet")
                self._loop.call_soon_threadsafe(self._health.set_ok, REGISTERED)
            else:
                reason = bounded(request.error) or "no reason given"
                _log.error("the kubelet refuses to register the driver", extra=fields(error=reason))
                self._loop.call_soon_threadsafe(
                    self._health.set_missing, REGISTERED, f"the kubelet refuses to register the driver: {reason}"
                )
        return pluginregistration_pb2.RegistrationStatusResponse()
