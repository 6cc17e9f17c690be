# SPDX-License-Identifier: Apache-2.0
"""What clients ask before they ask for objects: versions, groups, resources, health and the schema's outline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from driver.sandbox.apistatus import JsonObject, StatusError
from driver.sandbox.kinds import KINDS, Kind

_VERSION: Final = {"major": "1", "minor": "37", "gitVersion": "v1.37.2-box", "platform": "linux/box"}
_VERBS: Final = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def routes() -> list[web.RouteDef]:
    """Return the routes of all discovery documents."""
    documents: dict[str, JsonObject] = {
        "/version": dict(_VERSION),
        "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in _groups()]},
        "/openapi/v3": {
            "paths": {
                prefix.removeprefix("/"): {"serverRelativeURL": f"/openapi/v3{prefix}"} for prefix in _by_prefix()
            }
        },
    }
    for name in _groups():
        documents[f"/apis/{name}"] = {"kind": "APIGroup", "apiVersion": "v1", **_group(name)}
    for prefix, kinds in _by_prefix().items():
        documents[prefix] = _resource_list(kinds)
        documents[f"/openapi/v3{prefix}"] = _schema_outline(prefix, kinds)
    found = [web.get(path, _answer(document)) for path, document in documents.items()]
    return [*found, *(web.get(path, _healthy) for path in ("/healthz", "/livez", "/readyz"))]


async def _healthy(request: web.Request) -> web.Response:
    del request
    return web.Response(text="ok")


def _answer(document: JsonObject) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        if "protobuf" in request.headers.get("Accept", "") and "json" not in request.headers["Accept"]:
            raise StatusError(406, "only JSON is served here", reason="NotAcceptable")
        return web.json_response(document)

    return handler


def _groups() -> list[str]:
    return sorted({kind.group for kind in KINDS if kind.group})


def _by_prefix() -> dict[str, list[Kind]]:
    found: dict[str, list[Kind]] = {}
    for kind in KINDS:
        found.setdefault(kind.url_prefix, []).append(kind)
    return found


def _group(name: str) -> JsonObject:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _resource_list(kinds: list[Kind]) -> JsonObject:
    resources: list[JsonObject] = []
    for kind in kinds:
        entry: JsonObject = {
            "name": kind.plural,
            "singularName": kind.singular,
            "namespaced": kind.namespaced,
            "kind": kind.name,
            "verbs": _VERBS,
        }
        if kind.short_names:
            entry["shortNames"] = list(kind.short_names)
        resources.append(entry)
        for subresource in kind.subresources:
            verbs = ["create"] if subresource == "binding" else ["get", "patch", "update"]
            name = "Binding" if subresource == "binding" else kind.name
            resources.append(
                {
                    "name": f"{kind.plural}/{subresource}",
                    "singularName": "",
                    "namespaced": kind.namespaced,
                    "kind": name,
                    "verbs": verbs,
                }
            )
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": kinds[0].api_version, "resources": resources}


def _schema_outline(prefix: str, kinds: list[Kind]) -> JsonObject:
    """Return just enough of an OpenAPI document for kubectl to leave the checking of fields to the server."""
    paths: JsonObject = {}
    for kind in kinds:
        gvk = {"group": kind.group, "version": kind.version, "kind": kind.name}
        operation = {
            "x-kubernetes-group-version-kind": gvk,
            "parameters": [
                {"name": name, "in": "query", "schema": {"type": "string"}} for name in ("fieldValidation", "dryRun")
            ],
            "responses": {"200": {"description": "OK"}},
        }
        middle = "/namespaces/{namespace}" if kind.namespaced else ""
        paths[f"{prefix}{middle}/{kind.plural}/{{name}}"] = {"patch": operation}
    return {"openapi": "3.0.0", "info": {"title": "box", "version": "v1.37.2"}, "paths": paths}
