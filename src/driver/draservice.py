# SPDX-License-Identifier: Apache-2.0
"""The DRA service: translates between the kubelet's calls and the work on single claims.

Whatever a request holds, its RPC succeeds and the answer has exactly one entry for each claim UID asked for: the
kubelet throws a whole answer away for an RPC error or a missing entry, and with it the pods whose claims were fine.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from driver.errors import ClaimError
from driver.logs import fields, operation
from driver.names import claim_uid
from driver.prepare import ClaimReference
from driver.serial import is_cancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from driver.prepare import PreparedAnswer

_log = logging.getLogger(__name__)

_LONGEST_ERROR_BYTES: Final = 1024

# Namespace and name become part of the URL with which the claim is fetched.
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_OBJECT_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)

_Answer = TypeVar("_Answer")
_Names = set[tuple[str, str]]


class ClaimPreparer(Protocol):
    """What prepares and unprepares one claim."""

    async def prepare(self, reference: ClaimReference, /) -> Sequence[PreparedAnswer]:
        """Prepare a claim; `ClaimError` says why not. Being cancelled leaves nothing half done."""

    async def unprepare(self, reference: ClaimReference, /) -> None:
        """Unprepare a claim; `ClaimError` says why not. Being cancelled leaves nothing half done."""


class DraServicer:
    """Adapter for `DRAPlugin` of either version.

    Parameters
    ----------
    messages : module
        `dra_v1_pb2` or `dra_v1beta1_pb2`: the same messages, but that only v1 has a device's ``share_id``.
    preparer : ClaimPreparer
        What does the work.
    """

    def __init__(self, messages: Any, preparer: ClaimPreparer) -> None:
        self._messages = messages
        self._preparer = preparer
        self._has_share_id = "share_id" in messages.Device.DESCRIPTOR.fields_by_name

    async def NodePrepareResources(self, request: Any, context: object) -> Any:
        """Prepare claims."""

        async def prepare(uid: str, names: _Names) -> Any:
            try:
                reference = _reference(uid, names)
            except ClaimError as error:
                _log.error("malformed reference to a claim", extra=fields(error=error))
                raise
            answers = await self._preparer.prepare(reference)
            return self._messages.NodePrepareResourceResponse(devices=[self._device(answer) for answer in answers])

        def fail(error: str) -> Any:
            return self._messages.NodePrepareResourceResponse(error=error)

        with operation("prepare", claims=len(request.claims)):
            answers = await _answer_each(request.claims, prepare, fail)
            return self._messages.NodePrepareResourcesResponse(claims=answers)

    async def NodeUnprepareResources(self, request: Any, context: object) -> Any:
        """Unprepare claims."""

        async def unprepare(uid: str, names: _Names) -> Any:
            reference = _reference_to_let_go(uid, names)
            if reference is not None:
                await self._preparer.unprepare(reference)
            return self._messages.NodeUnprepareResourceResponse()

        def fail(error: str) -> Any:
            return self._messages.NodeUnprepareResourceResponse(error=error)

        with operation("unprepare", claims=len(request.claims)):
            answers = await _answer_each(request.claims, unprepare, fail)
            return self._messages.NodeUnprepareResourcesResponse(claims=answers)

    def _device(self, answer: PreparedAnswer) -> Any:
        device = self._messages.Device(
            request_names=answer.request_names,
            pool_name=answer.pool,
            device_name=answer.device,
            cdi_device_ids=answer.cdi_ids,
        )
        if self._has_share_id and answer.share_id is not None:
            device.share_id = answer.share_id
        return device


async def _answer_each(
    claims: Iterable[Any],
    act: Callable[[str, _Names], Awaitable[_Answer]],
    fail: Callable[[str], _Answer],
) -> dict[str, _Answer]:
    """Do something with every claim of a call at the same time; return one answer for each UID.

    Parameters
    ----------
    claims : iterable of Claim messages
        As they came, so not to be trusted.
    act : callable
        Does the work for one claim, given its UID and the namespaces and names that came with it, and makes its answer.
    fail : callable
        Makes the answer for a claim that failed from the error's text.
    """
    names_by_uid: defaultdict[str, _Names] = defaultdict(set)
    for claim in claims:
        names_by_uid[claim.uid].add((claim.namespace, claim.name))

    async def answer(uid: str, names: _Names) -> _Answer:
        try:
            return await act(uid, names)
        except ClaimError as error:  # who raised it has logged it
            return fail(one_line(error))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Not this call but something it waited for was cancelled, as when the driver stops.
            return fail("interrupted: the driver is stopping, or gave up a step of this claim")
        except Exception as error:
            _log.exception("internal error", extra=fields(uid=bounded(uid)))
            return fail(bounded(f"internal error: {type(error).__name__}: {one_line(error)}"))

    if len(names_by_uid) == 1:
        ((uid, names),) = names_by_uid.items()
        return {uid: await answer(uid, names)}
    answers = await asyncio.gather(*(answer(uid, names) for uid, names in names_by_uid.items()))
    return dict(zip(names_by_uid, answers, strict=True))


def _reference(uid: str, names: _Names) -> ClaimReference:
    """Check how the kubelet names a claim."""
    checked_uid = claim_uid(uid)
    if len(names) > 1:
        raise ClaimError(f"claim UID {uid} is asked for under {len(names)} different names in one call, expected one")
    ((namespace, name),) = names
    if not _NAMESPACE.fullmatch(namespace):
        raise ClaimError(
            f"claim namespace {_shown(namespace)} is malformed: expected a DNS label of 1 to 63 characters"
        )
    if not _OBJECT_NAME.fullmatch(name):
        raise ClaimError(f"claim name {_shown(name)} is malformed: expected a DNS subdomain of 1 to 253 characters")
    return ClaimReference(uid=checked_uid, namespace=namespace, name=name)


def _reference_to_let_go(uid: str, names: _Names) -> ClaimReference | None:
    """Make the best of how the kubelet names a claim that it wants to be rid of; None if there is no such claim.

    After an error it would ask again for ever, and the pod would never end.
    """
    try:
        return _reference(uid, names)
    except ClaimError as error:
        _log.warning("malformed reference to a claim", extra=fields(error=error))
    try:
        # Only the UID decides what is held.
        return ClaimReference(uid=claim_uid(uid), namespace="", name="")
    except ClaimError:
        return None  # nothing can be held under it


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")


def one_line(error: Exception) -> str:
    """Make one printable line of bounded size of an error."""
    return bounded(str(error)) or type(error).__name__


def bounded(text: str) -> str:
    """Make a text fit for a pod's events: one printable line of bounded size."""
    # Cut first: a hostile text may be megabytes long, and each of its characters has at least one byte.
    printable = "".join(c if c.isprintable() else " " for c in text[: 2 * _LONGEST_ERROR_BYTES])
    line = " ".join(printable.split()).encode("utf-8", "replace")
    if len(line) <= _LONGEST_ERROR_BYTES:
        return line.decode()
    return line[: _LONGEST_ERROR_BYTES - 3].decode("utf-8", "ignore") + "…"
