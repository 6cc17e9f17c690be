# SPDX-License-Identifier: Apache-2.0
"""The ledger: which claim holds which CPUs. The single source of truth while the driver runs.

All methods are synchronous and belong to the event loop's thread: between an allocator's choice and `Ledger.hold`
there is no ``await``, so no two claims can ever get one CPU. The pool's mask of taken CPUs is kept in step with the
records here and nowhere else: a CPU is taken exactly as long as some record has it.

Records that come from the disk are held whatever they say: they may have CPUs that are reserved, offline or unknown
by now, and, where an older driver went wrong, CPUs that another record has too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from fastcpu import CpuSet
from fastcpu.errors import CpuHoldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from driver.names import ClaimUID
    from fastcpu.pool import CpuPool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """One allocation result of ours in a prepared claim.

    Attributes
    ----------
    request : str
        The request as the claim's status names it, ``req`` or ``req/sub``.
    pool : str
        The device's pool.
    device : str
        The device's name.
    share_id : str or None
        The id of this share of the device.
    cpus : int
        How many of the device's CPUs it consumes; 0 where a device is one CPU and nothing is consumed of it.
    """

    request: str
    pool: str
    device: str
    share_id: str | None
    cpus: int

    @property
    def base_request(self) -> str:
        """The request's name without that of a sub-request, as containers refer to it."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of a claim that holds CPUs here.

    Attributes
    ----------
    uid : ClaimUID
        The claim's UID; everything else may be the same in two claims.
    namespace, name : str
        Where the API server has it; empty in an adopted record.
    pod_claim_name : str or None
        The name by which its pod knows it, if it was made from a template.
    generation : int
        The claim's ``metadata.generation`` when it was prepared.
    cpus : CpuSet
        All its CPUs.
    by_request : Mapping of str to CpuSet
        The CPUs of each request; empty in an adopted record.
    devices : tuple of PreparedDevice
        The results of ours, in the claim's order; empty in an adopted record.
    fingerprint : str
        Equal for two readings of a claim exactly if they ask for the same; empty in an adopted record.
    adopted : bool
        Made from a CDI spec that was found without a record, and not yet compared with the claim.
    prepared_at : datetime
        When it was prepared or adopted, in UTC.
    """

    uid: ClaimUID
    namespace: str
    name: str
    pod_claim_name: str | None
    generation: int
    cpus: CpuSet
    by_request: Mapping[str, CpuSet]
    devices: tuple[PreparedDevice, ...]
    fingerprint: str
    adopted: bool
    prepared_at: datetime

    @property
    def claim(self) -> str:
        """The claim's ``namespace/name`` for people, as far as it is known."""
        return f"{self.namespace}/{self.name}" if self.name else "(adopted)"


class Ledger:
    """Which claim holds which CPUs.

    Parameters
    ----------
    pool : CpuPool
        The node's CPUs. Only the ledger takes and releases in it.
    """

    def __init__(self, pool: CpuPool) -> None:
        self._pool = pool
        self._records: dict[ClaimUID, Record] = {}
        self._changed = asyncio.Event()
        self._stop = 64 * pool.n_words
        last = 64 * pool.n_words - 1
        self._within_pool = CpuSet.parse(f"0-{last}", limit=last + 1) if last > 0 else CpuSet()

    @property
    def pool(self) -> CpuPool:
        """The node's CPUs, with those taken that some record has."""
        return self._pool

    @property
    def stop(self) -> int:
        """One more than the highest CPU that the machine, or any record since the start, may have."""
        return self._stop

    @property
    def records(self) -> Mapping[ClaimUID, Record]:
        """A live view of all records."""
        return MappingProxyType(self._records)

    @property
    def changed(self) -> asyncio.Event:
        """An event that the next change sets, and that is never used again after that.

        Who takes it before looking at the ledger, and awaits it after having looked, misses no change.
        """
        return self._changed

    def get(self, uid: ClaimUID) -> Record | None:
        """Return a claim's record, None if it holds nothing here."""
        return self._records.get(uid)

    def holders(self, cpus: CpuSet) -> dict[ClaimUID, CpuSet]:
        """Return who holds some of these CPUs, and which of them.

        Parameters
        ----------
        cpus : CpuSet
            Any CPUs, known here or not.

        Returns
        -------
        dict of ClaimUID to CpuSet
            In the order in which the claims came to hold theirs. O(number of records).
        """
        return {uid: record.cpus & cpus for uid, record in self._records.items() if not record.cpus.isdisjoint(cpus)}

    def hold(self, record: Record) -> None:
        """Let a claim hold CPUs that nobody holds.

        Parameters
        ----------
        record : Record
            The claim's record.

        Raises
        ------
        CpuHoldError
            If some of its CPUs are held, or are not CPUs of this pool; nothing has changed then.
        ValueError
            If the claim has a record already.
        """
        self._refuse_known(record)
        self._pool.take(record.cpus)
        self._records[record.uid] = record
        self._notify()

    def hold_anyway(self, record: Record) -> dict[ClaimUID, CpuSet]:
        """Let a claim hold what it was given earlier, even where another claim holds it too or the CPU is unknown now.

        Parameters
        ----------
        record : Record
            The claim's record, as the disk had it.

        Returns
        -------
        dict of ClaimUID to CpuSet
            Who else holds some of its CPUs.

        Raises
        ------
        ValueError
            If the claim has a record already.
        """
        self._refuse_known(record)
        others = self.holders(record.cpus)
        self._stop = max(self._stop, record.cpus[-1] + 1 if record.cpus else 0)
        self._pool.take((record.cpus & self._within_pool) - _union(others.values()))
        self._records[record.uid] = record
        self._notify()
        return others

    def replace(self, record: Record) -> None:
        """Put a claim's record in the place of an older one that holds the same CPUs.

        Raises
        ------
        CpuHoldError
            If the older one holds other CPUs.
        KeyError
            If there is none.
        """
        if record.cpus != self._records[record.uid].cpus:
            raise CpuHoldError(record.cpus ^ self._records[record.uid].cpus, f"would change hands in {record.uid}")
        self._records[record.uid] = record
        self._notify()

    def release(self, uid: ClaimUID) -> None:
        """Let go of a claim's CPUs. What another claim holds too stays taken.

        Raises
        ------
        KeyError
            If the claim has no record.
        """
        record = self._records.pop(uid)
        still_held = _union(self.holders(record.cpus).values())
        self._pool.release((record.cpus & self._within_pool) - still_held)
        self._notify()

    def _refuse_known(self, record: Record) -> None:
        if record.uid in self._records:
            raise ValueError(f"claim {record.uid} holds CPUs {self._records[record.uid].cpus} already")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _union(sets: Iterable[CpuSet]) -> CpuSet:
    return CpuSet().union(*sets)
