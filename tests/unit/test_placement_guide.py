# SPDX-License-Identifier: Apache-2.0
"""docs/placement.md: every example in it is tried."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.claims import FROM_CLAIM, FROM_CLASS, AllocatedClaim, DeviceResult, OpaqueConfig
from driver.cpumanager import CpuManagerAllocator
from driver.devices import build_devices
from driver.errors import ClaimError
from driver.names import claim_uid
from driver.parameters import PLACEMENT_CHOICES
from driver.policies import placements
from driver.sandbox.machine import MachineShape, write_machine
from driver.settings import load
from fastcpu import CpuSet, Topology, read_topology
from fastcpu.pool import CpuPool

GUIDE = (Path(__file__).parents[2] / "docs/placement.md").read_text()
SNIPPETS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)]
RESERVED = CpuSet([0, 32])


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table after a text."""
    lines = GUIDE[GUIDE.index(heading) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    shape = MachineShape(sockets=1, numa_nodes=2, cpus=64, cores_per_l3=4)
    return read_topology(write_machine(tmp_path_factory.mktemp("machine") / "sys", shape))


def chosen(topology: Topology, claim: AllocatedClaim, placement: dict[str, str]) -> dict[str, CpuSet]:
    model = build_devices(
        topology,
        reserved=RESERVED,
        group_by="socket",
        allocator="cpumanager",
        pcie_roots=None,
        node_allocatable_mapping=False,
    )
    pool = CpuPool(topology.online, RESERVED, model.groups)
    allocator = CpuManagerAllocator(model, pool, "node", topology, placement)
    return dict(allocator.choose(claim, lambda cpus: {}).by_request)


def claim(sizes: dict[str, int], *configs: OpaqueConfig) -> AllocatedClaim:
    return AllocatedClaim(
        uid=claim_uid("a"),
        namespace="default",
        name="claim",
        generation=1,
        pod_claim_name=None,
        results=tuple(
            DeviceResult(request=request, pool="node", device="cpudevsocket000", cpus=cpus)
            for request, cpus in sizes.items()
        ),
        configs=configs,
        request_counts={},
        fingerprint="",
    )


@pytest.mark.parametrize("row", rows("An example: a machine"), ids=lambda row: f"{row[0]} {row[1]}".strip())
def test_the_example_gets_what_the_guide_says(topology: Topology, row: list[str]) -> None:
    asked, wishes, expected, reason = row
    placement = yaml.safe_load(f"{{{wishes.strip('`')}}}")
    sizes = {"cpus": int(asked)}
    if expected:
        assert str(chosen(topology, claim(sizes), placement)["cpus"]) == expected
    else:
        with pytest.raises(ClaimError) as refusal:
            chosen(topology, claim(sizes), placement)
        assert reason.removeprefix("refused: ").strip('"') in str(refusal.value)


def test_the_machine_is_as_the_guide_says(topology: Topology) -> None:
    assert "0-3,32-35" in GUIDE
    assert str(topology.l3_caches.cpuset(0)) == "0-3,32-35"
    assert "0-15,32-47" in GUIDE
    assert str(topology.numa_nodes.cpuset(0)) == "0-15,32-47"


def test_the_table_of_wishes_is_complete() -> None:
    told: dict[str, list[str]] = {}
    for key, values, _ in rows("## Wishes"):
        told.setdefault(key.strip("`") or list(told)[-1], []).extend(re.findall(r"`([^`]+)`", values))
    assert told == {key: list(values) for key, values in PLACEMENT_CHOICES.items()}


def test_the_configuration_file_is_read(tmp_path: Path) -> None:
    [text] = [text for text in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL) if text.startswith("# config.yaml")]
    (tmp_path / "config.yaml").write_text(text)
    config = load({"config": str(tmp_path / "config.yaml")})
    assert (config.group_by, str(config.reserved_cpus), config.placement) == ("socket", "0,32", {"spread": "cores"})


def opaque_configs(source: str, entries: list[dict[str, Any]], requests: tuple[str, ...]) -> list[OpaqueConfig]:
    """Return configurations as the scheduler copies them into a claim's status."""
    return [
        OpaqueConfig(
            source=source, requests=tuple(entry.get("requests", requests)), parameters=entry["opaque"]["parameters"]
        )
        for entry in entries
    ]


def test_class_and_claim_together_mean_what_the_guide_says(topology: Topology) -> None:
    node, device_class, resource_claim = SNIPPETS
    spec = resource_claim["spec"]["devices"]
    sizes = {
        request["name"]: int(request["exactly"]["capacity"]["requests"]["dra.cpu/cpu"]) for request in spec["requests"]
    }
    assert spec["requests"][0]["exactly"]["deviceClassName"] == device_class["metadata"]["name"]
    configs = [
        *opaque_configs(FROM_CLASS, device_class["spec"]["config"], ("workers",)),
        *opaque_configs(FROM_CLAIM, spec["config"], ()),
    ]
    asked = claim(sizes, *configs)
    assert placements(asked, node["placement"]) == {
        "workers": {"spread": "none", "fullCores": "require", "numa": "distribute"},
        "helper": {"spread": "cores"},
    }
    cpus = chosen(topology, asked, node["placement"])
    assert [len(cpus["workers"] & topology.numa_nodes.cpuset(row)) for row in range(2)] == [8, 8]
    assert all(len(topology.cores.cpuset(row) & cpus["workers"]) in (0, 2) for row in range(len(topology.cores)))
    assert len(cpus["helper"]) == 1


def test_two_requests_lie_as_close_as_one(topology: Topology) -> None:
    two = chosen(topology, claim({"a": 2, "b": 2}), {})
    assert two["a"] | two["b"] == chosen(topology, claim({"a": 4}), {})["a"]
