# SPDX-License-Identifier: Apache-2.0
"""The driver's answers to the runtime: which CPUs each container gets.

Nothing is awaited on the way to an answer but, for a claim that is not known to be reserved for the pod, one read from
the API server. The runtime does nothing else meanwhile, and goes on without an answer that comes late.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.json_values import quoted
from driver.logs import fields
from driver.nri import messages
from driver.nri.containers import Container, Phase
from driver.nri.decisions import (
    Decision,
    Exclusive,
    Marks,
    Refused,
    Unverified,
    decide,
    decide_living,
    marked_claims,
)
from driver.nri.errors import Refusal
from driver.nri.precedence import precedence
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from driver.nri.containers import Pod
    from driver.nri.decisions import Request
    from driver.nri.enforcement import Enforcement

_log = logging.getLogger(__name__)

_LONGEST_LOOK_S: Final = 1.0
_MOST_ENDED: Final = 4096
# The runtime takes 4 MiB in all, and a CPU list may have tens of thousands of characters.
_MOST_UPDATE_BYTES: Final = 3 << 20
# Of a container that is not known these say that it lives: it was forgotten when its pod was stopped while it was being
# started, or created while the runtime did without the driver.
_BEGINNINGS: Final = (nri.POST_CREATE_CONTAINER, nri.START_CONTAINER, nri.POST_START_CONTAINER)
_CONTAINERD: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\D|$)", re.ASCII)
_CDI_DEVICES_SINCE: Final = (2, 3)


class PluginMetrics(Protocol):
    """What counts the runtime's requests."""

    def observe_nri(self, operation: str, result: str, mode: str, seconds: float, /) -> None:
        """Count a ``create_container``, ``stop_container`` or ``remove_container``, and how long it took.

        The mode is ``exclusive``, ``shared``, or ``unknown`` of a container that is not known or was refused.
        """

    def observe_nri_synchronize(self, result: str, seconds: float, /) -> None:
        """Count a synchronisation, and how long it took."""

    def count_refused_container(self, reason: str, /) -> None:
        """Count a container that was not let in."""

    def count_corrected_containers(self, mode: str, containers: int, /) -> None:
        """Count containers that had not the CPUs that they should have, ``exclusive`` or ``shared``."""


