# SPDX-License-Identifier: Apache-2.0
"""Release claims that nobody will unprepare any more.

The kubelet forgets claims when its own checkpoint is lost or the node is set up anew, and the API server when somebody
removes a finalizer. Such a claim would hold its CPUs for ever. It is released when the API server says that there is no
such claim, or that it is another one or has nothing of this node, and no container lives that uses it. Of an adopted
claim not even the name is known: it stays.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from driver.errors import ApiError, ClaimError
from driver.logs import fields, operation
from driver.names import DRIVER_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver.ledger import Ledger, Record
    from driver.prepare import Preparer
    from driver.runtime import Runtime

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 3600.0
_FIRST_LOOK_S: Final = 5.0


class ClaimSource(Protocol):
    """Where claims are read."""

    async def get_claim(self, namespace: str, name: str, /) -> Mapping[str, object]:
        """Fetch a claim as decoded JSON; `ApiError` says why not."""


class OrphanMetrics(Protocol):
    """What counts orphans."""

    def count_orphaned_claim(self) -> None:
        """Count a claim that was released."""


class Orphans:
    """Looks for orphaned claims, and releases them.

    Parameters
    ----------
    claims : ClaimSource
        The API server.
    preparer : Preparer
        What releases claims.
    ledger : Ledger
        The claims that hold CPUs.
    runtime : Runtime
        What knows whether containers use them.
    pool_name : str
        The name of this node's pool of devices.
    metrics : OrphanMetrics
        What counts.
    """

    def __init__(
        self,
        *,
        claims: ClaimSource,
        preparer: Preparer,
        ledger: Ledger,
        runtime: Runtime,
        pool_name: str,
        metrics: OrphanMetrics,
    ) -> None:
        self._claims = claims
        self._preparer = preparer
        self._ledger = ledger
        self._runtime = runtime
        self._pool_name = pool_name
        self._metrics = metrics

    async def run(self) -> None:
        """Look when the runtime's containers are known for the first time, and every hour; until cancelled."""
        while not self._runtime.known:
            await self._runtime.changed.wait()
        # What the kubelet still knows it unprepares or prepares again by itself.
        await asyncio.sleep(_FIRST_LOOK_S)
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def look(self) -> None:
        """Release every claim that is an orphan now."""
        for uid in list(self._ledger.records):
            with operation("release-orphan", uid=uid):
                try:
                    if await self._preparer.release_if(uid, self._is_orphan):
                        self._metrics.count_orphaned_claim()
                except ClaimError as error:
                    _log.error("an orphaned claim cannot be released", extra=fields(reason=error))

    async def _is_orphan(self, record: Record) -> bool:
        if record.adopted:
            return False
        try:
            claim = await self._claims.get_claim(record.namespace, record.name)
        except ApiError as error:
            if error.missing != f"resourceclaims/{record.name}":
                _log.warning("cannot find out whether a claim exists", extra=fields(claim=record.claim, reason=error))
                return False
            why = "it does not exist"
        else:
            why = self._why_not_ours(claim, record)
        if why:
            _log.warning(
                "nobody will unprepare a claim", extra=fields(claim=record.claim, cpus=record.cpus, reason=why)
            )
        return bool(why)

    def _why_not_ours(self, claim: Mapping[str, object], record: Record) -> str:
        metadata = claim.get("metadata")
        uid = metadata.get("uid") if isinstance(metadata, dict) else None
        if not isinstance(uid, str) or not uid:
            return ""
        if uid != record.uid:
            return f"there is another claim of that name, {uid}"
        results: object = claim
        for key in ("status", "allocation", "devices", "results"):
            results = results.get(key) if isinstance(results, dict) else None
        for result in results if isinstance(results, list) else []:
            if (
                isinstance(result, dict)
                and result.get("driver") == DRIVER_NAME
                and result.get("pool") == self._pool_name
            ):
                return ""
        return "it is not allocated to this node"
