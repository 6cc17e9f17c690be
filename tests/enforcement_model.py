# SPDX-License-Identifier: Apache-2.0
"""The driver's side for real, against a model of the runtime's windows, in which a test says what happens when.

The model moves containers as containerd does: with updates that are pushed at any time, or, as a runtime whose NRI is
older than 0.12.1, with those that the answers to its events carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.claimfiles import ClaimFiles
from driver.errors import ClaimError
from driver.ledger import Ledger, Record
from driver.metrics import Metrics
from driver.names import ClaimUID
from driver.nri.enforcement import Enforcement
from driver.nri.errors import Code, NriError, Refusal
from driver.nri.plugin import RuntimePlugin
from driver.nri.pushes import Pushes
from driver.nri.reservations import Reservations
from driver.nri.sharedpool import SharedPool
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from records import make_record

CPUS = 12


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def make_ledger(online: str = f"0-{CPUS - 1}", reserved: str = "") -> Ledger:
    groups = np.array([[(1 << CPUS) - 1]], dtype=np.uint64)
    return Ledger(CpuPool(cpus(online), cpus(reserved), groups))


# A loop whose time only passes when a test says so


class AtOnce(ThreadPoolExecutor):
    """Does what it is given before anything else happens, in no thread."""

    def submit(self, function, /, *arguments):
        done = Future()
        done.set_result(function(*arguments))
        return done


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, and no threads."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.set_default_executor(AtOnce())

    def time(self) -> float:
        return self.now


@dataclass
class Living:
    """A container as the runtime and the kernel have it."""

    message: nri.Container
    claims: frozenset[str]
    spec: str
    phase: str = "creating"  # created, launching (its process waits), starting, running
    kernel: str = ""  # what the process is held to, once there is one
    update: str | None = None  # what is still to be applied of an update
    since: float = 0.0  # when its window began
    broken: bool = False

    @property
    def in_window(self) -> bool:
        return self.phase in ("creating", "launching", "starting") or self.update is not None

    @property
    def runs(self) -> bool:
        """Whether anything of its image may run."""
        return self.phase in ("starting", "running")


@dataclass
class SentPush:
    """A push on its way."""

    updates: list[tuple[str, str]]
    answer: asyncio.Future[None]
    timeout_s: float = 0.0
    applied: bool = False
    failed: bool = False


class NoFiles:
    """Records, CDI specs and metadata that are nowhere."""

    async def write(self, *_: object) -> bool:
        return True

    async def remove(self, *_: object) -> bool:
        return True

    def write_now(self, *_: object) -> dict[str, str]:
        return {}

    def remove_now(self, *_: object) -> None:
        pass

    def write_all_now(self, records: Sequence[object]) -> list[bool | Exception]:
        return [True] * len(records)

    def remove_all_now(self, claims: Sequence[object]) -> list[bool | Exception]:
        return [True] * len(claims)


class NoClaims:
    async def get_claim(self, namespace: str, name: str) -> dict[str, object]:
        raise AssertionError("every pod is known to have its claims reserved")


@dataclass
class Work:
    """A prepare or an unprepare that goes on."""

    record: Record
    task: asyncio.Task[None]
    finished: bool = False


class Model:
    """The driver's side for real, and a runtime that behaves as containerd's windows do."""

    def __init__(self, *, reserved: str = "", answers: bool = False, readable: bool = True) -> None:
        self.answers = answers
        self.readable = readable
        self.loop = VirtualLoop()
        asyncio.set_event_loop(None)
        self.ledger = make_ledger(reserved=reserved)
        self.living: dict[str, Living] = {}
        self.pushes: list[SentPush] = []
        self.pushed = 0
        self.claims: dict[str, Record] = {}  # prepared
        self.work: list[Work] = []
        self.ids = 0
        self.errors: list[str] = []
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.start_driver()

    # The driver

    def start_driver(self) -> None:
        self.reservations = Reservations(NoClaims())
        self.enforcement = Enforcement(
            self.ledger, SharedPool(self.ledger, CpuSet()), self.reservations, clock=self.loop.time
        )
        self.plugin = RuntimePlugin(self.enforcement, self.metrics, cgroups=self, start_guard=True)
        self.files = ClaimFiles(self.ledger, NoFiles(), NoFiles(), NoFiles(), {}, self.enforcement)
        if self.answers:
            self.plugin.connected("containerd", "v2.3.7", "v0.12.0", 2.0)
        else:
            self.plugin.connected("containerd", "v2.4.2", "v0.12.3", 2.0)
        self.apply(cpusets(self.run(self.plugin.synchronize([], [self.message(one) for one in self.living.values()]))))
        self.pusher = self.loop.create_task(Pushes(self.enforcement, self.metrics, together=3).run(self.push))
        self.plugin.synchronized()
        self.turn()

    def end_driver(self) -> None:
        """End it between two events, with pushes on their way and prepares undone."""
        for work in self.work:
            work.task.cancel()
        self.pusher.cancel()
        self.turn()
        for push in self.pushes:
            if not push.applied:
                self.apply(push.updates)
        self.pushes.clear()
        for work in self.work:
            if not work.finished and work.record.uid not in self.claims and self.ledger.get(work.record.uid):
                # It has a record, as after a crash, and the kubelet asks again.
                self.ledger.release(work.record.uid)
        self.work.clear()

    def close(self) -> None:
        self.end_driver()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def turn(self) -> None:
        """Let the driver do all that it can at this moment."""

        async def turns() -> None:
            for _ in range(30):
                await asyncio.sleep(0)

        self.run(turns())
        for work in self.work:
            if work.task.done() and not work.finished:
                work.finished = True
        self.work = [work for work in self.work if not work.finished]

    def pass_time(self, seconds: float) -> None:
        self.loop.now += seconds
        self.turn()

    async def push(self, updates: list[nri.ContainerUpdate], timeout_s: float) -> None:
        assert not self.answers, "this runtime deadlocks"
        sent = cpusets(updates)
        assert sent
        assert all(text for _, text in sent), "an empty cpuset means no change"
        self.pushed += 1
        push = SentPush(sent, self.loop.create_future(), timeout_s=timeout_s)
        self.pushes.append(push)
        await push.answer

    # The kernel

    def cpus(self, cgroups_path: str) -> CpuSet | None:
        """Return what the kernel holds a container's cgroup to, as `driver.hostcgroups` does."""
        one = self.living.get(cgroups_path.rpartition("/")[2])
        return cpus(one.kernel) if self.readable and one is not None and one.kernel else None

    def parent_cpus(self, cgroups_path: str) -> CpuSet | None:
        return None

    # The runtime

    def apply(self, updates: list[tuple[str, str]]) -> bool:
        failed = False
        for identity, text in updates:
            one = self.living.get(identity)
            if one is None or one.phase == "creating":
                continue
            if one.broken:
                failed = True
                continue
            one.spec = text
            if one.phase == "running":
                one.kernel = text
        return failed

    def message(self, one: Living) -> nri.Container:
        message = nri.Container()
        message.CopyFrom(one.message)
        message.linux.resources.cpu.cpus = one.spec
        message.state = nri.CONTAINER_RUNNING if one.phase == "running" else nri.CONTAINER_CREATED
        return message

    def pod(self, one: Living) -> nri.PodSandbox:
        name = one.message.pod_sandbox_id
        return nri.PodSandbox(id=name, uid=name, name=name, namespace="default")

    def event(self, kind: nri.Event, one: Living) -> None:
        self.plugin.event(kind, self.pod(one), self.message(one))
        self.turn()

    def create(self, pod: str, *uids: str, undone: bool = False) -> Living | None:
        """Have a container created; where it is undone another plugin refuses it, and nothing of the answer is done."""
        self.ids += 1
        message = nri.Container(id=f"c{self.ids}", name=f"c{self.ids}", pod_sandbox_id=pod)
        message.linux.cgroups_path = f"/kubepods/{pod}/{message.id}"
        for uid in uids:
            message.env.append(f"DRA_CPUSET_{uid}={self.claims[uid].cpus}")
            message.CDI_devices.add(name=f"dra.k8s.io/cpu=claim-{uid}")
            self.reservations.learn_pod(ClaimUID(uid), pod)
        one = Living(message, frozenset(uids), "", since=self.loop.now)
        try:
            adjust, updates = self.run(self.plugin.create_container(self.pod(one), message))
        except Refusal:
            return None
        assert self.answers or not updates
        if undone:
            self.run(self.plugin.stop_container(self.pod(one), message))
            self.plugin.event(nri.REMOVE_CONTAINER, self.pod(one), message)
            return None
        assert message.id not in dict(cpusets(updates))
        self.apply(cpusets(updates))
        one.spec = adjust.linux.resources.cpu.cpus
        assert one.spec, "nothing is left to the kubelet here"
        self.living[message.id] = one
        self.turn()
        return one

    def post_create(self, one: Living) -> None:
        one.phase = "created"
        self.event(nri.POST_CREATE_CONTAINER, one)

    def start(self, one: Living, *, told: bool) -> None:
        one.phase, one.kernel, one.since = "launching", one.spec, self.loop.now
        if self.answers:
            if told:
                self.tell_start(one)
            return
        one.phase = "starting"
        if told:
            self.event(nri.START_CONTAINER, one)

    def tell_start(self, one: Living) -> bool:
        """Tell the driver that a container is about to run its image; if it refuses that, the container ends."""
        try:
            self.run(self.plugin.start_container(self.pod(one), self.message(one)))
        except Refusal as refusal:
            self.errors.append(str(refusal))
            self.stop(one)
            return False
        one.phase = "starting"
        self.turn()
        return True

    def post_start(self, one: Living) -> None:
        one.phase = "running"
        self.event(nri.POST_START_CONTAINER, one)

    def update(self, one: Living, wished: str) -> None:
        resources = nri.LinuxResources()
        resources.cpu.cpus = wished
        updates = self.run(self.plugin.update_container(self.pod(one), self.message(one), resources))
        told = dict(cpusets(updates))
        one.update, one.since = told.pop(one.message.id, wished), self.loop.now
        assert self.answers or not told
        self.apply(list(told.items()))
        self.turn()

    def post_update(self, one: Living) -> None:
        text, one.update = one.update, None
        assert text
        if not one.broken:
            one.spec = text
            if one.phase == "running":
                one.kernel = text
        self.event(nri.POST_UPDATE_CONTAINER, one)

    def fail_update(self, one: Living) -> None:
        """Let an update fail: nobody is told."""
        one.update = None

    def stop(self, one: Living) -> None:
        del self.living[one.message.id]
        self.run(self.plugin.stop_container(self.pod(one), one.message))
        self.turn()

    # Pushes

    def apply_push(self, push: SentPush) -> None:
        push.applied = True
        push.failed = self.apply(push.updates)

    def answer_push(self, push: SentPush) -> None:
        if not push.applied:
            self.apply_push(push)
        self.pushes.remove(push)
        if push.failed:
            push.answer.set_exception(NriError(Code.UNKNOWN, "an update failed"))
        else:
            push.answer.set_result(None)
        self.turn()

    # Claims

    def prepare(self, record: Record) -> Work:
        async def work() -> None:
            try:
                self.enforcement.admit(record.cpus)
            except ClaimError:
                return
            self.ledger.hold(record)
            await self.files.keep(record, self.loop.time() + 10)
            self.claims[record.uid] = record

        return self._go_on(record, work())

    def unprepare(self, record: Record) -> Work:
        async def work() -> None:
            with self.enforcement.barred(record.uid, "is being unprepared"):
                await self.enforcement.unused(record.uid, self.loop.time() + 10)
                del self.claims[record.uid]
                await self.files.let_go(record.uid, record.namespace, record.name)

        return self._go_on(record, work())

    def _go_on(self, record: Record, coroutine: Coroutine[Any, Any, None]) -> Work:
        async def quietly() -> None:
            try:
                await coroutine
            except ClaimError as error:
                self.errors.append(str(error))

        work = Work(record, self.loop.create_task(quietly()))
        self.work.append(work)
        self.turn()
        return work

    # All to its end

    def finish_windows(self) -> None:
        for one in list(self.living.values()):
            if one.phase == "creating":
                self.post_create(one)
            if one.update is not None:
                self.post_update(one)
            if one.phase == "launching" and not self.tell_start(one):
                continue
            if one.phase == "starting":
                self.post_start(one)

    def settle(self) -> None:
        """Let everything come to its end."""
        self.finish_windows()
        for _ in range(400):
            if self.pushes:
                self.answer_push(self.pushes[0])
            else:
                self.pass_time(0.5)
        while self.pushes:
            self.answer_push(self.pushes[0])


def cpusets(updates: Iterable[nri.ContainerUpdate]) -> list[tuple[str, str]]:
    return [(update.container_id, update.linux.resources.cpu.cpus) for update in updates]


def run_container(model: Model, pod: str, *uids: str) -> Living:
    one = model.create(pod, *uids)
    assert one is not None
    model.post_create(one)
    model.start(one, told=False)
    model.post_start(one)
    return one


def prepared(model: Model, uid: str, text: str) -> Record:
    record = make_record(uid, text)
    model.prepare(record)
    model.settle()
    assert uid in model.claims
    return record
