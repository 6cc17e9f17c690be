# SPDX-License-Identifier: Apache-2.0
"""Containers that live before the driver decides about them: whose they are, and what is kept of them meanwhile."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.errors import ApiError, RuntimePendingError
from driver.ledger import Ledger
from driver.metrics import Metrics
from driver.names import ClaimUID
from driver.nri import survey
from driver.nri.enforcement import Enforcement
from driver.nri.errors import NriError
from driver.nri.plugin import RuntimePlugin
from driver.nri.reservations import Reservations
from driver.nri.sharedpool import SharedPool
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from kernel_model import NoCgroups
from records import make_record

A = ClaimUID("a")
POD_GROUP = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "uid-g"}


class Api:
    """Claim a, reserved for whoever is named here."""

    def __init__(self) -> None:
        self.reserved: list[dict[str, str]] = [pod_reference("p")]
        self.error: ApiError | None = None
        self.reads = 0
        self.read = asyncio.Event()

    async def get_claim(self, namespace: str, name: str) -> dict[str, object]:
        self.reads += 1
        self.read.set()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return {"metadata": {"uid": name.removeprefix("claim-")}, "status": {"reservedFor": self.reserved}}


def pod_reference(name: str) -> dict[str, str]:
    return {"resource": "pods", "name": name, "uid": f"uid-{name}"}


class Side:
    """The plugin on a runtime that tells no CDI devices, and what it stands on."""

    def __init__(self, *, start_guard: bool = True, version: str = "v2.1.9") -> None:
        self.api = Api()
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        online = CpuSet(range(16))
        self.ledger = Ledger(CpuPool(online, CpuSet(), online.words[np.newaxis]))
        self.now = 0.0
        self.tick = 0.0
        self.start_guard, self.version = start_guard, version
        self.start()

    def clock(self) -> float:
        self.now += self.tick
        return self.now

    def start(self) -> None:
        """Start a driver that knows what the records say, and nothing else."""
        reservations = Reservations(self.api)
        self.enforcement = Enforcement(
            self.ledger, SharedPool(self.ledger, CpuSet()), reservations, clock=lambda: self.clock()
        )
        self.plugin = RuntimePlugin(self.enforcement, self.metrics, cgroups=NoCgroups(), start_guard=self.start_guard)
        self.plugin.connected("containerd", self.version, "", 2.0)

    def hold(self, uid: str = "a", cpus: str = "2-5", **changes: object) -> None:
        self.ledger.hold(make_record(uid, cpus, **changes))

    async def synchronize(self, *containers: nri.Container) -> dict[str, str]:
        """Synchronise, and return the answer."""
        pods = [nri.PodSandbox(id=f"s-{name}", uid=f"uid-{name}", name=name, namespace="default") for name in "pqrv"]
        updates = await self.plugin.synchronize(pods, containers)
        self.plugin.synchronized()
        return {update.container_id: update.linux.resources.cpu.cpus for update in updates}

    def users(self, uid: str = "a") -> list[str]:
        return sorted(container.id for container in self.enforcement.containers.users(ClaimUID(uid)))

    def wanted(self, identity: str) -> str:
        container = self.enforcement.containers.get(identity)
        return str(self.enforcement.pool.wanted(container, self.enforcement.pool.current(self.now)))

    def moved(self, identity: str) -> None:
        """Let the runtime have carried out what it was told."""
        container = self.enforcement.containers.get(identity)
        wanted = CpuSet.parse(self.wanted(identity))
        container.pushing(wanted)
        container.pushed(wanted, self.now, container.events, self.now)
        self.enforcement.moved()

    async def unused(self, uid: str = "a") -> None:
        await self.enforcement.unused(ClaimUID(uid), asyncio.get_running_loop().time())

    async def create(self, pod: str, container: nri.Container) -> str:
        sandbox = nri.PodSandbox(id=f"s-{pod}", uid=f"uid-{pod}", name=pod, namespace="default")
        adjust, _ = await self.plugin.create_container(sandbox, container)
        return adjust.linux.resources.cpu.cpus


def container(identity: str, pod: str, *env: str, cpus: str = "", marked: str = "") -> nri.Container:
    made = nri.Container(id=identity, name=identity, pod_sandbox_id=f"s-{pod}", env=env, state=nri.CONTAINER_RUNNING)
    made.linux.resources.cpu.cpus = cpus
    if marked:
        path = "/var/lib/kubelet/plugins/dra.cpu/start-guard"
        made.hooks.create_runtime.add(path=path, args=["dracpu-start-guard", "v1", "a", marked])
    return made


@pytest.fixture
async def make_side() -> AsyncIterator[Callable[..., Side]]:
    sides = []

    def make(**how: object) -> Side:
        side = Side(**how)
        sides.append((side, asyncio.create_task(run(side))))
        return side

    async def run(side: Side) -> None:
        await side.plugin.run()

    yield make
    for _, task in sides:
        task.cancel()
        await asyncio.wait([task])


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


FORGED = "DRA_CPUSET_a=2-5"


# Whose claim it is


async def test_a_forged_variable_owns_nothing_and_the_victim_can_start(make_side):
    side = make_side()
    side.hold()
    assert await side.synchronize(container("f", "q", FORGED)) == {"f": "0-1,6-15"}
    assert side.users() == []
    assert side.enforcement.owner(A) is None
    side.moved("f")
    await until(lambda: side.api.reads)
    await settle()
    assert side.users() == []
    victim = container("v", "p", FORGED, marked="2-5")
    assert await side.create("p", victim) == "2-5"
    assert side.registry.get_sample_value("dra_cpu_nri_refused_containers_total", {"reason": "foreign"}) == 1
    assert side.api.reads == 1


@pytest.mark.parametrize("reserved", [[pod_reference("x"), pod_reference("p")], [POD_GROUP]])
async def test_a_container_without_a_mark_gets_its_cpus_when_the_api_server_says_so(make_side, reserved):
    side = make_side()
    side.hold()
    side.api.reserved = reserved
    assert await side.synchronize(container("c", "p", FORGED)) == {"c": "0-1,6-15"}
    await until(lambda: side.users() == ["c"])
    assert side.wanted("c") == "2-5"
    assert side.enforcement.owner(A)[0].name == "p"


async def test_until_the_api_server_answers_a_container_owns_nothing_unless_it_is_held_to_the_claim_s_cpus(
    make_side,
):
    side = make_side()
    side.hold()
    side.hold("b", "8-9")
    side.api.error = ApiError(503, "the API server answered 503")
    both = container("c", "p", FORGED, "DRA_CPUSET_b=8-9", cpus="2-5")
    held = container("h", "p", FORGED, cpus="2-5")
    assert await side.synchronize(held, both) == {"c": "0-1,6-7,10-15"}
    await until(lambda: side.api.reads == 2)
    await settle()
    assert (side.users(), side.users("b")) == (["h"], [])
    # One that holds its own claim's CPUs is not held to those of another that it names.
    assert side.wanted("c") == "0-1,6-7,10-15"
    side.api.error = None
    side.now += 100
    side.plugin._living._wake.set()
    await until(lambda: side.users("b") == ["c"])
    assert side.users() == ["c", "h"]
    assert side.wanted("c") == "2-5,8-9"


async def test_one_that_is_held_to_the_claim_s_cpus_loses_them_if_the_claim_is_another_pod_s(make_side):
    side = make_side()
    side.hold()
    forger, own = container("f", "q", FORGED, cpus="2-5"), container("o", "p", FORGED, cpus="2-5")
    forger.created_at, own.created_at = 1, 2
    await side.synchronize(forger, own)
    assert side.users() == ["f"]
    await until(lambda: side.users() == ["o"])
    assert (side.wanted("f"), side.wanted("o")) == ("0-1,6-15", "2-5")
    assert not side.enforcement.reserved_for(A, "uid-q", marked=False)


async def test_a_marked_container_needs_nobody_s_word(make_side):
    side = make_side()
    side.hold()
    side.api.error = ApiError(503, "the API server answered 503")
    assert await side.synchronize(container("c", "p", FORGED, marked="2-5")) == {"c": "2-5"}
    await settle()
    assert (side.users(), side.api.reads) == (["c"], 0)


async def test_what_was_read_while_the_claim_was_prepared_need_not_be_asked_again(make_side):
    side = make_side(start_guard=False)
    side.hold()
    side.enforcement.learn(A, {"status": {"reservedFor": [pod_reference("p")]}})
    assert await side.create("p", container("c", "p", FORGED)) == "2-5"
    assert await side.synchronize(container("c", "p", FORGED), container("f", "q", FORGED)) == {
        "c": "2-5",
        "f": "0-1,6-15",
    }
    assert side.users() == ["c"]


async def test_a_container_that_is_taken_in_later_is_asked_for_too(make_side):
    side = make_side()
    side.hold()
    await side.synchronize()
    for identity, pod in (("f", "q"), ("c", "p")):
        sandbox = nri.PodSandbox(id=f"s-{pod}", uid=f"uid-{pod}", name=pod, namespace="default")
        [update] = await side.plugin.update_container(sandbox, container(identity, pod, FORGED), nri.LinuxResources())
        assert update.linux.resources.cpu.cpus == "0-1,6-15"
    await until(lambda: side.users() == ["c"])


async def test_an_adopted_claim_s_container_is_known_by_its_cpus_until_the_claim_s_name_is_known(make_side):
    side = make_side(start_guard=False)
    side.hold(adopted=True, name="", namespace="")
    own, late = container("c", "p", FORGED, cpus="2-5"), container("l", "p", FORGED)
    forged = container("f", "q", FORGED)
    assert await side.synchronize(own, late, forged) == {"l": "0-1,6-15", "f": "0-1,6-15"}
    await settle()
    assert (side.users(), side.api.reads) == (["c"], 0)
    # The kubelet prepares it again.
    side.enforcement.learn(A, {"status": {"reservedFor": [pod_reference("p")]}})
    side.ledger.replace(make_record("a", "2-5"))
    await until(lambda: side.users() == ["c", "l"])
    await until(lambda: side.registry.get_sample_value("dra_cpu_nri_refused_containers_total", {"reason": "foreign"}))
    assert side.users() == ["c", "l"]


async def test_a_claim_that_the_api_server_does_not_know_is_asked_for_ever_more_seldom(make_side):
    side = make_side()
    side.hold()
    side.api.error = ApiError(404, "not found")
    await side.synchronize(container("f", "q", FORGED))
    await until(lambda: side.api.reads == 1)
    await settle()
    for asked, (pause, expected) in enumerate([(0.5, 1), (0.6, 2), (1.5, 2), (0.6, 3), (3.5, 3), (0.6, 4)]):
        side.now += pause
        side.plugin._living._wake.set()
        await settle()
        assert side.api.reads == expected, asked


# Release


async def test_nothing_is_released_under_a_container_that_may_be_the_claim_s(make_side):
    side = make_side()
    side.hold()
    side.api.error = ApiError(503, "the API server answered 503")
    await side.synchronize(container("c", "p", FORGED))
    with pytest.raises(
        RuntimePendingError, match=r"may be in use: container c of pod default/p .*was found on them, and has not ended"
    ):
        await side.unused()
    side.moved("c")
    await side.unused()


@pytest.mark.parametrize("env", [(), (FORGED,), ("DRA_CPUSET_a=2-4",)])
@pytest.mark.parametrize("cpus", ["", "2-5", "5-7"])
async def test_any_container_that_was_found_on_a_claim_s_cpus_blocks_their_release(make_side, env, cpus):
    side = make_side()
    side.hold()
    side.hold("b", "12")
    side.api.reserved = []
    await side.synchronize(container("c", "q", *env, cpus=cpus))
    with pytest.raises(RuntimePendingError, match="container c of pod default/q"):
        await side.unused()
    if cpus:
        await side.unused("b")
    await until(lambda: side.wanted("c") == "0-1,6-11,13-15")
    side.moved("c")
    await side.unused()


async def test_one_of_no_claim_that_can_go_nowhere_but_to_the_claim_s_cpus_does_not_block_them(make_side):
    side = make_side()
    side.hold("a", "0-15")
    side.api.reserved = []
    await side.synchronize(container("c", "q"))
    await side.unused()
    await side.synchronize(container("c", "q", "DRA_CPUSET_a=0-15"))
    with pytest.raises(RuntimePendingError, match="container c of pod default/q"):
        await side.unused()


async def test_a_container_of_another_claim_does_not_block_what_both_hold(make_side):
    side = make_side()
    side.hold()
    side.ledger.hold_anyway(make_record("b", "5-6"))
    side.enforcement.learn(ClaimUID("b"), {"status": {"reservedFor": [pod_reference("q")]}})
    await side.synchronize(container("c", "q", "DRA_CPUSET_b=5-6", cpus="5-6"))
    await side.unused()


async def test_a_claim_that_is_going_is_given_to_no_container(make_side):
    side = make_side()
    side.hold()
    with side.enforcement.barred(A, "is being unprepared"):
        await side.synchronize(container("c", "p", FORGED, marked="2-5"))
        await settle()
        assert (side.users(), side.wanted("c")) == ([], "0-1,6-15")
    side.plugin._living._wake.set()
    await until(lambda: side.users() == ["c"])


# Time


async def test_what_there_was_no_time_for_stays_where_it_is_and_is_looked_at_next(make_side):
    side = make_side()
    side.hold()
    side.api.reserved = []
    containers = [container(f"c{number}", "q", FORGED, cpus="4-7") for number in range(40)]
    own = container("o", "p", FORGED, cpus="2-5", marked="2-5")
    side.tick = 0.05
    updates = await side.synchronize(*containers, own)
    side.tick = 0.0
    assert 0 < len(updates) < 40
    # The one with the best right comes first.
    assert side.users() == ["o"]
    unread = [one for one in side.enforcement.containers if one.unread]
    assert len(unread) + len(updates) + 1 == 41
    assert unread[0].given == CpuSet.parse("4-7")
    assert side.wanted(unread[0].id) == ""
    assert not side.enforcement.is_clear(make_record("b", "7"))
    with pytest.raises(RuntimePendingError, match="has not ended"):
        await side.unused()
    await until(lambda: not any(one.unread for one in side.enforcement.containers))
    assert {side.wanted(one.id) for one in containers} == {"0-1,6-15"}
    assert side.users() == ["o"]


async def test_what_is_still_unread_blocks_the_release_of_what_it_touches(make_side):
    side = make_side()
    side.hold()
    side.hold("b", "8-9")
    side.tick = 2.0
    await side.plugin.synchronize([], [container("c", "q", cpus="4-6"), container("d", "q", cpus="0-1")])
    side.enforcement.set_known()  # and nobody has looked at them yet
    side.tick = 0.0
    with pytest.raises(RuntimePendingError, match=r"container c of pod \?/s-q was found on them"):
        await side.unused()
    await side.unused("b")


async def test_an_update_of_what_is_unread_is_answered_by_what_it_is(make_side):
    side = make_side()
    side.hold()
    side.tick = 2.0
    own = container("o", "p", FORGED, cpus="2-5", marked="2-5")
    await side.plugin.synchronize([], [own])
    side.tick = 0.0
    assert side.users() == []
    side.plugin.event(nri.POST_START_CONTAINER, nri.PodSandbox(), own)
    [update] = await side.plugin.update_container(nri.PodSandbox(), own, nri.LinuxResources())
    assert update.linux.resources.cpu.cpus == "2-5"
    assert side.users() == ["o"]


async def test_what_ends_before_it_is_looked_at_is_forgotten(make_side):
    side = make_side()
    side.hold()
    side.tick = 2.0
    await side.synchronize(container("o", "p", FORGED), container("q", "q"))
    side.tick = 0.0
    await side.plugin.stop_container(nri.PodSandbox(), container("o", "p"))
    await until(lambda: not side.plugin._living._rest)
    assert [one.id for one in side.enforcement.containers] == ["q"]


# Memory


def parts(n_parts: int, n_bytes: int):
    for number in range(n_parts):
        env = [f"VARIABLE_{index}=" + "x" * 100_000 for index in range(n_bytes // 100_000)]
        yield nri.SynchronizeRequest(
            pods=[nri.PodSandbox(id=f"s{number}", uid=f"u{number}", name="p", namespace="n")],
            containers=[nri.Container(id=f"c{number}", pod_sandbox_id=f"s{number}", env=[*env, FORGED])],
        ).SerializeToString()


async def test_of_each_part_only_what_is_needed_is_kept(make_side):
    side = make_side()
    side.hold()
    tracemalloc.start()
    try:
        for raw in parts(100, 1_000_000):
            part = nri.SynchronizeRequest.FromString(raw)
            side.plugin.synchronize_part(part.pods, part.containers)
        del part, raw
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20
    assert len(await side.synchronize()) == 100


async def test_nothing_is_kept_after_a_refusal_or_the_end_of_a_connection(make_side, monkeypatch):
    side = make_side()
    side.plugin.synchronize_part([], [container("c", "q")])
    side.plugin.disconnected("it went away")
    assert side.plugin._living._survey is None
    monkeypatch.setattr(survey, "MOST_KEPT_BYTES", 10_000)
    with pytest.raises(NriError, match="tells of 0 pods and 10 containers; expected at most as many as can be kept in"):
        side.plugin.synchronize_part([], [container(f"c{number}", "q") for number in range(100)])
    assert side.plugin._living._survey is None
    assert await side.synchronize(container("d", "q", cpus="1")) == {"d": "0-15"}
    assert len(side.enforcement.containers) == 1


@pytest.mark.parametrize("repeated", [[], [container("c", "q")]])
async def test_parts_that_tell_nothing_new_do_not_go_on_for_ever(make_side, repeated):
    side = make_side()
    for _ in range(survey.MOST_IDLE_PARTS + len(repeated)):
        side.plugin.synchronize_part([], repeated)
    with pytest.raises(NriError, match="65 parts of the synchronisation have told of no new pod or container"):
        side.plugin.synchronize_part([], repeated)
    assert side.plugin._living._survey is None


async def test_a_node_with_ten_thousand_containers_synchronises(make_side):
    side = make_side()
    side.hold()
    for start in range(0, 10_000, 100):
        some = [container(f"{number:064x}", "q", "PATH=/bin", cpus="0-15") for number in range(start, start + 100)]
        side.plugin.synchronize_part([], some)
    await side.synchronize()
    assert len(side.enforcement.containers) == 10_000
    await until(lambda: not side.plugin._living._rest)
    assert {side.wanted(one.id) for one in side.enforcement.containers} == {"0-1,6-15"}
