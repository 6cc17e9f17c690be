# SPDX-License-Identifier: Apache-2.0
"""Calls in both directions, against hand-made bytes: what comes out of order, late, broken, huge or twice."""

from __future__ import annotations

import asyncio
import itertools
import logging
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nri_wire as wire
from driver.apis import nri_v1alpha1_pb2 as nri
from driver.apis import ttrpc_pb2
from driver.nri.client import Client
from driver.nri.errors import Code, NriError, Refusal
from driver.nri.server import Method, Server
from driver.nri.ttrpc import MOST_DATA_BYTES, Frame, MessageReader


class Wire:
    """A trunk of one connection that remembers what was written."""

    def __init__(self):
        self.sent = b""
        self.closed = None
        self.flow = asyncio.Event()
        self.flow.set()

    def write(self, connection, header, data):
        assert connection == 7
        assert len(header) == 10
        self.sent += header + data

    async def flushed(self):
        await self.flow.wait()

    def close(self, reason):
        self.closed = reason

    def messages(self):
        found, rest = wire.messages(self.sent)
        assert rest == b""
        return found

    def responses(self):
        """Return stream id, status code, status message and payload of each answer."""
        found = []
        for stream, kind, flags, data in self.messages():
            assert (kind, flags) == (wire.RESPONSE, 0)
            answer = ttrpc_pb2.Response.FromString(data)
            found.append((stream, answer.status.code, answer.status.message, answer.payload))
        return found

    def requests(self):
        """Return stream id and content of each request."""
        found = []
        for stream, kind, flags, data in self.messages():
            assert (kind, flags) == (wire.REQUEST, 0)
            found.append((stream, ttrpc_pb2.Request.FromString(data)))
        return found


MESSAGES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 255), st.binary(max_size=50)), max_size=8
)


class TestReader:
    @given(MESSAGES, st.lists(st.integers(0, 1000), max_size=12))
    def test_messages_come_out_wherever_the_stream_was_cut(self, sent, places):
        reader = MessageReader()
        stream = b"".join(wire.message(number, data, kind, flags) for number, kind, flags, data in sent)
        edges = sorted([0, len(stream), *(place % (len(stream) + 1) for place in places)])

        found = []
        for start, end in itertools.pairwise(edges):
            found += reader.feed(memoryview(stream[start:end]))

        assert [(each.stream, each.kind, each.flags, each.data) for each in found] == sent

    def test_a_message_comes_out_at_its_last_byte(self):
        reader = MessageReader()
        stream = wire.message(3, b"data") + wire.message(5)
        ends = [
            (place, frame.stream)
            for place, byte in enumerate(stream, 1)
            for frame in reader.feed(memoryview(bytes([byte])))
        ]
        assert ends == [(14, 3), (24, 5)]

    def test_what_is_too_large_is_dropped_and_the_next_message_is_read(self):
        reader = MessageReader()
        stream = wire.message(1, b"x" * MOST_DATA_BYTES) + wire.message(3, b"x" * (MOST_DATA_BYTES + 1))

        whole, large, after = reader.feed(memoryview(stream + wire.message(5, b"y")))

        assert (whole.stream, len(whole.data)) == (1, MOST_DATA_BYTES)
        assert large == Frame(stream=3, kind=1, flags=0, data=None)
        assert after == Frame(stream=5, kind=1, flags=0, data=b"y")

    def test_nothing_is_kept_of_what_is_too_large(self):
        reader = MessageReader()
        chunk = memoryview(b"x" * (64 << 10))
        tracemalloc.start()
        try:
            assert list(reader.feed(memoryview(wire.header(2**32 - 1, 1)))) == []
            for _ in range(4000):
                assert list(reader.feed(chunk)) == []
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 20_000

    def test_nothing_is_set_aside_for_what_is_only_announced(self):
        reader = MessageReader()
        tracemalloc.start()
        try:
            list(reader.feed(memoryview(wire.header(MOST_DATA_BYTES, 1) + b"first bytes")))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 20_000


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def trunk():
    return Wire()


