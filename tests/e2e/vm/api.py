# SPDX-License-Identifier: Apache-2.0
"""A client of a real API server: objects as JSON, and waiting for what they become."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from e2e.cluster.controlplane import ControlPlane

JsonObject = dict[str, Any]

PODS = "/api/v1/namespaces/default/pods"
NODES = "/api/v1/nodes"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
EVENTS = "/api/v1/namespaces/default/events"

_AGAIN_S = 1.0


class ApiServerError(Exception):
    """A request failed; the text is the server's."""


class Api:
    """An admin's connection; an asynchronous context manager."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane

    async def __aenter__(self) -> Api:
        connector = aiohttp.TCPConnector(ssl=self._control_plane.admin_tls)
        self._session = aiohttp.ClientSession(self._control_plane.url, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, collection: str, name: str) -> JsonObject:
        """Return an object."""
        return await self._request("GET", f"{collection}/{name}")

    async def items(self, collection: str) -> list[JsonObject]:
        """Return all objects of a collection."""
        return list((await self._request("GET", collection))["items"])

    async def create(self, collection: str, body: Mapping[str, Any]) -> JsonObject:
        """Create an object, and return it as it is stored."""
        return await self._request("POST", collection, body)

    async def replace(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        """Replace an object or a subresource, and return it as it is stored."""
        return await self._request("PUT", path, body)

    async def delete(self, collection: str, name: str) -> None:
        """Ask for an object's deletion."""
        await self._request("DELETE", f"{collection}/{name}")

    async def until(
        self, collection: str, condition: Callable[[list[JsonObject]], Any], what: str, timeout_s: float
    ) -> Any:
        """Wait until a collection is as it should be.

        Parameters
        ----------
        collection : str
        condition : callable
            Told of all objects; what it returns is returned, once that is true.
        what : str
            What is waited for.
        timeout_s : float

        Raises
        ------
        AssertionError
            If it does not happen.
        """
        items: dict[str, JsonObject] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    answer = await self._request("GET", collection)
                    items = {item["metadata"]["name"]: item for item in answer["items"]}
                    if result := condition(list(items.values())):
                        return result
                    query = {"watch": "1", "resourceVersion": answer["metadata"]["resourceVersion"]}
                    async with self._session.get(collection, params=query, timeout=aiohttp.ClientTimeout()) as events:
                        async for line in events.content:
                            event = json.loads(line)
                            if event["type"] == "ERROR":
                                break
                            self._note(items, event)
                            if result := condition(list(items.values())):
                                return result
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            there = "\n".join(json.dumps([name, item.get("status", item)]) for name, item in items.items())
            raise AssertionError(f"waited {timeout_s:g} s in vain: {what}; there is:\n{there}") from None

    def _note(self, items: dict[str, JsonObject], event: JsonObject) -> None:
        name = event["object"]["metadata"]["name"]
        if event["type"] == "DELETED":
            items.pop(name, None)
        else:
            items[name] = event["object"]

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> JsonObject:
        # The API server keeps the text of opaque parameters, and refuses a status in which its spaces have gone.
        data = None if body is None else json.dumps(body, separators=(",", ":"))
        headers = {"Content-Type": "application/json"}
        async with self._session.request(method, path, data=data, headers=headers) as answer:
            if answer.status >= 300:
                raise ApiServerError(f"{method} {path}: {answer.status} {await answer.text()}")
            return dict(await answer.json())
