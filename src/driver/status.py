# SPDX-License-Identifier: Apache-2.0
"""Tell the API server which CPUs a claim was given: ``status.devices`` of the claim.

This is for people and tools; nothing depends on it. It happens in the background, a few claims at a time and not before
the prepares of a burst have had the API server for themselves, is tried again for a while, and is given up with a line
in the log. What waits is bounded.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Final, Protocol

from driver.errors import ApiError
from driver.logs import fields
from driver.names import DRIVER_NAME, ClaimUID
from driver.retries import delays, may_pass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from driver.ledger import Record
    from fastcpu import CpuSet

_log = logging.getLogger(__name__)

Entry = dict[str, object]
"""One entry of ``status.devices``, as JSON."""

_LARGEST_DATA: Final = 10_240
_MOST_WAITING: Final = 1024
_AT_A_TIME: Final = 4
_ATTEMPTS: Final = 8
_LONGEST_DELAY_S: Final = 60.0
_KEY: Final = ("driver", "pool", "device", "shareID", "data")


class ClaimStatusApi(Protocol):
    """The one call to the API server that this needs."""

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: Sequence[Mapping[str, object]], /
    ) -> object:
        """Make some entries this driver's entries of a claim's ``status.devices``; `ApiError` says why not."""


class StatusWriter:
    """Writes the status of claims in the background.

    Parameters
    ----------
    api : ClaimStatusApi
        The API server.
    settle_s : float
        How long a claim waits before its status is written, in seconds. One that is gone by then costs nothing.
    first_delay_s : float
        How long to wait after a first failure, in seconds; longer after each further one.
    """

    def __init__(self, api: ClaimStatusApi, *, settle_s: float = 0.25, first_delay_s: float = 1.0) -> None:
        self._api = api
        self._settle_s = settle_s
        self._first_delay_s = first_delay_s
        self._tasks: dict[ClaimUID, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_AT_A_TIME)

    @property
    def waiting(self) -> int:
        """How many claims' status is still to be written."""
        return len(self._tasks)

    def submit(self, record: Record, entries: Sequence[Entry]) -> None:
        """Have a claim's entries written some time soon, in place of any that still wait.

        Parameters
        ----------
        record : Record
            The claim.
        entries : sequence of Entry
            As `device_entries` returns them; nothing is done if there are none.
        """
        self.drop(record.uid)
        if not entries:
            return
        if len(self._tasks) >= _MOST_WAITING:
            _log.warning("too many claims wait for their status, one is left out", extra=fields(uid=record.uid))
            return
        task = asyncio.create_task(self._write(record, entries))
        self._tasks[record.uid] = task
        task.add_done_callback(lambda done: self._forget(record.uid, done))

    def drop(self, uid: ClaimUID) -> None:
        """Give up a claim's status that still waits: the claim is not prepared any more."""
        task = self._tasks.pop(uid, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Give up everything that still waits."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, record: Record, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(self._settle_s)
        waits = delays(self._first_delay_s, _LONGEST_DELAY_S)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with self._slots:
                    await self._api.apply_claim_devices(record.namespace, record.name, record.uid, entries)
            except ApiError as error:
                if attempt == _ATTEMPTS or not may_pass(error):
                    _log.warning(
                        "the claim's status does not tell its CPUs",
                        extra=fields(claim=record.claim, uid=record.uid, attempts=attempt, reason=error),
                    )
                    return
                _log.debug("the claim's status cannot be written now", extra=fields(claim=record.claim, reason=error))
            else:
                _log.debug("the claim's status tells its CPUs", extra=fields(claim=record.claim, uid=record.uid))
                return
            await asyncio.sleep(next(waits))

    def _forget(self, uid: ClaimUID, done: asyncio.Task[None]) -> None:
        if self._tasks.get(uid) is done:
            del self._tasks[uid]
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("internal error in writing a claim's status", extra=fields(uid=uid), exc_info=error)


def device_entries(record: Record, device_cpus: Mapping[str, CpuSet]) -> list[Entry]:
    """Say which CPUs were taken of each device of a claim.

    Parameters
    ----------
    record : Record
        The claim.
    device_cpus : mapping of str to CpuSet
        All CPUs of each device that is known here. Of a device that is not known, all CPUs of its request are named.

    Returns
    -------
    list of Entry
        One for each result of ours, but for those whose CPUs make a text longer than the API allows.
    """
    entries: list[Entry] = []
    for device in record.devices:
        cpus = record.by_request[device.request]
        if device.device in device_cpus:
            cpus &= device_cpus[device.device]
        data = _data(cpus)
        if data is None:
            _log.warning(
                "the CPUs of a device are too scattered to be told in the claim's status",
                extra=fields(uid=record.uid, device=device.device, cpus=len(cpus)),
            )
            continue
        entry: Entry = {"driver": DRIVER_NAME, "pool": device.pool, "device": device.device, "data": data}
        if device.share_id is not None:
            entry["shareID"] = device.share_id
        entries.append(entry)
    return entries


def tells(claim: Mapping[str, object], entries: Sequence[Entry]) -> bool:
    """Tell whether a claim's status says exactly this of our devices already.

    Parameters
    ----------
    claim : mapping of str to object
        The claim as the API server sent it.
    entries : sequence of Entry
        What it should say.
    """
    status = claim.get("status")
    devices = status.get("devices") if isinstance(status, dict) else None
    found = [
        {key: device[key] for key in _KEY if key in device}
        for device in (devices if isinstance(devices, list) else [])
        if isinstance(device, dict) and device.get("driver") == DRIVER_NAME
    ]
    return len(found) == len(entries) and all(entry in found for entry in entries)


def _data(cpus: CpuSet) -> Entry | None:
    for data in ({"cpuset": str(cpus)}, {"cpusetStrided": cpus.strided()}):
        if len(json.dumps(data)) <= _LARGEST_DATA:
            return dict(data)
    return None
