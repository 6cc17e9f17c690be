# SPDX-License-Identifier: Apache-2.0
"""The wire of NRI by hand, so that tests do not ask the code under test what is right."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from pathlib import Path

from driver.apis import ttrpc_pb2

PLUGIN, RUNTIME = 1, 2
REQUEST, RESPONSE, DATA = 1, 2, 3
PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
MIB = 1 << 20

RECORDING = Path(__file__).parent / "integration" / "nri-containerd-2.4.2.txt"


def frame(connection, payload, length=None):
    """Return a mux frame."""
    return struct.pack(">II", connection, len(payload) if length is None else length) + payload


def header(length, stream, kind=REQUEST, flags=0):
    """Return the header of a ttrpc message."""
    return struct.pack(">IIBB", length, stream, kind, flags)


def message(stream, data=b"", kind=REQUEST, flags=0):
    """Return a ttrpc message."""
    return header(len(data), stream, kind, flags) + data


def request(stream, method, payload=b"", *, service=PLUGIN_SERVICE, timeout_nano=0, flags=0):
    """Return a ttrpc message that calls a method."""
    if not isinstance(payload, bytes):
        payload = payload.SerializeToString()
    envelope = ttrpc_pb2.Request(service=service, method=method, payload=payload, timeout_nano=timeout_nano)
    return message(stream, envelope.SerializeToString(), REQUEST, flags)


def response(stream, payload=b"", *, code=0, text=""):
    """Return a ttrpc message that answers a call."""
    envelope = ttrpc_pb2.Response(payload=payload)
    if code:
        envelope.status.code = code
        envelope.status.message = text
    return message(stream, envelope.SerializeToString(), RESPONSE)


def frames(received):
    """Return connection and payload of each mux frame."""
    found = []
    while received:
        connection, length = struct.unpack(">II", received[:8])
        assert len(received) >= 8 + length
        found.append((connection, received[8 : 8 + length]))
        received = received[8 + length :]
    return found


def messages(stream):
    """Return stream id, kind, flags and data of each ttrpc message, and the bytes of one that is not complete."""
    found = []
    while len(stream) >= 10:
        length, identity, kind, flags = struct.unpack(">IIBB", stream[:10])
        if len(stream) < 10 + length:
            break
        found.append((identity, kind, flags, stream[10 : 10 + length]))
        stream = stream[10 + length :]
    return found, stream


async def read_message(reader):
    """Return connection, stream, kind and envelope of the next message."""
    async with asyncio.timeout(30):
        connection, length = int.from_bytes(await reader.readexactly(4)), int.from_bytes(await reader.readexactly(4))
        assert length == 10
        head = await reader.readexactly(10)
        data = b""
        if size := int.from_bytes(head[:4]):
            assert int.from_bytes(await reader.readexactly(4)) == connection
            assert int.from_bytes(await reader.readexactly(4)) == size
            data = await reader.readexactly(size)
    kind = head[8]
    envelope = (ttrpc_pb2.Request if kind == REQUEST else ttrpc_pb2.Response).FromString(data)
    return connection, int.from_bytes(head[4:8]), kind, envelope


class RawRuntime:
    """A listening socket, and what a test makes of the connections to it."""

    def __init__(self, path):
        self._path = path
        self._accepted = asyncio.Queue()
        self._writers = []

    async def __aenter__(self):
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    async def _accept(self, reader, writer):
        self._writers.append(writer)
        self._accepted.put_nowait((reader, writer))

    async def accept(self):
        """Return reader and writer of the next connection."""
        async with asyncio.timeout(30):
            return await self._accepted.get()


def recording():
    """Return connection number, sender (``plugin`` or ``runtime``) and bytes of each piece of a recorded session."""
    pieces = []
    for line in RECORDING.read_text().splitlines():
        if not line.startswith("#"):
            number, sender, data = line.split()
            pieces.append((int(number), sender, bytes.fromhex(data)))
    return pieces
