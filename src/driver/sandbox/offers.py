# SPDX-License-Identifier: Apache-2.0
"""What an external scheduler does: read from the slices which CPUs a node offers, and write claims that name some.

The demo and tests use it; authors of schedulers may take it as the shortest example.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from driver.names import CPU_CAPACITY, DRIVER_NAME, PARAMETERS_VERSION
from driver.sandbox.apistatus import JsonObject
from fastcpu.cpuset import CpuSet
from fastcpu.topology import Topology

_EXAMPLE_CPUS: Final = CpuSet.parse("2-5")

# The specification's example of a fully allocated claim; what depends on the machine is filled in.
_EXAMPLE: Final = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata:
  name: exclusive-cores-claim
  namespace: default
spec:
  devices:
    requests:
    - name: cpu-request-1
      exactly:
        deviceClassName: dra.cpu
        capacity:
          requests:
            dra.cpu/cpu: "{count}"
status:
  allocation:
    devices:
      results:
      - request: cpu-request-1
        driver: dra.cpu
        pool: {pool}
        device: {device}
        consumedCapacity:
          dra.cpu/cpu: "{count}"
      config:  # Added by external scheduler
      - source: FromClaim
        requests:
        - cpu-request-1
        opaque:
          driver: dra.cpu
          parameters:
            apiVersion: v1alpha1
            cpuConfig:
              cpuset: "{cpuset}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One published device and its CPUs.

    Attributes
    ----------
    pool, device : str
    cpus : CpuSet
        Empty if the device does not tell them: a text attribute holds 64 bytes.
    """

    pool: str
    device: str
    cpus: CpuSet


def read_offers(slices: Iterable[JsonObject]) -> list[Offer]:
    """Return the offers of a pool's slices, in the order of publication."""
    offers = []
    for piece in slices:
        spec = piece["spec"]
        for device in spec.get("devices", ()):
            attributes = device["attributes"]
            told = attributes.get(f"{DRIVER_NAME}/cpuIDs") or attributes.get(f"{DRIVER_NAME}/cpuIDsStrided") or {}
            cpus = CpuSet.parse(told.get("string", ""))
            offers.append(Offer(pool=spec["pool"]["name"], device=device["name"], cpus=cpus))
    return offers


def default_reserved(topology: Topology) -> CpuSet:
    """Return the CPUs of the first core, unless the machine has no other."""
    return topology.cores.cpuset(0) if len(topology.cores) > 1 else CpuSet()


def example_cpus(offer: Offer) -> CpuSet:
    """Return the CPUs of the specification's example if the device has them, else its lowest."""
    return _EXAMPLE_CPUS if offer.cpus >= _EXAMPLE_CPUS else offer.cpus[: len(_EXAMPLE_CPUS)]


def example_claim(offer: Offer, cpus: CpuSet) -> str:
    """Return the specification's example claim for some CPUs of a device, as YAML."""
    return _EXAMPLE.format(pool=offer.pool, device=offer.device, count=len(cpus), cpuset=cpus)


def allocated_claim(
    name: str,
    offer: Offer,
    cpuset: str,
    cpus: int,
    *,
    namespace: str = "default",
    request: str = "cpu-request-1",
    reserved_for: Sequence[JsonObject] = (),
) -> JsonObject:
    """Return a claim whose allocation takes some CPUs of one device and names them.

    On a real cluster a scheduler first adds the finalizer ``resource.kubernetes.io/delete-protection``: without it a
    claim can be deleted while it is in use.

    Parameters
    ----------
    name : str
    offer : Offer
        The device.
    cpuset : str
        The CPUs, in the kernel's list syntax.
    cpus : int
        How many CPUs are consumed.
    namespace, request : str
    reserved_for : sequence of dict
        Entries of `status.reservedFor`.
    """
    capacity = {CPU_CAPACITY: str(cpus)}
    exactly = {"deviceClassName": DRIVER_NAME, "capacity": {"requests": capacity}}
    result = {
        "request": request,
        "driver": DRIVER_NAME,
        "pool": offer.pool,
        "device": offer.device,
        "consumedCapacity": capacity,
        # Without it the scheduler takes the whole device for used.
        "shareID": str(uuid.uuid4()),
    }
    parameters = {"apiVersion": PARAMETERS_VERSION, "cpuConfig": {"cpuset": cpuset}}
    config = {
        "source": "FromClaim",
        "requests": [request],
        "opaque": {"driver": DRIVER_NAME, "parameters": parameters},
    }
    # Exactly this form lets the driver write the claim's status with the rights of its node alone.
    node = {"key": "metadata.name", "operator": "In", "values": [offer.pool]}
    status: JsonObject = {
        "allocation": {
            "devices": {"results": [result], "config": [config]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [node]}]},
            # Missing, the scheduler would add it, and changing an allocation is refused.
            "allocationTimestamp": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
    }
    if reserved_for:
        status["reservedFor"] = list(reserved_for)
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"devices": {"requests": [{"name": request, "exactly": exactly}]}},
        "status": status,
    }
