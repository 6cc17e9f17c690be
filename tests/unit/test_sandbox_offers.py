# SPDX-License-Identifier: Apache-2.0
"""What an external scheduler reads from slices, and the claims it writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from driver.sandbox.apiserver import ApiServer
from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.machine import MachineShape, write_machine
from driver.sandbox.offers import Offer, allocated_claim, default_reserved, example_claim, example_cpus, read_offers
from fastcpu.cpuset import CpuSet
from fastcpu.sysfs import read_topology

OFFER = Offer(pool="n1", device="cpudevnuma000", cpus=CpuSet.parse("0-15"))
SPECIFICATION = Path(__file__).parents[1] / "golden" / "specified-claim.yaml"


def piece(*devices):
    return {"spec": {"pool": {"name": "n1"}, "devices": [{"name": n, "attributes": a} for n, a in devices]}}


def test_offers_are_read_in_order():
    slices = [
        piece(("a", {"dra.cpu/cpuIDs": {"string": "0-3,8"}})),
        piece(("b", {"dra.cpu/cpuIDsStrided": {"string": "0-6:1/2"}}), ("c", {"dra.cpu/numCPUs": {"int": 4}})),
        {"spec": {"pool": {"name": "n1"}}},
    ]
    assert [(offer.pool, offer.device, str(offer.cpus)) for offer in read_offers(slices)] == [
        ("n1", "a", "0-3,8"),
        ("n1", "b", "0,2,4,6"),
        ("n1", "c", ""),
    ]


def test_allocated_claims_are_what_the_api_accepts():
    body = allocated_claim("a", OFFER, "2-5", 4, reserved_for=[{"resource": "pods", "name": "p", "uid": "u"}])
    stored = ApiServer().put(RESOURCE_CLAIMS, body)
    assert stored["status"] == body["status"]
    (result,) = stored["status"]["allocation"]["devices"]["results"]
    assert result["consumedCapacity"] == {"dra.cpu/cpu": "4"}
    assert re.fullmatch(r"[0-9a-f-]{36}", result["shareID"])


@pytest.mark.parametrize(("cpus", "chosen"), [("0-15", "2-5"), ("8-11,20-30", "8-11"), ("7", "7"), ("2-4", "2-4")])
def test_the_example_fits_the_device(cpus, chosen):
    offer = Offer(pool="n1", device="d", cpus=CpuSet.parse(cpus))
    assert str(example_cpus(offer)) == chosen
    claim = yaml.safe_load(example_claim(offer, example_cpus(offer)))
    assert ApiServer().put(RESOURCE_CLAIMS, claim)["status"] == claim["status"]


def test_the_example_is_the_specifications():
    specified = yaml.safe_load(SPECIFICATION.read_text())
    del specified["metadata"]["uid"]
    offer = Offer(pool="test-node", device="cpudevnuma000", cpus=CpuSet.parse("0-7"))
    assert yaml.safe_load(example_claim(offer, example_cpus(offer))) == specified


@pytest.mark.parametrize(
    ("shape", "reserved"),
    [
        (MachineShape(cpus=64, numa_nodes=2), "0,32"),
        (MachineShape(cpus=1, sockets=1, numa_nodes=1, threads_per_core=1), ""),
    ],
)
def test_the_first_core_is_reserved_if_there_is_another(tmp_path, shape, reserved):
    assert str(default_reserved(read_topology(write_machine(tmp_path / "sys", shape)))) == reserved
