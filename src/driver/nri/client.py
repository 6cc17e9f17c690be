# SPDX-License-Identifier: Apache-2.0
"""Calls to what the other side serves."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError, Message

from driver.apis import ttrpc_pb2
from driver.logs import fields
from driver.nri.errors import Code, NriError
from driver.nri.ttrpc import LAST_STREAM, MOST_DATA_BYTES, REQUEST, RESPONSE, MessageReader, bounded, write

if TYPE_CHECKING:
    from driver.nri.mux import Trunk

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", bound=Message)


class Client:
    """Calls what the other side serves on a connection.

    Parameters
    ----------
    trunk : Trunk
        The socket.
    connection : int
        The connection's id on it.
    """

    def __init__(self, trunk: Trunk, connection: int) -> None:
        self._trunk = trunk
        self._connection = connection
        self._reader = MessageReader()
        self._next_stream = 1
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._closed: str | None = None

    async def call(
        self, service: str, method: str, request: Message, answer: type[_Answer], *, timeout_s: float
    ) -> _Answer:
        """Make a call and wait for its answer.

        Parameters
        ----------
        service, method : str
            Full name of the service, and bare name of the method.
        request : Message
            The request's payload.
        answer : type
            The class of the answer's payload.
        timeout_s : float
            How long to wait, in seconds. The other side is told.

        Returns
        -------
        Message
            The answer's payload.

        Raises
        ------
        NriError
            With the code and the message of the other side, ``DEADLINE_EXCEEDED`` if it did not answer in time, or
            ``UNAVAILABLE`` if the connection ended.
        """
        envelope = ttrpc_pb2.Request(
            service=service,
            method=method,
            payload=request.SerializeToString(),
            timeout_nano=max(1, int(timeout_s * 1e9)),
        )
        if (size := envelope.ByteSize()) > MOST_DATA_BYTES:
            raise NriError(
                Code.RESOURCE_EXHAUSTED,
                f"{method}: the request has {size} bytes, at most {MOST_DATA_BYTES} can be sent",
            )
        if self._closed is not None:
            raise NriError(Code.UNAVAILABLE, f"{method}: {self._closed}")
        stream = self._next_stream
        if stream > LAST_STREAM:
            self._trunk.close("all stream ids are used up")
            raise NriError(Code.UNAVAILABLE, f"{method}: all stream ids are used up")
        # From here to the write nothing else runs, so ids ascend on the wire.
        self._next_stream += 2
        waiting = self._waiting[stream] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(_forget)
        try:
            write(self._trunk, self._connection, stream, REQUEST, envelope)
            async with asyncio.timeout(timeout_s):
                await self._trunk.flushed()
                return answer.FromString(await waiting)
        except TimeoutError:
            raise NriError(Code.DEADLINE_EXCEEDED, f"{method}: no answer within {timeout_s:g} s") from None
        except DecodeError:
            raise NriError(Code.INTERNAL, f"{method}: the answer is not a {answer.DESCRIPTOR.name}") from None
        except NriError as error:
            raise NriError(error.code, f"{method}: {error}") from None
        finally:
            self._waiting.pop(stream, None)
            waiting.cancel()

    async def receive(self, piece: memoryview) -> None:
        """Take the next piece of the connection's stream."""
        for frame in self._reader.feed(piece):
            waiting = self._waiting.get(frame.stream)
            if waiting is None or waiting.done():
                _log.debug("an answer that nobody waits for", extra=fields(stream=frame.stream, kind=frame.kind))
            elif frame.kind != RESPONSE:
                waiting.set_exception(NriError(Code.INTERNAL, f"message of kind {frame.kind} instead of an answer"))
            elif frame.data is None:
                waiting.set_exception(
                    NriError(Code.RESOURCE_EXHAUSTED, f"the answer has more than {MOST_DATA_BYTES} bytes")
                )
            else:
                _resolve(waiting, frame.data)

    def close(self, reason: str) -> None:
        """Fail all calls, those that are waiting and those to come.

        Parameters
        ----------
        reason : str
            Why, for their errors.
        """
        self._closed = reason
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(NriError(Code.UNAVAILABLE, reason))


def _forget(waiting: asyncio.Future[bytes]) -> None:
    # An error that comes after the caller has given up is nobody's.
    if not waiting.cancelled():
        waiting.exception()


def _resolve(waiting: asyncio.Future[bytes], data: bytes) -> None:
    try:
        response = ttrpc_pb2.Response.FromString(data)
    except DecodeError:
        waiting.set_exception(NriError(Code.INTERNAL, "the answer is not a ttrpc response"))
        return
    if response.status.code:
        waiting.set_exception(NriError(response.status.code, bounded(response.status.message)))
    else:
        waiting.set_result(response.payload)
