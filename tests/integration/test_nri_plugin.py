# SPDX-License-Identifier: Apache-2.0
"""The whole enforcement, from a prepare to the runtime's containers and back, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from driver.allocators import ExternalAllocator
from driver.apis import nri_v1alpha1_pb2 as nri
from driver.cdi import CdiDirectory
from driver.checkpoint import RecordStore
from driver.devices import build_devices
from driver.errors import ApiError, ClaimError, RuntimePendingError
from driver.health import Health
from driver.ledger import Ledger
from driver.metadata import MetadataStore
from driver.metrics import Metrics
from driver.names import ClaimUID
from driver.nri.connection import Timing
from driver.nri.container import TOLD_S
from driver.nri.runtimeside import RuntimeSide
from driver.orphans import Orphans
from driver.prepare import ClaimReference, Preparer
from driver.sandbox.machine import MachineShape, write_machine
from driver.status import StatusWriter
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from fastcpu.sysfs import read_topology
from fastcpu.topology import Topology
from kernel_model import NoCgroups
from nri_runtime import NriRuntime, RefusedError

NODE = "node-1"


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """A machine of 16 CPUs in two NUMA nodes: 0-7 and 8-15."""
    shape = MachineShape(sockets=1, numa_nodes=2, cpus=16, threads_per_core=1)
    return read_topology(write_machine(tmp_path_factory.mktemp("machine") / "sys", shape))


class Claims:
    """The claims of an API server."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, object]] = {}
        self.reads: list[str] = []
        self.error: ApiError | None = None

    async def get_claim(self, namespace: str, name: str) -> dict[str, object]:
        self.reads.append(name)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        try:
            return self.objects[namespace, name]
        except KeyError:
            raise ApiError(404, f"{name} not found", missing=f"resourceclaims/{name}") from None

    async def apply_claim_devices(self, *_: object) -> None:
        await asyncio.sleep(0)

    def add(self, uid: str, cpuset: str, *pods: str, device: str = "cpudevnuma000") -> ClaimReference:
        result = {
            "request": "cpus",
            "driver": "dra.cpu",
            "pool": NODE,
            "device": device,
            "consumedCapacity": {"dra.cpu/cpu": str(len(CpuSet.parse(cpuset)))},
        }
        parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": cpuset}}
        config = {"source": "FromClaim", "opaque": {"driver": "dra.cpu", "parameters": parameters}}
        self.objects["default", f"claim-{uid}"] = {
            "metadata": {"namespace": "default", "name": f"claim-{uid}", "uid": uid, "resourceVersion": "1"},
            "status": {
                "allocation": {"devices": {"results": [result], "config": [config]}},
                "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods],
            },
        }
        return ClaimReference(uid=ClaimUID(uid), namespace="default", name=f"claim-{uid}")

    def reserve(self, uid: str, *pods: str) -> None:
        status = self.objects["default", f"claim-{uid}"]["status"]
        status["reservedFor"] = [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods]


