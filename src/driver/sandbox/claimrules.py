# SPDX-License-Identifier: Apache-2.0
"""The API's rules for ResourceClaims, as Kubernetes 1.37 has them.

The server checks an allocation's form, not its sense: whether the devices exist, are free or lie on one node is the
business of whoever allocates.
"""

from __future__ import annotations

import re
from typing import Final

from driver.sandbox.apistatus import FieldErrors, JsonObject
from driver.sandbox.rules import keep_other_part
from driver.sandbox.syntax import (
    check_driver,
    check_label,
    check_opaque,
    check_pool,
    check_subdomain,
    members,
    objects,
    respell_all,
    text,
    texts,
)

_MOST_REQUESTS: Final = 32
_MOST_SUB_REQUESTS: Final = 8
_MOST_RESULTS: Final = 32
_MOST_CONFIGS: Final = 64
_MOST_SPEC_CONFIGS: Final = 32
_MOST_RESERVATIONS: Final = 256
_MOST_CONDITIONS: Final = 8
_SOURCES: Final = ["FromClaim", "FromClass"]
_MODES: Final = ["All", "ExactCount"]
_NAME_OF_A_REQUEST: Final = (
    "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'"
)
_SHARE_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


class ClaimRules:
    """Checks claims."""

    def prepare(self, new: JsonObject, old: JsonObject | None, subresource: str) -> None:
        """Keep a write to its part of the claim, and fill in the defaults of requests."""
        if old is None:
            new.pop("status", None)
        else:
            keep_other_part(new, old, subresource)
        new.setdefault("status", {})
        if subresource != "status":
            for request in _requests(new):
                if request.get("exactly") is not None:
                    _complete(members(request["exactly"], "spec.devices.requests.exactly"))
                for alternative in _alternatives(request):
                    _complete(alternative)
        elif old is not None:
            _prepare_status(new, old)

    def check(self, new: JsonObject, old: JsonObject | None, subresource: str, errors: FieldErrors) -> None:
        """Report what is wrong with the part of a claim that is written."""
        if subresource == "status" and old is not None:
            _check_status(new, old, errors)
            return
        if old is not None and new.get("spec") != old.get("spec"):
            errors.invalid("spec", None, "field is immutable")
            return
        _check_spec(new, errors)


def _requests(claim: JsonObject) -> list[JsonObject]:
    devices = members(members(claim.get("spec"), "spec").get("devices"), "spec.devices")
    return objects(devices.get("requests"), "spec.devices.requests")


def _alternatives(request: JsonObject) -> list[JsonObject]:
    return objects(request.get("firstAvailable"), "spec.devices.requests.firstAvailable")


def _complete(request: JsonObject) -> None:
    """Fill in defaults, and put quantities in the server's spelling."""
    if request.setdefault("allocationMode", "ExactCount") == "ExactCount":
        request.setdefault("count", 1)
    capacity = members(request.get("capacity"), "spec.devices.requests.capacity")
    respell_all(capacity.get("requests"), "spec.devices.requests.capacity.requests")


def _request_names(claim: JsonObject) -> set[str]:
    """Return the names a result or a config of this claim may refer to."""
    names = set()
    for request in _requests(claim):
        name = text(request.get("name"), "spec.devices.requests.name")
        names.add(name)
        for alternative in _alternatives(request):
            names.add(f"{name}/{text(alternative.get('name'), 'spec.devices.requests.firstAvailable.name')}")
    return names


def _prepare_status(new: JsonObject, old: JsonObject) -> None:
    status = members(new.get("status"), "status")
    for key in ("allocation", "reservedFor", "devices"):
        if key in status and not status[key]:
            del status[key]
    for index, result in enumerate(_results(_allocation(new))):
        if result.get("adminAccess") in (False, None):
            result.pop("adminAccess", None)
        field = f"status.allocation.devices.results[{index}].consumedCapacity"
        respell_all(result.get("consumedCapacity"), field)
    # What a driver reported about a device ends with its allocation.
    if _allocation(old) and "allocation" not in status:
        status.pop("devices", None)
    for device in objects(status.get("devices"), "status.devices"):
        # The server has no word for their absence.
        device["conditions"] = device.get("conditions") or None


