# SPDX-License-Identifier: Apache-2.0
"""Whether any of many containers may have some CPUs, found out without looking at each of them.

Most containers on a node have one and the same set, that of the shared pool, so each set is counted once for each of
its CPUs, however many containers have it.

Pure: no I/O, no state but its own.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from fastcpu import CpuSet


class Occupancy:
    """The sets of CPUs that containers may have.

    A question costs some microseconds for the words of the set that it is about, whatever was added before.
    """

    def __init__(self) -> None:
        self._holders: dict[CpuSet, int] = {}
        # For each CPU how many different sets have it; int32, as long as the largest set seen.
        self._sets = np.zeros(0, dtype=np.int32)

    def add(self, cpus: CpuSet) -> None:
        """Add the set of one more container."""
        holders = self._holders.get(cpus, 0)
        self._holders[cpus] = holders + 1
        if not holders:
            bits = _bits(cpus)
            if (missing := len(bits) - len(self._sets)) > 0:
                self._sets = np.pad(self._sets, (0, missing))
            self._sets[: len(bits)] += bits

    def remove(self, cpus: CpuSet) -> None:
        """Remove the set of one container, which was added before.

        Raises
        ------
        KeyError
            If it was not.
        """
        holders = self._holders[cpus] - 1
        if holders:
            self._holders[cpus] = holders
            return
        del self._holders[cpus]
        bits = _bits(cpus)
        self._sets[: len(bits)] -= bits

    def reaches(self, cpus: CpuSet, *, besides: Iterable[CpuSet] = ()) -> bool:
        """Tell whether some set has one of these CPUs.

        Parameters
        ----------
        cpus : CpuSet
            The CPUs.
        besides : iterable of CpuSet
            Sets that do not count, each once for each time that it is named; all were added before.
        """
        wanted = _bits(cpus).astype(bool)[: len(self._sets)]
        sets = self._sets[: len(wanted)]
        for own, times in Counter(besides).items():
            if self._holders[own] > times:
                # Others have the very same set.
                if not own.isdisjoint(cpus):
                    return True
                continue
            bits = _bits(own)[: len(sets)]
            sets = sets.copy()
            sets[: len(bits)] -= bits
        return bool(sets[wanted].any())


def _bits(cpus: CpuSet) -> npt.NDArray[np.uint8]:
    """Return 0 or 1 for each CPU up to the end of the set's last word."""
    return np.unpackbits(cpus.words.astype("<u8", copy=False).view(np.uint8), bitorder="little")
