# SPDX-License-Identifier: Apache-2.0
"""What a claim costs before its CPUs are checked: decoding, parameters, and the refusal of hostile ones."""

from __future__ import annotations

import json

import pytest

import cases
from driver.allocators import ExternalAllocator
from driver.claims import decode_claim
from driver.devices import build_devices
from driver.errors import ClaimError
from driver.names import ClaimUID
from fastcpu import CpuSet, Topology
from fastcpu.pool import CpuPool

UID = ClaimUID("8a6f0d4e-6d0b-4c53-9f3c-0f6a1f1f2b11")


def raw_claim(parameters: object) -> dict[str, object]:
    return {
        "metadata": {"name": "claim", "namespace": "default", "uid": UID, "generation": 1},
        "spec": {"devices": {"requests": [{"name": "cpus", "exactly": {"deviceClassName": "dra.cpu"}}]}},
        "status": {
            "allocation": {
                "devices": {
                    "results": [
                        {
                            "request": "cpus",
                            "driver": "dra.cpu",
                            "pool": "node",
                            "device": "cpudevsocket000",
                            "consumedCapacity": {"dra.cpu/cpu": "4"},
                        }
                    ],
                    "config": [
                        {
                            "source": "FromClaim",
                            "requests": ["cpus"],
                            "opaque": {"driver": "dra.cpu", "parameters": parameters},
                        }
                    ],
                }
            }
        },
    }


def with_cpuset(cpuset: str) -> dict[str, object]:
    return {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": cpuset}}


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


@pytest.mark.parametrize("n_cpus", cases.SIZES)
def test_decode_and_choose(benchmark, n_cpus):
    benchmark.group = "read a claim and check its cpuset"
    choose = allocator(n_cpus).choose
    raw = raw_claim(with_cpuset("2-5"))

    def read_and_choose():
        return choose(decode_claim(raw, UID), lambda cpus: {})

    assert benchmark(read_and_choose).cpus == CpuSet.parse("2-5")


HOSTILE = {
    "a cpuset of 400 kB": with_cpuset(",".join(["0-8191"] * 57_143)),
    "0-4294967295": with_cpuset("0-4294967295"),
    "a cpuset that just fits, all strides": with_cpuset(",".join(["0-8191:1/2"] * 920)),
    "an object over 10 KiB": with_cpuset("2-5") | {"padding": "x" * 20_000},
    "an object of many small parts": with_cpuset("2-5") | {"padding": [{"a": [1]}] * 2000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refuse(benchmark, name):
    benchmark.group = "refuse a hostile claim"
    choose = allocator(8192).choose
    raw = json.loads(json.dumps(raw_claim(HOSTILE[name])))

    def refuse():
        with pytest.raises(ClaimError):
            choose(decode_claim(raw, UID), lambda cpus: {})

    benchmark(refuse)
