# SPDX-License-Identifier: Apache-2.0
"""HTTP in front of the registry: routes, bodies, media types, Status answers, and faults on demand."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import yaml
from aiohttp import web

from driver.sandbox import discovery
from driver.sandbox.apistatus import JsonObject, StatusError
from driver.sandbox.kinds import KINDS, FieldSelector, Kind
from driver.sandbox.registry import Registry
from driver.sandbox.store import ObjectStore
from driver.sandbox.watching import serve_watch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The real server refuses larger bodies too.
_LARGEST_BODY: Final = 3 * 1024 * 1024
_MERGE_PATCHES: Final = ("application/merge-patch+json", "application/strategic-merge-patch+json")
_APPLY_PATCHES: Final = ("application/apply-patch+yaml",)
_REMEMBERED_REQUESTS: Final = 10_000
_REMEMBERED_RESTS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How a request goes wrong.

    Attributes
    ----------
    status : int
        Answer with this HTTP status; 0 goes on as if nothing were.
    delay_s : float
        Wait this many seconds first.
    hang : bool
        Never answer.
    reset : bool
        Reset the connection instead of answering.
    """

    status: int = 0
    delay_s: float = 0.0
    hang: bool = False
    reset: bool = False


FaultCallback = Callable[[str, str], Fault | int | None]


