# SPDX-License-Identifier: Apache-2.0
"""What the API accepts as a ResourceSlice, refuses, and drops without a word."""

from __future__ import annotations

import pytest

from driver.sandbox.apiserver import ApiServer
from driver.sandbox.apistatus import StatusError
from driver.sandbox.kinds import NODES, RESOURCE_SLICES
from driver.sandbox.slicerules import LIST_ATTRIBUTES, NODE_ALLOCATABLE

PCIE = "resource.kubernetes.io/pcieRoot"
MAPPING = {"cpu": {"mapping": {"capacityKey": "dra.cpu/cpu", "capacityMultiplier": "1"}}}


def device(name="cpudevnuma000", *, value="4", policy=None, **more):
    capacity = {"value": value, **({"requestPolicy": policy} if policy is not None else {})}
    return {
        "name": name,
        "allowMultipleAllocations": True,
        "attributes": {"dra.cpu/numCPUs": {"int": 4}},
        "capacity": {"dra.cpu/cpu": capacity},
        **more,
    }


def resource_slice(*devices, **spec):
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": "s"},
        "spec": {"driver": "dra.cpu", "nodeName": "n1", "pool": pool, "devices": list(devices), **spec},
    }


def stored(body, *gates):
    return ApiServer(gates=gates).create(RESOURCE_SLICES, body)["spec"]


def causes(body, *gates):
    with pytest.raises(StatusError) as refusal:
        ApiServer(gates=gates).create(RESOURCE_SLICES, body)
    assert (refusal.value.code, refusal.value.reason) == (422, "Invalid")
    return {cause["field"]: cause["message"] for cause in refusal.value.details["causes"]}


def undecoded(body, *gates):
    with pytest.raises(StatusError) as refusal:
        ApiServer(gates=gates).create(RESOURCE_SLICES, body)
    assert (refusal.value.code, refusal.value.reason) == (400, "BadRequest")


def policy(**more):
    return {"default": "4", "validRange": {"min": "1", "step": "1"}, **more}


def test_what_the_driver_publishes_is_accepted_as_it_is():
    body = resource_slice(device(policy=policy()))
    assert stored(body) == body["spec"]


def test_one_cpu_needs_valid_values_instead_of_a_range():
    body = resource_slice(device(value="1", policy={"default": "1", "validValues": ["1"]}))
    assert stored(body) == body["spec"]
    refused = causes(resource_slice(device(value="1", policy={**policy(), "default": "1"})))
    assert "one step 2 is larger than capacity value: 1" in str(refused)


@pytest.mark.parametrize(
    ("spelled", "answered"),
    [
        ("4000m", "4"),
        ("1000", "1k"),
        ("1024", "1024"),
        ("2048Ki", "2Mi"),
        ("1.5", "1500m"),
        (128, "128"),
        ("1e3", "1e3"),
    ],
)
def test_quantities_come_back_in_the_servers_spelling(spelled, answered):
    body = resource_slice(device(value=spelled))
    assert stored(body)["devices"][0]["capacity"]["dra.cpu/cpu"] == {"value": answered}


def test_nothing_is_the_same_as_empty():
    body = resource_slice({"name": "d", "attributes": {}, "capacity": None, "taints": []})
    assert stored(body)["devices"] == [{"name": "d"}]
    assert "devices" not in stored(resource_slice())


def test_unknown_fields_are_dropped():
    body = resource_slice({"name": "d", "wrong": 1}, alsoWrong=True)
    assert stored(body) == resource_slice({"name": "d"})["spec"]


def test_mapped_node_resources_need_their_gate():
    body = resource_slice(device(nodeAllocatableResources=MAPPING))
    assert stored(body) == resource_slice(device())["spec"]
    assert stored(body, NODE_ALLOCATABLE) == body["spec"]


@pytest.mark.parametrize(("declared", "accepted"), [(None, True), ([NODE_ALLOCATABLE], True), (["Other"], False)])
def test_mapped_node_resources_need_a_kubelet_that_declares_them(declared, accepted):
    server = ApiServer(gates=[NODE_ALLOCATABLE])
    server.create(NODES, {"metadata": {"name": "n1"}, "status": {"declaredFeatures": declared}})
    server.create(RESOURCE_SLICES, resource_slice(device()))
    body = resource_slice(device(nodeAllocatableResources=MAPPING))
    if accepted:
        assert server.put(RESOURCE_SLICES, body)["spec"] == body["spec"]
        return
    with pytest.raises(StatusError) as refusal:
        server.put(RESOURCE_SLICES, body)
    assert (refusal.value.code, refusal.value.reason) == (403, "Forbidden")
    assert 'node "n1" does not support DRANodeAllocatableResources feature' in refusal.value.message


