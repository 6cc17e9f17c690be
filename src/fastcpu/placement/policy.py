# SPDX-License-Identifier: Apache-2.0
"""Policy, the wishes of a request for CPUs beside their number."""

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
        ``cores``: one thread of each core where possible. With fewer cores than CPUs asked for, no core gives its
        third thread before all others have given their second, and so on.
    full_cores : {"prefer", "require"}
        ``require``: whole cores only, each with all its online threads. It overrules ``spread``.
    numa : {"pack", "distribute"}
        ``distribute``: as evenly as possible over all NUMA nodes with free CPUs. Each node gives an equal share, or one
        CPU more, or all that it has: 15 CPUs of two nodes are 7 and 8. With whole cores a node gives one core more;
        where cores differ in size, the shares are as even as the sizes allow. The other criteria decide which nodes
        give more.
    core_type : {"any", "p-core", "e-core"}
        ``any``: cores of one type if one type has enough; performance cores first, efficiency cores last. The others:
        only cores of this type. A machine whose cores are all ``standard`` has neither.

    Raises
    ------
    ValueError
        If a value is none of these.

    Examples
    --------
    >>> Policy(full_cores="require", numa="distribute")
    Policy(spread='none', full_cores='require', numa='distribute', core_type='any')
    >>> Policy(numa="spread")
    Traceback (most recent call last):
        ...
    ValueError: numa is 'pack' or 'distribute', not 'spread'
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
