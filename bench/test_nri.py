# SPDX-License-Identifier: Apache-2.0
"""How long the runtime waits for the driver, and the others for their CPUs, on a node with many containers.

A handler's time is that from the bytes of the request to the bytes of the answer. The runtime does nothing else
meanwhile, and goes on without an answer after two seconds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest

import cases
from driver.apis import nri_v1alpha1_pb2 as nri
from driver.health import Health
from driver.ledger import Ledger, Record
from driver.metrics import Metrics
from driver.nri.connection import Timing
from driver.nri.enforcement import Enforcement
from driver.nri.plugin import RuntimePlugin
from driver.nri.reservations import Reservations
from driver.nri.runtimeside import RuntimeSide
from driver.nri.sharedpool import SharedPool
from fastcpu import CpuSet
from kernel_model import NoCgroups
from nri_runtime import NriRuntime
from records import make_record

pytestmark = pytest.mark.usefixtures("quiet")

CHAPTER = "NRI handlers, request to answer"
CONTENDERS = ["dracpu", "protobuf alone"]
SIZES = (10, 100, 1000)
N_CPUS = 1024
# What a pod in a namespace with a few services gets, twice.
ENVIRONMENT = [f"SERVICE_{number}_PORT_8080_TCP_ADDR=10.96.0.{number}" for number in range(60)]


class NoClaims:
    async def get_claim(self, namespace: str, name: str) -> dict[str, object]:
        raise AssertionError("every pod is known to have its claims reserved")


def claim_record(index: int) -> Record:
    return make_record(f"00000000-0000-4000-8000-{index:012}", f"{2 * index + 2}-{2 * index + 3}")


def pod(index: int) -> nri.PodSandbox:
    labels = {f"label-{number}": "value" for number in range(10)}
    return nri.PodSandbox(
        id=f"{index:064}", uid=f"uid-{index}", name=f"pod-{index}", namespace="default", labels=labels
    )


def container(index: int, claim: Record | None = None) -> nri.Container:
    made = nri.Container(id=f"{index:064x}", pod_sandbox_id=f"{index:064}", name="main", env=ENVIRONMENT)
    made.linux.resources.cpu.cpus = "0-1023"
    made.state = nri.CONTAINER_RUNNING
    if claim is not None:
        made.env.append(f"DRA_CPUSET_{claim.uid}={claim.cpus}")
        made.CDI_devices.add(name=f"dra.k8s.io/cpu=claim-{claim.uid}")
    return made


class Node:
    """A node on which every fourth container has a claim."""

    def __init__(self, containers: int) -> None:
        self.ledger = Ledger(cases.pool(N_CPUS))
        self.reservations = Reservations(NoClaims())
        enforcement = Enforcement(self.ledger, SharedPool(self.ledger, CpuSet()), self.reservations)
        self.plugin = RuntimePlugin(enforcement, Metrics(), cgroups=NoCgroups(), start_guard=True)
        self.plugin.connected("containerd", "v2.4.2", "v0.12.3", 600.0)  # or a busy machine reads some of them later
        self.containers = []
        for index in range(containers):
            claim = claim_record(index // 4) if index % 4 == 0 else None
            if claim is not None:
                self.ledger.hold(claim)
                self.reservations.learn_pod(claim.uid, f"uid-{index}")
            self.containers.append(container(index, claim))
        self.pods = [pod(index) for index in range(containers)]

    async def synchronize(self, request: bytes) -> bytes:
        message = nri.SynchronizeRequest.FromString(request)
        updates = await self.plugin.synchronize(message.pods, message.containers)
        return nri.SynchronizeResponse(update=updates).SerializeToString()

    async def settle(self) -> None:
        """Let the runtime carry out what it is told, as it has when a claim was prepared, and tell so."""
        by_id = {container.id: container for container in self.containers}
        for update in await self.plugin.synchronize(self.pods, self.containers):
            by_id[update.container_id].linux.resources.MergeFrom(update.linux.resources)
        assert not await self.plugin.synchronize(self.pods, self.containers)

    async def create(self, request: bytes) -> bytes:
        message = nri.CreateContainerRequest.FromString(request)
        adjust, updates = await self.plugin.create_container(message.pod, message.container)
        return nri.CreateContainerResponse(adjust=adjust, update=updates).SerializeToString()


class Floor:
    """A plugin that reads each request and gives an answer that it knows beforehand: what protobuf alone takes."""

    def __init__(self, answer: nri.SynchronizeResponse | nri.CreateContainerResponse) -> None:
        self.answer = answer

    async def synchronize(self, request: bytes) -> bytes:
        nri.SynchronizeRequest.FromString(request)
        return nri.SynchronizeResponse(update=self.answer.update).SerializeToString()

    async def create(self, request: bytes) -> bytes:
        nri.CreateContainerRequest.FromString(request)
        answer = nri.CreateContainerResponse(adjust=self.answer.adjust, update=self.answer.update)
        return answer.SerializeToString()


@pytest.mark.parametrize("n_containers", SIZES)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_synchronize(entry, loop, contender, n_containers):
    node = Node(n_containers)
    request = nri.SynchronizeRequest(pods=node.pods, containers=node.containers).SerializeToString()
    if contender != "dracpu":
        answer = loop.run_until_complete(node.synchronize(request))
        node = Floor(nri.SynchronizeResponse.FromString(answer))
    benchmark = entry(CHAPTER, "Synchronize", contender, n=n_containers, unit="containers")
    answer = benchmark(lambda: loop.run_until_complete(node.synchronize(request)))
    assert len(nri.SynchronizeResponse.FromString(answer).update) == n_containers


@pytest.mark.parametrize("n_containers", SIZES)
@pytest.mark.parametrize("kind", ["shared", "exclusive"])
@pytest.mark.parametrize("contender", CONTENDERS)
def test_create_container(entry, loop, contender, kind, n_containers):
    benchmark = entry(CHAPTER, f"CreateContainer, {kind}", contender, n=n_containers, unit="containers")
    node = Node(n_containers)
    claim = claim_record(400)
    node.ledger.hold(claim)
    node.reservations.learn_pod(claim.uid, "uid-5000")
    loop.run_until_complete(node.settle())
    made = container(5000, claim if kind == "exclusive" else None)
    request = nri.CreateContainerRequest(pod=pod(5000), container=made).SerializeToString()
    handler = node
    if contender != "dracpu":
        handler = Floor(nri.CreateContainerResponse.FromString(loop.run_until_complete(node.create(request))))
    took: list[float] = []

    def create() -> bytes:
        started = time.perf_counter()
        answer = loop.run_until_complete(handler.create(request))
        took.append(time.perf_counter() - started)
        return answer

    answer = benchmark(create)
    cpus = nri.CreateContainerResponse.FromString(answer).adjust.linux.resources.cpu.cpus
    assert cpus == (str(claim.cpus) if kind == "exclusive" else str(node.ledger.pool.available))
    if len(took) > 100:
        benchmark.extra_info["p99_ms"] = round(1000 * statistics.quantiles(took, n=100)[-1], 3)


@pytest.mark.parametrize("n_containers", SIZES)
def test_grow_back(entry, tmp_path_factory, loop, n_containers):
    """Time from an unprepare to the last container that has got the CPUs, over a socket.

    The runtime here needs no time for an update itself; containerd needs some milliseconds for each container.
    """
    benchmark = entry(CHAPTER, "unprepare to the last that has grown back", "dracpu", n=n_containers, unit="containers")
    claim = claim_record(0)
    path = Path(tmp_path_factory.mktemp("n")) / "nri.sock"
    runtime = NriRuntime(path)
    ledger = Ledger(cases.pool(N_CPUS))
    side = RuntimeSide(
        str(path),
        ledger=ledger,
        isolated=CpuSet(),
        claims=NoClaims(),
        cgroups=NoCgroups(),
        health=Health(),
        metrics=Metrics(),
        start_guard=True,
        timing=Timing(first_retry_s=0.01),
    )

    async def start() -> asyncio.Task[None]:
        for index in range(n_containers):
            await runtime.run_pod(pod(index))
            runtime.containers[f"{index:064x}"] = container(index)
        await runtime.start()
        running = asyncio.create_task(side.run())
        await runtime.synchronized()
        return running

    async def all_have(cpus: CpuSet) -> None:
        last = list(runtime.containers)
        text = str(cpus)
        while last:
            while last and runtime.cpusets.get(last[-1]) == text:
                last.pop()
            await asyncio.sleep(0.001)

    async def hold() -> None:
        ledger.hold(claim)
        await side.enforcement.confirm(claim, asyncio.get_running_loop().time() + 60)
        await all_have(ledger.pool.available)

    async def release() -> None:
        ledger.release(claim.uid)
        side.enforcement.released(claim.uid)
        await all_have(ledger.pool.available)

    async def stop(running: asyncio.Task[None]) -> None:
        running.cancel()
        await asyncio.wait([running])
        await runtime.stop()

    running = loop.run_until_complete(start())
    benchmark.pedantic(
        lambda: loop.run_until_complete(release()), setup=lambda: loop.run_until_complete(hold()), rounds=5
    )
    loop.run_until_complete(stop(running))
