# SPDX-License-Identifier: Apache-2.0
"""The driver's answers to the runtime: which CPUs each container gets.

Nothing is awaited on the way to an answer but, for a claim that is not known to be reserved for the pod, one read from
the API server. The runtime does nothing else meanwhile, and goes on without an answer that comes late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.json_values import quoted
from driver.logs import fields
from driver.nri import messages
from driver.nri.container import Container, Phase
from driver.nri.decisions import Decision, Exclusive, Marks, Refused, Unverified, decide
from driver.nri.errors import Refusal
from driver.nri.living import Living, LivingMetrics
from driver.nri.moves import MoveMetrics, Moves
from driver.nri.runtimes import Runtime, allows_unsolicited_updates, tells_cdi_devices
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from driver.nri.decisions import Request
    from driver.nri.enforcement import Enforcement
    from driver.nri.moves import Cgroups

_log = logging.getLogger(__name__)

_LONGEST_LOOK_S: Final = 1.0
_MOST_ENDED: Final = 4096
# Of a container that is not known these say that it lives: it was forgotten when its pod was stopped while it was being
# started, or created while the runtime did without the driver.
_BEGINNINGS: Final = (nri.POST_CREATE_CONTAINER, nri.START_CONTAINER, nri.POST_START_CONTAINER)


class PluginMetrics(LivingMetrics, MoveMetrics, Protocol):
    """What counts the runtime's requests."""

    def observe_nri(self, operation: str, result: str, mode: str, seconds: float, /) -> None:
        """Count a ``create_container``, ``stop_container`` or ``remove_container``, and how long it took.

        The mode is ``exclusive``, ``shared``, or ``unknown`` of a container that is not known or was refused.
        """

    def observe_nri_synchronize(self, result: str, seconds: float, /) -> None:
        """Count a synchronisation, and how long it took."""

    def set_unsolicited_updates(self, allowed: bool, /) -> None:
        """Say whether the runtime can be told to move containers at any time."""


