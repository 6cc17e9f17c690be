# SPDX-License-Identifier: Apache-2.0
"""Whoever may create pods, or write a CDI spec, attacks the real driver over the real socket.

The box's runtime drops a plugin that answers later than real ones allow, so a single connection through all of it says
that no answer was late. What the answers took is printed beside what those for plain containers of equal size took.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.names import cdi_device_id
from driver.sandbox.clusterbox import held_cpus
from driver.sandbox.nriplugin import RuntimeTraits
from driver.sandbox.runtime import RefusedError
from fastcpu import CpuSet
from hostile import MANY_BYTES, MOST_BYTES, PREFIX, Attack, forgeries, long_environments, many_variables, marks

NEW = RuntimeTraits()
OLD = RuntimeTraits(version="v2.1.9", nri_version="", known_events=0x07FF, tells_cdi_devices=False)
# Of these one each as large as a message may be.
LARGEST = ("strides of an unknown claim", "strides of a claim", "mentions in a value")
CPUS, OTHER_CPUS = "2-5", "8-9"


@dataclass
class Ground:
    """A node with a claim whose container runs, one whose container does not, and one container of nobody."""

    node: object
    uid: str = ""
    idle: str = ""
    worst: list[tuple[float, float, int, str]] = field(default_factory=list)
    numbers: int = 0

    @property
    def runtime(self):
        return self.node.box.runtime

    async def set_up(self, *flags: str) -> None:
        await self.node.start(flags=flags)
        running = self.node.add(CPUS)
        idle = self.node.add(OTHER_CPUS, device="cpudevnuma001")
        self.uid, self.idle = running.uid, idle.uid
        for claim, pod in ((running, "victim"), (idle, "idle")):
            body = self.node.claim(claim)
            body["status"]["reservedFor"] = [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"}]
            self.node.put(body, raw=True)
        for pod in ("victim", "idle", "hostile", "plain"):
            await self.runtime.run_pod(nri.PodSandbox(id=f"sandbox-{pod}", name=pod, uid=f"uid-{pod}", namespace="ns"))
        assert await self.node.errors(running, idle) == ["", ""]
        self.plain = await self.runtime.run_container("sandbox-plain", "c")
        self.victim = await self.start_own("victim", self.uid)

    async def start_own(self, pod: str, uid: str) -> str:
        return await self.runtime.run_container(f"sandbox-{pod}", "c", cdi_devices=[cdi_device_id(uid)])

    async def start_idle(self) -> str:
        """Start the other claim's container, as the kubelet does: again and again."""
        async with asyncio.timeout(60):
            while True:
                with suppress(RefusedError):  # others may still have to be moved away
                    return await self.start_own("idle", self.idle)
                await asyncio.sleep(0.1)

    def identity(self) -> str:
        self.numbers += 1
        return f"{self.numbers:064x}"

    async def create(self, attack: Attack) -> float:
        """Have a container created, and check that it got none of any claim's CPUs; return the longest answer."""
        container = attack.container(self.identity(), "sandbox-hostile")
        plugin = self.runtime.plugin
        assert plugin is not None
        plugin.slowest_s = 0.0
        with suppress(RefusedError):
            await self.runtime.create_container(container)
        took = plugin.slowest_s
        if container.id in self.runtime.containers:
            await self.runtime.start_container(container.id)
            self.check(container.id)
            await self.runtime.remove_container(container.id)
        return took

    async def attack(self, attacks: Iterable[Attack]) -> None:
        for attack in attacks:
            plain = await self.create(attack.plain())
            hostile = await self.create(attack)
            size = attack.container("", "").ByteSize()
            self.worst.append((hostile, plain, size, attack.name))

    def check(self, *identities: str) -> None:
        """Check that containers run on no CPU of any claim."""
        for identity in identities:
            assert self.is_off(identity), self.runtime.containers[identity].name

    def is_off(self, identity: str) -> bool:
        held = CpuSet().union(*held_cpus(self.node.cdi_dir).values())
        assert len(held) == 6
        return self.runtime.effective(identity).isdisjoint(held)

    async def check_all(self, connections: int = 1) -> None:
        """Check that the driver was never dropped, and that those who have claims can have them."""
        assert self.runtime.connections == connections
        assert (await self.node.metrics())["nri_reconnects_total"] == 0
        status, body = await self.node.get("/readyz")
        assert (status, body.strip()) == (200, "ok")
        self.check(self.plain)
        assert str(self.runtime.effective(self.victim)) == CPUS
        assert str(self.runtime.effective(await self.start_idle())) == OTHER_CPUS

    def lines(self, title: str) -> str:
        """Return what the worst answers took."""
        lines = [f"{title}: the longest answers, and those for plain containers of equal size"]
        for hostile, plain, size, name in sorted(self.worst, reverse=True)[:5]:
            lines.append(f"  {1e3 * hostile:7.2f} ms, plain {1e3 * plain:7.2f} ms  {size / 1e6:5.2f} MB  {name}")
        return "\n".join(lines)


