# SPDX-License-Identifier: Apache-2.0
"""What a container runtime can do, told from what it says of itself.

Pure: no I/O, no state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


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


_VERSION: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\D|$)", re.ASCII)
_RELEASE: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(-[0-9A-Za-z.-]+)?(?:\+.*)?", re.ASCII)
# The first versions of these runtimes whose NRI is 0.10 or later.
_WITH_VALIDATORS: Final = {"containerd": (2, 2), "cri-o": (1, 34)}
_TELLS_CDI_DEVICES: Final = {"containerd": (2, 3)}
# NRI before this takes its own lock before the runtime's for an update outside of an event, and the runtime takes them
# the other way round for every event: the two wait for each other for ever.
_NRI_WITHOUT_DEADLOCK: Final = (0, 12, 1)
_UNKNOWN_NRI: Final = "0.0.0-unknown"
_CONTAINERD_WITHOUT_DEADLOCK: Final = (2, 4, 0)


def has_validators(runtime: Runtime) -> bool | None:
    """Tell whether plugins of a runtime may be validators.

    Returns
    -------
    bool or None
        None if what the runtime says of itself does not tell.
    """
    if runtime.nri_version:
        return True
    return _is_since(runtime, _WITH_VALIDATORS)


def tells_cdi_devices(runtime: Runtime) -> bool:
    """Tell whether a runtime tells plugins the CDI devices of containers."""
    return _is_since(runtime, _TELLS_CDI_DEVICES) is True


def allows_unsolicited_updates(runtime: Runtime) -> bool:
    """Tell whether a runtime can be told to update containers outside of its events without the risk of a deadlock.

    True only where that is sure: for NRI 0.12.1 and later, and for containerd 2.4.0 and later that was built without
    the version of its NRI.
    """
    if runtime.nri_version.removeprefix("v") == _UNKNOWN_NRI:
        return runtime.name == "containerd" and _is_release_since(runtime.version, _CONTAINERD_WITHOUT_DEADLOCK)
    return _is_release_since(runtime.nri_version, _NRI_WITHOUT_DEADLOCK)


def _is_since(runtime: Runtime, firsts: dict[str, tuple[int, int]]) -> bool | None:
    first = firsts.get(runtime.name)
    found = _VERSION.match(runtime.version)
    if first is None or found is None:
        return None
    return (int(found[1]), int(found[2])) >= first


def _is_release_since(version: str, first: tuple[int, int, int]) -> bool:
    """Compare as semantic versions: what is built before a release, as ``v0.12.1-0.20260101``, is older than it."""
    found = _RELEASE.fullmatch(version)
    if found is None:
        return False
    release = (int(found[1]), int(found[2]), int(found[3]))
    return release > first or (release == first and not found[4])
