# SPDX-License-Identifier: Apache-2.0
"""Lists of CPUs that another program wrote, read at a cost of their length.

A range with a stride, a dozen characters, costs as much as a whole row of words: up to the highest CPU that anything
here may be about that is a hundred thousand times as much as of any other text. Programs write plain ranges.
"""

from __future__ import annotations

from typing import Final

from fastcpu import CpuSet
from fastcpu.errors import CpuListError

MOST_STRIDES: Final = 16
"""So many ranges of a list may have a stride."""


def parse_cpulist(text: str, limit: int) -> CpuSet:
    """Read a list of CPUs.

    Parameters
    ----------
    text : str
        The list.
    limit : int
        One more than the highest CPU that it may have.

    Returns
    -------
    CpuSet

    Raises
    ------
    CpuListError
        If it is none, or has more strides than any program writes.
    """
    if (strides := text.count(":")) > MOST_STRIDES:
        raise CpuListError(text, text.index(":"), f"it has {strides} strides; expected plain ranges as in '0-3,8'")
    return CpuSet.parse(text, limit=limit)
