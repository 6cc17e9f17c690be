# SPDX-License-Identifier: Apache-2.0
"""Bring containers to the CPUs that they are to have, outside of any event, from a task of its own.

Only where the runtime takes that without a deadlock; for others there is `driver.nri.moves`.

The runtime carries out one thing at a time, and a push is one: so a few containers go in each, and what others want of
the runtime comes in between. It tells of a failed push only that there was a failure; then each container is pushed
alone, and one that has failed stays alone from then on, is tried ever more seldom, and holds nobody up.

Containers from which CPUs are taken come first, and first of all those that a prepare waits for. What only gets more
CPUs waits a moment, so that many claims that go at once make few pushes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from driver.health import PUSHES, Health
from driver.logs import fields
from driver.nri.errors import Code, NriError
from driver.nri.messages import update

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from driver.apis import nri_v1alpha1_pb2 as nri
    from driver.nri.container import Container
    from driver.nri.enforcement import Enforcement
    from fastcpu import CpuSet

    Push = Callable[[Sequence[nri.ContainerUpdate], float], Awaitable[None]]

_log = logging.getLogger(__name__)

_TOGETHER: Final = 8
# Before it gives up on one container the runtime does nothing else, so no longer than it must be on a busy node.
_ALONE_S: Final = 2.0
_FIRST_RETRY_S: Final = 0.5
# One that is about to end fails too, and is not there any more at the next try.
_WORTH_A_WORD: Final = 2
# An error that comes later may be that of a deadline on the runtime's side: it may not have stopped in the middle.
_IN_TIME: Final = 0.9
# Anybody may read it, so no pod is named. The runtime does not say what the kernel has answered.
_REFUSED: Final = "some containers cannot be given their CPUs, as where a cgroup above allows fewer; the log names them"


class PushMetrics(Protocol):
    """What counts pushes."""

    def count_nri_push(self, result: str, containers: int, /) -> None:
        """Count a push of some containers that ended with ``success`` or ``error``."""

    def set_unmovable_containers(self, containers: int, /) -> None:
        """Say how many containers could not be given their CPUs."""


class Pushes:
    """The task that pushes.

    Parameters
    ----------
    enforcement : Enforcement
        What is known of the containers, and what they are to have.
    metrics : PushMetrics
        What counts.
    health : Health, optional
        Told if containers cannot be given their CPUs.
    together : int
        How many containers go in one push.
    """

    def __init__(
        self,
        enforcement: Enforcement,
        metrics: PushMetrics,
        health: Health | None = None,
        *,
        together: int = _TOGETHER,
    ) -> None:
        self._enforcement = enforcement
        self._health = Health() if health is None else health
        self._metrics = metrics
        self._together = together
        self._pool: CpuSet | None = None

    async def run(self, push: Push) -> None:
        """Push whatever becomes necessary, until cancelled.

        Parameters
        ----------
        push : callable
            Has the runtime change containers, and raises `NriError` if it has not.
        """
        while True:
            self._enforcement.wake.clear()
            waiting, next_at = self._plan()
            if not waiting:
                await self._until(next_at)
            while waiting and not self._enforcement.wake.is_set():
                batch = self._take_batch(waiting)
                if batch:
                    await self._push(push, batch)

    def _plan(self) -> tuple[list[Container], float | None]:
        """Return the containers to push now, the most urgent last, and when to look again if nothing happens."""
        now = self._enforcement.now()
        if not self._enforcement.known or not self._enforcement.unsolicited_updates:
            return [], None
        pool = self._enforcement.pool.current(now)
        if pool != self._pool:
            self._pool = pool
            _log.info("shared pool", extra=fields(cpus=pool, containers=self._enforcement.containers.shared))
        needed = list(self._enforcement.needed.values())
        due: list[tuple[int, Container]] = []
        unmovable = refused = 0
        next_at = self._enforcement.pool.aside_until
        for container in self._enforcement.containers:
            urgency, at = self._due(container, pool, needed, now)
            if at is None:
                container.forgive()
                continue
            unmovable += bool(container.fault)
            refused += container.failures >= _WORTH_A_WORD
            if at <= now:
                due.append((urgency, container))
            elif next_at is None or at < next_at:
                next_at = at
        self._metrics.set_unmovable_containers(unmovable)
        self._health.remark(PUSHES, _REFUSED if refused else "")
        due.sort(key=lambda item: item[0])
        return [container for _, container in due], next_at

    def _due(
        self, container: Container, pool: CpuSet, needed: Sequence[CpuSet], now: float
    ) -> tuple[int, float | None]:
        wanted = self._enforcement.pool.wanted(container, pool)
        if not wanted:
            return 0, None
        at = container.push_due(wanted, now)
        if at is None:
            return 0, None
        if container.verified and container.may_have.issubset(wanted):
            return 0, max(at, self._enforcement.grow_at)
        if any(not container.verified or not container.may_have.isdisjoint(cpus) for cpus in needed):
            return 2, at
        return 1, at

    def _take_batch(self, waiting: list[Container]) -> list[tuple[Container, CpuSet]]:
        """Take the next containers that are still to be pushed, with the CPUs of this moment."""
        now = self._enforcement.now()
        pool = self._enforcement.pool.current(now)
        batch: list[tuple[Container, CpuSet]] = []
        while waiting and len(batch) < self._together:
            if batch and waiting[-1].fault:
                break
            container = waiting.pop()
            wanted = self._enforcement.pool.wanted(container, pool)
            if self._enforcement.containers.get(container.id) is not container or not wanted:
                continue
            at = container.push_due(wanted, now)
            if at is not None and at <= now:
                batch.append((container, wanted))
                if container.fault:
                    break
        return batch

    async def _push(self, push: Push, batch: Sequence[tuple[Container, CpuSet]]) -> None:
        sent_at = self._enforcement.now()
        events = [container.events for container, _ in batch]
        texts: dict[CpuSet, str] = {}
        updates = [update(container.id, texts.setdefault(cpus, str(cpus))) for container, cpus in batch]
        # On a slow node a runtime is told to be patient, and takes as long itself.
        alone_s = max(_ALONE_S, self._enforcement.request_timeout_s)
        timeout_s = alone_s if len(batch) == 1 else 2 * alone_s
        for container, cpus in batch:
            container.pushing(cpus)
        try:
            await push(updates, timeout_s)
        except NriError as error:
            self._metrics.count_nri_push("error", len(batch))
            if error.code == Code.UNAVAILABLE:
                # All is told anew when the runtime is back. Until that is known, do not try in a loop.
                await asyncio.sleep(_FIRST_RETRY_S)
            elif len(batch) == 1:
                in_time = self._enforcement.now() - sent_at < _IN_TIME * timeout_s
                self._failed(*batch[0], error, settled=in_time and error.code != Code.DEADLINE_EXCEEDED)
            else:
                await self._push_each(push, [container for container, _ in batch])
            return
        now = self._enforcement.now()
        self._metrics.count_nri_push("success", len(batch))
        for (container, cpus), before in zip(batch, events, strict=True):
            if container.failures >= _WORTH_A_WORD:
                _log.info("a container could be moved after all", extra=fields(container=container, cpus=cpus))
            container.pushed(cpus, sent_at, before, now)
        _log.debug("pushed", extra=fields(containers=len(batch), seconds=round(now - sent_at, 3)))
        self._enforcement.moved()

    async def _push_each(self, push: Push, containers: Sequence[Container]) -> None:
        """Push alone what could not be pushed together."""
        for container in containers:
            pool = self._enforcement.pool.current(self._enforcement.now())
            wanted = self._enforcement.pool.wanted(container, pool)
            if self._enforcement.known and self._enforcement.containers.get(container.id) is container and wanted:
                await self._push(push, [(container, wanted)])

    def _failed(self, container: Container, cpus: CpuSet, error: NriError, *, settled: bool) -> None:
        container.push_failed(str(error), self._enforcement.now(), retry_s=_FIRST_RETRY_S, settled=settled)
        # It may be that the cgroup above has become narrower.
        self._enforcement.look_at_parent(container)
        if container.failures == _WORTH_A_WORD:
            _log.error(
                "a container cannot be given its CPUs",
                extra=fields(container=container, id=container.id, cpus=cpus, reason=error),
            )
        self._enforcement.moved()

    async def _until(self, at: float | None) -> None:
        """Wait until a time, or until somebody wants something."""
        try:
            async with asyncio.timeout(None if at is None else max(at - self._enforcement.now(), 0.0)):
                await self._enforcement.wake.wait()
        except TimeoutError:
            pass
