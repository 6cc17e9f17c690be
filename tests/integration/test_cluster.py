# SPDX-License-Identifier: Apache-2.0
"""The driver's API client over real sockets: against the box's API server, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from driver.cluster import Cluster
from driver.errors import ApiError, ConfigError
from driver.retries import may_pass
from driver.sandbox.apiserver import ApiServer, Fault
from driver.sandbox.kinds import NODES, RESOURCE_CLAIMS, RESOURCE_SLICES

Object = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

NODE = "node-7"


@pytest.fixture
async def cluster(api_server: ApiServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = await Cluster.connect(str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    yield cluster
    await cluster.close()


def slice_body(node: str = NODE, *, index: int = 0, devices: int = 1) -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"generateName": f"{index:05x}-dra.cpu-{node}-"},
        "spec": {
            "driver": "dra.cpu",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"cpudev{number}"} for number in range(devices)],
        },
    }


def write_kubeconfig(path: Path, server: str, user: Object | None = None, **cluster: object) -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
                "users": [{"name": "u", "user": user or {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    return path


@asynccontextmanager
async def served(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve every request with one function and yield the URL."""
    server = web.Server(handler, handler_cancellation=True)
    runner = web.ServerRunner(server, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"{'https' if tls else 'http'}://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connected(kubeconfig: Path) -> AsyncIterator[Cluster]:
    cluster = await Cluster.connect(str(kubeconfig))
    try:
        yield cluster
    finally:
        await cluster.close()


# --- the calls -------------------------------------------------------------------------------------------------------


async def test_claims_and_nodes_are_fetched_as_they_are(cluster: Cluster, api_server: ApiServer) -> None:
    claim = api_server.create(RESOURCE_CLAIMS, {"metadata": {"name": "c", "namespace": "ns"}, "spec": {}})
    node = api_server.create(NODES, {"metadata": {"name": NODE}})

    assert await cluster.get_claim("ns", "c") == claim
    assert await cluster.get_node(NODE) == node


async def test_what_is_not_there_is_status_404_in_the_servers_words(cluster: Cluster) -> None:
    with pytest.raises(ApiError, match=r'answered 404: resourceclaims\.resource\.k8s\.io "c" not found') as caught:
        await cluster.get_claim("ns", "c")
    assert caught.value.status == 404
    assert caught.value.missing == "resourceclaims/c"


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "a b", "A", "%2e%2e", "x?watch=1", "-a", "a-", "ä", "a" * 254, "a\n"]
)
async def test_names_that_would_change_the_url_are_never_sent(
    cluster: Cluster, api_server: ApiServer, name: str
) -> None:
    for call in (
        cluster.get_claim(name, "c"),
        cluster.get_claim("ns", name),
        cluster.get_node(name),
        cluster.list_slices(name),
        cluster.delete_slice(name, "u", "1"),
    ):
        with pytest.raises(ApiError, match="malformed") as caught:
            await call
        assert caught.value.status == 400
    assert not api_server.requests


async def test_slices_of_this_node_and_driver_are_listed(cluster: Cluster, api_server: ApiServer) -> None:
    created = await cluster.create_slice(slice_body())
    await cluster.create_slice(slice_body("node-8"))
    other = slice_body()
    other["spec"]["driver"] = "gpu.example.com"
    api_server.create(RESOURCE_SLICES, other)

    items, resource_version = await cluster.list_slices(NODE)

    assert [item["metadata"]["name"] for item in items] == [created["metadata"]["name"]]
    assert items[0]["spec"] == created["spec"]
    assert int(resource_version) > int(created["metadata"]["resourceVersion"])


async def test_a_long_list_is_fetched_in_pages(tmp_path: Path) -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        start = int(request.query.get("continue", "0"))
        items = [{"metadata": {"name": f"s{n}", "uid": "u", "resourceVersion": "1"}} for n in range(start, start + 2)]
        metadata = {"resourceVersion": "77"} | ({"continue": str(start + 2)} if start < 4 else {})
        return web.json_response({"items": items, "metadata": metadata})

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        items, resource_version = await cluster.list_slices(NODE)

    assert [item["metadata"]["name"] for item in items] == ["s0", "s1", "s2", "s3", "s4", "s5"]
    assert resource_version == "77"
    assert [query.get("continue") for query in asked] == [None, "2", "4"]
    assert {query["fieldSelector"] for query in asked} == {f"spec.nodeName={NODE},spec.driver=dra.cpu"}


