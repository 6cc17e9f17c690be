# SPDX-License-Identifier: Apache-2.0
"""Messages on one byte stream, as containerd's ttrpc has them; `client` and `server` make calls of them.

A message is a header of ten bytes (length of the data, stream id, kind, flags) and its data. A call is a stream with a
request and a response; the client chooses its id, odd and larger than all before on this connection. There is neither a
handshake nor a way to take a call back: a client that gives up stops listening.

Messages of the kind "data" belong to streams of more than one request or response, which NRI does not have. Go's server
crashes when it gets one for an ordinary call, so none is ever sent.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from driver.logs import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from driver.nri.mux import Trunk

REQUEST: Final = 1
RESPONSE: Final = 2
REMOTE_OPEN: Final = 0x02
"""The flag of a request that announces more of them."""

MOST_DATA_BYTES: Final = 4 << 20
"""The most data that a message may have; Go's side closes the connection or fails the call for more."""

LAST_STREAM: Final = 0xFFFFFFFF

_HEADER: Final = struct.Struct(">IIBB")
_LONGEST_TEXT: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message of the stream.

    Attributes
    ----------
    stream : int
        Which call it belongs to.
    kind, flags : int
        As they came.
    data : bytes or None
        None if it was larger than allowed, and therefore dropped.
    """

    stream: int
    kind: int
    flags: int
    data: bytes | None


class MessageReader:
    """Puts messages together from the pieces of a stream, and keeps at most one."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._data = bytearray()
        self._missing = 0

    def feed(self, piece: memoryview) -> Iterator[Frame]:
        """Yield the messages that are complete with this piece.

        Parameters
        ----------
        piece : memoryview
            The next piece. All that is yielded must be taken before the next call.
        """
        while True:
            if (short := _HEADER.size - len(self._header)) > 0:
                self._header += piece[:short]
                if len(piece) < short:
                    return
                piece = piece[short:]
                self._missing = _HEADER.unpack(self._header)[0]
            length, stream, kind, flags = _HEADER.unpack(self._header)
            taken, piece = piece[: self._missing], piece[self._missing :]
            self._missing -= len(taken)
            if length <= MOST_DATA_BYTES:
                self._data += taken
            if self._missing:
                return
            data = bytes(self._data) if length <= MOST_DATA_BYTES else None
            self._header.clear()
            self._data.clear()
            yield Frame(stream=stream, kind=kind, flags=flags, data=data)


def write(trunk: Trunk, connection: int, stream: int, kind: int, message: Message) -> None:
    """Send a request or a response, which has no more data than allowed."""
    data = message.SerializeToString()
    trunk.write(connection, _HEADER.pack(len(data), stream, kind, 0), data)


def bounded(text: str) -> str:
    """Return a text that came from outside as one line of reasonable length, which protobuf takes."""
    return one_line(text[:_LONGEST_TEXT])[:_LONGEST_TEXT]
