# SPDX-License-Identifier: Apache-2.0
"""Containers whose parents' cgroups do not have all CPUs: what they get, what they keep others from, what is told."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.errors import RuntimePendingError
from driver.health import Health
from driver.hostcgroups import HostCgroups
from driver.ledger import Ledger
from driver.metrics import Metrics
from driver.nri.enforcement import Enforcement
from driver.nri.errors import Code, NriError, Refusal
from driver.nri.parents import ParentCgroups
from driver.nri.plugin import RuntimePlugin
from driver.nri.pushes import Pushes
from driver.nri.reservations import Reservations
from driver.nri.sharedpool import SharedPool
from driver.podlimit import PodLimit
from driver.sandbox.cgrouptree import CgroupTree
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from records import make_record

ALL = CpuSet(range(8))


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


class Side:
    """The driver's side of a runtime, on a machine of 8 CPUs whose cgroups are files."""

    def __init__(self, root, *, reserved: str = "", version: int = 2) -> None:
        self.tree = CgroupTree(root, ALL, version)
        self.tree.make("/kubepods/burstable")
        self.ledger = Ledger(CpuPool(ALL, cpus(reserved), ALL.words[np.newaxis]))
        self.limit = PodLimit()
        self.health = Health()
        cgroups = HostCgroups(root)
        pool = SharedPool(self.ledger, CpuSet(), self.limit)
        self.enforcement = Enforcement(self.ledger, pool, Reservations(None), cgroups=cgroups)
        self.parents = ParentCgroups(cgroups, self.enforcement, self.health)
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry)
        self.plugin = RuntimePlugin(self.enforcement, metrics, cgroups=cgroups, start_guard=True)
        self.pushes = Pushes(self.enforcement, metrics, self.health)
        self.plugin.connected("containerd", "v2.4.2", "v0.12.3", 2.0)
        self.plugin.synchronized()

    def pod(self, name: str) -> nri.PodSandbox:
        return nri.PodSandbox(id=name, uid=name, name=name, namespace="default")

    def message(self, pod: str, name: str = "c", held: str = "", **fields: object) -> nri.Container:
        message = nri.Container(id=f"{pod}-{name}", name=name, pod_sandbox_id=pod, **fields)
        message.linux.cgroups_path = f"/kubepods/burstable/pod{pod}/{name}"
        message.linux.resources.cpu.cpus = held
        return message

    async def create(self, pod: str, name: str = "c") -> str:
        self.tree.make(f"/kubepods/burstable/pod{pod}")
        adjust, _ = await self.plugin.create_container(self.pod(pod), self.message(pod, name))
        return adjust.linux.resources.cpu.cpus

    def start(self, pod: str, name: str = "c") -> None:
        message = self.message(pod, name)
        for event in (nri.POST_CREATE_CONTAINER, nri.START_CONTAINER, nri.POST_START_CONTAINER):
            self.plugin.event(event, self.pod(pod), message)

    def container(self, pod: str, name: str = "c"):
        return self.enforcement.containers.get(f"{pod}-{name}")

    def wanted(self, pod: str) -> str:
        pool = self.enforcement.pool
        return str(pool.wanted(self.container(pod), pool.cpus))

    def limit_pods(self, allowed: str) -> None:
        """Take CPUs from the cgroup of all pods, and let the driver have seen it."""
        self.tree.confine("/kubepods", cpus(allowed))
        self.limit.set(ALL - cpus(allowed), "/kubepods", cpus(allowed))
        self.ledger.pool.set_offline(self.limit.outside)


@pytest.fixture
def side(tmp_path):
    return Side(tmp_path / "cgroup")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("cgroup", ["/kubepods", "/kubepods/burstable", "/kubepods/burstable/podp"])
async def test_a_new_container_gets_of_the_pool_what_its_parent_allows(tmp_path, version, cgroup):
    side = Side(tmp_path / "cgroup", version=version)
    side.tree.make("/kubepods/burstable/podp")
    side.tree.confine(cgroup, cpus("0-3"))
    side.ledger.hold(make_record("a", "1"))
    assert await side.create("p") == "0,2-3"
    validated = nri.ValidateContainerAdjustmentRequest(pod=side.pod("p"), container=side.message("p"))
    validated.adjust.linux.resources.cpu.cpus = "0,2-3"
    assert await side.plugin.validate(validated) is None
    side.start("p")
    [update] = await side.plugin.update_container(side.pod("p"), side.message("p"), nri.LinuxResources())
    assert update.linux.resources.cpu.cpus == "0,2-3"


