# SPDX-License-Identifier: Apache-2.0
"""What preparing claims needs of the container runtime, whatever that is.

A claim is only worth something when no other container may run on its CPUs, so a prepare has the runtime move the
others away before it answers; and CPUs are only given on when no container lives any more that was given them.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from driver.ledger import Record
    from driver.names import ClaimUID
    from fastcpu import CpuSet


class Runtime(Protocol):
    """Holds containers to their CPUs."""

    @property
    def known(self) -> bool:
        """Whether it is known which containers live."""

    @property
    def changed(self) -> asyncio.Event:
        """An event that the next change sets, and that is never used again after that; as the ledger's."""

    def admit(self, cpus: CpuSet, /) -> None:
        """Refuse CPUs that the containers without a claim cannot do without.

        Raises
        ------
        RuntimePendingError
            If they cannot, or if the runtime's containers are not known.
        """

    def learn(self, uid: ClaimUID, claim: Mapping[str, object], /) -> None:
        """Take note of a claim that holds CPUs, as the API server sent it just now."""

    def is_clear(self, record: Record, /) -> bool:
        """Tell whether there is no container to be moved away from the CPUs of a claim that the ledger holds."""

    async def confirm(self, record: Record, deadline: float, /) -> None:
        """Move all containers away from a claim's CPUs but those that use the claim, and make sure that they are.

        Parameters
        ----------
        record : Record
            The claim; the ledger holds it.
        deadline : float
            Until when to try, in the event loop's time.

        Raises
        ------
        RuntimePendingError
            If it could not be done until then, naming what stands in the way.
        """

    async def unused(self, uid: ClaimUID, deadline: float, /) -> None:
        """Wait until no container lives that uses a claim.

        Raises
        ------
        RuntimePendingError
            If one still does at the deadline, or that is not known.
        """

    def barred(self, uid: ClaimUID, why: str, /) -> AbstractContextManager[None]:
        """Let no container be created with a claim meanwhile; `why` completes a sentence that begins with the claim."""

    def released(self, uid: ClaimUID, /) -> None:
        """Take note that the ledger does not hold a claim any more."""

    def spare(self, record: Record, /) -> None:
        """Keep a claim's CPUs free for a while although it was released: it is going to be prepared again."""


class NoRuntime:
    """Stands in where enforcement is switched off: claims are recorded, and nothing is held to any CPUs."""

    def __init__(self) -> None:
        self._never = asyncio.Event()

    @property
    def known(self) -> bool:
        """Always false."""
        return False

    @property
    def changed(self) -> asyncio.Event:
        """An event that is never set."""
        return self._never

    def admit(self, cpus: CpuSet) -> None:
        """Admit anything."""

    def learn(self, uid: ClaimUID, claim: Mapping[str, object]) -> None:
        """Ignore it."""

    def is_clear(self, record: Record) -> bool:
        """Find no container."""
        return True

    async def confirm(self, record: Record, deadline: float) -> None:
        """Confirm at once."""

    async def unused(self, uid: ClaimUID, deadline: float) -> None:
        """Believe that no container uses the claim."""

    @contextmanager
    def barred(self, uid: ClaimUID, why: str) -> Iterator[None]:
        """Bar nothing."""
        yield

    def released(self, uid: ClaimUID) -> None:
        """Ignore it."""

    def spare(self, record: Record) -> None:
        """Ignore it."""
