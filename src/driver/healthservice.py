# SPDX-License-Identifier: Apache-2.0
"""Tells the kubelet how the devices are: a stream of complete lists."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from driver.devicehealth import DeviceState

# The kubelet loses trust in a device that it has not heard of for so long, by its own clock.
_TRUSTED_S: Final = 30
_REPEAT_S: Final = 10.0
_LONGEST_MESSAGE_BYTES: Final = 1024


class DeviceStates(Protocol):
    """What knows how the devices are."""

    @property
    def states(self) -> Sequence[DeviceState]:
        """How all devices are."""

    @property
    def changed(self) -> asyncio.Event:
        """An event that the next change sets, and that is never used again after that."""

    @property
    def closed(self) -> bool:
        """Whether nobody shall wait any more."""

    def close(self) -> None:
        """Let nobody wait any more."""


class HealthServicer:
    """Adapter for `DRAResourceHealth` of either version.

    Parameters
    ----------
    messages : module
        `dra_health_v1_pb2` or `dra_health_v1alpha1_pb2`: the same messages.
    devices : DeviceStates
        What knows how the devices are.
    repeat_s : float
        How long to say nothing at most, in seconds.
    """

    def __init__(self, messages: Any, devices: DeviceStates, *, repeat_s: float = _REPEAT_S) -> None:
        self._messages = messages
        self._devices = devices
        self._repeat_s = repeat_s

    async def NodeWatchResources(self, request: object, context: object) -> AsyncIterator[Any]:
        """Send the list at once, at each change, and every few seconds."""
        while not self._devices.closed:
            changed = self._devices.changed
            yield self._messages.NodeWatchResourcesResponse(devices=map(self._device, self._devices.states))
            try:
                async with asyncio.timeout(self._repeat_s):
                    await changed.wait()
            except TimeoutError:
                pass

    def _device(self, state: DeviceState) -> Any:
        health = self._messages.UNHEALTHY if state.fault else self._messages.HEALTHY
        return self._messages.DeviceHealth(
            device=self._messages.DeviceIdentifier(pool_name=state.pool, device_name=state.device),
            health=health,
            last_updated_time=int(time.time()),
            health_check_timeout_seconds=_TRUSTED_S,
            message=state.fault.encode()[:_LONGEST_MESSAGE_BYTES].decode(errors="ignore"),
        )
