# SPDX-License-Identifier: Apache-2.0
"""The claims that are prepared, and whether what the driver answers and writes for them is right."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from driver.names import CDI_KIND, ClaimUID, cdi_device_id, cdi_device_name, cdi_spec_name, cpuset_variable
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.offers import Offer, allocated_claim
from driver.sandbox.plugins import PreparedClaim
from fastcpu import CpuSet
from loadgenerator.apiserver import Api


class WrongAnswerError(Exception):
    """The driver answered or wrote something that is not right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadClaim:
    """A claim, and what must come of it."""

    name: ClaimName
    pool: str
    device: str
    cpus: CpuSet


class ClaimMaker:
    """Makes claims that name CPUs of a node in turn: as many as fit are disjoint from each other.

    Parameters
    ----------
    api : Api
    offers : sequence of Offer
        What the node publishes.
    cpus_per_claim : int
    """

    def __init__(self, api: Api, offers: Sequence[Offer], cpus_per_claim: int) -> None:
        self._api = api
        self._slots = [
            (offer, offer.cpus[start : start + cpus_per_claim])
            for offer in offers
            for start in range(0, len(offer.cpus) - cpus_per_claim + 1, cpus_per_claim)
        ]
        self._turns = itertools.cycle(self._slots)
        self._numbers = itertools.count()
        self._made: list[str] = []

    @property
    def capacity(self) -> int:
        """How many claims can be prepared at the same time."""
        return len(self._slots)

    async def make(self, count: int) -> list[LoadClaim]:
        """Create claims, each with its allocation."""
        return [await self._make_one() for _ in range(count)]

    async def delete_all(self) -> None:
        """Delete every claim that was made."""
        for name in self._made:
            await self._api.delete_claim(name)
        self._made.clear()

    async def _make_one(self) -> LoadClaim:
        offer, cpus = next(self._turns)
        name = f"load-{offer.pool}-{next(self._numbers)}"
        uid = await self._api.create_claim(allocated_claim(name, offer, str(cpus), len(cpus)))
        self._made.append(name)
        return LoadClaim(
            name=ClaimName(namespace="default", name=name, uid=uid), pool=offer.pool, device=offer.device, cpus=cpus
        )


class Checker:
    """Checks what a driver answers against the CDI specs that the container runtime would read.

    Parameters
    ----------
    cdi_dir : Path
        Their folder.
    """

    def __init__(self, cdi_dir: Path) -> None:
        self._cdi_dir = cdi_dir

    def prepared(self, claim: LoadClaim, answer: PreparedClaim) -> None:
        """Check that a claim's containers would get exactly its CPUs.

        Raises
        ------
        WrongAnswerError
        """
        uid = ClaimUID(claim.name.uid)
        if answer.error:
            raise WrongAnswerError(f"claim {claim.name.name}: {answer.error}")
        found = [(device.pool, device.device) for device in answer.devices]
        if found != [(claim.pool, claim.device)]:
            raise WrongAnswerError(f"claim {claim.name.name}: devices {found}; expected {claim.pool}/{claim.device}")
        if cdi_device_id(uid) not in answer.devices[0].cdi_ids:
            raise WrongAnswerError(f"claim {claim.name.name}: CDI ids {answer.devices[0].cdi_ids} lack the claim's")
        told = [variable for edits in self._edits(uid) for variable in edits.get("env", ())]
        names = [variable.partition("=") for variable in told]
        cpus = [CpuSet.parse(value) for name, _, value in names if name == cpuset_variable(uid)]
        if cpus != [claim.cpus]:
            raise WrongAnswerError(f"claim {claim.name.name}: CDI gives {told}; expected CPUs {claim.cpus}")

    def unprepared(self, claim: LoadClaim, error: str) -> None:
        """Check that nothing is left of a claim.

        Raises
        ------
        WrongAnswerError
        """
        if error:
            raise WrongAnswerError(f"claim {claim.name.name}: {error}")
        if list(self._edits(ClaimUID(claim.name.uid))):
            raise WrongAnswerError(f"claim {claim.name.name}: unprepared, but its CDI device is still there")

    def _edits(self, uid: ClaimUID) -> Iterator[dict[str, list[str]]]:
        for spec in self._specs(uid):
            if spec.get("kind") == CDI_KIND:
                yield from (
                    device["containerEdits"] for device in spec["devices"] if device["name"] == cdi_device_name(uid)
                )

    def _specs(self, uid: ClaimUID) -> Iterator[dict]:
        """Read the claim's own file, or where a driver has no such files all of them."""
        own = self._cdi_dir / cdi_spec_name(uid)
        paths: Iterable[Path] = [own] if own.exists() else self._shared_files()
        for path in paths:
            try:
                yield json.loads(path.read_bytes())
            except FileNotFoundError:
                continue

    def _shared_files(self) -> Iterator[Path]:
        own_prefix = cdi_spec_name(ClaimUID("")).removesuffix(".json")
        return (path for path in self._cdi_dir.glob("*.json") if not path.name.startswith(own_prefix))
