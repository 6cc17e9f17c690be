# SPDX-License-Identifier: Apache-2.0
"""Which of several containers has the better right to a claim, when they are all there before the driver knows of them.

While there is no driver, nobody refuses a container that is created for a second pod of a claim; and before NRI 0.10 a
runtime does not tell which of two was created first. The one that has the claim's CPUs must not lose them to the other.

Pure: no I/O, no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.nri.container import Phase
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver.ledger import Record
    from driver.names import ClaimUID
    from driver.nri.container import Pod
    from driver.nri.survey import Found


def precedence(
    found: Found, pod: Pod, former: Mapping[ClaimUID, str], records: Mapping[ClaimUID, Record]
) -> tuple[bool, bool, bool, bool, int, str]:
    """Return a key by which containers are sorted, the one with the best right first.

    Parameters
    ----------
    found : Found
        The container, as the runtime tells it.
    pod : Pod
        Its pod.
    former : Mapping of ClaimUID to str
        The UIDs of the pods that are known to have used claims before.
    records : Mapping of ClaimUID to Record
        The claims that hold CPUs.

    Returns
    -------
    tuple
        First comes one whose pod had a claim before, then one that bears a mark of a claim, that is restricted to its
        claims' CPUs, that runs, and that was created earlier.
    """
    names = [variable.uid for variable in found.evidence.variables]
    had_it = any(former.get(name) == pod.uid for name in names)
    marked = bool(found.evidence.marked)
    claimed = CpuSet().union(*(records[name].cpus for name in names if name in records)) if names else CpuSet()
    restricted = found.cpus is not None and found.cpus <= claimed
    runs = found.phase is Phase.RUNNING
    return not had_it, not marked, not restricted, not runs, found.created_at, found.id
