# SPDX-License-Identifier: Apache-2.0
"""Claims as the API server sends them: what is read, what is refused, and when two allocations are the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.claims import FROM_CLAIM, FROM_CLASS, AllocatedClaim, DeviceResult, OpaqueConfig, decode_claim
from driver.errors import ClaimError
from driver.names import claim_uid

UID = claim_uid("claim-uid-123456")

# The example of the specification, as JSON.
CLAIM = json.loads("""
{
  "apiVersion": "resource.k8s.io/v1",
  "kind": "ResourceClaim",
  "metadata": {"name": "exclusive-cores-claim", "namespace": "default", "uid": "claim-uid-123456"},
  "spec": {"devices": {"requests": [{
    "name": "cpu-request-1",
    "exactly": {"deviceClassName": "dra.cpu", "capacity": {"requests": {"dra.cpu/cpu": "4"}}}
  }]}},
  "status": {"allocation": {"devices": {
    "results": [{
      "request": "cpu-request-1",
      "driver": "dra.cpu",
      "pool": "test-node",
      "device": "cpudevnuma000",
      "consumedCapacity": {"dra.cpu/cpu": "4"}
    }],
    "config": [{
      "source": "FromClaim",
      "requests": ["cpu-request-1"],
      "opaque": {
        "driver": "dra.cpu",
        "parameters": {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5"}}
      }
    }]
  }}}
}
""")

Path = tuple[str | int, ...]
DEVICES: Path = ("status", "allocation", "devices")
RESULT: Path = (*DEVICES, "results", 0)
CONFIG: Path = (*DEVICES, "config", 0)
DELETED = object()


def changed(path: Path, value: object) -> dict[str, object]:
    """Return the example with something else in one place."""
    claim = copy.deepcopy(CLAIM)
    owner = claim
    for key in path[:-1]:
        owner = owner[key]
    if value is DELETED:
        del owner[path[-1]]
    else:
        owner[path[-1]] = value
    return claim


def decoded(path: Path = (), value: object = None) -> AllocatedClaim:
    return decode_claim(changed(path, value) if path else CLAIM, UID)


def test_the_claim_of_the_specification_is_read() -> None:
    claim = decoded()
    assert (claim.uid, claim.namespace, claim.name) == (UID, "default", "exclusive-cores-claim")
    assert claim.generation == 0
    assert claim.pod_claim_name is None
    assert claim.results == (
        DeviceResult(request="cpu-request-1", pool="test-node", device="cpudevnuma000", share_id=None, cpus=4),
    )
    assert claim.configs == (
        OpaqueConfig(
            source=FROM_CLAIM,
            requests=("cpu-request-1",),
            parameters={"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5"}},
        ),
    )
    assert claim.request_counts == {}
    assert claim.request_counts.get("cpu-request-1", 1) == 1


def test_what_only_some_claims_have_is_read() -> None:
    raw = changed(("metadata", "generation"), 7)
    raw["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": "cpus", "other": 5}  # type: ignore[index]
    raw["status"]["allocation"]["devices"]["results"][0]["shareID"] = "8ae2c0a4"  # type: ignore[index]
    claim = decode_claim(raw, UID)
    assert claim.generation == 7
    assert claim.pod_claim_name == "cpus"
    assert claim.results[0].share_id == "8ae2c0a4"


def test_an_empty_annotation_says_nothing() -> None:
    annotations = {"resource.kubernetes.io/pod-claim-name": ""}
    assert decoded(("metadata", "annotations"), annotations).pod_claim_name is None


def test_what_belongs_to_other_drivers_is_passed_over_unread() -> None:
    raw = copy.deepcopy(CLAIM)
    devices = raw["status"]["allocation"]["devices"]
    devices["results"].insert(
        0, {"driver": "gpu.example.com", "request": 5, "adminAccess": True, "consumedCapacity": []}
    )
    devices["config"].insert(0, {"source": "FromMars", "opaque": {"driver": "gpu.example.com", "parameters": 5}})
    devices["config"].insert(0, {"source": "FromClass", "future": {"driver": "dra.cpu"}})
    claim = decode_claim(raw, UID)
    assert claim == decoded()


def test_requests_and_pools_may_have_parts() -> None:
    assert decoded((*RESULT, "request"), "cpus/big").results[0].request == "cpus/big"
    assert decoded((*RESULT, "pool"), "rack-1.example.com/node-a").results[0].pool == "rack-1.example.com/node-a"


def test_a_claim_without_devices_of_ours_is_no_error() -> None:
    claim = decoded((*RESULT, "driver"), "gpu.example.com")
    assert claim.results == ()
    assert decoded(DEVICES, DELETED).results == ()
    assert decoded((*DEVICES, "results"), None).results == ()


@pytest.mark.parametrize(
    ("request_name", "base", "config_requests", "applies"),
    [
        ("cpus", "cpus", [], True),
        ("cpus", "cpus", None, True),
        ("cpus", "cpus", ["cpus"], True),
        ("cpus", "cpus", ["other", "cpus"], True),
        ("cpus", "cpus", ["other"], False),
        ("cpus", "cpus", ["cpus/sub"], False),
        ("cpus/sub", "cpus", ["cpus"], True),
        ("cpus/sub", "cpus", ["cpus/sub"], True),
        ("cpus/sub", "cpus", ["cpus/other"], False),
        ("cpus/sub", "cpus", ["sub"], False),
        ("cpus/sub", "cpus", [], True),
    ],
)
def test_a_config_applies_by_request_and_sub_request(
    request_name: str, base: str, config_requests: list[str] | None, applies: bool
) -> None:
    claim = decoded((*CONFIG, "requests"), config_requests)
    assert claim.configs[0].applies_to(request_name) is applies
    assert decoded((*RESULT, "request"), request_name).results[0].base_request == base


def test_the_source_of_a_config_is_kept() -> None:
    assert decoded((*CONFIG, "source"), "FromClass").configs[0].source == FROM_CLASS


def test_parameters_that_are_missing_are_none() -> None:
    assert decoded((*CONFIG, "opaque", "parameters"), DELETED).configs[0].parameters is None
    assert decoded((*CONFIG, "opaque", "parameters"), None).configs[0].parameters is None


@pytest.mark.parametrize(
    ("consumed", "cpus", "fault"),
    [
        ({"dra.cpu/cpu": "4"}, 4, ""),
        ({"dra.cpu/cpu": "4000m", "dra.cpu/other": "x"}, 4, ""),
        ({"dra.cpu/cpu": 4}, 4, ""),
        (DELETED, 0, 'consumedCapacity["dra.cpu/cpu"] is missing; expected the number of CPUs'),
        (None, 0, 'consumedCapacity["dra.cpu/cpu"] is missing; expected the number of CPUs'),
        ({}, 0, 'consumedCapacity["dra.cpu/cpu"] is missing; expected the number of CPUs'),
        ({"cpu": "4"}, 0, 'consumedCapacity["dra.cpu/cpu"] is missing; expected the number of CPUs'),
        (
            {"dra.cpu/cpu": "1500m"},
            0,
            "consumedCapacity[\"dra.cpu/cpu\"]: '1500m' is not a whole number of CPUs; expected 1 or more",
        ),
        (
            {"dra.cpu/cpu": "0"},
            0,
            "consumedCapacity[\"dra.cpu/cpu\"]: '0' is not a positive number of CPUs; expected 1 or more",
        ),
        (
            {"dra.cpu/cpu": "four"},
            0,
            "consumedCapacity[\"dra.cpu/cpu\"]: 'four' is not a quantity; "
            "expected a number with at most one suffix, such as 4, 500m or 1.5Gi",
        ),
    ],
)
def test_what_is_wrong_with_the_consumed_capacity_is_kept_for_the_allocator(
    consumed: object, cpus: int, fault: str
) -> None:
    result = decoded((*RESULT, "consumedCapacity"), consumed).results[0]
    assert (result.cpus, result.fault) == (cpus, fault)


def test_counts_are_those_of_requests_and_sub_requests() -> None:
    requests = [
        {"name": "one", "exactly": {"count": 1}},
        {"name": "all", "exactly": {"allocationMode": "All"}},
        {"name": "two", "exactly": {"count": 2}},
        {"name": "either", "firstAvailable": [{"name": "big", "count": 3}, {"name": "small"}]},
        {"name": "of-the-future", "somehow": {"count": "many"}},
    ]
    claim = decoded(("spec", "devices", "requests"), requests)
    assert claim.request_counts == {"one": 1, "two": 2, "either/big": 3}
    assert decoded(("spec",), DELETED).request_counts == {}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("metadata",), DELETED, "metadata is missing; expected an object"),
        (("metadata", "name"), DELETED, "metadata.name is missing; expected a string"),
        (("metadata", "namespace"), 5, "metadata.namespace is a whole number; expected a string"),
        (("metadata", "uid"), None, "metadata.uid is missing; expected a string"),
        (
            ("metadata", "uid"),
            "another",
            "claim default/exclusive-cores-claim has UID 'another', not claim-uid-123456: "
            "it was deleted and created again",
        ),
        (("metadata", "generation"), "1", "metadata.generation is a string; expected a whole number"),
        (("metadata", "annotations"), [], "metadata.annotations is a list; expected an object"),
        (
            ("metadata", "name"),
            "a\nb",
            "metadata.name 'a\\nb' is malformed; expected a name of the Kubernetes API",
        ),
        (
            ("status",),
            DELETED,
            "claim default/exclusive-cores-claim has no allocation yet; expected status.allocation",
        ),
        (
            ("status", "allocation"),
            None,
            "claim default/exclusive-cores-claim has no allocation yet; expected status.allocation",
        ),
        (("status", "allocation"), "x", "status.allocation is a string; expected an object"),
        ((*DEVICES, "results"), {}, "status.allocation.devices.results is an object; expected a list"),
        (RESULT, None, "status.allocation.devices.results[0] is missing; expected an object"),
        ((*RESULT, "driver"), DELETED, "status.allocation.devices.results[0].driver is missing; expected a string"),
        ((*RESULT, "request"), DELETED, "status.allocation.devices.results[0].request is missing; expected a string"),
        ((*RESULT, "pool"), "", "status.allocation.devices.results[0].pool '' is malformed"),
        ((*RESULT, "request"), "cpus/../x", "status.allocation.devices.results[0].request 'cpus/../x' is malformed"),
        ((*RESULT, "pool"), "a/" * 20 + "a", "status.allocation.devices.results[0].pool 'a/a/a/a/a/"),
        ((*RESULT, "device"), "a/b", "status.allocation.devices.results[0].device 'a/b' is malformed"),
        (("metadata", "namespace"), "a/b", "metadata.namespace 'a/b' is malformed"),
        (("metadata", "name"), "x" * 254, "metadata.name 'xxxx"),
        (
            ("metadata", "annotations"),
            {"resource.kubernetes.io/pod-claim-name": "a/../b"},
            "metadata.annotations.resource.kubernetes.io/pod-claim-name 'a/../b' is malformed",
        ),
        ((*RESULT, "device"), "../x", "status.allocation.devices.results[0].device '../x' is malformed"),
        ((*RESULT, "device"), "\ud800", "status.allocation.devices.results[0].device '\\ud800' is malformed"),
        ((*RESULT, "shareID"), 7, "status.allocation.devices.results[0].shareID is a whole number; expected a string"),
        (
            (*RESULT, "adminAccess"),
            True,
            "request cpu-request-1: dra.cpu offers no administrator's access; ask for the device without adminAccess",
        ),
        (
            (*RESULT, "adminAccess"),
            "false",
            "status.allocation.devices.results[0].adminAccess is a string; expected a boolean",
        ),
        (
            (*RESULT, "consumedCapacity"),
            "4",
            "status.allocation.devices.results[0].consumedCapacity is a string; expected an object",
        ),
        ((*DEVICES, "config"), 5, "status.allocation.devices.config is a whole number; expected a list"),
        ((*CONFIG, "opaque"), [], "status.allocation.devices.config[0].opaque is a list; expected an object"),
        (
            (*CONFIG, "opaque", "driver"),
            DELETED,
            "status.allocation.devices.config[0].opaque.driver is missing; expected a string",
        ),
        (
            (*CONFIG, "source"),
            "FromMars",
            "status.allocation.devices.config[0].source 'FromMars' is unknown; expected FromClass or FromClaim",
        ),
        ((*CONFIG, "requests"), "cpus", "status.allocation.devices.config[0].requests is a string; expected a list"),
        (
            (*CONFIG, "requests"),
            [1],
            "status.allocation.devices.config[0].requests is a whole number; expected a string",
        ),
        (("spec",), [], "spec is a list; expected an object"),
        (
            ("spec", "devices", "requests", 0, "name"),
            None,
            "spec.devices.requests[0].name is missing; expected a string",
        ),
        (
            ("spec", "devices", "requests", 0, "exactly", "count"),
            True,
            "spec.devices.requests[0].exactly.count is a boolean; expected a whole number",
        ),
    ],
)
def test_a_claim_of_another_form_is_refused(path: Path, value: object, message: str) -> None:
    with pytest.raises(ClaimError) as refusal:
        decoded(path, value)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("raw", [None, [], "claim", 5, {}, {"metadata": []}])
def test_what_is_no_claim_is_refused(raw: object) -> None:
    with pytest.raises(ClaimError, match="expected an object"):
        decode_claim(raw, UID)  # type: ignore[arg-type]


def test_adminaccess_false_is_an_ordinary_result() -> None:
    assert decoded((*RESULT, "adminAccess"), False) == decoded()


# Fingerprints.


def with_parameters(parameters: object) -> AllocatedClaim:
    return decoded((*CONFIG, "opaque", "parameters"), parameters)


def cpuset(text: object) -> dict[str, object]:
    return {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": text}}


def test_a_fingerprint_is_short_text() -> None:
    assert len(decoded().fingerprint) == 64
    assert int(decoded().fingerprint, 16)


@pytest.mark.parametrize(
    "same",
    [
        lambda: decoded((*RESULT, "consumedCapacity"), {"dra.cpu/cpu": "4000m", "other": "1"}),
        lambda: decoded((*RESULT, "consumedCapacity"), {"dra.cpu/cpu": 4}),
        lambda: decoded((*RESULT, "bindingConditions"), ["x"]),
        lambda: decoded((*CONFIG, "requests"), ["cpu-request-1", "cpu-request-1"]),
        lambda: decoded(("metadata", "generation"), 5),
        lambda: with_parameters(cpuset("5,4,2-3,3")),
        lambda: with_parameters(cpuset("2-5:1/1")),
        lambda: with_parameters({"APIVERSION": "v1alpha1", "CpuConfig": {"cpuset": "2-5", "more": 1}, "x": None}),
    ],
)
def test_two_spellings_of_an_allocation_have_one_fingerprint(same: Callable[[], AllocatedClaim]) -> None:
    assert same().fingerprint == decoded().fingerprint


def test_the_order_of_results_does_not_matter_but_their_number_does() -> None:
    one = CLAIM["status"]["allocation"]["devices"]["results"][0]
    two = {**one, "device": "cpudevnuma001"}
    orders = [[one, two], [two, one], [one, two, two]]
    fingerprints = [decoded((*DEVICES, "results"), results).fingerprint for results in orders]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 2


def test_different_allocations_have_different_fingerprints() -> None:
    placement = {"apiVersion": "v1alpha1", "cpuConfig": {"placement": {"spread": "cores"}}}
    claims = [
        decoded(),
        decoded((*RESULT, "request"), "cpu-request-2"),
        decoded((*RESULT, "pool"), "other-node"),
        decoded((*RESULT, "device"), "cpudevnuma001"),
        decoded((*RESULT, "shareID"), "8ae2c0a4"),
        decoded((*RESULT, "consumedCapacity"), {"dra.cpu/cpu": "5"}),
        decoded((*RESULT, "consumedCapacity"), {}),
        decoded((*CONFIG, "source"), "FromClass"),
        decoded((*CONFIG, "requests"), []),
        decoded((*CONFIG, "requests"), ["cpu-request-1", "cpu-request-2"]),
        decoded((*DEVICES, "config"), []),
        decoded((*DEVICES, "config"), CLAIM["status"]["allocation"]["devices"]["config"] * 2),
        with_parameters(None),
        with_parameters({}),
        with_parameters({"apiVersion": "v1alpha1"}),
        with_parameters(placement),
        with_parameters({**placement, "cpuConfig": {"cpuset": "2-5", **placement["cpuConfig"]}}),  # type: ignore[dict-item]
        with_parameters({"apiVersion": "v1beta1", "cpuConfig": {"cpuset": "2-5"}}),
        with_parameters(cpuset("2-4")),
        with_parameters(cpuset("2-x")),
        with_parameters(cpuset("2-y")),
        with_parameters(cpuset("0-4294967295")),
        with_parameters(cpuset("9000-9001")),
        with_parameters(cpuset(5)),
        with_parameters(cpuset("2," * 6000 + "2")),
    ]
    assert len({claim.fingerprint for claim in claims}) == len(claims)


def test_a_capacity_that_tells_no_count_counts_like_none() -> None:
    """A fingerprint outlives the driver's version, and with it the wording of what is wrong."""
    without = decoded((*RESULT, "consumedCapacity"), None)
    assert without.results[0].fault
    for consumed in ({}, {"dra.cpu/cpu": "1.5"}, {"dra.cpu/cpu": None}):
        assert decoded((*RESULT, "consumedCapacity"), consumed).fingerprint == without.fingerprint


def test_parameters_nested_too_deeply_are_refused() -> None:
    nested: list[object] = []
    for _ in range(4000):
        nested = [nested]
    with pytest.raises(ClaimError, match="nested too deeply"):
        with_parameters({"unread": nested})


def test_parameters_with_text_that_is_no_unicode_are_told_apart() -> None:
    assert with_parameters("\ud800").fingerprint != with_parameters("\ud801").fingerprint


# Hostile objects: whatever stands anywhere, the answer is a claim or a ClaimError in one line.

TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.sampled_from(["dra.cpu", "FromClaim"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


def places(value: object, path: Path = ()) -> list[Path]:
    """Return where something stands in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in [(*path, key), *places(item, (*path, key))]]


@given(path=st.sampled_from(places(CLAIM)), value=JSON)
def test_anything_anywhere_is_read_or_refused(path: Path, value: object) -> None:
    refusal = ""
    try:
        decoded(path, value)
    except ClaimError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 500
    assert refusal.encode().decode() == refusal


@given(raw=JSON)
def test_any_json_is_read_or_refused(raw: object) -> None:
    with pytest.raises(ClaimError):
        decode_claim(raw, UID)  # type: ignore[arg-type]