async def test_an_update_is_answered_with_what_the_parent_allows_just_then(side):
    await side.create("p")
    side.start("p")
    side.tree.confine("/kubepods/burstable/podp", cpus("0-3"))
    [update] = await side.plugin.update_container(side.pod("p"), side.message("p"), nri.LinuxResources())
    assert update.linux.resources.cpu.cpus == "0-3"


async def test_a_container_that_was_there_gets_the_same(side):
    side.tree.make("/kubepods/burstable/podp")
    side.tree.confine("/kubepods/burstable/podp", cpus("0-3"))
    running = side.message("p", held="0-7", state=nri.CONTAINER_RUNNING)
    [update] = await side.plugin.synchronize([side.pod("p")], [running])
    assert update.linux.resources.cpu.cpus == "0-3"
    await side.plugin.synchronize([], [])
    side.plugin.event(nri.POST_START_CONTAINER, side.pod("p"), running)
    assert side.wanted("p") == "0-3"


async def test_a_cgroup_that_is_narrowed_or_widened_is_followed(side):
    await side.create("p")
    await side.create("q")
    side.enforcement.wake.clear()
    await side.parents.look()
    assert not side.enforcement.wake.is_set()
    side.tree.confine("/kubepods/burstable/podq", cpus("0-3"))
    await side.parents.look()
    assert side.enforcement.wake.is_set()
    assert (side.wanted("p"), side.wanted("q")) == ("0-7", "0-3")
    side.tree.write("/kubepods/burstable/podq", cpus("0-5"))
    await side.parents.look()
    assert side.wanted("q") == "0-5"


async def test_what_cannot_be_read_changes_nothing(side, tmp_path):
    for path in ("", "/nowhere/pod/c", "kubepods/../x", "/" + "x" * 10_000):
        message = side.message("p")
        message.linux.cgroups_path = path
        adjust, _ = await side.plugin.create_container(side.pod("p"), message)
        assert adjust.linux.resources.cpu.cpus == "0-7"
        assert len(side.container("p").cgroups_path) <= 4096
    await side.parents.look()
    assert side.wanted("p") == "0-7"


# In cgroup v2 one of whose CPUs its parent has none runs on whatever the parent has.


async def test_no_container_is_created_that_would_run_on_the_cpus_of_claims(side):
    side.tree.make("/kubepods/burstable/podp")
    side.tree.confine("/kubepods/burstable/podp", cpus("2-3"))
    side.ledger.hold(make_record("a", "2-4"))
    with pytest.raises(
        Refusal,
        match=r"^no CPU is left for container c, which has no claim: cgroup of its pod allows only CPUs 2-3; "
        r"CPUs 2-3 are held by claim a$",
    ):
        await side.create("p")
    side.tree.write("/kubepods/burstable/podp", cpus("2-5"))
    assert await side.create("p") == "5"


def of_claim(side, cpuset):
    side.ledger.hold(make_record("a", cpuset))
    side.enforcement.reservations.learn_pod("a", "p")
    message = side.message("p", env=[f"DRA_CPUSET_a={cpuset}"])
    message.CDI_devices.add(name="dra.k8s.io/cpu=claim-a")
    side.tree.make("/kubepods/burstable/podp")
    return message


async def test_no_container_of_a_claim_is_created_that_would_run_on_none_of_its_cpus(side):
    message = of_claim(side, "4-5")
    side.tree.confine("/kubepods/burstable", cpus("0-3"))
    with pytest.raises(
        Refusal,
        match=r"^container 'c': its claims have CPUs 4-5, but cgroup of its pod allows only CPUs 0-3; expected some of",
    ):
        await side.plugin.create_container(side.pod("p"), message)
    side.tree.write("/kubepods/burstable", cpus("0-4"))
    adjust, _ = await side.plugin.create_container(side.pod("p"), message)
    assert adjust.linux.resources.cpu.cpus == "4-5"


async def test_a_container_that_lost_all_of_its_claim_s_cpus_is_kept_off_those_of_others(side):
    await side.plugin.create_container(side.pod("p"), of_claim(side, "4-5"))
    side.ledger.hold(make_record("b", "2-3"))
    side.tree.confine("/kubepods/burstable", cpus("0-3"))
    await side.parents.look()
    assert side.wanted("p") == "0-1"
    side.tree.write("/kubepods/burstable", ALL)
    await side.parents.look()
    assert side.wanted("p") == "4-5"


async def settled(side, pod: str, given: str) -> str:
    """Run a container of a claim, as the kernel has it; return its cgroup."""
    message = of_claim(side, given)
    await side.plugin.create_container(side.pod(pod), message)
    side.start(pod)
    side.container(pod)._doubts.clear()
    side.tree.make(message.linux.cgroups_path)
    side.tree.write(message.linux.cgroups_path, cpus(given))
    return message.linux.cgroups_path