class TestClient:
    @pytest.fixture
    async def client(self, trunk):
        return Client(trunk, 7)

    @staticmethod
    def call(client, name="", timeout_s=10.0):
        request = nri.RegisterPluginRequest(plugin_name=name)
        return asyncio.create_task(client.call("a.Service", "Do", request, nri.PluginInstance, timeout_s=timeout_s))

    @staticmethod
    def answer(stream, name):
        return memoryview(wire.response(stream, nri.PluginInstance(name=name).SerializeToString()))

    async def test_a_call_and_its_answer(self, client, trunk):
        calling = self.call(client, "me", timeout_s=1.5)
        await settle()

        ((stream, request),) = trunk.requests()
        assert (stream, request.service, request.method) == (1, "a.Service", "Do")
        assert request.timeout_nano == 1_500_000_000
        assert nri.RegisterPluginRequest.FromString(request.payload).plugin_name == "me"

        await client.receive(self.answer(1, "you"))
        assert (await calling).name == "you"

    async def test_ids_are_odd_and_ascend_and_answers_may_come_in_any_order(self, client, trunk):
        calls = [self.call(client, str(number)) for number in range(5)]
        await settle()

        requests = trunk.requests()
        assert [stream for stream, _ in requests] == [1, 3, 5, 7, 9]
        names = {stream: nri.RegisterPluginRequest.FromString(each.payload).plugin_name for stream, each in requests}
        for stream in (5, 1, 9, 7, 3):
            await client.receive(self.answer(stream, f"to {names[stream]}"))
        assert [(await call).name for call in calls] == [f"to {number}" for number in range(5)]

    async def test_an_answer_cut_anywhere(self, client):
        calling = self.call(client)
        await settle()
        for byte in bytes(self.answer(1, "you")):
            assert not calling.done()
            await client.receive(memoryview(bytes([byte])))
        assert (await calling).name == "you"

    async def test_the_other_sides_error(self, client):
        calling = self.call(client)
        await settle()
        await client.receive(memoryview(wire.response(1, code=9, text="not\nnow")))
        with pytest.raises(NriError, match=r"^Do: not\\nnow$") as caught:
            await calling
        assert caught.value.code == Code.FAILED_PRECONDITION

    @pytest.mark.parametrize(
        ("sent", "code", "text"),
        [
            (wire.message(1, b"", wire.DATA), Code.INTERNAL, "kind 3 instead of an answer"),
            (wire.message(1, b"", wire.REQUEST), Code.INTERNAL, "kind 1 instead of an answer"),
            (wire.message(1, b"\xff\xff", wire.RESPONSE), Code.INTERNAL, "not a ttrpc response"),
            (wire.response(1, b"\xff\xff"), Code.INTERNAL, "not a PluginInstance"),
            (wire.message(1, bytes(MOST_DATA_BYTES + 1), wire.RESPONSE), Code.RESOURCE_EXHAUSTED, "more than 4194304"),
        ],
    )
    async def test_answers_that_are_none(self, client, sent, code, text):
        calling = self.call(client)
        await settle()
        await client.receive(memoryview(sent))
        with pytest.raises(NriError, match=f"^Do: .*{text}") as caught:
            await calling
        assert caught.value.code == code

        again = self.call(client)
        await settle()
        await client.receive(self.answer(3, "fine"))
        assert (await again).name == "fine"

    @pytest.mark.parametrize("stream", [0, 2, 3, 2**32 - 1])
    async def test_answers_to_nobody_are_dropped(self, client, stream):
        calling = self.call(client)
        await settle()
        await client.receive(self.answer(stream, "stranger"))
        await client.receive(self.answer(1, "you"))
        await client.receive(self.answer(1, "again"))
        assert (await calling).name == "you"

    async def test_no_answer_in_time_and_a_late_one(self, client):
        with pytest.raises(NriError, match=r"^Do: no answer within 0\.01 s$") as caught:
            await self.call(client, timeout_s=0.01)
        assert caught.value.code == Code.DEADLINE_EXCEEDED
        await client.receive(self.answer(1, "late"))
        calling = self.call(client)
        await settle()
        await client.receive(self.answer(3, "you"))
        assert (await calling).name == "you"

    async def test_a_side_that_does_not_read_is_not_waited_for_either(self, client, trunk):
        trunk.flow.clear()
        with pytest.raises(NriError, match="no answer within"):
            await self.call(client, timeout_s=0.01)

    async def test_the_end_of_the_connection_fails_all_calls(self, client, trunk):
        calls = [self.call(client) for _ in range(3)]
        await settle()
        client.close("it is over")
        calls.append(self.call(client))
        for call in calls:
            with pytest.raises(NriError, match=r"^Do: it is over$") as caught:
                await call
            assert caught.value.code == Code.UNAVAILABLE
        assert len(trunk.requests()) == 3

    async def test_a_request_that_is_too_large_is_not_sent(self, client, trunk):
        with pytest.raises(NriError, match=r"the request has 4194.* bytes, at most 4194304") as caught:
            await self.call(client, "x" * MOST_DATA_BYTES)
        assert caught.value.code == Code.RESOURCE_EXHAUSTED
        assert trunk.sent == b""

    async def test_a_caller_that_is_cancelled_leaves_a_whole_request(self, client, trunk):
        calling = self.call(client, "me")
        await settle()
        calling.cancel()
        await asyncio.wait([calling])
        assert len(trunk.requests()) == 1
        await client.receive(self.answer(1, "nobody"))

    async def test_when_all_ids_are_used_up_the_connection_is_given_up(self, client, trunk):
        client._next_stream = 2**32 - 1
        calling = self.call(client)
        await settle()
        with pytest.raises(NriError, match="all stream ids are used up"):
            await self.call(client)
        assert trunk.closed == "all stream ids are used up"
        await client.receive(self.answer(2**32 - 1, "last"))
        assert (await calling).name == "last"


