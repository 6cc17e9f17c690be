# SPDX-License-Identifier: Apache-2.0
"""What the example of an external scheduler takes for given away; that it works is shown in a real cluster."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs/examples/external_scheduler.py"


@pytest.fixture(scope="module")
def scheduler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("external_scheduler", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def claim(*configs, told=(), request="cpus", driver="dra.cpu"):
    result = {"request": request, "driver": driver, "pool": "node-1", "device": "cpudevnuma000", "shareID": "s"}
    key = {name: result[name] for name in ("driver", "pool", "device", "shareID")}
    allocation = {"devices": {"results": [result], "config": list(configs)}}
    return {"status": {"allocation": allocation, "devices": [{**key, "data": data} for data in told]}}


def config(parameters, *requests):
    return {"requests": list(requests), "opaque": {"driver": "dra.cpu", "parameters": parameters}}


def cpuset(cpus):
    return {"cpuConfig": {"cpuset": cpus}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (claim(config(cpuset("1-2,8"))), {1, 2, 8}),
        (claim(config(cpuset("1-2"), "cpus"), config(cpuset("7"), "others")), {1, 2}),
        (claim(config(cpuset("1-2"), "cpus"), request="cpus/small"), {1, 2}),
        (claim(told=[{"cpuset": "3-4"}]), {3, 4}),
        (claim(config({"placement": {}}), told=[{"cpusetStrided": "0-6:1/2"}]), {0, 2, 4, 6}),
        (claim(config(cpuset("1")), told=[{"cpuset": "1"}]), {1}),
        (claim(), set()),
        *((claim(config(wrong), config(cpuset("7"))), {7}) for wrong in (None, "text", {"cpuConfig": None})),
        *((claim(config(cpuset(wrong)), config(cpuset("7"))), {7}) for wrong in (None, 5, "all", "1-", "0-4294967295")),
    ],
)
def test_what_an_allocated_claim_has_is_given(scheduler, given, expected):
    assert scheduler.given([given, {}, {"status": {}}]) == {"node-1": expected}


def test_what_is_not_of_this_driver_takes_no_cpus(scheduler):
    assert scheduler.given([claim(config(cpuset("1")), driver="gpu.example.com")]) == {}