async def test_slices_are_created_replaced_and_deleted_with_preconditions(
    cluster: Cluster, api_server: ApiServer
) -> None:
    first = await cluster.create_slice(slice_body())
    name, uid = first["metadata"]["name"], first["metadata"]["uid"]
    assert name.startswith("00000-dra.cpu-node-7-")
    assert {entry["manager"] for entry in first["metadata"].get("managedFields", [])} <= {"dra.cpu"}

    second = await cluster.replace_slice({**first, "spec": {**first["spec"], "devices": [{"name": "other"}]}})
    assert second["spec"]["devices"] == [{"name": "other"}]
    with pytest.raises(ApiError) as caught:
        await cluster.replace_slice(first)
    assert caught.value.status == 409

    version = second["metadata"]["resourceVersion"]
    for arguments in ((name, uid, first["metadata"]["resourceVersion"]), (name, "another", version)):
        with pytest.raises(ApiError) as caught:
            await cluster.delete_slice(*arguments)
        assert caught.value.status == 409
    await cluster.delete_slice(name, uid, version)
    assert api_server.list(RESOURCE_SLICES) == []
    for call in (cluster.delete_slice(name, uid, version), cluster.replace_slice(second)):
        with pytest.raises(ApiError) as caught:
            await call
        assert caught.value.status == 404


async def test_an_invalid_slice_is_refused_in_the_servers_words(cluster: Cluster) -> None:
    body = slice_body(devices=129)

    with pytest.raises(ApiError, match=r"answered 422: .*spec\.devices") as caught:
        await cluster.create_slice(body)
    assert caught.value.status == 422


def allocated(name: str = "c") -> Object:
    results = [
        {"request": "r", "driver": driver, "pool": NODE, "device": "d"} for driver in ("dra.cpu", "gpu.example.com")
    ]
    return {
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "x"}}]}},
        "status": {
            "allocation": {"devices": {"results": results}},
            "devices": [{"driver": "gpu.example.com", "pool": NODE, "device": "d", "data": {"theirs": True}}],
        },
    }


async def test_status_devices_are_applied_beside_those_of_other_drivers(
    cluster: Cluster, api_server: ApiServer
) -> None:
    claim = api_server.put(RESOURCE_CLAIMS, allocated())
    uid = claim["metadata"]["uid"]
    entry = {"driver": "dra.cpu", "pool": NODE, "device": "d", "data": {"cpuset": "2-5"}}

    await cluster.apply_claim_devices("ns", "c", uid, [entry])
    devices = (await cluster.get_claim("ns", "c"))["status"]["devices"]
    assert {device["driver"]: device["data"] for device in devices} == {
        "gpu.example.com": {"theirs": True},
        "dra.cpu": {"cpuset": "2-5"},
    }

    await cluster.apply_claim_devices("ns", "c", uid, [])
    devices = (await cluster.get_claim("ns", "c"))["status"]["devices"]
    assert [device["driver"] for device in devices] == ["gpu.example.com"]


