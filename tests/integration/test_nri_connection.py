# SPDX-License-Identifier: Apache-2.0
"""The connection to the runtime over a real socket, with a runtime that behaves and with ones that do not."""

from __future__ import annotations

import asyncio
import logging

import pytest

import nri_wire as wire
from driver.apis import nri_v1alpha1_pb2 as nri
from driver.errors import ConfigError
from driver.health import Health
from driver.nri.connection import NriConnection, NriError, Refusal, Timing
from driver.nri.errors import Code
from driver.retries import delays
from nri_runtime import NriRuntime, RefusedError

FAST = {"first_retry_s": 0.01, "longest_retry_s": 0.05}


class Plugin:
    """Remembers what it was asked; does what a container's name says."""

    def __init__(self):
        self.calls = []
        self.parts = [], []
        self.running = 0
        self.proceed = asyncio.Event()
        self.runtime = None
        self.updates = []
        self.connection = None
        self.changed = asyncio.Event()

    def note(self, *call):
        self.calls.append(call)
        self.changed.set()

    async def wait_for(self, *call, times=1):
        async with asyncio.timeout(60):
            while self.calls.count(call) < times:
                self.changed.clear()
                await self.changed.wait()

    def connected(self, *runtime):
        self.runtime = runtime
        self.note("connected")

    def disconnected(self, reason):
        assert self.running == 0
        self.reason = reason
        self.note("disconnected")

    def synchronize_part(self, pods, containers):
        self.parts[0].extend(each.id for each in pods)
        self.parts[1].extend(each.id for each in containers)

    async def synchronize(self, pods, containers):
        self.synchronize_part(pods, containers)
        self.note("synchronize", *self.parts)
        self.parts = [], []
        return self.updates

    def synchronized(self):
        self.note("synchronized")

    async def create_container(self, pod, container):
        self.note("create", pod.name, container.name)
        self.running += 1
        try:
            if container.name == "refuse":
                raise Refusal("claim default/a is not prepared here: wait for it")
            if container.name == "bug":
                raise KeyError("forgotten")
            if container.name == "wait":
                await self.proceed.wait()
            if container.name == "push":
                await self.connection.update_containers([], 1)
            if container.name == "others":
                return cpus_of(nri.ContainerAdjustment(), "1"), [cpus_of(nri.ContainerUpdate(container_id="c"), "7")]
        finally:
            self.running -= 1
        return cpus_of(nri.ContainerAdjustment(), "1"), []

    async def update_container(self, pod, container, resources):
        self.note("update", container.name, resources.cpu.cpus)
        return [cpus_of(nri.ContainerUpdate(container_id=container.id), "1")]

    async def stop_container(self, pod, container):
        self.note("stop", container.name)
        return [cpus_of(nri.ContainerUpdate(container_id="other"), "5")]

    async def start_container(self, pod, container):
        self.note("start", container.name)
        if container.name == "unsafe":
            raise Refusal("somebody is on its CPUs")

    def event(self, kind, pod, container):
        self.note(nri.Event.Name(kind), pod.name, container.name)

    def pod_stopped(self, pod):
        self.note("STOP_POD_SANDBOX", pod.name)

    async def validate(self, request):
        self.note("validate", request.container.name, request.adjust.linux.resources.cpu.cpus)
        return "not like this" if request.container.name == "invalid" else None


def cpus_of(message, cpus):
    message.linux.resources.cpu.cpus = cpus
    return message


class Metrics:
    def __init__(self):
        self.connected = None
        self.reconnects = 0

    def set_nri_connected(self, connected):
        self.connected = connected

    def count_nri_reconnect(self):
        self.reconnects += 1


@pytest.fixture
async def plugin():
    return Plugin()


@pytest.fixture
async def health():
    return Health()


@pytest.fixture
async def metrics():
    return Metrics()


