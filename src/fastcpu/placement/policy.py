# SPDX-License-Identifier: Apache-2.0
"""Policy, what a request for CPUs may wish for beside their number."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

__all__ = ["Policy"]

_CHOICES: Final = {
    "spread": ("none", "cores"),
    "full_cores": ("prefer", "require"),
    "numa": ("pack", "distribute"),
    "core_type": ("any", "p-core", "e-core"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to choose CPUs where there is a choice.

    Attributes
    ----------
    spread : {"none", "cores"}
        ``cores``: one thread of each core where possible. Where there are fewer cores than CPUs asked for, no core
        gives a third thread before all others have given their second one, and so on.
    full_cores : {"prefer", "require"}
        ``require``: nothing but whole cores, each with all its online threads. There is nothing left to spread then.
    numa : {"pack", "distribute"}
        ``distribute``: as evenly as possible over all NUMA nodes that have CPUs to give. Each node gives equally many
        or one more, or all that it has: 15 CPUs of two nodes are 7 and 8. (With whole cores it is one core more; where
        cores differ in size it is as near to that as their sizes allow.) The other criteria decide which nodes give
        more.
    core_type : {"any", "p-core", "e-core"}
        ``any``: cores of one type if one has enough; performance cores first, efficiency cores last. Otherwise only
        this type, which a machine whose cores are all ``standard`` does not have.

    Raises
    ------
    ValueError
        If a value is none of these.
    """

    spread: Literal["none", "cores"] = "none"
    full_cores: Literal["prefer", "require"] = "prefer"
    numa: Literal["pack", "distribute"] = "pack"
    core_type: Literal["any", "p-core", "e-core"] = "any"

    def __post_init__(self) -> None:
        for field in fields(self):
            value, choices = getattr(self, field.name), _CHOICES[field.name]
            if value not in choices:
                raise ValueError(f"{field.name} is {' or '.join(map(repr, choices))}, not {value!r}")