@pytest.mark.parametrize(
    "mapping",
    [
        {"cpu": {}},
        {"cpu": {"mapping": {"capacityKey": "dra.cpu/other", "capacityMultiplier": "1"}}},
        {"cpu": {"mapping": {"capacityKey": "dra.cpu/cpu"}}},
        {"cpu": {"mapping": {"capacityKey": "dra.cpu/cpu", "capacityMultiplier": "0"}}},
        {"cpu": {"mapping": {"deviceMultiplier": "1", "capacityKey": "dra.cpu/cpu", "capacityMultiplier": "1"}}},
        {"ephemeral-storage": {"mapping": {"deviceMultiplier": "1"}}},
    ],
)
def test_mapped_node_resources_are_checked(mapping):
    refused = causes(resource_slice(device(nodeAllocatableResources=mapping)), NODE_ALLOCATABLE)
    assert all(field.startswith("spec.devices[0].nodeAllocatableResources") for field in refused)


def test_list_attributes_without_their_gate_take_the_slice_with_them():
    body = resource_slice(device(attributes={PCIE: {"strings": ["pci0000:00"]}}))
    message = causes(body)[f"spec.devices[0].attributes[{PCIE}]"]
    assert message.startswith('Invalid value: "": must specify one of: `int`, `bool`')
    assert stored(body, LIST_ATTRIBUTES) == body["spec"]


def test_slices_with_list_attributes_hold_fewer_devices():
    plain = [device(f"d{n}") for n in range(128)]
    assert len(stored(resource_slice(*plain))["devices"]) == 128
    assert causes(resource_slice(*plain, device("one-more"))) == {
        "spec.devices": "Too many: 129: must have at most 128 items"
    }
    plain[0]["attributes"][PCIE] = {"strings": ["pci0000:00"]}
    assert len(stored(resource_slice(*plain[:64]), LIST_ATTRIBUTES)["devices"]) == 64
    refused = causes(resource_slice(*plain[:65]), LIST_ATTRIBUTES)
    assert refused == {"spec.devices": "Too many: 65: must have at most 64 items"}


@pytest.mark.parametrize(("text", "fits"), [("x" * 64, True), ("x" * 65, False), ("ä" * 32, True), ("ä" * 33, False)])
def test_texts_hold_64_bytes(text, fits):
    body = resource_slice(device(attributes={"dra.cpu/cpuIDs": {"string": text}}))
    if fits:
        assert stored(body) == body["spec"]
    else:
        field = "spec.devices[0].attributes[dra.cpu/cpuIDs].string"
        assert causes(body) == {field: "Too long: may not be more than 64 bytes"}


@pytest.mark.parametrize(
    "attribute",
    [{}, None, {"int": 1, "bool": True}, {"version": "v1.2.3"}, {"version": "1.2"}],
)
def test_malformed_attributes_are_refused(attribute):
    body = resource_slice(device(attributes={"dra.cpu/x": {"int": 1}, "dra.cpu/y": attribute}))
    assert all(field.startswith("spec.devices[0].attributes[dra.cpu/y]") for field in causes(body))


@pytest.mark.parametrize(
    "attribute", [{"int": "1"}, {"int": True}, {"string": 1}, {"ints": 1}, {"ints": ["1"]}, "text"]
)
def test_attributes_of_another_type_cannot_be_decoded(attribute):
    undecoded(resource_slice(device(attributes={"dra.cpu/x": attribute})), LIST_ATTRIBUTES)


@pytest.mark.parametrize("version", ["1.2.3", "0.0.1-alpha.1+build.5"])
def test_versions_are_semantic(version):
    body = resource_slice(device(attributes={"dra.cpu/v": {"version": version}}))
    assert stored(body) == body["spec"]


@pytest.mark.parametrize(
    "name", ["dra.cpu/not-an-identifier", "dra.cpu/" + "x" * 33, "/x", "a/b/c", "Domain!/x", "x" * 64 + ".com/x"]
)
def test_malformed_attribute_names_are_refused(name):
    assert causes(resource_slice(device(attributes={name: {"int": 1}})))


def test_devices_have_32_attributes_and_capacities_at_most():
    attributes = {f"dra.cpu/a{n}": {"int": n} for n in range(31)}
    assert stored(resource_slice(device(attributes=attributes)))
    attributes["dra.cpu/more"] = {"int": 1}
    assert "must not exceed 32" in causes(resource_slice(device(attributes=attributes)))["spec.devices[0]"]