class Endpoints:
    """Answers the requests to one store.

    Parameters
    ----------
    store : ObjectStore
    registry : Registry
    bookmark_interval_s : float
        Seconds between the bookmarks of a watch.

    Attributes
    ----------
    fault : callable or None
        Asked about every request to a resource before it is answered.
    requests : deque of tuple of str and str
        Method and path of the latest requests to resources, oldest first.
    """

    def __init__(self, store: ObjectStore, registry: Registry, bookmark_interval_s: float) -> None:
        self.fault: FaultCallback | None = None
        self.requests: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED_REQUESTS)
        self._store = store
        self._registry = registry
        self._bookmark_interval_s = bookmark_interval_s
        self._connections: set[asyncio.Transport] = set()
        self._rests: dict[str, tuple[list[JsonObject], int]] = {}

    def application(self) -> web.Application:
        """Return a new web application that answers here."""
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[self._answer_errors])
        app.router.add_routes(discovery.routes())
        for kind in KINDS:
            self._add_routes(app.router, kind)
        return app

    def cut_connections(self) -> None:
        """Break all open connections, watches among them."""
        for transport in tuple(self._connections):
            transport.abort()
        self._connections.clear()

    def _add_routes(self, router: web.UrlDispatcher, kind: Kind) -> None:
        def serve(method: str, path: str, handle: Callable[[Kind, web.Request], Awaitable[web.StreamResponse]]) -> None:
            async def handler(request: web.Request) -> web.StreamResponse:
                return await handle(kind, request)

            router.add_route(method, path, handler)

        everywhere = f"{kind.url_prefix}/{kind.plural}"
        collection = f"{kind.url_prefix}/namespaces/{{namespace}}/{kind.plural}" if kind.namespaced else everywhere
        serve("GET", everywhere, self._list_or_watch)
        if kind.namespaced:
            serve("GET", collection, self._list_or_watch)
        serve("POST", collection, self._create)
        serve("DELETE", collection, self._delete_collection)
        serve("GET", f"{collection}/{{name}}", self._get)
        serve("PUT", f"{collection}/{{name}}", self._update)
        serve("PATCH", f"{collection}/{{name}}", self._patch)
        serve("DELETE", f"{collection}/{{name}}", self._delete)
        if "status" in kind.subresources:
            place = f"{collection}/{{name}}/{{subresource:status}}"
            serve("GET", place, self._get)
            serve("PUT", place, self._update)
            serve("PATCH", place, self._patch)
        if "binding" in kind.subresources:
            serve("POST", f"{collection}/{{name}}/binding", self._bind)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = cast(asyncio.Transport, request.transport)
        self._connections = {known for known in self._connections if not known.is_closing()} | {transport}
        try:
            if request.path.startswith(("/api/v1/", "/apis/resource.k8s.io/v1/")):
                await self._meet_fault(request, transport)
            if "dryRun" in request.query:
                raise StatusError(400, "dry runs are not supported here")
            return await handler(request)
        except StatusError as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            refusal = StatusError(413, f"limit is {_LARGEST_BODY} bytes")
        except web.HTTPNotFound:
            refusal = StatusError(404, "the server could not find the requested resource")
        except web.HTTPMethodNotAllowed:
            refusal = StatusError(405, "the server does not allow this method on the requested resource")
        return web.json_response(refusal.body(), status=refusal.code)

    async def _meet_fault(self, request: web.Request, transport: asyncio.Transport) -> None:
        method = "WATCH" if _is_watch(request) else request.method
        self.requests.append((method, request.path))
        fault = self.fault(method, request.path) if self.fault is not None else None
        if fault is None:
            return
        if isinstance(fault, int):
            fault = Fault(status=fault)
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.hang:
            await asyncio.Event().wait()
        if fault.reset:
            transport.abort()
            raise StatusError(500, "the connection was reset")
        if fault.status:
            raise StatusError(fault.status, f"the box was told to answer {fault.status}")

    async def _list_or_watch(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        namespace = request.match_info.get("namespace")
        selector = FieldSelector.parse(kind, request.query.get("fieldSelector", ""))
        if request.query.get("labelSelector"):
            raise StatusError(400, "label selectors are not supported here")
        if _is_watch(request):
            return await serve_watch(request, self._store, kind, namespace, selector, self._bookmark_interval_s)
        limit = _whole_number(request, "limit")
        if token := request.query.get("continue"):
            items, version = self._take_rest(token)
        else:
            items, version = self._store.select(kind, namespace, selector)
        metadata: JsonObject = {"resourceVersion": str(version)}
        if 0 < limit < len(items):
            metadata["continue"] = self._keep_rest(items[limit:], version)
            metadata["remainingItemCount"] = len(items) - limit
            items = items[:limit]
        return _list(kind, items, metadata)

    def _keep_rest(self, items: list[JsonObject], version: int) -> str:
        """Keep the rest of a list as it is now, and return the token for the next page."""
        token = secrets.token_urlsafe(16)
        self._rests[token] = items, version
        while len(self._rests) > _REMEMBERED_RESTS:
            del self._rests[next(iter(self._rests))]
        return token

    def _take_rest(self, token: str) -> tuple[list[JsonObject], int]:
        # A page may be asked for again, when its answer was lost.
        items, version = self._rests.get(token, ([], 0))
        if version < self._store.oldest_version:
            raise StatusError(410, "The provided continue parameter is too old to display a consistent list result.")
        return items, version

    async def _get(self, kind: Kind, request: web.Request) -> web.Response:
        return web.json_response(self._registry.read(kind, _namespace(request), request.match_info["name"]))

    async def _create(self, kind: Kind, request: web.Request) -> web.Response:
        body = await _body(request)
        stored = self._registry.create(kind, _namespace(request), body, _manager(request))
        return web.json_response(stored, status=201)

    async def _update(self, kind: Kind, request: web.Request) -> web.Response:
        body = await _body(request)
        name, subresource = request.match_info["name"], request.match_info.get("subresource", "")
        stored = self._registry.update(kind, _namespace(request), name, body, subresource, _manager(request))
        return web.json_response(stored)

    async def _patch(self, kind: Kind, request: web.Request) -> web.Response:
        namespace, name = _namespace(request), request.match_info["name"]
        subresource = request.match_info.get("subresource", "")
        if request.content_type in _APPLY_PATCHES:
            force = request.query.get("force") == "true"
            manager = request.query.get("fieldManager", "")
            stored, created = self._registry.apply(
                kind, namespace, name, await _body(request), subresource, manager, force=force
            )
            return web.json_response(stored, status=201 if created else 200)
        if request.content_type not in _MERGE_PATCHES:
            supported = ", ".join((*_MERGE_PATCHES, *_APPLY_PATCHES))
            text = "the body of the request was in an unknown format - accepted media types include: "
            raise StatusError(415, text + supported)
        patch = await _body(request)
        stored = self._registry.merge_patch(kind, namespace, name, patch, subresource, _manager(request))
        return web.json_response(stored)

    async def _delete(self, kind: Kind, request: web.Request) -> web.Response:
        options = await _delete_options(request)
        return web.json_response(self._registry.delete(kind, _namespace(request), request.match_info["name"], options))

    async def _delete_collection(self, kind: Kind, request: web.Request) -> web.Response:
        options = await _delete_options(request)
        selector = FieldSelector.parse(kind, request.query.get("fieldSelector", ""))
        gone = self._registry.delete_all(kind, request.match_info.get("namespace"), selector, options)
        return _list(kind, gone, {"resourceVersion": str(self._store.resource_version)})

    async def _bind(self, kind: Kind, request: web.Request) -> web.Response:
        del kind
        self._registry.bind(_namespace(request), request.match_info["name"], await _body(request))
        success = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
        return web.json_response(success, status=201)


def _list(kind: Kind, items: list[JsonObject], metadata: JsonObject) -> web.Response:
    # Lists of built-in kinds say the kind once, for all items.
    bare = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in items]
    return web.json_response(
        {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": metadata, "items": bare}
    )


def _namespace(request: web.Request) -> str:
    return request.match_info.get("namespace", "")


def _is_watch(request: web.Request) -> bool:
    return request.query.get("watch") in ("true", "1") and request.method == "GET"


def _whole_number(request: web.Request, parameter: str) -> int:
    text = request.query.get(parameter, "0")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise StatusError(400, f"{parameter}: Invalid value: {text[:40]!r}: must be a whole number")
    return int(text)


def _manager(request: web.Request) -> str:
    """Return who owns the written fields: as named by the client, else the program it says it is."""
    return request.query.get("fieldManager") or request.headers.get("User-Agent", "unknown").partition("/")[0]


async def _body(request: web.Request) -> JsonObject:
    text = await request.text()
    try:
        # JSON first: it is what nearly everybody sends, and much faster to read.
        body: Any = json.loads(text)
    except ValueError:
        try:
            body = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise StatusError(400, f"the body is neither JSON nor YAML: {error}") from error
    except RecursionError as error:
        raise StatusError(400, "the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise StatusError(400, "the body must be an object")
    return body


async def _delete_options(request: web.Request) -> JsonObject:
    options = await _body(request) if request.can_read_body and await request.text() else {}
    if "gracePeriodSeconds" in request.query:
        options["gracePeriodSeconds"] = _whole_number(request, "gracePeriodSeconds")
    return options
