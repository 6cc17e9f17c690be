# SPDX-License-Identifier: Apache-2.0
"""Move containers in the answers to the runtime's events, where it must not be told anything outside of them.

A runtime whose NRI is older than 0.12.1 may wait for itself for ever when a plugin sends it an update of its own accord
(`driver.nri.runtimes`). What it carries out safely are updates in the answers to CreateContainer and UpdateContainer.
So others leave a claim's CPUs when a container of the claim is created, before that container starts. A move fails
without a word: before anything of the image runs, the cgroups of the others are read, and the start is refused if one
of them is still there. What is not urgent, a larger shared pool or a correction, rides on whatever answer comes next,
a few containers at a time. StopContainer's answer carries nothing: the runtime carries it out without a deadline, and
one shim that hangs would hold up the node.

Whose cgroup cannot be read is believed to have been moved as soon as the runtime tells that it has gone on from there.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from driver.logs import fields
from driver.nri import messages
from driver.nri.container import Phase
from driver.nri.errors import Refusal
from fastcpu import CpuSet
from fastcpu.cpuset import MAX_CPUS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from driver.apis import nri_v1alpha1_pb2 as nri
    from driver.names import ClaimUID
    from driver.nri.container import Container
    from driver.nri.enforcement import Enforcement

_log = logging.getLogger(__name__)

_MOST_RIDERS: Final = 8
_MOST_UPDATE_BYTES: Final = 3 << 20
# Reading a cgroup takes some twenty microseconds, in which nothing else is answered.
_READ_TOGETHER: Final = 64
_FIRST_RETRY_S: Final = 10.0
_SLOW_S: Final = 10.0
_SLOW_RETRY_S: Final = 300.0
_MOST_NAMED: Final = 3


class Cgroups(Protocol):
    """What the kernel says of containers."""

    def cpus(self, cgroups_path: str, /) -> CpuSet | None:
        """Return the CPUs to which a container's cgroup is held now; None if that cannot be read."""

    def parent_cpus(self, cgroups_path: str, /) -> CpuSet | None:
        """Return the CPUs that the cgroup above it allows now; None if that cannot be read."""


class MoveMetrics(Protocol):
    """What counts moves."""

    def count_moves(self, containers: int, /) -> None:
        """Count containers that an answer has told the runtime to move."""

    def count_unread_moves(self, containers: int, /) -> None:
        """Count containers that were believed to have been moved, since their cgroups cannot be read."""

    def set_unmovable_containers(self, containers: int, /) -> None:
        """Say how many containers could not be given their CPUs."""


class _Told(NamedTuple):
    """The containers that an answer has updates of, each with its `Container.serial` then, and when that was."""

    containers: list[tuple[Container, int]]
    since: float