def test_devices_have_48_attribute_values_at_most():
    body = resource_slice(device(attributes={PCIE: {"strings": [f"r{n}" for n in range(48)]}}))
    assert stored(body, LIST_ATTRIBUTES)
    body["spec"]["devices"][0]["attributes"][PCIE]["strings"].append("more")
    assert "must not exceed 48" in causes(body, LIST_ATTRIBUTES)["spec.devices[0]"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (policy(validValues=["4"]), "at the same time"),
        ({"validRange": {"min": "1"}}, "required when validRange is defined"),
        ({"validValues": ["1"]}, "required when validValues is defined"),
        ({"default": "4", "validRange": {"step": "1"}}, "required when validRange is defined"),
        (policy(default="0"), "default is less than min: 1"),
        (policy(validRange={"min": "1", "max": "3"}), "default is more than max: 3"),
        (policy(validRange={"min": "1", "max": "9"}), "max is larger than capacity value: 4"),
        (policy(validRange={"min": "5"}), "min is larger than capacity value: 4"),
        (policy(validRange={"min": "1", "step": "0"}), "must be greater than zero"),
        (policy(validRange={"min": "1", "step": "2"}), "not a multiple of a given step"),
        (policy(default="1", validRange={"min": "1", "step": "4"}), "one step 5 is larger than capacity value: 4"),
        (policy(default="1", validRange={"min": "-2", "step": "1"}), "must not be negative"),
        ({"default": "4", "validValues": ["4", "2"]}, "sorted in ascending order"),
        ({"default": "4", "validValues": ["2", "2", "4"]}, "Duplicate value"),
        ({"default": "3", "validValues": ["2", "4"]}, "default value is not valid"),
        ({"default": "4", "validValues": ["4", "5"]}, "option is larger than capacity value: 4"),
        ({"default": "1", "validValues": [f"{n}" for n in range(1, 12)]}, "must have at most 10 items"),
    ],
)
def test_request_policies_are_checked(wrong, message):
    refused = causes(resource_slice(device(policy=wrong)))
    assert message in str(refused)
    assert all(field.startswith("spec.devices[0].capacity[dra.cpu/cpu].requestPolicy") for field in refused)


def test_request_policies_are_for_shared_devices():
    body = resource_slice(device(policy=policy(), allowMultipleAllocations=False))
    assert "allowMultipleAllocations must be true" in str(causes(body))


@pytest.mark.parametrize("value", ["x", "1 Gi", "", True, "Ki", [1], {"a": 1}])
def test_what_is_no_quantity_cannot_be_decoded(value):
    undecoded(resource_slice(device(value=value)))
    undecoded(resource_slice(device(policy={"default": value})))
    undecoded(resource_slice(device(policy={"default": "4", "validValues": [value]})))
    undecoded(resource_slice(device(policy={"default": "4", "validRange": {"min": value}})))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"driver": ""}, "spec.driver"),
        ({"driver": "x" * 64}, "spec.driver"),
        ({"driver": "no spaces"}, "spec.driver"),
        ({"nodeName": ""}, "spec.nodeName"),
        ({"nodeName": None}, "spec"),
        ({"allNodes": True}, "spec"),
        ({"allNodes": False}, "spec.allNodes"),
        ({"pool": {"name": "n1", "resourceSliceCount": 0}}, "spec.pool.resourceSliceCount"),
        ({"pool": {"name": "n1", "resourceSliceCount": 1, "generation": -1}}, "spec.pool.generation"),
        ({"pool": {"name": "a//b", "resourceSliceCount": 1}}, "spec.pool.name"),
        ({"pool": {"resourceSliceCount": 1}}, "spec.pool.name"),
        ({"sharedCounters": [{"name": "c", "counters": {"x": {"value": "1"}}}]}, "spec"),
    ],
)
def test_the_rest_of_the_spec_is_checked(change, field):
    assert field in causes(resource_slice(device(), **change))


def test_device_names_are_labels_and_unique():
    assert "spec.devices[0].name" in causes(resource_slice(device("Not_A_Label")))
    assert causes(resource_slice(device("d"), device("d"))) == {"spec.devices[1]": 'Duplicate value: "d"'}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"driver": "other"}, "spec.driver"),
        ({"nodeName": "n2"}, "spec.nodeName"),
        ({"pool": {"name": "n2", "generation": 1, "resourceSliceCount": 1}}, "spec.pool.name"),
    ],
)
def test_a_slice_stays_with_its_driver_node_and_pool(change, field):
    server = ApiServer()
    server.create(RESOURCE_SLICES, resource_slice(device()))
    with pytest.raises(StatusError) as refusal:
        server.put(RESOURCE_SLICES, resource_slice(device(), **change))
    (cause,) = refusal.value.details["causes"]
    assert cause["field"] == field
    assert cause["message"].endswith(": field is immutable")


@pytest.mark.parametrize("devices", ["x", {}, [1], 5])
def test_devices_of_another_shape_cannot_be_decoded(devices):
    undecoded(resource_slice(devices=devices))
