# SPDX-License-Identifier: Apache-2.0
"""Containers and claims come and go at random on a machine of 64 CPUs, and the driver is killed meanwhile.

After each step, and in the windows within each, a checker compares what the kernel would hold every container to with
what the claims say. `DRACPU_CHURN_S` says for how many seconds, not counting what the driver takes to come back, and
`DRACPU_CHURN_SEED` with which choices; those of each client are the same for a seed, how they interleave is not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.names import DRIVER_NAME, ClaimUID, cdi_device_id, cpuset_variable
from driver.sandbox.clusterbox import ClusterBox, held_cpus
from driver.sandbox.driverprocess import DriverProcess
from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.machine import MachineShape
from driver.sandbox.nriplugin import RuntimeTraits
from driver.sandbox.offers import Offer, allocated_claim, read_offers
from driver.sandbox.plugins import KubeletError
from driver.sandbox.runtime import RefusedError
from fastcpu import CpuSet

SECONDS = float(os.environ.get("DRACPU_CHURN_S", "6"))
SEED = int(os.environ.get("DRACPU_CHURN_SEED", "20261129"))
CLIENTS = 4
MOST_CLAIMS, MOST_CONTAINERS = 4, 8
RESERVED = CpuSet.parse("0,32")
UNRESERVED = CpuSet.parse("1-31,33-63")
OWN = "dra.k8s.io/cpu=claim-"


class Node:
    """The box with its driver, what was promised to whom, and the checker."""

    def __init__(self, box: ClusterBox, process: DriverProcess, offers: list[Offer], *, moves_late: bool) -> None:
        self.box = box
        self.moves_late = moves_late
        self.runtime = box.runtime
        self.process = process
        self.offers = offers
        # The CPUs of each claim that was ever prepared, and those of which a prepare was answered and no unprepare
        # has begun since.
        self.cpus: dict[str, CpuSet] = {}
        self.promised: dict[str, CpuSet] = {}
        # The CPUs of each claim that names some, as long as it exists.
        self.named: dict[str, CpuSet] = {}
        self.killing = False
        self.kills = 0
        self.steps: Counter[str] = Counter()
        self.checks = self.enforced_checks = 0
        self.worst_create_s = 0.0
        self.history: deque[str] = deque(maxlen=40)

    @property
    def enforced(self) -> bool:
        """Whether the driver lives and is synchronised."""
        return not self.killing and self.runtime.plugin is not None

    def claims_of(self, identity: str) -> frozenset[str]:
        devices = (device.name for device in self.runtime.containers[identity].CDI_devices)
        return frozenset(name.removeprefix(OWN) for name in devices if name.startswith(OWN))

    def own(self, identity: str) -> CpuSet:
        return CpuSet().union(*(self.cpus[uid] for uid in self.claims_of(identity)))

    def check(self) -> None:
        """Compare what is in effect with what may be."""
        self.checks += 1
        enforced = self.enforced
        self.enforced_checks += enforced
        running = {identity: self.runtime.effective(identity) for identity in self.runtime.cpusets}
        claims = {identity: self.claims_of(identity) for identity in running}
        exclusive = {identity: self.own(identity) for identity in running if claims[identity]}
        # Whether the driver lives or not.
        pods: dict[str, str] = {}
        for identity, own in exclusive.items():
            pod = self.runtime.containers[identity].pod_sandbox_id
            for uid in claims[identity]:
                assert pods.setdefault(uid, pod) == pod, self.say(identity, f"of {pod} uses {uid}, as does {pods[uid]}")
            assert running[identity] == own, self.say(identity, f"runs on {running[identity]}, has claims for {own}")
        if not enforced:
            return
        # Where containers are moved in answers only, they leave a claim's CPUs when its container is created.
        promised = {} if self.moves_late else self.promised
        for identity, cpus in running.items():
            assert cpus <= UNRESERVED, self.say(identity, f"runs on {cpus}, some of which are reserved")
            for uid, held in promised.items():
                if uid not in claims[identity] and not cpus.isdisjoint(held):
                    raise AssertionError(self.say(identity, f"runs on {cpus}, claim {uid} has {held}"))
            for other in exclusive:
                theirs = CpuSet().union(*(self.cpus[uid] for uid in claims[other] - claims[identity]))
                if other != identity and not cpus.isdisjoint(theirs):
                    raise AssertionError(self.say(identity, f"runs on {cpus}, container {other[:12]} has {theirs}"))

    def say(self, identity: str, what: str) -> str:
        return "\n".join((f"container {identity[:12]} {what}; the last steps:", *self.history))

    def tell(self, client: int, what: str) -> None:
        self.history.append(f"{time.monotonic():.4f} client {client}: {what}")

    async def kill(self, pause_s: float, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Kill the driver, and start another a little later, when something has been done without one."""
        self.killing = True
        await self.process.kill9()
        while self.runtime.plugin is not None:  # noqa: ASYNC110, the end of a connection tells nobody
            await asyncio.sleep(0.001)
        self.killing = False
        self.kills += 1
        self.history.append(f"{time.monotonic():.4f} the driver was killed")
        await asyncio.gather(asyncio.sleep(pause_s), meanwhile())
        await self.process.start()
        await self.box.wait_ready(self.process)
        self.history.append(f"{time.monotonic():.4f} the driver is back")

    async def settled(self) -> None:
        """Wait until every container has exactly its set."""

        def wrong() -> list[str]:
            free = UNRESERVED - CpuSet().union(*held_cpus(self.box.cdi_dir).values())
            return [
                self.say(
                    identity, f"runs on {self.runtime.effective(identity)}, and not on {self.own(identity) or free}"
                )
                for identity in self.runtime.cpusets
                if self.runtime.effective(identity) != (self.own(identity) or free)
            ]

        def all_right() -> bool:
            return not wrong()

        if not self.moves_late:
            await self.runtime.wait_until(all_right, 15)
            return
        await self.runtime.run_pod(nri.PodSandbox(id="later", name="later", namespace="default", uid="later"))
        end = time.monotonic() + 15
        while (left := wrong()) and time.monotonic() < end:
            # Others get CPUs with the answers to what happens.
            await self.runtime.remove_container(await self.runtime.run_container("later", "one"))
        assert not left
        await self.runtime.remove_pod("later")


