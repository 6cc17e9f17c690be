# SPDX-License-Identifier: Apache-2.0
"""One registered plugin: the connection to its DRA service, and what the kubelet demands of its answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeVar
from urllib.parse import quote

import grpc

from driver.apis import dra_v1_pb2, dra_v1_pb2_grpc, dra_v1beta1_pb2, dra_v1beta1_pb2_grpc

_CALL_DEADLINE_S: Final = 45.0
_MODULES: Final[dict[str, tuple[ModuleType, ModuleType]]] = {
    "v1.DRAPlugin": (dra_v1_pb2, dra_v1_pb2_grpc),
    "v1beta1.DRAPlugin": (dra_v1beta1_pb2, dra_v1beta1_pb2_grpc),
}

_Entry = TypeVar("_Entry")
# Namespace, UID and name of a claim.
Claim = tuple[str, str, str]


class KubeletError(Exception):
    """Something a kubelet would report as a failed operation; the text is what it would say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """One device of a prepared claim, as the plugin answered it."""

    request_names: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedClaim:
    """A plugin's answer for one claim: devices, or an error."""

    devices: tuple[PreparedDevice, ...] = ()
    error: str = ""


class Plugin:
    """A registered plugin.

    Parameters
    ----------
    name, endpoint : str
        The driver's name and the path of its DRA socket.
    service : str
        Which of the plugin's services is used.
    supported_versions : tuple of str
        What the plugin said it serves.
    connection_changed : callable
        Awaited with this plugin when its connection comes or goes.

    Attributes
    ----------
    connected : bool
        Whether the DRA socket is connected now.
    registered_at : float
        `time.monotonic()` of when the plugin had taken the news of its registration; infinite before.
    """

    SERVICES: Final = tuple(_MODULES)

    # A new socket under an old path must be tried at once, not when the pool that all channels share thinks so.
    CHANNEL_OPTIONS: Final = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.enable_http_proxy", 0),
    )

    def __init__(
        self,
        *,
        name: str,
        endpoint: str,
        service: str,
        supported_versions: tuple[str, ...],
        connection_changed: Callable[[Plugin], Awaitable[None]],
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.service = service
        self.supported_versions = supported_versions
        self.connected = False
        self.registered_at = math.inf
        self._connection_changed = connection_changed
        self._messages, stubs = _MODULES[service]
        self._channel = grpc.aio.insecure_channel("unix:" + quote(endpoint), self.CHANNEL_OPTIONS)
        self._stub: Any = stubs.DRAPluginStub(self._channel)
        self._task = asyncio.create_task(self._watch_connection())

    @staticmethod
    def choose_service(supported_versions: Sequence[str]) -> str | None:
        """Return the first of the plugin's services that is known here: the plugin's order counts."""
        return next((version for version in supported_versions if version in _MODULES), None)

    async def close(self) -> None:
        """End the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(grace=None)
        self.connected = False

    async def prepare(self, claims: Sequence[Claim]) -> dict[str, PreparedClaim]:
        """Call NodePrepareResources; see `Kubelet.prepare`."""
        request = self._messages.NodePrepareResourcesRequest(claims=self._claims(claims))
        answer = await self._call(self._stub.NodePrepareResources, request)
        entries = _complete("NodePrepareResources", claims, dict(answer.claims))
        return {uid: self._decode(uid, entry) for uid, entry in entries.items()}

    async def unprepare(self, claims: Sequence[Claim]) -> dict[str, str]:
        """Call NodeUnprepareResources; see `Kubelet.unprepare`."""
        request = self._messages.NodeUnprepareResourcesRequest(claims=self._claims(claims))
        answer = await self._call(self._stub.NodeUnprepareResources, request)
        entries = _complete("NodeUnprepareResources", claims, dict(answer.claims))
        return {uid: str(entry.error) for uid, entry in entries.items()}

    def _claims(self, claims: Sequence[Claim]) -> list[Any]:
        return [self._messages.Claim(namespace=namespace, uid=uid, name=name) for namespace, uid, name in claims]

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any) -> Any:
        try:
            return await method(request, timeout=_CALL_DEADLINE_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise KubeletError(f"{self.name}: {error.code().name}: {error.details()}") from error
        except asyncio.CancelledError:
            # So end calls, too, whose channel is closed: the driver has registered itself anew.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise KubeletError(f"{self.name}: CANCELLED: the connection was closed") from None

    def _decode(self, uid: str, entry: Any) -> PreparedClaim:
        if entry.error:
            return PreparedClaim(error=entry.error)
        devices = []
        for device in entry.devices:
            if not device.pool_name or not device.device_name:
                raise KubeletError(f"claim {uid}: the plugin answered a device without pool or name: {device}")
            sub_requests = [name for name in device.request_names if "/" in name]
            if sub_requests:
                # The kubelet compares with the names that containers use, which never have a slash.
                raise KubeletError(f"claim {uid}: request names {sub_requests} can match no container")
            has_share = "share_id" in device.DESCRIPTOR.fields_by_name and device.HasField("share_id")
            devices.append(
                PreparedDevice(
                    request_names=tuple(device.request_names),
                    pool=device.pool_name,
                    device=device.device_name,
                    cdi_ids=tuple(device.cdi_device_ids),
                    share_id=device.share_id if has_share else None,
                )
            )
        return PreparedClaim(devices=tuple(devices))

    async def _watch_connection(self) -> None:
        while True:
            state = self._channel.get_state(try_to_connect=True)
            connected = state is grpc.ChannelConnectivity.READY
            if connected is not self.connected:
                self.connected = connected
                await self._connection_changed(self)
            await self._channel.wait_for_state_change(state)


def _complete(method: str, claims: Sequence[Claim], entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """Check that an answer has exactly one entry for each claim of the call."""
    asked = {uid for _, uid, _ in claims}
    unknown = set(entries) - asked
    if unknown:
        raise KubeletError(f"{method}: the plugin answered for claims that were not asked for: {sorted(unknown)}")
    missing = asked - set(entries)
    if missing:
        raise KubeletError(f"{method} skipped {len(missing)} claims: {sorted(missing)}")
    return entries