class RuntimePlugin:
    """Answers the runtime; what `driver.nri.connection` calls a plugin.

    Parameters
    ----------
    enforcement : Enforcement
        What is known.
    metrics : PluginMetrics
        What counts.
    cgroups : Cgroups
        What the kernel says of containers.
    start_guard : bool
        Whether the claims' CDI specs have the start guard's hook.
    """

    def __init__(
        self, enforcement: Enforcement, metrics: PluginMetrics, *, cgroups: Cgroups, start_guard: bool
    ) -> None:
        self._enforcement = enforcement
        self._moves = Moves(enforcement, cgroups, metrics)
        self._containers = enforcement.containers
        self._metrics = metrics
        self._start_guard = start_guard
        self._living = Living(enforcement, metrics)
        self._look_s = _LONGEST_LOOK_S
        # What the containers were that have ended and are still to be removed.
        self._ended: dict[str, str] = {}

    def connected(self, runtime_name: str, runtime_version: str, nri_version: str, request_timeout_s: float) -> None:
        """Take note of a new connection."""
        runtime = Runtime(name=runtime_name, version=runtime_version, nri_version=nri_version)
        self._living.marks = Marks(cdi_devices=tells_cdi_devices(runtime), guard=self._start_guard)
        self._enforcement.unsolicited_updates = allows_unsolicited_updates(runtime)
        self._metrics.set_unsolicited_updates(self._enforcement.unsolicited_updates)
        self._moves.forget()
        self._look_s = min(_LONGEST_LOOK_S, request_timeout_s / 2)
        self._enforcement.request_timeout_s = request_timeout_s
        if not self._living.marks.any:
            _log.warning(
                "nothing but the environment shows that a container was given a claim: this runtime does not tell its "
                "CDI devices, and the start guard is off",
                extra=fields(runtime=runtime_name, version=runtime_version),
            )
        if not self._enforcement.unsolicited_updates:
            _log.info(
                "containers are moved away from a claim's CPUs when its container is created, and get CPUs back when "
                "another is: this runtime may deadlock on updates at other times",
                extra=fields(runtime=runtime_name, version=runtime_version, nri=nri_version or None),
            )
        self._enforcement.set_unknown("it has not told its containers yet")

    def disconnected(self, reason: str) -> None:
        """Take note of the end of the connection."""
        self._living.forget()
        self._moves.forget()
        self._enforcement.set_unknown(reason)

    async def run(self) -> None:
        """Find out what could not be found out before the runtime had to be answered, until cancelled."""
        await self._living.run()

    def synchronize_part(self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]) -> None:
        """Take a part of all that lives; the last one comes with `synchronize`."""
        self._living.take_part(pods, containers)

    async def synchronize(
        self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]
    ) -> Sequence[nri.ContainerUpdate]:
        """Take the rest of the containers that live, and return what all are to have where they have not."""
        started = time.perf_counter()
        result = "error"
        try:
            self._living.take_part(pods, containers)
            updates = self._living.take_all()
            self._ended.clear()
            result = "success"
        finally:
            self._metrics.observe_nri_synchronize(result, time.perf_counter() - started)
        return updates

    def synchronized(self) -> None:
        """Take note that pushes may start."""
        self._enforcement.set_known()
        self._living.synchronized()

    async def create_container(
        self, pod: nri.PodSandbox, container: nri.Container
    ) -> tuple[nri.ContainerAdjustment, Sequence[nri.ContainerUpdate]]:
        """Give a container the CPUs of its claims, or those of the shared pool, or refuse it."""
        with self._measured("create_container") as measured:
            if not self._enforcement.unsolicited_updates:
                await self._moves.look()
            request = messages.read_request(messages.read_pod(pod), container, self._living.held_claims())
            decision = await self._decide(request)
            if isinstance(decision, Unverified):
                decision = self._changed_meanwhile(request, decision)
            if isinstance(decision, Refused):
                self._refuse(request, container.id, decision)
            exclusive = decision if isinstance(decision, Exclusive) else None
            measured.mode = "exclusive" if exclusive else "shared"
            cgroups_path = messages.read_cgroups_path(container)
            allowed = self._enforcement.parent_cpus(cgroups_path)
            cpus = self._cpus_for(request, container.id, exclusive, allowed)
            updates = self._updates(container.id, exclusive)
            known = Container.created(
                container.id,
                request.name,
                request.pod,
                exclusive.claims if exclusive else frozenset(),
                exclusive.cpus if exclusive else CpuSet(),
                cpus or self._reported(container),
                self._enforcement.now(),
                cgroups_path=cgroups_path,
            )
            known.parent_allows(allowed)
            self._containers.add(known)
            self._moves.tell(container.id, updates)
            for uid in known.claims:
                proven = uid in request.evidence.marked or self._enforcement.is_proven(uid, request.pod.uid)
                self._enforcement.reservations.learn_pod(uid, request.pod.uid, proven=proven)
            _log.info(
                "container gets CPUs",
                extra=fields(
                    container=known,
                    id=container.id,
                    cpus=cpus,
                    mode=measured.mode,
                    claims=",".join(sorted(known.claims)),
                    moved=len(updates) or None,
                ),
            )
            return messages.adjustment(cpus), updates

    async def update_container(
        self, pod: nri.PodSandbox, container: nri.Container, resources: nri.LinuxResources
    ) -> Sequence[nri.ContainerUpdate]:
        """Let a container keep its CPUs, whatever the kubelet changes; the memory nodes are left to it."""
        known = self._containers.get(container.id)
        if known is None:
            if container.state == nri.CONTAINER_STOPPED:
                return ()
            known = self._living.take_in(pod, container)
        else:
            self._enforcement.look_at_parent(known)
        self._living.look_at(known)
        if not self._enforcement.unsolicited_updates:
            await self._moves.look()
        updates = self._updates(container.id, None)
        now = self._enforcement.now()
        if wanted := self._enforcement.pool.wanted(known, self._enforcement.pool.current(now)):
            known.updating(wanted, now)
            updates.append(messages.update(container.id, str(wanted)))
        if not self._enforcement.unsolicited_updates:
            self._moves.tell(container.id, updates)
        self._enforcement.notify()
        return tuple(updates)

    async def stop_container(self, pod: nri.PodSandbox, container: nri.Container) -> Sequence[nri.ContainerUpdate]:
        """Forget a container that has ended. Who holds which CPUs does not change by that."""
        self._forget("stop_container", container.id)
        if not self._enforcement.unsolicited_updates:
            # Its claim is about to be unprepared, which others may stand in the way of that have left its CPUs.
            await self._moves.look()
        return ()

    async def start_container(self, pod: nri.PodSandbox, container: nri.Container) -> None:
        """Refuse the start of a container with a claim if others are still on its CPUs; nothing of it has run yet."""
        self.event(nri.START_CONTAINER, pod, container)
        known = self._containers.get(container.id)
        if known is None or self._enforcement.unsolicited_updates:
            return
        try:
            await self._moves.check_start(known)
        except Refusal as refusal:
            self._metrics.count_refused_container("not_moved")
            _log.error("container not started", extra=fields(container=known, id=known.id, reason=refusal))
            raise

    def event(self, kind: nri.Event, pod: nri.PodSandbox, container: nri.Container) -> None:
        """Take note of how far a container has come."""
        if kind == nri.REMOVE_CONTAINER:
            self._forget("remove_container", container.id)
            return
        known = self._containers.get(container.id)
        if known is None:
            # It may have ended before the runtime came to tell that it was started.
            if kind not in _BEGINNINGS or container.id in self._ended:
                return
            known = self._living.take_in(pod, container)
        self._living.look_at(known)
        now = self._enforcement.now()
        if kind == nri.POST_CREATE_CONTAINER:
            known.post_created(now)
            self._moves.carried_out(known.id)
        elif kind == nri.START_CONTAINER:
            known.starting(now)
        elif kind == nri.POST_START_CONTAINER:
            known.started(now)
        elif kind == nri.POST_UPDATE_CONTAINER:
            known.updated(now)
            self._moves.carried_out(known.id)
        self._enforcement.notify()

    def pod_stopped(self, pod: nri.PodSandbox) -> None:
        """Forget the pod's containers that never ran; the runtime tells of the ends of the others one by one.

        A start that fails is told to nobody. Such a container would be taken to live until somebody removes it, which
        the kubelet does only after it has unprepared the pod's claims.
        """
        for container in self._containers.of_sandbox(pod.id):
            if container.phase is not Phase.RUNNING:
                self._containers.remove(container.id)
                self._moves.dropped(container.id)
                _log.info("container was never started", extra=fields(container=container, id=container.id))
        self._enforcement.notify()

    async def validate(self, request: nri.ValidateContainerAdjustmentRequest) -> str | None:
        """Let a container be created only with the CPUs that it was given here."""
        known = self._containers.get(request.container.id)
        if known is None:
            return "dra.cpu was not asked which CPUs the container gets; it is tried again"
        if not self._enforcement.pool.wanted(known, self._enforcement.pool.cpus):
            return None
        cpus = messages.read_cpulist(request.adjust.linux.resources.cpu.cpus, self._living.held_claims().limit)
        if cpus != known.given:
            return f"dra.cpu gave the container CPUs {known.given}, but it would be created with {cpus or 'others'}"
        return None

    # The parts

    def _updates(self, identity: str, exclusive: Exclusive | None) -> list[nri.ContainerUpdate]:
        """Return the updates of others that the answer to a container's event carries."""
        if self._enforcement.unsolicited_updates:
            return []
        updates = self._moves.away_from(exclusive.claims) if exclusive is not None else []
        return updates + self._moves.riders(identity, updates)

    async def _decide(self, request: Request) -> Decision:
        decision = decide(request, self._enforcement, self._living.marks, {})
        if not isinstance(decision, Unverified):
            return decision
        records = [self._enforcement.records[uid] for uid in decision.claims]
        reasons = await asyncio.gather(
            *(self._enforcement.reservations.look(record, self._look_s) for record in records)
        )
        # All may be different by now.
        return decide(request, self._enforcement, self._living.marks, dict(zip(decision.claims, reasons, strict=True)))

    def _changed_meanwhile(self, request: Request, unverified: Unverified) -> Refused:
        """Refuse a container of a claim that lost its pod while another of its claims was read."""
        uid = unverified.claims[0]
        claim = self._enforcement.records[uid].claim
        message = (
            f"container {quoted(request.name)}: whether claim {claim} ({uid}) is reserved for pod {request.pod} has "
            "changed meanwhile; it is tried again when the container is"
        )
        return Refused(reason="unverified", message=message)

    def _cpus_for(self, request: Request, identity: str, exclusive: Exclusive | None, allowed: CpuSet | None) -> CpuSet:
        """Return what a container gets; nothing if it is left as it is."""
        if exclusive is not None:
            if allowed is not None and allowed.isdisjoint(exclusive.cpus):
                message = (
                    f"container {quoted(request.name)}: its claims have CPUs {exclusive.cpus}, but cgroup of its pod "
                    f"allows only CPUs {allowed}; expected some of them"
                )
                self._refuse(request, identity, Refused(reason="barred", message=message))
            return exclusive.cpus
        if self._enforcement.pool.leaves_alone:
            return CpuSet()
        pool = self._enforcement.pool.current(self._enforcement.now())
        if not pool:
            message = (
                f"no CPU is left for container {request.name}, which has no claim: all are reserved, isolated or held "
                f"by the {len(self._enforcement.records)} claims on this node"
            )
            self._refuse(request, identity, Refused(reason="empty_pool", message=message))
        cpus = self._enforcement.pool.within(allowed, pool)
        if why := self._enforcement.why_astray(allowed, cpus):
            message = f"no CPU is left for container {request.name}, which has no claim: {why}"
            self._refuse(request, identity, Refused(reason="empty_pool", message=message))
        return cpus

    def _refuse(self, request: Request, identity: str, refused: Refused) -> None:
        self._metrics.count_refused_container(refused.reason)
        _log.error(
            "container refused",
            extra=fields(pod=request.pod, container=request.name, id=identity, reason=refused.message),
        )
        raise Refusal(refused.message)

    def _reported(self, container: nri.Container) -> CpuSet:
        """Return the CPUs that the runtime says a container has: without a restriction all."""
        cpus = messages.read_cpus(container, self._living.held_claims().limit)
        return cpus or self._enforcement.everything

    def _forget(self, operation: str, identity: str) -> None:
        with self._measured(operation) as measured:
            known = self._containers.remove(identity)
            self._moves.dropped(identity)
            if known is None:
                measured.mode = self._ended.get(identity, "unknown")
            else:
                measured.mode = "exclusive" if known.claims else "shared"
                _log.info("container has ended", extra=fields(container=known, id=identity))
                self._enforcement.notify()
            if operation == "remove_container":
                self._ended.pop(identity, None)
            else:
                if len(self._ended) == _MOST_ENDED:
                    del self._ended[next(iter(self._ended))]
                self._ended[identity] = measured.mode

    @contextmanager
    def _measured(self, operation: str) -> Iterator[_Measured]:
        measured = _Measured()
        started = time.perf_counter()
        result = "unknown"
        try:
            yield measured
            result = "success"
        except Exception:
            result = "error"
            raise
        finally:
            self._metrics.observe_nri(operation, result, measured.mode, time.perf_counter() - started)


@dataclass(slots=True)
class _Measured:
    mode: str = "unknown"
