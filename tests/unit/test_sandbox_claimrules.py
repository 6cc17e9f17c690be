# SPDX-License-Identifier: Apache-2.0
"""What the API accepts as a ResourceClaim and as its status: the form of an allocation, never its sense."""

from __future__ import annotations

import copy

import pytest

from driver.sandbox.apiserver import ApiServer
from driver.sandbox.apistatus import StatusError
from driver.sandbox.kinds import RESOURCE_CLAIMS

REQUEST = {"name": "cpus", "exactly": {"deviceClassName": "dra.cpu", "allocationMode": "ExactCount", "count": 1}}
RESULT = {"request": "cpus", "driver": "dra.cpu", "pool": "n1", "device": "cpudevnuma000"}
SHARE = "00000000-0000-4000-8000-000000000001"


def claim(*requests, config=()):
    devices = {"requests": list(requests or [REQUEST]), **({"config": list(config)} if config else {})}
    return {"metadata": {"name": "a"}, "spec": {"devices": devices}}


def opaque(parameters, *, driver="dra.cpu", **more):
    return {"opaque": {"driver": driver, "parameters": parameters}, **more}


def allocation(*results, config=()):
    devices = {"results": list(results or [RESULT]), **({"config": list(config)} if config else {})}
    return {"devices": devices}


@pytest.fixture
def server():
    """An API server, not listening, with one claim of one request."""
    server = ApiServer()
    server.create(RESOURCE_CLAIMS, claim())
    return server


def write(server, status):
    return server.put(RESOURCE_CLAIMS, {**claim(), "status": status}, "status").get("status", {})


def refused(call, *arguments, code=422):
    with pytest.raises(StatusError) as refusal:
        call(*arguments)
    assert refusal.value.code == code, refusal.value.message
    return {cause["field"]: cause["message"] for cause in (refusal.value.details or {}).get("causes", ())}


def create(body):
    return ApiServer().create(RESOURCE_CLAIMS, body)


def test_defaults_of_requests_are_filled_in():
    short = {"name": "r", "exactly": {"deviceClassName": "c"}}
    alternatives = [{"name": "x", "deviceClassName": "c"}, {"name": "y", "deviceClassName": "d", "count": 2}]
    several = {"name": "s", "firstAvailable": alternatives}
    everything = {"name": "t", "exactly": {"deviceClassName": "c", "allocationMode": "All"}}
    requests = create(claim(short, several, everything))["spec"]["devices"]["requests"]
    assert requests[0]["exactly"] == {"deviceClassName": "c", "allocationMode": "ExactCount", "count": 1}
    assert [alternative["count"] for alternative in requests[1]["firstAvailable"]] == [1, 2]
    assert "count" not in requests[2]["exactly"]


def test_requested_capacities_come_back_in_the_servers_spelling():
    request = copy.deepcopy(REQUEST)
    request["exactly"]["capacity"] = {"requests": {"dra.cpu/cpu": "4000m"}}
    exactly = create(claim(request))["spec"]["devices"]["requests"][0]["exactly"]
    assert exactly["capacity"] == {"requests": {"dra.cpu/cpu": "4"}}


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ([{"name": "Not_A_Label", "exactly": {"deviceClassName": "c"}}], "spec.devices.requests[0].name"),
        ([REQUEST, REQUEST], "spec.devices.requests[1].name"),
        ([{"name": "r"}], "spec.devices.requests[0]"),
        ([{**REQUEST, "firstAvailable": [{"name": "x", "deviceClassName": "c"}]}], "spec.devices.requests[0]"),
        ([{"name": "r", "exactly": {}}], "spec.devices.requests[0].exactly.deviceClassName"),
        (
            [{"name": "r", "exactly": {"deviceClassName": "c", "count": 0}}],
            "spec.devices.requests[0].exactly.count",
        ),
        (
            [{"name": "r", "exactly": {"deviceClassName": "c", "allocationMode": "Some"}}],
            "spec.devices.requests[0].exactly.allocationMode",
        ),
        (
            [{"name": "r", "exactly": {"deviceClassName": "c", "allocationMode": "All", "count": 2}}],
            "spec.devices.requests[0].exactly.count",
        ),
        ([{**REQUEST, "name": f"r{n}"} for n in range(33)], "spec.devices.requests"),
        (
            [{"name": "r", "firstAvailable": [{"name": f"s{n}", "deviceClassName": "c"} for n in range(9)]}],
            "spec.devices.requests[0].firstAvailable",
        ),
    ],
)
def test_malformed_requests_are_refused(requests, field):
    assert field in refused(create, claim(*requests))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (opaque({"a": 1}, requests=["other"]), "requests[0]"),
        ({"requests": []}, "opaque"),
        (opaque({"a": 1}, driver="No Driver"), "opaque.driver"),
        (opaque(None), "opaque.parameters"),
        (opaque("text"), "opaque.parameters"),
        (opaque([1]), "opaque.parameters"),
        (opaque({"a": "x" * 10_240}), "opaque.parameters"),
    ],
)
def test_malformed_configurations_are_refused(server, config, field):
    assert f"spec.devices.config[0].{field}" in refused(create, claim(config=[config]))
    status = {"allocation": allocation(config=[{"source": "FromClaim", **config}])}
    assert f"status.allocation.devices.config[0].{field}" in refused(write, server, status)