class Node:
    """A node: the runtime, the API server, the folders, and a driver that can die and start again."""

    def __init__(self, root: Path, topology: Topology, traits: dict[str, object]) -> None:
        self.root = root
        self.topology = topology
        self.claims = Claims()
        self.runtime = NriRuntime(root / "nri.sock", **traits)
        self.reserved = ""
        self.isolated = CpuSet()
        self.wait_s = 3.0
        self.start_guard = True
        self._running: asyncio.Task[None] | None = None
        self._ids = 0

    async def start(self, *, wait: bool = True) -> None:
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry)
        reserved = CpuSet.parse(self.reserved)
        model = build_devices(
            self.topology,
            reserved=reserved,
            group_by="numanode",
            allocator="external",
            pcie_roots=None,
            node_allocatable_mapping=False,
        )
        self.pool = CpuPool(self.topology.online, reserved, model.groups)
        self.ledger = Ledger(self.pool)
        self.health = Health()
        self.side = RuntimeSide(
            str(self.root / "nri.sock"),
            ledger=self.ledger,
            isolated=self.isolated,
            claims=self.claims,
            cgroups=NoCgroups(),
            health=self.health,
            metrics=metrics,
            start_guard=self.start_guard,
            timing=Timing(first_retry_s=0.02, longest_retry_s=0.1),
        )
        self.status = StatusWriter(self.claims)
        self.preparer = Preparer(
            claims=self.claims,
            allocator=ExternalAllocator(model, self.pool, NODE),
            model=model,
            ledger=self.ledger,
            records=RecordStore(self.root / "claims"),
            cdi=CdiDirectory(self.root / "cdi", self._hook if self.start_guard else None),
            metadata=MetadataStore(self.root / "metadata", self.root / "cdi"),
            status=self.status,
            runtime=self.side.enforcement,
            metrics=metrics,
            wait_s=self.wait_s,
        )
        self.orphans = Orphans(
            claims=self.claims,
            preparer=self.preparer,
            ledger=self.ledger,
            runtime=self.side.enforcement,
            pool_name=NODE,
            metrics=metrics,
        )
        await self.preparer.restore()
        self._running = asyncio.create_task(self.side.run())
        if wait:
            await self.runtime.synchronized()
            await self.until(lambda: self.side.enforcement.known)

    async def kill(self) -> None:
        """End the driver, and leave what a kill leaves."""
        assert self._running is not None
        self._running.cancel()
        await asyncio.wait([self._running])
        await self.status.close()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110, what is waited for tells nobody
                await asyncio.sleep(0.005)

    async def run_pod(self, name: str) -> None:
        pod = nri.PodSandbox(id=f"sandbox-{name}", name=name, uid=f"uid-{name}", namespace="default")
        await self.runtime.run_pod(pod)

    @staticmethod
    def _hook(uid: ClaimUID, cpus: CpuSet) -> dict[str, object]:
        args = ["dracpu-start-guard", "v1", uid, str(cpus)]
        return {"hookName": "createRuntime", "path": "/var/lib/kubelet/plugins/dra.cpu/start-guard", "args": args}

    def container(self, pod: str, *claims: str, **env: str) -> nri.Container:
        """Return a container as the runtime would present it after CDI."""
        self._ids += 1
        container = nri.Container(id=f"{pod}-{self._ids}", pod_sandbox_id=f"sandbox-{pod}", name=f"c{self._ids}")
        container.env.append("PATH=/bin")
        for uid in claims:
            cpus = self.ledger.records[uid].cpus
            container.env.append(f"DRA_CPUSET_{uid}={cpus}")
            container.CDI_devices.add(name=f"dra.k8s.io/cpu=claim-{uid}")
            if self.start_guard:
                hook = self._hook(ClaimUID(uid), cpus)
                container.hooks.create_runtime.add(path=hook["path"], args=hook["args"])
        container.env.extend(f"{name}={value}" for name, value in env.items())
        return container

    async def run(self, pod: str, *claims: str, **env: str) -> str:
        """Create and start a container, and its pod if need be; return its id."""
        if f"sandbox-{pod}" not in self.runtime.pods:
            await self.run_pod(pod)
        container = self.container(pod, *claims, **env)
        await self.runtime.create_container(container)
        await self.runtime.start_container(container.id)
        return container.id

    def cpus(self, identity: str) -> str:
        return self.runtime.cpusets[identity]

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"dra_cpu_{name}", labels)


@pytest.fixture
async def make_node(short_tmp: Path, machine: Topology) -> AsyncIterator[Callable[..., Awaitable[Node]]]:
    nodes = []

    async def make(*, started: bool = True, traits: dict[str, object] | None = None, **settings: object) -> Node:
        node = Node(short_tmp, machine, traits or {})
        for name, value in settings.items():
            setattr(node, name, value)
        nodes.append(node)
        await node.runtime.start()
        if started:
            await node.start()
        return node

    yield make
    for node in nodes:
        with suppress(AssertionError):
            await node.kill()
        await node.runtime.stop()


@pytest.fixture
async def node(make_node) -> Node:
    return await make_node()


# The shared pool and a claim


async def test_a_prepare_moves_the_others_away_and_an_unprepare_lets_them_back(node):
    shared = [await node.run(f"s{number}") for number in range(20)]
    assert {node.cpus(container) for container in shared} == {"0-15"}
    reference = node.claims.add("a", "2-5", "p")
    await node.preparer.prepare(reference)
    assert {node.cpus(container) for container in shared} == {"0-1,6-15"}
    exclusive = await node.run("p", "a")
    assert node.cpus(exclusive) == "2-5"
    assert node.cpus(await node.run("late")) == "0-1,6-15"
    await node.runtime.remove_container(exclusive)
    await node.preparer.unprepare(reference)
    async with asyncio.timeout(60):
        await node.until(lambda: {node.cpus(container) for container in shared} == {"0-15"})


async def test_a_burst_of_unprepares_is_a_handful_of_pushes(node):
    shared = await node.run("s")
    references = [node.claims.add(f"a{cpu}", str(cpu), "p", device=f"cpudevnuma{cpu // 8:03}") for cpu in range(15)]
    await asyncio.gather(*map(node.preparer.prepare, references))
    assert node.cpus(shared) == "15"
    before = node.metric("nri_pushes_total", result="success")
    await asyncio.gather(*map(node.preparer.unprepare, references))
    await node.until(lambda: node.cpus(shared) == "0-15")
    assert node.metric("nri_pushes_total", result="success") - before <= 3


