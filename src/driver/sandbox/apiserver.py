# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that behaves like kube-apiserver where authors of DRA drivers and schedulers can tell the difference.

It serves nodes, pods, events, resource claims, resource slices and device classes on the loopback address, without
authentication, from memory. Lists, watches (bookmarks, expired versions, initial events), optimistic concurrency,
preconditions, merge patches, server-side apply and the API's validation of slices and claims work as on a real server;
tables, dry runs, label selectors, strategic merge patches beyond what a merge patch does and admission do not exist.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import yaml
from aiohttp import web

from driver.sandbox.apistatus import JsonObject
from driver.sandbox.claimrules import ClaimRules
from driver.sandbox.endpoints import Endpoints, Fault, FaultCallback
from driver.sandbox.kinds import NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES, FieldSelector, Kind
from driver.sandbox.registry import Registry
from driver.sandbox.slicerules import SliceRules
from driver.sandbox.store import ObjectStore

__all__ = ["ApiServer", "Fault"]

_T = TypeVar("_T")


class ApiServer:
    """The API server of the box.

    Use it as an asynchronous context manager in a running loop, or `in_thread()` from anywhere.

    Parameters
    ----------
    gates : collection of str
        Feature gates that are on although they are off in Kubernetes 1.37: `DRAListTypeAttributes`,
        `DRANodeAllocatableResources`. The latter also makes the server refuse mapped resources for a node whose
        `status.declaredFeatures` does not have it.
    fault : callable, optional
        Called with method and path (no query) of every request to a resource; a watch has the method `WATCH`. Returns
        None to let it pass, a status to answer, or a `Fault`.
    port : int
        0 takes a free one.
    bookmark_interval_s : float
        Seconds between the bookmarks of a watch that asked for them.
    history : int
        How many changes watches can look back.

    Attributes
    ----------
    registry : Registry
        Reads and writes objects in this process, by the same rules; may be used from any thread.
    """

    def __init__(
        self,
        *,
        gates: Collection[str] = (),
        fault: FaultCallback | None = None,
        port: int = 0,
        bookmark_interval_s: float = 10.0,
        history: int = 10_000,
    ) -> None:
        unknown = sorted(set(gates) - SliceRules.GATES)
        if unknown:
            raise ValueError(f"unknown feature gates {unknown}: known are {sorted(SliceRules.GATES)}")
        self._store = ObjectStore(history)
        slice_rules = SliceRules(frozenset(gates), self._declared_features)
        self.registry = Registry(self._store, {RESOURCE_SLICES: slice_rules, RESOURCE_CLAIMS: ClaimRules()})
        self._endpoints = Endpoints(self._store, self.registry, bookmark_interval_s)
        self.fault = fault
        self._port = port
        self._runner: web.AppRunner | None = None

    @property
    def fault(self) -> FaultCallback | None:
        """Decides which requests go wrong; may be replaced at any time."""
        return self._endpoints.fault

    @fault.setter
    def fault(self, callback: FaultCallback | None) -> None:
        self._endpoints.fault = callback

    @property
    def requests(self) -> deque[tuple[str, str]]:
        """Method and path of the latest requests to resources, oldest first; a watch has the method `WATCH`."""
        return self._endpoints.requests

    @property
    def url(self) -> str:
        """The base URL; valid once started, and the same after a restart."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> ApiServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen. After `stop` the server can be started again: same port, same objects."""
        # A watch ends when its client goes; one that is still there must not keep the server from stopping.
        self._runner = web.AppRunner(
            self._endpoints.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.0
        )
        await self._runner.setup()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener, backlog=1024).start()

    async def stop(self) -> None:
        """Stop listening and cut all connections."""
        if self._runner is not None:
            self._endpoints.cut_connections()
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def in_thread(self) -> Iterator[ApiServer]:
        """Serve from a thread with a loop of its own until the block ends."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="box-apiserver", daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.start(), loop).result()
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self.stop(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def create(self, kind: Kind, body: JsonObject) -> JsonObject:
        """Create an object in this process, with its own `metadata.uid` if it has one, and return it as stored."""
        namespace = _namespace_of(kind, body)
        return self.registry.create(kind, namespace, body, "box", keep_uid=True)

    def put(self, kind: Kind, body: JsonObject, subresource: str = "") -> JsonObject:
        """Create or replace an object in this process and return it as stored.

        A `status` is written as well, without a second call, as far as the kind has one.
        """
        namespace, name = _namespace_of(kind, body), str(body["metadata"]["name"])
        stored = self._store.get(kind, namespace, name)
        if subresource:
            return self.registry.update(kind, namespace, name, body, subresource, "box")
        stored = self.create(kind, body) if stored is None else self.registry.update(kind, namespace, name, body)
        if "status" in body and "status" in kind.subresources:
            whole = {**stored, "status": body["status"]}
            stored = self.registry.update(kind, namespace, name, whole, "status", "box")
        return stored

    def get(self, kind: Kind, name: str, namespace: str = "default") -> JsonObject | None:
        """Return an object in this process, or None; `namespace` is not looked at where the kind has none."""
        return self._store.get(kind, namespace if kind.namespaced else "", name)

    def list(self, kind: Kind, field_selector: str = "") -> list[JsonObject]:
        """Return the matching objects of all namespaces in this process."""
        return self._store.select(kind, None, FieldSelector.parse(kind, field_selector))[0]

    def delete(self, kind: Kind, name: str, namespace: str = "default") -> None:
        """Delete an object in this process; a pod at once, as its kubelet would at the end."""
        namespace = namespace if kind.namespaced else ""
        self.registry.delete(kind, namespace, name, {"gracePeriodSeconds": 0} if kind is PODS else {})

    async def wait_until(self, condition: Callable[[], _T], timeout_s: float | None = 60.0) -> _T:
        """Evaluate `condition` now and after every change until it gives something true, and return that.

        Raises
        ------
        TimeoutError
            If it does not become true in time.
        """
        changed = asyncio.Event()
        unsubscribe = self._store.wake_on_change(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := condition()):
                    await changed.wait()
                    changed.clear()
                return found
        finally:
            unsubscribe()

    def compact(self) -> None:
        """Forget the history, so that watches that start from an older version are told that it is gone."""
        self._store.compact()

    def cut_connections(self) -> None:
        """Break all open connections, watches among them."""
        self._endpoints.cut_connections()

    def write_kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for this server and return its path."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "box", "cluster": {"server": self.url}}],
            "users": [{"name": "box", "user": {}}],
            "contexts": [{"name": "box", "context": {"cluster": "box", "user": "box", "namespace": "default"}}],
            "current-context": "box",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def _declared_features(self, node_name: str) -> Collection[str] | None:
        node = self._store.get(NODES, "", node_name) or {}
        features: Collection[str] | None = node.get("status", {}).get("declaredFeatures")
        return features


def _namespace_of(kind: Kind, body: JsonObject) -> str:
    return str(body["metadata"].get("namespace", "default")) if kind.namespaced else ""
