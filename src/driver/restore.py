# SPDX-License-Identifier: Apache-2.0
"""Bring the ledger, the records and the CDI specs into agreement when the driver starts.

First everything that any file speaks of is held; only then something is written. A crash at any point of this, or of a
prepare or unprepare before it, leaves files from which the same is done again.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from driver.ledger import Record
from driver.logs import fields
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from driver.cdi import CdiDirectory, FoundSpec
    from driver.checkpoint import RecordStore
    from driver.devices import DeviceModel
    from driver.ledger import Ledger
    from driver.metadata import MetadataStore
    from driver.names import ClaimUID

_log = logging.getLogger(__name__)


class RestoreMetrics(Protocol):
    """Counts what is not as it should be when the driver starts."""

    def count_broken_file(self, kind: str, /) -> None:
        """Count a file that cannot be used; ``kind`` is ``record`` or ``cdi``."""

    def count_record_mismatch(self, reason: str, /) -> None:
        """Count a record that does not fit; ``reason`` is ``offline``, ``reserved``, ``device`` or ``overlap``."""


async def restore(
    *,
    ledger: Ledger,
    records: RecordStore,
    cdi: CdiDirectory,
    metadata: MetadataStore,
    model: DeviceModel,
    metrics: RestoreMetrics,
) -> None:
    """Hold all that was given out before, and make the files agree with it.

    Records win: over CDI specs, and over a configuration or topology that has changed since. A claim's device in a CDI
    spec without a record is adopted, with what it says; its claim is not known by more than its UID.

    Parameters
    ----------
    ledger : Ledger
        Empty.
    records, cdi, metadata
        The files.
    model : DeviceModel
        The devices of today.
    metrics : RestoreMetrics
        Told of everything that does not fit.

    Raises
    ------
    OSError
        If the folder of records or the CDI folder cannot be read: then nobody knows who holds what, and nothing may
        be given out. What cannot be written is logged; the CPUs are held all the same.
    """
    loaded = await records.load()
    specs = await cdi.load()
    for broken, kind in [(file, "record") for file in loaded.broken] + [(file, "cdi") for file in specs.broken]:
        _log.error("a file cannot be used", extra=fields(path=broken.path, reason=broken.reason))
        metrics.count_broken_file(kind)
    for record in loaded.records:
        _hold(record, ledger, model, metrics)
    adopted = [_adopted(uid, spec) for uid, spec in specs.found.items() if ledger.get(uid) is None]
    for record in adopted:
        _hold(record, ledger, model, metrics)
    # A spec in somebody else's file is only moved once its claim has a record: in between it has no spec at all.
    recorded = {record.uid for record in loaded.records}
    for record in adopted:
        if await _write_record(record, records):
            recorded.add(record.uid)
    for uid in recorded:
        await _write_spec(ledger.records[uid], cdi, specs.found)
    await metadata.sweep(ledger.records)
    # The kubelet goes on naming the CDI devices that it was answered, so those of the metadata must be there as well.
    attributes = {device.name: device.attributes for device in model.devices}
    for record in loaded.records:
        if not record.adopted:
            await metadata.write(record, attributes)
    _log.info(
        "restored",
        extra=fields(claims=len(ledger.records), adopted=len(adopted), cpus=CpuSet().union(*_cpus(ledger))),
    )


def _cpus(ledger: Ledger) -> list[CpuSet]:
    return [record.cpus for record in ledger.records.values()]


def _adopted(uid: ClaimUID, spec: FoundSpec) -> Record:
    return Record(
        uid=uid,
        namespace="",
        name="",
        pod_claim_name=None,
        generation=0,
        cpus=spec.cpus,
        by_request={},
        devices=(),
        fingerprint="",
        adopted=True,
        prepared_at=datetime.now(UTC),
    )


def _hold(record: Record, ledger: Ledger, model: DeviceModel, metrics: RestoreMetrics) -> None:
    others = ledger.hold_anyway(record)
    unknown = [device.device for device in record.devices if device.device not in model.by_name]
    for reason, fault in (
        ("offline", record.cpus - ledger.pool.online),
        ("reserved", record.cpus & ledger.pool.reserved),
        ("device", ",".join(unknown)),
        ("overlap", ",".join(f"{uid}:{cpus}" for uid, cpus in others.items())),
    ):
        if fault:
            metrics.count_record_mismatch(reason)
            _log.warning(
                "a claim holds what it would not get today",
                extra=fields(claim=record.claim, uid=record.uid, cpus=record.cpus, **{reason: fault}),
            )
    _log.info(
        "adopted a claim" if record.adopted else "restored a claim",
        extra=fields(claim=record.claim, uid=record.uid, cpus=record.cpus),
    )


async def _write_record(record: Record, records: RecordStore) -> bool:
    try:
        await records.write(record)
    except OSError as error:
        _log.error("an adopted claim has no record", extra=fields(uid=record.uid, reason=error))
        return False
    return True


async def _write_spec(record: Record, cdi: CdiDirectory, found: Mapping[ClaimUID, FoundSpec]) -> None:
    elsewhere: tuple[Path, ...] = found[record.uid].elsewhere if record.uid in found else ()
    try:
        if await cdi.take_over(record.uid, record.cpus, elsewhere):
            _log.info("wrote a CDI spec anew", extra=fields(claim=record.claim, uid=record.uid, cpus=record.cpus))
    except OSError as error:
        _log.error("a prepared claim has no CDI spec", extra=fields(uid=record.uid, reason=error))