# Who is let in


async def test_a_second_pod_waits_for_the_first_and_containers_of_one_pod_share(node):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p", "q"))
    first = await node.run("p", "a")
    assert node.cpus(await node.run("p", "a")) == "2-5"
    with pytest.raises(RefusedError, match=r"is used by pod default/p, whose container c1 has not ended"):
        await node.run("q", "a")
    await node.runtime.remove_container(first)
    with pytest.raises(RefusedError, match="is used by pod default/p"):
        await node.run("q", "a")
    await node.runtime.stop_container("p-2")
    await node.runtime.remove_container("p-2")
    assert node.cpus(await node.run("q", "a")) == "2-5"


async def test_a_pod_that_was_added_later_is_looked_for_once(node):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    reads = len(node.claims.reads)
    with pytest.raises(RefusedError, match=r"is not reserved for pod default/q; expected the pod in its"):
        await node.run("q", "a")
    assert len(node.claims.reads) == reads + 1
    node.claims.reserve("a", "p", "q")
    assert node.cpus(await node.run("q", "a")) == "2-5"
    node.claims.error = ApiError(0, "unreachable")
    await node.runtime.remove_container("q-2")
    assert node.cpus(await node.run("q", "a")) == "2-5"
    with pytest.raises(RefusedError, match="is used by pod"):
        await node.run("r", "a")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"DRA_CPUSET_a": "2-5"}, r"DRA_CPUSET_a is set, but the container was not given claim default/claim-a"),
        ({"DRA_CPUSET_b": "2-5"}, r"no claim of that UID is prepared on this node"),
        ({"DRA_CPUSET_": "2-5"}, r"environment variable 'DRA_CPUSET_': claim UID '' is malformed"),
        ({"DRA_CPUSET_a": "2-5,"}, r"DRA_CPUSET_a is '2-5,'"),
        ({"DRA_CPUSET_a": ""}, r"DRA_CPUSET_a is empty"),
        ({"DRA_CPUSET_a": "0-4294967295"}, r"DRA_CPUSET_a is '0-4294967295'"),
    ],
)
async def test_forged_variables_never_pin_and_are_never_shared(node, env, message):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    with pytest.raises(RefusedError, match=message):
        await node.run("p", **env)
    assert node.side.enforcement.owner(ClaimUID("a")) is None


async def test_a_late_unprepare_waits_for_the_container_and_then_says_what_still_runs(make_node):
    node = await make_node(wait_s=0.2)
    reference = node.claims.add("a", "2-5", "p")
    await node.preparer.prepare(reference)
    exclusive = await node.run("p", "a")
    with pytest.raises(RuntimePendingError, match=r"CPUs are in use: container c1 of pod default/p has not ended"):
        await node.preparer.unprepare(reference)
    assert "a" in node.ledger.records
    await node.runtime.remove_container(exclusive)
    await node.preparer.unprepare(reference)
    assert "a" not in node.ledger.records


async def test_without_a_runtime_a_prepare_waits_and_then_says_so(make_node):
    node = await make_node(wait_s=0.2)
    await node.runtime.stop()
    await node.until(lambda: not node.side.enforcement.known)
    reference = node.claims.add("a", "2-5", "p")
    with pytest.raises(ClaimError, match="the container runtime is not connected"):
        await node.preparer.prepare(reference)
    assert node.ledger.records == {}
    await node.runtime.start()
    node.preparer._wait_s = 5.0
    await node.preparer.prepare(reference)
    assert node.metric("nri_connected") == 1


async def test_after_a_restart_everything_is_put_right(node):
    shared = await node.run("s")
    reference = node.claims.add("a", "2-5", "p")
    await node.preparer.prepare(reference)
    exclusive = await node.run("p", "a")
    await node.kill()
    with suppress(RefusedError):  # the runtime finds out by the first that the validator is gone
        await node.run("t")
    stray = await node.run("t")
    assert node.cpus(stray) == ""
    node.runtime.cpusets[exclusive] = "0-15"
    node.runtime.containers[exclusive].linux.resources.cpu.cpus = "0-15"
    await node.start()
    await node.until(lambda: node.cpus(stray) == "0-1,6-15")
    assert node.cpus(exclusive) == "2-5"
    assert node.cpus(shared) == "0-1,6-15"
    assert node.metric("nri_corrected_containers_total", cpu_allocation_mode="exclusive") == 1
    assert node.metric("nri_corrected_containers_total", cpu_allocation_mode="shared") == 1


# What containers of a pod may do with its claim


