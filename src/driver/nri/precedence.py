# SPDX-License-Identifier: Apache-2.0
"""Which of several containers has the better right to a claim, when they are all there before the driver knows of them.

While there is no driver, nobody refuses a container that is created for a second pod of a claim; and before NRI 0.10 a
runtime does not tell which of two was created first. The one that has the claim's CPUs must not lose them to the other.

Pure: no I/O, no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.names import CPUSET_VARIABLE_PREFIX, ClaimUID
from driver.nri import messages
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver.ledger import Record
    from driver.nri.decisions import Request


def precedence(
    request: Request, container: nri.Container, former: Mapping[ClaimUID, str], records: Mapping[ClaimUID, Record]
) -> tuple[bool, bool, bool, bool, int, str]:
    """Return a key by which containers are sorted, the one with the best right first.

    Parameters
    ----------
    request : Request
        What is to be decided about the container.
    container : Container
        The container, as the runtime tells it.
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
    names = [ClaimUID(entry.partition("=")[0].removeprefix(CPUSET_VARIABLE_PREFIX)) for entry in request.variables]
    had_it = any(former.get(name) == request.pod.uid for name in names)
    marked = bool(request.guards or request.cdi_devices)
    cpus = messages.read_cpus(container)
    restricted = cpus is not None and cpus <= CpuSet().union(*(records[name].cpus for name in names if name in records))
    runs = container.state == nri.CONTAINER_RUNNING
    return not had_it, not marked, not restricted, not runs, container.created_at, container.id