async def test_a_container_from_which_the_kernel_has_taken_cpus_gets_them_anew_once_its_parent_has_them(tmp_path):
    """In cgroup v1 nothing else gives them back to it after they were offline."""
    side = Side(tmp_path / "cgroup", version=1)
    path = await settled(side, "p", "4-5")
    container = side.container("p")

    def is_due() -> bool:
        return container.push_due(cpus("4-5"), side.enforcement.now()) is not None

    await side.parents.look()
    assert not is_due()
    side.tree.confine("/kubepods", cpus("0-4"))
    await side.parents.look()
    assert (str(container.may_have), is_due()) == ("4-5", False)
    for cgroup in ("/kubepods", "/kubepods/burstable", "/kubepods/burstable/podp"):
        side.tree.write(cgroup, ALL)
    side.enforcement.wake.clear()
    await side.parents.look()
    assert side.enforcement.wake.is_set()
    assert (str(container.may_have), side.wanted("p"), is_due()) == ("4", "4-5", True)
    # Whoever is told so and changes nothing is not told for ever.
    for _ in range(3):
        container.pushing(cpus("4-5"))
        container.pushed(cpus("4-5"), side.enforcement.now(), container.events, side.enforcement.now())
        await side.parents.look()
        assert not is_due()
    side.tree.write(path, cpus("4-5"))
    await side.parents.look()
    side.tree.write(path, cpus("5"))
    await side.parents.look()
    assert is_due()


async def test_a_container_about_which_there_is_doubt_is_not_taken_for_one_that_has_lost_cpus(side):
    path = await settled(side, "p", "4-5")
    side.tree.write(path, cpus("4"))
    container = side.container("p")
    for doubt in (lambda: container.pushing(cpus("4")), lambda: container.updating(cpus("4-5"), 0.0)):
        doubt()
        await side.parents.look()
        assert container.given == cpus("4-5")


async def test_where_nobody_s_cpus_are_all_that_a_parent_has_a_container_starts_as_without_the_driver(tmp_path):
    side = Side(tmp_path / "cgroup", reserved="0-1")
    side.limit_pods("0-1")
    assert await side.create("p") == "2-7"
    side.limit.set(cpus("2-6"), "/kubepods", cpus("0-1"))
    side.ledger.pool.set_offline(cpus("2-7"))
    assert str(side.enforcement.pool.cpus) == "2-6"
    assert str(side.enforcement.pool.without(CpuSet())) == ""


async def test_a_claim_waits_for_a_container_that_its_parent_keeps_on_the_claim_s_cpus(side):
    side.tree.make("/kubepods/burstable/podp")
    side.tree.confine("/kubepods/burstable/podp", cpus("2-3"))
    assert await side.create("p") == "2-3"
    side.start("p")
    record = make_record("a", "2-3")
    side.ledger.hold(record)
    container = side.container("p")
    container._doubts.clear()
    container.shrunk(cpus("0-1,4-7"))
    with pytest.raises(
        RuntimePendingError,
        match=r"container c of pod default/p \(whose cgroup allows only CPUs 2-3\) could not be moved away yet",
    ):
        await side.enforcement.confirm(record, 0.0)
    assert "could not be moved away from them yet" in side.enforcement.why_barred("a")
    side.tree.write("/kubepods/burstable/podp", cpus("2-5"))
    side.enforcement.look_at_parent(container)
    await side.enforcement.confirm(record, 0.0)
    assert side.enforcement.why_barred("a") == ""


async def test_a_claim_all_of_whose_cpus_pods_cannot_use(side):
    side.ledger.hold(make_record("a", "6-7"))
    side.limit_pods("0-5")
    why = (
        "has CPUs 6-7, none of which pods may use: cgroup /kubepods allows only CPUs 0-5; give it more, or delete the "
    )
    assert side.enforcement.why_barred("a") == f"{why}pod"


async def test_a_claim_that_leaves_the_others_nothing_that_pods_can_use_is_refused(side):
    await side.create("p")
    side.limit_pods("0-1")
    with pytest.raises(RuntimePendingError, match="CPUs 0-1 would leave no CPU for the 1 container"):
        side.enforcement.admit(cpus("0-1"))
    side.enforcement.admit(cpus("1"))


# What is told


