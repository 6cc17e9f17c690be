# SPDX-License-Identifier: Apache-2.0
"""Which events the driver asks a runtime for.

A runtime closes the connection to a plugin that asks for an event it does not know, and has no other way to tell what
it knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.nri.runtimes import allows_unsolicited_updates, has_validators

if TYPE_CHECKING:
    from collections.abc import Iterable

    from driver.nri.runtimes import Runtime

    EventNumber = nri.Event | int


def _mask(events: Iterable[EventNumber]) -> int:
    return sum(1 << (event - 1) for event in events)


CONTAINER_EVENTS: Final = _mask(
    (
        nri.STOP_POD_SANDBOX,
        nri.CREATE_CONTAINER,
        nri.POST_CREATE_CONTAINER,
        nri.POST_START_CONTAINER,
        nri.UPDATE_CONTAINER,
        nri.POST_UPDATE_CONTAINER,
        nri.STOP_CONTAINER,
        nri.REMOVE_CONTAINER,
    )
)
"""What every runtime with NRI has, and the driver cannot do without.

Of a container whose start failed nothing is told but that its pod is stopped, until somebody removes it.
"""

STARTS: Final = _mask((nri.START_CONTAINER,))
"""Where containers are moved in answers only, a start is refused if a container was not moved away before it."""

VALIDATION: Final = _mask((nri.VALIDATE_CONTAINER_ADJUSTMENT,))
"""Where the driver is a validator, a creation in which it did not answer fails, instead of going on without it."""


class Subscription:
    """Chooses the events, and learns from runtimes that refused some."""

    def __init__(self) -> None:
        self._refused: Runtime | None = None

    def choose(self, runtime: Runtime) -> int:
        """Return the mask of the events to ask a runtime for: all that it may be able to deliver."""
        events = CONTAINER_EVENTS if allows_unsolicited_updates(runtime) else CONTAINER_EVENTS | STARTS
        if runtime == self._refused or has_validators(runtime) is False:
            return events
        return events | VALIDATION

    def refused(self, runtime: Runtime) -> None:
        """Ask a runtime for the fewest from now on: it closed the connection when it was asked for more."""
        self._refused = runtime

    def forget(self) -> None:
        """Ask for more again, next time.

        The runtime may have closed the connection for another reason, such as its own end, and would stay without a
        validator.
        """
        self._refused = None