async def test_status_devices_never_go_to_another_claim_of_the_same_name(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.put(RESOURCE_CLAIMS, allocated())

    with pytest.raises(ApiError, match="uid") as caught:
        await cluster.apply_claim_devices("ns", "c", "6c6f9e9c-0000-4000-8000-000000000000", [])
    assert caught.value.status in (409, 422)
    with pytest.raises(ApiError) as caught:
        await cluster.apply_claim_devices("ns", "gone", "6c6f9e9c-0000-4000-8000-000000000000", [])
    assert caught.value.status == 404


async def test_thirty_two_claims_are_fetched_at_the_same_time(tmp_path: Path, api_server: ApiServer) -> None:
    for number in range(32):
        api_server.create(RESOURCE_CLAIMS, {"metadata": {"name": f"c{number}", "namespace": "ns"}, "spec": {}})
    waiting = 0
    everybody = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 32:
            everybody.set()
        await everybody.wait()
        return web.json_response(api_server.get(RESOURCE_CLAIMS, request.path.rpartition("/")[2], "ns"))

    async with served(handler) as url:
        kubeconfig = write_kubeconfig(tmp_path / "other", url)
        async with connected(kubeconfig) as other:
            claims = await asyncio.gather(*(other.get_claim("ns", f"c{number}") for number in range(32)))

    assert [claim["metadata"]["name"] for claim in claims] == [f"c{number}" for number in range(32)]


async def test_connections_are_kept(tmp_path: Path) -> None:
    peers = set()

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        if request.path.endswith("/gone"):
            return web.json_response({"message": "gone"}, status=404)
        return web.json_response({"metadata": {"name": "n", "uid": "u", "resourceVersion": "1"}})

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        for _ in range(5):
            await cluster.get_node("n")
        with pytest.raises(ApiError) as caught:
            await cluster.get_node("gone")
        assert (caught.value.status, caught.value.missing) == (404, "")
        await cluster.get_node("n")

    assert len(peers) == 1


# --- watches ---------------------------------------------------------------------------------------------------------


async def test_a_watch_tells_what_happens_after_the_list(cluster: Cluster, api_server: ApiServer) -> None:
    first = await cluster.create_slice(slice_body())
    _, resource_version = await cluster.list_slices(NODE)

    async with aclosing(cluster.watch_slices(NODE, resource_version)) as events:
        waiting = asyncio.ensure_future(anext(events))
        await cluster.create_slice(slice_body("node-8"))
        second = await cluster.create_slice(slice_body(index=1))
        assert await waiting == ("ADDED", second)
        changed = await cluster.replace_slice({**first, "spec": {**first["spec"], "devices": []}})
        assert await anext(events) == ("MODIFIED", changed)
        await cluster.delete_slice(
            second["metadata"]["name"], second["metadata"]["uid"], second["metadata"]["resourceVersion"]
        )
        kind, gone = await anext(events)
        assert (kind, gone["metadata"]["name"]) == ("DELETED", second["metadata"]["name"])


async def test_a_watch_from_too_long_ago_is_status_410(cluster: Cluster, api_server: ApiServer) -> None:
    await cluster.create_slice(slice_body())
    _, resource_version = await cluster.list_slices(NODE)
    await cluster.create_slice(slice_body())
    api_server.compact()

    with pytest.raises(ApiError) as caught:
        await anext(cluster.watch_slices(NODE, resource_version))
    assert caught.value.status == 410


async def test_a_watch_that_is_cut_is_an_error_and_one_that_ends_is_not(
    cluster: Cluster, api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, resource_version = await cluster.list_slices(NODE)
    async with aclosing(cluster.watch_slices(NODE, resource_version)) as events:
        waiting = asyncio.ensure_future(anext(events))
        await cluster.create_slice(slice_body())
        await waiting
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        api_server.cut_connections()
        with pytest.raises(ApiError, match="broke off: it is incomplete") as caught:
            await waiting
        assert caught.value.status == 0

    monkeypatch.setattr("driver.cluster._WATCH_SECONDS", (1, 1))
    _, resource_version = await cluster.list_slices(NODE)
    assert [event async for event in cluster.watch_slices(NODE, resource_version)] == []


async def test_a_silent_watch_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driver.cluster._WATCH_TIMEOUT", aiohttp.ClientTimeout(total=None, sock_read=0.05))

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        with pytest.raises(ApiError, match="no answer in time") as caught:
            await anext(cluster.watch_slices(NODE, "1"))
    assert caught.value.status == 0


async def test_events_arrive_whole_however_they_are_cut(tmp_path: Path) -> None:
    def event(kind: str, name: str) -> bytes:
        metadata = {"name": name, "uid": "u", "resourceVersion": "1", "annotations": {"x": "ü" * 40_000}}
        return json.dumps({"type": kind, "object": {"metadata": metadata}}, ensure_ascii=False).encode() + b"\n"

    stream = (
        event("ADDED", "a") + b'\n{"type":"BOOKMARK","object":{}}\n' + event("MODIFIED", "b") + event("DELETED", "c")
    )

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(stream), 4099):
            await response.write(stream[start : start + 4099])
        return response

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        events = [(kind, item["metadata"]["name"]) async for kind, item in cluster.watch_slices(NODE, "1")]

    assert events == [("ADDED", "a"), ("MODIFIED", "b"), ("DELETED", "c")]


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ('{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}', 410, "answered 410: too old"),
        ('{"type":"ERROR","object":null}', 0, "answered 0: no reason given"),
        ('{"type":"ERROR","object":{"code":"x","message":[]}}', 0, "no reason given"),
        ('{"type":"ADDED","object":null}', 0, "is not an object with name"),
        ('{"type":"ADDED","object":{"metadata":{"name":"a","uid":"u"}}}', 0, "is not an object with name"),
        ('["ADDED"]', 0, "is not a JSON object"),
        ('{"type":"ADDED","object":', 0, "is not JSON"),
        ("[" * 100_000, 200, "is nested too deeply"),
    ],
)
async def test_a_watch_that_sends_nonsense_is_an_error(tmp_path: Path, line: str, status: int, message: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=line + "\n")

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        with pytest.raises(ApiError, match=message) as caught:
            await anext(cluster.watch_slices(NODE, "1"))
    assert caught.value.status == status


