# SPDX-License-Identifier: Apache-2.0
"""Answers to the calls of the other side, each in time."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError, Message

from driver.apis import ttrpc_pb2
from driver.logs import fields, operation
from driver.nri.errors import Code, NriError
from driver.nri.ttrpc import MOST_DATA_BYTES, REMOTE_OPEN, REQUEST, RESPONSE, MessageReader, bounded, write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from driver.nri.mux import Trunk
    from driver.nri.ttrpc import Frame

_log = logging.getLogger(__name__)

# A runtime asks for one thing at a time. This bounds what one that is broken can make the driver keep.
_MOST_CALLS: Final = 64
_MOST_CALL_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method that a server has.

    Attributes
    ----------
    request : type
        The class of the request's payload.
    answer : callable
        Makes the answer's payload from it. `NriError` becomes the call's error; other exceptions are bugs.
    """

    request: type[Message]
    answer: Callable[[Any], Awaitable[Message]]


@dataclass(slots=True, kw_only=True)
class _Call:
    stream: int
    method: str
    size: int
    allowed_s: float
    answered: bool = False
    timer: asyncio.TimerHandle = field(init=False)


class Server:
    """Serves one service on a connection, each call in a task of its own.

    Every call is answered in time: one whose handler would be late gets an error just before the caller gives up, and
    the handler is cancelled. A runtime goes on without a plugin that does not answer, and heeds one that refuses.

    Parameters
    ----------
    trunk : Trunk
        The socket.
    connection : int
        The connection's id on it.
    service : str
        Full name of the service.
    methods : Mapping
        Its methods by their bare name.
    answered : callable
        Called with a method's name and its error, None if it succeeded, each time that an answer was sent, before
        anything else is.
    margin_s : float
        How long before the caller gives up an answer is given at the latest, in seconds; at most half of its time.

    Attributes
    ----------
    timeout_s : float
        How long callers wait at most, in seconds, also if a call says more or nothing.
    """

    def __init__(
        self,
        trunk: Trunk,
        connection: int,
        service: str,
        methods: Mapping[str, Method],
        *,
        answered: Callable[[str, str | None], None],
        timeout_s: float,
        margin_s: float,
    ) -> None:
        self._trunk = trunk
        self._connection = connection
        self._service = service
        self._methods = methods
        self._answered = answered
        self.timeout_s = timeout_s
        self._margin_s = margin_s
        self._reader = MessageReader()
        self._last_stream = 0
        self._calls: dict[asyncio.Task[None], _Call] = {}
        self._closed = False
        self._complained = False

    def serves(self, task: asyncio.Task[Any] | None) -> bool:
        """Tell whether a task is one in which a call is being handled."""
        return task in self._calls

    async def receive(self, piece: memoryview) -> None:
        """Take the next piece of the connection's stream, and start what it asks for."""
        for frame in self._reader.feed(piece):
            if frame.kind != REQUEST:
                _log.debug("a message that is no request", extra=fields(stream=frame.stream, kind=frame.kind))
                continue
            try:
                self._start(frame)
            except NriError as error:
                # One tells what is wrong with the other side; it may make many of them.
                level = logging.DEBUG if self._complained else logging.WARNING
                self._complained = True
                _log.log(level, "a call is not served", extra=fields(stream=frame.stream, reason=error))
                self._send(frame.stream, _failure(error.code, str(error)))
                await self._trunk.flushed()

    async def close(self) -> None:
        """Cancel all calls, and wait until none is left. The connection has ended."""
        self._closed = True
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(list(self._calls))

    def _start(self, frame: Frame) -> None:
        if frame.stream % 2 == 0 or frame.stream <= self._last_stream:
            message = f"stream {frame.stream} is not odd and larger than {self._last_stream}, the last one"
            raise NriError(Code.INVALID_ARGUMENT, message)
        self._last_stream = frame.stream
        if frame.data is None:
            raise NriError(Code.RESOURCE_EXHAUSTED, f"a request may have at most {MOST_DATA_BYTES} bytes")
        kept = sum(call.size for call in self._calls.values())
        if len(self._calls) == _MOST_CALLS or kept + len(frame.data) > _MOST_CALL_BYTES:
            raise NriError(Code.RESOURCE_EXHAUSTED, f"{len(self._calls)} calls are waiting for their answers already")
        if frame.flags & REMOTE_OPEN:
            raise NriError(Code.INVALID_ARGUMENT, "a stream of requests was announced: there are only unary calls")
        try:
            envelope = ttrpc_pb2.Request.FromString(frame.data)
        except DecodeError:
            raise NriError(Code.INVALID_ARGUMENT, "this is not a ttrpc request") from None
        name = bounded(envelope.method)
        method = self._methods.get(envelope.method) if envelope.service == self._service else None
        if method is None:
            raise NriError(Code.UNIMPLEMENTED, f"there is no method {bounded(envelope.service)}/{name}")
        try:
            request = method.request.FromString(envelope.payload)
        except DecodeError:
            message = f"{name}: the payload is not a {method.request.DESCRIPTOR.name}"
            raise NriError(Code.INVALID_ARGUMENT, message) from None
        timeout_s = self.timeout_s
        if envelope.timeout_nano > 0:
            timeout_s = min(timeout_s, envelope.timeout_nano / 1e9)
        call = _Call(
            stream=frame.stream,
            method=name,
            size=len(frame.data),
            allowed_s=max(timeout_s - self._margin_s, timeout_s / 2),
        )
        task = asyncio.create_task(self._serve(call, method, request))
        call.timer = asyncio.get_running_loop().call_later(call.allowed_s, self._late, call, task)
        self._calls[task] = call
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.pop(task).timer.cancel()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a bug", exc_info=error)

    async def _serve(self, call: _Call, method: Method, request: Message) -> None:
        with operation(call.method):
            try:
                response = await _outcome(call, method, request)
            except asyncio.CancelledError:
                if self._closed or call.answered:
                    raise
                _log.warning("a handler was cancelled from within")
                response = _failure(Code.INTERNAL, f"{call.method} was cancelled")
            if not call.answered:
                self._answer(call, response)
                await self._trunk.flushed()

    def _late(self, call: _Call, task: asyncio.Task[None]) -> None:
        _log.error("no answer in time", extra=fields(method=call.method, seconds=round(call.allowed_s, 3)))
        message = f"{call.method}: dra.cpu has no answer after {call.allowed_s:.3g} s; try again"
        self._answer(call, _failure(Code.DEADLINE_EXCEEDED, message))
        task.cancel()

    def _answer(self, call: _Call, response: ttrpc_pb2.Response) -> None:
        call.answered = True
        call.timer.cancel()
        self._send(call.stream, response)
        self._answered(call.method, response.status.message if response.status.code else None)

    def _send(self, stream: int, response: ttrpc_pb2.Response) -> None:
        write(self._trunk, self._connection, stream, RESPONSE, response)


async def _outcome(call: _Call, method: Method, request: Message) -> ttrpc_pb2.Response:
    try:
        answer = await method.answer(request)
        response = ttrpc_pb2.Response(payload=answer.SerializeToString())
    except NriError as error:
        return _failure(error.code, str(error))
    except Exception as error:
        _log.exception("a bug")
        return _failure(Code.INTERNAL, f"{call.method}: internal error of dra.cpu: {type(error).__name__}: {error}")
    if (size := response.ByteSize()) > MOST_DATA_BYTES:
        _log.error("the answer is too large", extra=fields(bytes=size))
        message = f"{call.method}: the answer of dra.cpu has {size} bytes, at most {MOST_DATA_BYTES} can be sent"
        return _failure(Code.RESOURCE_EXHAUSTED, message)
    return response


def _failure(code: int, message: str) -> ttrpc_pb2.Response:
    # Code 0 would be a success. Surrogates, which protobuf refuses, become escapes.
    status = ttrpc_pb2.Status(code=code or Code.UNKNOWN, message=bounded(message) or "no reason given")
    return ttrpc_pb2.Response(status=status)