async def test_a_container_that_starts_again_in_its_sandbox_keeps_its_cpus(node):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    first = await node.run("p", "a")
    await node.runtime.stop_container(first)
    second = await node.run("p", "a")
    assert node.cpus(second) == "2-5"
    await node.runtime.remove_container(first)
    assert node.side.enforcement.owner(ClaimUID("a")) is not None
    with pytest.raises(RefusedError, match="is used by pod default/p"):
        await node.run("q", "a")


async def test_stale_ends_of_containers_change_nothing(node):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    exclusive = await node.run("p", "a")
    plugin = node.side._plugin
    pod = node.runtime.pods["sandbox-p"]
    for identity in ("never-known", "p-0"):
        await plugin.stop_container(pod, nri.Container(id=identity))
        plugin.event(nri.POST_START_CONTAINER, pod, nri.Container(id=identity))
        plugin.event(nri.REMOVE_CONTAINER, pod, nri.Container(id=identity))
        plugin.event(nri.POST_UPDATE_CONTAINER, pod, nri.Container(id=identity))
    assert [one.id for one in node.side.enforcement.containers] == [exclusive]
    assert node.cpus(exclusive) == "2-5"


async def test_an_init_container_hands_the_claim_to_the_main_container(node):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    sidecar = await node.run("p", "a")
    init = await node.run("p", "a")
    await node.runtime.stop_container(init)
    main = await node.run("p", "a")
    assert node.cpus(sidecar) == node.cpus(main) == "2-5"


async def test_several_claims_are_united_and_a_container_of_the_pod_without_them_shares(node):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    await node.preparer.prepare(node.claims.add("b", "8-9", "p", device="cpudevnuma001"))
    assert node.cpus(await node.run("p", "a", "b")) == "2-5,8-9"
    assert node.cpus(await node.run("p", "b")) == "8-9"
    assert node.cpus(await node.run("p")) == "0-1,6-7,10-15"


# What the kubelet changes


async def test_a_resize_moves_no_container_and_leaves_the_rest_to_the_kubelet(node):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    exclusive, shared = await node.run("p", "a"), await node.run("s")
    for identity, expected in ((exclusive, "2-5"), (shared, "0-1,6-15")):
        for wished in ("", "0-15", "7"):
            resources = nri.LinuxResources()
            resources.cpu.cpus = wished
            resources.cpu.mems = "0"
            resources.cpu.shares.value = 512
            await node.runtime.update_container(identity, resources)
            stored = node.runtime.containers[identity].linux.resources.cpu
            assert (node.cpus(identity), stored.cpus, stored.mems, stored.shares.value) == (
                expected,
                expected,
                "0",
                512,
            )


# Marks


async def test_an_older_runtime_that_tells_no_cdi_devices_is_believed_by_the_guards_hook(make_node):
    node = await make_node(traits={"version": "v2.1.9", "nri_version": "", "known_events": 0x07FF})
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    await node.run_pod("p")
    container = node.container("p", "a")
    del container.CDI_devices[:]
    await node.runtime.create_container(container)
    forged = node.container("p", DRA_CPUSET_a="2-5")
    with pytest.raises(RefusedError, match="the container was not given claim default/claim-a"):
        await node.runtime.create_container(forged)


async def test_where_no_mark_can_be_the_exact_variable_of_a_reserved_pod_is_enough(make_node):
    traits = {"version": "v1.7.20", "nri_version": "", "known_events": 0x07FF}
    node = await make_node(traits=traits, start_guard=False)
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    assert node.cpus(await node.run("p", DRA_CPUSET_a="2-5")) == "2-5"
    await node.runtime.remove_container("p-1")
    with pytest.raises(RefusedError, match="is not reserved for pod default/q"):
        await node.run("q", DRA_CPUSET_a="2-5")
    with pytest.raises(RefusedError, match="DRA_CPUSET_a is '2-6', but claim default/claim-a has CPUs 2-5"):
        await node.run("p", DRA_CPUSET_a="2-6")


@pytest.mark.parametrize("spoil", ["remove", "empty", "other", "twice"])
async def test_a_container_whose_variable_was_tampered_with_is_refused_and_never_shared(node, spoil):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    await node.run_pod("p")
    container = node.container("p", "a")
    del container.env[:]
    if spoil != "remove":
        container.env.append(
            {"empty": "DRA_CPUSET_a=", "other": "DRA_CPUSET_x=2-5", "twice": "DRA_CPUSET_a=2-5"}[spoil]
        )
    if spoil == "twice":
        container.env.append("DRA_CPUSET_a=2-5")
    with pytest.raises(RefusedError, match="DRA_CPUSET_a"):
        await node.runtime.create_container(container)
    assert node.side.enforcement.containers.get(container.id) is None


