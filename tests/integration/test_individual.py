# SPDX-License-Identifier: Apache-2.0
"""Individual mode and PCIe roots in a real driver process: slices on the API server, claims through the gRPC socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from driver.names import DRIVER_NAME
from driver.sandbox.clusterbox import ClusterBox, held_cpus
from driver.sandbox.driverprocess import DriverProcess
from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.machine import MachineShape, write_machine
from fastcpu import CpuSet

PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
INDIVIDUAL = {"cpuDeviceMode": "individual", "reservedCPUs": "0,32", "groupBy": "nonsense"}


def put_claim(box: ClusterBox, name: str, devices: Sequence[str], **changes: object) -> ClaimName:
    results = [
        {"request": "cpus", "driver": DRIVER_NAME, "pool": box.node_name, "device": device, **changes}
        for device in devices
    ]
    request = {"name": "cpus", "exactly": {"deviceClassName": DRIVER_NAME, "count": len(devices)}}
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": {"requests": [request]}},
        "status": {"allocation": {"devices": {"results": results}}},
    }
    metadata = box.api.put(RESOURCE_CLAIMS, body)["metadata"]
    return ClaimName(namespace="default", name=name, uid=metadata["uid"])


def published(slices: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {device["name"]: device for piece in slices for device in piece["spec"]["devices"]}


async def prepare(box: ClusterBox, *claims: ClaimName) -> list[str]:
    """Prepare claims in one call and return the error of each."""
    answers = await box.kubelet.prepare(DRIVER_NAME, claims)
    return [answers[claim.uid].error for claim in claims]


# What a claim gets.


async def test_claims_get_the_cpus_of_their_devices(
    cluster_box: ClusterBox, driver_process: Callable[..., Awaitable[DriverProcess]]
) -> None:
    process = await driver_process(INDIVIDUAL)
    assert "cpuDeviceMode individual is deprecated" in process.log
    # One line for all devices: there may be a thousand.
    assert process.log.count("cpudev") == 0
    devices = published(cluster_box.complete_slices())
    assert list(devices)[:2] == ["cpudev000", "cpudev001"]
    assert len(devices) == 62
    assert not {"allowMultipleAllocations", "capacity"} & devices["cpudev000"].keys()
    assert [devices[f"cpudev00{n}"]["attributes"]["dra.cpu/cpuID"]["int"] for n in range(4)] == [1, 33, 2, 34]

    pair, single = (
        put_claim(cluster_box, "pair", ["cpudev001", "cpudev000"]),
        put_claim(cluster_box, "one", ["cpudev003"]),
    )
    answers = await cluster_box.kubelet.prepare(DRIVER_NAME, [pair, single])
    assert [device.device for device in answers[pair.uid].devices] == ["cpudev001", "cpudev000"]
    assert {device.share_id for device in answers[pair.uid].devices} == {None}
    assert held_cpus(cluster_box.cdi_dir) == {pair.uid: CpuSet([1, 33]), single.uid: CpuSet([34])}

    # What a container may read says nothing of a consumed capacity, because there is none.
    [path] = (cluster_box.kubelet.plugins_dir / DRIVER_NAME / "dra-device-metadata").glob(f"{single.uid}_*.json")
    document, _ = json.JSONDecoder().raw_decode(path.read_text())
    [device] = document["requests"][0]["devices"]
    assert device["name"] == "cpudev003"
    assert device["attributes"]["dra.cpu/cpuID"] == {"int": 34}
    assert "dra.cpu/allocatedNumCPUs" not in device["attributes"]

    status = await cluster_box.api.wait_until(
        lambda: (cluster_box.api.get(RESOURCE_CLAIMS, "pair") or {})["status"].get("devices")
    )
    assert {entry["device"]: entry["data"] for entry in status} == {
        "cpudev000": {"cpuset": "1"},
        "cpudev001": {"cpuset": "33"},
    }


async def test_overlap_is_found_and_a_different_repetition_refused(
    cluster_box: ClusterBox, driver_process: Callable[..., Awaitable[DriverProcess]]
) -> None:
    process = await driver_process(INDIVIDUAL)
    first = put_claim(cluster_box, "first", ["cpudev000", "cpudev001"])
    assert await prepare(cluster_box, first) == [""]

    twice = put_claim(cluster_box, "twice", ["cpudev004", "cpudev004"])
    strange = put_claim(cluster_box, "strange", ["cpudev062"])
    good = put_claim(cluster_box, "good", ["cpudev006"])
    errors = await prepare(cluster_box, twice, strange, good)
    assert "cpudev004: it is allocated to this claim twice" in errors[0]
    assert "cpudev062: no such device on this node, where cpuDeviceMode: individual publishes cpudev000" in errors[1]
    assert errors[2] == ""

    # One that overlaps is waited for, and gets its CPUs when they are let go.
    second = put_claim(cluster_box, "second", ["cpudev001", "cpudev002"])
    [error] = await prepare(cluster_box, second)
    assert error == f"the claim's devices overlap with those of other claims: CPU 33 is held by claim {first.uid}"
    assert second.uid not in held_cpus(cluster_box.cdi_dir)

    # The allocation of a prepared claim changes under it: the claim was deleted and made again with its UID.
    cluster_box.api.delete(RESOURCE_CLAIMS, "first")
    body = cluster_box.api.get(RESOURCE_CLAIMS, "second")
    assert body is not None
    changed = {**body, "metadata": {"name": "first", "namespace": "default", "uid": first.uid}}
    cluster_box.api.put(RESOURCE_CLAIMS, changed)
    [error] = await prepare(cluster_box, first)
    assert error.startswith("the claim is prepared with CPUs 1,33 for another allocation than it has now")
    assert held_cpus(cluster_box.cdi_dir)[first.uid] == CpuSet([1, 33])

    # A killed driver knows it all again.
    await process.kill9()
    process = await driver_process(INDIVIDUAL)
    assert (await prepare(cluster_box, good)) == [""]
    assert held_cpus(cluster_box.cdi_dir) == {first.uid: CpuSet([1, 33]), good.uid: CpuSet([4])}
    assert (await cluster_box.kubelet.unprepare(DRIVER_NAME, [first, good])) == {first.uid: "", good.uid: ""}
    assert (await prepare(cluster_box, second)) == [""]
    assert held_cpus(cluster_box.cdi_dir) == {second.uid: CpuSet([2, 33])}


@pytest.mark.parametrize(("found", "error"), [("1,33", ""), ("1,34", "but a CDI spec found at the driver's start")])
async def test_a_spec_of_another_driver_is_adopted_and_compared(
    cluster_box: ClusterBox, driver_process: Callable[..., Awaitable[DriverProcess]], found: str, error: str
) -> None:
    claim = put_claim(cluster_box, "adopted", ["cpudev000", "cpudev001"])
    edits = {"env": [f"DRA_CPUSET_{claim.uid}={found}"]}
    spec = {
        "cdiVersion": "0.8.0",
        "kind": "dra.k8s.io/cpu",
        "devices": [{"name": f"claim-{claim.uid}", "containerEdits": edits}],
    }
    (cluster_box.cdi_dir / "dra.k8s.io-cpu.json").write_text(json.dumps(spec))
    await driver_process(INDIVIDUAL)
    [answer] = await prepare(cluster_box, claim)
    assert (error in answer) if error else (answer == "")
    assert held_cpus(cluster_box.cdi_dir) == {claim.uid: CpuSet.parse(found)}


# Slices.


@pytest.fixture
async def make_box(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[ClusterBox]]]:
    """A box with a machine that has PCIe roots, on an API server with the given gates."""
    boxes = []

    async def make(*gates: str, cpus: int = 256) -> ClusterBox:
        root = write_machine(tmp_path / "sys", MachineShape(cpus=cpus))
        for bus, cpulist in (("0000:00", f"0-{cpus // 4 - 1}"), ("0000:80", f"0-{cpus - 1}")):
            folder = root / f"devices/pci{bus}/pci_bus/{bus}"
            folder.mkdir(parents=True)
            (folder / "cpulistaffinity").write_text(f"{cpulist}\n")
        box = ClusterBox(sysfs_root=root, gates=gates)
        await box.__aenter__()
        boxes.append(box)
        return box

    yield make
    for box in boxes:
        await box.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("settings", "first", "with_lists", "without"),
    [
        ({"cpuDeviceMode": "individual"}, "cpudev000", [64] * 4, [128] * 2),
        ({"groupBy": "numanode"}, "cpudevnuma000", [8], [8]),
        ({"groupBy": "socket"}, "cpudevsocket000", [2], [2]),
        ({"groupBy": "l3cache"}, "cpudevl3cache000", [16], [16]),
        ({"groupBy": "machine"}, "cpudevmachine", [1], [1]),
    ],
    ids=lambda value: value.get("groupBy", "individual") if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
async def test_pcie_roots_are_published_where_the_server_takes_lists(
    make_box: Callable[..., Awaitable[ClusterBox]],
    settings: dict[str, object],
    first: str,
    with_lists: list[int],
    without: list[int],
    gate: bool,
) -> None:
    box = await make_box(*(["DRAListTypeAttributes"] if gate else []))
    process = await box.start_driver(settings, ["--expose-pcie-roots"])
    _, slices = await box.wait_ready(process)
    assert [len(piece["spec"]["devices"]) for piece in slices] == (with_lists if gate else without)
    devices = published(slices)
    told = {"strings": ["pci0000:00", "pci0000:80"]} if gate else None
    assert devices[first]["attributes"].get(PCIE_ROOT) == told
    if gate and settings.get("groupBy") != "machine":
        assert list(devices.values())[-1]["attributes"][PCIE_ROOT] == {"strings": ["pci0000:80"]}
    assert process.log.count("list attributes such as pcieRoot") == (0 if gate else 1)


async def test_a_large_machine_has_many_slices_and_its_mapping(make_box: Callable[..., Awaitable[ClusterBox]]) -> None:
    box = await make_box("DRANodeAllocatableResources", cpus=512)
    settings = {**INDIVIDUAL, "publishNodeAllocatableResourceMapping": True}
    _, slices = await box.wait_ready(await box.start_driver(settings))
    assert [len(piece["spec"]["devices"]) for piece in slices] == [128, 128, 128, 126]
    devices = published(slices)
    assert sorted({device["attributes"]["dra.cpu/cpuID"]["int"] for device in devices.values()}) == [
        cpu for cpu in range(512) if cpu not in (0, 32)
    ]
    for device in devices.values():
        assert device["nodeAllocatableResources"] == {"cpu": {"mapping": {"deviceMultiplier": "1"}}}