class Client:
    """Does one thing after the other at random, with claims, pods and containers of its own."""

    def __init__(self, node: Node, number: int, *, chooses: bool) -> None:
        self._node = node
        self._number = number
        self._chooses = chooses
        self._random = random.Random(f"{SEED}-{number}")
        self._names = (f"claim-{number}-{index}" for index in itertools.count())
        self._pods = [
            nri.PodSandbox(
                id=f"pod-{number}-{index}", name=f"pod-{number}-{index}", namespace="default", uid=f"u{index}{number}"
            )
            for index in range(3)
        ]
        self._claims: dict[str, ClaimName] = {}
        self._containers: dict[str, str] = {}

    async def begin(self) -> None:
        """Start the pods."""
        for pod in self._pods:
            await self._node.runtime.run_pod(pod)

    async def hold(self) -> None:
        """Have a claim prepared."""
        assert await self._prepare() == "done"

    async def run_unpinned(self) -> None:
        """Start a container with the claim that is held, while there is no driver that would pin it."""
        outcome = await self._run_exclusive()
        if outcome == "creation refused":
            # By the validator that has just died, if nobody else has created anything since.
            outcome = await self._run_exclusive()
        assert outcome == "start refused by the guard"
        self._node.steps[f"run_exclusive: {outcome}"] += 1

    async def run(self, until: Callable[[], bool]) -> None:
        """Work until there is enough."""
        await self.begin()
        steps: dict[Callable[[], Awaitable[str]], int] = {
            self._prepare: 8,
            self._run_exclusive: 6,
            self._run_shared: 3,
            self._forge: 1,
            self._update: 6,
            self._restart: 2,
            self._remove: 3,
            self._unprepare: 5,
        }
        while not until():
            step = self._random.choices(list(steps), list(steps.values()))[0]
            self._node.tell(self._number, f"{step.__name__} begins")
            async with asyncio.timeout(60):
                outcome = await step()
            self._node.steps[f"{step.__name__.strip('_')}: {outcome}"] += 1
            self._node.tell(self._number, f"{step.__name__}: {outcome}")
            self._node.check()
            await asyncio.sleep(self._random.uniform(0, 0.01))

    async def end(self) -> None:
        """Remove all containers and unprepare all claims."""
        for identity in list(self._containers):
            await self._node.runtime.remove_container(identity)
        for claim in self._claims.values():
            self._node.promised.pop(claim.uid, None)
            assert await self._node.box.kubelet.unprepare(DRIVER_NAME, [claim]) == {claim.uid: ""}

    # Claims

    async def _prepare(self) -> str:
        unprepared = [claim for claim in self._claims.values() if claim.uid not in self._node.promised]
        if unprepared:
            claim = unprepared[0]
        elif len(self._claims) == MOST_CLAIMS or (new := self._new_claim()) is None:
            return "nothing to do"
        else:
            claim = new
        try:
            answer = (await self._node.box.kubelet.prepare(DRIVER_NAME, [claim]))[claim.uid]
        except KubeletError:
            return "driver away"
        if answer.error:
            # Another one has its CPUs by now; the driver has waited for them in vain.
            assert "held by claim" in answer.error or "free" in answer.error, answer.error
            self._drop(claim)
            return "refused"
        cpus = held_cpus(self._node.box.cdi_dir)[claim.uid]
        assert cpus == self._node.cpus.setdefault(claim.uid, cpus) or not self._used(claim.uid)
        self._node.cpus[claim.uid] = self._node.promised[claim.uid] = cpus
        return "done"

    def _new_claim(self) -> ClaimName | None:
        offer = self._random.choice(self._node.offers)
        free = offer.cpus - CpuSet().union(*self._node.promised.values())
        if not self._chooses and self._random.random() < 0.97:
            # Else the driver may have to wait for CPUs that another claim holds.
            free -= CpuSet().union(*self._node.named.values())
        if len(free) < 2:
            return None
        cpus = CpuSet(self._random.sample(list(free), self._random.randint(1, min(6, len(free) - 1))))
        users = [{"resource": "pods", "name": pod.name, "uid": pod.uid} for pod in self._pods[:2]]
        body = allocated_claim(next(self._names), offer, str(cpus), len(cpus), reserved_for=users)
        if self._chooses:
            del body["status"]["allocation"]["devices"]["config"]
        metadata = self._node.box.api.put(RESOURCE_CLAIMS, body)["metadata"]
        claim = ClaimName(namespace="default", name=metadata["name"], uid=metadata["uid"])
        self._claims[claim.uid] = claim
        self._node.named[claim.uid] = cpus
        return claim

    async def _unprepare(self) -> str:
        mine = [uid for uid in self._claims if uid in self._node.promised]
        if not mine:
            return "nothing to do"
        claim = self._claims[self._random.choice(mine)]
        del self._node.promised[claim.uid]
        # The kubelet may be early: the driver waits for the containers.
        early = self._random.random() < 0.3
        ending = asyncio.create_task(self._end_users(claim.uid, 0.1 if early else 0.0))
        try:
            if not early:
                await ending
            error = (await self._node.box.kubelet.unprepare(DRIVER_NAME, [claim]))[claim.uid]
        except KubeletError:
            return "driver away"
        finally:
            await ending
        assert not error, error
        if self._random.random() < 0.5:
            self._drop(claim)
        elif self._chooses:
            del self._node.cpus[claim.uid]  # it may get others the next time
        return "early, done" if early else "done"

    def _drop(self, claim: ClaimName) -> None:
        del self._claims[claim.uid]
        del self._node.named[claim.uid]

    async def _end_users(self, uid: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        for identity in self._used(uid):
            await self._remove_one(identity)

    def _used(self, uid: str) -> list[str]:
        return [identity for identity in self._containers if uid in self._node.claims_of(identity)]

    # Containers

    async def _run_exclusive(self) -> str:
        mine = [uid for uid in self._claims if uid in self._node.promised]
        if not mine or len(self._containers) == MOST_CONTAINERS:
            return "nothing to do"
        uids = self._random.sample(mine, min(len(mine), self._random.choice((1, 1, 1, 2))))
        # The second pod is refused as long as a container of the first has one of the claims, and the other way round.
        return await self._run(self._random.choice(self._pods[:2]), uids)

    async def _run_shared(self) -> str:
        if len(self._containers) == MOST_CONTAINERS:
            return "nothing to do"
        return await self._run(self._pods[2], ())

    async def _forge(self) -> str:
        others = [uid for uid in self._node.promised if uid not in self._claims]
        if not others or len(self._containers) == MOST_CONTAINERS:
            return "nothing to do"
        uid = self._random.choice(others)
        variable = f"{cpuset_variable(ClaimUID(uid))}={self._node.cpus[uid]}"
        kills, enforced = self._node.kills, self._node.enforced
        outcome = await self._run(self._pods[2], (), variable)
        still = enforced and self._node.enforced and kills == self._node.kills
        assert not (still and outcome == "done"), "a forged container was let in"
        return outcome

    async def _run(self, pod: nri.PodSandbox, uids: Any, variable: str = "") -> str:
        container = nri.Container(id=secrets.token_hex(8), pod_sandbox_id=pod.id, name="c")
        container.CDI_devices.extend(nri.CDIDevice(name=cdi_device_id(ClaimUID(uid))) for uid in uids)
        container.env.extend([variable] if variable else [])
        began = time.perf_counter()

        async def created() -> None:
            self._node.worst_create_s = max(self._node.worst_create_s, time.perf_counter() - began)
            await self._linger()

        try:
            await self._node.runtime.create_container(container, created)
        except RefusedError:
            return "creation refused"
        self._containers[container.id] = pod.id
        await self._linger()
        try:
            await self._node.runtime.start_container(container.id, self._linger)
        except RefusedError as error:
            refusal = str(error)
        else:
            return "done"
        await self._remove_one(container.id)
        if "was given other CPUs while it was about to start" in refusal:
            # By the answer to a synchronisation, when a driver came back meanwhile.
            assert self._node.moves_late
            assert self._node.kills
            return "start refused, moved meanwhile"
        assert uids, refusal
        assert "start guard" in refusal, refusal
        return "start refused by the guard"

    async def _update(self) -> str:
        if not self._containers:
            return "nothing to do"
        identity = self._random.choice(list(self._containers))
        resources = nri.LinuxResources(cpu=nri.LinuxCPU(shares=nri.OptionalUInt64(value=self._random.randint(2, 4096))))
        if not self._node.claims_of(identity) and self._random.random() < 0.5:
            # As the kubelet's own CPU manager would. With a dead driver this moves even an exclusive one.
            resources.cpu.cpus = str(UNRESERVED | RESERVED)
        await self._node.runtime.update_container(identity, resources, self._linger)
        return "done"

    async def _restart(self) -> str:
        if not self._containers:
            return "nothing to do"
        identity = self._random.choice(list(self._containers))
        pod = next(pod for pod in self._pods if pod.id == self._containers[identity])
        uids = sorted(self._node.claims_of(identity))
        await self._remove_one(identity)
        return await self._run(pod, uids)

    async def _remove(self) -> str:
        if not self._containers:
            return "nothing to do"
        await self._remove_one(self._random.choice(list(self._containers)))
        return "done"

    async def _remove_one(self, identity: str) -> None:
        if self._random.random() < 0.5:
            await self._node.runtime.stop_container(identity)
            await self._linger()
        await self._node.runtime.remove_container(identity)
        del self._containers[identity]

    async def _linger(self) -> None:
        self._node.check()
        await asyncio.sleep(self._random.choice((0, self._random.uniform(0, 0.03))))
        self._node.check()


NOW = RuntimeTraits()
OLDER = RuntimeTraits(version="v2.3.7", nri_version="v0.12.0")
OLDEST = RuntimeTraits(version="v2.1.9", nri_version="", known_events=0x07FF)
CRIO = RuntimeTraits(name="cri-o", version="1.36.1", nri_version="")


@pytest.mark.parametrize(
    ("allocator", "traits"),
    [("external", NOW), ("cpumanager", NOW), ("external", OLDER), ("cpumanager", OLDEST), ("external", CRIO)],
    ids=lambda each: each if isinstance(each, str) else f"{each.name}-{each.version}",
)
async def test_no_container_ever_runs_on_cpus_of_another(allocator, traits, announce):
    async with ClusterBox(shape=MachineShape(cpus=64, numa_nodes=4), traits=traits) as box:
        settings = {"reservedCPUs": str(RESERVED)}
        process = await box.start_driver(settings)
        _, slices = await box.wait_ready(process)
        offers = read_offers(slices)
        if allocator != "external":
            await process.terminate()
            process = await box.start_driver({**settings, "allocator": allocator})
            await box.wait_ready(process)
        node = Node(box, process, offers, moves_late=traits is not NOW)
        *clients, witness = [Client(node, number, chooses=allocator != "external") for number in range(CLIENTS + 1)]
        await witness.begin()
        await witness.hold()
        enough = asyncio.Event()
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run(enough.is_set))
            for _ in range(2):
                await asyncio.sleep(SECONDS / 3)
                await node.kill(0.5, witness.run_unpinned)
            await asyncio.sleep(SECONDS / 3)
            enough.set()
        took = time.monotonic() - began
        await node.settled()
        node.check()
        for client in (*clients, witness):
            await client.end()
        await node.settled()
        assert held_cpus(box.cdi_dir) == {}
        assert not box.runtime.deadlocked
    steps = "".join(f"\n  {what}: {count}" for what, count in sorted(node.steps.items()))
    announce(
        f"churn, {allocator}, {traits.name} {traits.version}, seed {SEED}: {node.steps.total()} steps in {took:.1f} s, "
        f"{node.checks} checks, "
        f"{node.enforced_checks} of them with the driver there; worst CreateContainer "
        f"{node.worst_create_s * 1000:.1f} ms{steps}"
    )
    for what in ("prepare: done", "run_exclusive: done", "run_shared: done", "unprepare: done", "update: done"):
        assert node.steps[what] > 0, what
    assert node.steps["run_exclusive: start refused by the guard"] + node.steps["restart: start refused by the guard"]
