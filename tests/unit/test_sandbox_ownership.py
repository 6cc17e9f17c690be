# SPDX-License-Identifier: Apache-2.0
"""Server-side apply and field ownership, as drivers use them on a claim's status."""

from __future__ import annotations

import pytest

from driver.sandbox.apiserver import ApiServer
from driver.sandbox.apistatus import StatusError
from driver.sandbox.kinds import RESOURCE_CLAIMS


def result(driver, device="d0", **more):
    return {"request": "r", "driver": driver, "pool": "n1", "device": device, **more}


def entry(driver, device="d0", **more):
    # The server answers "conditions": null where there are none.
    return {"driver": driver, "pool": "n1", "device": device, "conditions": None, **more}


@pytest.fixture
def server():
    """An API server, not listening, with an allocated claim of two drivers."""
    server = ApiServer()
    results = [result("dra.cpu"), result("dra.cpu", "d1"), result("dra.net")]
    requests = [{"name": "r", "exactly": {"deviceClassName": "c", "count": 3}}]
    claim = {"metadata": {"name": "a", "uid": "uid-a"}, "spec": {"devices": {"requests": requests}}}
    server.put(RESOURCE_CLAIMS, {**claim, "status": {"allocation": {"devices": {"results": results}}}})
    return server


def apply(server, manager, entries, *, force=False, **metadata):
    body = {"metadata": {"name": "a", **metadata}, "status": {"devices": entries}}
    claim, created = server.registry.apply(RESOURCE_CLAIMS, "default", "a", body, "status", manager, force=force)
    assert not created
    return claim


def owners(claim):
    return {(each["manager"], each["operation"]): each for each in claim["metadata"]["managedFields"]}


def test_entries_of_several_managers_live_together(server):
    apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2-5"})])
    claim = apply(server, "dra.net", [entry("dra.net", data={"ip": "x"})])
    assert claim["status"]["devices"] == [
        entry("dra.cpu", data={"cpus": "2-5"}),
        entry("dra.net", data={"ip": "x"}),
    ]


def test_what_is_left_out_of_the_next_apply_goes(server):
    apply(server, "dra.net", [entry("dra.net")])
    apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2"}), entry("dra.cpu", "d1", data={"cpus": "3"})])
    claim = apply(server, "dra.cpu", [entry("dra.cpu", "d1")])
    assert claim["status"]["devices"] == [entry("dra.net"), entry("dra.cpu", "d1")]
    claim = apply(server, "dra.cpu", [])
    assert claim["status"]["devices"] == [entry("dra.net")]
    claim = apply(server, "dra.net", [])
    assert "devices" not in claim["status"]


def test_an_apply_replaces_values_of_its_manager(server):
    apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2-5", "more": 1})])
    claim = apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "6"})])
    assert claim["status"]["devices"] == [entry("dra.cpu", data={"cpus": "6"})]


def test_an_apply_that_changes_nothing_makes_no_version(server):
    first = apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2-5"})])
    assert apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2-5"})]) == first


def test_another_managers_value_is_a_conflict_unless_forced(server):
    apply(server, "dra.net", [entry("dra.cpu", data={"cpus": "wrong"})])
    with pytest.raises(StatusError) as refusal:
        apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2-5"})])
    assert (refusal.value.code, refusal.value.reason) == (409, "Conflict")
    assert [cause["reason"] for cause in refusal.value.details["causes"]] == ["FieldManagerConflict"]
    assert 'conflict with "dra.net"' in refusal.value.message
    claim = apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2-5"})], force=True)
    assert claim["status"]["devices"] == [entry("dra.cpu", data={"cpus": "2-5"})]
    # The other one still owns what was not disputed, so the entry stays when the winner leaves.
    claim = apply(server, "dra.cpu", [])
    assert claim["status"]["devices"] == [entry("dra.cpu")]


def test_an_equal_value_is_shared(server):
    apply(server, "dra.net", [entry("dra.cpu", data={"cpus": "2"})])
    apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2"})])
    claim = apply(server, "dra.net", [])
    assert claim["status"]["devices"] == [entry("dra.cpu", data={"cpus": "2"})]


