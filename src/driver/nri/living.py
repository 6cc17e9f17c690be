# SPDX-License-Identifier: Apache-2.0
"""What containers are that live before the driver can say anything to it, and that nobody can refuse any more.

The runtime waits for the answer to a synchronisation as briefly as for any other, however many containers there are,
and whatever their authors have made of them. Those for which there was no time stay where they are, keep their CPUs
from being given on, and are looked at as soon as the answer is out, a few at a time.

Where a container has nothing of a claim but its variable, as before the start guard and where the runtime tells no CDI
devices, whose claim it is stands in the claim itself. The API server is asked for that afterwards, and again until it
answers; see `driver.nri.decisions.decide_living` for what holds until then.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from driver.logs import fields
from driver.nri import messages
from driver.nri.container import Container
from driver.nri.decisions import Decision, Exclusive, Marks, Refused, Shared, Unverified, decide_living
from driver.nri.evidence import HeldClaims
from driver.nri.precedence import precedence
from driver.nri.survey import Survey
from driver.serial import any_of
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from driver.apis import nri_v1alpha1_pb2 as nri
    from driver.names import ClaimUID
    from driver.nri.container import Pod
    from driver.nri.enforcement import Enforcement
    from driver.nri.survey import Found

_log = logging.getLogger(__name__)

# The runtime takes 4 MiB in all, and a CPU list may have tens of thousands of characters.
_MOST_UPDATE_BYTES: Final = 3 << 20
# Of the runtime's patience, which began when it made the first part, and ends when it has read the answer.
_BUDGET: Final = 0.5
# Between two, whatever else the runtime wants is answered.
_SLICE_S: Final = 0.002
_LOOK_S: Final = 10.0
_LOOKS_TOGETHER: Final = 8
_FIRST_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 60.0
_SHARED: Final = Shared()


class LivingMetrics(Protocol):
    """What counts containers that were there before."""

    def count_refused_container(self, reason: str, /) -> None:
        """Count a container that was not let in, or would not be."""

    def count_corrected_containers(self, mode: str, containers: int, /) -> None:
        """Count containers that had not the CPUs that they should have, ``exclusive`` or ``shared``."""


class _Case(NamedTuple):
    found: Found
    pod: Pod


class Living:
    """Finds out what the containers are that live already.

    Parameters
    ----------
    enforcement : Enforcement
        What is known.
    metrics : LivingMetrics
        What counts.

    Attributes
    ----------
    marks : Marks
        Which marks a container of a claim must be expected to have.
    """

    def __init__(self, enforcement: Enforcement, metrics: LivingMetrics) -> None:
        self._enforcement = enforcement
        self._containers = enforcement.containers
        self._metrics = metrics
        self._survey: Survey | None = None
        # Those that are still to be looked at, the one with the best right first.
        self._rest: dict[str, _Case] = {}
        # Those about which the API server may say something else than was decided.
        self._open: dict[str, tuple[_Case, Decision]] = {}
        self._retries: dict[ClaimUID, tuple[float, float]] = {}
        self._wake = asyncio.Event()
        self.marks = Marks(cdi_devices=False, guard=False)

    def forget(self) -> None:
        """Keep nothing: the connection has ended."""
        self._survey = None
        self._rest.clear()
        self._open.clear()

    def held_claims(self) -> HeldClaims:
        """Return what is compared with what containers say of claims."""
        return HeldClaims(self._enforcement.records, self._enforcement.stop)

    # Synchronisation

    def take_part(self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]) -> None:
        """Take a part of what the runtime tells of all that lives.

        Raises
        ------
        NriError
            If all parts together are too much.
        """
        if self._survey is None:
            self._survey = Survey(self.held_claims(), self._enforcement.now())
        try:
            self._survey.add(pods, containers)
        except Exception:
            self._survey = None
            raise

    def take_all(self) -> list[nri.ContainerUpdate]:
        """Take what all parts together have told in the place of all that was known; return what has to be changed."""
        survey, self._survey = self._survey, None
        assert survey is not None, "there was no part"
        deadline = survey.started_at + _BUDGET * self._enforcement.request_timeout_s
        cases = self._in_order(survey)
        self.forget()
        self._containers.replace_all(())
        updates = []
        pool = self._enforcement.pool.current(self._enforcement.now())
        texts: dict[CpuSet, str] = {}
        touched: dict[CpuSet, frozenset[ClaimUID]] = {}
        parents: dict[str, CpuSet | None] = {}
        corrected = {"exclusive": 0, "shared": 0}
        room = _MOST_UPDATE_BYTES
        for case in cases:
            now = self._enforcement.now()
            container = self._container(case, now, touched)
            if now >= deadline:
                container.unread = True
                self._containers.add(container)
                self._rest[container.id] = case
                continue
            self._enforcement.look_at_parent(container, parents)
            self._decide(container, case, {})
            wanted = self._enforcement.pool.wanted(container, pool)
            if not wanted or case.found.cpus == wanted:
                continue
            corrected["exclusive" if container.claims else "shared"] += 1
            update = messages.update(container.id, texts.setdefault(wanted, str(wanted)))
            update.ignore_failure = True
            room -= update.ByteSize()
            # What has no room is pushed soon, as all that was found is.
            if room >= 0:
                updates.append(update)
                container.synchronized(wanted, now)
        for mode, count in corrected.items():
            self._metrics.count_corrected_containers(mode, count)
        if self._rest:
            _log.warning(
                "there was no time to look at all containers before the runtime was answered; it is done now",
                extra=fields(containers=len(self._rest), of=len(cases)),
            )
        return updates

    def synchronized(self) -> None:
        """Take note that the runtime has the answer."""
        self._wake.set()

    # One container

    def take_in(self, pod: nri.PodSandbox, container: nri.Container) -> Container:
        """Take note of a container that lives and was not known."""
        survey = Survey(self.held_claims(), self._enforcement.now())
        case = _Case(survey.read(container), messages.read_pod(pod))
        known = self._container(case, self._enforcement.now(), {})
        self._enforcement.look_at_parent(known)
        self._decide(known, case, {})
        return known

    def look_at(self, container: Container) -> None:
        """Look at a container for which there was no time before, if it is one."""
        case = self._rest.pop(container.id, None)
        if case is None or not container.unread:
            return
        container.unread = False
        self._enforcement.look_at_parent(container)
        self._decide(container, case, {})
        wanted = self._enforcement.pool.wanted(container, self._enforcement.pool.current(self._enforcement.now()))
        if wanted and case.found.cpus != wanted:
            self._metrics.count_corrected_containers("exclusive" if container.claims else "shared", 1)

    # Afterwards

    async def run(self) -> None:
        """Look at what there was no time for, and ask the API server where it has to be asked, until cancelled."""
        while True:
            self._wake.clear()
            learned = self._enforcement.reservations.learned
            await self._look_at_rest()
            retry_s = await self._ask()
            await any_of([self._wake, learned], asyncio.get_running_loop().time() + retry_s)

    async def _look_at_rest(self) -> None:
        while self._rest and self._enforcement.known:
            until = self._enforcement.now() + _SLICE_S
            while self._rest and self._enforcement.now() < until:
                identity = next(iter(self._rest))
                container = self._containers.get(identity)
                if container is None:
                    del self._rest[identity]  # it has ended
                else:
                    self.look_at(container)
            self._enforcement.notify()
            await asyncio.sleep(0)

    async def _ask(self) -> float:
        """Ask the API server whose the claims are that it may be asked for now; return how long to wait."""
        asked = [uid for uid in self._doubtful() if self._retries.get(uid, (0.0, 0.0))[0] <= self._enforcement.now()]
        looked: dict[ClaimUID, str] = {}
        for start in range(0, len(asked), _LOOKS_TOGETHER):
            some = asked[start : start + _LOOKS_TOGETHER]
            records = [record for uid in some if (record := self._enforcement.records.get(uid)) is not None]
            reasons = await asyncio.gather(*(self._enforcement.reservations.look(each, _LOOK_S) for each in records))
            looked |= {record.uid: reason for record, reason in zip(records, reasons, strict=True)}
        now = self._enforcement.now()
        for uid, reason in looked.items():
            if reason:
                retry_s = min(2 * self._retries.get(uid, (0.0, _FIRST_RETRY_S / 2))[1], _LONGEST_RETRY_S)
                self._retries[uid] = (now + retry_s, retry_s)
                level = logging.WARNING if retry_s == _FIRST_RETRY_S else logging.DEBUG
                about = fields(uid=uid, reason=reason, retry_s=retry_s)
                _log.log(level, "cannot find out whether a container that runs has a claim", extra=about)
            else:
                self._retries.pop(uid, None)
        self._decide_again(looked)
        doubtful = self._doubtful()
        self._retries = {uid: retry for uid, retry in self._retries.items() if uid in doubtful}
        return min([_LONGEST_RETRY_S, *(max(at - now, 0.0) for at, _ in self._retries.values())])

    def _doubtful(self) -> dict[ClaimUID, None]:
        """Return the claims of which it is not known whose they are, and of which it can be asked."""
        doubtful: dict[ClaimUID, None] = {}
        for case, _ in self._open.values():
            for variable in case.found.evidence.variables:
                record = self._enforcement.records.get(variable.uid)
                marked = variable.uid in case.found.evidence.marked
                # Of an adopted claim no name is known before the kubelet asks for it again.
                if record is None or record.adopted or marked:
                    continue
                if not self._enforcement.is_proven(record.uid, case.pod.uid):
                    doubtful[record.uid] = None
        return doubtful

    def _decide_again(self, looked: Mapping[ClaimUID, str]) -> None:
        """Decide anew about all that is open, since something may be known now."""
        cases, self._open = self._open, {}
        changed = False
        for identity, (case, decision) in cases.items():
            container = self._containers.get(identity)
            if container is None:
                continue
            before = container.claims
            self._decide(container, case, looked, decision)
            changed |= container.claims != before
        if changed:
            self._enforcement.notify()

    # The parts

    def _in_order(self, survey: Survey) -> list[_Case]:
        """Return all containers, the one with the best right to a claim first."""
        enforcement = self._enforcement
        former = {uid: owner[0].uid for uid in enforcement.records if (owner := enforcement.owner(uid))}
        cases = [_Case(found, survey.pod(found)) for found in survey.containers]
        cases.sort(key=lambda case: precedence(case.found, case.pod, former, enforcement.records))
        return cases

    def _container(self, case: _Case, now: float, touched: dict[CpuSet, frozenset[ClaimUID]]) -> Container:
        """Return a container of which nothing is decided yet."""
        found = case.found
        given = self._enforcement.everything if found.cpus is None else found.cpus
        container = Container.found(
            found.id,
            found.name,
            case.pod,
            frozenset(),
            CpuSet(),
            given,
            found.phase,
            now,
            cgroups_path=found.cgroups_path,
        )
        if given not in touched:
            touched[given] = frozenset(
                uid for uid, record in self._enforcement.records.items() if not given.isdisjoint(record.cpus)
            )
        container.beside = touched[given]
        return container

    def _decide(
        self, container: Container, case: _Case, looked: Mapping[ClaimUID, str], before: Decision | None = None
    ) -> None:
        """Give a container what it has a right to."""
        decision = self._decision(case, looked)
        exclusive = decision if isinstance(decision, Exclusive) else None
        claims: frozenset[ClaimUID] = frozenset() if exclusive is None else exclusive.claims
        if decision != before:
            self._tell(case, decision, again=before is not None)
        for uid in claims:
            assert exclusive is not None
            self._enforcement.reservations.learn_pod(uid, case.pod.uid, proven=uid not in exclusive.unproven)
        container.suspect = exclusive is None and not case.found.evidence.is_none
        self._containers.assign(container, claims, CpuSet() if exclusive is None else exclusive.cpus)
        if self._is_open(decision):
            self._open[container.id] = (case, decision)
            if before is None:
                self._wake.set()

    def _is_open(self, decision: Decision) -> bool:
        """Tell whether the API server may change a decision, directly or by what it says of another container."""
        if isinstance(decision, Exclusive):
            return bool(decision.unproven)
        return isinstance(decision, Unverified) or (
            isinstance(decision, Refused) and decision.reason == "owned" and bool(self._open)
        )

    def _decision(self, case: _Case, looked: Mapping[ClaimUID, str]) -> Decision:
        if case.found.evidence.is_none:
            return _SHARED
        request = case.found.request(case.pod)
        try:
            decision = decide_living(request, case.found.cpus, self._enforcement, self.marks, looked)
        except Exception as error:
            # One that cannot be understood must not keep the others where they are.
            _log.exception("a bug", extra=fields(id=case.found.id[:64]))
            return Refused(reason="malformed", message=f"internal error: {type(error).__name__}")
        if isinstance(decision, Exclusive):
            if barred := [uid for uid in sorted(decision.claims) if self._enforcement.is_barred(uid)]:
                # It was found that nobody uses it, and its CPUs may be given on at any moment.
                return Unverified(claims=tuple(barred))
            for uid in sorted(decision.claims):
                owner = self._enforcement.owner(uid)
                if owner is not None and owner[0].uid != case.pod.uid:
                    message = f"claim {uid} is used by pod {owner[0]}, which was first"
                    return Refused(reason="owned", message=message)
        return decision

    def _tell(self, case: _Case, decision: Decision, *, again: bool) -> None:
        about = {"pod": case.pod, "container": case.found.name, "id": case.found.id}
        if isinstance(decision, Refused):
            self._metrics.count_refused_container(decision.reason)
            _log.error(
                "a container that runs would not be let in, and is put on the shared pool",
                extra=fields(**about, reason=decision.message),
            )
        elif isinstance(decision, Unverified):
            self._metrics.count_refused_container("unverified")
            _log.warning(
                "a container that runs says that it has a claim; it is on the shared pool until the API server says so",
                extra=fields(**about, claims=",".join(sorted(decision.claims))),
            )
        elif isinstance(decision, Exclusive) and (decision.unproven or again):
            by = "its CPUs" if decision.unproven else "the API server"
            _log.info(
                "a container that runs has a claim",
                extra=fields(**about, claims=",".join(sorted(decision.claims)), known_by=by),
            )
