# SPDX-License-Identifier: Apache-2.0
"""Keep the ledger, a claim's record and its CDI spec in step, and other containers off the claim's CPUs.

Holding goes ledger, record, runtime, spec; letting go goes spec, record, ledger, runtime. So at every moment a spec has
a record and the CPUs of a record are held, and whatever a crash leaves is completed by `driver.restore`. A failure
undoes the earlier steps; where even that fails the CPUs stay held, and the claim's next prepare or unprepare goes on
from there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from driver.errors import ClaimError, ClaimPendingError
from driver.logs import fields

if TYPE_CHECKING:
    from driver.cdi import CdiDirectory
    from driver.checkpoint import RecordStore
    from driver.ledger import Ledger, Record
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
    runtime : Runtime
        What holds containers to their CPUs.
    """

    def __init__(self, ledger: Ledger, records: RecordStore, cdi: CdiDirectory, runtime: Runtime) -> None:
        self._ledger = ledger
        self._records = records
        self._cdi = cdi
        self._runtime = runtime

    async def keep(self, record: Record, deadline: float) -> None:
        """Put on the disk and into force what the ledger holds since just now; on failure let the ledger release it.

        Parameters
        ----------
        record : Record
            A record that the ledger holds and that is in no file yet.
        deadline : float
            Until when to wait for the runtime, in the event loop's time.

        Raises
        ------
        ClaimError
            If something cannot be written, or other containers cannot be moved away from its CPUs.
        """
        with self._runtime.barred(record.uid, "is still being prepared"):
            try:
                await self._records.write(record)
                await self._runtime.confirm(record, deadline)
                await self._cdi.write(record.uid, record.cpus)
            except Exception as error:
                await self._undo(record)
                if isinstance(error, ClaimPendingError):
                    self._runtime.spare(record)
                if isinstance(error, OSError):
                    raise ClaimError(f"cannot write the claim's files: {error}") from error
                raise

    async def keep_again(self, record: Record, deadline: float) -> None:
        """Write whatever is missing or differs on the disk of what the ledger holds, and see that it is in force.

        Parameters
        ----------
        record : Record
            The record; the ledger may have an adopted one in its place until now.
        deadline : float
            Until when to wait for the runtime, in the event loop's time.

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
            if await self._cdi.write(record.uid, record.cpus):
                _log.info("wrote the claim's CDI spec anew", extra=fields(cpus=record.cpus))
        except OSError as error:
            raise ClaimError(f"the claim holds CPUs {record.cpus}, but cannot write its files: {error}") from error
        if self._ledger.get(record.uid) is not record:
            self._ledger.replace(record)

    async def let_go(self, uid: ClaimUID) -> None:
        """Remove a claim's files and release its CPUs, as far as there are any.

        Parameters
        ----------
        uid : ClaimUID
            The claim.

        Raises
        ------
        ClaimError
            If something cannot be removed. The CPUs stay held.
        """
        held = self._ledger.get(uid)
        try:
            await self._cdi.remove(uid)
            await self._records.remove(uid)
        except OSError as error:
            holds = "it holds no CPUs" if held is None else f"its CPUs {held.cpus} stay held"
            raise ClaimError(f"cannot remove the claim's files, {holds}: {error}") from error
        if held is not None:
            self._ledger.release(uid)
        self._runtime.released(uid)

    async def _undo(self, record: Record) -> None:
        try:
            await self._cdi.remove(record.uid)
            await self._records.remove(record.uid)
        except OSError as error:
            _log.error("cannot undo, the CPUs stay held", extra=fields(cpus=record.cpus, reason=error))
        else:
            self._ledger.release(record.uid)
            self._runtime.released(record.uid)
