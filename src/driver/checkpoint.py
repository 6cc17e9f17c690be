# SPDX-License-Identifier: Apache-2.0
"""One record per prepared claim, as a file: the truth of who holds which CPUs while no driver runs.

A record is ``<folder>/<uid>.json``, in lines so that an administrator can read it. Reading trusts nothing: a file that
is cut short, of another version or about another claim is put aside as ``<uid>.json.corrupt`` and reported, never
deleted and never half believed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from driver.batches import Batches
from driver.cpulists import parse_cpulist
from driver.errors import ClaimError
from driver.files import (
    BrokenFile,
    read_file,
    remove_groups_of_files,
    remove_temporary_files,
    replace_files_durably,
)
from driver.json_values import expect, member_lines, quoted
from driver.ledger import PreparedDevice, Record
from driver.names import ClaimUID, claim_uid
from fastcpu import CpuSet
from fastcpu.cpuset import MAX_CPUS
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

RECORD_VERSION: Final = 1

_SUFFIX: Final = ".json"
_CORRUPT_SUFFIX: Final = ".corrupt"
# 32 results with cpulists of 10 KiB each stay far below.
_LARGEST_RECORD: Final = 1 << 20
_FOLDER_MODE: Final = 0o750
_FILE_MODE: Final = 0o640
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecords:
    """What the folder of records holds.

    Attributes
    ----------
    records : tuple of Record
        The usable ones, ordered by UID.
    broken : tuple of BrokenFile
        The others, where they are now.
    """

    records: tuple[Record, ...]
    broken: tuple[BrokenFile, ...]


class RecordStore:
    """The folder of records.

    Parameters
    ----------
    folder : Path
        Created when it is first needed. One process at a time works on it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writes = Batches(self.write_all_now)

    async def write(self, record: Record) -> bool:
        """Put a record on the disk, durably.

        Returns
        -------
        bool
            Whether it had to be written: False if exactly this record was there.

        Raises
        ------
        OSError
        """
        return await self._writes.do(record)

    async def load(self) -> LoadedRecords:
        """Read all records, putting the unusable ones aside and clearing away what a crash has left.

        Raises
        ------
        OSError
            If the folder cannot be created or listed. Nothing is known then about who holds what.
        """
        return await asyncio.to_thread(self._load)

    def write_all_now(self, records: Sequence[Record]) -> list[bool | Exception]:
        """Do what `write` does for several claims, in this thread, and return the exception of each that failed."""
        contents = [(_name(record.uid), encode_record(record)) for record in records]
        return replace_files_durably(self._folder, contents, mode=_FILE_MODE, folder_mode=_FOLDER_MODE)

    def remove_all_now(self, uids: Sequence[ClaimUID]) -> list[bool | Exception]:
        """Remove the records of claims durably, in this thread, and what was put aside of them.

        Returns
        -------
        list of bool or Exception
            For each claim whether there was any, or why it could not be removed.
        """
        return remove_groups_of_files(self._folder, [(_name(uid), _name(uid) + _CORRUPT_SUFFIX) for uid in uids])

    def _load(self) -> LoadedRecords:
        self._folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        remove_temporary_files(self._folder, lambda name: name.endswith(_SUFFIX))
        records: list[Record] = []
        broken: list[BrokenFile] = []
        for name in sorted(os.listdir(self._folder)):
            path = self._folder / name
            if name.endswith(_SUFFIX + _CORRUPT_SUFFIX):
                broken.append(BrokenFile(path=path, reason="put aside earlier"))
            elif name.endswith(_SUFFIX):
                try:
                    uid = claim_uid(name.removesuffix(_SUFFIX))
                    records.append(decode_record(read_file(path, _LARGEST_RECORD), uid))
                except (ClaimError, OSError) as error:
                    broken.append(_put_aside(path, str(error)))
        return LoadedRecords(records=tuple(records), broken=tuple(broken))


def encode_record(record: Record) -> bytes:
    """Write a record as JSON."""
    document = {
        "version": RECORD_VERSION,
        "uid": record.uid,
        "namespace": record.namespace,
        "name": record.name,
        "podClaimName": record.pod_claim_name,
        "generation": record.generation,
        "cpus": str(record.cpus),
        "requests": {request: str(cpus) for request, cpus in record.by_request.items()},
        "devices": [
            {
                "request": device.request,
                "pool": device.pool,
                "device": device.device,
                "shareID": device.share_id,
                "cpus": device.cpus,
            }
            for device in record.devices
        ],
        "fingerprint": record.fingerprint,
        "adopted": record.adopted,
        "preparedAt": record.prepared_at.isoformat(),
    }
    return member_lines(document)