async def test_the_cgroup_of_a_class_of_pods_is_named(side, caplog):
    for pod in ("p", "q"):
        await side.create(pod)
    side.tree.confine("/kubepods/burstable", cpus("0-3"))
    for _ in range(2):
        await side.parents.look()
        assert side.health.remarks() == {"cgroups": "cgroup /kubepods/burstable allows only CPUs 0-3"}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    side.tree.confine("/kubepods/burstable", cpus("0-1"))
    await side.parents.look()
    assert side.health.remarks() == {"cgroups": "cgroup /kubepods/burstable allows only CPUs 0-1"}
    side.tree.write("/kubepods/burstable", ALL)
    await side.parents.look()
    assert side.health.remarks() == {}


async def test_a_single_pod_is_named_in_the_log_and_nowhere_else(side, caplog):
    for pod in "pqrstu":
        await side.create(pod)
    for pod in "qrstu":
        side.tree.confine(f"/kubepods/burstable/pod{pod}", cpus("0-3"))
    for _ in range(2):
        await side.parents.look()
    [remark] = side.health.remarks().values()
    assert remark.startswith("cgroups of single pods allow fewer CPUs than their containers should have")
    assert "podq" not in remark
    [told] = [record for record in caplog.records if record.name == "driver.nri.parents"]
    assert told.fields["pods"] == 5
    assert "container c of pod default/q: cgroup /kubepods/burstable/podq allows only CPUs 0-3" in told.fields["reason"]
    assert told.fields["reason"].count("allows only") == 3


async def test_a_claim_s_pod_that_has_not_all_of_its_cpus_is_told(side):
    message = of_claim(side, "2-5")
    side.tree.confine("/kubepods/burstable/podp", cpus("2-4"))
    adjust, _ = await side.plugin.create_container(side.pod("p"), message)
    assert adjust.linux.resources.cpu.cpus == "2-5"
    await side.parents.look()
    assert "cgroups" in side.health.remarks()


async def test_what_all_pods_lack_is_not_told_of_each(side):
    await side.create("p")
    side.tree.confine("/kubepods", cpus("0-3"))
    await side.parents.look()
    side.limit_pods("0-3")
    await side.parents.look()
    assert side.health.remarks() == {}
    assert side.wanted("p") == "0-3"
    side.tree.confine("/kubepods/burstable", cpus("0-1"))
    await side.parents.look()
    assert side.health.remarks() == {"cgroups": "cgroup /kubepods/burstable allows only CPUs 0-1"}


async def test_all_are_looked_at_again_and_again_and_soon_when_cpus_have_changed(tmp_path):
    side = Side(tmp_path / "cgroup")
    await side.create("p")
    task = asyncio.create_task(side.parents.run())
    try:
        async with asyncio.timeout(30):
            await asyncio.sleep(0)
            side.tree.confine("/kubepods/burstable/podp", cpus("0-3"))
            changed = side.enforcement.changed
            side.parents.look_soon()
            await changed.wait()
        assert side.wanted("p") == "0-3"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_where_cgroups_cannot_be_read_a_refused_push_tells(side):
    """And where they can, it has them read again."""
    await side.create("p")
    side.start("p")
    container = side.container("p")
    container.cgroups_path = ""
    side.ledger.hold(make_record("a", "2-3"))
    tries = 0
    refuses = True

    async def push(updates, timeout_s):
        nonlocal tries
        tries += 1
        if refuses:
            raise NriError(Code.UNKNOWN, "NRI update of some containers failed")

    task = asyncio.create_task(side.pushes.run(push))
    try:
        async with asyncio.timeout(30):
            while side.health.remarks() == {}:  # noqa: ASYNC110, what is waited for tells nobody
                await asyncio.sleep(0.005)
            assert tries >= 2
            [remark] = side.health.remarks().values()
            assert remark.startswith("some containers cannot be given their CPUs")
            refuses = False
            container.retry_soon(side.enforcement.now() - 1.0)
            side.enforcement.notify()
            while side.health.remarks() != {}:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_refused_push_has_the_parent_read_again(side):
    await side.create("p")
    side.start("p")
    side.ledger.hold(make_record("a", "2-3"))
    side.tree.confine("/kubepods/burstable/podp", cpus("0-5"))
    pushed = []

    async def push(updates, timeout_s):
        pushed.append(updates[0].linux.resources.cpu.cpus)
        if cpus(pushed[-1]) - cpus("0-5"):
            raise NriError(Code.UNKNOWN, "NRI update of some containers failed")

    task = asyncio.create_task(side.pushes.run(push))
    try:
        async with asyncio.timeout(30):
            while len(pushed) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert pushed == ["0-1,4-7", "0-1,4-5"]
    assert side.health.remarks() == {}
