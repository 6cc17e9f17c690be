# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API as this driver needs it: eight calls, plain JSON in and out.

The official client brings configuration, TLS, proxies, credentials and the connection pool; its generated models are on
no path, because turning one claim into them costs more than everything else in a prepare. Every call is bounded in time
and every answer is checked (`driver.answers`); every failure is an `ApiError`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import random
import re
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import aiohttp
import yaml

# The packages' own __init__ load the synchronous client and much else that these modules have no use for: most of the
# import's time, and 17 MB for the life of the process. So the packages are entered without running that. The loaders
# name ApiClient, which brings pydantic, only for functions that are not called here: they find a placeholder.
if "kubernetes" not in sys.modules:
    for _name in ("kubernetes", "kubernetes.aio"):
        if (_spec := importlib.util.find_spec(_name)) is not None:
            sys.modules[_name] = importlib.util.module_from_spec(_spec)
    vars(sys.modules["kubernetes"])["aio"] = sys.modules["kubernetes.aio"]
    vars(importlib.import_module("kubernetes.aio.client"))["ApiClient"] = None

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config
from kubernetes.aio.config.kube_config import KubeConfigLoader

from driver.answers import (
    JsonObject,
    check_list,
    check_object,
    failure,
    parse,
    read,
    read_lines,
    reason,
    refusal,
)
from driver.errors import ApiError, ConfigError
from driver.names import DRIVER_NAME

# Whoever asks for it later gets the class.
vars(sys.modules["kubernetes.aio.client"]).pop("ApiClient", None)

_GROUP: Final = "/apis/resource.k8s.io/v1"
_SLICES: Final = f"{_GROUP}/resourceslices"
_WRITER: Final = {"fieldManager": DRIVER_NAME}

_CALL_TIMEOUT: Final = aiohttp.ClientTimeout(total=10, connect=5)
# The server sends a bookmark about once a minute, so a watch that is silent for longer hangs on a dead connection.
_WATCH_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, connect=5, sock_read=90)
_WATCH_SECONDS: Final = (240, 480)
_CREDENTIAL_PLUGIN_TIMEOUT: Final = 30.0
_RELOAD_INTERVAL: Final = 10.0
_EXPIRY_MARGIN: Final = timedelta(minutes=1)
# The server closes idle connections after 90 s; a prepare that finds one open saves a TLS handshake.
_KEEP_ALIVE: Final = 75.0

_PAGE: Final = 16

_SEGMENT: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)


class Cluster:
    """A connection to one API server."""

    def __init__(self, kubeconfig: str, configuration: Configuration, expiry: datetime | None) -> None:
        self._kubeconfig = kubeconfig
        self._configuration = configuration
        self._expiry = expiry
        self._transport = _transport(configuration)
        self._identity = _identity(configuration)
        self._loading = asyncio.Lock()
        self._loaded_at = time.monotonic()

    @classmethod
    async def connect(cls, kubeconfig: str) -> Cluster:
        """Read the configuration; the server itself need not be reachable yet.

        Parameters
        ----------
        kubeconfig : str
            Path of a kubeconfig file; empty for the service account that a pod is given.

        Returns
        -------
        Cluster

        Raises
        ------
        ConfigError
            If the file is missing or broken, or there is no file and this is not a pod.
        """
        configuration, expiry = await _load(kubeconfig)
        return cls(kubeconfig, configuration, expiry)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

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
        response = await self._send("GET", _SLICES, query=query, limits=_WATCH_TIMEOUT)
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
        response = await self._send(method, path, query=query, body=body, content_type=content_type)
        async with response:
            if not 200 <= response.status < 300:
                raise await failure(response)
            answer = parse(asked, await read(asked, response))
        if kind == "list":
            check_list(asked, answer)
        elif kind == "object":
            check_object(asked, answer)
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        limits: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        if self._expiry is not None and datetime.now(UTC) > self._expiry - _EXPIRY_MARGIN:
            await self._reload(time.monotonic())
        limits = limits or _CALL_TIMEOUT
        started = time.monotonic()
        try:
            response = await self._request(method, path, query, body, content_type, limits)
            if response.status != 401:
                return response
            async with response:
                refused = await failure(response)
        except aiohttp.ClientConnectorCertificateError as error:
            refused = self._unreachable(error)
        # Tokens, client certificates and CA bundles are all replaced in place while a driver runs for months.
        if not await self._reload(started):
            raise refused
        try:
            return await self._request(method, path, query, body, content_type, limits)
        except aiohttp.ClientConnectorCertificateError as error:
            raise refused from error

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        content_type: str,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        url = f"{self._configuration.host}{path}"
        if query:
            url += f"?{urlencode(query)}"
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "dracpu"}
        try:
            credentials = (await self._configuration.auth_settings()).get("BearerToken")
            if credentials is not None and credentials["value"]:
                headers[credentials["key"]] = credentials["value"].strip()
            answer = await self._transport.request(  # type: ignore[no-untyped-call]
                method, url, headers, body, _request_timeout=limits
            )
        except aiohttp.ClientConnectorCertificateError:
            raise
        except (aiohttp.ClientError, ConfigException, OSError, ValueError) as error:
            raise self._unreachable(error) from error
        response: aiohttp.ClientResponse = answer.response
        return response

    def _unreachable(self, error: Exception) -> ApiError:
        return ApiError(0, f"the API server at {self._configuration.host} cannot be used: {reason(error)}")

    async def _reload(self, asked_at: float) -> bool:
        """Read the configuration again unless that was done just now; tell whether it is newer than `asked_at`."""
        async with self._loading:
            now = time.monotonic()
            if self._loaded_at < asked_at and now - self._loaded_at >= _RELOAD_INTERVAL:
                self._loaded_at = now
                try:
                    configuration, expiry = await _load(self._kubeconfig)
                    identity = _identity(configuration)
                    if identity != self._identity:
                        previous, self._transport = self._transport, _transport(configuration)
                        await previous.close()
                        self._identity = identity
                except ConfigError as error:
                    raise ApiError(0, str(error)) from error
                self._configuration, self._expiry = configuration, expiry
            return self._loaded_at >= asked_at