class Moves:
    """The moves that answers carry.

    Parameters
    ----------
    enforcement : Enforcement
        What is known of the containers, and what they are to have.
    cgroups : Cgroups
        What the kernel says of them.
    metrics : MoveMetrics
        What counts.
    """

    def __init__(self, enforcement: Enforcement, cgroups: Cgroups, metrics: MoveMetrics) -> None:
        self._enforcement = enforcement
        self._cgroups = cgroups
        self._metrics = metrics
        # What answers have said whose events have not come to their end yet, by the container of the event.
        self._told: dict[str, _Told] = {}
        # Ids of containers whose last update was tried and not looked at since.
        self._tried: set[str] = set()
        # The shared pool and the offline CPUs for which everybody had what he should have when all were looked at.
        self._settled: tuple[CpuSet, CpuSet] | None = None

    def forget(self) -> None:
        """Forget what was told on an earlier connection."""
        self._told.clear()
        self._tried.clear()
        self._settled = None

    async def look(self) -> None:
        """Ask the kernel about the containers that may have other CPUs than they were given.

        To be called before anything is decided: other work goes on in between.
        """
        now = self._enforcement.now()
        doubted = self._enforcement.containers.doubted
        await self._read([one for one in doubted if _has_begun(one) and not one.window_end(now)])
        self._metrics.set_unmovable_containers(sum(bool(one.fault) for one in self._enforcement.containers.doubted))

    def away_from(self, claims: Iterable[ClaimUID]) -> list[nri.ContainerUpdate]:
        """Return the updates that move all others away from claims' CPUs, for the answer to a creation.

        Parameters
        ----------
        claims : iterable of ClaimUID
            The claims of the container that is being created. None of them is barred.

        Raises
        ------
        Refusal
            If there are more than an answer can carry.
        """
        others = {one.id: one for uid in claims for one in self._enforcement.on_cpus_of(uid)}
        updates = self._updates(others.values())
        if len(updates) < len(others):
            raise Refusal(
                f"{len(others)} containers have to be moved away from the claim's CPUs, of which one answer to the "
                f"runtime can carry {len(updates)}; it is tried again when the container is"
            )
        return updates

    def riders(self, identity: str, besides: Sequence[nri.ContainerUpdate] = ()) -> list[nri.ContainerUpdate]:
        """Return updates of a few containers that should have other CPUs, for an answer that nothing depends on.

        Parameters
        ----------
        identity : str
            The container that the event is about; it is none of them.
        besides : sequence of ContainerUpdate
            The updates that the answer carries already.
        """
        now = self._enforcement.now()
        pool = self._enforcement.pool.current(now)
        containers = self._enforcement.containers
        state = pool, self._enforcement.offline
        if state == self._settled and not containers.doubted:
            return []
        taken = {update.container_id for update in besides} | {identity}
        due: list[tuple[bool, Container]] = []
        wrong = 0
        for one in containers:
            wanted = self._enforcement.pool.wanted(one, pool)
            if not wanted or (one.given == wanted and not (one.is_doubted and _has_begun(one))):
                continue
            wrong += 1
            if one.id not in taken and not one.window_end(now) and one.is_retry_due(now):
                due.append((one.may_have <= wanted, one))
        self._settled = None if wrong else state
        due.sort(key=lambda item: item[0])
        riders = self._updates(one for _, one in due[:_MOST_RIDERS])
        for update in riders:
            # CRI-O would let the creation fail that they only happen to ride on.
            update.ignore_failure = True
        return riders

    def tell(self, identity: str, updates: Sequence[nri.ContainerUpdate]) -> None:
        """Take note of the updates that the answer to a container's event carries, one of its own included.

        Nothing may be awaited between their making and this.
        """
        now = self._enforcement.now()
        told = []
        for update in updates:
            container = self._enforcement.containers.get(update.container_id)
            if container is None:
                continue
            if container.id != identity:
                container.moved(CpuSet.parse(update.linux.resources.cpu.cpus, limit=MAX_CPUS), now)
            self._tried.discard(container.id)
            told.append((container, container.serial))
        if told:
            self._told[identity] = _Told(told, now)
            self._metrics.count_moves(len(told))

    def carried_out(self, identity: str) -> None:
        """Take note that the runtime has gone on from an event: it has tried all that the answer to it said."""
        if (told := self._told.pop(identity, None)) is None:
            return
        now = self._enforcement.now()
        self._tried.update(one.id for one, serial in told.containers if serial == one.serial)
        for one, serial in told.containers:
            if not _has_begun(one):
                continue  # its start may have begun with what was stored before
            if self._cgroups.cpus(one.cgroups_path) is not None:
                break  # the others can be read too, when it matters
            self._believe(one, serial)
        if now - told.since > _SLOW_S:
            for one, _ in told.containers:
                # Perhaps its shim hangs, and holds up everything whenever it is to be updated.
                one.hold_off(now + _SLOW_RETRY_S)

    def dropped(self, identity: str) -> None:
        """Take note that a container has ended: what the answers to its events said may not have been tried."""
        self._told.pop(identity, None)
        self._tried.discard(identity)

    async def check_start(self, container: Container) -> None:
        """Refuse the start of a container while others are on its claims' CPUs, or itself on those of others.

        Raises
        ------
        Refusal
            Naming who is where.
        """
        await self._read(self._on_cpus_of(container))
        if others := self._on_cpus_of(container) + self._begun_unnoticed(container):
            named = " and ".join(f"{one} (CPUs {one.may_have})" for one in others[:_MOST_NAMED])
            raise Refusal(
                f"{container} cannot start on CPUs {container.exclusive}, which are those of its claims alone: {named} "
                "could not be moved away from them; it is tried again when the container is"
            )
        if late := container.late_start:
            actual = self._cgroups.cpus(container.cgroups_path)
            foreign = self._enforcement.in_use_by_others(container, late if actual is None else actual)
            for uid, cpus in foreign.items():
                raise Refusal(
                    f"{container} was given other CPUs while it was about to start, and would run on CPUs {cpus} of "
                    f"claim {uid}; it is tried again when the container is"
                )

    # The parts

    def _on_cpus_of(self, container: Container) -> list[Container]:
        """Return who may run on the CPUs of a container's claims."""
        return [one for one in self._others(container) if _has_begun(one)]

    def _begun_unnoticed(self, container: Container) -> list[Container]:
        """Return who is on the CPUs of a container's claims although nobody has told that it was started.

        The start may be told in a moment; that of a container that is restored from a checkpoint never is.
        """
        found = []
        for one in self._others(container):
            cpus = None if _has_begun(one) else self._cgroups.cpus(one.cgroups_path)
            if cpus is not None and not cpus.isdisjoint(container.exclusive):
                found.append(one)
        return found

    def _others(self, container: Container) -> Iterable[Container]:
        return {one.id: one for uid in container.claims for one in self._enforcement.on_cpus_of(uid)}.values()

    async def _read(self, containers: Sequence[Container]) -> None:
        """Compare what containers have with what they were given."""
        for number, one in enumerate(containers, 1):
            if number % _READ_TOGETHER == 0:
                await asyncio.sleep(0)
            if self._enforcement.containers.get(one.id) is not one:
                continue
            cpus = self._cgroups.cpus(one.cgroups_path)
            if cpus is not None:
                self._compare(one, cpus)
            elif not one.verified:
                # It was found at a synchronisation, whose answer was carried out before anything else.
                one.believe(one.serial)

    def _believe(self, container: Container, serial: int) -> None:
        self._tried.discard(container.id)
        container.believe(serial)
        self._metrics.count_unread_moves(1)

    def _compare(self, container: Container, cpus: CpuSet) -> None:
        now = self._enforcement.now()
        was_tried = container.id in self._tried
        self._tried.discard(container.id)
        allowed = container.given if container.allowed is None else container.given & container.allowed
        if cpus == allowed - self._enforcement.offline:
            cpus = container.given  # no more can be had
        if container.seen(cpus, now):
            container.forgive()
        elif was_tried:
            container.move_failed(f"its cgroup still has CPUs {cpus}", now, retry_s=_FIRST_RETRY_S)
            _log.error(
                "a container cannot be given its CPUs",
                extra=fields(container=container, id=container.id, cpus=container.given, reason=container.fault),
            )

    def _updates(self, containers: Iterable[Container]) -> list[nri.ContainerUpdate]:
        """Return the updates of containers, as many as an answer has room for."""
        pool = self._enforcement.pool.current(self._enforcement.now())
        room = _MOST_UPDATE_BYTES
        texts: dict[CpuSet, str] = {}
        updates = []
        for one in containers:
            wanted = self._enforcement.pool.wanted(one, pool)
            update = messages.update(one.id, texts.setdefault(wanted, str(wanted)))
            room -= update.ByteSize()
            if room < 0:
                break
            updates.append(update)
        return updates


def _has_begun(container: Container) -> bool:
    """Tell whether a container has a process that is held to its cgroup's CPUs."""
    return container.phase in (Phase.STARTING, Phase.RUNNING)
