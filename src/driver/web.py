# SPDX-License-Identifier: Apache-2.0
"""The driver's HTTP side: probes, metrics and a page for people.

On most nodes this listens on the host's network, so anybody who reaches the node may call: nothing here tells who
uses the node, and no client can keep the driver from working. Each connection serves one request, has a few seconds
for it, and makes way for newer ones when there are too many.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from driver.errors import ConfigError
from driver.logs import fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from driver.health import Health

_log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS: Final = 0.5
_LONGEST_RETRY_SECONDS: Final = 30.0
_LONGEST_CONNECTION_SECONDS: Final = 10.0
_MOST_CONNECTIONS: Final = 64
# For how many times as long as a rendering of the metrics has taken none follows, and for how long at most.
_REST: Final = 9
_LONGEST_REST_S: Final = 1.0


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether aiohttp logs a fault of this driver: a client's is no event, and must not become a flood of log lines."""
    error = record.exc_info[1] if record.exc_info else None
    return record.levelno >= logging.ERROR and not isinstance(error, HttpProcessingError)


_aiohttp_log = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_log.addFilter(_is_ours)


class Exposition(Protocol):
    """What can write itself in one of Prometheus' text formats."""

    def render(self, accept: str, /) -> tuple[bytes, str]:
        """Return the metrics in the best format for an ``Accept`` header, and their content type."""

    def content_type(self, accept: str, /) -> str:
        """Return the content type that `render` chooses for an ``Accept`` header; there are only a few."""


