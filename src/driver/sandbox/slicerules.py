# SPDX-License-Identifier: Apache-2.0
"""The API's rules for ResourceSlices, as Kubernetes 1.37 has them.

What belongs to a feature gate that is off is dropped without a word, with one exception: a list attribute loses its
value, and an attribute without a value makes the server refuse the whole slice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Final

from driver.sandbox.apistatus import FieldErrors, JsonObject, StatusError
from driver.sandbox.kinds import RESOURCE_SLICES
from driver.sandbox.policyrules import check_policy
from driver.sandbox.syntax import (
    check_driver,
    check_label,
    check_pool,
    check_qualified,
    check_subdomain,
    is_positive,
    members,
    objects,
    respell,
    without_empty,
)

LIST_ATTRIBUTES: Final = "DRAListTypeAttributes"
NODE_ALLOCATABLE: Final = "DRANodeAllocatableResources"

_SPEC_FIELDS: Final = frozenset(
    {"driver", "pool", "nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection", "devices", "sharedCounters"}
)
_DEVICE_FIELDS: Final = frozenset(
    {
        "name",
        "attributes",
        "capacity",
        "consumesCounters",
        "nodeName",
        "nodeSelector",
        "allNodes",
        "taints",
        "bindsToNode",
        "bindingConditions",
        "bindingFailureConditions",
        "allowMultipleAllocations",
        "nodeAllocatableResources",
    }
)
_MAPS: Final = frozenset({"attributes", "capacity", "counters", "nodeAllocatableResources"})
_NODE_CHOICES: Final = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
_MOST_DEVICES: Final = 128
_MOST_ADVANCED_DEVICES: Final = 64
_MOST_ATTRIBUTES_AND_CAPACITIES: Final = 32
_MOST_ATTRIBUTE_VALUES: Final = 48
_LONGEST_TEXT: Final = 64
_SCALARS: Final = {"int": int, "bool": bool, "string": str, "version": str}
_LISTS: Final = {"ints": int, "bools": bool, "strings": str, "versions": str}
_SEMVER: Final = re.compile(
    r"(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)){2}"
    r"(-(0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)(\.(0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*))*)?"
    r"(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?",
    re.ASCII,
)


class SliceRules:
    """Checks slices.

    Parameters
    ----------
    gates : frozenset of str
        The feature gates, out of `GATES`, that are on.
    declared_features : callable
        Returns what a node's kubelet declares to support, by the node's name; None if it declares nothing at all.
    """

    GATES: Final = frozenset({LIST_ATTRIBUTES, NODE_ALLOCATABLE})

    def __init__(
        self, gates: frozenset[str], declared_features: Callable[[str], Collection[str] | None] = lambda node: None
    ) -> None:
        self._gates = gates
        self._declared_features = declared_features

    def prepare(self, new: JsonObject, old: JsonObject | None, subresource: str) -> None:
        """Drop what the server does not know or a closed gate hides, unless the stored slice has it already."""
        del subresource
        known = {key: value for key, value in members(new.get("spec"), "spec").items() if key in _SPEC_FIELDS}
        objects(known.get("devices"), "spec.devices")
        spec = new["spec"] = without_empty(known, _MAPS)
        had_lists = old is not None and any(True for _ in _list_attributes(old["spec"]))
        had_mapping = old is not None and any(
            device.get("nodeAllocatableResources") for device in _devices(old["spec"])
        )
        for device in _devices(spec):
            for key in set(device) - _DEVICE_FIELDS:
                del device[key]
            if NODE_ALLOCATABLE not in self._gates and not had_mapping:
                device.pop("nodeAllocatableResources", None)
        if LIST_ATTRIBUTES not in self._gates and not had_lists:
            for attribute, name in list(_list_attributes(spec)):
                del attribute[name]

    def check(self, new: JsonObject, old: JsonObject | None, subresource: str, errors: FieldErrors) -> None:
        """Report what is wrong with a slice."""
        del subresource
        spec = new["spec"]
        self._admit(new)
        check_driver(spec.get("driver"), "spec.driver", errors)
        pool = members(spec.get("pool"), "spec.pool")
        check_pool(pool.get("name"), "spec.pool.name", errors)
        _check_pool_numbers(pool, errors)
        if old is not None:
            _check_immutable(spec, old["spec"], errors)
        _check_node_choice(spec, errors)
        if "sharedCounters" in spec and "devices" in spec:
            errors.invalid("spec", "", "only one of `sharedCounters` or `devices` is allowed")

        devices = objects(spec.get("devices"), "spec.devices")
        advanced = any(True for _ in _list_attributes(spec)) or any(
            device.get("taints") or device.get("consumesCounters") for device in devices
        )
        most = _MOST_ADVANCED_DEVICES if advanced else _MOST_DEVICES
        if len(devices) > most:
            errors.too_many("spec.devices", len(devices), most)
        seen = set()
        for index, device in enumerate(devices):
            field = f"spec.devices[{index}]"
            if str(device.get("name")) in seen:
                errors.duplicate(field, device.get("name"))
            seen.add(str(device.get("name")))
            _check_device(device, field, errors)

    def _admit(self, piece: JsonObject) -> None:
        """Refuse mapped node resources for a kubelet that would not account for them."""
        node = piece["spec"].get("nodeName")
        declared = self._declared_features(node) if isinstance(node, str) else None
        mapped = any("nodeAllocatableResources" in device for device in _devices(piece["spec"]))
        # A node of a real cluster always declares something or is refused; here a bare node will do.
        if mapped and declared is not None and NODE_ALLOCATABLE not in declared:
            name = piece["metadata"]["name"]
            raise StatusError(
                403,
                f'{RESOURCE_SLICES.qualified_plural} "{name}" is forbidden: '
                f'node "{node}" does not support {NODE_ALLOCATABLE} feature',
                details=RESOURCE_SLICES.details(name),
            )


def _devices(spec: JsonObject) -> list[JsonObject]:
    devices: list[JsonObject] = spec.get("devices", [])
    return devices


def _list_attributes(spec: JsonObject) -> Iterator[tuple[JsonObject, str]]:
    for device in _devices(spec):
        for place, attribute in members(device.get("attributes"), "attributes").items():
            for name in _LISTS:
                if name in members(attribute, place):
                    yield attribute, name


def _check_pool_numbers(pool: JsonObject, errors: FieldErrors) -> None:
    count, generation = pool.get("resourceSliceCount", 0), pool.setdefault("generation", 0)
    if type(count) is not int or type(generation) is not int:
        raise StatusError(400, "spec.pool.resourceSliceCount and spec.pool.generation must be whole numbers")
    if count <= 0:
        errors.invalid("spec.pool.resourceSliceCount", count, "must be greater than zero")
    if generation < 0:
        errors.invalid("spec.pool.generation", generation, "must be greater than or equal to zero")


def _check_immutable(spec: JsonObject, old: JsonObject, errors: FieldErrors) -> None:
    for place in (("pool", "name"), ("driver",), ("nodeName",)):
        before, after = old, spec
        for key in place[:-1]:
            before, after = before.get(key) or {}, after.get(key) or {}
        if before.get(place[-1]) != after.get(place[-1]):
            errors.invalid("spec." + ".".join(place), after.get(place[-1]), "field is immutable")


def _check_node_choice(spec: JsonObject, errors: FieldErrors) -> None:
    chosen = [f"`{key}`" for key in _NODE_CHOICES if spec.get(key)]
    one_of = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required"
    if spec.get("nodeName") == "":
        errors.invalid("spec.nodeName", "", "must be either unset or set to a non-empty string")
    elif "nodeName" in spec:
        check_subdomain(spec["nodeName"], "spec.nodeName", errors)
    for key in ("allNodes", "perDeviceNodeSelection"):
        if spec.get(key) is False:
            errors.invalid(f"spec.{key}", False, "must be either unset or set to true")
    if not chosen:
        errors.required("spec", one_of)
    elif len(chosen) > 1:
        errors.invalid("spec", "{" + ", ".join(chosen) + "}", f"{one_of}, but multiple fields are set")


def _check_device(device: JsonObject, field: str, errors: FieldErrors) -> None:
    check_label(device.get("name"), f"{field}.name", errors)
    attributes = members(device.get("attributes"), f"{field}.attributes")
    capacity = members(device.get("capacity"), f"{field}.capacity")
    if len(attributes) + len(capacity) > _MOST_ATTRIBUTES_AND_CAPACITIES:
        text = f"the total number of attributes and capacities must not exceed {_MOST_ATTRIBUTES_AND_CAPACITIES}"
        errors.invalid(field, len(attributes) + len(capacity), text)
    values = 0
    for name, attribute in attributes.items():
        place = f"{field}.attributes[{name}]"
        check_qualified(name, f"{field}.attributes", errors)
        values += _check_attribute(attribute, place, errors)
    if values > _MOST_ATTRIBUTE_VALUES:
        text = f"the total number of attribute values must not exceed {_MOST_ATTRIBUTE_VALUES}"
        errors.invalid(field, values, text)
    shared = device.get("allowMultipleAllocations") is True
    for name, amount in capacity.items():
        place = f"{field}.capacity[{name}]"
        check_qualified(name, f"{field}.capacity", errors)
        _check_capacity(amount, shared, place, errors)
    _check_node_resources(device, capacity, f"{field}.nodeAllocatableResources", errors)


def _check_attribute(attribute: object, field: str, errors: FieldErrors) -> int:
    """Report what is wrong with one attribute, and return how many values it counts for."""
    known = {**_SCALARS, **_LISTS}
    given = {name: value for name, value in members(attribute, field).items() if name in known}
    choices = ", ".join(f"`{name}`" for name in known)
    if not given:
        errors.invalid(field, "", f"must specify one of: {choices}")
    elif len(given) > 1:
        errors.invalid(field, "{" + ", ".join(given) + "}", f"must specify exactly one of: {choices}")
    count = 0
    for name, value in given.items():
        items = value if name in _LISTS else [value]
        if not isinstance(items, list):
            raise StatusError(400, f"{field}.{name} must be a list")
        count += len(items) if name in _LISTS else 1
        for index, item in enumerate(items):
            place = f"{field}.{name}" + (f"[{index}]" if name in _LISTS else "")
            if type(item) is not known[name]:
                raise StatusError(400, f"{place} must be of type {known[name].__name__}")
            if isinstance(item, str):
                _check_text(item, name, place, errors)
    return max(count, 1)


def _check_text(text: str, name: str, field: str, errors: FieldErrors) -> None:
    if name.startswith("version") and not _SEMVER.fullmatch(text):
        errors.invalid(field, text, "must be a string compatible with semver.org spec 2.0.0")
    if len(text.encode()) > _LONGEST_TEXT:
        errors.too_long(field, _LONGEST_TEXT)


def _check_capacity(amount: object, shared: bool, field: str, errors: FieldErrors) -> None:
    given = members(amount, field)
    given["value"] = respell(given.get("value", "0"), field)
    if given.get("requestPolicy") is None:
        return
    if not shared:
        errors.forbidden(f"{field}.requestPolicy", "allowMultipleAllocations must be true")
        return
    check_policy(members(given["requestPolicy"], field), given["value"], f"{field}.requestPolicy", errors)


def _check_node_resources(device: JsonObject, capacity: JsonObject, field: str, errors: FieldErrors) -> None:
    for name, entry in members(device.get("nodeAllocatableResources"), field).items():
        place = f"{field}[{name}]"
        if name not in ("cpu", "memory") and not name.startswith("hugepages-"):
            errors.invalid(place, name, "only cpu, memory and hugepages-* can be mapped")
        mapping = members(members(entry, place).get("mapping"), f"{place}.mapping")
        by_capacity = "capacityKey" in mapping or "capacityMultiplier" in mapping
        if not mapping and not entry.get("overhead"):
            errors.required(place, "at least one of mapping, overhead is required")
        elif mapping and by_capacity == ("deviceMultiplier" in mapping):
            errors.invalid(f"{place}.mapping", mapping, "exactly one of capacityKey, deviceMultiplier is required")
        elif by_capacity and mapping.get("capacityKey") not in capacity:
            errors.invalid(
                f"{place}.mapping.capacityKey", mapping.get("capacityKey"), "must be a capacity of the device"
            )
        for key in ("capacityMultiplier", "deviceMultiplier"):
            if key in mapping and not is_positive(mapping[key]):
                errors.invalid(f"{place}.mapping.{key}", mapping[key], "must be greater than zero")
        if by_capacity and "capacityMultiplier" not in mapping:
            errors.required(f"{place}.mapping.capacityMultiplier", "required with capacityKey")
