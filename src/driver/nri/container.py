# SPDX-License-Identifier: Apache-2.0
"""What is known of the containers that live on this node, and which CPUs the kernel may hold each of them to.

What the runtime has accepted does not always last. There are three windows in which it does not: between the answer to
a creation and the end of the creation the runtime does not know the container yet; while it starts one, the kernel gets
the CPUs that were stored before; and after the answer to an update it carries that answer out last, whatever was pushed
meanwhile. So a container has the CPUs that it was *given* last, and besides CPUs that it may still have, its *doubts*.
Only an update that is pushed outside of all windows, and that no event has crossed, removes them; or, where the runtime
must not be pushed, what the kernel says of the container's cgroup.

Pure: no I/O, no clock; times are seconds of a monotonic clock, passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.names import ClaimUID

WINDOW_S: Final = 8.0
"""How long a window may last of whose end the runtime need not tell; after that a push counts again.

A prepare waits a little longer, so that a start that has failed does not make it fail too.
"""
TOLD_S: Final = 150.0
"""How long one may last of whose end the runtime always tells: longer than the kubelet waits for the runtime."""
IDLE_S: Final = 30.0
"""After so long a container that was not started is taken for one whose start has failed; nobody would tell."""

_MOST_DOUBTS: Final = 16


class Phase(Enum):
    """How far a container has come."""

    CREATING = "is being created"
    CREATED = "is created but not started"
    STARTING = "is being started"
    RUNNING = "runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod, as the runtime names it.

    Attributes
    ----------
    uid : str
        The pod's UID, or the sandbox's id where the runtime knows none.
    sandbox : str
        The id of its sandbox.
    namespace, name : str
        For people.
    """

    uid: str
    sandbox: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def astray(allowed: CpuSet | None, given: CpuSet) -> CpuSet:
    """Return the CPUs that a container may use of which its parent cgroup allows none that it was given.

    For the kernel (cgroup-v2, ``cpuset.cpus``) such a cpuset is none, and it may use all that the parent has.
    """
    return CpuSet() if allowed is None or not given or not allowed.isdisjoint(given) else allowed


class _Doubt(NamedTuple):
    """CPUs that a container may still have, since when, and which change of `Container.given` has left them."""

    cpus: CpuSet
    since: float
    serial: int


def nobody(_: Container) -> None:
    """Take note of nothing."""


