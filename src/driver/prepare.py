# SPDX-License-Identifier: Apache-2.0
"""Prepare and unprepare one claim: the use case, whatever asks for it.

A prepare reads the claim, compares it with what is held for it, has CPUs chosen and holds them in one breath, and puts
that on the disk and into force (`driver.claimfiles`) before it answers. The kubelet repeats a failed prepare late, so
what may pass by itself is waited for.

The work on one claim is done one after the other, also when a call is cancelled in the middle of it. Different claims
hardly wait for each other, except for CPUs that one holds and another wants.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

from driver.claimfiles import ClaimFiles
from driver.claims import AllocatedClaim, decode_claim
from driver.errors import ApiError, ClaimError, ClaimPendingError, RuntimePendingError
from driver.ledger import PreparedDevice, Record
from driver.logs import fields, operation
from driver.names import ClaimUID, cdi_device_id
from driver.restore import RestoreMetrics, restore
from driver.retries import delays, may_pass
from driver.serial import ClaimLocks, any_of, uninterrupted
from driver.status import device_entries, tells

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from driver.allocators import Allocator, Choice
    from driver.cdi import CdiDirectory
    from driver.checkpoint import RecordStore
    from driver.devices import DeviceModel
    from driver.ledger import Ledger
    from driver.metadata import MetadataStore
    from driver.runtime import Runtime
    from driver.status import StatusWriter

_log = logging.getLogger(__name__)

# The kubelet repeats a failed prepare only after 60 to 90 s, and gives a call 45 s.
_WAIT_S: Final = 10.0
_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimReference:
    """How the kubelet names a claim.

    Attributes
    ----------
    uid : ClaimUID
        Which claim.
    namespace, name : str
        Where the API server has it; another claim may be there by now.
    """

    uid: ClaimUID
    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAnswer:
    """One prepared device, as the kubelet is told of it.

    Attributes
    ----------
    request_names : tuple of str
        The requests whose containers get the device, without sub-requests.
    pool, device : str
        Which device.
    cdi_ids : tuple of str
        The CDI devices that the runtime adds to those containers.
    share_id : str or None
        Which share of the device.
    """

    request_names: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None


class ClaimSource(Protocol):
    """Where claims are read."""

    async def get_claim(self, namespace: str, name: str, /) -> Mapping[str, object]:
        """Fetch a claim as decoded JSON; `ApiError` says why not."""


class PrepareMetrics(RestoreMetrics, Protocol):
    """Told how the work went; ``result`` is ``success``, ``error`` or, of a cancelled call, ``unknown``."""

    def observe_prepare(self, result: str, seconds: float, /) -> None:
        """Count a prepare and how long it took."""

    def observe_unprepare(self, result: str, seconds: float, /) -> None:
        """Count an unprepare and how long it took."""

    def observe_claim_cpus(self, cpus: int, /) -> None:
        """Count a claim that was given CPUs, and how many."""


class Preparer:
    """Prepares and unprepares claims.

    Parameters
    ----------
    claims : ClaimSource
        The API server.
    allocator : Allocator
        What chooses CPUs.
    model : DeviceModel
        The published devices.
    ledger : Ledger
        Who holds which CPUs; nothing else changes it.
    records, cdi, metadata
        The files.
    status : StatusWriter
        What tells the API server which CPUs a claim got.
    runtime : Runtime
        What holds containers to their CPUs.
    metrics : PrepareMetrics
        What counts.
    wait_s : float
        How long to wait for what may pass by itself before a prepare fails, in seconds.
    """

    def __init__(
        self,
        *,
        claims: ClaimSource,
        allocator: Allocator,
        model: DeviceModel,
        ledger: Ledger,
        records: RecordStore,
        cdi: CdiDirectory,
        metadata: MetadataStore,
        status: StatusWriter,
        runtime: Runtime,
        metrics: PrepareMetrics,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._claims = claims
        self._allocator = allocator
        self._model = model
        self._ledger = ledger
        self._records = records
        self._cdi = cdi
        self._metadata = metadata
        self._status = status
        self._runtime = runtime
        self._metrics = metrics
        self._wait_s = wait_s
        self._locks = ClaimLocks()
        self._stopping = asyncio.Event()
        self._device_cpus = {device.name: device.cpus for device in model.devices}
        attributes = {device.name: device.attributes for device in model.devices}
        self._files = ClaimFiles(ledger, records, cdi, metadata, attributes, runtime)

    def stop(self) -> None:
        """Let no prepare wait for anything any more: the driver is stopping, and the kubelet asks the next one."""
        self._stopping.set()

    async def restore(self) -> None:
        """Hold all that was given out before, and make the files agree; to be done once, before anyone can ask.

        Raises
        ------
        OSError
            If nobody can know who holds what. It may be tried again.
        """
        await restore(
            ledger=self._ledger,
            records=self._records,
            cdi=self._cdi,
            metadata=self._metadata,
            model=self._model,
            metrics=self._metrics,
        )

    async def prepare(self, reference: ClaimReference) -> tuple[PreparedAnswer, ...]:
        """Give a claim its CPUs; if it has them already, answer the same again.

        Parameters
        ----------
        reference : ClaimReference
            The claim.

        Returns
        -------
        tuple of PreparedAnswer
            One for each result of ours in the claim, in its order.

        Raises
        ------
        ClaimError
            If it cannot be prepared. Nothing is held for it then, unless it was prepared before or undoing failed too.
        """
        claim_name = f"{reference.namespace}/{reference.name}"
        # From here on: a second call for the claim has waited already while the first one did.
        deadline = asyncio.get_running_loop().time() + self._wait_s
        with (
            operation("prepare", claim=claim_name, uid=reference.uid),
            _outcome("claim not prepared", self._metrics.observe_prepare),
        ):
            async with self._locks.hold(reference.uid):
                return await self._prepare(reference, deadline)

    async def unprepare(self, reference: ClaimReference) -> None:
        """Take a claim's CPUs back; a claim that holds none is no error.

        Parameters
        ----------
        reference : ClaimReference
            The claim. Only its UID counts.

        Raises
        ------
        ClaimError
            If a container still uses it, or that is not known, or its files cannot be removed. Its CPUs stay held then.
        """
        claim_name = f"{reference.namespace}/{reference.name}"
        with (
            operation("unprepare", claim=claim_name, uid=reference.uid),
            _outcome("claim not unprepared", self._metrics.observe_unprepare),
        ):
            async with self._locks.hold(reference.uid):
                await self._unprepare(reference, self._wait_s)

    async def release_if(self, uid: ClaimUID, is_orphan: Callable[[Record], Awaitable[bool]]) -> bool:
        """Release a claim that nobody will unprepare any more, unless a container still uses it.

        Parameters
        ----------
        uid : ClaimUID
            The claim.
        is_orphan : callable
            Finds out whether it is one; nothing else is done with the claim meanwhile.

        Returns
        -------
        bool
            Whether it was released.

        Raises
        ------
        ClaimError
            If its files cannot be removed. Its CPUs stay held then.
        """
        async with self._locks.hold(uid):
            record = self._ledger.get(uid)
            if record is None or not await is_orphan(record):
                return False
            reference = ClaimReference(uid=uid, namespace=record.namespace, name=record.name)
            try:
                await self._unprepare(reference, 0.0)
            except ClaimPendingError:
                return False
            return True

    async def _prepare(self, reference: ClaimReference, deadline: float) -> tuple[PreparedAnswer, ...]:
        raw = await self._fetch(reference, deadline)
        claim = decode_claim(raw, reference.uid)
        held = self._ledger.get(claim.uid)
        if held is None and not claim.results:
            _log.info("nothing of this driver in the claim")
            return ()
        if held is None:
            record = await self._patiently(self._choose_and_hold, claim, deadline)
        elif held.adopted:
            record = await self._patiently(self._verify, claim, deadline)
        else:
            record = _same(claim, held)
        self._runtime.learn(claim.uid, raw)
        metadata_ids = await uninterrupted(self._keep(record, deadline, is_new=held is None))
        entries = device_entries(record, self._device_cpus)
        self._status.submit(record, [] if tells(raw, entries) else entries)
        return _answers(record, metadata_ids)

    async def _fetch(self, reference: ClaimReference, deadline: float) -> Mapping[str, object]:
        loop = asyncio.get_running_loop()
        for delay in delays(_FIRST_RETRY_S, _LONGEST_RETRY_S):
            try:
                return await self._claims.get_claim(reference.namespace, reference.name)
            except ApiError as error:
                if error.status == 404:
                    raise ClaimError(f"claim {reference.namespace}/{reference.name} does not exist") from error
                if not may_pass(error):
                    raise ClaimError(f"cannot read the claim: {error}") from error
                if loop.time() + delay > deadline:
                    raise ClaimPendingError(f"cannot read the claim for {self._wait_s:g} s: {error}") from error
                _log.warning("cannot read the claim yet", extra=fields(reason=error, retry_s=round(delay, 2)))
                await any_of([self._stopping], loop.time() + delay)
                self._refuse_to_wait(error)
        raise AssertionError("delays never end")

    async def _patiently(
        self, choose: Callable[[AllocatedClaim], Record], claim: AllocatedClaim, deadline: float
    ) -> Record:
        """Choose, and as long as something stands in the way that may pass choose again after each change."""
        said = False
        while True:
            changes = [self._ledger.changed, self._stopping]
            runtime_changed = self._runtime.changed
            try:
                return choose(claim)
            except ClaimPendingError as error:
                if not said:
                    _log.info("waiting for CPUs", extra=fields(reason=error, wait_s=self._wait_s))
                    said = True
                if isinstance(error, RuntimePendingError):
                    changes.append(runtime_changed)
                if not await any_of(changes, deadline):
                    raise
                self._refuse_to_wait(error)

    def _refuse_to_wait(self, cause: Exception) -> None:
        if self._stopping.is_set():
            raise ClaimPendingError(f"the driver is stopping, and cannot wait any longer: {cause}") from cause

    def _choose_and_hold(self, claim: AllocatedClaim) -> Record:
        # Never an await in here: the choice is only good as long as nobody else takes anything.
        record = _record(claim, self._allocator.choose(claim, self._ledger.holders))
        self._runtime.admit(record.cpus)
        self._ledger.hold(record)
        return record

    def _verify(self, claim: AllocatedClaim) -> Record:
        """Compare an adopted record with the claim that it must be of; return the full record."""
        held = self._ledger.records[claim.uid]
        record = _record(claim, self._allocator.choose(claim, self._ledger.holders, held.cpus))
        if record.cpus != held.cpus:
            raise ClaimError(
                f"the claim is to have CPUs {record.cpus or 'none'}, but a CDI spec found at the driver's start gives "
                f"it {held.cpus}; expected the same, or that the claim is unprepared first"
            )
        _log.info("an adopted claim is what its CDI spec says", extra=fields(cpus=held.cpus))
        return record

    async def _keep(self, record: Record, deadline: float, *, is_new: bool) -> dict[str, str]:
        if is_new:
            metadata_ids = await self._files.keep(record, deadline)
            self._metrics.observe_claim_cpus(len(record.cpus))
            _log.info("claim prepared", extra=fields(cpus=record.cpus, devices=_device_names(record)))
        else:
            metadata_ids = await self._files.keep_again(record, deadline)
            _log.info("claim was prepared before", extra=fields(cpus=record.cpus, since=record.prepared_at))
        return metadata_ids

    async def _unprepare(self, reference: ClaimReference, wait_s: float) -> None:
        with self._runtime.barred(reference.uid, "is being unprepared"):
            if self._ledger.get(reference.uid) is not None:
                await self._runtime.unused(reference.uid, asyncio.get_running_loop().time() + wait_s)
            self._status.drop(reference.uid)
            await uninterrupted(self._let_go(reference))

    async def _let_go(self, reference: ClaimReference) -> None:
        held = self._ledger.get(reference.uid)
        owner: Record | ClaimReference = held if held is not None and held.name else reference
        await self._files.let_go(reference.uid, owner.namespace, owner.name)
        if held is None:
            _log.info("the claim holds nothing here")
        else:
            _log.info("claim unprepared", extra=fields(cpus=held.cpus))


def _same(claim: AllocatedClaim, held: Record) -> Record:
    if held.fingerprint != claim.fingerprint:
        raise ClaimError(
            f"the claim is prepared with CPUs {held.cpus} for another allocation than it has now; "
            "expected the same, or that the claim is unprepared first"
        )
    return held


def _record(claim: AllocatedClaim, choice: Choice) -> Record:
    return Record(
        uid=claim.uid,
        namespace=claim.namespace,
        name=claim.name,
        pod_claim_name=claim.pod_claim_name,
        generation=claim.generation,
        cpus=choice.cpus,
        by_request=choice.by_request,
        devices=tuple(
            PreparedDevice(
                request=result.request,
                pool=result.pool,
                device=result.device,
                share_id=result.share_id,
                cpus=result.cpus,
            )
            for result in claim.results
        ),
        fingerprint=claim.fingerprint,
        adopted=False,
        prepared_at=datetime.now(UTC),
    )


def _answers(record: Record, metadata_ids: Mapping[str, str]) -> tuple[PreparedAnswer, ...]:
    """Answer for each device; the first of each request brings the request's metadata into the container."""
    answers = []
    left = dict(metadata_ids)
    for device in record.devices:
        metadata_id = left.pop(device.base_request, None)
        answers.append(
            PreparedAnswer(
                request_names=(device.base_request,),
                pool=device.pool,
                device=device.device,
                cdi_ids=(cdi_device_id(record.uid), *([metadata_id] if metadata_id else [])),
                share_id=device.share_id,
            )
        )
    return tuple(answers)


def _device_names(record: Record) -> str:
    return ",".join(f"{device.device}:{device.cpus}" if device.cpus else device.device for device in record.devices)


@contextmanager
def _outcome(failure: str, observe: Callable[[str, float], None]) -> Iterator[None]:
    """Log and count how something ends."""
    started = time.perf_counter()
    result = "unknown"
    try:
        yield
        result = "success"
    except ClaimError as error:
        result = "error"
        _log.error(failure, extra=fields(error=error))
        raise
    except Exception:
        result = "error"
        raise
    finally:
        observe(result, time.perf_counter() - started)