def test_shares_of_a_device_are_entries_of_their_own(server):
    share = "00000000-0000-4000-8000-000000000001"
    claim = server.get(RESOURCE_CLAIMS, "a")
    claim["status"] = {}
    server.put(RESOURCE_CLAIMS, claim, "status")
    claim["status"] = {"allocation": {"devices": {"results": [result("dra.cpu"), result("dra.cpu", shareID=share)]}}}
    del claim["metadata"]["resourceVersion"]
    server.put(RESOURCE_CLAIMS, claim, "status")
    entries = [entry("dra.cpu", data={"n": 1}), entry("dra.cpu", shareID=share, data={"n": 2})]
    assert apply(server, "dra.cpu", entries)["status"]["devices"] == entries


def test_managed_fields_name_owners_and_paths(server):
    claim = apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2-5"})])
    owned = owners(claim)["dra.cpu", "Apply"]
    assert (owned["apiVersion"], owned["fieldsType"], owned["subresource"]) == (
        "resource.k8s.io/v1",
        "FieldsV1",
        "status",
    )
    key = 'k:{"device":"d0","driver":"dra.cpu","pool":"n1"}'
    leaves = {".": {}, "f:data": {}, "f:device": {}, "f:driver": {}, "f:pool": {}}
    assert owned["fieldsV1"] == {"f:status": {"f:devices": {key: leaves}}}


def test_an_ordinary_write_takes_over_what_it_changes(server):
    apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2-5"})])
    claim = server.get(RESOURCE_CLAIMS, "a")
    claim["status"]["devices"][0]["data"] = {"cpus": "stolen"}
    claim = server.registry.update(RESOURCE_CLAIMS, "default", "a", claim, "status", "thief")
    assert "f:data" not in str(owners(claim)["dra.cpu", "Apply"]["fieldsV1"])
    assert "f:data" in str(owners(claim)["thief", "Update"]["fieldsV1"])
    with pytest.raises(StatusError, match="thief"):
        apply(server, "dra.cpu", [entry("dra.cpu", data={"cpus": "2-5"})])


def test_an_apply_of_another_claims_uid_is_refused(server):
    with pytest.raises(StatusError) as refusal:
        apply(server, "dra.cpu", [entry("dra.cpu")], uid="uid-b")
    assert refusal.value.code == 422
    assert 'metadata.uid: Invalid value: "uid-b": field is immutable' in refusal.value.message
    apply(server, "dra.cpu", [entry("dra.cpu")], uid="uid-a")


def test_an_apply_to_the_status_of_nothing_is_not_found(server):
    with pytest.raises(StatusError) as refusal:
        server.registry.apply(RESOURCE_CLAIMS, "default", "b", {"metadata": {"name": "b"}}, "status", "dra.cpu")
    assert refusal.value.code == 404


def test_an_apply_of_the_status_leaves_spec_and_metadata_alone(server):
    before = server.get(RESOURCE_CLAIMS, "a")
    body = {"metadata": {"name": "a", "labels": {"x": "1"}}, "spec": {"devices": {}}, "status": {"devices": []}}
    after, _ = server.registry.apply(RESOURCE_CLAIMS, "default", "a", body, "status", "dra.cpu")
    assert after["spec"] == before["spec"]
    assert "labels" not in after["metadata"]


def test_an_apply_creates_what_is_missing():
    server = ApiServer()
    body = {"metadata": {"name": "b"}, "spec": {"devices": {}}}
    claim, created = server.registry.apply(RESOURCE_CLAIMS, "default", "b", body, "", "kubectl")
    assert created
    assert server.get(RESOURCE_CLAIMS, "b") == claim


def test_an_apply_needs_a_manager(server):
    with pytest.raises(StatusError) as refusal:
        apply(server, "", [entry("dra.cpu")])
    assert refusal.value.code == 422


def test_entries_that_are_no_objects_are_refused(server):
    with pytest.raises(StatusError) as refusal:
        apply(server, "dra.cpu", ["x"])
    assert refusal.value.code == 400