@pytest.fixture(params=[NEW, OLD], ids=["containerd-2.4", "containerd-2.1"])
async def ground(request, open_node) -> AsyncIterator[Ground]:
    async with open_node(traits=request.param) as node:
        ground = Ground(node)
        await ground.set_up("--start-guard=true")
        yield ground


async def test_no_container_that_is_created_takes_the_driver_or_a_cpu_away(
    ground: Ground, announce: Callable[[str], None]
) -> None:
    largest = long_environments(ground.uid, CPUS, MOST_BYTES)
    await ground.attack(attack for attack in largest if attack.name in LARGEST)
    await ground.attack(long_environments(ground.uid, CPUS, MANY_BYTES // 2))
    await ground.attack(many_variables(ground.uid, CPUS, MANY_BYTES // 2))
    await ground.attack(long_environments(ground.idle, OTHER_CPUS, 120_000))
    await ground.attack(many_variables(ground.idle, OTHER_CPUS, 120_000))
    await ground.attack(forgeries(ground.uid, CPUS))
    await ground.attack(forgeries(ground.idle, OTHER_CPUS))
    announce(ground.lines("environments"))
    await ground.check_all()


async def test_no_hook_and_no_cdi_device_takes_the_driver_or_a_cpu_away(
    open_node, announce: Callable[[str], None]
) -> None:
    """The box's runtime injects no device that no spec has: what others inject is in the container beforehand."""
    async with open_node() as node:
        ground = Ground(node)
        await ground.set_up("--start-guard=true")
        ground.runtime._inject = lambda container: None
        ground.runtime._run_hooks = lambda container, cpus: None
        for n_bytes in (3_000, MANY_BYTES):
            await ground.attack(marks(ground.idle, OTHER_CPUS, n_bytes))
        announce(ground.lines("hooks and CDI devices"))
        assert ground.runtime.connections == 1
        ground.check(ground.plain)
        assert str(ground.runtime.effective(ground.victim)) == CPUS


def put(ground: Ground, attack: Attack, cpus: str = "") -> str:
    """Have the runtime know a container that runs, as if it had been created while there was no driver."""
    container = attack.container(ground.identity(), "sandbox-hostile")
    container.state = nri.CONTAINER_RUNNING
    container.name = attack.name.replace(" ", "-")
    container.linux.resources.cpu.cpus = cpus
    ground.runtime.containers[container.id] = container
    ground.runtime.cpusets[container.id] = cpus
    return container.id


async def test_containers_from_before_do_not_keep_the_driver_away(
    ground: Ground, announce: Callable[[str], None]
) -> None:
    """Everything that was refused is there already, in hundreds of parts, when the driver starts."""
    connections = ground.runtime.connections
    await ground.node.process.kill9()
    ground.runtime._plugins._traits = replace(ground.runtime._plugins._traits, most_part_bytes=40_000)
    attacks = [
        *long_environments(ground.uid, CPUS, 30_000),
        *many_variables(ground.uid, CPUS, 30_000),
        *long_environments(ground.idle, OTHER_CPUS, 30_000),
        *many_variables(ground.idle, OTHER_CPUS, 30_000),
        *forgeries(ground.uid, CPUS),
        *forgeries(ground.idle, OTHER_CPUS),
    ]
    hostile = [put(ground, attack) for attack in attacks for _ in range(4)]
    # One that says what the runtime has made of it.
    hostile += [put(ground, Attack("cpuset", env=[f"{PREFIX}x=1"]), "0-1048575:1/3," * 2000 + "0") for _ in range(8)]
    for identity in hostile[-8:]:
        ground.runtime.cpusets[identity] = ""
    await ground.node.start(flags=("--start-guard=true",))
    plugin = await ground.runtime.synchronized()
    announce(f"{plugin.parts} parts, {len(hostile)} hostile containers: synchronised in {plugin.synchronize_s:.3f} s")
    assert plugin.parts > 100
    await ground.node.until(lambda: all(ground.is_off(identity) for identity in hostile))
    async with asyncio.timeout(60):
        while (await ground.node.get("/readyz"))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await ground.check_all(connections + 1)
