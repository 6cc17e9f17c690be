# SPDX-License-Identifier: Apache-2.0
"""The watch protocol: a stream of events, one JSON object a line, from one resource version on."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Final

from aiohttp import web

from driver.sandbox.apistatus import JsonObject, StatusError
from driver.sandbox.kinds import FieldSelector, Kind
from driver.sandbox.store import ObjectStore

# As the real server: a watch without a limit of its own ends after 30 to 60 minutes.
_DEFAULT_TIMEOUT_S: Final = (1800.0, 3600.0)
_INITIAL_EVENTS_END: Final = "k8s.io/initial-events-end"


async def serve_watch(
    request: web.Request,
    store: ObjectStore,
    kind: Kind,
    namespace: str | None,
    selector: FieldSelector,
    bookmark_interval_s: float,
) -> web.StreamResponse:
    """Answer a request that has `watch=true` until its time is over or the client goes."""
    loop = asyncio.get_running_loop()
    query = request.query
    deadline = loop.time() + _seconds(query.get("timeoutSeconds"))
    bookmarks = query.get("allowWatchBookmarks") == "true"
    initial_events = query.get("sendInitialEvents") == "true"
    if initial_events and query.get("resourceVersionMatch") != "NotOlderThan":
        text = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
        raise StatusError(422, f'ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch: Forbidden: {text}')
    asked = _version(query.get("resourceVersion", ""))
    changed = asyncio.Event()
    unsubscribe = store.wake_on_change(changed)
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)

    async def send(event_type: str, obj: JsonObject) -> None:
        await response.write(json.dumps({"type": event_type, "object": obj}).encode() + b"\n")

    async def send_bookmark(version: int, annotations: dict[str, str] | None = None) -> None:
        metadata: JsonObject = {"resourceVersion": str(version)}
        if annotations:
            metadata["annotations"] = annotations
        await send("BOOKMARK", {"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata})

    try:
        if initial_events or asked == 0:
            current, asked = store.select(kind, namespace, selector)
            for obj in current:
                await send("ADDED", obj)
            if initial_events and bookmarks:
                await send_bookmark(asked, {_INITIAL_EVENTS_END: "true"})
        seen = asked
        next_bookmark = loop.time() + bookmark_interval_s
        while True:
            if seen < store.oldest_version:
                text = f"too old resource version: {seen} ({store.oldest_version})"
                await send("ERROR", StatusError(410, text).body())
                return response
            changed.clear()
            # From a version that is still to come nothing is sent before it is there, as on a real server.
            changes, latest = store.changes_after(seen, kind, namespace)
            seen = max(seen, latest)
            for change in changes:
                event = change.event(selector)
                if event is not None:
                    await send(*event)
            if loop.time() >= deadline:
                if bookmarks:
                    await send_bookmark(seen)
                return response
            if bookmarks and loop.time() >= next_bookmark:
                await send_bookmark(seen)
                next_bookmark = loop.time() + bookmark_interval_s
            wake_at = min(deadline, next_bookmark) if bookmarks else deadline
            try:
                async with asyncio.timeout_at(wake_at):
                    await changed.wait()
            except TimeoutError:
                continue
    except ConnectionResetError:
        return response
    finally:
        unsubscribe()


def _seconds(text: str | None) -> float:
    if text is None:
        return random.uniform(*_DEFAULT_TIMEOUT_S)
    if not text.isascii() or not text.isdigit():
        raise StatusError(400, f"timeoutSeconds {text[:40]!r} is not a whole number of seconds")
    return float(text) if int(text) else random.uniform(*_DEFAULT_TIMEOUT_S)


def _version(text: str) -> int:
    """Return the resource version asked for; 0 means whatever there is now."""
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise StatusError(400, f"Invalid value: {text[:40]!r}: resourceVersion is not a number")
    return int(text)
