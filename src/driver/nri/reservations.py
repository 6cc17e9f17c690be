# SPDX-License-Identifier: Apache-2.0
"""For which pods claims are reserved, as far as the driver has read it.

A claim's ``status.reservedFor`` grows while it is prepared: a second pod that uses it is added without the kubelet
preparing it again. So a pod that is not in what is known is looked for once more at the API server. That a pod may have
left it does not matter: pods do not come back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from driver.errors import ApiError
from driver.logs import fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from driver.ledger import Record
    from driver.names import ClaimUID

_log = logging.getLogger(__name__)

# The API allows 256.
_MOST_CONSUMERS: Final = 1024
_OTHERS: Final = ""


class ClaimSource(Protocol):
    """Where claims are read."""

    async def get_claim(self, namespace: str, name: str, /) -> Mapping[str, object]:
        """Fetch a claim as decoded JSON; `ApiError` says why not."""


class Reservations:
    """For which pods each prepared claim is reserved.

    Parameters
    ----------
    claims : ClaimSource
        The API server.
    """

    def __init__(self, claims: ClaimSource) -> None:
        self._claims = claims
        self._read: dict[ClaimUID, frozenset[str]] = {}
        # Pods that use a claim, and whether anything but their CPUs has shown that they do by right.
        self._users: dict[ClaimUID, dict[str, bool]] = {}
        self._learned = asyncio.Event()

    @property
    def learned(self) -> asyncio.Event:
        """An event that the next claim that is read sets, and that is never used again after that."""
        return self._learned

    def learn(self, uid: ClaimUID, raw: Mapping[str, object]) -> None:
        """Take note of what a claim says that was read just now."""
        self._read[uid] = consumers(raw)
        self._users.pop(uid, None)
        self._learned.set()
        self._learned = asyncio.Event()

    def learn_pod(self, uid: ClaimUID, pod_uid: str, *, proven: bool = True) -> None:
        """Take note of a pod that uses a claim, so that its containers can start again whatever happens.

        Parameters
        ----------
        uid : ClaimUID
            The claim.
        pod_uid : str
            The pod's UID.
        proven : bool
            Whether it does so by right; else that may still be found to be wrong.
        """
        users = self._users.setdefault(uid, {})
        users[pod_uid] = proven or users.get(pod_uid, False)

    def forget(self, uid: ClaimUID) -> None:
        """Forget a claim that is not prepared any more."""
        self._read.pop(uid, None)
        self._users.pop(uid, None)

    def reserved_for(self, uid: ClaimUID, pod_uid: str, *, marked: bool) -> bool:
        """Tell whether a claim is known to be reserved for a pod.

        A claim may be reserved for a group of pods; of which pods it consists cannot be known here. The kubelet, which
        gives no pod a claim that is not reserved for it, does know: then the mark must do.

        Parameters
        ----------
        uid : ClaimUID
            The claim.
        pod_uid : str
            The pod's UID.
        marked : bool
            Whether the container was given the claim's CDI device.
        """
        read = self._read.get(uid, frozenset())
        return pod_uid in read or pod_uid in self._users.get(uid, ()) or (marked and _OTHERS in read)

    def is_proven(self, uid: ClaimUID, pod_uid: str) -> bool:
        """Tell whether a pod whose container lives has a claim by right, as far as that can be known.

        Parameters
        ----------
        uid : ClaimUID
            The claim.
        pod_uid : str
            The pod's UID.
        """
        read = self._read.get(uid, frozenset())
        return pod_uid in read or _OTHERS in read or self._users.get(uid, {}).get(pod_uid, False)

    async def look(self, record: Record, timeout_s: float) -> str:
        """Read a claim once more.

        Parameters
        ----------
        record : Record
            The claim, with its name.
        timeout_s : float
            How long it may take, in seconds.

        Returns
        -------
        str
            Why it could not be read; empty if it could.
        """
        try:
            async with asyncio.timeout(timeout_s):
                raw = await self._claims.get_claim(record.namespace, record.name)
        except TimeoutError:
            return f"the API server did not answer within {timeout_s:.3g} s"
        except ApiError as error:
            return str(error)
        metadata = raw.get("metadata")
        found = metadata.get("uid") if isinstance(metadata, dict) else None
        if found != record.uid:
            return "the API server has another claim of that name by now"
        self.learn(record.uid, raw)
        _log.info("read a claim again for its pods", extra=fields(claim=record.claim, uid=record.uid))
        return ""


def consumers(claim: Mapping[str, object]) -> frozenset[str]:
    """Return the UIDs of the pods in a claim's ``status.reservedFor``, and an empty text for all that are no pods."""
    status = claim.get("status")
    entries = status.get("reservedFor") if isinstance(status, dict) else None
    return frozenset(_consumers(entries[:_MOST_CONSUMERS] if isinstance(entries, list) else []))


def _consumers(entries: Iterable[object]) -> Iterable[str]:
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        if entry.get("resource") == "pods" and not entry.get("apiGroup"):
            uid = entry.get("uid")
            if isinstance(uid, str) and uid:
                yield uid
        else:
            yield _OTHERS
