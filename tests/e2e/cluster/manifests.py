# SPDX-License-Identifier: Apache-2.0
"""Claims and pods of the tests, as their authors would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from driver.names import CPU_CAPACITY, DRIVER_NAME, PARAMETERS_VERSION
from e2e.cluster.api import JsonObject
from e2e.images import IMAGE

DEVICE_CLASS = DRIVER_NAME


def request(cpus: int | str | None = 1, name: str = "cpus", *, selector: str = "") -> JsonObject:
    """Return a request for a number of CPUs, or for all of a device."""
    exactly: JsonObject = {"deviceClassName": DEVICE_CLASS}
    if cpus is not None:
        exactly["capacity"] = {"requests": {CPU_CAPACITY: str(cpus)}}
    if selector:
        exactly["selectors"] = [{"cel": {"expression": selector}}]
    return {"name": name, "exactly": exactly}


def cpuset_config(cpuset: str, *requests: str) -> JsonObject:
    """Return what names a claim's CPUs, for some of its requests or for all."""
    parameters = {"apiVersion": PARAMETERS_VERSION, "cpuConfig": {"cpuset": cpuset}}
    return {"requests": list(requests), "opaque": {"driver": DRIVER_NAME, "parameters": parameters}}


def claim(name: str, *requests: JsonObject, **devices: Sequence[JsonObject]) -> JsonObject:
    """Return a claim; `config` and `constraints` are further fields of its ``spec.devices``."""
    spec = {"devices": {"requests": list(requests) or [request()], **devices}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}


def pod(
    name: str,
    *claims: str,
    containers: Sequence[str] = ("main",),
    command: Sequence[str] = (),
    scheduler: str = "",
    resources: Mapping[str, object] | None = None,
) -> JsonObject:
    """Return a pod each of whose containers uses all of some claims."""
    uses = {"claims": [{"name": each} for each in claims]} if claims else {}
    container: JsonObject = {"image": IMAGE, "imagePullPolicy": "Never", "resources": {**uses, **(resources or {})}}
    if command:
        container["command"] = list(command)
    spec: JsonObject = {
        # Not 0: that would take the pod away from under the kubelet. What runs here does not end by itself.
        "terminationGracePeriodSeconds": 1,
        "resourceClaims": [{"name": each, "resourceClaimName": each} for each in claims],
        "containers": [{"name": each, **container} for each in containers],
    }
    if scheduler:
        spec["schedulerName"] = scheduler
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def as_text(*objects: JsonObject) -> str:
    """Return objects as kubectl takes them."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