def parse_bind_address(text: str) -> tuple[str, int]:
    """Take ``host:port`` apart.

    Parameters
    ----------
    text : str
        ``host:port``, ``:port`` for all addresses, or ``[address]:port`` for IPv6; port 0 lets the system choose.

    Returns
    -------
    host : str
        Empty for all addresses.
    port : int

    Raises
    ------
    ConfigError
        If the text is none of these.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    wellformed = (
        colon
        and port.isascii()
        and port.isdigit()
        and len(port) <= 5
        and int(port) <= 65535
        and ((":" in host) if bracketed else not set(host) & set(":[]/ "))
    )
    if not wellformed:
        raise ConfigError(
            f"--bind-address {text!r} is malformed: expected host:port, :port or "
            "[IPv6 address]:port, and a port from 0 to 65535"
        )
    return host, int(port)


class WebServer:
    """Serves ``/healthz``, ``/readyz``, ``/metrics`` and ``/``.

    Parameters
    ----------
    bind_address : str
        See `parse_bind_address`.
    health : Health
        What the probes answer.
    metrics : Exposition
        What ``/metrics`` answers.
    status : callable
        Returns what else the page for people shows, as names and values. Every value is public.

    Raises
    ------
    ConfigError
        If the address is malformed.
    """

    def __init__(
        self,
        bind_address: str,
        health: Health,
        metrics: Exposition,
        status: Callable[[], Mapping[str, object]],
    ) -> None:
        self._bind_address = bind_address
        self._host, self._port = parse_bind_address(bind_address)
        self._health = health
        self._renderings = _Renderings(metrics)
        self._status = status
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Task[None] | None = None
        self._servers: list[asyncio.Server] = []
        self._title = f"dracpu {version('dracpu')}: the Kubernetes DRA driver for CPUs (dra.cpu) of this node"
        self._door = _Door(_MOST_CONNECTIONS, _LONGEST_CONNECTION_SECONDS)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The addresses and ports that the server listens on by now; none if it cannot yet."""
        return [listener.getsockname()[:2] for server in self._servers for listener in server.sockets]

    async def start(self) -> None:
        """Begin to serve; an address that cannot be bound is tried again in the background, for ever."""
        application = web.Application(middlewares=[_finish])
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics_page)
        application.router.add_get("/", self._status_page)
        self._runner = web.AppRunner(
            application,
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            logger=_aiohttp_log,
            lingering_time=0,
            auto_decompress=False,
        )
        await self._runner.setup()
        try:
            await self._listen()
        except OSError as error:
            self._complain(error)
            self._listening = asyncio.create_task(self._listen_patiently(str(error)))

    async def stop(self) -> None:
        """Stop serving; connections that are open are closed."""
        if self._listening is not None:
            self._listening.cancel()
            with suppress(asyncio.CancelledError):
                await self._listening
            self._listening = None
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._door.close_all()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _listen_patiently(self, said: str) -> None:
        wait = _FIRST_RETRY_SECONDS
        while True:
            await asyncio.sleep(wait)
            wait = min(wait * 2, _LONGEST_RETRY_SECONDS)
            try:
                return await self._listen()
            except OSError as error:
                if str(error) != said:
                    said = str(error)
                    self._complain(error)

    def _complain(self, error: OSError) -> None:
        _log.error(
            "cannot serve HTTP, trying again",
            extra=fields(address=self._bind_address, error=os.strerror(error.errno) if error.errno else error),
        )

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for listener in await _bind(self._host, self._port):
            self._servers.append(await loop.create_server(self._accept, sock=listener, backlog=_MOST_CONNECTIONS))
        shown = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.addresses)
        _log.info("serving HTTP", extra=fields(address=shown))

    def _accept(self) -> asyncio.Protocol:
        assert self._runner is not None
        assert self._runner.server is not None
        return _Connection(self._runner.server(), self._door)

    async def _healthz(self, request: web.Request) -> web.Response:
        if self._health.started:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=self._missing() or "starting\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        remarks = _lines(self._health.remarks())
        if self._health.ready:
            return web.Response(text=f"ok\n{remarks}")
        return web.Response(status=503, text=(self._missing() or "starting\n") + remarks)

    async def _metrics_page(self, request: web.Request) -> web.Response:
        body, content_type = await self._renderings.get(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status_page(self, request: web.Request) -> web.Response:
        lines = [
            self._title,
            "",
            "ready" if self._health.ready else "not ready",
            *(f"  {line}" for line in (self._missing() + _lines(self._health.remarks())).splitlines()),
            "",
            *(f"{name}: {value}" for name, value in self._status().items()),
            "",
            "/healthz  whether it has started",
            "/readyz   whether it works, and what is missing",
            "/metrics  for Prometheus",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    def _missing(self) -> str:
        return _lines(self._health.missing())


def _lines(reasons: Mapping[str, str]) -> str:
    return "".join(f"{name}: {reason}\n" for name, reason in reasons.items())


@web.middleware
async def _finish(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Make every answer the last of its connection, and harmless in a browser."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status, text=f"{error.reason}\n", headers=_allowed(error))
    response.force_close()
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cache-Control"] = "no-store"
    return response


def _allowed(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


async def _bind(host: str, port: int) -> list[socket.socket]:
    """Bind every address of a host, or one socket for all addresses of both kinds as Go does."""
    if host in ("", "::"):
        if socket.has_dualstack_ipv6():
            with suppress(OSError):  # IPv6 may be compiled in and switched off
                return [socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)]
        if not host:
            return [socket.create_server(("0.0.0.0", port))]
    bound: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(found):
            bound.append(socket.create_server(address, family=family))
    except BaseException:
        for listener in bound:
            listener.close()
        raise
    return bound


class _Renderings:
    """Renders the metrics for all who ask, and yet takes a tenth of the time at most.

    To render them takes milliseconds, in which nobody else gets an answer, the container runtime included; and anybody
    on the network may ask.
    """

    def __init__(self, metrics: Exposition) -> None:
        self._metrics = metrics
        self._waiting: list[tuple[str, asyncio.Future[tuple[bytes, str]]]] = []
        self._rest_until = 0.0

    async def get(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics as they are at some time from now on, in the best format, and their content type."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[tuple[bytes, str]] = loop.create_future()
        self._waiting.append((accept, waiter))
        if len(self._waiting) == 1:
            loop.call_at(self._rest_until, self._render, loop)
        return await waiter

    def _render(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting, self._waiting = self._waiting, []
        started = loop.time()
        rendered: dict[str, tuple[bytes, str]] = {}
        for accept, waiter in waiting:
            if waiter.done():
                continue  # the connection has ended
            try:
                content_type = self._metrics.content_type(accept)
                if content_type not in rendered:
                    rendered[content_type] = self._metrics.render(accept)
                waiter.set_result(rendered[content_type])
            except Exception as error:
                waiter.set_exception(error)
        now = loop.time()
        self._rest_until = now + min(_REST * (now - started), _LONGEST_REST_S)


class _Door:
    """Lets connections in: the newest always, each for a limited time, and not too many at once."""

    def __init__(self, most: int, longest_s: float) -> None:
        self._most = most
        self._longest_s = longest_s
        self._inside: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # oldest first

    def enter(self, transport: asyncio.Transport) -> None:
        if len(self._inside) >= self._most:
            # The oldest has had the most time for its one request, so it is the least likely to be a probe.
            self._abort(next(iter(self._inside)))
        self._inside[transport] = asyncio.get_running_loop().call_later(self._longest_s, self._abort, transport)

    def leave(self, transport: asyncio.Transport) -> None:
        timer = self._inside.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def close_all(self) -> None:
        for transport in [*self._inside]:
            self._abort(transport)

    def _abort(self, transport: asyncio.Transport) -> None:
        self.leave(transport)
        transport.abort()


class _Connection(asyncio.Protocol):
    """A connection that goes through the door; aiohttp does the rest."""

    def __init__(self, handler: asyncio.Protocol, door: _Door) -> None:
        self._handler = handler
        self._door = door
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._door.enter(transport)
        self._handler.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._door.leave(self._transport)
        self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()