def _allocation(claim: JsonObject) -> JsonObject:
    return members(members(claim.get("status"), "status").get("allocation"), "status.allocation")


def _results(allocation: JsonObject) -> list[JsonObject]:
    devices = members(allocation.get("devices"), "status.allocation.devices")
    return objects(devices.get("results"), "status.allocation.devices.results")


def _check_spec(claim: JsonObject, errors: FieldErrors) -> None:
    requests, known = _requests(claim), _request_names(claim)
    if len(requests) > _MOST_REQUESTS:
        errors.too_many("spec.devices.requests", len(requests), _MOST_REQUESTS)
    names: set[str] = set()
    for index, request in enumerate(requests):
        field = f"spec.devices.requests[{index}]"
        check_label(request.get("name"), f"{field}.name", errors)
        if request.get("name") in names:
            errors.duplicate(f"{field}.name", request.get("name"))
        names.add(str(request.get("name")))
        _check_request(request, field, errors)
    configs = objects((claim.get("spec") or {}).get("devices", {}).get("config"), "spec.devices.config")
    if len(configs) > _MOST_SPEC_CONFIGS:
        errors.too_many("spec.devices.config", len(configs), _MOST_SPEC_CONFIGS)
    for index, config in enumerate(configs):
        _check_config(config, known, f"spec.devices.config[{index}]", errors)


def _check_request(request: JsonObject, field: str, errors: FieldErrors) -> None:
    exactly, choices = request.get("exactly"), _alternatives(request)
    if (exactly is None) == (not choices):
        text = "exactly one of `exactly` or `firstAvailable` is required"
        errors.required(field, text) if exactly is None else errors.invalid(field, "<value omitted>", text)
        return
    if exactly is not None:
        _check_exact(members(exactly, f"{field}.exactly"), f"{field}.exactly", errors)
        return
    if len(choices) > _MOST_SUB_REQUESTS:
        errors.too_many(f"{field}.firstAvailable", len(choices), _MOST_SUB_REQUESTS)
    for index, alternative in enumerate(choices):
        place = f"{field}.firstAvailable[{index}]"
        check_label(alternative.get("name"), f"{place}.name", errors)
        _check_exact(alternative, place, errors)


def _check_exact(request: JsonObject, field: str, errors: FieldErrors) -> None:
    check_subdomain(request.get("deviceClassName"), f"{field}.deviceClassName", errors)
    mode, count = request.get("allocationMode"), request.get("count")
    if mode not in _MODES:
        errors.unsupported(f"{field}.allocationMode", mode, _MODES)
    elif mode == "ExactCount" and (type(count) is not int or count <= 0):
        errors.invalid(f"{field}.count", count, "must be greater than zero")
    elif mode == "All" and count:
        errors.invalid(f"{field}.count", count, "must not be specified when allocationMode is 'All'")


def _check_config(config: JsonObject, known: set[str], field: str, errors: FieldErrors) -> None:
    for index, name in enumerate(texts(config.get("requests"), f"{field}.requests")):
        if name not in known:
            errors.invalid(f"{field}.requests[{index}]", name, _NAME_OF_A_REQUEST)
    if config.get("opaque") is None:
        errors.required(f"{field}.opaque")
        return
    opaque = members(config["opaque"], f"{field}.opaque")
    check_driver(opaque.get("driver"), f"{field}.opaque.driver", errors)
    check_opaque(opaque.get("parameters"), f"{field}.opaque.parameters", errors)


