# SPDX-License-Identifier: Apache-2.0
"""What the API server answers: bounded, checked, and turned into one line where it is a refusal.

An answer is input from outside like any other. It may be endless, cut off, no JSON, nested a million levels deep, or an
error page of something between here and the server; whatever it is, the caller gets an object or an `ApiError`.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp

from driver.errors import ApiError

ANSWER_LIMIT: Final = 32 << 20
_ERROR_LIMIT: Final = 64 << 10
_MESSAGE_LIMIT: Final = 600

JsonObject = dict[str, Any]


async def read(asked: str, response: aiohttp.ClientResponse) -> bytes:
    """Read an answer to its end.

    Raises
    ------
    ApiError
        If it breaks off or is larger than `ANSWER_LIMIT`.
    """
    data = bytearray()
    async for chunk in _chunks(response):
        data += chunk
        if len(data) > ANSWER_LIMIT:
            raise _malformed(asked, f"is larger than {ANSWER_LIMIT} bytes")
    return bytes(data)


async def read_lines(asked: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Read an answer line by line, however long it goes on.

    Raises
    ------
    ApiError
        If it breaks off or a line is larger than `ANSWER_LIMIT`.
    """
    rest = bytearray()
    async for chunk in _chunks(response):
        rest += chunk
        if b"\n" in chunk:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if line:
                    yield bytes(line)
        if len(rest) > ANSWER_LIMIT:
            raise _malformed(asked, f"has a line larger than {ANSWER_LIMIT} bytes")


async def failure(response: aiohttp.ClientResponse) -> ApiError:
    """Make an error of an answer whose HTTP status is one."""
    data = bytearray()
    try:
        async for chunk in _chunks(response):
            data += chunk
            if len(data) > _ERROR_LIMIT:
                break
        answer = json.loads(data)
    except ApiError:
        answer = None  # the status says enough
    except (ValueError, RecursionError):
        answer = {"message": data[:_MESSAGE_LIMIT].decode("utf-8", "replace")}
    return refusal(response.status, answer)


def refusal(status: int, answer: object) -> ApiError:
    """Make an error of the server's ``Status`` object.

    Parameters
    ----------
    status : int
        HTTP status; 0 if the object itself has to say it.
    answer : object
        The ``Status``, or anything else that came in its place.
    """
    fields = answer if isinstance(answer, dict) else {}
    code, message = fields.get("code"), fields.get("message")
    if not status and isinstance(code, int):
        status = code
    text = one_line(message) if isinstance(message, str) else ""
    details = fields.get("details")
    missing = ""
    if status == 404 and fields.get("reason") == "NotFound" and isinstance(details, dict):
        missing = f"{details.get('kind')}/{details.get('name')}"
    return ApiError(status, f"the API server answered {status}: {text or 'no reason given'}", missing=missing)


def parse(asked: str, data: bytes) -> JsonObject:
    """Parse a JSON object.

    Raises
    ------
    ApiError
        If it is none; with status 200 if it is one that cannot be read, now or later.
    """
    try:
        answer = json.loads(data)
    except RecursionError as error:
        # Unlike an answer that is cut off or is some proxy's, this one is what the server has: no use in asking again.
        raise ApiError(200, f"the API server's answer to {asked} is nested too deeply to be read") from error
    except ValueError as error:
        raise _malformed(asked, f"is not JSON: {reason(error)}") from error
    if not isinstance(answer, dict):
        raise _malformed(asked, "is not a JSON object")
    return answer


def check_object(asked: str, answer: object) -> JsonObject:
    """Check that an answer is what all else relies on: an object with a name, a UID and a version.

    Raises
    ------
    ApiError
        If it is not.
    """
    if isinstance(answer, dict):
        metadata = answer.get("metadata")
        if isinstance(metadata, dict) and all(
            isinstance(metadata.get(key), str) for key in ("name", "uid", "resourceVersion")
        ):
            return answer
    raise _malformed(asked, "is not an object with name, uid and resourceVersion")


def check_list(asked: str, answer: JsonObject) -> None:
    """Check that an answer is a list of objects; ``items`` that are null become an empty list.

    Raises
    ------
    ApiError
        If it is not.
    """
    if answer.get("items") is None:
        answer["items"] = []
    if not isinstance(answer["items"], list) or not isinstance(answer.get("metadata"), dict):
        raise _malformed(asked, "is not a list of objects")
    for item in answer["items"]:
        check_object(asked, item)


def reason(error: BaseException) -> str:
    """Say in one line why something failed."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it is incomplete"
    # The errors of TLS have numbers too, but of their own.
    tls = isinstance(error, ssl.SSLError | aiohttp.ClientSSLError)
    if isinstance(error, OSError) and error.errno and error.errno > 0 and not tls:
        return os.strerror(error.errno)
    return one_line(str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """Make one printable line of bounded length of a text from outside."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * _MESSAGE_LIMIT])
    shown = " ".join(shown.split())
    return shown if len(shown) <= _MESSAGE_LIMIT else shown[:_MESSAGE_LIMIT] + "…"


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ApiError(0, f"the API server's answer broke off: {reason(error)}") from error


def _malformed(asked: str, what: str) -> ApiError:
    return ApiError(0, f"the API server's answer to {asked} {what}")