async def test_a_mark_of_a_claim_that_the_pod_s_author_copied_into_another_pod_s_environment_is_refused(node):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    await node.preparer.prepare(node.claims.add("b", "8-9", "q", device="cpudevnuma001"))
    await node.run("p", "a")
    with pytest.raises(RefusedError, match="the container was not given claim default/claim-a"):
        await node.run("q", "b", DRA_CPUSET_a="2-5")
    assert node.metric("nri_refused_containers_total", reason="unmarked") == 1


# An empty pool


async def test_a_claim_that_would_leave_the_others_no_cpu_is_refused(make_node):
    node = await make_node(wait_s=0.2, reserved="8-15")
    await node.run("s")
    await node.run("t")
    reference = node.claims.add("a", "0-7", "p")
    with pytest.raises(ClaimError, match=r"CPUs 0-7 would leave no CPU for the 2 containers that have no claim"):
        await node.preparer.prepare(reference)
    assert node.ledger.records == {}
    for name in ("s-1", "t-2"):
        await node.runtime.remove_container(name)
    await node.preparer.prepare(reference)
    with pytest.raises(RefusedError, match=r"no CPU is left for container c3, which has no claim: all are reserved"):
        await node.run("s")
    assert node.cpus(await node.run("p", "a")) == "0-7"


async def test_a_prepare_waits_for_the_pool_that_is_about_to_grow(make_node):
    node = await make_node(reserved="8-15")
    shared = await node.run("s")
    first = node.claims.add("a", "0-3", "p")
    await node.preparer.prepare(first)
    second = asyncio.create_task(node.preparer.prepare(node.claims.add("b", "4-7", "q")))
    await asyncio.sleep(0)
    assert not second.done()
    await node.preparer.unprepare(first)
    await second
    assert node.cpus(shared) == "0-3"


async def test_an_exclusive_container_is_refused_while_others_cannot_go_anywhere(make_node):
    node = await make_node(reserved="8-15")
    reference = node.claims.add("a", "0-7", "p")
    await node.preparer.prepare(reference)
    await node.kill()
    with suppress(RefusedError):
        await node.run("s")
    stray = await node.run("s")
    await node.start()
    with pytest.raises(RefusedError, match=r"\(a\) has CPUs 0-7, but container c2 of pod default/s could not be moved"):
        await node.run("p", "a")
    assert node.cpus(stray) == ""
    await node.runtime.remove_container(stray)
    assert node.cpus(await node.run("p", "a")) == "0-7"


async def test_isolated_cpus_are_for_claims_only(make_node):
    node = await make_node(isolated=CpuSet.parse("4-7"))
    assert node.cpus(await node.run("s")) == "0-3,8-15"
    await node.preparer.prepare(node.claims.add("a", "4-7", "p"))
    assert node.cpus(await node.run("p", "a")) == "4-7"


# Synchronisation


def add_second(node: Node, first: str, **differs: object) -> str:
    """Have the runtime know a container like another one in pod q, as if nobody had refused it."""
    second = nri.Container()
    second.CopyFrom(node.runtime.containers[first])
    second.pod_sandbox_id = "sandbox-q"
    for name, value in differs.items():
        setattr(second, name, value)
    node.runtime.containers[second.id] = second
    if second.state == nri.CONTAINER_RUNNING:
        node.runtime.cpusets[second.id] = second.linux.resources.cpu.cpus
    return second.id


async def lose_driver(node: Node) -> None:
    await node.kill()
    with suppress(RefusedError):
        await node.run("r")


async def lose_driver_of_claim(node: Node) -> str:
    """Lose the driver when pod p uses a claim that pod q may use too; return the container."""
    await node.preparer.prepare(node.claims.add("a", "2-5", "p", "q"))
    first = await node.run("p", "a")
    await lose_driver(node)
    await node.run_pod("q")
    return first


async def test_containers_of_two_pods_with_one_claim_are_not_both_left_on_its_cpus(node):
    first = await lose_driver_of_claim(node)
    node.runtime.containers[first].created_at = 1
    second = add_second(node, first, id="a", created_at=2)
    await node.start()
    assert (node.cpus(first), node.cpus(second)) == ("2-5", "0-1,6-15")


@pytest.mark.parametrize("state", [nri.CONTAINER_CREATED, nri.CONTAINER_RUNNING])
async def test_a_container_keeps_its_cpus_whatever_was_created_for_its_claim_without_a_driver(node, state):
    first = await lose_driver_of_claim(node)
    # By its id it would be the first, and a runtime before NRI 0.10 tells no other order.
    node.runtime.containers[first].created_at = 0
    second = add_second(node, first, id="a", state=state)
    node.runtime.containers[second].linux.Clear()
    node.runtime.cpusets.pop(second, None)
    await node.start()
    assert node.cpus(first) == "2-5"
    assert node.runtime.containers[second].linux.resources.cpu.cpus == "0-1,6-15"