@pytest.fixture
async def connect(short_tmp, plugin, health, metrics):
    """Start the driver's side, which is stopped at the end."""
    tasks = []

    def start(timing=None, path=None, **more):
        path = path or short_tmp / "nri.sock"
        timing = timing or Timing(**FAST)
        plugin.connection = NriConnection(path, plugin, health=health, metrics=metrics, timing=timing, **more)
        tasks.append(asyncio.create_task(plugin.connection.run()))
        return plugin.connection

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def start_runtime(short_tmp):
    """Start a runtime, which is stopped at the end."""
    runtimes = []

    async def start(**more):
        runtime = NriRuntime(short_tmp / "nri.sock", **more)
        await runtime.start()
        await runtime.run_pod(nri.PodSandbox(id="p", name="pod"))
        runtimes.append(runtime)
        return runtime

    yield start
    for runtime in runtimes:
        await runtime.stop()


@pytest.fixture
async def runtime(start_runtime):
    return await start_runtime()


@pytest.fixture
async def until():
    """Let other tasks run until something is so."""

    async def wait(condition):
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110, what is waited for tells nobody
                await asyncio.sleep(0.001)

    return wait


def container(name, identity="c"):
    return nri.Container(id=identity, pod_sandbox_id="p", name=name)


class TestHandshake:
    async def test_the_driver_registers_is_configured_and_synchronised(self, connect, runtime, plugin, health, metrics):
        connection = connect()
        peer = await runtime.synchronized()

        registration = peer.registration
        assert (registration.plugin_name, registration.plugin_idx) == ("dra.cpu", "00")
        assert registration.NRI_version
        assert peer.events == 0x27DA
        await plugin.wait_for("synchronized")
        assert plugin.calls == [("connected",), ("synchronize", ["p"], []), ("synchronized",)]
        assert plugin.runtime == ("containerd", "v2.4.2", "v0.12.3", 2.0)
        assert (connection.connected, connection.synchronized) == (True, True)
        assert (health.missing(), metrics.connected, metrics.reconnects) == ({}, True, 0)

    async def test_a_synchronisation_in_parts_is_joined(self, connect, start_runtime, plugin):
        runtime = await start_runtime(most_per_part=3)
        for number in range(7):
            await runtime.run_pod(nri.PodSandbox(id=f"p{number}"))
        for number in range(11):
            runtime.containers[f"c{number}"] = nri.Container(
                id=f"c{number}", pod_sandbox_id="p1", state=nri.CONTAINER_RUNNING
            )
        plugin.updates = [cpus_of(nri.ContainerUpdate(container_id="c9"), "4-5")]

        connect()
        await runtime.synchronized()

        pods, containers = ["p", *(f"p{n}" for n in range(7))], [f"c{n}" for n in range(11)]
        assert [call for call in plugin.calls if call[0] == "synchronize"] == [("synchronize", pods, containers)]
        assert runtime.cpusets == {"c9": "4-5"}

    @pytest.mark.parametrize(
        ("says", "known", "masks"),
        [
            ({"version": "v1.7.25", "nri_version": ""}, 0x07FF, [0x07FA]),
            ({"version": "v2.2.1", "nri_version": ""}, 0x3FFF, [0x27FA]),
            ({"name": "other", "version": "1", "nri_version": ""}, 0x07FF, [0x27FA, 0x07FA]),
            ({"name": "other", "version": "1", "nri_version": ""}, 0x3FFF, [0x27FA]),
            ({"nri_version": "v0.99.0"}, 0x07FF, [0x27DA, 0x07DA]),
        ],
    )
    async def test_a_runtime_that_refuses_events_is_asked_for_fewer(
        self, connect, start_runtime, says, known, masks, caplog
    ):
        caplog.set_level(logging.INFO, "driver")
        runtime = await start_runtime(known_events=known, **says)
        connect()
        assert (await runtime.synchronized()).events == masks[-1]
        asked = [
            int(record.fields["events"], 16) for record in caplog.records if "events" in getattr(record, "fields", {})
        ]
        assert asked == masks
        assert runtime.connections == len(masks)

    async def test_a_connection_lost_while_synchronising_says_nothing_about_events(
        self, connect, start_runtime, plugin
    ):
        runtime = await start_runtime(request_timeout_s=0.2)
        plugin.synchronize = lambda *_: plugin.proceed.wait()
        connect()
        await plugin.wait_for("disconnected")
        plugin.synchronize = Plugin.synchronize.__get__(plugin)
        assert (await runtime.synchronized()).events == 0x27DA

    async def test_a_refused_registration_is_tried_again_on_a_new_connection(self, connect, runtime, until, health):
        connect(index="5")
        await until(lambda: runtime.connections >= 3)
        (reason,) = health.missing().values()
        assert "nri.sock: the driver could not be registered with the runtime: RegisterPlugin: invalid" in reason


