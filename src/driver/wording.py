# SPDX-License-Identifier: Apache-2.0
"""How messages name CPUs, devices and claims: in few words, whatever there is to name.

The kubelet cuts an event's message at about 1,000 characters. All faults of one claim together are to stay below that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from driver.names import ClaimUID
from fastcpu import CpuSet

SHOWN_NAMES: Final = 3
"""How many things of one kind a message names."""

_SHOWN_CPULIST: Final = 64


def shown(cpus: CpuSet) -> str:
    """Return CPUs as a list of ranges, or its beginning and their number if it is long."""
    for text in (str(cpus), cpus.strided()):
        if len(text) <= _SHOWN_CPULIST:
            return text
    beginning = str(cpus)[: _SHOWN_CPULIST + 1].rpartition(",")[0]
    return f"{beginning},… ({count(len(cpus))})"


def count(cpus: int) -> str:
    """Return a number of CPUs as a noun phrase."""
    return "1 CPU" if cpus == 1 else f"{cpus} CPUs"


def subject(cpus: CpuSet) -> str:
    """Return CPUs as the subject of a clause, with its verb."""
    return f"CPU {cpus.first} is" if len(cpus) == 1 else f"CPUs {shown(cpus)} are"


def not_online(cpus: CpuSet, online: CpuSet) -> str:
    """Say that CPUs are not online now, and which are."""
    return f"{subject(cpus)} not online on this node, which has {shown(online)}"


def names(all_names: Sequence[str], what: str = "devices") -> str:
    """Return some names, or the first, the last and their number if there are many."""
    if len(all_names) <= SHOWN_NAMES:
        return ", ".join(all_names) or "none"
    return f"{all_names[0]} … {all_names[-1]} ({len(all_names)} {what})"


def held_by(holders: Mapping[ClaimUID, CpuSet]) -> Iterator[str]:
    """Yield which CPUs are held by which claims, the lowest CPUs first, a clause for each."""
    ordered = sorted(holders.items(), key=lambda holder: holder[1].first)
    for uid, cpus in ordered[:SHOWN_NAMES]:
        yield f"{subject(cpus)} held by claim {uid}"
    if len(ordered) > SHOWN_NAMES:
        rest = CpuSet().union(*(cpus for _, cpus in ordered[SHOWN_NAMES:]))
        yield f"{subject(rest)} held by {len(ordered) - SHOWN_NAMES} more claims"
