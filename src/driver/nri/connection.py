# SPDX-License-Identifier: Apache-2.0
"""The connection to the container runtime, made again for ever.

A runtime goes on without a plugin that is not connected: every second without a connection is one in which containers
start where they may not. So a socket that appears, as it does when the runtime starts, is connected to at once; only
while it stays the same is it tried ever less often.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from driver.config import check_socket_path
from driver.health import RUNTIME
from driver.logs import fields
from driver.nri.errors import Code, NriError, Refusal
from driver.nri.mux import Trunk
from driver.nri.session import NriPlugin, Session, Timing
from driver.nri.subscription import Subscription
from driver.retries import delays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.apis import nri_v1alpha1_pb2 as nri
    from driver.health import Health

__all__ = ["ConnectionMetrics", "NriConnection", "NriError", "NriPlugin", "Refusal", "Timing"]

_log = logging.getLogger(__name__)

_CONNECT_S: Final = 5.0
_LOOK_S: Final = 0.1
_BUFFER_BYTES: Final = 128 << 10


class ConnectionMetrics(Protocol):
    """What counts connections to the runtime."""

    def set_nri_connected(self, connected: bool, /) -> None:
        """Say whether the runtime is connected and the driver knows its containers."""

    def count_nri_reconnect(self) -> None:
        """Count that the connection was made again after it was lost."""


class NriConnection:
    """The driver's connection to the runtime.

    Parameters
    ----------
    socket_path : str or Path
        Where the runtime listens.
    plugin : NriPlugin
        What the runtime's requests are put to.
    health : Health
        Told, as the condition ``runtime``, whether the runtime is connected and synchronised, and why not.
    metrics : ConnectionMetrics
        Told the same, and each reconnection.
    name, index : str
        The plugin's name, and the two digits by which plugins are ordered.
    timing : Timing
        How long things may take.

    Raises
    ------
    ConfigError
        If the path is too long for a socket.
    """

    def __init__(
        self,
        socket_path: str | Path,
        plugin: NriPlugin,
        *,
        health: Health,
        metrics: ConnectionMetrics,
        name: str = "dra.cpu",
        index: str = "00",
        timing: Timing | None = None,
    ) -> None:
        self._path = Path(socket_path)
        check_socket_path(self._path)
        self._plugin = plugin
        self._health = health
        self._metrics = metrics
        self._name = name
        self._index = index
        self._timing = timing or Timing()
        self._subscription = Subscription()
        self._session: Session | None = None
        self._was_synchronized = False
        self._served = False

    @property
    def connected(self) -> bool:
        """Whether the runtime has configured the driver on the present connection."""
        return self._session is not None and self._session.configured.is_set()

    @property
    def synchronized(self) -> bool:
        """Whether the driver knows the runtime's containers, and may push updates."""
        return self._session is not None and self._session.synchronized.is_set()

    async def run(self) -> None:
        """Connect, serve and connect again, until cancelled."""
        self._health.require(RUNTIME, f"no connection to the runtime at {self._path} yet")
        self._metrics.set_nri_connected(False)
        clock = asyncio.get_running_loop().time
        waits = delays(self._timing.first_retry_s, self._timing.longest_retry_s)
        while True:
            tried = _identity(self._path)
            started = clock()
            self._served = False
            reason = f"no connection to the runtime at {self._path}: {await self._attempt()}"
            self._health.set_missing(RUNTIME, reason)
            _log.debug("no connection to the runtime", extra=fields(reason=reason))
            # One that never came to its events will not either next time, however long it took.
            if self._served and clock() - started > self._timing.longest_retry_s:
                waits = delays(self._timing.first_retry_s, self._timing.longest_retry_s)
            if await self._other_socket(tried, within_s=next(waits)):
                waits = delays(self._timing.first_retry_s, self._timing.longest_retry_s)

    async def update_containers(self, updates: Sequence[nri.ContainerUpdate], timeout_s: float) -> None:
        """Have the runtime change containers, outside of any event.

        The runtime first finishes the event that it is at, so this must never be awaited while one is being handled. It
        goes through the updates one by one and tells of failures only that there was one: push few at a time.

        Parameters
        ----------
        updates : Sequence
            The changes. Containers that the runtime does not know are skipped silently.
        timeout_s : float
            How long to wait for the answer, in seconds. What was not done by then may still be done.

        Raises
        ------
        NriError
            If the runtime is not connected and synchronised, an update failed, or there was no answer in time.
        RuntimeError
            If called from within the handling of an event.
        """
        if self._session is None or not self._session.synchronized.is_set():
            raise NriError(Code.UNAVAILABLE, f"no connection to the runtime at {self._path}")
        await self._session.update_containers(updates, timeout_s)

    async def _attempt(self) -> str:
        """Connect once, serve for as long as that lasts, and return why it ended."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=_BUFFER_BYTES)
        except TimeoutError:
            return f"it was not accepted within {_CONNECT_S:g} s"
        except OSError as error:
            return error.strerror or str(error)
        self._session = Session(
            Trunk(reader, writer),
            self._plugin,
            name=self._name,
            index=self._index,
            subscription=self._subscription,
            timing=self._timing,
            ready=self._ready,
        )
        try:
            return await self._session.run()
        except Exception as error:
            _log.exception("a bug")
            return f"internal error: {type(error).__name__}"
        finally:
            self._session = None
            self._metrics.set_nri_connected(False)

    def _ready(self) -> None:
        self._health.set_ok(RUNTIME)
        self._metrics.set_nri_connected(True)
        if self._was_synchronized:
            self._metrics.count_nri_reconnect()
        self._was_synchronized = True
        self._served = True

    async def _other_socket(self, tried: tuple[int, ...] | None, *, within_s: float) -> bool:
        """Wait for a while, or until there is another socket than the one that was tried, and tell whether there is."""
        clock = asyncio.get_running_loop().time
        end = clock() + within_s
        while (left := end - clock()) > 0:
            await asyncio.sleep(min(left, _LOOK_S))
            if _identity(self._path) not in (None, tried):
                return True
        return False


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
