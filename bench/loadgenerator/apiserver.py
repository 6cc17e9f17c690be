# SPDX-License-Identifier: Apache-2.0
"""The API server: one of the sandbox in a process of its own, or a real one; and the plain client that all use.

The client is the rival as well: what it needs for a bare GET is the least that any driver must wait for.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_kube_config

from driver.sandbox.apiserver import ApiServer

_RESOURCES = "/apis/resource.k8s.io/v1"
_CLAIMS = f"{_RESOURCES}/namespaces/default/resourceclaims"
_SLICES = f"{_RESOURCES}/resourceslices"
_STARTED_S = 30.0


class Api:
    """Raw JSON over connections that are kept alive."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @classmethod
    @asynccontextmanager
    async def open(cls, kubeconfig: Path) -> AsyncIterator[Api]:
        """Connect to the server of a kubeconfig."""
        settings = Configuration()
        await load_kube_config(str(kubeconfig), client_configuration=settings, persist_config=False)
        context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if not settings.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
        credentials = (await settings.auth_settings()).get("BearerToken")
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if credentials is not None and credentials["value"]:
            headers[credentials["key"]] = credentials["value"]
        connector = aiohttp.TCPConnector(ssl=context, limit=0, keepalive_timeout=75)
        async with aiohttp.ClientSession(settings.host, headers=headers, connector=connector) as session:
            yield cls(session)

    async def get_claim(self, name: str) -> bytes:
        """Fetch a claim and do nothing with it: the bare GET."""
        async with self._session.get(f"{_CLAIMS}/{name}") as response:
            response.raise_for_status()
            return await response.read()

    async def version(self) -> str:
        """Return what the server calls its version."""
        async with self._session.get("/version") as response:
            response.raise_for_status()
            return str((await response.json())["gitVersion"])

    async def create_node(self, name: str) -> None:
        """Create a node, unless it is there."""
        await self._create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})

    async def create_claim(self, claim: dict[str, Any]) -> str:
        """Create a claim with its allocation and return its UID."""
        stored = await self._create(_CLAIMS, claim)
        stored["status"] = claim["status"]
        await self._send("PUT", f"{_CLAIMS}/{stored['metadata']['name']}/status", stored)
        return str(stored["metadata"]["uid"])

    async def delete_claim(self, name: str) -> None:
        """Delete a claim."""
        await self._delete(f"{_CLAIMS}/{name}")

    async def forget_node(self, name: str) -> None:
        """Delete a node and its slices."""
        async with self._session.get(_SLICES, params={"fieldSelector": f"spec.nodeName={name}"}) as response:
            found = (await response.json())["items"]
        for piece in found:
            await self._delete(f"{_SLICES}/{piece['metadata']['name']}")
        await self._delete(f"/api/v1/nodes/{name}")

    async def wait_published(self, node: str) -> list[dict[str, Any]]:
        """Wait for the node's slices until none of the latest generation is missing, and return them."""
        found: dict[str, dict[str, Any]] = {}
        query = {"watch": "true", "fieldSelector": f"spec.nodeName={node}", "resourceVersion": "0"}
        unlimited = aiohttp.ClientTimeout(total=None)
        async with self._session.get(_SLICES, params=query, timeout=unlimited, read_bufsize=1 << 24) as response:
            response.raise_for_status()
            async for line in response.content:
                event = json.loads(line)
                piece = event["object"]
                if event["type"] in ("ADDED", "MODIFIED"):
                    found[piece["metadata"]["name"]] = piece
                elif event["type"] == "DELETED":
                    found.pop(piece["metadata"]["name"], None)
                else:
                    continue
                pools = [piece["spec"]["pool"] for piece in found.values()]
                latest = max((pool["generation"] for pool in pools), default=0)
                counts = [pool["resourceSliceCount"] for pool in pools if pool["generation"] == latest]
                if counts and len(counts) == counts[0]:
                    return [piece for piece in found.values() if piece["spec"]["pool"]["generation"] == latest]
        raise ConnectionError("the API server ended the watch of the slices")

    async def _create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._send("POST", path, body)

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        # An allocation is stored byte for byte, and must look as Go's JSON does if it is ever to be changed again.
        data = json.dumps(body, separators=(",", ":"))
        async with self._session.request(method, path, data=data) as response:
            if not response.ok:
                raise ConnectionError(f"{method} {path}: {response.status}: {await response.text()}")
            return await response.json()

    async def _delete(self, path: str) -> None:
        async with self._session.delete(path) as response:
            if not response.ok and response.status != 404:
                raise ConnectionError(f"DELETE {path}: {response.status}: {await response.text()}")


@contextmanager
def sandbox_api_server(kubeconfig: Path) -> Iterator[None]:
    """Run the sandbox's API server in a process of its own, where it takes no time from what is measured here."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(kubeconfig, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_STARTED_S):
            raise TimeoutError("the sandbox's API server did not start")
        ours.recv()
        yield
    finally:
        ours.close()
        process.join()


def _serve(kubeconfig: Path, connection: Connection) -> None:
    async def serve() -> None:
        async with ApiServer() as server:
            server.write_kubeconfig(kubeconfig)
            connection.send(os.getpid())
            gone = asyncio.Event()
            asyncio.get_running_loop().add_reader(connection.fileno(), gone.set)
            await gone.wait()

    asyncio.run(serve())
