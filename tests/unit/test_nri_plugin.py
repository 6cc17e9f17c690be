# SPDX-License-Identifier: Apache-2.0
"""The handlers by themselves: what the runtime is answered, whatever it sends."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.errors import ApiError
from driver.ledger import Ledger
from driver.metrics import Metrics
from driver.names import ClaimUID
from driver.nri import living
from driver.nri.container import Phase
from driver.nri.enforcement import Enforcement
from driver.nri.errors import Refusal
from driver.nri.plugin import RuntimePlugin
from driver.nri.reservations import Reservations
from driver.nri.sharedpool import SharedPool
from driver.nri.ttrpc import MOST_DATA_BYTES
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from kernel_model import NoCgroups

POD = nri.PodSandbox(id="s", uid="uid-p", name="p", namespace="default")


class Api:
    """One claim, reserved for whoever is named here."""

    def __init__(self) -> None:
        self.pods = ["uid-p"]
        self.reads = 0
        self.hangs = False

    async def get_claim(self, namespace: str, name: str) -> dict[str, object]:
        self.reads += 1
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if not self.pods:
            raise ApiError(503, "the API server answered 503")
        return {
            "metadata": {"uid": name.removeprefix("claim-")},
            "status": {"reservedFor": [{"resource": "pods", "uid": uid} for uid in self.pods]},
        }


class Side:
    """The plugin, and what it stands on."""

    def __init__(self, make_record, n_cpus: int = 16) -> None:
        self.api = Api()
        self.registry = CollectorRegistry()
        online = CpuSet(range(n_cpus))
        self.ledger = Ledger(CpuPool(online, CpuSet(), online.words[np.newaxis]))
        self.ledger.hold(make_record("a", "2-5"))
        self.now = 0.0
        self.enforcement = Enforcement(
            self.ledger, SharedPool(self.ledger, CpuSet()), Reservations(self.api), clock=lambda: self.now
        )
        self.plugin = RuntimePlugin(self.enforcement, Metrics(self.registry), cgroups=NoCgroups(), start_guard=True)
        self.connect()

    def connect(self, name: str = "containerd", version: str = "v2.4.2", timeout_s: float = 2.0) -> None:
        self.plugin.connected(name, version, "", timeout_s)

    async def create(self, container: nri.Container) -> str:
        adjust, updates = await self.plugin.create_container(POD, container)
        assert not updates
        return adjust.linux.resources.cpu.cpus

    async def validate(self, container: nri.Container, cpus: str) -> str | None:
        request = nri.ValidateContainerAdjustmentRequest(pod=POD, container=container)
        request.adjust.linux.resources.cpu.cpus = cpus
        return await self.plugin.validate(request)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"dra_cpu_{name}", labels)


@pytest.fixture
def side(make_record) -> Side:
    return Side(make_record)


def shared(identity: str = "1", **fields: object) -> nri.Container:
    return nri.Container(id=identity, name="main", pod_sandbox_id="s", **fields)


def exclusive(identity: str = "1", **fields: object) -> nri.Container:
    container = shared(identity, env=["A=b", "DRA_CPUSET_a=2-5"], **fields)
    container.CDI_devices.add(name="dra.k8s.io/cpu=claim-a")
    return container


async def test_an_adjustment_has_the_cpus_and_nothing_else(side):
    adjust, _ = await side.plugin.create_container(POD, exclusive())
    expected = nri.ContainerAdjustment()
    expected.linux.resources.cpu.cpus = "2-5"
    assert adjust == expected


async def test_what_was_answered_is_known_and_measured(side):
    assert await side.create(exclusive("1")) == "2-5"
    assert await side.create(shared("2")) == "0-1,6-15"
    with pytest.raises(Refusal):
        await side.create(shared("3", env=["DRA_CPUSET_a=2-5"]))
    assert [(one.id, one.phase, str(one.given)) for one in side.enforcement.containers] == [
        ("1", Phase.CREATING, "2-5"),
        ("2", Phase.CREATING, "0-1,6-15"),
    ]
    for operation, result, mode in (
        ("create", "success", "exclusive"),
        ("create", "success", "shared"),
        ("create", "error", "unknown"),
    ):
        name = f"nri_{operation}_container_duration_seconds_count"
        assert side.metric(name, result=result, cpu_allocation_mode=mode) == 1
    assert side.metric("nri_refused_containers_total", reason="unmarked") == 1


async def test_stop_and_remove_are_measured_by_what_the_container_was(side):
    await side.create(exclusive("1"))
    await side.create(shared("2"))
    for identity in ("1", "2", "3"):
        await side.plugin.stop_container(POD, nri.Container(id=identity))
        side.plugin.event(nri.REMOVE_CONTAINER, POD, nri.Container(id=identity))
    for operation in ("stop", "remove"):
        for mode in ("exclusive", "shared", "unknown"):
            name = f"nri_{operation}_container_duration_seconds_count"
            assert side.metric(name, result="success", cpu_allocation_mode=mode) == 1
    assert len(side.enforcement.containers) == 0


async def test_a_removal_without_a_stop_ends_a_container_too(side):
    await side.create(exclusive("1"))
    side.plugin.event(nri.REMOVE_CONTAINER, POD, nri.Container(id="1"))
    assert side.enforcement.owner(ClaimUID("a")) is None


async def test_a_container_that_never_ran_ends_with_its_pod(side):
    await side.create(exclusive("1"))
    await side.create(shared("2"))
    side.plugin.event(nri.POST_CREATE_CONTAINER, POD, shared("1"))
    side.plugin.event(nri.POST_CREATE_CONTAINER, POD, shared("2"))
    side.plugin.event(nri.POST_START_CONTAINER, POD, shared("2"))
    side.plugin.pod_stopped(nri.PodSandbox(id="another"))
    assert len(side.enforcement.containers) == 2
    side.plugin.pod_stopped(POD)
    assert [one.id for one in side.enforcement.containers] == ["2"]
    assert side.enforcement.owner(ClaimUID("a")) is None


async def test_events_move_a_container_on(side):
    await side.create(shared())
    container = side.enforcement.containers.get("1")
    for kind, phase in (
        (nri.POST_CREATE_CONTAINER, Phase.CREATED),
        (nri.START_CONTAINER, Phase.STARTING),
        (nri.POST_START_CONTAINER, Phase.RUNNING),
        (nri.POST_UPDATE_CONTAINER, Phase.RUNNING),
        (nri.RUN_POD_SANDBOX, Phase.RUNNING),
    ):
        side.enforcement.wake.clear()
        side.plugin.event(kind, POD, shared())
        assert container.phase is phase
        assert side.enforcement.wake.is_set()


async def test_each_claim_is_read_once_for_a_pod_and_not_again(side):
    for identity in ("1", "2", "3"):
        await side.create(exclusive(identity))
    assert side.api.reads == 1


@pytest.mark.parametrize(("timeout_s", "expected"), [(2.0, "within 1 s"), (0.05, "within 0.025 s")])
async def test_an_api_server_that_hangs_does_not_make_the_answer_late(side, timeout_s, expected):
    side.connect(timeout_s=timeout_s)
    side.api.hangs = True
    async with asyncio.timeout(60):
        with pytest.raises(Refusal, match=f"cannot be found out: the API server did not answer {expected}"):
            await side.create(exclusive())
    assert len(side.enforcement.containers) == 0


async def test_an_api_server_that_fails_means_a_refusal_that_says_so(side):
    side.api.pods = []
    with pytest.raises(Refusal, match="cannot be found out: the API server answered 503; it is tried again"):
        await side.create(exclusive())


async def test_what_happened_while_the_claim_was_read_counts(side):
    creation = asyncio.create_task(side.create(exclusive()))
    await asyncio.sleep(0)
    with side.enforcement.barred(ClaimUID("a"), "is being unprepared"), pytest.raises(Refusal, match="unprepared"):
        await creation


async def test_a_pod_that_another_claim_has_lost_while_one_was_read_is_not_put_on_the_shared_pool(side, make_record):
    side.ledger.hold(make_record("b", "8-9"))
    side.enforcement.learn(ClaimUID("b"), {"status": {"reservedFor": [{"resource": "pods", "uid": "uid-p"}]}})
    container = exclusive()
    container.env.append("DRA_CPUSET_b=8-9")
    container.CDI_devices.add(name="dra.k8s.io/cpu=claim-b")
    creation = asyncio.create_task(side.create(container))
    await asyncio.sleep(0)
    side.enforcement.learn(ClaimUID("b"), {"status": {"reservedFor": []}})
    with pytest.raises(Refusal, match=r"claim default/claim-b \(b\) .* changed meanwhile; it is tried again"):
        await creation
    assert len(side.enforcement.containers) == 0


async def test_a_creation_that_is_cancelled_leaves_nothing(side):
    side.api.hangs = True
    creation = asyncio.create_task(side.create(exclusive()))
    for _ in range(3):
        await asyncio.sleep(0)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    assert len(side.enforcement.containers) == 0
    name = "nri_create_container_duration_seconds_count"
    assert side.metric(name, result="unknown", cpu_allocation_mode="unknown") == 1


# As a validator


async def test_only_what_was_given_here_is_valid(side):
    await side.create(exclusive())
    assert await side.validate(exclusive(), "2-5") is None
    assert await side.validate(exclusive(), "2,3,4,5") is None
    assert "gave the container CPUs 2-5, but it would be created with 0-15" in await side.validate(exclusive(), "0-15")
    assert "but it would be created with others" in await side.validate(exclusive(), "")


async def test_a_container_that_was_not_asked_about_is_not_valid(side):
    assert "was not asked which CPUs the container gets" in await side.validate(shared("9"), "0-15")


# Updates


async def test_an_update_of_a_container_that_is_not_known_takes_it_in(side):
    side.api.pods = []
    (update,) = await side.plugin.update_container(POD, exclusive(state=nri.CONTAINER_RUNNING), nri.LinuxResources())
    assert (update.container_id, update.linux.resources.cpu.cpus) == ("1", "2-5")
    assert side.enforcement.owner(ClaimUID("a"))[0].uid == "uid-p"
    assert not update.linux.resources.cpu.mems
    assert not update.ignore_failure


async def test_an_update_of_a_container_that_has_ended_takes_nothing_in(side):
    assert await side.plugin.update_container(POD, shared(state=nri.CONTAINER_STOPPED), nri.LinuxResources()) == ()
    assert len(side.enforcement.containers) == 0


# Synchronisation


async def test_containers_get_what_they_should_have_where_they_have_not(side):
    containers = [exclusive("1"), shared("2"), shared("3"), shared("4"), shared("5", state=nri.CONTAINER_STOPPED)]
    for container, cpus in zip(containers, ("2-5", "0-1,6-15", "0-15", "", "0-15"), strict=True):
        container.linux.resources.cpu.cpus = cpus
    containers[3].state = nri.CONTAINER_CREATED
    updates = await side.plugin.synchronize([POD], containers)
    assert {update.container_id: update.linux.resources.cpu.cpus for update in updates} == {
        "3": "0-1,6-15",
        "4": "0-1,6-15",
    }
    assert all(update.ignore_failure for update in updates)
    assert {one.id: one.phase for one in side.enforcement.containers} == {
        "1": Phase.RUNNING,
        "2": Phase.RUNNING,
        "3": Phase.RUNNING,
        "4": Phase.CREATED,
    }
    assert side.metric("nri_corrected_containers_total", cpu_allocation_mode="shared") == 2
    assert side.metric("nri_synchronize_duration_seconds_count", result="success") == 1
    assert not side.enforcement.known
    side.plugin.synchronized()
    assert side.enforcement.known
    side.plugin.disconnected("it went away")
    assert not side.enforcement.known


async def test_a_container_that_would_not_be_let_in_is_put_on_the_shared_pool(side, caplog):
    container = shared(env=["DRA_CPUSET_a=2-5"])
    (update,) = await side.plugin.synchronize([POD], [container])
    assert update.linux.resources.cpu.cpus == "0-1,6-15"
    assert side.metric("nri_refused_containers_total", reason="unmarked") == 1
    (line,) = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert "would not be let in" in line.message


async def test_a_container_whose_pod_is_not_told_is_put_right_too(side):
    (update,) = await side.plugin.synchronize([], [exclusive()])
    assert update.linux.resources.cpu.cpus == "2-5"
    assert side.enforcement.owner(ClaimUID("a"))[0].uid == "s"


async def test_one_container_that_cannot_be_understood_shares_and_does_not_stop_the_others(side, monkeypatch, caplog):
    decide_living = living.decide_living

    def fail(request, *rest):
        if request.name == "odd":
            raise ValueError("what is this")
        return decide_living(request, *rest)

    monkeypatch.setattr(living, "decide_living", fail)
    odd = nri.Container(id="2", name="odd", pod_sandbox_id="s", env=["DRA_CPUSET_a=2-5"])
    updates = await side.plugin.synchronize([POD], [shared("1"), odd, shared("3")])
    assert [update.container_id for update in updates] == ["1", "2", "3"]
    # A claim's prepare waits for it as for any other.
    assert side.enforcement.containers.get("2").may_have == CpuSet(range(16))
    assert any(line.exc_info for line in caplog.records)


async def test_the_answer_to_a_synchronisation_can_be_sent_however_scattered_the_shared_pool_is(make_record):
    side = Side(make_record, n_cpus=8192)
    side.ledger.hold(make_record("b", "6-8191:1/2"))
    containers = [shared(f"{number:064}") for number in range(300)]
    updates = await side.plugin.synchronize([POD], [*containers, exclusive("e")])
    assert nri.SynchronizeResponse(update=updates).ByteSize() < MOST_DATA_BYTES
    assert updates[0].container_id == "e"
    assert len(updates) > 50
    # The others are pushed after it.
    assert len(side.enforcement.containers) == 301
    pool = side.enforcement.pool.cpus
    assert all(
        container.push_due(side.enforcement.pool.wanted(container, pool), 0.0) == 0.0
        for container in side.enforcement.containers
    )


async def test_of_two_pods_with_one_claim_that_keeps_it_which_had_it(side):
    await side.create(exclusive("1"))
    other = nri.PodSandbox(id="t", uid="uid-q", name="q", namespace="default")
    second = exclusive("0")
    second.pod_sandbox_id = "t"
    updates = await side.plugin.synchronize([POD, other], [second, exclusive("1")])
    assert {update.container_id: update.linux.resources.cpu.cpus for update in updates} == {"1": "2-5", "0": "0-1,6-15"}
    assert side.metric("nri_refused_containers_total", reason="owned") == 1


# What a runtime tells


@pytest.mark.parametrize(
    ("name", "version", "refused"),
    [
        ("containerd", "v2.3.0", True),
        ("containerd", "v2.4.2", True),
        ("containerd", "2.10.0-rc.1", True),
        ("containerd", "v3.0.0", True),
        ("containerd", "v2.2.9", False),
        ("containerd", "v1.7.30", False),
        ("containerd", "unknown", False),
        ("cri-o", "1.35.0", False),
        ("", "", False),
    ],
)
async def test_without_the_guard_the_runtime_decides_whether_a_mark_is_expected(make_record, name, version, refused):
    side = Side(make_record)
    side.plugin = RuntimePlugin(side.enforcement, Metrics(CollectorRegistry()), cgroups=NoCgroups(), start_guard=False)
    side.connect(name, version)
    unmarked = shared(env=["DRA_CPUSET_a=2-5"])
    if refused:
        with pytest.raises(Refusal, match="was not given claim"):
            await side.create(unmarked)
    else:
        assert await side.create(unmarked) == "2-5"


TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["DRA_CPUSET_a=2-5", "DRA_CPUSET_a=", "dra.k8s.io/cpu=claim-a", "", "1", "2-5"]),
)


@st.composite
def messages(draw: st.DrawFn) -> nri.Container:
    container = nri.Container(
        id=draw(TEXTS), name=draw(TEXTS), pod_sandbox_id=draw(TEXTS), env=draw(st.lists(TEXTS, max_size=4))
    )
    container.state = draw(st.integers(0, 9))
    container.linux.resources.cpu.cpus = draw(TEXTS)
    for name in draw(st.lists(TEXTS, max_size=2)):
        container.CDI_devices.add(name=name)
    for args in draw(st.lists(st.lists(TEXTS, max_size=5), max_size=2)):
        guard = draw(st.booleans())
        container.hooks.create_runtime.add(
            path="/var/lib/kubelet/plugins/dra.cpu/start-guard" if guard else draw(TEXTS),
            args=["dracpu-start-guard", "v1", *args[:2]] if guard else args,
        )
    return container


@given(containers=st.lists(messages(), max_size=5), kinds=st.lists(st.integers(0, 14), max_size=5))
async def test_whatever_the_runtime_sends_is_answered_or_refused(make_record, containers, kinds):
    side = Side(make_record)
    for container, kind in zip(containers, kinds, strict=False):
        try:
            answer = await side.create(container)
        except Refusal as refusal:
            answer = str(refusal)
        assert answer in ("2-5", "0-1,6-15") or (answer.startswith("container ") and answer.isprintable())
        side.plugin.event(kind, POD, container)
        await side.validate(container, "2-5")
        await side.plugin.update_container(POD, container, nri.LinuxResources())
    updates = await side.plugin.synchronize([POD], containers)
    assert {update.linux.resources.cpu.cpus for update in updates} <= {"2-5", "0-1,6-15"}
    for container in containers:
        await side.plugin.stop_container(POD, container)
    assert len(side.enforcement.containers) == 0