# --- servers that are away, slow or hostile --------------------------------------------------------------------------


async def test_a_server_that_is_away_is_status_0_and_used_again_when_it_is_back(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.create(NODES, {"metadata": {"name": NODE}})
    await cluster.get_node(NODE)
    await api_server.stop()

    with pytest.raises(
        ApiError, match=r"the API server at http://127\.0\.0\.1:\d+ cannot be used: Connection refused"
    ) as caught:
        await cluster.create_slice(slice_body())
    assert caught.value.status == 0
    await api_server.start()
    assert (await cluster.get_node(NODE))["metadata"]["name"] == NODE


async def test_a_server_without_tls_is_named_as_the_cause(tmp_path: Path) -> None:
    async with (
        served(bearer(lambda: "", [])) as url,
        connected(write_kubeconfig(tmp_path / "k", url.replace("http", "https"))) as cluster,
    ):
        with pytest.raises(ApiError, match=r"cannot be used: .*SSL") as caught:
            await cluster.get_node("n")
    assert caught.value.status == 0


@pytest.mark.parametrize("fault", [Fault(hang=True), Fault(reset=True)])
async def test_a_call_that_gets_no_answer_ends(
    cluster: Cluster, api_server: ApiServer, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr("driver.cluster._CALL_TIMEOUT", aiohttp.ClientTimeout(total=0.1))
    api_server.fault = lambda method, path: fault

    with pytest.raises(ApiError) as caught:
        await cluster.get_claim("ns", "c")
    assert caught.value.status == 0


async def test_a_cancelled_call_is_cancelled(cluster: Cluster, api_server: ApiServer) -> None:
    arrived = asyncio.Event()

    def fault(method: str, path: str) -> Fault:
        arrived.set()
        return Fault(hang=True)

    api_server.fault = fault
    call = asyncio.create_task(cluster.get_claim("ns", "c"))
    await arrived.wait()
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call


GOOD = {"metadata": {"name": "c", "uid": "u", "resourceVersion": "1"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is not JSON"),
        (b"<html>welcome</html>", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"1" * 5000, "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'"x"', "is not a JSON object"),
        (b"{}", "is not an object with name"),
        (b'{"metadata":{"name":1,"uid":"u","resourceVersion":"1"}}', "is not an object with name"),
        (b" " * (33 << 20), "is larger than"),
    ],
)
async def test_an_answer_that_is_no_object_is_an_error_of_one_line(tmp_path: Path, body: bytes, message: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        with pytest.raises(ApiError, match=message) as caught:
            await cluster.get_claim("ns", "c")
    assert caught.value.status == 0
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("depth", [200_000, 12_000])
async def test_an_answer_nested_too_deeply_is_not_worth_another_try(tmp_path: Path, depth: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b'{"spec":' + b"[" * depth + b"]" * depth + b"}")

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        with pytest.raises(ApiError, match="is nested too deeply to be read") as caught:
            await cluster.get_claim("ns", "c")
    assert not may_pass(caught.value)


@pytest.mark.parametrize(
    ("body", "items"),
    [
        ({"metadata": {"resourceVersion": "1"}, "items": None}, []),
        ({"metadata": {"resourceVersion": "1"}}, []),
        ({"metadata": {"resourceVersion": "1"}, "items": [GOOD]}, [GOOD]),
        ({"metadata": {}, "items": {}}, None),
        ({"metadata": {}, "items": [None]}, None),
        ({"items": []}, None),
    ],
)
async def test_a_list_is_checked(tmp_path: Path, body: Object, items: list[Object] | None) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(body)

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        if items is None:
            with pytest.raises(ApiError, match="is not"):
                await cluster.list_slices(NODE)
        else:
            assert await cluster.list_slices(NODE) == (items, "1")


async def test_a_compressed_bomb_is_stopped_at_the_limit(tmp_path: Path) -> None:
    bomb = gzip.compress(b" " * (256 << 20), compresslevel=1)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        with pytest.raises(ApiError):
            await cluster.get_claim("ns", "c")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, b'{"kind":"Status","message":"etcd is away"}', "answered 500: etcd is away"),
        (503, b"<html>\n\x1b[31mno\x00 backend</html>", r"answered 503: <html> \[31mno backend</html>"),
        (404, b"", "answered 404: no reason given"),
        (403, b'{"message":"' + b"x" * 5000 + b'"}', "answered 403: x+…$"),
        (500, b'{"message":{"a":1},"code":7}', "answered 500: no reason given"),
        (500, b"[" * 50_000, r"answered 500: \[+$"),
        (502, b"\xff" * (1 << 20), "answered 502: \ufffd+$"),
    ],
)
async def test_a_refusal_is_one_bounded_line_whatever_came_with_it(
    tmp_path: Path, status: int, body: bytes, message: str
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    async with served(handler) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        with pytest.raises(ApiError, match=message) as caught:
            await cluster.get_claim("ns", "c")
    assert caught.value.status == status
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


# --- configuration and credentials -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping, not NoneType"),
        ("[]", "expected a mapping, not list"),
        ("a: [", "not YAML"),
        ("[" * 500, "not YAML"),
        ("\x00", "not YAML"),
        ("{}", "current-context"),
        ("{current-context: x, contexts: 7}", "malformed"),
        ("{current-context: x, contexts: []}", "contexts"),
        ("{current-context: x, contexts: [{name: x, context: {cluster: c}}], clusters: []}", "clusters"),
        ("{current-context: x, contexts: [{name: x, context: {cluster: c}}], clusters: [7]}", "kubeconfig"),
        (
            "{current-context: x, contexts: [{name: x, context: {cluster: c}}], clusters: [{name: c, cluster: {}}]}",
            "the server must be an http or https URL, not ''",
        ),
    ],
)
async def test_a_broken_kubeconfig_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message) as caught:
        await Cluster.connect(str(path))
    assert str(caught.value).startswith(f"kubeconfig {path}: ")
    assert "\n" not in str(caught.value)