def decode_record(content: bytes, uid: ClaimUID) -> Record:
    """Read a record.

    Parameters
    ----------
    content : bytes
        The file's content.
    uid : ClaimUID
        The claim that it must be about.

    Returns
    -------
    Record

    Raises
    ------
    ClaimError
        If it is no record of this version, or about another claim, or says what no prepare can have written.
    """
    try:
        document = expect(json.loads(content), dict, "the record")
    except (ValueError, RecursionError) as error:
        raise ClaimError(f"it is not JSON: {error}") from error
    version = expect(document.get("version"), int, "version")
    if version != RECORD_VERSION:
        raise ClaimError(f"it is of version {version}; expected {RECORD_VERSION}")
    owner = expect(document.get("uid"), str, "uid")
    if owner != uid:
        raise ClaimError(f"it is about claim {quoted(owner)}; expected {uid}")
    requests = expect(document.get("requests"), dict, "requests")
    devices = expect(document.get("devices"), list, "devices")
    record = Record(
        uid=uid,
        namespace=expect(document.get("namespace"), str, "namespace"),
        name=expect(document.get("name"), str, "name"),
        pod_claim_name=_optional_text(document, "podClaimName", "podClaimName"),
        generation=expect(document.get("generation"), int, "generation"),
        cpus=_cpus(document.get("cpus"), "cpus"),
        by_request={request: _cpus(cpus, f"requests[{quoted(request)}]") for request, cpus in requests.items()},
        devices=tuple(_device(device, f"devices[{index}]") for index, device in enumerate(devices)),
        fingerprint=expect(document.get("fingerprint"), str, "fingerprint"),
        adopted=expect(document.get("adopted"), bool, "adopted"),
        prepared_at=_time(expect(document.get("preparedAt"), str, "preparedAt")),
    )
    if not record.adopted:
        _check_complete(record)
    return record


def _check_complete(record: Record) -> None:
    """Refuse what a prepare cannot have written; an adopted record says nothing but its CPUs."""
    if not record.name or not record.namespace:
        raise ClaimError("namespace or name is empty; expected the claim's")
    if not record.devices:
        raise ClaimError("devices is empty; expected at least one")
    if not _FINGERPRINT.fullmatch(record.fingerprint):
        raise ClaimError(f"fingerprint {quoted(record.fingerprint)} is malformed; expected 64 hexadecimal digits")
    together = CpuSet().union(*record.by_request.values())
    if together != record.cpus:
        raise ClaimError(f"cpus are {record.cpus}, but its requests have {together} together")


def _optional_text(document: Mapping[str, object], key: str, place: str) -> str | None:
    value = document.get(key)
    return None if value is None else expect(value, str, place)


def _cpus(value: object, place: str) -> CpuSet:
    try:
        cpus = parse_cpulist(expect(value, str, place), MAX_CPUS)
    except CpuListError as error:
        raise ClaimError(f"{place}: {error}") from error
    if not cpus:
        raise ClaimError(f"{place} is empty; expected CPUs")
    return cpus


def _device(value: object, place: str) -> PreparedDevice:
    document = expect(value, dict, place)
    return PreparedDevice(
        request=expect(document.get("request"), str, f"{place}.request"),
        pool=expect(document.get("pool"), str, f"{place}.pool"),
        device=expect(document.get("device"), str, f"{place}.device"),
        share_id=_optional_text(document, "shareID", f"{place}.shareID"),
        cpus=expect(document.get("cpus"), int, f"{place}.cpus"),
    )


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ClaimError(f"preparedAt {quoted(text)} is not a time: {error}") from error
    if time.utcoffset() != timedelta():
        raise ClaimError(f"preparedAt {quoted(text)} is not in UTC")
    return time


def _name(uid: ClaimUID) -> str:
    return f"{uid}{_SUFFIX}"


def _put_aside(path: Path, reason: str) -> BrokenFile:
    aside = path.with_name(path.name + _CORRUPT_SUFFIX)
    try:
        os.replace(path, aside)
    except OSError as error:
        return BrokenFile(path=path, reason=f"{reason}; it cannot be put aside: {error}")
    return BrokenFile(path=aside, reason=reason)