async def test_of_two_containers_with_the_cpus_of_one_claim_the_one_that_runs_keeps_them(node):
    first = await lose_driver_of_claim(node)
    node.runtime.containers[first].created_at = 0
    second = add_second(node, first, id="a", state=nri.CONTAINER_CREATED)
    await node.start()
    assert node.cpus(first) == "2-5"
    assert node.runtime.containers[second].linux.resources.cpu.cpus == "0-1,6-15"


async def test_one_container_that_cannot_be_updated_does_not_stop_the_others(node):
    containers = [await node.run(f"s{number}") for number in range(12)]
    node.runtime.broken.add(containers[3])
    node.preparer._wait_s = 1.0
    reference = node.claims.add("a", "2-5", "p")
    with pytest.raises(RuntimePendingError, match=r"container c4 of pod default/s3 \(.*\) could not be moved away yet"):
        await node.preparer.prepare(reference)
    assert {node.cpus(one) for one in containers if one != containers[3]} == {"0-1,6-15"}
    assert node.ledger.records == {}
    node.runtime.broken.clear()
    node.preparer._wait_s = 5.0
    await node.preparer.prepare(reference)
    assert {node.cpus(one) for one in containers} == {"0-1,6-15"}


async def test_a_runtime_that_starts_again_is_told_everything_again(node):
    shared = await node.run("s")
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    await node.runtime.stop()
    await node.until(lambda: not node.side.enforcement.known)
    node.runtime.cpusets[shared] = node.runtime.containers[shared].linux.resources.cpu.cpus = "0-15"
    await node.runtime.start()
    await node.until(lambda: node.cpus(shared) == "0-1,6-15")
    assert node.metric("nri_reconnects_total") == 1
    assert node.metric("nri_corrected_containers_total", cpu_allocation_mode="shared") == 1


async def test_what_the_stored_cpuset_says_is_not_believed_after_a_restart(node):
    """A push that came while the container started is in its specification, and not in its cgroup."""
    shared = await node.run("s")
    await node.kill()
    node.runtime.cpusets[shared] = "0-3"
    await node.start()
    await node.until(lambda: node.cpus(shared) == "0-15")
    assert node.metric("nri_corrected_containers_total", cpu_allocation_mode="shared") == 0


# State that is already there


async def test_an_adopted_claim_s_container_starts_again_though_nobody_knows_the_claim_s_name(make_node):
    node = await make_node(started=False)
    CdiDirectory(node.root / "cdi").write_now(ClaimUID("old"), CpuSet.parse("2-5"))
    await node.start()
    assert node.ledger.records["old"].adopted
    assert node.cpus(await node.run("p", "old")) == "2-5"
    assert node.claims.reads == []


async def test_orphans_are_released_and_claims_in_use_are_not(node):
    for uid, cpuset in (("gone", "1"), ("other", "2"), ("elsewhere", "3"), ("fine", "4"), ("used", "5")):
        await node.preparer.prepare(node.claims.add(uid, cpuset, "p"))
    await node.run("p", "used")
    del node.claims.objects["default", "claim-gone"]
    del node.claims.objects["default", "claim-used"]
    node.claims.objects["default", "claim-other"]["metadata"]["uid"] = "new"
    result = node.claims.objects["default", "claim-elsewhere"]["status"]["allocation"]["devices"]["results"][0]
    result["pool"] = "node-2"
    await node.orphans.look()
    assert set(node.ledger.records) == {"fine", "used"}
    assert node.metric("orphaned_claims_total") == 3
    node.claims.error = ApiError(503, "busy")
    await node.orphans.look()
    assert set(node.ledger.records) == {"fine", "used"}
    node.claims.error = None
    await node.runtime.stop()
    await node.until(lambda: not node.side.enforcement.known)
    del node.claims.objects["default", "claim-fine"]
    await node.orphans.look()
    assert set(node.ledger.records) == {"fine", "used"}


async def test_stopping_lets_nobody_wait(node):
    reference = node.claims.add("a", "2-5", "p")
    await node.preparer.prepare(reference)
    await node.run("p", "a")
    node.preparer._wait_s = 60.0
    waiting = asyncio.create_task(node.preparer.unprepare(reference))
    await asyncio.sleep(0.01)
    node.side.close()
    with pytest.raises(ClaimError, match="has not ended"):
        await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("nri_version", ["v0.12.3", ""])