async def test_endless_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^kubeconfig /dev/zero: larger than 1048576 bytes, the most that is read$"):
        await Cluster.connect("/dev/zero")


@pytest.mark.parametrize("key", ["certificate-authority", "client-certificate", "client-key", "tokenFile"])
async def test_endless_files_that_a_kubeconfig_names_are_refused(tmp_path: Path, key: str) -> None:
    of_cluster, of_user = ({key: "/dev/zero"}, None) if key == "certificate-authority" else ({}, {key: "/dev/zero"})
    kubeconfig = write_kubeconfig(tmp_path / "k", "https://h", of_user, **of_cluster)
    with pytest.raises(ConfigError, match="/dev/zero is no regular file"):
        await Cluster.connect(str(kubeconfig))
    (tmp_path / "large").write_bytes(bytes((8 << 20) + 1))
    kubeconfig.write_text(kubeconfig.read_text().replace("/dev/zero", "large"))
    with pytest.raises(ConfigError, match=r"large is larger than 8388608 bytes"):
        await Cluster.connect(str(kubeconfig))


@pytest.mark.parametrize("server", ["ftp://host", "host:6443", "http://", "//x", "http://[::1"])
async def test_a_server_that_is_no_url_is_refused(tmp_path: Path, server: str) -> None:
    with pytest.raises(ConfigError, match="kubeconfig"):
        await Cluster.connect(str(write_kubeconfig(tmp_path / "k", server)))