@dataclass(slots=True, kw_only=True)
class Container:
    """A container that lives: created, and not yet known to have ended.

    Attributes
    ----------
    id, name : str
        The runtime's id, and the name in the pod.
    pod : Pod
        Its pod.
    claims : frozenset of ClaimUID
        The claims whose CPUs it has for itself; empty for a container on the shared pool.
    exclusive : CpuSet
        Their CPUs; empty likewise.
    phase : Phase
        How far it has come.
    given : CpuSet
        The CPUs that the runtime was told last.
    verified : bool
        Whether the runtime was told, or tried to be told, since the driver knows the container; before that, the kernel
        may hold it to anything.
    fault : str
        Why the last push failed; empty if it did not.
    failures : int
        How many pushes have failed since the last that did not.
    cgroups_path : str
        Where its cgroup is, as the runtime tells it; empty if it does not.
    allowed : CpuSet or None
        What its parent cgroup allowed when somebody last looked; None if that is not known. See `parent_allows`.
    watch : callable
        Called with it after each change of `may_have`, `given`, `verified` or `allowed`.
    unread : bool
        Whether there was no time yet to find out what it is. It stays where it is until then.
    suspect : bool
        Whether it says of itself that it has a claim, and that is not so, or not known.
    beside : frozenset of ClaimUID
        The claims on whose CPUs, or some of them, it was when the driver came to know of it.
    """

    id: str
    name: str
    pod: Pod
    claims: frozenset[ClaimUID] = frozenset()
    exclusive: CpuSet = field(default_factory=CpuSet)
    phase: Phase
    given: CpuSet
    verified: bool = True
    fault: str = ""
    failures: int = 0
    cgroups_path: str = ""
    allowed: CpuSet | None = None
    watch: Callable[[Container], None] = nobody
    unread: bool = False
    suspect: bool = False
    beside: frozenset[ClaimUID] = frozenset()
    _may_have: CpuSet = field(init=False)
    _doubts: list[_Doubt] = field(default_factory=list)
    _serial: int = 0
    _on_the_way: CpuSet = field(default_factory=CpuSet)
    _created_with: CpuSet = field(default_factory=CpuSet)
    _before_start: CpuSet = field(default_factory=CpuSet)
    _phase_since: float = 0.0
    _update: tuple[CpuSet, float] | None = None
    _events: int = 0
    _retry_at: float = 0.0

    def __post_init__(self) -> None:
        self._may_have = self.given

    @classmethod
    def created(
        cls,
        identity: str,
        name: str,
        pod: Pod,
        claims: frozenset[ClaimUID],
        exclusive: CpuSet,
        given: CpuSet,
        now: float,
        *,
        cgroups_path: str = "",
    ) -> Container:
        """Return a container whose creation was answered just now, with these CPUs."""
        return cls(
            id=identity,
            name=name,
            pod=pod,
            claims=claims,
            exclusive=exclusive,
            phase=Phase.CREATING,
            given=given,
            cgroups_path=cgroups_path,
            _created_with=given,
            _before_start=given,
            _phase_since=now,
        )

    @classmethod
    def found(
        cls,
        identity: str,
        name: str,
        pod: Pod,
        claims: frozenset[ClaimUID],
        exclusive: CpuSet,
        given: CpuSet,
        phase: Phase,
        now: float,
        *,
        cgroups_path: str = "",
    ) -> Container:
        """Return a container that has been there before the driver knew of it, with the CPUs that the runtime tells."""
        container = cls.created(identity, name, pod, claims, exclusive, given, now, cgroups_path=cgroups_path)
        container.phase = phase
        container.verified = False
        return container

    def __str__(self) -> str:
        return f"container {self.name} of pod {self.pod}"

    @property
    def may_have(self) -> CpuSet:
        """All CPUs to which the kernel may hold it, as far as the driver knows; see `verified`."""
        return self._may_have

    @property
    def is_doubted(self) -> bool:
        """Whether it may have other CPUs than it was given last."""
        return not self.verified or bool(self._doubts) or bool(self._on_the_way)

    @property
    def is_settled(self) -> bool:
        """Whether it runs, and there is no reason why the kernel should hold it to other CPUs than it was given."""
        return self.phase is Phase.RUNNING and not (self._doubts or self._on_the_way or self._update)

    @property
    def astray(self) -> CpuSet:
        """The CPUs that it may use although it was not given them: its parent cgroup allows none that it was given."""
        return astray(self.allowed, self.given)

    def was_never_started(self, now: float) -> bool:
        """Tell whether it is still not being started when whoever wanted it has long given up."""
        return self.phase in (Phase.CREATING, Phase.CREATED) and now >= self._phase_since + TOLD_S

    # What happens to it

    def post_created(self, now: float) -> None:
        """Take note that the runtime knows it: what was answered is stored, and nothing that was pushed meanwhile."""
        self._event()
        if self.phase is Phase.CREATING:
            self._give(self._created_with, now)
            self._enter(Phase.CREATED, now)

    def starting(self, now: float) -> None:
        """Take note that the runtime has begun to start it, some time ago."""
        self._event()
        if self.phase is not Phase.RUNNING:
            self._enter(Phase.STARTING, now)

    def started(self, now: float) -> None:
        """Take note that it runs, with what was stored at some time since its creation."""
        self._event()
        if self.phase is not Phase.RUNNING:
            self._doubt(self._before_start, now)
            self._enter(Phase.RUNNING, now)
            self._changed()

    def updating(self, answer: CpuSet, now: float) -> None:
        """Take note that the runtime will give it these CPUs: an update was answered with them."""
        self._event()
        if self.phase is Phase.CREATING:
            self._enter(Phase.CREATED, now)
        self._give(answer, now)
        self._before_start |= answer
        self._update = (answer, now)

    def updated(self, now: float) -> None:
        """Take note that an update was carried out, before or after anything that was pushed meanwhile."""
        self._event()
        if self._update is not None:
            self._doubt(self._update[0], now)
            self._update = None
            self._changed()

    def synchronized(self, answer: CpuSet, now: float) -> None:
        """Take note that the answer to a synchronisation has these CPUs; nobody will tell whether they were applied."""
        self._give(answer, now)

    def shrunk(self, cpus: CpuSet) -> None:
        """Take note that the kernel has left it these CPUs: the others are to be given to it anew."""
        self.given = cpus
        self._changed()

    def parent_allows(self, cpus: CpuSet | None) -> None:
        """Take note of what its parent cgroup allows; None if that is not known."""
        if cpus != self.allowed:
            self.allowed = cpus
            self.watch(self)

    # Where it is moved in answers to events of other containers, and in no other way

    def window_end(self, now: float) -> float:
        """Return until when it may get, or get back, CPUs that were stored earlier; 0 if it may not.

        From its creation until it runs the runtime starts it with what was stored when the start began. One that was
        not started for long counts as one whose start has failed: should it be started after all, `late_start` tells
        which CPUs it may have got.
        """
        end = self._update[1] + WINDOW_S if self._update is not None else 0.0
        if self.phase in (Phase.CREATING, Phase.STARTING):
            end = max(end, self._phase_since + TOLD_S)
        elif self.phase is Phase.CREATED:
            end = max(end, self._phase_since + IDLE_S)
        return end if end > now else 0.0

    def moved(self, cpus: CpuSet, now: float) -> None:
        """Take note that the answer to another container's event has these CPUs for it; it may fail without a word."""
        self._before_start |= cpus
        self._give(cpus, now)

    @property
    def serial(self) -> int:
        """How often it was given CPUs."""
        return self._serial

    def seen(self, cpus: CpuSet, now: float) -> bool:
        """Take note of what the kernel holds its cgroup to, and tell whether that is what it was given last."""
        self.verified = True
        self._doubts.clear()
        self._doubt(cpus, now)
        self._changed()
        return not self._doubts

    def believe(self, serial: int) -> None:
        """Take what it was given for done, up to the `serial` of that time: nothing can be read of its cgroup."""
        self.verified = True
        self._doubts = [doubt for doubt in self._doubts if doubt.serial > serial]
        self._changed()

    @property
    def late_start(self) -> CpuSet:
        """The CPUs with which it may be started although it was given others since its creation."""
        return self._before_start - self.given

    # Pushes

    @property
    def events(self) -> int:
        """How many events there were; a push proves something only if there was none since it was sent."""
        return self._events

    def push_due(self, wanted: CpuSet, now: float) -> float | None:
        """Return from when on a push of these CPUs makes sense; None if there is nothing to be gained.

        Parameters
        ----------
        wanted : CpuSet
            The CPUs that it should have.
        now : float
            The present time.
        """
        if self.verified and not self._doubts and not self._on_the_way and self.given == wanted:
            return None
        at = now
        if self._may_start(now) and self.verified and self.given == wanted:
            # If a start had begun before the push, it would be known by then.
            at = min((doubt.since for doubt in self._doubts), default=now - WINDOW_S) + WINDOW_S
        return max(at, self._window_end(), self._retry_at)

    def pushing(self, cpus: CpuSet) -> None:
        """Take note that the runtime is told to give it these CPUs; it may have them long before the answer comes."""
        self._on_the_way |= cpus
        self._before_start |= cpus
        self._changed()

    def pushed(self, cpus: CpuSet, sent_at: float, events: int, now: float) -> None:
        """Take note that the runtime has answered that it has given it these CPUs.

        Parameters
        ----------
        cpus : CpuSet
            What was pushed.
        sent_at : float
            When.
        events : int
            `events` at that time.
        now : float
            The present time.
        """
        self.verified = True
        self.forgive()
        proven = events == self._events and sent_at >= self._window_end()
        on_the_way, self._on_the_way = self._on_the_way, CpuSet()
        if proven and not self._may_start(sent_at):
            self.given = cpus
            self._doubts.clear()
            self._changed()
            return
        if proven:
            self._doubts = [doubt for doubt in self._doubts if doubt.since + WINDOW_S > sent_at]
        self._give(cpus, now)
        self._doubt(on_the_way, now)
        self._changed()

    def push_failed(self, reason: str, now: float, *, retry_s: float, settled: bool) -> None:
        """Take note that the runtime could not give it what was on the way, or did not answer.

        Parameters
        ----------
        reason : str
            What it said.
        now : float
            The present time.
        retry_s : float
            How long to wait at least before the next try.
        settled : bool
            Whether it is sure that it has not done so: a runtime that cannot puts back what was.
        """
        if not settled:
            self._doubt(self._on_the_way, now)
        self._on_the_way = CpuSet()
        self.verified = True
        self._changed()
        self.move_failed(reason, now, retry_s=retry_s)

    def move_failed(self, reason: str, now: float, *, retry_s: float) -> None:
        """Take note that it could not be given its CPUs.

        Parameters
        ----------
        reason : str
            What is known of why.
        now : float
            The present time.
        retry_s : float
            How long to wait at least before the next try, after the first failure.
        """
        self.fault = reason
        self.failures += 1
        self._retry_at = now + min(retry_s * 2 ** min(self.failures - 1, 10), 60.0)

    def is_retry_due(self, now: float) -> bool:
        """Tell whether it may be tried again by now, after failures."""
        return now >= self._retry_at

    def hold_off(self, until: float) -> None:
        """Do not try anything before a time that need not be."""
        self._retry_at = max(self._retry_at, until)

    def forgive(self) -> None:
        """Forget that pushes have failed: it has what it should have by now."""
        self.fault = ""
        self.failures = 0
        self._retry_at = 0.0

    def retry_soon(self, now: float) -> None:
        """Do not wait much longer for the next try after failures: somebody needs it to be moved."""
        self._retry_at = min(self._retry_at, now + 1.0)

    # The parts

    def _may_start(self, now: float) -> bool:
        """Tell whether a start may have begun of which the runtime has told nothing yet."""
        return self.phase is Phase.CREATED and now < self._phase_since + IDLE_S

    def _window_end(self) -> float:
        """Return when the windows that are open count as closed; 0 if none is."""
        end = 0.0
        if self.phase in (Phase.CREATING, Phase.STARTING):
            end = self._phase_since + TOLD_S
        if self._update is not None:
            end = max(end, self._update[1] + WINDOW_S)
        return end

    def _event(self) -> None:
        self._events += 1

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self._phase_since = now

    def _give(self, cpus: CpuSet, now: float) -> None:
        """Take note that it has, or will have, these CPUs, or still those from before."""
        before, self.given = self.given, cpus
        self._serial += 1
        self._doubt(before, now)
        self._changed()

    def _doubt(self, cpus: CpuSet, now: float) -> None:
        if cpus == self.given:
            return
        self._doubts = [doubt for doubt in self._doubts if doubt.cpus != cpus]
        self._doubts.append(_Doubt(cpus, now, self._serial))
        if len(self._doubts) > _MOST_DOUBTS:
            self._doubts = [_Doubt(CpuSet().union(*(doubt.cpus for doubt in self._doubts)), now, self._serial)]

    def _changed(self) -> None:
        self._may_have = self.given.union(self._on_the_way, *(doubt.cpus for doubt in self._doubts))
        self.watch(self)
