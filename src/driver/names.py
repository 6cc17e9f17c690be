# SPDX-License-Identifier: Apache-2.0
"""The names that others rely on, and the identifiers that arrive from outside.

Everything here is part of the published interface: claims, schedulers, RBAC rules and other drivers' state use these
spellings.
"""

from __future__ import annotations

import re
from typing import Final, NewType

from driver.errors import ClaimError

DRIVER_NAME: Final = "dra.cpu"
CPU_CAPACITY: Final = "dra.cpu/cpu"
PARAMETERS_VERSION: Final = "v1alpha1"

CDI_VENDOR: Final = "dra.k8s.io"
CDI_CLASS: Final = "cpu"
CDI_KIND: Final = f"{CDI_VENDOR}/{CDI_CLASS}"
CDI_VERSION: Final = "0.8.0"
CPUSET_VARIABLE_PREFIX: Final = "DRA_CPUSET_"

ClaimUID = NewType("ClaimUID", str)

# A claim's UID becomes part of file names, CDI device names and the name of an environment variable.
_CLAIM_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}", re.ASCII)


def claim_uid(text: str) -> ClaimUID:
    """Check a claim's UID.

    Parameters
    ----------
    text : str
        The UID as it came from outside.

    Returns
    -------
    ClaimUID

    Raises
    ------
    ClaimError
        If it is not 1 to 63 letters, digits and dashes, beginning with a letter or digit.
    """
    if not _CLAIM_UID.fullmatch(text):
        shown = text if len(text) <= 80 else text[:80] + "…"
        raise ClaimError(
            f"claim UID {shown!r} is malformed: expected 1 to 63 ASCII letters, digits and dashes, "
            "beginning with a letter or digit"
        )
    return ClaimUID(text)


def cdi_device_name(uid: ClaimUID) -> str:
    """Return the name of a claim's CDI device."""
    return f"claim-{uid}"


def cdi_device_id(uid: ClaimUID) -> str:
    """Return the fully qualified CDI id that the kubelet hands to the runtime."""
    return f"{CDI_KIND}={cdi_device_name(uid)}"


def cdi_spec_name(uid: ClaimUID) -> str:
    """Return the file name of a claim's CDI spec."""
    return f"{CDI_VENDOR}-{CDI_CLASS}_{cdi_device_name(uid)}.json"


def cpuset_variable(uid: ClaimUID) -> str:
    """Return the name of the environment variable that tells a container its claim's CPUs."""
    return f"{CPUSET_VARIABLE_PREFIX}{uid}"