async def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kubeconfig /nowhere: No such file"):
        await Cluster.connect("/nowhere")
    with pytest.raises(ConfigError, match="Is a directory"):
        await Cluster.connect(str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match="kubeconfig"):
        await Cluster.connect(str(tmp_path / "bytes"))
    kubeconfig = write_kubeconfig(tmp_path / "k", "https://h", **{"certificate-authority": "ca.crt"})
    with pytest.raises(ConfigError, match=f"{tmp_path}/ca.crt"):
        await Cluster.connect(str(kubeconfig))
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match="certificates cannot be used"):
        await Cluster.connect(str(kubeconfig))


async def test_without_a_kubeconfig_outside_a_pod_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(ConfigError, match="no kubeconfig is given, and this is not a pod"):
        await Cluster.connect("")


def bearer(expected: Callable[[], str], seen: list[str]) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization", ""))
        if seen[-1] != expected():
            return web.json_response({"message": "Unauthorized", "code": 401}, status=401)
        return web.json_response(GOOD)

    return handler


async def test_a_pods_token_is_used_and_read_again_when_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = await self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    token = tmp_path / "token"
    token.write_text("one\n")
    seen: list[str] = []
    valid = "bearer one"
    monkeypatch.setattr("kubernetes.aio.config.incluster_config.SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr("kubernetes.aio.config.incluster_config.SERVICE_CERT_FILENAME", str(certificate))
    monkeypatch.setattr("driver.apiconnection._RELOAD_INTERVAL", 0.0)
    async with served(bearer(lambda: valid, seen), tls) as url:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", url.rpartition(":")[2])
        cluster = await Cluster.connect("")
        try:
            await cluster.get_node("n")
            valid = "bearer two"
            token.write_text("two")
            await cluster.get_node("n")
            token.write_text("three")
            valid = "bearer four"
            with pytest.raises(ApiError, match="answered 401: Unauthorized") as caught:
                await cluster.get_node("n")
            assert caught.value.status == 401
            token.unlink()
            with pytest.raises(ApiError, match="token file does not exist") as caught:
                await cluster.get_node("n")
            assert caught.value.status == 0
        finally:
            await cluster.close()
    assert seen == [
        "bearer one", "bearer one", "bearer two", "bearer two", "bearer three", "bearer three",
    ]  # fmt: skip


async def self_signed(folder: Path) -> Path:
    """Make a key and a certificate for 127.0.0.1 in one file."""
    process = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-days", "1",
        "-subj", "/CN=box", "-addext", "subjectAltName=IP:127.0.0.1",
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await process.wait() == 0
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


async def test_a_kubeconfig_with_relative_files_and_a_token_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = await self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    (tmp_path / "token").write_text("one")
    monkeypatch.setattr("driver.apiconnection._RELOAD_INTERVAL", 0.0)
    seen: list[str] = []
    valid = "Bearer one"
    async with served(bearer(lambda: valid, seen), tls) as url:
        kubeconfig = write_kubeconfig(
            tmp_path / "k", url, {"tokenFile": "token"}, **{"certificate-authority": "cert.pem"}
        )
        async with connected(kubeconfig) as cluster:
            await cluster.get_node("n")
            (tmp_path / "token").write_text("two")
            valid = "Bearer two"
            await asyncio.gather(*(cluster.get_node("n") for _ in range(8)))
    assert set(seen) == {"Bearer one", "Bearer two"}


async def test_a_certificate_that_is_not_trusted_is_status_0_until_the_bundle_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = await self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    (tmp_path / "other").mkdir()
    bundle = tmp_path / "bundle.pem"
    bundle.write_text((await self_signed(tmp_path / "other")).read_text())
    monkeypatch.setattr("driver.apiconnection._RELOAD_INTERVAL", 0.0)
    async with served(bearer(lambda: "", []), tls) as url:
        kubeconfig = write_kubeconfig(tmp_path / "k", url, **{"certificate-authority": "bundle.pem"})
        async with connected(kubeconfig) as cluster:
            with pytest.raises(ApiError, match="certificate verify failed") as caught:
                await cluster.get_node("n")
            assert caught.value.status == 0
            bundle.write_text((tmp_path / "cert.pem").read_text())
            await cluster.get_node("n")


CREDENTIAL_PLUGIN = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
expiry = {"expirationTimestamp": sys.argv[2]} if len(sys.argv) > 2 else {}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
                  "status": {"token": f"token-{number}", **expiry}}))
