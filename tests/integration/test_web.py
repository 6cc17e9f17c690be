# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress

import aiohttp
import pytest

from driver import web
from driver.errors import ConfigError
from driver.health import Health
from driver.web import WebServer, parse_bind_address


class Metrics:
    def __init__(self) -> None:
        self.renderings = 0

    def content_type(self, accept: str) -> str:
        return f"text/{'html' if 'html' in accept else 'plain'}; version=0.0.4; charset=utf-8"

    def render(self, accept: str) -> tuple[bytes, str]:
        self.renderings += 1
        return f"accept {accept}\n".encode(), self.content_type(accept)


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def server(health, metrics):
    server = WebServer("127.0.0.1:0", health, metrics, lambda: {"claims": 3, "devices": 8})
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def http(server):
    host, port = server.addresses[0]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        yield session


async def talk(server: WebServer, request: bytes) -> bytes:
    """Send bytes as they are and return all that comes back."""
    reader, writer = await asyncio.open_connection(*server.addresses[0])
    try:
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_healthz_follows_the_start(http, health):
    health.require("started", "the device model is not built")
    async with http.get("/healthz") as answer:
        assert answer.status == 503
        assert await answer.text() == "started: the device model is not built\n"
    health.set_ok("started")
    health.require("registered")
    async with http.get("/healthz") as answer:
        assert answer.status == 200
        assert await answer.text() == "ok\n"


async def test_readyz_says_what_is_missing_one_per_line(http, health):
    async with http.get("/readyz") as answer:
        assert answer.status == 503
        assert await answer.text() == "starting\n"
    health.set_ok("started")
    health.set_missing("registered", "waiting for the kubelet")
    health.set_missing("slices", "HTTP 403: not\nallowed")
    async with http.get("/readyz") as answer:
        assert answer.status == 503
        assert await answer.text() == "registered: waiting for the kubelet\nslices: HTTP 403: not allowed\n"
    health.set_ok("registered")
    health.set_ok("slices")
    async with http.get("/readyz") as answer:
        assert answer.status == 200
        assert await answer.text() == "ok\n"


async def test_readyz_says_what_is_not_as_it_should_be_though_all_is_ready(http, health):
    health.remark("kubepods", "cgroup /kubepods allows only CPUs 0")
    async with http.get("/readyz") as answer:
        assert answer.status == 503
        assert await answer.text() == "starting\nkubepods: cgroup /kubepods allows only CPUs 0\n"
    health.set_ok("started")
    async with http.get("/readyz") as answer:
        assert answer.status == 200
        assert await answer.text() == "ok\nkubepods: cgroup /kubepods allows only CPUs 0\n"
    async with http.get("/healthz") as answer:
        assert await answer.text() == "ok\n"
    async with http.get("/") as answer:
        assert "\nready\n  kubepods: cgroup /kubepods allows only CPUs 0\n" in await answer.text()


async def test_metrics_in_the_format_that_the_client_asks_for(http):
    async with http.get("/metrics", headers={"Accept": "application/openmetrics-text"}) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await answer.text() == "accept application/openmetrics-text\n"


async def test_the_page_for_people(http, health):
    health.set_missing("started", "the sockets are not open")
    async with http.get("/") as answer:
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        text = await answer.text()
    assert text.startswith("dracpu ")
    assert "\nnot ready\n  started: the sockets are not open\n" in text
    assert "\nclaims: 3\ndevices: 8\n" in text
    health.set_ok("started")
    async with http.get("/") as answer:
        assert "\nready\n" in await answer.text()


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/"])
async def test_head_answers_like_get_without_the_body(path, http, health):
    health.set_ok("started")
    async with http.get(path) as get, http.head(path) as head:
        assert head.status == get.status == 200
        assert head.headers["Content-Length"] == get.headers["Content-Length"] != "0"
        assert await head.read() == b""


async def test_unknown_paths_and_methods(http):
    for path in ["/nothing", "/healthz/", "/../etc/passwd", "/%2e%2e/etc/passwd", "/metrics%00"]:
        async with http.get(path) as answer:
            assert answer.status == 404, path
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"]:
        async with http.request(method, "/healthz", data=b"x") as answer:
            assert answer.status == 405, method
            assert answer.headers["Allow"] == "GET,HEAD"


async def test_each_connection_serves_one_request(server):
    answer = await talk(server, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    assert answer.count(b"HTTP/1.1 503") == 1
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\xff\xfe" * 1000 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(5000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500 + b"\r\n\r\n",
    ],
    ids=["junk", "version", "long-path", "long-header", "many-headers", "smuggling", "negative-length", "tls"],
)
async def test_junk_is_refused_and_harms_nobody(request_bytes, server, http, caplog):
    answer = await talk(server, request_bytes)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    async with http.get("/healthz") as probe:
        assert probe.status == 503
    assert caplog.records == []


async def test_a_body_that_is_announced_but_never_comes_holds_nothing_up(server):
    answer = await talk(server, b"GET /readyz HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503")


async def test_a_client_that_never_finishes_its_request_is_cut_off(health, monkeypatch):
    monkeypatch.setattr(web, "_LONGEST_CONNECTION_SECONDS", 0.1)
    server = WebServer("127.0.0.1:0", health, Metrics(), dict)
    await server.start()
    try:
        for beginning in [b"", b"GET / HTTP/1.1\r\nHost:"]:
            assert await talk(server, beginning) == b""
    finally:
        await server.stop()