class RuntimePlugin:
    """Answers the runtime; what `driver.nri.connection` calls a plugin.

    Parameters
    ----------
    enforcement : Enforcement
        What is known.
    metrics : PluginMetrics
        What counts.
    start_guard : bool
        Whether the claims' CDI specs have the start guard's hook.
    """

    def __init__(self, enforcement: Enforcement, metrics: PluginMetrics, *, start_guard: bool) -> None:
        self._enforcement = enforcement
        self._containers = enforcement.containers
        self._metrics = metrics
        self._start_guard = start_guard
        self._marks = Marks(cdi_devices=False, guard=start_guard)
        self._look_s = _LONGEST_LOOK_S
        # What the containers were that have ended and are still to be removed.
        self._ended: dict[str, str] = {}

    def connected(self, runtime_name: str, runtime_version: str, nri_version: str, request_timeout_s: float) -> None:
        """Take note of a new connection."""
        cdi_devices = _tells_cdi_devices(runtime_name, runtime_version)
        self._marks = Marks(cdi_devices=cdi_devices, guard=self._start_guard)
        self._look_s = min(_LONGEST_LOOK_S, request_timeout_s / 2)
        self._enforcement.request_timeout_s = request_timeout_s
        if not self._marks.any:
            _log.warning(
                "nothing but the environment shows that a container was given a claim: this runtime does not tell its "
                "CDI devices, and the start guard is off",
                extra=fields(runtime=runtime_name, version=runtime_version),
            )
        self._enforcement.set_unknown("it has not told its containers yet")

    def disconnected(self, reason: str) -> None:
        """Take note of the end of the connection."""
        self._enforcement.set_unknown(reason)

    async def synchronize(
        self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]
    ) -> Sequence[nri.ContainerUpdate]:
        """Take all containers that live, and return what they are to have where they have not."""
        started = time.perf_counter()
        result = "error"
        try:
            updates = self._synchronize(pods, containers)
            result = "success"
        finally:
            self._metrics.observe_nri_synchronize(result, time.perf_counter() - started)
        return updates

    def synchronized(self) -> None:
        """Take note that pushes may start."""
        self._enforcement.set_known()

    async def create_container(
        self, pod: nri.PodSandbox, container: nri.Container
    ) -> tuple[nri.ContainerAdjustment, Sequence[nri.ContainerUpdate]]:
        """Give a container the CPUs of its claims, or those of the shared pool, or refuse it."""
        with self._measured("create_container") as measured:
            request = messages.read_request(messages.read_pod(pod), container)
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
            known = Container.created(
                container.id,
                request.name,
                request.pod,
                exclusive.claims if exclusive else frozenset(),
                exclusive.cpus if exclusive else CpuSet(),
                cpus or self._reported(container),
                self._enforcement.now(),
            )
            known.cgroups_path, known.allowed = cgroups_path, allowed
            self._containers.add(known)
            for uid in known.claims:
                self._enforcement.reservations.learn_pod(uid, request.pod.uid)
            _log.info(
                "container gets CPUs",
                extra=fields(
                    container=known,
                    id=container.id,
                    cpus=cpus,
                    mode=measured.mode,
                    claims=",".join(sorted(known.claims)),
                ),
            )
            return messages.adjustment(cpus), ()

    async def update_container(
        self, pod: nri.PodSandbox, container: nri.Container, resources: nri.LinuxResources
    ) -> Sequence[nri.ContainerUpdate]:
        """Let a container keep its CPUs, whatever the kubelet changes; the memory nodes are left to it."""
        known = self._containers.get(container.id)
        if known is None:
            if container.state == nri.CONTAINER_STOPPED:
                return ()
            known = self._take_in(messages.read_pod(pod), container)
        else:
            self._enforcement.look_at_parent(known)
        now = self._enforcement.now()
        wanted = self._enforcement.pool.wanted(known, self._enforcement.pool.current(now))
        if not wanted:
            return ()
        known.updating(wanted, now)
        self._enforcement.notify()
        return (messages.update(container.id, str(wanted)),)

    async def stop_container(self, pod: nri.PodSandbox, container: nri.Container) -> Sequence[nri.ContainerUpdate]:
        """Forget a container that has ended. Who holds which CPUs does not change by that."""
        self._forget("stop_container", container.id)
        return ()

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
            known = self._take_in(messages.read_pod(pod), container)
        now = self._enforcement.now()
        if kind == nri.POST_CREATE_CONTAINER:
            known.post_created(now)
        elif kind == nri.START_CONTAINER:
            known.starting(now)
        elif kind == nri.POST_START_CONTAINER:
            known.started(now)
        elif kind == nri.POST_UPDATE_CONTAINER:
            known.updated(now)
        self._enforcement.notify()

    def pod_stopped(self, pod: nri.PodSandbox) -> None:
        """Forget the pod's containers that never ran; the runtime tells of the ends of the others one by one.

        A start that fails is told to nobody. Such a container would be taken to live until somebody removes it, which
        the kubelet does only after it has unprepared the pod's claims.
        """
        for container in self._containers.of_sandbox(pod.id):
            if container.phase is not Phase.RUNNING:
                self._containers.remove(container.id)
                _log.info("container was never started", extra=fields(container=container, id=container.id))
        self._enforcement.notify()

    async def validate(self, request: nri.ValidateContainerAdjustmentRequest) -> str | None:
        """Let a container be created only with the CPUs that it was given here."""
        known = self._containers.get(request.container.id)
        if known is None:
            return "dra.cpu was not asked which CPUs the container gets; it is tried again"
        if not self._enforcement.pool.wanted(known, self._enforcement.pool.cpus):
            return None
        cpus = messages.read_cpulist(request.adjust.linux.resources.cpu.cpus)
        if cpus != known.given:
            return f"dra.cpu gave the container CPUs {known.given}, but it would be created with {cpus or 'others'}"
        return None

    # The parts

    async def _decide(self, request: Request) -> Decision:
        decision = decide(request, self._enforcement, self._marks, {})
        if not isinstance(decision, Unverified):
            return decision
        records = [self._enforcement.records[uid] for uid in decision.claims]
        reasons = await asyncio.gather(
            *(self._enforcement.reservations.look(record, self._look_s) for record in records)
        )
        # All may be different by now.
        return decide(request, self._enforcement, self._marks, dict(zip(decision.claims, reasons, strict=True)))

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

    def _synchronize(
        self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]
    ) -> list[nri.ContainerUpdate]:
        by_id = {pod.id: messages.read_pod(pod) for pod in pods}
        former = {uid: owner[0].uid for uid in self._enforcement.records if (owner := self._enforcement.owner(uid))}
        living = [container for container in containers if container.state != nri.CONTAINER_STOPPED]
        requests = [
            messages.read_request(by_id.get(container.pod_sandbox_id) or messages.unknown_pod(container), container)
            for container in living
        ]
        rights = [
            precedence(request, container, former, self._enforcement.records)
            for request, container in zip(requests, living, strict=True)
        ]
        order = sorted(range(len(living)), key=rights.__getitem__)
        self._containers.replace_all(())
        self._ended.clear()
        updates = []
        pool = self._enforcement.pool.current(self._enforcement.now())
        parents: dict[str, CpuSet | None] = {}
        texts: dict[CpuSet, str] = {}
        corrected = {"exclusive": 0, "shared": 0}
        room = _MOST_UPDATE_BYTES
        for index in order:
            known = self._classify(requests[index], living[index])
            self._enforcement.look_at_parent(known, parents)
            self._containers.add(known)
            wanted = self._enforcement.pool.wanted(known, pool)
            if not wanted or messages.read_cpus(living[index]) == wanted:
                continue
            corrected["exclusive" if known.claims else "shared"] += 1
            update = messages.update(known.id, texts.setdefault(wanted, str(wanted)))
            update.ignore_failure = True
            room -= update.ByteSize()
            # What has no room is pushed soon, as all that was found is.
            if room >= 0:
                updates.append(update)
                known.synchronized(wanted, self._enforcement.now())
        for mode, count in corrected.items():
            self._metrics.count_corrected_containers(mode, count)
        return updates

    def _take_in(self, pod: Pod, container: nri.Container) -> Container:
        """Take note of a container that lives and was not known."""
        known = self._classify(messages.read_request(pod, container), container)
        self._enforcement.look_at_parent(known)
        self._containers.add(known)
        return known

    def _classify(self, request: Request, container: nri.Container) -> Container:
        """Return what a container is that nobody can refuse any more."""
        decision: Decision
        try:
            decision = decide_living(request, self._enforcement.records, self._marks)
        except Exception as error:
            # One that cannot be understood must not keep the others where they are.
            _log.exception("a bug", extra=fields(id=container.id[:64]))
            decision = Refused(reason="malformed", message=f"internal error: {type(error).__name__}")
        if isinstance(decision, Exclusive):
            for uid in decision.claims:
                owner = self._enforcement.owner(uid)
                if owner is not None and owner[0].uid != request.pod.uid:
                    decision = Refused(
                        reason="owned", message=f"claim {uid} is used by pod {owner[0]}, which was first"
                    )
                    break
        if isinstance(decision, Refused):
            self._metrics.count_refused_container(decision.reason)
            _log.error(
                "a container that runs would not be let in, and is put on the shared pool",
                extra=fields(pod=request.pod, container=request.name, id=container.id, reason=decision.message),
            )
        exclusive = decision if isinstance(decision, Exclusive) else None
        if exclusive is not None:
            # Only the API server can tell whether a claim is reserved for the pod of a container that has nothing of it
            # but the variable.
            reported = messages.read_cpus(container)
            restricted = reported is not None and reported <= exclusive.cpus
            for uid in exclusive.claims if restricted else exclusive.claims & marked_claims(request):
                self._enforcement.reservations.learn_pod(uid, request.pod.uid)
        found = Container.found(
            container.id,
            request.name,
            request.pod,
            exclusive.claims if exclusive else frozenset(),
            exclusive.cpus if exclusive else CpuSet(),
            self._reported(container),
            messages.read_phase(container),
            self._enforcement.now(),
        )
        found.cgroups_path = messages.read_cgroups_path(container)
        return found

    def _reported(self, container: nri.Container) -> CpuSet:
        """Return the CPUs that the runtime says a container has: without a restriction all."""
        return messages.read_cpus(container) or self._enforcement.everything

    def _forget(self, operation: str, identity: str) -> None:
        with self._measured(operation) as measured:
            known = self._containers.remove(identity)
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


def _tells_cdi_devices(runtime_name: str, runtime_version: str) -> bool:
    found = _CONTAINERD.match(runtime_version)
    return runtime_name == "containerd" and found is not None and (int(found[1]), int(found[2])) >= _CDI_DEVICES_SINCE
