# SPDX-License-Identifier: Apache-2.0
"""What containerd really sent, replayed: as it was, cut, merged, cut short, changed; and floods of it.

Whatever comes in, a session ends with a reason and never with an exception, and no process grows without bounds.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nri_wire as wire
from driver.apis import nri_v1alpha1_pb2 as nri
from driver.apis import ttrpc_pb2
from driver.nri.errors import Code, NriError, Refusal
from driver.nri.mux import Trunk
from driver.nri.session import Session, Timing
from driver.nri.subscription import Subscription

CHILD = Path(__file__).parent / "nri_child.py"


class Plugin:
    """Answers as the plugin did when the session was recorded."""

    def __init__(self):
        self.calls = []
        self.most_parts = 100
        self.states = []

    def connected(self, *_):
        assert self.states in ([], ["disconnected"])
        self.states = ["connected"]

    def disconnected(self, reason):
        assert self.states.pop() in ("connected", "synchronized")
        self.states = ["disconnected"]

    async def synchronize(self, pods, containers):
        self.calls.append(("synchronize", len(pods), [each.name for each in containers]))
        return []

    def synchronized(self):
        self.states = ["synchronized"]

    async def create_container(self, pod, container):
        self.calls.append(("create", container.name, [each.name for each in container.CDI_devices]))
        if container.name == "refuse":
            raise Refusal("claim default/x is not prepared on this node:\nask again")
        adjustment = nri.ContainerAdjustment()
        adjustment.linux.resources.cpu.cpus = "1"
        return adjustment, []

    async def update_container(self, pod, container, resources):
        self.calls.append(("update", container.name, resources.cpu.shares.value))
        return [self.update(container.id, "1")]

    async def stop_container(self, pod, container):
        self.calls.append(("stop", container.name))
        return []

    async def start_container(self, pod, container):
        self.calls.append(("start", container.name))

    def synchronize_part(self, pods, containers):
        self.most_parts -= 1
        if self.most_parts < 0:
            raise NriError(Code.RESOURCE_EXHAUSTED, "too much")

    def event(self, kind, pod, container):
        self.calls.append((nri.Event.Name(kind), container.name))

    def pod_stopped(self, pod):
        self.calls.append(("STOP_POD_SANDBOX", pod.name))

    async def validate(self, request):
        owners = next(iter(request.owners.owners.values()), nri.FieldOwners())
        self.calls.append(("validate", request.container.name, dict(owners.simple)))
        return None

    @staticmethod
    def update(identity, cpus):
        update = nri.ContainerUpdate(container_id=identity)
        update.linux.resources.cpu.cpus = cpus
        return update


class Transport:
    """Takes what is written, and tells the reader of the end."""

    def __init__(self, reader):
        self.reader = reader
        self.written = b""
        self.aborted = False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.aborted

    def abort(self):
        if not self.aborted:
            self.aborted = True
            self.reader.feed_eof()

    @property
    def transport(self):
        return self

    async def drain(self):
        await asyncio.sleep(0)

    async def wait_closed(self):
        assert self.aborted


class Replay:
    """A session on a connection that is only memory."""

    def __init__(self):
        self.plugin = Plugin()
        self.reader = asyncio.StreamReader(limit=1 << 16)
        self.transport = Transport(self.reader)
        self.ready = 0
        self.session = Session(
            Trunk(self.reader, self.transport),
            self.plugin,
            name="dra.cpu",
            index="00",
            subscription=Subscription(),
            timing=Timing(),
            ready=self._count,
        )
        self.running = asyncio.create_task(self.session.run())

    def _count(self):
        self.ready += 1

    def feed(self, data):
        if not self.transport.aborted:
            self.reader.feed_data(data)

    async def end(self):
        if not self.transport.aborted:
            self.reader.feed_eof()
            self.transport.aborted = True
        reason = await self.running
        assert isinstance(reason, str)
        assert self.plugin.states in ([], ["disconnected"])
        return reason

    def said(self):
        """Return what the session wrote: connection, stream, kind, and content without the timeout."""
        streams = {wire.PLUGIN: b"", wire.RUNTIME: b""}
        order = []
        for connection, payload in wire.frames(self.transport.written):
            streams[connection] += payload
        for connection, stream in streams.items():
            found, rest = wire.messages(stream)
            assert rest == b""
            order += [(connection, *content(*each)) for each in found]
        return order


def content(stream, kind, flags, data):
    envelope = (ttrpc_pb2.Request if kind == wire.REQUEST else ttrpc_pb2.Response).FromString(data)
    if kind == wire.REQUEST:
        envelope.timeout_nano = 0
    return stream, kind, flags, str(envelope)


def recorded(number, sender):
    return b"".join(data for each, by, data in wire.recording() if (each, by) == (number, sender))


def recorded_plugin(number):
    expected = []
    streams = {wire.PLUGIN: b"", wire.RUNTIME: b""}
    for connection, payload in wire.frames(recorded(number, "plugin")):
        streams[connection] += payload
    for connection, stream in streams.items():
        found, rest = wire.messages(stream)
        assert rest == b""
        expected += [(connection, *content(*each)) for each in found]
    return expected


CLAIM = "dra.k8s.io/cpu=claim-6f1d1a52-8f0c-4f1e-9d53-6a2e0a9f8b11"
FIRST_CALLS = [
    ("synchronize", 0, []),
    ("create", "pinned", [CLAIM]),
    ("validate", "pinned", {21: "00-dra.cpu"}),
    ("POST_CREATE_CONTAINER", "pinned"),
    ("POST_START_CONTAINER", "pinned"),
    ("update", "pinned", 300),
    ("POST_UPDATE_CONTAINER", "pinned"),
    ("create", "refuse", []),
    ("stop", "refuse"),
    ("REMOVE_CONTAINER", "refuse"),
]
SECOND_CALLS = [("synchronize", 1, ["pinned"]), ("stop", "pinned"), ("REMOVE_CONTAINER", "pinned")]


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("number", "calls"), [(1, FIRST_CALLS), (2, SECOND_CALLS)])
async def test_a_recorded_session_is_answered_as_it_was(number, calls):
    replay = Replay()
    updates = [Plugin.update(recorded_container(), cpus) for cpus in ("0", "77")]
    pushes = []
    for each, sender, data in wire.recording():
        if each == number and sender == "runtime":
            replay.feed(data)
        elif each == number and b"UpdateContainers" in data:
            pushes.append(asyncio.create_task(replay.session.update_containers([updates.pop(0)], 2)))
        await settle()

    assert replay.plugin.calls == calls
    assert sorted(replay.said()) == sorted(recorded_plugin(number))
    assert replay.ready == 1
    await replay.end()
    if pushes:
        done, failed = await asyncio.gather(*pushes, return_exceptions=True)
        assert done is None
        assert isinstance(failed, NriError)
        assert str(failed) == "UpdateContainers: NRI update of some containers failed"


def recorded_container():
    for connection, _, kind, _, text in recorded_plugin(1):
        if (connection, kind) == (wire.RUNTIME, wire.REQUEST) and "UpdateContainers" in text:
            return text.split("\\n@")[1].split("\\022")[0]
    raise AssertionError("no container was updated")


@pytest.mark.parametrize(("number", "calls"), [(1, FIRST_CALLS), (2, SECOND_CALLS)])
@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
async def test_a_recorded_session_cut_into_pieces(number, calls, size):
    replay = Replay()
    stream = recorded(number, "runtime")
    for start in range(0, len(stream), size):
        replay.feed(stream[start : start + size])
        await asyncio.sleep(0)
    await settle()

    assert sorted(replay.plugin.calls, key=str) == sorted(calls, key=str)
    answers = [each for each in recorded_plugin(number) if each[0] == wire.PLUGIN]
    assert sorted(each for each in replay.said() if each[0] == wire.PLUGIN) == sorted(answers)
    assert await replay.end() == "the other side closed the connection"


async def test_a_recorded_session_that_ends_anywhere(caplog):
    caplog.set_level(logging.ERROR, "driver")
    stream = recorded(1, "runtime")
    for length in [*range(400), *range(400, len(stream), 41)]:
        replay = Replay()
        replay.feed(stream[:length])
        await replay.end()
    assert not caplog.records
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("times", [2, 3])
async def test_a_session_that_is_repeated_on_the_same_connection_is_refused(times):
    replay = Replay()
    stream = recorded(1, "runtime")
    replay.feed(stream * times)
    await settle()
    await settle()
    assert replay.plugin.calls == FIRST_CALLS
    answers = [text for connection, *_, text in replay.said() if connection == wire.PLUGIN]
    assert sum("is not odd and larger than" in text for text in answers) == (times - 1) * 11
    assert len(answers) == times * 11
    await replay.end()


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "insert", "delete", "swap", "repeat"]),
        st.integers(0, 1 << 16),
        st.one_of(
            st.binary(min_size=1, max_size=12), st.sampled_from([b"\0\0\0\1", b"\xff\xff\xff\xff", b"\0\x40\0\0"])
        ),
    ),
    min_size=1,
    max_size=6,
)


def changed(stream, changes):
    stream = bytearray(stream)
    for kind, place, data in changes:
        place %= len(stream) + 1
        end = place + len(data)
        if kind == "flip":
            stream[place:end] = bytes(a ^ b for a, b in zip(stream[place:end], data, strict=False))
        elif kind == "insert":
            stream[place:place] = data
        elif kind == "delete":
            del stream[place:end]
        elif kind == "swap":
            stream[place:end] = stream[place:end][::-1]
        else:
            stream[place:place] = stream[place : place + 300]
    return bytes(stream)


@settings(max_examples=150)
@given(st.sampled_from([1, 2]), CHANGES, st.integers(20, 5000))
async def test_a_recorded_session_that_was_changed(caplog, number, changes, size):
    caplog.set_level(logging.ERROR, "driver")
    caplog.clear()
    replay = Replay()
    stream = changed(recorded(number, "runtime"), changes)
    for start in range(0, len(stream), size):
        replay.feed(stream[start : start + size])
        await asyncio.sleep(0)
    await settle()
    replay.said()
    await replay.end()
    assert not caplog.records
    assert len(asyncio.all_tasks()) == 1


@settings(max_examples=200)
@given(st.binary(max_size=300))
async def test_payloads_that_are_garbage(data):
    replay = Replay()
    replay.feed(recorded(2, "runtime")[: 126 + 2968])  # up to the synchronisation
    await settle()
    assert replay.ready == 1
    methods = [each.name for each in nri.DESCRIPTOR.services_by_name["Plugin"].methods if each.name != "Shutdown"]
    for number, method in enumerate(methods):
        replay.feed(wire.frame(wire.PLUGIN, wire.request(101 + 2 * number, method, data)))
    await settle()
    answered = [stream for connection, stream, *_ in replay.said() if connection == wire.PLUGIN]
    assert sorted(answered) == [1, 3, *range(101, 101 + 2 * len(methods), 2)]
    await replay.end()


async def test_a_part_that_the_plugin_does_not_take_ends_the_connection_and_says_why():
    replay = Replay()
    replay.plugin.most_parts = 2
    replay.feed(recorded(2, "runtime")[:126])
    part = nri.SynchronizeRequest(pods=[nri.PodSandbox(id="x")], more=True)
    for number in range(4):
        replay.feed(wire.frame(wire.PLUGIN, wire.request(101 + 2 * number, "Synchronize", part)))
        await settle()
    answers = [text for connection, stream, *_, text in replay.said() if connection == wire.PLUGIN and stream > 100]
    assert ["too much" in text for text in answers] == [False, False, True]
    assert replay.plugin.calls == []
    assert await replay.end() == "Synchronize failed: too much"


def memory(child, field):
    """Return a process's memory in MiB: ``VmRSS``, what it has now, or ``VmHWM``, the most it had."""
    for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(field)


