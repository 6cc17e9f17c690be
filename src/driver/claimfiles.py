# SPDX-License-Identifier: Apache-2.0
"""Keep the ledger, a claim's record and its CDI specs in step, and other containers off the claim's CPUs.

Holding goes ledger, record, runtime, spec; letting go goes spec, record, ledger, runtime. So at every moment a spec has
a record and the CPUs of a record are held, and whatever a crash leaves is completed by `driver.restore`. A failure
undoes the earlier steps; where even that fails the CPUs stay held, and the claim's next prepare or unprepare goes on
from there. Where the runtime has nobody to move, it is asked before the record already: the ledger keeps others from
coming.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from driver.batches import Batches, each
from driver.errors import ClaimError, ClaimPendingError
from driver.logs import fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from driver.cdi import CdiDirectory
    from driver.checkpoint import RecordStore
    from driver.ledger import Ledger, Record
    from driver.metadata import MetadataStore
    from driver.names import ClaimUID
    from driver.runtime import Runtime

_log = logging.getLogger(__name__)


class ClaimFiles:
    """The files of prepared claims. No two calls for one claim may overlap, and none may be cancelled half-way.

    Parameters
    ----------
    ledger : Ledger
        Who holds which CPUs.
    records : RecordStore
        The records.
    cdi : CdiDirectory
        The CDI specs.
    metadata : MetadataStore
        What containers may read of their devices. No failure of it counts.
    attributes : mapping of str to mapping
        The published attributes of each device.
    runtime : Runtime
        What holds containers to their CPUs.
    """

    def __init__(
        self,
        ledger: Ledger,
        records: RecordStore,
        cdi: CdiDirectory,
        metadata: MetadataStore,
        attributes: Mapping[str, Mapping[str, object]],
        runtime: Runtime,
    ) -> None:
        self._ledger = ledger
        self._records = records
        self._cdi = cdi
        self._metadata = metadata
        self._attributes = attributes
        self._runtime = runtime
        # One visit to a thread, and to the right to run Python there, for all that belongs together.
        self._everything = Batches(self._write_everything)
        self._specs = Batches(each(self._write_specs))
        self._removals = Batches(self._remove_all)

    async def keep(self, record: Record, deadline: float) -> dict[str, str]:
        """Put on the disk and into force what the ledger holds since just now; on failure let the ledger release it.

        Parameters
        ----------
        record : Record
            A record that the ledger holds and that is in no file yet.
        deadline : float
            Until when to wait for the runtime, in the event loop's time.

        Returns
        -------
        dict of str to str
            The CDI ids that bring its metadata, as `driver.metadata.MetadataStore.write` returns them.

        Raises
        ------
        ClaimError
            If something cannot be written, or other containers cannot be moved away from its CPUs.
        """
        with self._runtime.barred(record.uid, "is still being prepared"):
            try:
                if self._runtime.is_clear(record):
                    _, metadata_ids = await self._everything.do(record)
                    # The runtime may have come back with containers that nobody knew.
                    await self._runtime.confirm(record, deadline)
                else:
                    await self._records.write(record)
                    await self._runtime.confirm(record, deadline)
                    _, metadata_ids = await self._specs.do(record)
            except Exception as error:
                await self._undo(record)
                if isinstance(error, ClaimPendingError):
                    self._runtime.spare(record)
                if isinstance(error, OSError):
                    raise ClaimError(f"cannot write the claim's files: {error}") from error
                raise
            return metadata_ids

    async def keep_again(self, record: Record, deadline: float) -> dict[str, str]:
        """Write whatever is missing or differs on the disk of what the ledger holds, and see that it is in force.

        Parameters
        ----------
        record : Record
            The record; the ledger may have an adopted one in its place until now.
        deadline : float
            Until when to wait for the runtime, in the event loop's time.

        Returns
        -------
        dict of str to str
            As for `keep`.

        Raises
        ------
        ClaimError
            If something cannot be written, or other containers cannot be moved away from its CPUs. The ledger is as it
            was.
        """
        try:
            if await self._records.write(record):
                _log.info("wrote the claim's record anew", extra=fields(cpus=record.cpus))
            await self._runtime.confirm(record, deadline)
            is_new, metadata_ids = await self._specs.do(record)
            if is_new:
                _log.info("wrote the claim's CDI spec anew", extra=fields(cpus=record.cpus))
        except OSError as error:
            raise ClaimError(f"the claim holds CPUs {record.cpus}, but cannot write its files: {error}") from error
        if self._ledger.get(record.uid) is not record:
            self._ledger.replace(record)
        return metadata_ids

    async def let_go(self, uid: ClaimUID, namespace: str, name: str) -> None:
        """Remove a claim's files and release its CPUs, as far as there are any.

        Parameters
        ----------
        uid : ClaimUID
            The claim.
        namespace, name : str
            Where its metadata would be.

        Raises
        ------
        ClaimError
            If something cannot be removed. The CPUs stay held.
        """
        held = self._ledger.get(uid)
        try:
            await self._removals.do((uid, namespace, name))
        except OSError as error:
            holds = "it holds no CPUs" if held is None else f"its CPUs {held.cpus} stay held"
            raise ClaimError(f"cannot remove the claim's files, {holds}: {error}") from error
        if held is not None:
            self._ledger.release(uid)
        self._runtime.released(uid)

    async def _undo(self, record: Record) -> None:
        try:
            await self._removals.do((record.uid, record.namespace, record.name))
        except OSError as error:
            _log.error("cannot undo, the CPUs stay held", extra=fields(cpus=record.cpus, reason=error))
        else:
            self._ledger.release(record.uid)
            self._runtime.released(record.uid)

    def _write_everything(self, records: Sequence[Record]) -> list[tuple[bool, dict[str, str]] | Exception]:
        """Write records, then the specs of those whose record is on the disk."""
        write_specs = each(self._write_specs)
        outcomes: list[tuple[bool, dict[str, str]] | Exception] = []
        for record, outcome in zip(records, self._records.write_all_now(records), strict=True):
            outcomes += [outcome] if isinstance(outcome, Exception) else write_specs([record])
        return outcomes

    def _write_specs(self, record: Record) -> tuple[bool, dict[str, str]]:
        is_new = self._cdi.write_now(record.uid, record.cpus)
        return is_new, self._metadata.write_now(record, self._attributes)

    def _remove_all(self, claims: Sequence[tuple[ClaimUID, str, str]]) -> list[bool | Exception]:
        """Remove specs, then the records of those whose spec is gone, then the metadata of those without a record."""
        outcomes = self._cdi.remove_all_now([uid for uid, _, _ in claims])
        left = [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, Exception)]
        removed = self._records.remove_all_now([claims[number][0] for number in left])
        for number, outcome in zip(left, removed, strict=True):
            outcomes[number] = outcome
            if not isinstance(outcome, Exception):
                self._metadata.remove_now(*claims[number])
        return outcomes
