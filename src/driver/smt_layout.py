# SPDX-License-Identifier: Apache-2.0
"""Which CPUs share a core, as a string short enough for a device attribute.

A layout is a list of entries with ``;`` between. ``CPULIST>S`` holds both members of pairs: the lowest CPU c of the
list that has no partner yet is paired with c+S, and so on until none is left; ``0-7>4`` are the cores 0+4, 1+5, 2+6
and 3+7. Entries stand in ascending S. Last comes, without ``>``, the list of the CPUs that are alone on their core.

The strided form may have ``CPULIST>S*K`` besides, for cores of K threads c, c+S, … c+(K−1)·S, and its lists may use the
kernel's strides. Cores whose CPUs have no common distance can be said in neither form.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from fastcpu import CpuSet
from fastcpu.topology import Level

__all__ = ["SmtLayout", "smt_layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmtLayout:
    """The SMT siblings of a machine.

    Attributes
    ----------
    plain : str or None
        The layout in plain ranges; None if a core has more than two CPUs.
    strided : str or None
        The layout in the strided form; None if the CPUs of a core have no common distance.
    """

    plain: str | None
    strided: str | None


def smt_layout(cores: Level) -> SmtLayout:
    """Describe the cores of a machine.

    Parameters
    ----------
    cores : Level
        The cores, each with its online CPUs.

    Returns
    -------
    SmtLayout
    """
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # (S, K) → CPUs; S = 0 where K = 1
    for row in range(len(cores)):
        cpus = list(cores.cpuset(row))
        distances = {higher - lower for lower, higher in pairwise(cpus)}
        if len(distances) > 1:
            return SmtLayout(plain=None, strided=None)
        members[distances.pop() if distances else 0, len(cpus)].extend(cpus)
    alone = members.pop((0, 1), [])
    entries = [(CpuSet(cpus), stride, ways) for (stride, ways), cpus in sorted(members.items())]
    plain = [f"{cpus}>{stride}" for cpus, stride, ways in entries if ways == 2]
    strided = [
        f"{cpus.strided()}>{stride}" if ways == 2 else f"{cpus.strided()}>{stride}*{ways}"
        for cpus, stride, ways in entries
    ]
    if alone:
        plain.append(str(CpuSet(alone)))
        strided.append(CpuSet(alone).strided())
    return SmtLayout(
        plain=";".join(plain) if all(ways == 2 for _, _, ways in entries) else None,
        strided=";".join(strided),
    )