"""


def plugin_user(tmp_path: Path, *arguments: str) -> Object:
    (tmp_path / "plugin.py").write_text(CREDENTIAL_PLUGIN)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(tmp_path / "plugin.py"), str(tmp_path / "count"), *arguments],
        }
    }


async def test_a_credential_plugin_is_asked_again_when_its_token_is_refused_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver.apiconnection._RELOAD_INTERVAL", 0.0)
    seen: list[str] = []
    valid = "Bearer token-1"
    async with served(bearer(lambda: valid, seen)) as url:
        kubeconfig = write_kubeconfig(tmp_path / "k", url, plugin_user(tmp_path, "2099-01-01T00:00:00Z"))
        async with connected(kubeconfig) as cluster:
            await cluster.get_node("n")
            await cluster.get_node("n")
            valid = "Bearer token-2"
            await asyncio.gather(*(cluster.get_node("n") for _ in range(8)))
    assert (tmp_path / "count").read_text() == "2"


@pytest.mark.parametrize("expiry", ["2020-01-01T00:00:00Z", "0001-01-01T00:00:00Z"])
async def test_a_token_that_expires_is_replaced_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expiry: str
) -> None:
    monkeypatch.setattr("driver.apiconnection._RELOAD_INTERVAL", 0.0)
    seen: list[str] = []
    async with served(bearer(lambda: "Bearer token-2", seen)) as url:
        kubeconfig = write_kubeconfig(tmp_path / "k", url, plugin_user(tmp_path, expiry))
        async with connected(kubeconfig) as cluster:
            await cluster.get_node("n")
    assert seen == ["Bearer token-2"]


async def test_a_credential_plugin_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    # A process that really hangs would outlive the test: the client does not end it.
    monkeypatch.setattr("kubernetes.aio.config.exec_provider.ExecProvider.run", hang)
    monkeypatch.setattr("driver.apiconnection._CREDENTIAL_PLUGIN_TIMEOUT", 0.05)

    with pytest.raises(ConfigError, match=r"credential plugin did not answer in 0\.05 s"):
        await Cluster.connect(str(write_kubeconfig(tmp_path / "k", "http://127.0.0.1:1", plugin_user(tmp_path))))


async def test_a_proxy_of_the_environment_is_used_unless_it_is_not_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(str(request.url))
        return web.json_response(GOOD)

    async with served(handler) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        async with connected(write_kubeconfig(tmp_path / "k", "http://server.example:6443")) as cluster:
            await cluster.get_node("n")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with connected(write_kubeconfig(tmp_path / "k", proxy)) as cluster:
            await cluster.get_node("m")
    assert asked == ["http://server.example:6443/api/v1/nodes/n", f"{proxy}/api/v1/nodes/m"]


async def test_no_netrc_file_is_read_for_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    async with served(bearer(lambda: "", seen)) as url, connected(write_kubeconfig(tmp_path / "k", url)) as cluster:
        await cluster.get_node("n")
    assert seen == [""]


# --- what it costs ---------------------------------------------------------------------------------------------------


async def test_no_generated_model_is_loaded() -> None:
    code = (
        "import sys, driver.publisher; "
        "sys.exit(any(name.startswith('kubernetes') and '.models.' in name for name in sys.modules))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)

    assert await process.wait() == 0


async def test_a_request_that_somebody_else_has_cancelled_has_failed_and_is_not_cancelled(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(*arguments: object, **more: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(cluster._connection._session, "request", cancelled)
    with pytest.raises(ApiError, match="was replaced") as caught:
        await cluster.get_claim("ns", "c")
    assert caught.value.status == 0
