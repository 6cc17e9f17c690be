# SPDX-License-Identifier: Apache-2.0
"""Two byte streams on one socket, the trunk: calls from the runtime on one, calls from the plugin on the other.

A frame is a connection's id, a length, and so many bytes of that connection's stream; where a frame ends says nothing
about what is in it. Go's reader fails on a frame that is larger than the buffer it happens to offer, so what is written
here is always one header of a message in one frame and all of its data in the next.

Nothing is kept here: each piece of a stream is handed on as it comes in, and frames of unknown connections are dropped
piece by piece.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PLUGIN_CONNECTION: Final = 1
"""The runtime calls the plugin."""

RUNTIME_CONNECTION: Final = 2
"""The plugin calls the runtime."""

LONGEST_FRAME: Final = 10 + (4 << 20)
"""The most payload that any writer puts into a frame, in bytes: a message with its header."""

_HEADER: Final = struct.Struct(">II")
_READ_BYTES: Final = 128 << 10


class FrameError(Exception):
    """What came in cannot be a frame, and nobody can tell where the next one starts."""


class FrameReader:
    """Takes the trunk's bytes apart, wherever they were cut on their way."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._connection = 0
        self._left = 0

    def feed(self, received: bytes) -> Iterator[tuple[int, memoryview]]:
        """Yield a connection's id and a piece of its stream for each piece of payload.

        Parameters
        ----------
        received : bytes
            What came in since the last call. All that is yielded must be taken before the next call.

        Raises
        ------
        FrameError
            If a frame is longer than any writer makes them.
        """
        rest = memoryview(received)
        while rest:
            if self._left:
                piece, rest = rest[: self._left], rest[self._left :]
                self._left -= len(piece)
                yield self._connection, piece
                continue
            missing = _HEADER.size - len(self._header)
            self._header += rest[:missing]
            rest = rest[missing:]
            if len(self._header) < _HEADER.size:
                return
            self._connection, self._left = _HEADER.unpack(self._header)
            self._header.clear()
            if self._left > LONGEST_FRAME:
                raise FrameError(
                    f"a frame of connection {self._connection} has {self._left} bytes, but none may have more than "
                    f"{LONGEST_FRAME}"
                )


class Receiver(Protocol):
    """What takes one connection's stream."""

    async def receive(self, piece: memoryview, /) -> None:
        """Take the next piece, which is valid only during the call. Nothing more is read until it returns."""


class Trunk:
    """The socket that carries both connections.

    Parameters
    ----------
    reader : StreamReader
        The socket's receiving side.
    writer : StreamWriter
        The socket's sending side.
    write_timeout_s : float
        How long the other side may take to read what was written, in seconds.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, write_timeout_s: float = 10.0
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._write_timeout_s = write_timeout_s
        self._reason = "the other side closed the connection"

    async def run(self, receivers: Mapping[int, Receiver]) -> str:
        """Hand on what comes in until the connection ends.

        Parameters
        ----------
        receivers : Mapping
            For each connection's id, what takes its stream.

        Returns
        -------
        str
            Why it ended.
        """
        frames = FrameReader()
        try:
            while received := await self._reader.read(_READ_BYTES):
                for connection, piece in frames.feed(received):
                    if (receiver := receivers.get(connection)) is not None:
                        await receiver.receive(piece)
        except (FrameError, OSError) as error:
            self.close(f"{error}")
        return self._reason

    def write(self, connection: int, header: bytes, data: bytes) -> None:
        """Send one message of a connection, whole and after all that were sent before it.

        There is no await in here: two messages cannot mix, and a caller that is cancelled cannot leave half of one.

        Parameters
        ----------
        connection : int
            The connection's id.
        header, data : bytes
            The message's header, and its data, which may be empty.
        """
        if self._writer.is_closing():
            return
        parts = [_HEADER.pack(connection, len(header)), header]
        if data:
            parts += [_HEADER.pack(connection, len(data)), data]
        self._writer.write(b"".join(parts))

    async def flushed(self) -> None:
        """Wait until the other side has taken most of what was written.

        Whoever makes messages on demand waits here before making more of them. A side that does not read loses the
        connection.
        """
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._writer.drain()
        except TimeoutError:
            self.close(f"the other side did not read what was sent to it for {self._write_timeout_s:g} s")
        except OSError as error:
            self.close(f"{error}")

    def close(self, reason: str) -> None:
        """End the connection at once, so that `run` returns.

        Parameters
        ----------
        reason : str
            What `run` shall return, unless it ended for another reason before.
        """
        if not self._writer.is_closing():
            self._reason = reason
            self._writer.transport.abort()

    async def closed(self) -> None:
        """Wait until the socket is closed, once `run` has returned or `close` was called."""
        self._writer.transport.abort()
        try:
            await self._writer.wait_closed()
        except OSError:
            return
