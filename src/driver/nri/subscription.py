# SPDX-License-Identifier: Apache-2.0
"""Which events the driver asks a runtime for.

A runtime closes the connection to a plugin that asks for an event it does not know, and has no other way to tell what
it knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from driver.apis import nri_v1alpha1_pb2 as nri

if TYPE_CHECKING:
    from collections.abc import Iterable

    EventNumber = nri.Event | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a runtime says of itself.

    Attributes
    ----------
    name, version : str
        Of the runtime, such as ``containerd`` and ``v2.4.2``.
    nri_version : str
        Of its NRI library; empty before NRI 0.12, and text such as ``(devel)`` where it was not built from a release.
    """

    name: str
    version: str
    nri_version: str


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

VALIDATION: Final = _mask((nri.VALIDATE_CONTAINER_ADJUSTMENT,))
"""Where the driver is a validator, a creation in which it did not answer fails, instead of going on without it."""

_VERSION: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\D|$)", re.ASCII)
# The first versions of these runtimes whose NRI is 0.10 or later.
_RUNTIMES_WITH_VALIDATORS: Final = {"containerd": (2, 2), "cri-o": (1, 34)}


def has_validators(runtime: Runtime) -> bool | None:
    """Tell whether plugins of a runtime may be validators.

    Returns
    -------
    bool or None
        None if what the runtime says of itself does not tell.
    """
    if runtime.nri_version:
        return True
    first = _RUNTIMES_WITH_VALIDATORS.get(runtime.name)
    found = _VERSION.match(runtime.version)
    if first is None or found is None:
        return None
    return (int(found[1]), int(found[2])) >= first


class Subscription:
    """Chooses the events, and learns from runtimes that refused some."""

    def __init__(self) -> None:
        self._refused: Runtime | None = None

    def choose(self, runtime: Runtime) -> int:
        """Return the mask of the events to ask a runtime for: all that it may be able to deliver."""
        if runtime == self._refused or has_validators(runtime) is False:
            return CONTAINER_EVENTS
        return CONTAINER_EVENTS | VALIDATION

    def refused(self, runtime: Runtime) -> None:
        """Ask a runtime for the fewest from now on: it closed the connection when it was asked for more."""
        self._refused = runtime

    def forget(self) -> None:
        """Ask for more again, next time.

        The runtime may have closed the connection for another reason, such as its own end, and would stay without a
        validator.
        """
        self._refused = None
