# SPDX-License-Identifier: Apache-2.0
"""The API server as the admin sees it, without kubectl: for what tests do often, or wait for."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any

import aiohttp

JsonObject = dict[str, Any]
Condition = Callable[[list[JsonObject]], Any]

NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/default/pods"
EVENTS = "/api/v1/namespaces/default/events"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
CLAIM_TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
DEVICE_CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"

_AGAIN_S = 1.0


class ApiError(Exception):
    """A request that was refused.

    Attributes
    ----------
    status : int
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _as_json(value: object) -> str:
    # As Go does. The API server keeps opaque parameters letter by letter, and takes those of an allocation for changed
    # when somebody else writes the object without the spaces.
    return json.dumps(value, separators=(",", ":"))


class Api:
    """A client of the API server; an asynchronous context manager.

    Parameters
    ----------
    url : str
    tls : ssl.SSLContext
        Whom it trusts, and who it is.
    """

    def __init__(self, url: str, tls: ssl.SSLContext) -> None:
        self._url = url
        self._tls = tls
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Api:
        connector = aiohttp.TCPConnector(ssl=self._tls)
        self._session = aiohttp.ClientSession(connector=connector, json_serialize=_as_json)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> JsonObject | None:
        """Return an object, or None if it is not there."""
        try:
            return await self.request("GET", path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def list(self, path: str, **parameters: str) -> list[JsonObject]:
        """Return the objects of a collection."""
        items: list[JsonObject] = (await self.request("GET", path, parameters=parameters))["items"]
        return items

    async def create(self, path: str, body: JsonObject) -> JsonObject:
        """Create an object in a collection, and return it as it is stored."""
        return await self.request("POST", path, body)

    async def replace(self, path: str, body: JsonObject) -> JsonObject:
        """Replace an object, and return it as it is stored."""
        return await self.request("PUT", path, body)

    async def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """Delete an object if it is there, or begin to."""
        body = None if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            await self.request("DELETE", path, body)
        except ApiError as error:
            if error.status != 404:
                raise

    async def until(self, collection: str, condition: Condition, what: str, timeout_s: float) -> Any:
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
                    answer = await self.request("GET", collection)
                    items = {item["metadata"]["name"]: item for item in answer["items"]}
                    if result := condition(list(items.values())):
                        return result
                    query = {"watch": "1", "resourceVersion": answer["metadata"]["resourceVersion"]}
                    async with self._session.get(
                        f"{self._url}{collection}", params=query, timeout=aiohttp.ClientTimeout()
                    ) as events:
                        async for line in events.content:
                            event = json.loads(line)
                            if event["type"] == "ERROR":
                                break
                            _note(items, event)
                            if result := condition(list(items.values())):
                                return result
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            there = "\n".join(json.dumps([name, item.get("status", item)]) for name, item in items.items())
            raise AssertionError(f"waited {timeout_s:g} s in vain: {what}; there is:\n{there}") from None

    async def request(
        self, method: str, path: str, body: JsonObject | None = None, *, parameters: dict[str, str] | None = None
    ) -> JsonObject:
        """Send a request, and return the object that answers it.

        Raises
        ------
        ApiError
            If it is refused.
        aiohttp.ClientError
            If the API server does not answer.
        """
        url = f"{self._url}{path}"
        async with self._session.request(method, url, json=body, params=parameters) as answer:
            data: JsonObject = await answer.json()
            if answer.status >= 400:
                raise ApiError(answer.status, data.get("message", ""))
            return data


def _note(items: dict[str, JsonObject], event: JsonObject) -> None:
    name = event["object"]["metadata"]["name"]
    if event["type"] == "DELETED":
        items.pop(name, None)
    else:
        items[name] = event["object"]