class TestEvents:
    @pytest.mark.parametrize("says", [{}, {"nri_version": "", "version": "v2.1.0", "known_events": 0x07FF}])
    async def test_every_event_arrives_by_its_own_call_or_by_a_common_one(self, connect, start_runtime, plugin, says):
        runtime = await start_runtime(**says)
        connect()
        await runtime.synchronized()
        plugin.calls.clear()

        await runtime.create_container(container("main"))
        await runtime.start_container("c")
        await runtime.update_container("c", nri.LinuxResources(cpu=nri.LinuxCPU(cpus="0-7")))
        assert runtime.cpusets == {"c": "1"}
        await runtime.remove_container("c")

        validated = [] if says else [("validate", "main", "1")]
        told = [("start", "main")] if says else []
        assert plugin.calls == [
            ("create", "pod", "main"),
            *validated,
            ("POST_CREATE_CONTAINER", "pod", "main"),
            *told,
            ("POST_START_CONTAINER", "pod", "main"),
            ("update", "main", "0-7"),
            ("POST_UPDATE_CONTAINER", "pod", "main"),
            ("stop", "main"),
            ("REMOVE_CONTAINER", "pod", "main"),
        ]

    @pytest.mark.parametrize("nri_version", ["", "v0.12.0"])
    async def test_a_start_can_be_refused_by_its_own_call_and_by_a_common_one(
        self, connect, start_runtime, plugin, nri_version
    ):
        runtime = await start_runtime(version="v2.3.7", nri_version=nri_version)
        connect()
        await runtime.synchronized()
        await runtime.create_container(container("unsafe"))
        with pytest.raises(RefusedError, match=r"failed to start container: .*somebody is on its CPUs"):
            await runtime.start_container("c")
        assert ("stop", "unsafe") in plugin.calls
        assert "c" not in runtime.cpusets

    async def test_whatever_the_runtime_may_call_is_implemented(self, connect, runtime):
        connect()
        peer = await runtime.synchronized()
        methods = nri.DESCRIPTOR.services_by_name["Plugin"].methods
        assert len(methods) == 18
        for method in methods:
            # A synchronisation goes last but for the end; Configure and the like are fine a second time.
            if method.name != "Shutdown":
                await peer.call(method.name, nri.Empty(), nri.Empty)
        for event in range(-1, 20):
            await peer.call("StateChange", nri.StateChangeEvent(event=event), nri.Empty)
        with pytest.raises(NriError) as caught:
            await peer.call("Missing", nri.Empty(), nri.Empty)
        assert caught.value.code == Code.UNIMPLEMENTED

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("refuse", "CreateContainer: claim default/a is not prepared here: wait for it"),
            ("bug", "CreateContainer: internal error of dra.cpu: KeyError: 'forgotten'"),
            ("push", "no container until the request that is being handled is answered"),
            ("invalid", "reason: not like this"),
        ],
    )
    async def test_a_container_that_the_plugin_will_not_have_is_not_created(
        self, connect, runtime, plugin, name, text, caplog
    ):
        caplog.set_level(logging.CRITICAL)
        connect()
        await runtime.synchronized()
        with pytest.raises(RefusedError) as caught:
            await runtime.create_container(container(name))
        assert text in str(caught.value)
        assert plugin.calls[-2:] == [("stop", name), ("REMOVE_CONTAINER", "pod", name)]
        assert not runtime.containers
        await runtime.create_container(container("main"))
        assert runtime.connections == 1

    async def test_a_plugin_that_would_be_late_fails_the_container_and_stays(self, connect, start_runtime, plugin):
        runtime = await start_runtime(request_timeout_s=1.6, known_events=0x07FF, nri_version="", version="v1.7.1")
        connect(Timing(**FAST, margin_s=1.5))
        await runtime.synchronized()
        with pytest.raises(RefusedError, match=r"dra\.cpu has no answer after 0\.8 s; try again"):
            await runtime.create_container(container("wait"))
        assert plugin.running == 0
        await runtime.create_container(container("main"))
        assert runtime.connections == 1

    async def test_updates_of_other_containers_are_passed_on(self, connect, runtime):
        connect()
        await runtime.synchronized()
        for identity in ("c", "other"):
            await runtime.create_container(container("main", identity))
            await runtime.start_container(identity)
        await runtime.create_container(container("others", "d"))
        await runtime.stop_container("d")
        assert runtime.cpusets == {"c": "7", "other": "5"}


