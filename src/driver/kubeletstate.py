# SPDX-License-Identifier: Apache-2.0
"""What the kubelet's own files say of how it works on this node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from driver.errors import ClaimError
from driver.files import read_file
from driver.json_values import expect

if TYPE_CHECKING:
    from pathlib import Path

_CPU_MANAGER_STATE: Final = "cpu_manager_state"
_STATIC: Final = "static"
_LARGEST: Final = 4 << 20


def has_static_cpu_manager(kubelet_root: Path) -> bool:
    """Tell whether the kubelet's CPU manager gives containers CPUs of its own.

    Parameters
    ----------
    kubelet_root : Path
        The kubelet's folder.

    Returns
    -------
    bool
        False also if its state cannot be read or understood.
    """
    try:
        state = expect(json.loads(read_file(kubelet_root / _CPU_MANAGER_STATE, _LARGEST)), dict, "the state")
    except (ClaimError, OSError, ValueError, RecursionError):
        return False
    return state.get("policyName") == _STATIC
