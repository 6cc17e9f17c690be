# SPDX-License-Identifier: Apache-2.0
"""The kubelet's side of the DRA protocol: finds plugins, registers them, and has them prepare claims.

It speaks to real plugins over their Unix sockets, with the kubelet's deadlines, its demands on answers and its habit of
wiping the node's slices at its own start and of a driver that stays away. Only the intervals can be made shorter.
"""

from __future__ import annotations

import asyncio
import math
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import grpc

from driver.apis import pluginregistration_pb2 as registration_pb2
from driver.apis import pluginregistration_pb2_grpc as registration_grpc
from driver.sandbox.plugins import KubeletError, Plugin, PreparedClaim

_DIAL_DEADLINE_S: Final = 10.0
_GET_INFO_DEADLINE_S: Final = 1.0
_NOTIFY_DEADLINE_S: Final = 5.0
_LONGEST_RETRY_S: Final = 122.0

# What identifies one socket file: a new one under the old name is a new plugin.
_Identity = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimName:
    """A claim as the kubelet names it to a plugin."""

    namespace: str
    name: str
    uid: str


@dataclass(slots=True, kw_only=True)
class _Retry:
    """When registration by a path that failed may be tried again, and how long to wait after that."""

    at: float
    wait_s: float


class Kubelet:
    """One node's kubelet, as far as plugins see it.

    Parameters
    ----------
    root : Path
        The kubelet's folder; `plugins` and `plugins_registry` are made in it.
    wipe_slices : callable, optional
        Deletes the node's slices of one driver, or of all for None. Called at the start and when a driver has had no
        connection for `wipe_after_s`.
    wipe_after_s : float
        The kubelet waits 30 seconds.
    poll_interval_s : float
        How often the registration folder is looked at.
    first_retry_s : float
        How long after a failed registration the next try comes; it doubles with each failure.
    say : callable, optional
        Called with one line for each thing that happens.
    """

    def __init__(
        self,
        root: Path,
        *,
        wipe_slices: Callable[[str | None], None] = lambda driver: None,
        wipe_after_s: float = 30.0,
        poll_interval_s: float = 0.02,
        first_retry_s: float = 0.5,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.root = root
        self._wipe_slices = wipe_slices
        self._wipe_after_s = wipe_after_s
        self._poll_interval_s = poll_interval_s
        self._first_retry_s = first_retry_s
        self._say = say
        self._plugins: dict[Path, Plugin] = {}
        self._identities: dict[Path, _Identity] = {}
        self._attempts: dict[Path, asyncio.Task[None]] = {}
        self._retries: dict[Path, _Retry] = {}
        self._errors: dict[Path, str] = {}
        self._wipes: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def registry_dir(self) -> Path:
        """The folder in which plugins put their registration sockets."""
        return self.root / "plugins_registry"

    @property
    def plugins_dir(self) -> Path:
        """The folder in which plugins have folders of their own."""
        return self.root / "plugins"

    @property
    def plugins(self) -> Mapping[str, Plugin]:
        """The registered plugin of each driver; of several instances the latest that is connected."""
        found: dict[str, Plugin] = {}
        for plugin in self._plugins.values():
            if plugin.name not in found or plugin.connected or not found[plugin.name].connected:
                found[plugin.name] = plugin
        return found

    @property
    def errors(self) -> Mapping[Path, str]:
        """Why registration by a socket failed the last time, for those that are not registered."""
        return dict(self._errors)

    async def __aenter__(self) -> Kubelet:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Wipe the node's slices as every start of a kubelet does, and begin to look for plugins."""
        for folder in (self.plugins_dir, self.registry_dir):
            folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._wipe_slices(None)
        self._task = asyncio.create_task(self._watch_registry())

    async def stop(self) -> None:
        """Forget all plugins without a word to them, as a kubelet that ends does."""
        tasks = [*self._attempts.values(), *self._wipes.values()]
        if self._task is not None:
            tasks.append(self._task)
            self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for plugin in self._plugins.values():
            await plugin.close()
        for memory in (self._plugins, self._identities, self._attempts, self._retries, self._errors, self._wipes):
            memory.clear()

    async def wait_registered(self, driver: str, timeout_s: float = 60.0, *, since: float = 0.0) -> Plugin:
        """Wait until a driver is registered and connected, and return its plugin.

        Parameters
        ----------
        driver : str
        timeout_s : float
        since : float
            Registrations before this `time.monotonic()` do not count: that of a killed process stays for a while.

        Raises
        ------
        KubeletError
            If it does not come in time, with the reason of the latest failure.
        """

        def there() -> bool:
            plugin = self.plugins.get(driver)
            return plugin is not None and plugin.connected and since <= plugin.registered_at < math.inf

        await self._wait(there, timeout_s, f"driver {driver}")
        return self.plugins[driver]

    async def wait_gone(self, driver: str, timeout_s: float = 60.0) -> None:
        """Wait until a driver is not registered any more or has no connection.

        Raises
        ------
        KubeletError
            If it stays.
        """
        await self._wait(
            lambda: driver not in self.plugins or not self.plugins[driver].connected, timeout_s, f"the end of {driver}"
        )

    async def wait_failed(self, timeout_s: float = 60.0) -> str:
        """Wait until some registration has failed, and return why.

        Raises
        ------
        KubeletError
            If none fails.
        """
        await self._wait(lambda: bool(self._errors), timeout_s, "a failed registration")
        return next(iter(self._errors.values()))

    async def prepare(self, driver: str, claims: Sequence[ClaimName]) -> dict[str, PreparedClaim]:
        """Have a driver prepare claims in one call.

        Returns
        -------
        dict of str to PreparedClaim
            By claim UID; a claim that failed has an `error`.

        Raises
        ------
        KubeletError
            If the driver is not registered, the call fails or the answer is not complete.
        """
        return await self._plugin(driver).prepare([(claim.namespace, claim.uid, claim.name) for claim in claims])

    async def unprepare(self, driver: str, claims: Sequence[ClaimName]) -> dict[str, str]:
        """Have a driver unprepare claims in one call.

        Returns
        -------
        dict of str to str
            By claim UID the error, empty for success.

        Raises
        ------
        KubeletError
            If the driver is not registered, the call fails or the answer is not complete.
        """
        return await self._plugin(driver).unprepare([(claim.namespace, claim.uid, claim.name) for claim in claims])

    def _plugin(self, driver: str) -> Plugin:
        if driver not in self.plugins:
            raise KubeletError(f"DRA driver {driver} is not registered")
        return self.plugins[driver]

    async def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(condition)
            except TimeoutError:
                reasons = "; ".join(f"{path.name}: {why}" for path, why in self._errors.items())
                because = f" ({reasons})" if reasons else ""
                raise KubeletError(f"waited {timeout_s:g} s in vain for {what}{because}") from None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch_registry(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            there = dict(_sockets(self.registry_dir))
            # As the kubelet does it: whatever is gone or replaced is let go before anything is registered.
            for path in [path for path in self._plugins if there.get(path) != self._identities[path]]:
                await self._deregister(path)
            for path in self._errors.keys() - there.keys():
                del self._errors[path]
            for path, identity in there.items():
                # A path that failed stays under its back-off even when the socket is made anew.
                due = path not in self._retries or loop.time() >= self._retries[path].at
                if due and path not in self._plugins and path not in self._attempts:
                    self._attempts[path] = asyncio.create_task(self._try_registering(path, identity))
            await asyncio.sleep(self._poll_interval_s)

    async def _deregister(self, path: Path) -> None:
        del self._identities[path]
        plugin = self._plugins.pop(path)
        self._say(f"{plugin.name}: unregistered, its registration socket is gone or new")
        await plugin.close()
        self._start_wipe_timer(plugin.name)
        await self._notify()

    async def _try_registering(self, path: Path, identity: _Identity) -> None:
        try:
            plugin = await self._register(path, identity)
        except KubeletError as error:
            self._errors[path] = str(error)
            self._say(f"{path.name}: registration failed: {error}")
            wait_s = self._retries[path].wait_s if path in self._retries else self._first_retry_s
            now = asyncio.get_running_loop().time()
            self._retries[path] = _Retry(at=now + wait_s, wait_s=min(wait_s * 2, _LONGEST_RETRY_S))
        else:
            self._errors.pop(path, None)
            self._retries.pop(path, None)
            plugin.registered_at = time.monotonic()
            self._say(f"{plugin.name}: registered by {path.name} as {plugin.service}")
        finally:
            del self._attempts[path]
        await self._notify()

    async def _register(self, path: Path, identity: _Identity) -> Plugin:
        async with _dialled(path) as channel:
            stub = registration_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            try:
                info = await stub.GetInfo(registration_pb2.InfoRequest(), timeout=_GET_INFO_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                raise KubeletError(f"GetInfo: {error.code().name}: {error.details()}") from error

            refusal = ""
            if info.type != "DRAPlugin":
                refusal = f"no handler registered for plugin type: {info.type} at socket {path}"
            elif not info.name:
                refusal = "the plugin has no name"
            service = Plugin.choose_service(info.supported_versions)
            if not refusal and service is None:
                known = ", ".join(Plugin.SERVICES)
                refusal = f"none of the plugin's services {list(info.supported_versions)} is supported: {known}"
            endpoint = info.endpoint or str(path)
            if any((other.name, other.endpoint) == (info.name, endpoint) for other in self._plugins.values()):
                refusal = f"DRA driver {info.name} is already registered at {endpoint}"
            if refusal or service is None:
                status = registration_pb2.RegistrationStatus(plugin_registered=False, error=refusal)
                with suppress(grpc.aio.AioRpcError):
                    await stub.NotifyRegistrationStatus(status, timeout=_NOTIFY_DEADLINE_S)
                raise KubeletError(refusal)

            self._identities[path] = identity
            # A later registration wins over an earlier one, so the new plugin is the last in the order.
            plugin = self._plugins[path] = Plugin(
                name=info.name,
                endpoint=endpoint,
                service=service,
                supported_versions=tuple(info.supported_versions),
                connection_changed=self._connection_changed,
            )
            try:
                status = registration_pb2.RegistrationStatus(plugin_registered=True)
                await stub.NotifyRegistrationStatus(status, timeout=_NOTIFY_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                await self._deregister(path)
                raise KubeletError(f"NotifyRegistrationStatus: {error.code().name}: {error.details()}") from error
            return plugin

    async def _connection_changed(self, plugin: Plugin) -> None:
        connected = any(other.connected for other in self._plugins.values() if other.name == plugin.name)
        if connected:
            timer = self._wipes.pop(plugin.name, None)
            if timer is not None:
                timer.cancel()
        else:
            self._say(f"{plugin.name}: connection lost")
            self._start_wipe_timer(plugin.name)
        await self._notify()

    def _start_wipe_timer(self, driver: str) -> None:
        if driver not in self._wipes and not any(
            plugin.connected for plugin in self._plugins.values() if plugin.name == driver
        ):
            self._wipes[driver] = asyncio.create_task(self._wipe_later(driver))

    async def _wipe_later(self, driver: str) -> None:
        await asyncio.sleep(self._wipe_after_s)
        self._say(f"{driver}: no connection for {self._wipe_after_s:g} s, deleting its slices")
        self._wipe_slices(driver)
        self._wipes.pop(driver, None)


def _sockets(folder: Path) -> Iterator[tuple[Path, _Identity]]:
    """Find the sockets below a folder as the kubelet does: nothing hidden, sub-folders too."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode):
            yield from _sockets(Path(entry.path))
        elif stat.S_ISSOCK(found.st_mode):
            yield Path(entry.path), (found.st_dev, found.st_ino, found.st_ctime_ns)


@asynccontextmanager
async def _dialled(path: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel("unix:" + quote(str(path)), Plugin.CHANNEL_OPTIONS) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), _DIAL_DEADLINE_S)
        except TimeoutError:
            raise KubeletError(f"cannot connect within {_DIAL_DEADLINE_S:g} s") from None
        yield channel