def _check_status(new: JsonObject, old: JsonObject, errors: FieldErrors) -> None:
    status, before = members(new.get("status"), "status"), old.get("status") or {}
    allocation = _allocation(new)
    if before.get("allocation") and allocation and before["allocation"] != allocation:
        errors.invalid("status.allocation", None, "field cannot be modified once set")
        return
    if allocation and not before.get("allocation"):
        _check_allocation(allocation, _request_names(new), errors)
    reservations = objects(status.get("reservedFor"), "status.reservedFor")
    if len(reservations) > _MOST_RESERVATIONS:
        errors.too_many("status.reservedFor", len(reservations), _MOST_RESERVATIONS)
    _check_reservations(reservations, errors)
    if reservations and not allocation:
        errors.forbidden("status.reservedFor", "may not be specified when `allocated` is not set")
    if new["metadata"].get("deletionTimestamp"):
        added = [entry for entry in reservations if entry not in before.get("reservedFor", ())]
        if added:
            why = "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set"
            errors.forbidden("status.reservedFor", why)
    _check_devices(status, allocation, errors)


def _check_reservations(entries: list[JsonObject], errors: FieldErrors) -> None:
    seen = set()
    for index, entry in enumerate(entries):
        field = f"status.reservedFor[{index}]"
        for key in ("resource", "name", "uid"):
            if not text(entry.get(key), f"{field}.{key}"):
                errors.required(f"{field}.{key}")
        if entry.get("uid") in seen:
            errors.duplicate(f"{field}.uid", entry.get("uid"))
        seen.add(entry.get("uid"))


def _check_allocation(allocation: JsonObject, known: set[str], errors: FieldErrors) -> None:
    devices = members(allocation.get("devices"), "status.allocation.devices")
    results = _results(allocation)
    if len(results) > _MOST_RESULTS:
        errors.too_many("status.allocation.devices.results", len(results), _MOST_RESULTS)
    for index, result in enumerate(results):
        field = f"status.allocation.devices.results[{index}]"
        if text(result.get("request"), f"{field}.request") not in known:
            errors.invalid(f"{field}.request", result.get("request"), _NAME_OF_A_REQUEST)
        check_driver(result.get("driver"), f"{field}.driver", errors)
        check_pool(result.get("pool"), f"{field}.pool", errors)
        check_label(result.get("device"), f"{field}.device", errors)
        share = text(result.get("shareID"), f"{field}.shareID")
        if share and not _SHARE_ID.fullmatch(share):
            errors.invalid(f"{field}.shareID", share, "must be a lowercase UUID in 8-4-4-4-12 format")
    configs = objects(devices.get("config"), "status.allocation.devices.config")
    if len(configs) > _MOST_CONFIGS:
        errors.too_many("status.allocation.devices.config", len(configs), _MOST_CONFIGS)
    for index, config in enumerate(configs):
        field = f"status.allocation.devices.config[{index}]"
        source = text(config.get("source"), f"{field}.source")
        if not source:
            errors.required(f"{field}.source")
        elif source not in _SOURCES:
            errors.unsupported(f"{field}.source", source, _SOURCES)
        _check_config(config, known, field, errors)


def _device_key(entry: JsonObject, field: str) -> tuple[str, ...]:
    """Return what names an entry of `status.devices`, and the result it is about."""
    return tuple(text(entry.get(key), f"{field}.{key}") for key in ("driver", "pool", "device", "shareID"))


def _check_devices(status: JsonObject, allocation: JsonObject, errors: FieldErrors) -> None:
    allocated = {_device_key(result, "status.allocation.devices.results") for result in _results(allocation)}
    seen = set()
    for index, entry in enumerate(objects(status.get("devices"), "status.devices")):
        field = f"status.devices[{index}]"
        key = _device_key(entry, field)
        shown = "/".join(filter(None, key))
        if key not in allocated:
            errors.invalid(field, shown, "must be an allocated device in the claim")
        if key in seen:
            errors.duplicate(field, shown)
        seen.add(key)
        conditions = objects(entry.get("conditions"), f"{field}.conditions")
        if len(conditions) > _MOST_CONDITIONS:
            errors.too_many(f"{field}.conditions", len(conditions), _MOST_CONDITIONS)
        if entry.get("data") is not None:
            check_opaque(entry["data"], f"{field}.data", errors)