class Handlers:
    """Methods whose handlers do what the request's name says."""

    def __init__(self):
        self.proceed = asyncio.Event()
        self.running = 0
        self.cancelled = 0

    async def do(self, request):
        self.running += 1
        try:
            return await self._do(request.plugin_name)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _do(self, name):
        if name == "wait":
            await self.proceed.wait()
        elif name == "hang":
            await asyncio.get_running_loop().create_future()
        elif name == "stubborn":
            while True:
                try:
                    await self.proceed.wait()
                except asyncio.CancelledError:
                    continue
                break
        elif name == "refuse":
            raise Refusal("claim a/b is\nnot prepared \udcff")
        elif name == "success with an error":
            raise NriError(0, "")
        elif name == "endless":
            raise Refusal("ö" * 100_000)
        elif name == "bug":
            raise KeyError("forgotten")
        elif name == "cancelled within":
            raise asyncio.CancelledError
        elif name == "huge":
            return nri.PluginInstance(name="x" * MOST_DATA_BYTES)
        return nri.PluginInstance(name=f"did {name}")


class TestServer:
    @pytest.fixture
    async def handlers(self):
        return Handlers()

    @pytest.fixture
    async def told(self):
        return []

    @pytest.fixture
    async def server(self, trunk, handlers, told):
        server = Server(
            trunk,
            7,
            "a.Service",
            {"Do": Method(request=nri.RegisterPluginRequest, answer=handlers.do)},
            answered=lambda method, error: told.append((method, error)),
            timeout_s=10.0,
            margin_s=0.25,
        )
        yield server
        handlers.proceed.set()
        await server.close()

    @staticmethod
    async def ask(server, stream, name="it", method="Do", **more):
        payload = nri.RegisterPluginRequest(plugin_name=name)
        await server.receive(memoryview(wire.request(stream, method, payload, **{"service": "a.Service", **more})))

    async def test_a_call_is_answered(self, server, trunk, told):
        await self.ask(server, 1)
        await settle()
        ((stream, code, text, payload),) = trunk.responses()
        assert (stream, code, text) == (1, 0, "")
        assert nri.PluginInstance.FromString(payload).name == "did it"
        assert told == [("Do", None)]

    async def test_an_empty_answer_has_no_data(self, trunk):
        async def nothing(_):
            return nri.Empty()

        server = Server(
            trunk,
            7,
            "s",
            {"N": Method(request=nri.Empty, answer=nothing)},
            answered=lambda *_: None,
            timeout_s=1,
            margin_s=0,
        )
        await server.receive(memoryview(wire.request(1, "N", service="s")))
        await settle()
        assert trunk.sent == wire.header(0, 1, wire.RESPONSE)

    async def test_calls_cut_anywhere_and_merged(self, server, trunk):
        stream = b"".join(wire.request(number, "Do", service="a.Service") for number in (1, 3, 5))
        for byte in stream:
            await server.receive(memoryview(bytes([byte])))
        await server.receive(memoryview(b"".join(wire.request(number, "Do", service="a.Service") for number in (7, 9))))
        await settle()
        assert [(stream, code) for stream, code, *_ in trunk.responses()] == [(1, 0), (3, 0), (5, 0), (7, 0), (9, 0)]

    async def test_one_call_does_not_wait_for_another(self, server, trunk, handlers):
        await self.ask(server, 1, "wait")
        await self.ask(server, 3)
        await settle()
        assert [stream for stream, *_ in trunk.responses()] == [3]
        handlers.proceed.set()
        await settle()
        assert [stream for stream, *_ in trunk.responses()] == [3, 1]

    @pytest.mark.parametrize(
        ("name", "code", "text"),
        [
            ("refuse", Code.FAILED_PRECONDITION, "claim a/b is\\nnot prepared \\udcff"),
            ("success with an error", Code.UNKNOWN, "no reason given"),
            ("endless", Code.FAILED_PRECONDITION, "ö" * 1024),
            ("bug", Code.INTERNAL, "Do: internal error of dra.cpu: KeyError: 'forgotten'"),
            ("cancelled within", Code.INTERNAL, "Do was cancelled"),
            (
                "huge",
                Code.RESOURCE_EXHAUSTED,
                "Do: the answer of dra.cpu has 4194314 bytes, at most 4194304 can be sent",
            ),
        ],
    )
    async def test_whatever_a_handler_does_there_is_an_answer(self, server, trunk, told, caplog, name, code, text):
        caplog.set_level(logging.CRITICAL)
        await self.ask(server, 1, name)
        await settle()
        assert trunk.responses() == [(1, code, text, b"")]
        assert told == [("Do", text)]
        await self.ask(server, 3)
        await settle()
        assert [(stream, code) for stream, code, *_ in trunk.responses()][1:] == [(3, 0)]

    @pytest.mark.parametrize("margin_s", [0.07, 5.0])
    async def test_an_answer_that_would_be_late_is_an_error(self, server, trunk, handlers, told, margin_s):
        server.timeout_s = 0.1
        server._margin_s = margin_s
        await self.ask(server, 1, "hang")
        while not trunk.sent:  # noqa: ASYNC110, the wire tells nobody
            await asyncio.sleep(0.001)
        ((stream, code, text, _),) = trunk.responses()
        assert (stream, code) == (1, Code.DEADLINE_EXCEEDED)
        assert text == f"Do: dra.cpu has no answer after {max(0.1 - margin_s, 0.05):.3g} s; try again"
        assert told == [("Do", text)]
        await settle()
        assert (handlers.running, handlers.cancelled) == (0, 1)

    async def test_a_handler_that_will_not_be_cancelled_is_not_answered_twice(self, server, trunk, handlers):
        server.timeout_s = 0.02
        await self.ask(server, 1, "stubborn")
        while not trunk.sent:  # noqa: ASYNC110, the wire tells nobody
            await asyncio.sleep(0.001)
        handlers.proceed.set()
        await settle()
        assert handlers.running == 0
        assert len(trunk.responses()) == 1

    async def test_a_side_that_reads_late_is_not_answered_twice(self, server, trunk):
        server.timeout_s = 0.02
        trunk.flow.clear()
        await self.ask(server, 1)
        await asyncio.sleep(0.03)
        trunk.flow.set()
        await settle()
        assert [(stream, code) for stream, code, *_ in trunk.responses()] == [(1, 0)]

    @pytest.mark.parametrize(
        ("timeout_s", "timeout_nano", "allowed_s"),
        [
            (2.0, 0, 1.75),
            (2.0, 1_000_000_000, 0.75),
            (2.0, 9_000_000_000, 1.75),
            (2.0, -5, 1.75),
            (2.0, 1, 0.5e-9),
            (0.4, 2_000_000_000, 0.2),
            (2.0, 2**63 - 1, 1.75),
        ],
    )
    async def test_how_long_a_handler_may_take(self, server, timeout_s, timeout_nano, allowed_s):
        server.timeout_s = timeout_s
        await self.ask(server, 1, "wait", timeout_nano=timeout_nano)
        (call,) = server._calls.values()
        assert call.allowed_s == pytest.approx(allowed_s)

    @pytest.mark.parametrize("stream", [0, 2, 2**32 - 2, 5, 3, 1])
    async def test_ids_that_a_client_must_not_use(self, server, trunk, stream):
        await self.ask(server, 5)
        await self.ask(server, stream)
        await self.ask(server, 7)
        await settle()
        bad, *good = trunk.responses()
        assert bad[:2] == (stream, Code.INVALID_ARGUMENT)
        assert bad[2] == f"stream {stream} is not odd and larger than 5, the last one"
        assert [(number, code) for number, code, *_ in good] == [(5, 0), (7, 0)]

    @pytest.mark.parametrize(
        ("sent", "code", "text"),
        [
            (wire.request(1, "Undo", service="a.Service"), Code.UNIMPLEMENTED, "no method a.Service/Undo"),
            (wire.request(1, "Do", service="a.\nService"), Code.UNIMPLEMENTED, r"no method a.\nService/Do"),
            (wire.request(1, "Do", b"\xff\xff", service="a.Service"), Code.INVALID_ARGUMENT, "Do: the payload is not"),
            (wire.message(1, b"\xff\xff"), Code.INVALID_ARGUMENT, "not a ttrpc request"),
            (wire.message(1, bytes(MOST_DATA_BYTES + 1)), Code.RESOURCE_EXHAUSTED, "at most 4194304 bytes"),
            (wire.request(1, "Do", service="a.Service", flags=2), Code.INVALID_ARGUMENT, "only unary calls"),
        ],
    )
    async def test_requests_that_are_none(self, server, trunk, sent, code, text):
        await server.receive(memoryview(sent))
        await self.ask(server, 3)
        await settle()
        bad, good = trunk.responses()
        assert bad[:2] == (1, code)
        assert text in bad[2]
        assert good[:2] == (3, 0)

    @pytest.mark.parametrize("kind", [0, wire.RESPONSE, wire.DATA, 77, 255])
    async def test_messages_of_other_kinds_are_ignored(self, server, trunk, kind):
        await server.receive(memoryview(wire.message(1, b"whatever", kind, 5)))
        await self.ask(server, 1)
        await settle()
        assert [(stream, code) for stream, code, *_ in trunk.responses()] == [(1, 0)]

    async def test_flags_of_a_request_without_data(self, server, trunk):
        await self.ask(server, 1, flags=1 | 4)
        await settle()
        assert trunk.responses()[0][1] == 0

    async def test_only_so_many_calls_at_a_time(self, server, trunk, handlers):
        for number in range(70):
            await self.ask(server, 2 * number + 1, "wait")
        await settle()
        assert handlers.running == 64
        assert [(stream, code) for stream, code, *_ in trunk.responses()] == [
            (2 * number + 1, Code.RESOURCE_EXHAUSTED) for number in range(64, 70)
        ]
        handlers.proceed.set()
        await settle()
        await self.ask(server, 1001)
        await settle()
        assert len(trunk.responses()) == 71
        assert trunk.responses()[-1][:2] == (1001, 0)

    async def test_only_so_many_bytes_at_a_time(self, server, trunk, handlers):
        service = {"service": "a.Service"}
        pad = nri.RegisterPluginRequest(plugin_name="wait", NRI_version="x" * (3 * wire.MIB))
        for number in range(8):
            await server.receive(memoryview(wire.request(2 * number + 1, "Do", pad, **service)))
        await settle()
        assert handlers.running == 5
        assert [(stream, code) for stream, code, *_ in trunk.responses()] == [
            (number, Code.RESOURCE_EXHAUSTED) for number in (11, 13, 15)
        ]

    async def test_nothing_more_is_taken_while_refusals_are_not_read(self, server, trunk):
        trunk.flow.clear()
        taking = asyncio.create_task(server.receive(memoryview(wire.message(2) * 100)))
        await settle()
        assert len(trunk.responses()) == 1
        assert not taking.done()
        trunk.flow.set()
        await taking
        assert len(trunk.responses()) == 100

    async def test_the_end_of_the_connection_cancels_handlers_and_waits_for_them(self, server, trunk, handlers):
        await self.ask(server, 1, "hang")
        await self.ask(server, 3, "stubborn")
        await settle()
        closing = asyncio.create_task(server.close())
        await settle()
        assert (handlers.running, closing.done()) == (1, False)
        handlers.proceed.set()
        await closing
        assert handlers.running == 0

    async def test_a_handlers_task_is_known_as_such(self, server, trunk):
        seen = []

        async def look(_):
            seen.append(server.serves(asyncio.current_task()))
            seen.append(await asyncio.create_task(self._look(server)))
            return nri.Empty()

        server._methods = {"Do": Method(request=nri.Empty, answer=look)}
        await self.ask(server, 1)
        await settle()
        assert seen == [True, False]
        assert not server.serves(asyncio.current_task())

    @staticmethod
    async def _look(server):
        return server.serves(asyncio.current_task())

    async def test_a_bug_in_what_hears_of_answers_is_logged(self, server, trunk, caplog):
        def fail(*_):
            raise KeyError("forgotten")

        server._answered = fail
        await self.ask(server, 1)
        await settle()
        assert trunk.responses()[0][1] == 0
        assert "KeyError" in caplog.text

    @given(st.binary(max_size=200))
    async def test_garbage_never_raises(self, data):
        trunk = Wire()
        server = Server(trunk, 7, "s", {}, answered=lambda *_: None, timeout_s=1, margin_s=0)
        await server.receive(memoryview(data))
        await server.receive(memoryview(wire.message(1, data)))
        client = Client(trunk, 7)
        await client.receive(memoryview(data))
        assert all(code for _, code, *_ in trunk.responses())
