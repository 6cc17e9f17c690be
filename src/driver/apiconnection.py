# SPDX-License-Identifier: Apache-2.0
"""The way to the API server: where it is, who we are to it, and connections that stay open.

The official client brings configuration, credentials and their plugins. Its own transport and its generated models are
on no path: turning one claim into models costs more than everything else in a prepare, and the transport reads
``~/.netrc`` in a thread for every call. Credentials are replaced in place while a driver runs for months, so whatever a
call shows to be outdated is read again.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import importlib
import importlib.util
import json
import os
import ssl
import stat
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

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
from kubernetes.aio.config import ConfigException, load_incluster_config
from kubernetes.aio.config.kube_config import KubeConfigLoader

from driver.answers import failure, reason
from driver.errors import ApiError, ConfigError
from driver.serial import is_cancelled

if TYPE_CHECKING:
    from collections.abc import Iterator

# Whoever asks for it later gets the class.
vars(sys.modules["kubernetes.aio.client"]).pop("ApiClient", None)

# Every TLS connection keeps a buffer of this size, 256 KiB by default. A TLS record has 16 KiB at most.
asyncio.sslproto.SSLProtocol.max_size = 64 << 10

_CREDENTIAL_PLUGIN_TIMEOUT: Final = 30.0
_RELOAD_INTERVAL: Final = 10.0
_EXPIRY_MARGIN: Final = timedelta(minutes=1)
# The server closes idle connections after 90 s; a prepare that finds one open saves a TLS handshake.
_KEEP_ALIVE: Final = 75.0
_MOST_CONNECTIONS: Final = 100
# One slice of a large node comes as a single line of a watch.
_READ_BUFFER: Final = 1 << 21
_LARGEST_KUBECONFIG: Final = 1 << 20
_LARGEST_CREDENTIAL: Final = 8 << 20


class ApiConnection:
    """Connections to one API server, and how to authenticate on them."""

    def __init__(self, kubeconfig: str, configuration: Configuration, expiry: datetime | None) -> None:
        self._kubeconfig = kubeconfig
        self._configuration = configuration
        self._expiry = expiry
        self._session = _open_session(configuration)
        self._identity = _identity(configuration)
        self._proxy = _proxy(configuration)
        self._loading = asyncio.Lock()
        self._loaded_at = time.monotonic()

    @classmethod
    async def connect(cls, kubeconfig: str) -> ApiConnection:
        """Read the configuration; the server itself need not be reachable yet.

        Parameters
        ----------
        kubeconfig : str
            Path of a kubeconfig file; empty for the service account that a pod is given.

        Returns
        -------
        ApiConnection

        Raises
        ------
        ConfigError
            If the file is missing or broken, or there is no file and this is not a pod.
        """
        configuration, expiry = await _load(kubeconfig)
        return cls(kubeconfig, configuration, expiry)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def send(
        self,
        method: str,
        path: str,
        limits: aiohttp.ClientTimeout,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        """Send a request and return the answer, whatever its status, before its body is read.

        Parameters
        ----------
        method, path : str
        limits : aiohttp.ClientTimeout
            How long it may take.
        query : mapping of str to str, optional
        body : mapping of str to object, optional
            What to send as JSON.
        content_type : str
            What that JSON is.

        Raises
        ------
        ApiError
            If no answer comes, or credentials are refused and there are no others.
        """
        if self._expiry is not None and datetime.now(UTC) + _EXPIRY_MARGIN > self._expiry:
            await self._reload(time.monotonic())
        url = f"{path}?{urlencode(query)}" if query else path
        data = None if body is None else json.dumps(body)
        started = time.monotonic()
        try:
            response = await self._request(method, url, data, content_type, limits)
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
            return await self._request(method, url, data, content_type, limits)
        except aiohttp.ClientConnectorCertificateError as error:
            raise refused from error

    async def _request(
        self, method: str, url: str, data: str | None, content_type: str, limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        configuration = self._configuration
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "dracpu"}
        try:
            credentials = (await configuration.auth_settings()).get("BearerToken")
            if credentials is not None and credentials["value"]:
                headers[credentials["key"]] = credentials["value"].strip()
            return await self._session.request(
                method,
                f"{configuration.host}{url}",
                data=data,
                headers=headers,
                timeout=limits,
                proxy=self._proxy,
                proxy_headers=configuration.proxy_headers,
                server_hostname=configuration.tls_server_name,
            )
        except aiohttp.ClientConnectorCertificateError:
            raise
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Not who asks: the session was closed, as credentials were replaced, while an address was looked up.
            raise ApiError(0, "the connection to the API server was replaced; it is tried again") from None
        except (aiohttp.ClientError, ConfigException, OSError, ValueError) as error:
            raise self._unreachable(error) from error

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
                        previous, self._session = self._session, _open_session(configuration)
                        await previous.close()
                        self._identity = identity
                except ConfigError as error:
                    raise ApiError(0, str(error)) from error
                self._configuration, self._expiry = configuration, expiry
                self._proxy = _proxy(configuration)
            return self._loaded_at >= asked_at


def _open_session(configuration: Configuration) -> aiohttp.ClientSession:
    try:
        context = _tls(configuration)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"the API server's certificates cannot be used: {reason(error)}") from error
    connector = aiohttp.TCPConnector(limit=_MOST_CONNECTIONS, ssl=context, keepalive_timeout=_KEEP_ALIVE)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=_READ_BUFFER)


def _tls(configuration: Configuration) -> ssl.SSLContext:
    if configuration.verify_ssl:
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
        # Python 3.13 began to insist on extensions that the CAs of many clusters lack and no other client asks for.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    return context


def _proxy(configuration: Configuration) -> str | None:
    """Return the proxy that the configuration or, as other clients do it, the environment names for the server."""
    if configuration.proxy:
        return str(configuration.proxy)
    address = urlsplit(configuration.host)
    proxy = getproxies().get(address.scheme)
    return None if proxy is None or proxy_bypass(address.hostname or "") else proxy


async def _load(kubeconfig: str) -> tuple[Configuration, datetime | None]:
    """Read the configuration; also return when a credential plugin's token expires."""
    configuration = Configuration()
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
    with path.open("rb") as file:
        raw = file.read(_LARGEST_KUBECONFIG + 1)
    if len(raw) > _LARGEST_KUBECONFIG:
        raise ValueError(f"larger than {_LARGEST_KUBECONFIG} bytes, the most that is read")
    try:
        document = yaml.load(raw.decode(), yaml.CSafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {reason(error)}") from error
    if not isinstance(document, dict):
        raise ValueError(f"expected a mapping, not {type(document).__name__}")
    for name in _named_files(document):
        _check_file(path.parent / name)
    return KubeConfigLoader(document, config_base_path=str(path.parent))  # type: ignore[no-untyped-call]


def _named_files(document: Mapping[str, Any]) -> Iterator[str]:
    """Find the files that a kubeconfig names, as far as it is of a kubeconfig's form."""
    for entries, kind, keys in (
        ("clusters", "cluster", ("certificate-authority",)),
        ("users", "user", ("client-certificate", "client-key", "tokenFile")),
    ):
        found = document.get(entries)
        for entry in found if isinstance(found, list) else ():
            named = entry.get(kind) if isinstance(entry, dict) else None
            if isinstance(named, dict):
                yield from (named[key] for key in keys if isinstance(named.get(key), str) and named[key])


def _check_file(path: Path) -> None:
    """Refuse what the client and OpenSSL would read for ever; whatever else is wrong they say themselves."""
    try:
        found = path.stat()
    except OSError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no regular file")
    if found.st_size > _LARGEST_CREDENTIAL:
        raise ValueError(f"{path} is larger than {_LARGEST_CREDENTIAL} bytes, the most that is read")


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