async def test_idle_connections_never_keep_a_probe_out(server, http):
    idle = [await asyncio.open_connection(*server.addresses[0]) for _ in range(200)]
    async with asyncio.timeout(60), http.get("/healthz") as probe:
        assert probe.status == 503
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):  # the oldest had to make way
        await idle[0][0].readexactly(1)
    for _, writer in idle:
        writer.close()


async def test_an_address_in_use_is_tried_again_until_it_is_free(health, caplog, monkeypatch):
    monkeypatch.setattr(web, "_FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(web, "_LONGEST_RETRY_SECONDS", 0.02)
    caplog.set_level(logging.INFO, logger="driver.web")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        server = WebServer(address, health, Metrics(), dict)
        await server.start()
        await asyncio.sleep(0.1)
        assert server.addresses == []
        assert [record.getMessage() for record in caplog.records] == ["cannot serve HTTP, trying again"]
        assert caplog.records[0].fields["error"] == "Address already in use"
    try:
        async with asyncio.timeout(60):
            while not server.addresses:  # noqa: ASYNC110 -- the server has nobody to tell
                await asyncio.sleep(0.01)
        async with aiohttp.request("GET", f"http://{address}/healthz") as answer:
            assert answer.status == 503
    finally:
        await server.stop()


async def test_stopping_while_the_address_is_still_in_use(health):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        server = WebServer(f"127.0.0.1:{holder.getsockname()[1]}", health, Metrics(), dict)
        await server.start()
        await server.stop()
    assert server.addresses == []


async def test_stopping_frees_the_port_and_cuts_idle_connections(health):
    server = WebServer("127.0.0.1:0", health, Metrics(), dict)
    await server.start()
    host, port = server.addresses[0]
    reader, writer = await asyncio.open_connection(host, port)
    await server.stop()
    async with asyncio.timeout(60):
        with suppress(ConnectionResetError):  # as good an end
            assert await reader.read() == b""
    writer.close()
    with socket.create_server((host, port)):
        pass


@pytest.mark.parametrize("address", [":0", "[::]:0", "localhost:0", "0.0.0.0:0"])
async def test_every_form_of_address_is_reachable(address, health):
    server = WebServer(address, health, Metrics(), dict)
    await server.start()
    try:
        ports = {port for _, port in server.addresses}
        for port in ports:
            async with aiohttp.request("GET", f"http://localhost:{port}/healthz") as answer:
                assert answer.status == 503
    finally:
        await server.stop()


async def test_all_addresses_means_ipv4_and_ipv6_on_one_port(health):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    server = WebServer(":0", health, Metrics(), dict)
    await server.start()
    try:
        ((_, port),) = server.addresses
        for host in ["127.0.0.1", "[::1]"]:
            async with aiohttp.request("GET", f"http://{host}:{port}/healthz") as answer:
                assert answer.status == 503
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":8080", ("", 8080)),
        ("127.0.0.1:9", ("127.0.0.1", 9)),
        ("[::]:8080", ("::", 8080)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("node-1.example:0", ("node-1.example", 0)),
    ],
)
def test_addresses_that_are_understood(text, expected):
    assert parse_bind_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":",
            "8080",
            "localhost",
            "localhost:",
            ":http",
            ":65536",
            ":-1",
            ":+1",
            ": 80",
            ":٨٠",
            ":1_0",
            ":000080",
        ),
        *("::1:8080", "::", "[::1]", "[]:80", "[localhost]:80", "[::1]x:80", "a b:80", "http://x:80", "x/y:80"),
    ],
)
def test_malformed_addresses_are_a_configuration_error(text, health):
    with pytest.raises(ConfigError, match="is malformed: expected host:port, :port or"):
        WebServer(text, health, Metrics(), dict)


async def test_metrics_are_rendered_a_few_times_however_many_ask(http, metrics, monkeypatch):
    render = metrics.render

    def slowly(accept: str) -> tuple[bytes, str]:
        time.sleep(0.05)
        return render(accept)

    monkeypatch.setattr(metrics, "render", slowly)

    async def scrape(accept: str) -> str:
        async with http.get("/metrics", headers={"Accept": accept}) as answer:
            return await answer.text()

    accepted = ["text/plain", "text/html"] * 20
    assert {*await asyncio.gather(*map(scrape, accepted))} == {"accept text/plain\n", "accept text/html\n"}
    assert metrics.renderings <= 10
    began, before = time.monotonic(), metrics.renderings
    for _ in range(4):
        await scrape("text/plain")
    # Each but the first has waited for nine times as long as the one before took.
    assert time.monotonic() - began >= 3 * 9 * 0.05
    assert metrics.renderings == before + 4


async def test_a_scrape_that_waits_does_not_hold_up_the_end(server, metrics, http):
    await http.get("/metrics")
    server._renderings._rest_until = asyncio.get_running_loop().time() + 3600
    scraping = asyncio.create_task(talk(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"))
    async with asyncio.timeout(60):
        while not server._renderings._waiting:  # noqa: ASYNC110, nobody tells
            await asyncio.sleep(0.01)
        await server.stop()
    assert await scraping == b""


async def test_metrics_are_those_of_a_time_after_they_were_asked_for(http, metrics, monkeypatch):
    monkeypatch.setattr(metrics, "render", lambda accept: (str(changes).encode(), "text/plain"))
    for changes in range(5):
        async with http.get("/metrics") as answer:
            assert await answer.text() == str(changes)