def big_container():
    request = nri.CreateContainerRequest()
    request.container.name = "wait"
    request.container.env.extend("A=" + "x" * 60_000 for _ in range(64))
    return request


def floods():
    """Yield for each flood its name, what is sent first, what is sent over and over, and how often."""
    big = b"x" * (4 * wire.MIB)
    yield "strangers", b"", wire.frame(9, big), 16
    yield "one message without end", wire.frame(1, wire.header(2**32 - 1, 1)), wire.frame(1, big), 16
    yield "messages that never end", b"", wire.frame(1, wire.header(4 * wire.MIB, 1) + big[:-1]), 16
    yield "answers to nobody", b"", wire.frame(2, wire.message(2, big[:-10], wire.RESPONSE)), 16
    tiny = b"".join(wire.frame(1, wire.message(2)) for _ in range(2000))
    yield "calls whose answers are not read", b"", tiny, 200


async def test_no_flood_makes_the_driver_grow(short_tmp):
    async with wire.RawRuntime(short_tmp / "nri.sock") as runtime:
        child = await asyncio.create_subprocess_exec(sys.executable, CHILD, short_tmp / "nri.sock")
        try:
            await flood(child, runtime)
        finally:
            child.terminate()
            await child.wait()


async def flood(child, runtime):
    _, writer = await runtime.accept()
    before = memory(child, "VmRSS")
    writer.close()
    for name, first, data, times in floods():
        _, writer = await runtime.accept()
        try:
            writer.write(first)
            for _ in range(times):
                writer.write(data)
                # A driver that takes no more, since its answers are not read, does well too.
                async with asyncio.timeout(0.5):
                    await writer.drain()
        except (TimeoutError, OSError):
            pass
        writer.transport.abort()
        assert memory(child, "VmHWM") - before < 24, name

    reader, writer = await runtime.accept()
    patient = nri.ConfigureRequest(request_timeout=3_600_000)
    writer.write(wire.frame(1, wire.request(1, "Configure", patient)) + wire.frame(1, wire.request(3, "Synchronize")))
    for _ in range(3):  # the registration, and two answers
        await wire.read_message(reader)
    request = big_container()
    for number in range(12):
        writer.write(wire.frame(1, wire.request(2 * number + 5, "CreateContainer", request)))
        await writer.drain()
    refused = [await wire.read_message(reader) for _ in range(8)]
    assert {answer.status.code for *_, answer in refused} == {Code.RESOURCE_EXHAUSTED}
    writer.close()
    await runtime.accept()
    assert memory(child, "VmHWM") - before < 64
    assert child.returncode is None