class TestUpdates:
    async def test_an_update_is_carried_out(self, connect, runtime):
        connection = connect()
        await runtime.synchronized()
        await runtime.create_container(container("main"))
        await runtime.start_container("c")
        await connection.update_containers([cpus_of(nri.ContainerUpdate(container_id="c"), "2-3")], 5)
        assert runtime.cpusets == {"c": "2-3"}

    async def test_an_update_that_fails(self, connect, runtime):
        connection = connect()
        await runtime.synchronized()
        await runtime.create_container(container("main"))
        runtime.broken.add("c")
        with pytest.raises(NriError, match=r"^UpdateContainers: NRI update of some containers failed$"):
            await connection.update_containers([cpus_of(nri.ContainerUpdate(container_id="c"), "2-3")], 5)

    async def test_an_update_waits_for_the_event_that_is_being_handled(self, connect, runtime, plugin):
        connection = connect()
        await runtime.synchronized()
        await runtime.create_container(container("main"))
        creating = asyncio.create_task(runtime.create_container(container("wait", "d")))
        await plugin.wait_for("create", "pod", "wait")
        pushing = asyncio.create_task(connection.update_containers([], 5))
        with pytest.raises(NriError, match=r"no answer within 0\.05 s") as caught:
            await connection.update_containers([], 0.05)
        assert caught.value.code == Code.DEADLINE_EXCEEDED
        assert not pushing.done()
        plugin.proceed.set()
        await creating
        await pushing

    async def test_without_a_runtime_nothing_can_be_updated(self, connect, runtime, plugin):
        connection = connect()
        with pytest.raises(NriError, match=r"^no connection to the runtime at .*nri\.sock$") as caught:
            await connection.update_containers([], 5)
        assert caught.value.code == Code.UNAVAILABLE
        peer = await runtime.synchronized()
        async with runtime.lock:
            pushing = asyncio.create_task(connection.update_containers([], 5))
            await asyncio.sleep(0.01)
            peer.close("broken")
            with pytest.raises(NriError, match=r"^UpdateContainers: the other side closed") as caught:
                await pushing
        assert caught.value.code == Code.UNAVAILABLE


