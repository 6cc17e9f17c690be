# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API as this driver needs it: eight calls, plain JSON in and out.

Every call is bounded in time and every answer is checked (`driver.answers`); every failure is an `ApiError`.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import aiohttp

from driver.answers import JsonObject, check_list, check_object, failure, parse, read, read_lines, refusal
from driver.apiconnection import ApiConnection
from driver.errors import ApiError
from driver.names import DRIVER_NAME

_GROUP: Final = "/apis/resource.k8s.io/v1"
_SLICES: Final = f"{_GROUP}/resourceslices"
_WRITER: Final = {"fieldManager": DRIVER_NAME}

_CALL_TIMEOUT: Final = aiohttp.ClientTimeout(total=10, connect=5)
# The server sends a bookmark about once a minute, so a watch that is silent for longer hangs on a dead connection.
_WATCH_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, connect=5, sock_read=90)
_WATCH_SECONDS: Final = (240, 480)

_PAGE: Final = 16

_SEGMENT: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)


class Cluster:
    """A connection to one API server."""

    def __init__(self, connection: ApiConnection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, kubeconfig: str) -> Cluster:
        """Read the configuration; see `ApiConnection.connect`."""
        return cls(await ApiConnection.connect(kubeconfig))

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()

    async def get_claim(self, namespace: str, name: str) -> JsonObject:
        """Fetch a ResourceClaim.

        Raises
        ------
        ApiError
        """
        return await self._call("GET", _claim_path(namespace, name))

    async def get_node(self, name: str) -> JsonObject:
        """Fetch a Node.

        Raises
        ------
        ApiError
        """
        return await self._call("GET", f"/api/v1/nodes/{_segment('node', name)}")

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: Sequence[Mapping[str, object]]
    ) -> JsonObject:
        """Make `devices` this driver's entries of a claim's ``status.devices``.

        This is a server-side apply: the list has no strategic-merge key, so any other kind of patch would replace the
        entries of other drivers too.

        Parameters
        ----------
        namespace, name, uid : str
            The claim. The server refuses another claim of the same name, with status 422.
        devices : Sequence[Mapping[str, object]]
            Complete entries; an entry of ours that is missing here is removed.

        Returns
        -------
        dict
            The claim as it is stored now.

        Raises
        ------
        ApiError
        """
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": namespace, "name": name, "uid": uid},
            "status": {"devices": list(devices)},
        }
        return await self._call(
            "PATCH",
            f"{_claim_path(namespace, name)}/status",
            query={**_WRITER, "force": "true"},
            body=body,
            content_type="application/apply-patch+yaml",
        )

    async def list_slices(self, node: str) -> tuple[list[JsonObject], str]:
        """List this driver's ResourceSlices of a node.

        Parameters
        ----------
        node : str
            The node's name.

        Returns
        -------
        items : list of dict
        resource_version : str
            Where a watch has to go on.

        Raises
        ------
        ApiError
        """
        items: list[JsonObject] = []
        # In small pages: a node of many single CPUs has megabytes of slices, and parsing blocks the event loop.
        query = {"fieldSelector": _selector(node), "limit": str(_PAGE)}
        while True:
            page = await self._call("GET", _SLICES, query=query, kind="list")
            items += page["items"]
            metadata = page["metadata"]
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            query["continue"] = str(metadata["continue"])

    async def watch_slices(self, node: str, resource_version: str) -> AsyncGenerator[tuple[str, JsonObject], None]:
        """Follow this driver's ResourceSlices of a node until the server ends the watch.

        Parameters
        ----------
        node : str
            The node's name.
        resource_version : str
            As `list_slices` returned it.

        Yields
        ------
        kind : str
            ``ADDED``, ``MODIFIED`` or ``DELETED``.
        slice : dict

        Raises
        ------
        ApiError
            With status 410 if the resource version is too old: list again.
        """
        query = {
            "watch": "true",
            "fieldSelector": _selector(node),
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(*_WATCH_SECONDS)),
        }
        asked = f"WATCH {_SLICES}"
        response = await self._connection.send("GET", _SLICES, _WATCH_TIMEOUT, query=query)
        async with response:
            if response.status != 200:
                raise await failure(response)
            async for line in read_lines(asked, response):
                event = parse(asked, line)
                kind, received = event.get("type"), event.get("object")
                if kind == "BOOKMARK":
                    continue
                if kind == "ERROR":
                    raise refusal(0, received)
                yield str(kind), check_object(asked, received)

    async def create_slice(self, body: Mapping[str, object]) -> JsonObject:
        """Create a ResourceSlice and return it as it is stored.

        Raises
        ------
        ApiError
        """
        return await self._call("POST", _SLICES, query=_WRITER, body=body)

    async def replace_slice(self, body: Mapping[str, Any]) -> JsonObject:
        """Replace the ResourceSlice that has the name and the resource version of `body`; return it as it is stored.

        Raises
        ------
        ApiError
            With status 409 if somebody changed it since, 404 if it is gone.
        """
        name = _segment("slice", body["metadata"]["name"])
        return await self._call("PUT", f"{_SLICES}/{name}", query=_WRITER, body=body)

    async def delete_slice(self, name: str, uid: str, resource_version: str) -> None:
        """Delete exactly this version of a ResourceSlice.

        Raises
        ------
        ApiError
            With status 409 if it is another version by now, 404 if it is gone.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid, "resourceVersion": resource_version},
        }
        await self._call("DELETE", f"{_SLICES}/{_segment('slice', name)}", body=body, kind="any")

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        kind: str = "object",
    ) -> JsonObject:
        asked = f"{method} {path}"
        response = await self._connection.send(
            method, path, _CALL_TIMEOUT, query=query, body=body, content_type=content_type
        )
        async with response:
            if not 200 <= response.status < 300:
                raise await failure(response)
            answer = parse(asked, await read(asked, response))
        if kind == "list":
            check_list(asked, answer)
        elif kind == "object":
            check_object(asked, answer)
        return answer


def _segment(kind: str, name: str) -> str:
    """Check a name that becomes part of a URL path."""
    if not _SEGMENT.fullmatch(name):
        raise ApiError(400, f"{kind} name {name[:80]!r} is malformed: expected a DNS name in lower case")
    return name


def _claim_path(namespace: str, name: str) -> str:
    return f"{_GROUP}/namespaces/{_segment('namespace', namespace)}/resourceclaims/{_segment('claim', name)}"


def _selector(node: str) -> str:
    return f"spec.nodeName={_segment('node', node)},spec.driver={DRIVER_NAME}"
