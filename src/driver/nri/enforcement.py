# SPDX-License-Identifier: Apache-2.0
"""The state of enforcement: what the runtime's side knows, and what preparing claims asks of it.

The handlers of the runtime's events write here what they have answered, the pushes what came of them, and prepare and
unprepare wait here until all that agrees with what they need.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from driver.errors import RuntimePendingError
from driver.nri.container import Container, Phase, astray
from driver.nri.containers import Containers
from driver.podlimit import allows_only
from driver.wording import held_by, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from driver.ledger import Ledger, Record
    from driver.names import ClaimUID
    from driver.nri.container import Pod
    from driver.nri.moves import Cgroups
    from driver.nri.reservations import Reservations
    from driver.nri.sharedpool import SharedPool
    from fastcpu import CpuSet

_MOST_NAMED: Final = 3
_GROW_DELAY_S: Final = 0.2
_REQUEST_TIMEOUT_S: Final = 2.0  # what runtimes have unless they are told otherwise
# A prepare waits 10 s for whatever may pass by itself. What is certain to pass, as the start of a container is, it may
# wait for longer: the kubelet gives a call 45 s, and repeats one that has failed only after a minute.
_LONGER_FOR_WINDOWS_S: Final = 30.0


class Enforcement:
    """What is known of the runtime, and a `driver.runtime.Runtime` for those who prepare claims.

    Parameters
    ----------
    ledger : Ledger
        Who holds which CPUs.
    pool : SharedPool
        The CPUs of the others.
    reservations : Reservations
        For which pods claims are reserved.
    cgroups : Cgroups, optional
        The host's cgroups.
    clock : callable
        The present time in seconds, that of the event loop.

    Attributes
    ----------
    containers : Containers
        The containers that live, as the runtime last said.
    needed : dict of ClaimUID to CpuSet
        The CPUs that somebody waits for.
    request_timeout_s : float
        How long the runtime waits for an answer, in seconds.
    unsolicited_updates : bool
        Whether the runtime can be told to move containers at any time; else they are moved in answers to its events.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: SharedPool,
        reservations: Reservations,
        *,
        cgroups: Cgroups | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._cgroups = cgroups
        self._clock = clock
        self._changed = asyncio.Event()
        self._barred: dict[ClaimUID, str] = {}
        self._unknown = "not connected to it yet"
        self._closing = False
        self._grow_at = 0.0
        self.request_timeout_s = _REQUEST_TIMEOUT_S
        self.unsolicited_updates = True
        self.pool = pool
        self.reservations = reservations
        self.containers = Containers()
        self.needed: dict[ClaimUID, CpuSet] = {}
        self.wake = asyncio.Event()

    @property
    def everything(self) -> CpuSet:
        """All CPUs of the node that are known to be online."""
        return self._ledger.pool.online

    @property
    def offline(self) -> CpuSet:
        """The CPUs that went offline."""
        return self._ledger.pool.offline

    @property
    def stop(self) -> int:
        """One more than the highest CPU that anything here may be about."""
        return self._ledger.stop

    def now(self) -> float:
        """Return the present time in seconds."""
        return self._clock()

    # What the runtime's side says

    @property
    def known(self) -> bool:
        """Whether the driver knows the runtime's containers, and the runtime can be told anything."""
        return not self._unknown

    def look_at_parent(self, container: Container, seen: dict[str, CpuSet | None] | None = None) -> None:
        """Find out what a container's parent cgroup allows now; what cannot be read is as it was.

        Parameters
        ----------
        container : Container
            The container.
        seen : dict of str to CpuSet or None, optional
            What was found a moment ago, by the pod's sandbox: the containers of a pod have one parent.
        """
        seen = {} if seen is None else seen
        sandbox = container.pod.sandbox
        if sandbox not in seen:
            seen[sandbox] = self.parent_cpus(container.cgroups_path)
        container.parent_allows(seen[sandbox] or container.allowed)

    def parent_cpus(self, cgroups_path: str) -> CpuSet | None:
        """Return what the parent of a container's cgroup allows now; None if that is not known."""
        return self._cgroups.parent_cpus(cgroups_path) if self._cgroups is not None and cgroups_path else None

    def set_known(self) -> None:
        """Take note that the driver knows all containers, and may push."""
        self._unknown = ""
        self.notify()

    def set_unknown(self, reason: str) -> None:
        """Take note that the driver does not know any more what happens to containers."""
        self._unknown = reason
        self.notify()

    def notify(self) -> None:
        """Wake whoever waits for a change, and whoever pushes."""
        self.moved()
        self.wake.set()

    def moved(self) -> None:
        """Wake whoever waits for a change: containers have got other CPUs."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def grow_at(self) -> float:
        """Until when containers that may only get more CPUs have to wait for more changes of that kind."""
        return self._grow_at

    def close(self) -> None:
        """Let nobody wait for anything any more: the driver is stopping."""
        self._closing = True
        self.notify()

    # What metrics ask

    def shared_pool_size(self) -> int:
        """Return how many CPUs the containers without a claim share."""
        return len(self.pool.cpus)

    def container_counts(self) -> Mapping[str, int]:
        """Return how many containers are ``exclusive`` and how many ``shared``."""
        return {"exclusive": len(self.containers) - self.containers.shared, "shared": self.containers.shared}

    # What decisions ask

    @property
    def records(self) -> Mapping[ClaimUID, Record]:
        """The claims that hold CPUs."""
        return self._ledger.records

    def why_barred(self, uid: ClaimUID) -> str:
        """Return why no container may be created with a claim just now; empty if one may."""
        if barred := self._barred.get(uid):
            return barred
        cpus = self._ledger.records[uid].cpus
        if not self.pool.is_usable(cpus):
            return self.pool.why_unusable(cpus)
        others = self.on_cpus_of(uid)
        if sharing := [one for one in others if not one.exclusive.isdisjoint(cpus)]:
            # Only files can say so; see `Ledger.hold_anyway`.
            return f"has CPUs {cpus}, some of which {_named(sharing)} has by another claim: delete one of the pods"
        if stuck := [one for one in others if not self._can_be_moved_at_once(one)]:
            return f"has CPUs {cpus}, but {_named(stuck, why=True)} could not be moved away from them yet"
        return ""

    def on_cpus_of(self, uid: ClaimUID) -> list[Container]:
        """Return the containers that may run on a claim's CPUs without having the claim."""
        return self.containers.others(uid, self._ledger.records[uid].cpus, self.offline)

    def in_use_by_others(self, container: Container, cpus: CpuSet) -> Mapping[ClaimUID, CpuSet]:
        """Return which of these CPUs are held by claims that the container has not and that some container uses."""
        return {
            uid: held
            for uid, held in self._ledger.holders(cpus).items()
            if uid not in container.claims and self.containers.users(uid)
        }

    def is_barred(self, uid: ClaimUID) -> bool:
        """Tell whether a claim is coming or going just now, so that no container may get it."""
        return uid in self._barred

    def why_astray(self, allowed: CpuSet | None, given: CpuSet) -> str:
        """Return why a container must not be created with CPUs; empty if it may.

        Parameters
        ----------
        allowed : CpuSet or None
            What its parent cgroup allows; None if that is not known.
        given : CpuSet
            The CPUs. If none is allowed it would run on others, which may be those of claims.
        """
        cpus = astray(allowed, given)
        holders = self._ledger.holders(cpus) if cpus else {}
        if not holders:
            return ""
        return "; ".join([allows_only("of its pod", cpus), *held_by(holders)])

    def owner(self, uid: ClaimUID) -> tuple[Pod, str] | None:
        """Return the pod that uses a claim, and a container of it that lives; None if no container does."""
        users = self.containers.users(uid)
        return (users[0].pod, users[0].name) if users else None

    def reserved_for(self, uid: ClaimUID, pod_uid: str, *, marked: bool) -> bool:
        """Tell whether a claim is known to be reserved for a pod.

        Of an adopted claim not even the name is known, so that nobody can be asked; the kubelet gave it to the pod.
        """
        owner = self.owner(uid)
        return (
            self.records[uid].adopted
            or (owner is not None and owner[0].uid == pod_uid)
            or self.reservations.reserved_for(uid, pod_uid, marked=marked)
        )

    def is_proven(self, uid: ClaimUID, pod_uid: str) -> bool:
        """Tell whether the claim's own list, or a mark, has shown that it is reserved for a pod or for a group."""
        return self.reservations.is_proven(uid, pod_uid)

    # What preparing claims asks

    @property
    def changed(self) -> asyncio.Event:
        """An event that the next change sets, and that is never used again after that."""
        return self._changed

    def admit(self, cpus: CpuSet) -> None:
        """Refuse CPUs that the containers without a claim cannot do without; see `driver.runtime.Runtime`."""
        if not self.known:
            raise RuntimePendingError(self._why_unknown())
        if self.containers.shared and not self.pool.without(cpus):
            raise RuntimePendingError(self._nothing_left(cpus))

    def learn(self, uid: ClaimUID, claim: Mapping[str, object]) -> None:
        """Take note of a claim that holds CPUs, as the API server sent it just now."""
        self.reservations.learn(uid, claim)

    def is_clear(self, record: Record) -> bool:
        """Tell whether there is no container to be moved away from a claim's CPUs; see `driver.runtime.Runtime`."""
        return self.known and not self._obstacles(record)

    async def confirm(self, record: Record, deadline: float) -> None:
        """Have all other containers moved away from a claim's CPUs; see `driver.runtime.Runtime`."""
        self.pool.take_back(record.uid)
        if self.is_clear(record):
            return
        self.needed[record.uid] = record.cpus
        for container in self._obstacles(record):
            if container.fault:
                container.retry_soon(self.now())
        self.wake.set()
        obstacle: Container | None = None
        try:
            while True:
                changed = self._changed
                limit, look_again_at = deadline, math.inf
                if self.known:
                    if obstacle is None or not self._still_there(obstacle, record):
                        obstacle = next(iter(self._obstacles(record)), None)
                    if obstacle is None:
                        return
                    if self._passes_by_itself(obstacle):
                        limit += _LONGER_FOR_WINDOWS_S
                        # Nobody tells of the end of a window that ends by time.
                        look_again_at = obstacle.window_end(self.now()) or math.inf
                if self._closing or self.now() >= limit:
                    raise RuntimePendingError(self._why_not_clear(record))
                await _happens(changed, min(limit, look_again_at))
        finally:
            del self.needed[record.uid]

    async def unused(self, uid: ClaimUID, deadline: float) -> None:
        """Wait until no container lives that uses a claim, or may; see `driver.runtime.Runtime`."""
        while True:
            changed = self._changed
            for user in self.containers.users(uid):
                # That its pod was stopped is not always told, after a restart of the runtime for one.
                if user.was_never_started(self.now()):
                    self.containers.remove(user.id)
            users = self.containers.users(uid)
            others = () if users else self._on_its_cpus(uid)
            if self.known and not users and not others:
                return
            if self._closing or not await _happens(changed, deadline):
                if not self.known:
                    raise RuntimePendingError(f"whether a container uses the claim is not known: {self._why_unknown()}")
                if users:
                    raise RuntimePendingError(f"the claim's CPUs are in use: {_named(users)} has not ended")
                raise RuntimePendingError(
                    f"the claim's CPUs may be in use: {_named(others, why=True)} was found on them, and has not ended "
                    "or been moved away yet"
                )

    @contextmanager
    def barred(self, uid: ClaimUID, why: str) -> Iterator[None]:
        """Let no container be created with a claim meanwhile."""
        self._barred[uid] = why
        try:
            yield
        finally:
            del self._barred[uid]

    def released(self, uid: ClaimUID) -> None:
        """Take note that the ledger does not hold a claim any more: the shared pool may have grown."""
        self.pool.take_back(uid)
        self.reservations.forget(uid)
        if self._grow_at <= self.now():
            self._grow_at = self.now() + _GROW_DELAY_S
        self.notify()

    def spare(self, record: Record) -> None:
        """Keep a claim's CPUs free for a while although it was released: it is going to be prepared again."""
        self.pool.set_aside(record.uid, record.cpus, self.now())

    # The parts

    def _obstacles(self, record: Record) -> list[Container]:
        """Return the containers that have to be moved away from a claim's CPUs before it is prepared."""
        others = self.containers.others(record.uid, record.cpus, self.offline)
        if self.unsolicited_updates:
            known = {one.id for one in others}
            return others + [
                one
                for one in self.containers.doubted
                if not one.verified and one.id not in known and record.uid not in one.claims
            ]
        now = self.now()
        return [one for one in others if one.unread or one.window_end(now)]

    def _on_its_cpus(self, uid: ClaimUID) -> tuple[Container, ...]:
        """Return the containers on a claim's CPUs of which nobody knows that they do not use it.

        One that says nothing of claims, and that can go nowhere while they hold what they do, only gains by a release.
        """
        record = self._ledger.get(uid)
        if record is None:
            return ()
        pool = self.pool.current(self.now())
        return tuple(
            container
            for container in self.containers.beside(uid)
            if not (container.may_have - container.exclusive).isdisjoint(record.cpus)
            and (container.unread or container.suspect or self.pool.wanted(container, pool))
        )

    def _stands_in_the_way(self, container: Container, record: Record) -> bool:
        if record.uid in container.claims:
            return False
        may_use = self._may_use(container, record.cpus)
        if self.unsolicited_updates:
            return may_use or not container.verified
        return may_use and (container.unread or container.window_end(self.now()) > 0)

    def _may_use(self, container: Container, cpus: CpuSet) -> bool:
        return (
            not container.may_have.isdisjoint(cpus)
            or not self.pool.is_usable(container.given)
            or not container.astray.isdisjoint(cpus)
        )

    def _passes_by_itself(self, container: Container) -> bool:
        """Tell whether a container will be out of a claim's way in a moment, by what goes on already."""
        return not container.fault and bool(self.pool.wanted(container, self.pool.current(self.now())))

    def _can_be_moved_at_once(self, container: Container) -> bool:
        """Tell whether the answer to an event can move a container."""
        now = self.now()
        return (
            not self.unsolicited_updates
            and not container.window_end(now)
            and (not container.fault or container.is_retry_due(now))
            and bool(self.pool.wanted(container, self.pool.current(now)))
        )

    def _still_there(self, container: Container, record: Record) -> bool:
        return self.containers.get(container.id) is container and self._stands_in_the_way(container, record)

    def _why_unknown(self) -> str:
        if self._closing:
            return "the driver is stopping"
        return f"the container runtime is not connected, so that no container can be held to its CPUs: {self._unknown}"

    def _nothing_left(self, cpus: CpuSet) -> str:
        count = self.containers.shared
        shared = "container that has no claim and runs" if count == 1 else "containers that have no claim and run"
        return (
            f"CPUs {cpus} would leave no CPU for the {count} {shared} on this node; expected at least one CPU that is "
            "neither reserved, isolated nor held by a claim"
        )

    def _why_not_clear(self, record: Record) -> str:
        if not self.known or self._closing:
            return self._why_unknown()
        in_the_way = self._obstacles(record)
        if not self.pool.cpus and any(not container.claims for container in in_the_way):
            return self._nothing_left(record.cpus)
        named = _named(in_the_way, why=True)
        return f"CPUs {record.cpus} are not free of other containers: {named} could not be moved away yet"


def _named(containers: list[Container] | tuple[Container, ...], *, why: bool = False) -> str:
    """Name a few containers."""
    named = [f"{container}{_why(container) if why else ''}" for container in containers[:_MOST_NAMED]]
    if len(containers) > _MOST_NAMED:
        named.append(f"{len(containers) - _MOST_NAMED} more")
    return " and ".join(named)


def _why(container: Container) -> str:
    if container.fault:
        return f" ({container.fault})"
    if container.astray:
        return f" (whose cgroup allows only CPUs {shown(container.astray)})"
    return "" if container.phase is Phase.RUNNING else f" (which {container.phase.value})"


async def _happens(event: asyncio.Event, deadline: float) -> bool:
    try:
        async with asyncio.timeout_at(deadline):
            await event.wait()
    except TimeoutError:
        return False
    return True