def test_opaque_parameters_hold_10_kib(server):
    fits = {"a": "x" * (10_240 - len('{"a":""}'))}
    status = {"allocation": allocation(config=[opaque(fits, source="FromClaim")])}
    assert write(server, status)["allocation"]["devices"]["config"][0]["opaque"]["parameters"] == fits


def test_a_configuration_may_name_requests_and_alternatives():
    several = {"name": "s", "firstAvailable": [{"name": "x", "deviceClassName": "c"}]}
    assert create(claim(REQUEST, several, config=[opaque({}, requests=["cpus", "s", "s/x"])]))
    refused(create, claim(several, config=[opaque({}, requests=["s/y"])]))


def test_the_spec_is_immutable(server):
    changed = claim({**REQUEST, "name": "other"})
    assert refused(server.put, RESOURCE_CLAIMS, changed) == {"spec": "Invalid value: null: field is immutable"}


def test_an_allocation_comes_and_goes_but_never_changes(server):
    first = write(server, {"allocation": allocation()})
    assert first == {"allocation": allocation()}
    other = allocation({**RESULT, "device": "cpudevnuma001"})
    assert list(refused(write, server, {"allocation": other})) == ["status.allocation"]
    assert write(server, {"allocation": allocation()}) == first
    assert write(server, {}) == {}
    assert write(server, {"allocation": other}) == {"allocation": other}


def test_an_allocation_spelled_differently_is_the_same(server):
    capacity = {**RESULT, "shareID": SHARE, "consumedCapacity": {"dra.cpu/cpu": "4000m"}}
    first = write(server, {"allocation": allocation(capacity)})
    assert first["allocation"]["devices"]["results"][0]["consumedCapacity"] == {"dra.cpu/cpu": "4"}
    assert write(server, {"allocation": allocation(capacity)}) == first


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request": "other"}, "request"),
        ({"request": "cpus/sub"}, "request"),
        ({"driver": ""}, "driver"),
        ({"pool": "a//b"}, "pool"),
        ({"device": "Not_A_Label"}, "device"),
        ({"shareID": "not-a-uuid"}, "shareID"),
        ({"shareID": SHARE.upper().replace("0", "A")}, "shareID"),
    ],
)
def test_malformed_results_are_refused(server, change, field):
    found = refused(write, server, {"allocation": allocation({**RESULT, **change})})
    assert f"status.allocation.devices.results[0].{field}" in found


@pytest.mark.parametrize(("source", "ok"), [("FromClass", True), ("FromClaim", True), ("", False), ("Else", False)])
def test_configurations_of_an_allocation_have_a_source(server, source, ok):
    status = {"allocation": allocation(config=[opaque({}, source=source)])}
    if ok:
        assert write(server, status)
    else:
        assert list(refused(write, server, status)) == ["status.allocation.devices.config[0].source"]


def test_allocations_have_32_results_and_64_configurations_at_most(server):
    results = [{**RESULT, "device": f"d{n}"} for n in range(33)]
    config = [opaque({}, source="FromClaim") for _ in range(65)]
    assert refused(write, server, {"allocation": allocation(*results, config=config)}) == {
        "status.allocation.devices.results": "Too many: 33: must have at most 32 items",
        "status.allocation.devices.config": "Too many: 65: must have at most 64 items",
    }
    assert write(server, {"allocation": allocation(*results[:32], config=config[:64])})