async def test_a_container_whose_start_failed_keeps_the_claim_until_its_pod_is_stopped(make_node, nri_version):
    node = await make_node(traits={"nri_version": nri_version}, wait_s=0.2)
    reference = node.claims.add("a", "2-5", "p")
    await node.preparer.prepare(reference)
    await node.run_pod("p")
    await node.runtime.create_container(node.container("p", "a"))
    with pytest.raises(ClaimError, match="container c1 of pod default/p has not ended"):
        await node.preparer.unprepare(reference)
    async with node.runtime._plugins.operation():
        await node.runtime._plugins.tell(nri.STOP_POD_SANDBOX, node.runtime.pods["sandbox-p"])
    await node.preparer.unprepare(reference)


# What the kernel or the runtime may do behind the driver's back


async def test_a_container_none_of_whose_cpus_is_online_is_kept_off_those_of_other_claims(node):
    # The kernel would let it run on all that are.
    await node.preparer.prepare(node.claims.add("a", "5", "p"))
    await node.preparer.prepare(node.claims.add("b", "2-4", "q"))
    lost, other = await node.run("p", "a"), await node.run("q", "b")
    node.pool.set_offline(CpuSet.parse("5"))
    node.side.enforcement.notify()
    await node.until(lambda: node.cpus(lost) == "0-1,6-15")
    assert node.cpus(other) == "2-4"
    with pytest.raises(RefusedError, match=r"\(a\) has CPUs 5, none of which is online: switch them on, or delete the"):
        await node.run("p", "a")
    await node.preparer.prepare(node.claims.add("c", "6-7", "r"))
    assert node.cpus(lost) == "0-1,8-15"
    node.pool.set_offline(CpuSet())
    node.side.enforcement.notify()
    await node.until(lambda: node.cpus(lost) == "5")
    assert node.cpus(await node.run("p", "a")) == "5"


async def test_one_that_the_kernel_lets_run_anywhere_and_that_cannot_be_moved_keeps_claims_from_starting(make_node):
    node = await make_node(reserved="6-15")
    await node.preparer.prepare(node.claims.add("a", "4-5", "p"))
    await node.preparer.prepare(node.claims.add("b", "0-3", "q"))
    await node.run("p", "a")
    node.pool.set_offline(CpuSet.parse("4-5"))
    node.side.enforcement.notify()
    with pytest.raises(RefusedError, match=r"\(b\) has CPUs 0-3, but container c1 of pod default/p could not be moved"):
        await node.run("q", "b")
    node.pool.set_offline(CpuSet())
    assert node.cpus(await node.run("q", "b")) == "0-3"


async def test_a_container_whose_start_failed_without_a_word_does_not_keep_its_claim_for_ever(node, monkeypatch):
    reference = node.claims.add("a", "2-5", "p")
    await node.preparer.prepare(reference)
    await node.run_pod("p")
    await node.runtime.create_container(node.container("p", "a"))
    node.preparer._wait_s = 0.0
    with pytest.raises(RuntimePendingError, match="has not ended"):
        await node.preparer.unprepare(reference)
    began = node.side.enforcement.now()
    monkeypatch.setattr(node.side.enforcement, "_clock", lambda: began + TOLD_S + 1)
    await node.preparer.unprepare(reference)
    assert node.ledger.records == {}
    assert len(node.side.enforcement.containers) == 0


async def test_a_container_some_of_whose_cpus_are_online_keeps_them(node):
    await node.preparer.prepare(node.claims.add("a", "4-5", "p"))
    container = await node.run("p", "a")
    node.pool.set_offline(CpuSet.parse("5"))
    node.side.enforcement.notify()
    assert node.cpus(await node.run("p", "a")) == node.cpus(container) == "4-5"


async def test_a_claim_gets_no_container_beside_one_that_cannot_be_moved_off_its_cpus(node):
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    await lose_driver(node)
    stray = await node.run("s")
    node.runtime.broken.add(stray)
    await node.start()
    with pytest.raises(
        RefusedError, match=r"has CPUs 2-5, but container c\d of pod default/s .*could not be moved away"
    ):
        await node.run("p", "a")
    node.runtime.broken.clear()
    await node.until(lambda: node.cpus(stray) == "0-1,6-15")
    known = node.side.enforcement.containers.get(stray)
    await node.until(lambda: known.may_have.isdisjoint(CpuSet.parse("2-5")))
    assert node.cpus(await node.run("p", "a")) == "2-5"