class _Transport(RESTClientObject):
    """The client's transport with connections that stay open between prepares."""

    def _create_connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(limit=self.maxsize, ssl=self.ssl_context, keepalive_timeout=_KEEP_ALIVE)


def _transport(configuration: Configuration) -> _Transport:
    try:
        return _Transport(configuration)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"the API server's certificates cannot be used: {reason(error)}") from error


async def _load(kubeconfig: str) -> tuple[Configuration, datetime | None]:
    """Read the configuration; also return when a credential plugin's token expires."""
    configuration = Configuration()
    # Python 3.13 began to insist on extensions that the CAs of many clusters lack and no other client asks for.
    configuration.disable_strict_ssl_verification = True
    if not kubeconfig:
        try:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            raise ConfigError(
                f"no kubeconfig is given, and this is not a pod with a service account: {reason(error)}"
            ) from error
        return configuration, None

    try:
        loader = await asyncio.to_thread(_kubeconfig_loader, kubeconfig)
        loading = loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
        await asyncio.wait_for(loading, _CREDENTIAL_PLUGIN_TIMEOUT)
        address = urlsplit(configuration.host)
    except TimeoutError as error:
        raise ConfigError(
            f"kubeconfig {kubeconfig}: its credential plugin did not answer in {_CREDENTIAL_PLUGIN_TIMEOUT:g} s"
        ) from error
    except (ConfigException, OSError, ValueError) as error:
        raise ConfigError(f"kubeconfig {kubeconfig}: {reason(error)}") from error
    except (TypeError, LookupError, AttributeError) as error:  # the client checks little of what it reads
        raise ConfigError(f"kubeconfig {kubeconfig}: malformed: {reason(error)}") from error
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(
            f"kubeconfig {kubeconfig}: the server must be an http or https URL, not {configuration.host!r}"
        )
    return configuration, getattr(loader, "exec_plugin_expiry", None)


def _kubeconfig_loader(kubeconfig: str) -> KubeConfigLoader:
    path = Path(kubeconfig).absolute()
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {reason(error)}") from error
    if not isinstance(document, dict):
        raise ValueError(f"expected a mapping, not {type(document).__name__}")
    return KubeConfigLoader(document, config_base_path=str(path.parent))  # type: ignore[no-untyped-call]


def _identity(configuration: Configuration) -> tuple[object, ...]:
    """Return what open connections depend on; files count with their time of change."""
    files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    return (
        configuration.host,
        configuration.verify_ssl,
        configuration.tls_server_name,
        configuration.proxy,
        *((name, os.stat(name).st_mtime_ns if name and os.path.exists(name) else 0) for name in files),
    )


def _segment(kind: str, name: str) -> str:
    """Check a name that becomes part of a URL path."""
    if not _SEGMENT.fullmatch(name):
        raise ApiError(400, f"{kind} name {name[:80]!r} is malformed: expected a DNS name in lower case")
    return name


def _claim_path(namespace: str, name: str) -> str:
    return f"{_GROUP}/namespaces/{_segment('namespace', namespace)}/resourceclaims/{_segment('claim', name)}"


def _selector(node: str) -> str:
    return f"spec.nodeName={_segment('node', node)},spec.driver={DRIVER_NAME}"
