# SPDX-License-Identifier: Apache-2.0
"""The shared pool, what is pushed, and both against a model of the runtime's windows."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.claimfiles import ClaimFiles
from driver.errors import ClaimError
from driver.ledger import Ledger, Record
from driver.metrics import Metrics
from driver.names import ClaimUID
from driver.nri.containers import WINDOW_S
from driver.nri.enforcement import Enforcement
from driver.nri.errors import Code, NriError, Refusal
from driver.nri.plugin import RuntimePlugin
from driver.nri.pushes import Pushes
from driver.nri.reservations import Reservations
from driver.nri.sharedpool import SET_ASIDE_S, SharedPool
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from records import make_record

CPUS = 12


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def make_ledger(online: str = f"0-{CPUS - 1}", reserved: str = "") -> Ledger:
    groups = np.array([[(1 << CPUS) - 1]], dtype=np.uint64)
    return Ledger(CpuPool(cpus(online), cpus(reserved), groups))


# The pool


@pytest.mark.parametrize(
    ("reserved", "isolated", "held", "expected"),
    [
        ("", "", "", "0-11"),
        ("0-1", "", "4-5", "2-3,6-11"),
        ("0-1", "8-11", "4-5", "2-3,6-7"),
        ("0-1", "2-11", "4-5", "2-3,6-11"),  # else nothing would ever be left
        ("0-1", "2-10", "11", ""),  # but what is left may all be held
        ("0-11", "", "", ""),
        ("", "", "0-11", ""),
    ],
)
def test_the_pool_is_what_is_neither_reserved_nor_held_nor_isolated(reserved, isolated, held, expected):
    ledger = make_ledger(reserved=reserved)
    pool = SharedPool(ledger, cpus(isolated))
    if held:
        ledger.hold(make_record("a", held))
    assert str(pool.cpus) == str(pool.current(0.0)) == expected
    assert pool.leaves_alone == (reserved == "0-11")


def test_with_no_managed_cpus_but_claims_nothing_is_left_alone():
    ledger = make_ledger(reserved="0-11")
    pool = SharedPool(ledger, CpuSet())
    ledger.hold_anyway(make_record("a", "4"))
    assert not pool.leaves_alone


def test_what_was_set_aside_stays_free_for_a_while_but_never_leaves_the_pool_empty():
    ledger = make_ledger()
    pool = SharedPool(ledger, CpuSet())
    pool.set_aside(ClaimUID("a"), cpus("2-5"), 10.0)
    assert str(pool.current(11.0)) == "0-1,6-11"
    assert str(pool.cpus) == "0-11"
    assert pool.aside_until == 10.0 + SET_ASIDE_S
    ledger.hold(make_record("b", "0-1,6-11"))
    assert str(pool.current(11.0)) == "2-5"
    ledger.release(ClaimUID("b"))
    assert str(pool.current(10.0 + SET_ASIDE_S)) == "0-11"
    assert pool.aside_until is None
    pool.set_aside(ClaimUID("a"), cpus("2-5"), 10.0)
    pool.take_back(ClaimUID("a"))
    assert str(pool.current(11.0)) == "0-11"


def test_cpus_that_went_offline_are_in_no_pool():
    ledger = make_ledger()
    pool = SharedPool(ledger, CpuSet())
    ledger.pool.set_offline(cpus("3"))
    assert str(pool.cpus) == "0-2,4-11"


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
    phase: str = "creating"  # created, starting, running
    kernel: str = ""  # what the process is held to, once there is one
    update: str | None = None  # what is still to be applied of an update
    since: float = 0.0  # when its window began
    broken: bool = False

    @property
    def in_window(self) -> bool:
        return self.phase in ("creating", "starting") or self.update is not None


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

    def __init__(self, *, reserved: str = "") -> None:
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
        self.plugin = RuntimePlugin(self.enforcement, self.metrics, start_guard=True)
        self.files = ClaimFiles(self.ledger, NoFiles(), NoFiles(), NoFiles(), {}, self.enforcement)
        self.plugin.connected("containerd", "v2.4.2", "v0.12.3", 2.0)
        updates = self.run(self.plugin.synchronize([], [self.message(one) for one in self.living.values()]))
        self.apply([(update.container_id, update.linux.resources.cpu.cpus) for update in updates])
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
        sent = [(update.container_id, update.linux.resources.cpu.cpus) for update in updates]
        assert sent
        assert all(text for _, text in sent), "an empty cpuset means no change"
        self.pushed += 1
        push = SentPush(sent, self.loop.create_future(), timeout_s=timeout_s)
        self.pushes.append(push)
        await push.answer

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

    def create(self, pod: str, *uids: str) -> Living | None:
        self.ids += 1
        message = nri.Container(id=f"c{self.ids}", name=f"c{self.ids}", pod_sandbox_id=pod)
        for uid in uids:
            message.env.append(f"DRA_CPUSET_{uid}={self.claims[uid].cpus}")
            message.CDI_devices.add(name=f"dra.k8s.io/cpu=claim-{uid}")
            self.reservations.learn_pod(ClaimUID(uid), pod)
        one = Living(message, frozenset(uids), "", since=self.loop.now)
        try:
            adjust, updates = self.run(self.plugin.create_container(self.pod(one), message))
        except Refusal:
            return None
        assert not updates
        one.spec = adjust.linux.resources.cpu.cpus
        assert one.spec, "nothing is left to the kubelet here"
        self.living[message.id] = one
        self.turn()
        return one

    def post_create(self, one: Living) -> None:
        one.phase = "created"
        self.event(nri.POST_CREATE_CONTAINER, one)

    def start(self, one: Living, *, told: bool) -> None:
        one.phase, one.kernel, one.since = "starting", one.spec, self.loop.now
        if told:
            self.event(nri.START_CONTAINER, one)

    def post_start(self, one: Living) -> None:
        one.phase = "running"
        self.event(nri.POST_START_CONTAINER, one)

    def update(self, one: Living, wished: str) -> None:
        resources = nri.LinuxResources()
        resources.cpu.cpus = wished
        updates = self.run(self.plugin.update_container(self.pod(one), self.message(one), resources))
        one.update, one.since = wished, self.loop.now
        for update in updates:
            assert update.container_id == one.message.id
            one.update = update.linux.resources.cpu.cpus
        self.turn()

    def post_update(self, one: Living) -> None:
        text, one.update = one.update, None
        assert text
        if not one.broken:
            one.spec = text
            if one.phase == "running":
                one.kernel = text
        self.event(nri.POST_UPDATE_CONTAINER, one)

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


@pytest.fixture
def model():
    model = Model()
    yield model
    model.close()


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


def test_a_prepare_ends_when_the_push_was_answered_and_not_before(model):
    one = run_container(model, "p")
    work = model.prepare(make_record("a", "2-5"))
    (push,) = model.pushes
    assert push.updates == [(one.message.id, "0-1,6-11")]
    model.apply_push(push)
    model.turn()
    assert not work.task.done()
    model.answer_push(push)
    assert work.task.done()
    assert "a" in model.claims


@pytest.mark.parametrize(("told_s", "alone_s"), [(0.5, 2.0), (2.0, 2.0), (10.0, 10.0)])
def test_a_runtime_that_was_told_to_be_patient_is_waited_for(model, told_s, alone_s):
    model.plugin.connected("containerd", "v2.4.2", "v0.12.3", told_s)
    model.plugin.synchronized()
    run_container(model, "p")
    model.prepare(make_record("a", "2"))
    (push,) = model.pushes
    assert push.timeout_s == alone_s
    model.answer_push(push)
    run_container(model, "q")
    model.prepare(make_record("b", "3"))
    (push,) = model.pushes
    assert (len(push.updates), push.timeout_s) == (2, 2 * alone_s)


@pytest.mark.parametrize("window", ["creating", "starting", "updating"])
def test_a_prepare_waits_for_a_window_and_the_push_after_it(model, window):
    if window == "creating":
        one = model.create("p")
    else:
        one = run_container(model, "p")
        if window == "updating":
            model.update(one, "0-3")
        else:
            one = model.create("p")
            model.post_create(one)
            model.start(one, told=True)
    work = model.prepare(make_record("a", "2-5"))
    while model.pushes:
        model.answer_push(model.pushes[0])
    assert not work.task.done()
    model.finish_windows()
    assert not work.task.done()
    while model.pushes:
        model.answer_push(model.pushes[0])
    if window == "creating":  # it is created, and may be about to start
        assert not work.task.done()
        model.start(one, told=True)
        model.finish_windows()
        model.answer_push(model.pushes[0])
    assert work.task.done()
    assert "a" in model.claims
    assert one.spec == "0-1,6-11"


def test_a_window_that_nobody_closes_holds_a_prepare_up_for_a_while(model):
    one = run_container(model, "p")
    model.update(one, "0-3")
    work = model.prepare(make_record("a", "2-5"))
    model.pass_time(WINDOW_S - 0.01)
    assert model.pushes == []
    model.pass_time(0.02)
    model.answer_push(model.pushes[0])
    assert work.task.done()
    assert "a" in model.claims


def test_a_container_that_cannot_be_moved_fails_the_claims_that_need_its_cpus_and_no_other(model):
    stuck = run_container(model, "p")
    prepared(model, "a", "8-11")
    others = [run_container(model, f"q{number}") for number in range(5)]
    model.ledger.hold(make_record("blocker", "0-1"))  # so that the new ones have less
    model.enforcement.notify()
    model.settle()
    stuck.broken = True
    work = model.prepare(make_record("b", "4-5"))
    for _ in range(60):
        if model.pushes:
            model.answer_push(model.pushes[0])
        else:
            model.pass_time(0.25)
    assert work.task.done()
    assert "b" not in model.claims
    assert model.errors == [
        "CPUs 4-5 are not free of other containers: container c1 of pod default/p (an update failed) could not be "
        "moved away yet"
    ]
    assert model.registry.get_sample_value("dra_cpu_nri_unmovable_containers") == 1
    # What was moved away stays away for the retry, and comes back if there is none.
    assert {one.kernel for one in others} == {"2-3,6-7"}
    model.pass_time(SET_ASIDE_S)
    model.settle()
    assert {one.kernel for one in others} == {"2-7"}
    stuck.broken = False
    model.pass_time(61)
    model.settle()
    assert stuck.kernel == "2-7"
    assert model.registry.get_sample_value("dra_cpu_nri_unmovable_containers") == 0


def test_a_claim_elsewhere_does_not_mind_a_container_that_cannot_be_moved(model):
    prepared(model, "a", "8-11")
    stuck = run_container(model, "p")
    model.unprepare(model.claims["a"])
    stuck.broken = True
    model.settle()
    assert stuck.kernel == "0-7"
    prepared(model, "b", "8-9")


def test_a_retry_finds_what_was_moved_away_and_does_not_wait_for_the_back_off(model):
    stuck = run_container(model, "p")
    stuck.broken = True
    for _ in range(2):
        model.prepare(make_record("a", "4-5"))
        model.settle()
    stuck.broken = False
    work = model.prepare(make_record("a", "4-5"))
    model.pass_time(1.0)
    model.answer_push(model.pushes[0])
    assert work.task.done()
    assert "a" in model.claims


def test_cpus_that_are_on_their_way_back_to_others_are_not_confirmed_to_a_claim(model):
    one = run_container(model, "p")
    model.unprepare(prepared(model, "a", "2-5"))
    model.pass_time(0.3)
    (push,) = model.pushes
    model.apply_push(push)  # and not answered yet
    assert one.kernel == "0-11"
    work = model.prepare(make_record("b", "2-5"))
    assert not work.task.done()
    model.answer_push(push)
    assert not work.task.done()
    model.answer_push(model.pushes[0])
    assert work.task.done()
    assert one.kernel == "0-1,6-11"


def test_many_unprepares_make_few_pushes(model):
    one = run_container(model, "p")
    for cpu in range(1, CPUS):
        prepared(model, f"a{cpu}", str(cpu))
    assert one.kernel == "0"
    before = model.pushed
    for record in list(model.claims.values()):
        model.unprepare(record)
        model.pass_time(0.05)
        while model.pushes:
            model.answer_push(model.pushes[0])
    model.pass_time(0.25)
    while model.pushes:
        model.answer_push(model.pushes[0])
    assert one.kernel == "0-11"
    assert model.pushed - before <= 4


def test_a_claim_that_would_leave_the_others_nothing_is_not_admitted(model):
    run_container(model, "p")
    run_container(model, "q")
    with pytest.raises(
        ClaimError, match=r"^CPUs 0-11 would leave no CPU for the 2 containers that have no claim and run on this node;"
    ):
        model.enforcement.admit(cpus("0-11"))
    model.enforcement.admit(cpus("1-11"))


def test_an_empty_pool_takes_no_container_without_a_claim(model):
    prepared(model, "a", "0-11")
    assert model.create("p") is None
    assert model.create("q", "a") is not None


def test_an_exclusive_container_is_refused_where_others_cannot_be_moved_away(model):
    run_container(model, "p")
    record = make_record("a", "0-11")  # as restored after another driver
    model.end_driver()
    model.ledger.hold(record)
    model.claims["a"] = record
    model.start_driver()
    with pytest.raises(Refusal, match=r"has CPUs 0-11, but container c1 of pod ./p could not be moved away"):
        model.run(model.plugin.create_container(*exclusive_request(model, "a")))
    assert model.pushes == []


def exclusive_request(model: Model, uid: str) -> tuple[nri.PodSandbox, nri.Container]:
    message = nri.Container(id="x", name="x", pod_sandbox_id="q")
    message.env.append(f"DRA_CPUSET_{uid}={model.claims[uid].cpus}")
    message.CDI_devices.add(name=f"dra.k8s.io/cpu=claim-{uid}")
    model.reservations.learn_pod(ClaimUID(uid), "q")
    return nri.PodSandbox(id="q", uid="q", name="q", namespace="default"), message


def test_with_no_managed_cpus_and_no_claims_containers_are_left_alone():
    model = Model(reserved=f"0-{CPUS - 1}")
    message = nri.Container(id="x", name="x", pod_sandbox_id="p")
    pod = nri.PodSandbox(id="p", uid="p", name="p", namespace="default")
    adjust, _ = model.run(model.plugin.create_container(pod, message))
    assert adjust == nri.ContainerAdjustment()
    assert model.run(model.plugin.update_container(pod, message, nri.LinuxResources())) == ()
    assert model.run(model.plugin.synchronize([pod], [message])) == []
    model.plugin.synchronized()
    model.settle()
    assert model.pushed == 0
    model.close()


# Anything, in any order


@settings(max_examples=60, stateful_step_count=60, suppress_health_check=list(HealthCheck))
class Enforced(RuleBasedStateMachine):
    """Pods, claims, events, windows, pushes and time in any order.

    A window lasts less than five seconds here: what lasts longer is made good afterwards, but not in time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.next_claim = 0
        self.released = CpuSet()

    def teardown(self) -> None:
        self.model.settle()
        pool = str(self.model.enforcement.pool.current(self.model.loop.now))
        for one in self.model.living.values():
            if not one.broken and one.phase == "running":
                wanted = self.exclusive(one) or pool
                assert one.kernel == wanted, f"{one.message.id} is not put right in the end"
        self.model.close()

    def exclusive(self, one: Living) -> str:
        return str(CpuSet().union(*(self.model.claims[uid].cpus for uid in one.claims)))

    def some(self, data: st.DataObject, phase: str | None = None, *, quiet: bool = False) -> Living | None:
        found = [
            one
            for one in self.model.living.values()
            if (phase is None or one.phase == phase) and not (quiet and one.update is not None)
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @initialize(data=st.data())
    def containers(self, data: st.DataObject) -> None:
        for number in range(data.draw(st.integers(0, 4))):
            run_container(self.model, f"p{number}")

    @rule(data=st.data(), pod=st.sampled_from(["p", "q", "r"]))
    def create(self, data: st.DataObject, pod: str) -> None:
        uids = (
            data.draw(st.lists(st.sampled_from(sorted(self.model.claims)), unique=True, max_size=2))
            if (self.model.claims and data.draw(st.booleans()))
            else []
        )
        if len(self.model.living) < 10:
            self.model.create(pod, *uids)

    @rule(data=st.data())
    def post_create(self, data: st.DataObject) -> None:
        if one := self.some(data, "creating"):
            self.model.post_create(one)

    @rule(data=st.data(), told=st.booleans())
    def start(self, data: st.DataObject, told: bool) -> None:
        if one := self.some(data, "created", quiet=True):
            self.model.start(one, told=told)

    @rule(data=st.data())
    def post_start(self, data: st.DataObject) -> None:
        if one := self.some(data, "starting"):
            self.model.post_start(one)

    @rule(data=st.data(), phase=st.sampled_from(["created", "running"]), wished=st.sampled_from(["0", "0-11", "3-7"]))
    def update(self, data: st.DataObject, phase: str, wished: str) -> None:
        if one := self.some(data, phase, quiet=True):
            self.model.update(one, wished)

    @rule(data=st.data())
    def post_update(self, data: st.DataObject) -> None:
        found = [one for one in self.model.living.values() if one.update is not None]
        if found:
            self.model.post_update(data.draw(st.sampled_from(found)))

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        if one := self.some(data):
            self.model.stop(one)

    @rule(data=st.data())
    def toggle_broken(self, data: st.DataObject) -> None:
        if (one := self.some(data, "running", quiet=True)) and not one.claims:
            one.broken = not one.broken

    @rule(data=st.data())
    def apply_push(self, data: st.DataObject) -> None:
        waiting = [push for push in self.model.pushes if not push.applied]
        if waiting:
            self.model.apply_push(waiting[0])

    @rule()
    def answer_push(self) -> None:
        if self.model.pushes:
            self.model.answer_push(self.model.pushes[0])

    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        free = self.model.ledger.pool.available
        if self.released <= free and self.released and data.draw(st.booleans()):
            chosen = self.released  # what the others are about to be given back
        elif len(free) < 2:
            return
        else:
            chosen = CpuSet(data.draw(st.lists(st.sampled_from(list(free)), min_size=1, max_size=4, unique=True)))
        self.next_claim += 1
        self.model.prepare(make_record(f"a{self.next_claim}", str(chosen)))

    @rule(data=st.data())
    def unprepare(self, data: st.DataObject) -> None:
        busy = {work.record.uid for work in self.model.work}
        found = sorted(set(self.model.claims) - busy)
        if found:
            record = self.model.claims[data.draw(st.sampled_from(found))]
            self.released = record.cpus
            self.model.unprepare(record)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 4.0, 6.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        for one in list(self.model.living.values()):
            if one.in_window and self.model.loop.now + seconds - one.since > WINDOW_S - 0.1:
                self.model.finish_windows()
                break
        self.model.pass_time(seconds)

    @precondition(lambda self: self.model.living)
    @rule()
    def restart_driver(self) -> None:
        self.model.finish_windows()  # a synchronisation waits for what is going on
        self.model.end_driver()
        self.model.start_driver()

    @invariant()
    def no_cpu_of_a_claim_is_anyone_elses(self) -> None:
        for one in self.model.living.values():
            held = cpus(one.kernel) if one.kernel else CpuSet()
            for uid, record in self.model.claims.items():
                if uid not in one.claims:
                    assert held.isdisjoint(record.cpus), f"{one.message.id} has CPUs of {uid}"

    @invariant()
    def an_exclusive_container_has_its_cpus_and_no_others(self) -> None:
        for one in self.model.living.values():
            if one.claims and one.kernel:
                assert one.kernel == self.exclusive(one)

    @invariant()
    def no_claim_has_containers_of_two_pods(self) -> None:
        owners: dict[str, str] = {}
        for one in self.model.living.values():
            for uid in one.claims:
                assert owners.setdefault(uid, one.message.pod_sandbox_id) == one.message.pod_sandbox_id

    @invariant()
    def a_claim_whose_container_lives_stays_held(self) -> None:
        for one in self.model.living.values():
            for uid in one.claims:
                assert uid in self.model.ledger.records


TestEnforced = Enforced.TestCase