class TestReconnecting:
    async def test_a_lost_connection_is_made_again(self, connect, runtime, plugin, metrics, health):
        connection = connect()
        for number in range(3):
            peer = await runtime.synchronized()
            await plugin.wait_for("synchronized", times=number + 1)
            assert (metrics.reconnects, metrics.connected, health.missing()) == (number, True, {})
            peer.close("broken")
            await plugin.wait_for("disconnected", times=number + 1)
            assert (connection.connected, connection.synchronized, metrics.connected) == (False, False, False)
        assert plugin.reason == "the other side closed the connection"
        assert plugin.calls == 3 * [
            ("connected",),
            ("synchronize", ["p"], []),
            ("synchronized",),
            ("disconnected",),
        ]

    async def test_a_new_socket_is_connected_to_at_once(self, connect, runtime, plugin, health):
        connect(Timing(first_retry_s=3600, longest_retry_s=3600))
        await runtime.synchronized()
        await runtime.stop()
        await plugin.wait_for("disconnected")
        assert "the other side closed the connection" in health.missing()["runtime"]
        await runtime.start()
        async with asyncio.timeout(60):
            await runtime.synchronized()

    async def test_a_socket_that_comes_late_is_connected_to_at_once(
        self, connect, start_runtime, health, until, short_tmp
    ):
        connect(Timing(first_retry_s=3600, longest_retry_s=3600))
        await until(lambda: "No such file" in health.missing().get("runtime", ""))
        assert health.missing()["runtime"] == (
            f"no connection to the runtime at {short_tmp}/nri.sock: No such file or directory"
        )
        runtime = await start_runtime()
        async with asyncio.timeout(60):
            await runtime.synchronized()

    async def test_handlers_end_before_the_plugin_hears_of_the_end(self, connect, runtime, plugin):
        connect()
        peer = await runtime.synchronized()
        creating = asyncio.create_task(runtime.create_container(container("wait")))
        await plugin.wait_for("create", "pod", "wait")
        assert plugin.running == 1
        peer.close("broken")
        await plugin.wait_for("disconnected")
        with pytest.raises(RefusedError):
            await creating

    async def test_a_runtime_that_shuts_the_driver_down_is_answered(self, connect, runtime, plugin):
        connect()
        peer = await runtime.synchronized()
        await peer.call("Shutdown", nri.Empty(), nri.Empty)
        await plugin.wait_for("disconnected")
        assert plugin.reason == "the runtime has shut the driver down"
        await plugin.wait_for("synchronized", times=2)

    async def test_a_synchronisation_that_fails_is_the_reason(self, connect, runtime, plugin, health, until, caplog):
        caplog.set_level(logging.CRITICAL)

        async def fail(*_):
            raise KeyError("forgotten")

        plugin.synchronize = fail
        connect()
        await until(lambda: "Synchronize failed: Synchronize: internal error of dra.cpu" in str(health.missing()))
        assert plugin.reason.endswith("KeyError: 'forgotten'")
        plugin.synchronize = Plugin.synchronize.__get__(plugin)
        assert (await runtime.synchronized()).events == 0x27DA

    async def test_a_synchronisation_that_fails_late_each_time_is_tried_ever_more_seldom(
        self, connect, runtime, plugin, until, monkeypatch
    ):
        begun = []

        def counted(*range_s):
            begun.append(range_s)
            return delays(*range_s)

        async def fail_late(*_):
            await asyncio.sleep(0.05)
            raise NriError(Code.RESOURCE_EXHAUSTED, "too much")

        monkeypatch.setattr("driver.nri.connection.delays", counted)
        plugin.synchronize = fail_late
        connect(Timing(first_retry_s=0.01, longest_retry_s=0.02))
        await until(lambda: plugin.calls.count(("disconnected",)) >= 4)
        assert len(begun) == 1

    async def test_a_driver_that_stops_says_so_to_the_plugin(
        self, connect, runtime, plugin, short_tmp, health, metrics
    ):
        connection = NriConnection(short_tmp / "nri.sock", plugin, health=health, metrics=metrics)
        running = asyncio.create_task(connection.run())
        await plugin.wait_for("synchronized")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert plugin.calls[-1] == ("disconnected",)
        assert plugin.reason == "the driver is stopping"
        assert not connection.connected

    @pytest.mark.parametrize("method", ["connected", "synchronized", "disconnected"])
    async def test_a_bug_in_the_plugin_does_not_end_it(self, connect, runtime, plugin, method, caplog):
        caplog.set_level(logging.CRITICAL)
        working = getattr(plugin, method)

        def fail(*_):
            setattr(plugin, method, working)
            plugin.note("failed")
            raise KeyError("forgotten")

        setattr(plugin, method, fail)
        connect()
        peer = await runtime.synchronized()
        peer.close("broken")
        await plugin.wait_for("failed")
        await runtime.synchronized()

    async def test_a_place_that_is_no_socket(self, connect, health, until, short_tmp):
        path = short_tmp / "file"
        path.write_text("")
        connect(path=path)
        await until(lambda: "Connection refused" in health.missing().get("runtime", ""))

    async def test_a_path_that_is_too_long(self, plugin, health, metrics):
        with pytest.raises(ConfigError, match="has 109 bytes"):
            NriConnection("/" + "x" * 108, plugin, health=health, metrics=metrics)


