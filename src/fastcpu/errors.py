# SPDX-License-Identifier: Apache-2.0
"""The errors of CPU sets, topologies, pools and placement.

A wrong argument (a negative id, a matrix of the wrong shape) raises a builtin ``TypeError`` or ``ValueError``. Input
from outside that is refused raises a class of this module. Its attributes have the facts, so that a caller can use its
own words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastcpu.cpuset import CpuSet

__all__ = ["CpuCheckError", "CpuHoldError", "CpuListError", "FastCpuError", "PlacementError", "TopologyError"]

_SHOWN_CHARACTERS = 80


def _shorten(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return repr(text)
    return f"{text[:_SHOWN_CHARACTERS]!r}… ({len(text)} characters)"


class FastCpuError(Exception):
    """Base of all errors of this package."""


class CpuListError(FastCpuError, ValueError):
    """A text is not a list of CPUs in the kernel's syntax.

    Attributes
    ----------
    text : str
        The whole text that was refused.
    position : int
        Index of the character at fault, 0-based.
    reason : str
        The fault at that character.
    """

    def __init__(self, text: str, position: int, reason: str) -> None:
        super().__init__(text, position, reason)
        self.text = text
        self.position = position
        self.reason = reason

    def __str__(self) -> str:
        return f"cpulist {_shorten(self.text)}, character {self.position + 1}: {self.reason}"


class TopologyError(FastCpuError):
    """A file of the sysfs tree has no meaning for any machine.

    Attributes
    ----------
    path : str
        The file, as an absolute ``/sys/...`` path.
    value : str or None
        Its content; None if it cannot be read.
    expected : str
        A description of a right content.
    """

    def __init__(self, path: str, value: str | None, expected: str) -> None:
        super().__init__(path, value, expected)
        self.path = path
        self.value = value
        self.expected = expected

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.path} is missing; expected {self.expected}"
        return f"{self.path}: {_shorten(self.value)} is not {self.expected}"


class CpuCheckError(FastCpuError):
    """A choice of CPUs does not fit the pool; the attributes have all faults at once.

    Attributes
    ----------
    cpus : CpuSet
        The whole choice.
    unmanaged : CpuSet
        Chosen CPUs that are offline or that the pool does not have.
    reserved : CpuSet
        Chosen CPUs that are reserved.
    outside : CpuSet
        Chosen CPUs that are managed and not reserved but in none of the demanded groups.
    taken : CpuSet
        Chosen CPUs that are taken.
    miscounted : tuple of (int, int, int)
        Group, CPUs demanded of it, CPUs chosen in it; only of groups where these numbers differ.
    """

    def __init__(
        self,
        cpus: CpuSet,
        unmanaged: CpuSet,
        reserved: CpuSet,
        outside: CpuSet,
        taken: CpuSet,
        miscounted: tuple[tuple[int, int, int], ...],
    ) -> None:
        super().__init__(cpus, unmanaged, reserved, outside, taken, miscounted)
        self.cpus = cpus
        self.unmanaged = unmanaged
        self.reserved = reserved
        self.outside = outside
        self.taken = taken
        self.miscounted = miscounted

    def __str__(self) -> str:
        faults = [
            f"CPUs {found} {what}"
            for found, what in (
                (self.unmanaged, "are not online here"),
                (self.reserved, "are reserved"),
                (self.outside, "are in none of the demanded groups"),
                (self.taken, "are taken"),
            )
            if found
        ]
        faults += [
            f"group {group}: {wanted} CPUs demanded, {chosen} chosen" for group, wanted, chosen in self.miscounted
        ]
        return f"cpuset {self.cpus}: " + "; ".join(faults)


class CpuHoldError(FastCpuError):
    """CPUs to take are taken already, or CPUs to release are not taken.

    Attributes
    ----------
    cpus : CpuSet
        The CPUs at fault.
    """

    def __init__(self, cpus: CpuSet, reason: str) -> None:
        super().__init__(cpus, reason)
        self.cpus = cpus
        self.reason = reason

    def __str__(self) -> str:
        return f"CPUs {self.cpus} {self.reason}"


class PlacementError(FastCpuError):
    """The free CPUs do not suffice for a request.

    Attributes
    ----------
    requested : int
        How many CPUs were asked for.
    available : int
        How many free CPUs may be taken.
    fitting : tuple of int
        The nearest numbers of CPUs that can be placed: at most one smaller and one larger one.
    whole_cores : bool
        Whether only whole cores may be taken.
    core_type : str
        The type of core that may be taken; ``any`` for all.
    """

    def __init__(
        self, requested: int, available: int, fitting: tuple[int, ...], whole_cores: bool, core_type: str
    ) -> None:
        super().__init__(requested, available, fitting, whole_cores, core_type)
        self.requested = requested
        self.available = available
        self.fitting = fitting
        self.whole_cores = whole_cores
        self.core_type = core_type

    def __str__(self) -> str:
        cores = "cores" if self.core_type == "any" else f"{self.core_type}s"
        kind = f"CPUs of whole {cores}" if self.whole_cores else "CPUs" if cores == "cores" else f"CPUs of {cores}"
        text = f"{self.requested} CPUs cannot be placed: {self.available or 'no'} {kind} are free"
        if self.fitting:
            text += f"; {' or '.join(map(str, self.fitting))} would fit"
        return text
