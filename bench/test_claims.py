# SPDX-License-Identifier: Apache-2.0
"""From a claim's JSON to checked CPUs, beside the Kubernetes client's models with sets; hostile claims refused."""

from __future__ import annotations

import json

import pytest
from kubernetes.client import ApiClient

import cases
import rivals
from claimdocuments import UID, raw_claim, with_cpuset
from driver.allocators import ExternalAllocator
from driver.claims import decode_claim
from driver.devices import build_devices
from driver.errors import ClaimError
from fastcpu import CpuSet, Topology
from fastcpu.pool import CpuPool


def allocator(n_cpus: int) -> ExternalAllocator:
    sockets = [cpu * cases.GROUPS // n_cpus for cpu in range(n_cpus)]
    topology = Topology.from_arrays(CpuSet(range(n_cpus)), sockets=sockets)
    model = build_devices(
        topology,
        reserved=CpuSet(cases.RESERVED),
        group_by="socket",
        allocator="external",
        pcie_roots=None,
        node_allocatable_mapping=False,
    )
    return ExternalAllocator(model, CpuPool(topology.online, CpuSet(cases.RESERVED), model.groups), "node")


def by_models(n_cpus: int):
    """Return the same with the client's generated models, and sets."""
    deserialize = ApiClient().deserialize
    pool = rivals.SetPool(set(range(n_cpus)), cases.RESERVED, cases.members(n_cpus))

    def choose(body: bytes) -> set[int]:
        claim = deserialize(body.decode(), "ResourceV1ResourceClaim", "application/json")
        if claim.metadata.uid != UID:
            raise ValueError(claim.metadata.uid)
        devices = claim.status.allocation.devices
        (result,) = (result for result in devices.results if result.driver == "dra.cpu")
        (config,) = (config for config in devices.config if config.opaque.driver == "dra.cpu")
        group = int(result.device.removeprefix("cpudevsocket"))
        cpuset = config.opaque.parameters["cpuConfig"]["cpuset"]
        return pool.check(cpuset, ((group, int(result.consumed_capacity["dra.cpu/cpu"])),))

    return choose


def by_driver(n_cpus: int):
    choose = allocator(n_cpus).choose
    return lambda body: choose(decode_claim(json.loads(body), UID), lambda cpus: {}).cpus


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("contender", ["dracpu", "client's models and sets"])
def test_decode_and_choose(entry, contender, n_cpus):
    body = json.dumps(raw_claim(with_cpuset("2-5"))).encode()
    read_and_choose = by_driver(n_cpus) if contender == "dracpu" else by_models(n_cpus)
    chosen = entry("Claims", "JSON to checked CPUs", contender, n=n_cpus)(read_and_choose, body)
    assert set(chosen) == {2, 3, 4, 5}


HOSTILE = {
    "a cpuset of 400 kB": with_cpuset(",".join(["0-8191"] * 57_143)),
    "0-4294967295": with_cpuset("0-4294967295"),
    "a cpuset that just fits, all strides": with_cpuset(",".join(["0-8191:1/2"] * 920)),
    "an object over 10 KiB": with_cpuset("2-5") | {"padding": "x" * 20_000},
    "an object of many small parts": with_cpuset("2-5") | {"padding": [{"a": [1]}] * 2000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refuse(entry, name):
    choose = allocator(8192).choose
    raw = json.loads(json.dumps(raw_claim(HOSTILE[name])))

    def refuse():
        with pytest.raises(ClaimError):
            choose(decode_claim(raw, UID), lambda cpus: {})

    entry("Claims", f"refuse {name}", "dracpu", n=8192)(refuse)