def reservation(uid, **more):
    return {"resource": "pods", "name": "p", "uid": uid, **more}


def test_reservations_need_an_allocation(server):
    assert list(refused(write, server, {"reservedFor": [reservation("u")]})) == ["status.reservedFor"]
    status = {"allocation": allocation(), "reservedFor": [reservation("u")]}
    assert write(server, status) == status


def test_malformed_reservations_are_refused(server):
    reservations = [reservation("u"), reservation("u"), {"resource": "pods", "uid": "v"}]
    assert list(refused(write, server, {"allocation": allocation(), "reservedFor": reservations})) == [
        "status.reservedFor[1].uid",
        "status.reservedFor[2].name",
    ]
    many = [reservation(f"u{n}") for n in range(257)]
    assert list(refused(write, server, {"allocation": allocation(), "reservedFor": many})) == ["status.reservedFor"]


def test_nobody_new_may_reserve_a_claim_that_is_going(server):
    body = {**claim(), "metadata": {"name": "a", "finalizers": ["example.com/keep"]}}
    server.put(RESOURCE_CLAIMS, body)
    first = {"allocation": allocation(), "reservedFor": [reservation("u")]}
    write(server, first)
    server.delete(RESOURCE_CLAIMS, "a")
    assert write(server, first) == first
    more = {**first, "reservedFor": [reservation("u"), reservation("v")]}
    assert list(refused(write, server, more)) == ["status.reservedFor"]


def test_reported_devices_must_be_allocated_ones(server):
    ours = {"driver": "dra.cpu", "pool": "n1", "device": "cpudevnuma000", "conditions": None}
    status = {"allocation": allocation(), "devices": [{**ours, "data": {"cpuset": "2-5"}}]}
    assert write(server, status) == status
    for wrong in ({**ours, "device": "other"}, {**ours, "shareID": SHARE}, {**ours, "pool": "n2"}):
        assert list(refused(write, server, {**status, "devices": [wrong]})) == ["status.devices[0]"]
    assert list(refused(write, server, {**status, "devices": [ours, ours]})) == ["status.devices[1]"]
    large = {**ours, "data": {"a": "x" * 10_240}}
    assert list(refused(write, server, {**status, "devices": [large]})) == ["status.devices[0].data"]
    conditions = [{"type": f"t{n}"} for n in range(9)]
    assert list(refused(write, server, {**status, "devices": [{**ours, "conditions": conditions}]})) == [
        "status.devices[0].conditions"
    ]


def test_reported_devices_go_with_the_allocation(server):
    ours = {"driver": "dra.cpu", "pool": "n1", "device": "cpudevnuma000"}
    write(server, {"allocation": allocation(), "devices": [ours]})
    assert write(server, {"devices": [ours]}) == {}


@pytest.mark.parametrize(
    "status",
    [
        {"allocation": [1]},
        {"allocation": "x"},
        {"allocation": {"devices": [1]}},
        {"allocation": {"devices": {"results": {"a": 1}}}},
        {"allocation": {"devices": {"results": [1]}}},
        {"allocation": allocation({**RESULT, "request": 5})},
        {"allocation": allocation({**RESULT, "device": {"a": 1}, "pool": [1]})},
        {"allocation": allocation({**RESULT, "consumedCapacity": {"dra.cpu/cpu": "four"}})},
        {"allocation": allocation(config=[{"source": ["FromClaim"]}])},
        {"allocation": allocation(config=[{"source": "FromClaim", "requests": "cpus"}])},
        {"allocation": allocation(), "reservedFor": [{"uid": 5}]},
        {"allocation": allocation(), "devices": [{"driver": ["x"]}]},
    ],
)
def test_status_of_another_shape_is_refused(server, status):
    with pytest.raises(StatusError) as refusal:
        write(server, status)
    assert refusal.value.code in (400, 422)


@pytest.mark.parametrize("requests", [[1], ["x"], {"a": 1}, "x", [{"name": ["x"]}], [{"name": "r", "exactly": 1}]])
def test_requests_of_another_shape_are_refused(requests):
    body = {"metadata": {"name": "a"}, "spec": {"devices": {"requests": requests}}}
    with pytest.raises(StatusError) as refusal:
        create(body)
    assert refusal.value.code in (400, 422)
