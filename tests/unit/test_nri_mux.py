# SPDX-License-Identifier: Apache-2.0
"""Two streams on one socket, however they are cut, and whatever else comes in."""

from __future__ import annotations

import asyncio
import itertools
import socket
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nri_wire as wire
from driver.nri.mux import LONGEST_FRAME, FrameError, FrameReader, Trunk

IDS = st.one_of(st.sampled_from([0, 1, 2, 3]), st.integers(0, 2**32 - 1))
FRAMES = st.lists(st.tuples(IDS, st.binary(max_size=40)), max_size=12)


def streams(pieces):
    found = {}
    for connection, piece in pieces:
        found[connection] = found.get(connection, b"") + bytes(piece)
    return {connection: stream for connection, stream in found.items() if stream}


def cut(data, places):
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(FRAMES, st.lists(st.integers(0, 1000), max_size=20))
def test_streams_come_out_whole_wherever_the_bytes_were_cut(sent, places):
    reader = FrameReader()
    received = b"".join(wire.frame(*each) for each in sent)

    pieces = [each for part in cut(received, places) for each in reader.feed(part)]

    assert streams(pieces) == streams(sent)


def test_streams_come_out_whole_byte_by_byte():
    reader = FrameReader()
    sent = [(1, b"head"), (1, b""), (2, b"x" * 300), (7, b"stranger"), (1, b"tail")]
    received = b"".join(wire.frame(*each) for each in sent)

    pieces = [each for byte in received for each in reader.feed(bytes([byte]))]

    assert streams(pieces) == {1: b"headtail", 2: b"x" * 300, 7: b"stranger"}


@pytest.mark.parametrize("connection", [1, 2, 0, 99])
def test_a_frame_that_nobody_would_send_is_an_error(connection):
    assert list(FrameReader().feed(wire.frame(connection, b"", LONGEST_FRAME))) == []
    with pytest.raises(FrameError, match=f"connection {connection} has {LONGEST_FRAME + 1} bytes.* {LONGEST_FRAME}$"):
        list(FrameReader().feed(wire.frame(connection, b"", LONGEST_FRAME + 1)))


def test_the_longest_frame_holds_the_longest_message():
    assert LONGEST_FRAME == 10 + 4 * wire.MIB


def test_nothing_is_kept_of_a_frame():
    reader = FrameReader()
    chunk = b"x" * (64 << 10)
    list(reader.feed(wire.frame(1, b"", LONGEST_FRAME)))
    tracemalloc.start()
    try:
        for _ in range(LONGEST_FRAME // len(chunk)):
            for _, piece in reader.feed(chunk):
                assert len(piece) == len(chunk)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000


class Sink:
    def __init__(self):
        self.taken = b""

    async def receive(self, piece):
        self.taken += bytes(piece)


@pytest.fixture
async def pair():
    """A trunk, and the socket of the other side."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    trunk = Trunk(reader, writer)
    yield trunk, theirs
    theirs.close()
    trunk.close("the test is over")
    await trunk.closed()


async def receive(sock, size):
    received = b""
    while len(received) < size:
        part = await asyncio.get_running_loop().sock_recv(sock, size - len(received))
        assert part
        received += part
    return received


async def test_streams_go_to_their_receivers_and_strangers_nowhere(pair):
    trunk, theirs = pair
    plugin, runtime = Sink(), Sink()
    running = asyncio.create_task(trunk.run({1: plugin, 2: runtime}))

    for each in [(1, b"a"), (9, b"?"), (2, b"b"), (0, b"?"), (1, b"c")]:
        await asyncio.get_running_loop().sock_sendall(theirs, wire.frame(*each))
    theirs.close()

    assert await running == "the other side closed the connection"
    assert (plugin.taken, runtime.taken) == (b"ac", b"b")


async def test_garbage_ends_the_connection(pair):
    trunk, theirs = pair
    running = asyncio.create_task(trunk.run({}))

    await asyncio.get_running_loop().sock_sendall(theirs, b"GET / HTTP/1.1\r\n\r\n")

    assert "bytes, but none may have more than" in await running
    await trunk.closed()
    assert await asyncio.get_running_loop().sock_recv(theirs, 10) == b""


async def test_a_message_is_two_frames(pair):
    trunk, theirs = pair
    trunk.write(1, b"0123456789", b"data" * 2000)
    trunk.write(2, b"9876543210", b"")
    await trunk.flushed()

    received = await receive(theirs, 8 + 10 + 8 + 8000 + 8 + 10)

    assert wire.frames(received) == [(1, b"0123456789"), (1, b"data" * 2000), (2, b"9876543210")]


async def test_messages_of_many_tasks_do_not_mix(pair):
    trunk, theirs = pair
    big = 300_000

    async def send(number):
        trunk.write(1, bytes([number]) * 10, bytes([number]) * big)
        await trunk.flushed()

    sending = [asyncio.create_task(send(number)) for number in range(8)]
    received = wire.frames(await receive(theirs, 8 * (8 + 10 + 8 + big)))
    await asyncio.gather(*sending)

    for number in range(8):
        assert received[2 * number : 2 * number + 2] == [
            (1, bytes([number]) * 10),
            (1, bytes([number]) * big),
        ]


async def test_a_side_that_does_not_read_loses_the_connection(pair):
    trunk, _ = pair
    trunk._write_timeout_s = 0.05
    running = asyncio.create_task(trunk.run({}))

    trunk.write(1, b"0123456789", b"x" * wire.MIB)
    await trunk.flushed()

    assert await running == "the other side did not read what was sent to it for 0.05 s"
    trunk.write(1, b"0123456789", b"x")
    await trunk.flushed()


async def test_the_first_reason_stays(pair):
    trunk, _ = pair
    running = asyncio.create_task(trunk.run({}))

    trunk.close("first")
    trunk.close("second")

    assert await running == "first"


async def test_a_connection_that_is_reset_ends(pair):
    trunk, theirs = pair
    trunk.write(1, b"0123456789", b"never read")
    theirs.close()

    assert await trunk.run({})
