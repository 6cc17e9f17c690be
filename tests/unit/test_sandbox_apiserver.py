# SPDX-License-Identifier: Apache-2.0
"""The box's API server over HTTP: what a client of the Kubernetes API may rely on."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil

import aiohttp
import pytest
import yaml

from driver.sandbox.apiserver import ApiServer, Fault
from driver.sandbox.kinds import NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
PODS_URL = "/api/v1/namespaces/default/pods"


def claim(name, **metadata):
    requests = [{"name": "cpus", "exactly": {"deviceClassName": "dra.cpu"}}]
    return {"metadata": {"name": name, **metadata}, "spec": {"devices": {"requests": requests}}}


def resource_slice(name="", *, node="n1", driver="dra.cpu", generation=1, **metadata):
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    named = {"name": name} if name else {}
    return {
        "metadata": {**named, **metadata},
        "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": [{"name": "d0"}]},
    }


def pod(name, node=""):
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"name": name}, "spec": {**spec, "containers": [{"name": "c", "image": "i"}]}}


class Client:
    """Speaks JSON with the server; `ask` returns status and body."""

    def __init__(self, url):
        self.session = aiohttp.ClientSession(url)
        self._watches = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for watch in self._watches:
            watch.close()
        await self.session.close()

    async def ask(self, method, path, body=None, content_type="application/json", **query):
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type} if body is not None else {}
        async with self.session.request(method, path, params=query, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def done(self, method, path, body=None, **more):
        status, answer = await self.ask(method, path, body, **more)
        assert status < 300, answer
        return answer

    async def refused(self, method, path, body=None, **more):
        status, answer = await self.ask(method, path, body, **more)
        assert (answer["kind"], answer["apiVersion"], answer["status"]) == ("Status", "v1", "Failure")
        assert answer["code"] == status
        return answer

    async def watch(self, path, **query):
        """Open a watch; returns the answer, to read events from with `next_event`."""
        timeout = aiohttp.ClientTimeout(total=10)
        self._watches.append(await self.session.get(path, params={"watch": "true", **query}, timeout=timeout))
        return self._watches[-1]


async def next_event(response):
    line = await asyncio.wait_for(response.content.readline(), 5)
    return json.loads(line) if line else None


async def next_seen(response):
    """Return type and name of the next event."""
    event = await next_event(response)
    return event["type"], event["object"]["metadata"].get("name")


@pytest.fixture
async def client(api_server):
    async with Client(api_server.url) as client:
        yield client


async def test_created_object_has_an_identity(client):
    created = await client.done("POST", CLAIMS, claim("a", uid="mine", resourceVersion="7", labels={"x": "y"}))
    metadata = created["metadata"]
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", metadata["uid"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", metadata["creationTimestamp"])
    assert (metadata["namespace"], metadata["labels"]) == ("default", {"x": "y"})
    assert int(metadata["resourceVersion"]) > 0
    assert (created["kind"], created["apiVersion"]) == ("ResourceClaim", "resource.k8s.io/v1")
    assert await client.done("GET", f"{CLAIMS}/a") == created


async def test_create_answers_201_and_update_200(client):
    status, created = await client.ask("POST", CLAIMS, claim("a"))
    assert status == 201
    created["metadata"]["labels"] = {"x": "y"}
    status, _ = await client.ask("PUT", f"{CLAIMS}/a", created)
    assert status == 200


async def test_second_object_of_a_name_is_refused(client):
    await client.done("POST", CLAIMS, claim("a"))
    refusal = await client.refused("POST", CLAIMS, claim("a"))
    assert (refusal["code"], refusal["reason"]) == (409, "AlreadyExists")
    assert refusal["message"] == 'resourceclaims.resource.k8s.io "a" already exists'
    assert refusal["details"] == {"name": "a", "group": "resource.k8s.io", "kind": "resourceclaims"}


async def test_missing_object_is_not_found(client):
    refusal = await client.refused("GET", f"{CLAIMS}/a")
    assert (refusal["code"], refusal["reason"]) == (404, "NotFound")
    assert refusal["message"] == 'resourceclaims.resource.k8s.io "a" not found'


async def test_generated_names_are_cut_and_differ(client):
    prefix = "00000-dra.cpu-" + "n" * 60 + "-"
    names = set()
    for _ in range(3):
        created = await client.done("POST", SLICES, resource_slice(generateName=prefix))
        names.add(created["metadata"]["name"])
    assert len(names) == 3
    assert all(len(name) == 63 and name[:58] == prefix[:58] for name in names)


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a" * 254, 5, None, ["a"]])
async def test_impossible_names_are_refused(client, name):
    refusal = await client.refused("POST", CLAIMS, claim(name))
    assert (refusal["code"], refusal["reason"]) == (422, "Invalid")
    assert refusal["details"]["causes"][0]["field"] == "metadata.name"


async def test_late_update_is_a_conflict(client):
    first = await client.done("POST", CLAIMS, claim("a"))
    await client.done("PUT", f"{CLAIMS}/a", {**first, "metadata": {**first["metadata"], "labels": {"x": "1"}}})
    refusal = await client.refused("PUT", f"{CLAIMS}/a", first)
    assert (refusal["code"], refusal["reason"]) == (409, "Conflict")
    assert "the object has been modified" in refusal["message"]


async def test_update_without_a_version_is_unconditional(client):
    await client.done("POST", CLAIMS, claim("a"))
    updated = await client.done("PUT", f"{CLAIMS}/a", claim("a", labels={"x": "1"}))
    assert updated["metadata"]["labels"] == {"x": "1"}


async def test_update_of_an_object_with_another_uid_is_a_conflict(client):
    await client.done("POST", CLAIMS, claim("a"))
    refusal = await client.refused("PUT", f"{CLAIMS}/a", claim("a", uid="other"))
    assert (refusal["code"], refusal["reason"]) == (409, "Conflict")
    assert "UID in precondition: other" in refusal["message"]


async def test_update_that_changes_nothing_makes_no_version(client):
    created = await client.done("POST", SLICES, resource_slice("s"))
    again = await client.done("PUT", f"{SLICES}/s", created)
    assert again == created


async def test_generation_counts_changes_of_spec_only(client):
    created = await client.done("POST", SLICES, resource_slice("s"))
    assert created["metadata"]["generation"] == 1
    labelled = await client.done("PUT", f"{SLICES}/s", resource_slice("s", labels={"x": "1"}))
    assert labelled["metadata"]["generation"] == 1
    changed = await client.done("PUT", f"{SLICES}/s", resource_slice("s", generation=2))
    assert changed["metadata"]["generation"] == 2


async def test_update_of_a_missing_object_does_not_create_it(client):
    assert (await client.refused("PUT", f"{SLICES}/s", resource_slice("s")))["code"] == 404


async def test_status_and_the_rest_are_written_apart(client):
    allocation = {"devices": {"results": [{"request": "cpus", "driver": "d", "pool": "p", "device": "x"}]}}
    created = await client.done("POST", CLAIMS, {**claim("a"), "status": {"allocation": allocation}})
    assert created["status"] == {}
    written = await client.done(
        "PUT",
        f"{CLAIMS}/a/status",
        {**claim("a", labels={"x": "1"}), "spec": {}, "status": {"allocation": allocation}},
    )
    assert written["status"]["allocation"] == allocation
    assert "labels" not in written["metadata"]
    assert written["spec"] == created["spec"]
    labelled = await client.done("PUT", f"{CLAIMS}/a", {**claim("a", labels={"x": "1"}), "status": {}})
    assert labelled["status"]["allocation"] == allocation


async def test_merge_patch_sets_replaces_and_removes(client):
    await client.done("POST", CLAIMS, claim("a", labels={"x": "1", "y": "2"}))
    patch = {"metadata": {"labels": {"x": None, "z": "3"}}}
    patched = await client.done("PATCH", f"{CLAIMS}/a", patch, content_type="application/merge-patch+json")
    assert patched["metadata"]["labels"] == {"y": "2", "z": "3"}


async def test_json_patch_is_not_supported(client):
    await client.done("POST", CLAIMS, claim("a"))
    refusal = await client.refused("PATCH", f"{CLAIMS}/a", {}, content_type="application/json-patch+json")
    assert (refusal["code"], refusal["reason"]) == (415, "UnsupportedMediaType")


@pytest.mark.parametrize(
    ("precondition", "word"), [({"uid": "other"}, "UID"), ({"resourceVersion": "1"}, "ResourceVersion")]
)
async def test_delete_holds_to_preconditions(client, precondition, word):
    created = await client.done("POST", CLAIMS, claim("a"))
    refusal = await client.refused("DELETE", f"{CLAIMS}/a", {"preconditions": precondition})
    assert (refusal["code"], refusal["reason"]) == (409, "Conflict")
    assert f"the {word} in the precondition" in refusal["message"]
    right = {key: created["metadata"][key] for key in precondition}
    await client.done("DELETE", f"{CLAIMS}/a", {"preconditions": right})
    assert (await client.refused("GET", f"{CLAIMS}/a"))["code"] == 404


async def test_finalizers_keep_a_deleted_object(client):
    await client.done("POST", CLAIMS, claim("a", finalizers=["example.com/keep"]))
    deleted = await client.done("DELETE", f"{CLAIMS}/a")
    assert deleted["metadata"]["deletionTimestamp"]
    kept = await client.done("GET", f"{CLAIMS}/a")
    assert kept["metadata"]["deletionTimestamp"] == deleted["metadata"]["deletionTimestamp"]
    kept["metadata"]["finalizers"] = []
    await client.done("PUT", f"{CLAIMS}/a", kept)
    assert (await client.refused("GET", f"{CLAIMS}/a"))["code"] == 404


async def test_delete_collection_takes_what_is_selected(client):
    for name, node, driver in (("a", "n1", "dra.cpu"), ("b", "n1", "other"), ("c", "n2", "dra.cpu")):
        await client.done("POST", SLICES, resource_slice(name, node=node, driver=driver))
    gone = await client.done("DELETE", SLICES, fieldSelector="spec.nodeName=n1,spec.driver=dra.cpu")
    assert [item["metadata"]["name"] for item in gone["items"]] == ["a"]
    left = await client.done("GET", SLICES)
    assert [item["metadata"]["name"] for item in left["items"]] == ["b", "c"]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("spec.nodeName=n1", ["a", "b"]),
        ("spec.nodeName==n1,spec.driver!=other", ["a"]),
        ("metadata.name=c", ["c"]),
        ("spec.pool.name=n2", ["c"]),
        ("", ["a", "b", "c"]),
    ],
)
async def test_lists_select_by_fields(client, selector, names):
    for name, node, driver in (("a", "n1", "dra.cpu"), ("b", "n1", "other"), ("c", "n2", "dra.cpu")):
        await client.done("POST", SLICES, resource_slice(name, node=node, driver=driver))
    found = await client.done("GET", SLICES, fieldSelector=selector)
    assert [item["metadata"]["name"] for item in found["items"]] == names
    assert (found["kind"], found["apiVersion"]) == ("ResourceSliceList", "resource.k8s.io/v1")
    assert all("kind" not in item for item in found["items"])


@pytest.mark.parametrize("selector", ["spec.devices=x", "nonsense", "metadata.namespace=x"])
async def test_fields_that_cannot_be_selected_by_are_refused(client, selector):
    refusal = await client.refused("GET", SLICES, fieldSelector=selector)
    assert (refusal["code"], refusal["reason"]) == (400, "BadRequest")


async def test_lists_come_in_pages_of_one_state(client):
    for name in "abcde":
        await client.done("POST", SLICES, resource_slice(name))
    first = await client.done("GET", SLICES, limit="2")
    await client.done("DELETE", f"{SLICES}/e")
    second = await client.done("GET", SLICES, limit="2", **{"continue": first["metadata"]["continue"]})
    third = await client.done("GET", SLICES, limit="2", **{"continue": second["metadata"]["continue"]})
    names = [item["metadata"]["name"] for page in (first, second, third) for item in page["items"]]
    assert names == list("abcde")
    assert first["metadata"]["remainingItemCount"] == 3
    assert "continue" not in third["metadata"]
    assert len({page["metadata"]["resourceVersion"] for page in (first, second, third)}) == 1


async def test_next_page_expires_with_the_history(client, api_server):
    for name in "abc":
        await client.done("POST", SLICES, resource_slice(name))
    first = await client.done("GET", SLICES, limit="2")
    api_server.compact()
    refusal = await client.refused("GET", SLICES, limit="2", **{"continue": first["metadata"]["continue"]})
    assert (refusal["code"], refusal["reason"]) == (410, "Expired")


async def test_watch_sees_every_change_after_its_version(client):
    await client.done("POST", SLICES, resource_slice("a"))
    listed = await client.done("GET", SLICES)
    watch = await client.watch(SLICES, resourceVersion=listed["metadata"]["resourceVersion"])
    await client.done("POST", SLICES, resource_slice("b"))
    changed = await client.done("PUT", f"{SLICES}/b", resource_slice("b", generation=2))
    await client.done("DELETE", f"{SLICES}/a")
    assert await next_seen(watch) == ("ADDED", "b")
    event = await next_event(watch)
    assert (event["type"], event["object"]) == ("MODIFIED", changed)
    event = await next_event(watch)
    assert (event["type"], event["object"]["metadata"]["name"]) == ("DELETED", "a")
    assert int(event["object"]["metadata"]["resourceVersion"]) > int(changed["metadata"]["resourceVersion"])


@pytest.mark.parametrize("version", ["0", ""])
async def test_watch_without_a_version_begins_with_what_there_is(client, version):
    await client.done("POST", SLICES, resource_slice("a"))
    watch = await client.watch(SLICES, resourceVersion=version)
    assert await next_seen(watch) == ("ADDED", "a")
    await client.done("POST", SLICES, resource_slice("b"))
    assert await next_seen(watch) == ("ADDED", "b")


async def test_watch_shows_objects_entering_and_leaving_its_selection(client):
    await client.done("POST", PODS_URL, pod("a"))
    watch = await client.watch("/api/v1/pods", fieldSelector="spec.nodeName=n1")
    await client.done("POST", f"{PODS_URL}/a/binding", {"target": {"name": "n1"}})
    assert await next_seen(watch) == ("ADDED", "a")
    other = await client.watch("/api/v1/pods", fieldSelector="status.phase=Pending")
    assert await next_seen(other) == ("ADDED", "a")
    await client.done("PUT", f"{PODS_URL}/a/status", {**pod("a", "n1"), "status": {"phase": "Running"}})
    assert await next_seen(other) == ("DELETED", "a")


async def test_watch_of_a_namespace_sees_nothing_else(client):
    watch = await client.watch(CLAIMS)
    await client.done("POST", CLAIMS.replace("default", "other"), claim("theirs"))
    await client.done("POST", CLAIMS, claim("ours"))
    assert await next_seen(watch) == ("ADDED", "ours")


async def test_watch_ends_after_its_time_with_a_bookmark(client):
    watch = await client.watch(SLICES, timeoutSeconds="1", allowWatchBookmarks="true")
    created = await client.done("POST", SLICES, resource_slice("a"))
    assert await next_seen(watch) == ("ADDED", "a")
    event = await next_event(watch)
    assert event["type"] == "BOOKMARK"
    assert event["object"]["kind"] == "ResourceSlice"
    assert event["object"]["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]
    assert await next_event(watch) is None


async def test_bookmarks_come_in_between():
    async with ApiServer(bookmark_interval_s=0.05) as server, Client(server.url) as client:
        watch = await client.watch(SLICES, allowWatchBookmarks="true")
        assert (await next_event(watch))["type"] == "BOOKMARK"
        assert (await next_event(watch))["type"] == "BOOKMARK"


async def test_watch_from_a_forgotten_version_is_told_so(client, api_server):
    created = await client.done("POST", SLICES, resource_slice("a"))
    api_server.compact()
    watch = await client.watch(SLICES, resourceVersion=created["metadata"]["resourceVersion"])
    assert watch.status == 200
    event = await next_event(watch)
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert await next_event(watch) is None


async def test_history_is_forgotten_when_it_grows_too_long():
    async with ApiServer(history=3) as server, Client(server.url) as client:
        first = await client.done("POST", SLICES, resource_slice("a"))
        for name in "bcd":
            await client.done("POST", SLICES, resource_slice(name))
        watch = await client.watch(SLICES, resourceVersion=first["metadata"]["resourceVersion"])
        assert [await next_seen(watch) for _ in "bcd"] == [("ADDED", name) for name in "bcd"]
        await client.done("POST", SLICES, resource_slice("e"))
        watch = await client.watch(SLICES, resourceVersion=first["metadata"]["resourceVersion"])
        assert (await next_event(watch))["object"]["code"] == 410


async def test_watch_from_a_version_that_is_not_there_yet_waits_for_it(client):
    created = await client.done("POST", SLICES, resource_slice("a"))
    ahead = int(created["metadata"]["resourceVersion"]) + 1
    watch = await client.watch(SLICES, resourceVersion=str(ahead))
    for name in "bcd":
        await client.done("POST", SLICES, resource_slice(name))
    assert await next_seen(watch) == ("ADDED", "c")


async def test_watch_can_list_first(client):
    await client.done("POST", SLICES, resource_slice("a"))
    query = {"sendInitialEvents": "true", "allowWatchBookmarks": "true", "resourceVersionMatch": "NotOlderThan"}
    watch = await client.watch(SLICES, **query)
    assert await next_seen(watch) == ("ADDED", "a")
    event = await next_event(watch)
    assert event["type"] == "BOOKMARK"
    assert event["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


async def test_watches_end_with_the_server_and_go_on_after_its_restart(client, api_server):
    created = await client.done("POST", SLICES, resource_slice("a"))
    watch = await client.watch(SLICES, resourceVersion=created["metadata"]["resourceVersion"])
    url = api_server.url
    await api_server.stop()
    with pytest.raises((aiohttp.ClientPayloadError, ConnectionError)):
        await next_event(watch)
    await api_server.start()
    assert api_server.url == url
    watch = await client.watch(SLICES, resourceVersion=created["metadata"]["resourceVersion"])
    await client.done("POST", SLICES, resource_slice("b"))
    assert await next_seen(watch) == ("ADDED", "b")


async def test_fault_answers_a_status(client, api_server):
    api_server.fault = lambda method, path: 503 if (method, path) == ("GET", SLICES) else None
    refusal = await client.refused("GET", SLICES)
    assert (refusal["code"], refusal["reason"]) == (503, "ServiceUnavailable")
    await client.done("POST", SLICES, resource_slice("a"))
    api_server.fault = None
    await client.done("GET", SLICES)
    assert list(api_server.requests) == [("GET", SLICES), ("POST", SLICES), ("GET", SLICES)]


async def test_fault_delays_hangs_and_resets(client, api_server):
    faults = iter([Fault(delay_s=0.01, status=429), Fault(delay_s=0.01), Fault(hang=True), Fault(reset=True)])
    api_server.fault = lambda method, path: next(faults)
    assert (await client.refused("GET", SLICES))["code"] == 429
    await client.done("GET", SLICES)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.ask("GET", SLICES), 0.1)
    with pytest.raises(aiohttp.ClientError):
        await client.ask("GET", SLICES)


async def test_fault_can_tell_watches_from_lists(client, api_server):
    api_server.fault = lambda method, path: 500 if method == "WATCH" else None
    await client.done("GET", SLICES)
    assert (await client.refused("GET", SLICES, watch="true"))["code"] == 500


async def test_cut_connections_breaks_watches(client, api_server):
    watch = await client.watch(SLICES)
    api_server.cut_connections()
    with pytest.raises((aiohttp.ClientPayloadError, ConnectionError)):
        await next_event(watch)


@pytest.mark.parametrize("data", ["{", "[]", "5", "\t: - ", "[" * 200_000])
async def test_bodies_that_are_no_object_are_refused(client, data):
    async with client.session.post(SLICES, data=data, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert (await response.json())["reason"] == "BadRequest"


async def test_bodies_that_are_too_large_are_refused(client):
    async with client.session.post(SLICES, data=io.BytesIO(b" " * (3 * 1024 * 1024 + 1))) as response:
        assert response.status == 413


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "Pod"},
        {"apiVersion": "resource.k8s.io/v1beta1"},
        {"metadata": []},
        {"spec": []},
        {"status": "x"},
        {"metadata": {"name": "a", "namespace": "elsewhere"}},
    ],
)
async def test_bodies_of_another_shape_are_refused(client, body):
    assert (await client.refused("POST", CLAIMS, {**claim("a"), **body}))["code"] == 400


async def test_unknown_places_are_not_found(client):
    assert (await client.refused("GET", "/apis/resource.k8s.io/v1/nonsense"))["code"] == 404
    assert (await client.refused("POST", f"{SLICES}/a", {}))["code"] == 405


async def test_dry_runs_are_refused_rather_than_done(client):
    assert (await client.refused("POST", CLAIMS, claim("a"), dryRun="All"))["code"] == 400
    assert (await client.refused("GET", f"{CLAIMS}/a"))["code"] == 404


async def test_pods_are_bound_once(client):
    created = await client.done("POST", PODS_URL, pod("a"))
    assert created["status"] == {"phase": "Pending"}
    await client.done("POST", f"{PODS_URL}/a/binding", {"target": {"name": "n1"}})
    assert (await client.done("GET", f"{PODS_URL}/a"))["spec"]["nodeName"] == "n1"
    refusal = await client.refused("POST", f"{PODS_URL}/a/binding", {"target": {"name": "n2"}})
    assert refusal["code"] == 409
    assert (await client.refused("POST", f"{PODS_URL}/a/binding", {}))["code"] == 422


async def test_bound_pods_stay_until_their_kubelet_is_done(client):
    await client.done("POST", PODS_URL, pod("a", "n1"))
    await client.done("DELETE", f"{PODS_URL}/a")
    assert (await client.done("GET", f"{PODS_URL}/a"))["metadata"]["deletionTimestamp"]
    await client.done("DELETE", f"{PODS_URL}/a", {"gracePeriodSeconds": 0})
    assert (await client.refused("GET", f"{PODS_URL}/a"))["code"] == 404


async def test_unbound_pods_go_at_once(client):
    await client.done("POST", PODS_URL, pod("a"))
    await client.done("DELETE", f"{PODS_URL}/a")
    assert (await client.refused("GET", f"{PODS_URL}/a"))["code"] == 404


async def test_objects_put_in_process_are_seen_over_http(client, api_server):
    api_server.create(NODES, {"metadata": {"name": "n1", "uid": "node-uid"}})
    assert (await client.done("GET", "/api/v1/nodes/n1"))["metadata"]["uid"] == "node-uid"
    stored = api_server.put(RESOURCE_CLAIMS, {**claim("a"), "status": {}})
    assert api_server.get(RESOURCE_CLAIMS, "a") == stored
    assert api_server.list(RESOURCE_CLAIMS) == [stored]
    api_server.delete(RESOURCE_CLAIMS, "a")
    assert api_server.get(RESOURCE_CLAIMS, "a") is None
    api_server.create(PODS, pod("p", "n1"))
    api_server.delete(PODS, "p")
    assert api_server.get(PODS, "p") is None


async def test_wait_until_is_woken_by_changes(client, api_server):
    waiting = asyncio.create_task(api_server.wait_until(lambda: api_server.list(RESOURCE_SLICES)))
    await client.done("POST", SLICES, resource_slice("a"))
    assert [item["metadata"]["name"] for item in await waiting] == ["a"]
    with pytest.raises(TimeoutError):
        await api_server.wait_until(lambda: False, timeout_s=0.01)


def test_serves_from_a_thread():
    async def ask(url):
        async with Client(url) as client:
            watch = await client.watch(SLICES)
            server.create(RESOURCE_SLICES, resource_slice("a"))
            return await next_seen(watch)

    with ApiServer().in_thread() as server:
        assert asyncio.run(ask(server.url)) == ("ADDED", "a")


def test_unknown_gates_are_refused():
    with pytest.raises(ValueError, match="unknown feature gates"):
        ApiServer(gates={"DRASomething"})


async def test_discovery_names_all_resources(client):
    assert (await client.done("GET", "/version"))["major"] == "1"
    assert (await client.done("GET", "/api"))["versions"] == ["v1"]
    groups = (await client.done("GET", "/apis"))["groups"]
    assert [group["preferredVersion"]["groupVersion"] for group in groups] == ["resource.k8s.io/v1"]
    names = set()
    for path in ("/api/v1", "/apis/resource.k8s.io/v1"):
        names |= {resource["name"] for resource in (await client.done("GET", path))["resources"]}
    assert {"nodes", "pods", "pods/binding", "resourceclaims", "resourceclaims/status", "resourceslices"} <= names
    async with client.session.get("/readyz") as response:
        assert (response.status, await response.text()) == (200, "ok")


async def test_kubeconfig_leads_to_the_server(api_server, tmp_path):
    config = yaml.safe_load(api_server.write_kubeconfig(tmp_path / "kubeconfig").read_text())
    assert config["clusters"][0]["cluster"]["server"] == api_server.url
    assert config["current-context"] == config["contexts"][0]["name"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
async def test_kubectl_creates_reads_and_deletes(api_server, tmp_path):
    kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig")
    manifest = tmp_path / "claim.yaml"
    manifest.write_text(yaml.safe_dump({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", **claim("a")}))

    async def kubectl(*arguments):
        process = await asyncio.create_subprocess_exec(
            "kubectl",
            f"--kubeconfig={kubeconfig}",
            f"--cache-dir={tmp_path}",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 30)
        return process.returncode, output.decode()

    assert await kubectl("create", "-f", str(manifest)) == (0, "resourceclaim.resource.k8s.io/a created\n")
    status, text = await kubectl("get", "resourceclaims", "a", "-o", "yaml")
    assert (status, yaml.safe_load(text)["spec"]) == (0, api_server.get(RESOURCE_CLAIMS, "a")["spec"])
    status, text = await kubectl("describe", "resourceclaim", "a")
    assert status == 0
    assert "Device Class Name:  dra.cpu" in text
    status, text = await kubectl("delete", "resourceclaim", "a")
    assert status == 0
    assert api_server.get(RESOURCE_CLAIMS, "a") is None
    status, text = await kubectl("get", "resourceclaim", "a")
    assert (status, "NotFound" in text) == (1, True)
