# SPDX-License-Identifier: Apache-2.0
"""The API server as the admin sees it, without kubectl: for what tests do often, or wait for."""

from __future__ import annotations

import json
import ssl
from typing import Any

import aiohttp

JsonObject = dict[str, Any]

NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/default/pods"
EVENTS = "/api/v1/namespaces/default/events"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
CLAIM_TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
DEVICE_CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"


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