@pytest.fixture
async def raw(short_tmp):
    async with wire.RawRuntime(short_tmp / "nri.sock") as raw:
        yield raw


def to_plugin(*messages):
    return b"".join(wire.frame(wire.PLUGIN, message) for message in messages)


REGISTERED = wire.frame(wire.RUNTIME, wire.response(1))
CONFIGURE = wire.request(
    1, "Configure", nri.ConfigureRequest(runtime_name="raw", NRI_version="v0.12.3", request_timeout=2000)
)
SYNCHRONIZE = wire.request(3, "Synchronize")


class TestOddRuntimes:
    async def test_configured_before_the_registration_is_answered(self, connect, raw, plugin):
        connect()
        reader, writer = await raw.accept()
        connection, stream, _, request = await wire.read_message(reader)
        assert (connection, stream, request.method) == (wire.RUNTIME, 1, "RegisterPlugin")
        writer.write(to_plugin(CONFIGURE))
        connection, stream, _, answer = await wire.read_message(reader)
        assert (connection, stream) == (wire.PLUGIN, 1)
        assert nri.ConfigureResponse.FromString(answer.payload).events == 0x27DA
        writer.write(to_plugin(SYNCHRONIZE))
        await wire.read_message(reader)
        await plugin.wait_for("synchronized")
        writer.write(REGISTERED + to_plugin(wire.request(5, "StopContainer")))
        assert (await wire.read_message(reader))[:2] == (wire.PLUGIN, 5)
        writer.close()

    async def test_nothing_is_decided_before_the_containers_are_known(self, connect, raw, plugin):
        connect()
        reader, writer = await raw.accept()
        await wire.read_message(reader)
        early = ["CreateContainer", "ValidateContainerAdjustment", "StateChange", "PostStartContainer"]
        for number, method in enumerate(early):
            writer.write(to_plugin(wire.request(2 * number + 1, method)))
            _, _, _, answer = await wire.read_message(reader)
            assert answer.status.code == Code.FAILED_PRECONDITION
        writer.write(to_plugin(wire.request(101, "Configure"), wire.request(103, "CreateContainer")))
        answers = {stream: answer for _, stream, _, answer in [await wire.read_message(reader) for _ in range(2)]}
        assert answers[101].status.code == 0
        assert answers[103].status.code == Code.FAILED_PRECONDITION
        assert plugin.calls == [("connected",)]

    async def test_a_runtime_that_synchronises_first_is_left(self, connect, raw, plugin, health):
        connect()
        reader, writer = await raw.accept()
        await wire.read_message(reader)
        writer.write(to_plugin(SYNCHRONIZE))
        assert (await wire.read_message(reader))[3].status.code == Code.FAILED_PRECONDITION
        await raw.accept()
        assert "Synchronize failed: the driver is not configured" in health.missing()["runtime"]
        assert plugin.calls == []

    @pytest.mark.parametrize(
        ("timing", "sent", "reason"),
        [
            (
                {"register_s": 0.05},
                b"",
                "not be registered with the runtime: RegisterPlugin: no answer within 0.05 s",
            ),
            ({"configure_s": 0.05}, REGISTERED, "did not configure the driver after its registration within 0.05 s"),
            (
                {"synchronize_s": 0.05},
                REGISTERED + to_plugin(CONFIGURE),
                "did not synchronise the driver after its configuration within 0.05 s",
            ),
            (
                {"synchronize_s": 0.05},
                REGISTERED + to_plugin(CONFIGURE, wire.request(3, "Synchronize", nri.SynchronizeRequest(more=True))),
                "did not synchronise the driver after its configuration within 0.05 s",
            ),
        ],
    )
    async def test_a_runtime_that_stops_half_way_is_left(self, connect, raw, health, until, timing, sent, reason):
        connect(Timing(**FAST, **timing))
        for _ in range(2):
            reader, writer = await raw.accept()
            writer.write(sent)
            async with asyncio.timeout(60):
                assert await reader.read()
            writer.close()
        await until(lambda: reason in health.missing()["runtime"])

    async def test_a_connection_closed_at_once(self, connect, raw):
        connect()
        for _ in range(5):
            _, writer = await raw.accept()
            writer.close()

    @pytest.mark.parametrize(
        "sent",
        [
            b"\0",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 100,
            wire.frame(1, b"", 2**32 - 1),
            wire.frame(5, b"", 5 * wire.MIB),
            wire.frame(1, b"x" * 9),
            to_plugin(wire.header(2**32 - 1, 1)),
            to_plugin(wire.message(2)) * 3,
            to_plugin(wire.message(1, b"\xff")),
            to_plugin(wire.request(1, "Configure", b"\xff")),
            to_plugin(wire.request(1, "Nothing")),
            wire.frame(wire.RUNTIME, wire.message(1, b"\xff", wire.RESPONSE)),
            wire.frame(wire.RUNTIME, wire.message(1, b"", wire.DATA)),
            wire.frame(wire.RUNTIME, wire.response(1, code=2, text="no")),
            wire.frame(wire.RUNTIME, CONFIGURE) + to_plugin(wire.response(1)),
        ],
    )
    async def test_after_whatever_was_sent_the_driver_connects_again(self, connect, raw, sent, caplog):
        caplog.set_level(logging.ERROR, "driver")
        connect()
        reader, writer = await raw.accept()
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()
        _, writer = await raw.accept()
        writer.close()
        assert not caplog.records

    async def test_answers_to_updates_in_any_order(self, connect, raw, plugin):
        connection = connect()
        reader, writer = await raw.accept()
        await wire.read_message(reader)
        writer.write(REGISTERED + to_plugin(CONFIGURE, SYNCHRONIZE))
        await plugin.wait_for("synchronized")
        await wire.read_message(reader)
        await wire.read_message(reader)
        pushes = [asyncio.create_task(connection.update_containers([], 5)) for _ in range(4)]
        streams = [(await wire.read_message(reader))[1] for _ in pushes]
        assert streams == [3, 5, 7, 9]
        failed = nri.UpdateContainersResponse(failed=[nri.ContainerUpdate(container_id="c\n1")])
        writer.write(
            b"".join(
                wire.frame(wire.RUNTIME, each)
                for each in (
                    wire.response(9, failed.SerializeToString()),
                    wire.response(5),
                    wire.response(77),
                    wire.response(7, code=13, text="no"),
                    wire.response(3),
                )
            )
        )
        results = await asyncio.gather(*pushes, return_exceptions=True)
        assert results[:2] == [None, None]
        assert [str(each) for each in results[2:]] == [
            "UpdateContainers: no",
            r"UpdateContainers: the runtime could not update c\n1",
        ]
        writer.close()

    async def test_a_runtime_that_asks_for_unreasonable_timeouts(self, connect, raw, plugin):
        connect()
        for asked, used in ((-1, 2.0), (0, 2.0), (1, 0.01), (500, 0.5), (2**63 - 1, 3600.0)):
            reader, writer = await raw.accept()
            configure = wire.request(1, "Configure", nri.ConfigureRequest(request_timeout=asked))
            writer.write(to_plugin(configure))
            await wire.read_message(reader)
            await wire.read_message(reader)
            assert plugin.runtime[3] == used
            writer.close()