async def test_a_container_whose_pod_is_stopped_while_it_starts_is_still_known(node):
    reference = node.claims.add("a", "2-5", "p")
    await node.preparer.prepare(reference)
    await node.run_pod("p")
    container = node.container("p", "a")
    await node.runtime.create_container(container)
    pod = node.runtime.pods["sandbox-p"]

    async def stop_pod() -> None:
        node.side._plugin.pod_stopped(pod)
        assert node.side.enforcement.containers.get(container.id) is None

    await node.runtime.start_container(container.id, stop_pod)
    assert node.side.enforcement.owner(ClaimUID("a"))[0].name == "p"
    node.preparer._wait_s = 0.0
    with pytest.raises(RuntimePendingError, match="has not ended"):
        await node.preparer.unprepare(reference)
    await node.runtime.stop_container(container.id)
    await node.preparer.unprepare(reference)
    assert node.ledger.records == {}


async def test_one_that_nobody_has_pinned_is_no_proof_that_a_claim_is_reserved_for_its_pod(make_node):
    node = await make_node(traits={"version": "v2.1.9", "nri_version": "", "known_events": 0x07FF})
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    await lose_driver(node)
    forger = await node.run("q", DRA_CPUSET_a="2-5")
    await node.start()
    await node.runtime.stop_container(forger)
    with pytest.raises(RefusedError, match="not given claim"):
        await node.run("q", DRA_CPUSET_a="2-5")
    assert not node.side.enforcement.reserved_for(ClaimUID("a"), "uid-q", marked=False)
    assert node.cpus(await node.run("p", "a")) == "2-5"


# Containers that were created while the driver was away, where the runtime tells no CDI devices

OLD = {"version": "v2.1.9", "nri_version": "", "known_events": 0x07FF, "tells_cdi_devices": False}


async def start_until_it_can(node: Node, pod: str, *claims: str) -> str:
    """Start a container as the kubelet does: again and again, while others have still to be moved away."""
    async with asyncio.timeout(60):
        while True:
            with suppress(RefusedError):
                return await node.run(pod, *claims)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("answers", [True, False], ids=["", "without an API server"])
@pytest.mark.parametrize("start_guard", [True, False])
async def test_a_forged_variable_keeps_no_claim_from_its_pod(make_node, start_guard, answers):
    node = await make_node(traits=OLD, start_guard=start_guard)
    await node.preparer.prepare(node.claims.add("a", "2-5", "p"))
    await node.run_pod("p")
    await node.kill()
    forger = await node.run("q", DRA_CPUSET_a="2-5")
    node.claims.error = None if answers else ApiError(503, "busy")
    await node.start()
    assert node.side.enforcement.owner(ClaimUID("a")) is None
    await node.until(lambda: node.cpus(forger) == "0-1,6-15")
    if answers or start_guard:
        node.claims.error = None
        assert node.cpus(await start_until_it_can(node, "p", "a")) == "2-5"
    assert node.cpus(forger) == "0-1,6-15"


async def test_a_container_of_the_claim_s_pod_gets_its_cpus_as_soon_as_the_api_server_answers(make_node):
    node = await make_node(traits=OLD, start_guard=False, wait_s=0.0)
    reference = node.claims.add("a", "2-5", "p")
    await node.preparer.prepare(reference)
    await node.kill()
    own = await node.run("p", DRA_CPUSET_a="2-5")
    node.claims.error = ApiError(503, "busy")
    await node.start(wait=False)
    await node.runtime.synchronized()
    await node.until(lambda: node.cpus(own) == "0-1,6-15")
    node.claims.error = None
    known = node.side.enforcement.containers.get(own)
    await node.until(lambda: known.claims == {"a"})
    await node.run("other")  # whose answer carries the move
    assert node.cpus(own) == "2-5"
    with pytest.raises(RuntimePendingError, match="has not ended"):
        await node.preparer.unprepare(reference)


async def test_a_claim_is_not_given_on_under_a_container_that_cannot_be_moved_off_its_cpus(make_node):
    node = await make_node(traits=OLD, wait_s=0.0)
    reference = node.claims.add("a", "2-5", "p")
    await node.preparer.prepare(reference)
    await node.kill()
    forger = await node.run("q", DRA_CPUSET_a="2-5")
    node.runtime.broken.add(forger)
    await node.start()
    with pytest.raises(RuntimePendingError, match=r"may be in use: container c\d of pod default/q .*was found on them"):
        await node.preparer.unprepare(reference)
    del node.claims.objects["default", "claim-a"]
    await node.orphans.look()
    assert "a" in node.ledger.records
    node.runtime.broken.clear()
    known = node.side.enforcement.containers.get(forger)
    await node.run("other")  # whose answer carries the move
    assert known.may_have.isdisjoint(CpuSet.parse("2-5"))
    await node.preparer.unprepare(reference)
    assert "a" not in node.ledger.records
