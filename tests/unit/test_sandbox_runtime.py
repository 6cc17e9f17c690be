# SPDX-License-Identifier: Apache-2.0
"""The box's container runtime against plugins made for the purpose, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.nri.client import Client
from driver.nri.errors import Code, NriError
from driver.nri.mux import PLUGIN_CONNECTION, RUNTIME_CONNECTION, Trunk
from driver.nri.server import Method, Server
from driver.sandbox.nriplugin import RuntimeTraits
from driver.sandbox.runtime import ContainerRuntime, RefusedError
from fastcpu import CpuSet

EVENTS = 0x07F8
VALIDATOR = EVENTS | 0x2000
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"
OWN_CALLS = ("PostCreateContainer", "StartContainer", "PostStartContainer", "PostUpdateContainer", "RemoveContainer")


class Plugin:
    """A plugin that gives containers the CPUs that a test tells it, and remembers what it was told."""

    def __init__(self, reader, writer, *, cpus="2-3", events=EVENTS, silent=()):
        self.cpus = cpus
        self.events = events
        self.silent = set(silent)
        self.told = []
        self.synchronized_with = []
        self.trunk = Trunk(reader, writer)
        self.client = Client(self.trunk, RUNTIME_CONNECTION)
        methods = {
            "Configure": (nri.ConfigureRequest, nri.ConfigureResponse(events=events)),
            "Synchronize": (nri.SynchronizeRequest, self.synchronize),
            "CreateContainer": (nri.CreateContainerRequest, self.create),
            "UpdateContainer": (nri.UpdateContainerRequest, self.update),
            "StopContainer": (nri.StopContainerRequest, nri.StopContainerResponse()),
            "ValidateContainerAdjustment": (
                nri.ValidateContainerAdjustmentRequest,
                nri.ValidateContainerAdjustmentResponse(),
            ),
            **{name: (nri.ContainerEvent, nri.Empty()) for name in OWN_CALLS},
        }
        served = {
            name: Method(request=request, answer=self.answerer(name, answer))
            for name, (request, answer) in methods.items()
        }
        self.server = Server(
            self.trunk,
            PLUGIN_CONNECTION,
            "nri.pkg.api.v1alpha1.Plugin",
            served,
            answered=lambda *_: None,
            timeout_s=60.0,
            margin_s=0.0,
        )

    def answerer(self, name, answer):
        async def answered(request):
            self.told.append(name)
            if name in self.silent:
                await asyncio.Event().wait()
            return answer(request) if callable(answer) else answer

        return answered

    def synchronize(self, request):
        self.synchronized_with += [container.id for container in request.containers]
        if request.more:
            return nri.SynchronizeResponse(more=True)
        return nri.SynchronizeResponse(update=[pinned(identity, self.cpus) for identity in self.synchronized_with])

    def create(self, request):
        if request.container.name == "bad":
            raise NriError(Code.FAILED_PRECONDITION, "not this one")
        adjust = nri.ContainerAdjustment()
        adjust.linux.resources.cpu.cpus = self.cpus
        return nri.CreateContainerResponse(adjust=adjust)

    def update(self, request):
        return nri.UpdateContainerResponse(update=[pinned(request.container.id, self.cpus)])

    async def register(self, name="test", index="00"):
        request = nri.RegisterPluginRequest(plugin_name=name, plugin_idx=index)
        await self.client.call(RUNTIME_SERVICE, "RegisterPlugin", request, nri.Empty, timeout_s=60)

    async def push(self, *updates):
        request = nri.UpdateContainersRequest(update=updates)
        await self.client.call(RUNTIME_SERVICE, "UpdateContainers", request, nri.UpdateContainersResponse, timeout_s=60)


def pinned(identity, cpus):
    update = nri.ContainerUpdate(container_id=identity)
    update.linux.resources.cpu.cpus = cpus
    return update


@asynccontextmanager
async def connected(runtime, *, index="00", name="test", wait=True, **behaviour):
    reader, writer = await asyncio.open_unix_connection(runtime.socket_path)
    plugin = Plugin(reader, writer, **behaviour)
    running = asyncio.create_task(
        plugin.trunk.run({PLUGIN_CONNECTION: plugin.server, RUNTIME_CONNECTION: plugin.client})
    )
    try:
        await plugin.register(name, index)
        if wait:
            async with asyncio.timeout(60):
                while getattr(await runtime.synchronized(), "name", "") != f"{index}-{name}":  # noqa: ASYNC110, another one may be
                    await asyncio.sleep(0)
        yield plugin
    finally:
        plugin.trunk.close("the test has ended")
        plugin.client.close("the test has ended")
        await running
        await plugin.server.close()
        await plugin.trunk.closed()


@pytest.fixture
async def start_runtime(short_tmp):
    runtimes = []

    async def start(**more):
        runtime = ContainerRuntime(short_tmp / "nri.sock", online=CpuSet.parse("0-7"), **more)
        runtimes.append(runtime)
        await runtime.start()
        await runtime.run_pod(nri.PodSandbox(id="p", name="pod", namespace="default"))
        return runtime

    yield start
    for runtime in runtimes:
        await runtime.stop()


@pytest.fixture
async def runtime(start_runtime):
    return await start_runtime(traits=RuntimeTraits(request_timeout_s=0.3))


def container(identity="c", name="main"):
    return nri.Container(id=identity, pod_sandbox_id="p", name=name)


async def test_without_a_plugin_a_container_runs_on_all_cpus(runtime):
    await runtime.create_container(container())
    await runtime.start_container("c")
    assert runtime.effective("c") == CpuSet.parse("0-7")
    await runtime.stop_container("c")
    assert runtime.cpusets == {}


async def test_events_come_in_order_and_the_end_of_a_container_once(runtime):
    async with connected(runtime) as plugin:
        identity = await runtime.run_container("p", "main")
        await runtime.update_container(identity, nri.LinuxResources())
        await runtime.stop_container(identity)
        await runtime.remove_container(identity)
        assert plugin.told == [
            "Configure",
            "Synchronize",
            "CreateContainer",
            "PostCreateContainer",
            "StartContainer",
            "PostStartContainer",
            "UpdateContainer",
            "PostUpdateContainer",
            "StopContainer",
            "RemoveContainer",
        ]
        plugin.told.clear()
        with pytest.raises(RefusedError, match=r"failed to get NRI adjustment for container: .*not this one"):
            await runtime.create_container(container(name="bad"))
        assert plugin.told == ["CreateContainer", "StopContainer", "RemoveContainer"]
        assert runtime.containers == {}


async def test_an_update_while_a_container_is_created_is_lost(runtime):
    async with connected(runtime) as plugin:
        await runtime.create_container(container(), lambda: plugin.push(pinned("c", "6")))
        await runtime.start_container("c")
        assert runtime.cpusets == {"c": "2-3"}


async def test_an_update_while_a_container_is_started_is_only_stored(runtime):
    async with connected(runtime) as plugin:
        await runtime.create_container(container())
        await runtime.start_container("c", lambda: plugin.push(pinned("c", "6")))
        assert runtime.cpusets == {"c": "2-3"}
        assert runtime.containers["c"].linux.resources.cpu.cpus == "6"
        await plugin.push(pinned("c", "6"))
        assert runtime.cpusets == {"c": "6"}


async def test_an_update_while_a_container_is_updated_is_overwritten(runtime):
    async with connected(runtime) as plugin:
        identity = await runtime.run_container("p", "main")
        plugin.cpus = "4"
        resources = nri.LinuxResources(cpu=nri.LinuxCPU(cpus="0-7"))
        await runtime.update_container(identity, resources, lambda: plugin.push(pinned(identity, "6")))
        assert runtime.cpusets == {identity: "4"}


async def test_what_cannot_be_updated_is_an_error_without_names_and_the_rest_is_done(runtime):
    async with connected(runtime) as plugin:
        for identity in ("a", "b"):
            await runtime.create_container(container(identity))
            await runtime.start_container(identity)
        runtime.broken.add("a")
        with pytest.raises(NriError, match="NRI update of some containers failed") as caught:
            await plugin.push(pinned("a", "1"), pinned("b", "1"), pinned("unknown", "1"))
        assert caught.value.code == Code.UNKNOWN
        assert runtime.cpusets == {"a": "2-3", "b": "1"}
        await plugin.push(pinned("unknown", "1"))
        await plugin.push(nri.ContainerUpdate(container_id="a", ignore_failure=True))
        with pytest.raises(RefusedError, match="failed to update resources of container a"):
            await runtime.update_container("a", nri.LinuxResources())


async def test_without_an_answer_a_container_starts_unpinned(runtime):
    async with connected(runtime, silent={"CreateContainer"}):
        identity = await runtime.run_container("p", "main")
        assert runtime.cpusets == {identity: ""}
        assert runtime.plugin is None


async def test_without_the_answer_of_a_validator_a_container_is_refused_once(runtime):
    async with connected(runtime, events=VALIDATOR, silent={"CreateContainer"}):
        with pytest.raises(RefusedError, match=r"validator plugin 00-test failed: ttrpc: closed"):
            await runtime.create_container(container())
        await runtime.create_container(container())


async def test_a_validator_that_has_died_is_missed_once(runtime):
    async with connected(runtime, events=VALIDATOR) as plugin:
        plugin.trunk.close("killed")
        async with asyncio.timeout(60):
            while runtime.plugin is not None:  # noqa: ASYNC110, nobody tells
                await asyncio.sleep(0)
    with pytest.raises(RefusedError, match="validator plugin 00-test failed"):
        await runtime.create_container(container())
    await runtime.create_container(container())


async def test_two_plugins_are_asked_in_order_and_may_not_both_give_cpus(runtime):
    async with connected(runtime, index="20", name="second", cpus=""), connected(runtime, index="10", name="first"):
        identity = await runtime.run_container("p", "main")
        assert runtime.cpusets == {identity: "2-3"}
    async with connected(runtime, index="20", name="second"), connected(runtime, index="10", name="first"):
        with pytest.raises(RefusedError, match="plugins '10-first' and '20-second' both tried to set"):
            await runtime.create_container(container())


async def create_for_ever(runtime):
    for number in itertools.count():
        async with asyncio.timeout(0.3):
            await runtime.create_container(container(f"more-{number}"))
            await asyncio.sleep(0)


async def test_a_synchronisation_waits_for_what_is_being_done_and_nothing_begins_before_it_has_ended(runtime):
    creating, go_on = asyncio.Event(), asyncio.Event()

    async def between():
        creating.set()
        await go_on.wait()

    first = asyncio.create_task(runtime.create_container(container("a"), between))
    await creating.wait()
    async with connected(runtime, wait=False) as plugin:
        # Until the plugin is to be synchronised, others can be created.
        with pytest.raises(TimeoutError):
            await create_for_ever(runtime)
        assert plugin.told == ["Configure"]
        second = asyncio.create_task(runtime.create_container(container("b")))
        go_on.set()
        await asyncio.gather(first, second)
        assert plugin.synchronized_with[-1] == "a"
        assert plugin.told[:3] == ["Configure", "Synchronize", "CreateContainer"]
        await runtime.start_container("a")
        assert runtime.cpusets == {"a": "2-3"}


async def test_a_synchronisation_comes_in_parts(start_runtime):
    runtime = await start_runtime(traits=RuntimeTraits(most_per_part=2))
    for identity in "abcde":
        await runtime.create_container(container(identity))
        await runtime.start_container(identity)
    await runtime.stop_container("e")
    async with connected(runtime) as plugin:
        assert plugin.told == ["Configure", "Synchronize", "Synchronize"]
        assert runtime.cpusets == dict.fromkeys("abcd", "2-3")


@pytest.mark.parametrize(("name", "index"), [("test", "1"), ("test", "a1"), ("", "00")])
async def test_a_plugin_that_registers_wrongly_stays_connected_for_nothing(runtime, name, index):
    reader, writer = await asyncio.open_unix_connection(runtime.socket_path)
    plugin = Plugin(reader, writer)
    running = asyncio.create_task(
        plugin.trunk.run({PLUGIN_CONNECTION: plugin.server, RUNTIME_CONNECTION: plugin.client})
    )
    with pytest.raises(NriError, match="invalid plugin name"):
        await plugin.register(name, index)
    await plugin.register()
    async with connected(runtime, name="other"):
        assert plugin.told == []
        assert not running.done()
    plugin.trunk.close("the test has ended")
    await running
    await plugin.trunk.closed()


async def test_a_plugin_that_wants_what_there_is_not_is_dropped(start_runtime):
    runtime = await start_runtime(traits=RuntimeTraits(known_events=0x07FF))
    reader, writer = await asyncio.open_unix_connection(runtime.socket_path)
    plugin = Plugin(reader, writer, events=VALIDATOR)
    running = asyncio.create_task(
        plugin.trunk.run({PLUGIN_CONNECTION: plugin.server, RUNTIME_CONNECTION: plugin.client})
    )
    await plugin.register()
    await asyncio.wait_for(running, 10)
    assert plugin.told == ["Configure"]
    await plugin.trunk.closed()


async def test_a_container_that_a_hook_refuses_has_ended_and_plugins_hear_of_it_when_it_is_removed(start_runtime):
    def refuse(refused, cpus):
        raise RefusedError(f"{refused.name} on {cpus}")

    runtime = await start_runtime(run_hooks=refuse)
    async with connected(runtime) as plugin:
        await runtime.create_container(container())
        plugin.told.clear()
        with pytest.raises(RefusedError, match="main on 2-3"):
            await runtime.start_container("c")
        assert plugin.told == []
        assert runtime.cpusets == {}
        assert list(runtime.living()[1]) == []
        await runtime.remove_container("c")
        assert plugin.told == ["StopContainer", "RemoveContainer"]


async def test_changes_are_said_and_waited_for(start_runtime):
    said = []
    runtime = await start_runtime(say=said.append)
    identity = await runtime.run_container("p", "main")
    waiting = asyncio.create_task(runtime.wait_until(lambda: runtime.effective(identity) == CpuSet.parse("5"), 10))
    assert runtime.apply([pinned(identity, "5"), pinned(identity, "5")]) == []
    await waiting
    await runtime.remove_pod("p")
    assert (runtime.pods, runtime.containers, runtime.cpusets) == ({}, {}, {})
    assert said == [
        "default/pod, container main: CPUs 0-7",
        "default/pod, container main: CPUs 5",
    ]
    with pytest.raises(TimeoutError):
        await runtime.wait_until(lambda: False, 0.01)
