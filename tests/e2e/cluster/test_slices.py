# SPDX-License-Identifier: Apache-2.0
"""The real API server stores the driver's slices as they are sent, but for fields whose features are off.

Each driver is alone with the API server, for a node that has no kubelet and may be a machine that does not exist.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from driver.devices import build_devices
from driver.individual import build_individual_devices
from driver.sandbox.driverprocess import DriverProcess
from driver.sandbox.machine import MachineShape, write_machine
from e2e import programs, scratch
from e2e.cluster.api import NODES, SLICES, Api
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.ports import free_ports
from fastcpu import CpuSet, read_topology
from fastcpu.sysfs import read_pcie_roots

NODE = "elsewhere"
NOT_STORED = "the API server does not store a field as it was sent"
REFUSED = "the API server refuses a slice"
MAPPING = "DRANodeAllocatableResources"
LISTS = "DRAListTypeAttributes"


@asynccontextmanager
async def publishing(api, kubeconfig, sysfs_root, settings, *flags, features=()):
    """Run a driver until its slices are in place; its log and the slices."""
    node = {"metadata": {"name": NODE}, "status": {"declaredFeatures": list(features)}}
    await api.create(NODES, {"apiVersion": "v1", "kind": "Node", **node})
    folder = scratch.new_folder()
    for name in ("kubelet", "cdi"):
        (folder / name).mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"hostnameOverride": NODE, **settings}))
    own = [f"--config={folder}/config.yaml", f"--kubeconfig={kubeconfig}", f"--sysfs-root={sysfs_root}"]
    own += [f"--kubelet-root-dir={folder}/kubelet", f"--cdi-dir={folder}/cdi", "--nri-socket="]
    own += [f"--bind-address=127.0.0.1:{free_ports(1)[0]}"]
    driver = DriverProcess([*own, *flags], folder / "driver.log", scratch.mark(folder))
    await driver.start()
    try:
        yield driver
    finally:
        print(driver.log)
        await driver.terminate()
        for piece in await api.list(SLICES, fieldSelector=f"spec.nodeName={NODE}"):
            await api.delete(f"{SLICES}/{piece['metadata']['name']}")
        await api.delete(f"{NODES}/{NODE}")
        scratch.remove(folder)


async def devices(cluster_or_api, until, driver):
    """Wait until slices are published, and return their devices."""

    async def published():
        return "slices published" in driver.log

    await until(published, "slices are published")
    pieces = await cluster_or_api.list(SLICES, fieldSelector=f"spec.nodeName={NODE}")
    assert {piece["spec"]["pool"]["resourceSliceCount"] for piece in pieces} == {len(pieces)}
    assert all(piece["metadata"]["ownerReferences"][0]["name"] == NODE for piece in pieces)
    return [each for piece in sorted(pieces, key=slice_name) for each in piece["spec"]["devices"]]


def slice_name(piece):
    return piece["metadata"]["name"]


def made(sysfs_root, group_by="numanode", allocator="cpumanager", *, roots=None, mapping=False):
    """Return the devices as the driver makes them."""
    topology, reserved = read_topology(sysfs_root), CpuSet()
    if group_by == "individual":
        model = build_individual_devices(
            topology, reserved=reserved, pcie_roots=roots, node_allocatable_mapping=mapping
        )
    else:
        model = build_devices(
            topology,
            reserved=reserved,
            group_by=group_by,
            allocator=allocator,
            pcie_roots=roots,
            node_allocatable_mapping=mapping,
        )
    return [device.to_api() for device in model.devices]


@pytest.fixture(scope="module")
def large_machine(tmp_path_factory):
    """A machine of 256 CPUs in 8 NUMA nodes, with a PCIe root near each."""
    root = write_machine(tmp_path_factory.mktemp("machine") / "sys", MachineShape())
    for node in range(8):
        bus = root / f"devices/pci0000:{node:x}0/pci_bus/0000:{node:x}0"
        bus.mkdir(parents=True)
        (bus / "cpulistaffinity").write_text((root / f"devices/system/node/node{node}/cpulist").read_text())
    return root


@pytest.mark.parametrize(
    ("group_by", "allocator"),
    [("numanode", "external"), ("l3cache", "external"), ("socket", "cpumanager"), ("machine", "external")],
)
async def test_groups(cluster, large_machine, group_by, allocator):
    settings = {"groupBy": group_by, "allocator": allocator}
    async with publishing(cluster.api, cluster.control_plane.admin, large_machine, settings) as driver:
        assert await devices(cluster.api, cluster.until, driver) == made(large_machine, group_by, allocator)
        assert NOT_STORED not in driver.log
        assert REFUSED not in driver.log


async def test_this_machine(cluster):
    settings = {"groupBy": "numanode", "allocator": "external"}
    async with publishing(cluster.api, cluster.control_plane.admin, Path("/sys"), settings) as driver:
        assert await devices(cluster.api, cluster.until, driver) == made("/sys", "numanode", "external")
        assert NOT_STORED not in driver.log


async def test_a_device_for_each_cpu(cluster, large_machine):
    settings = {"cpuDeviceMode": "individual"}
    async with publishing(cluster.api, cluster.control_plane.admin, large_machine, settings) as driver:
        stored = await devices(cluster.api, cluster.until, driver)
        assert len(stored) == 256
        assert stored == made(large_machine, "individual")
        assert NOT_STORED not in driver.log


async def test_features_that_are_off(cluster, large_machine):
    settings = {"publishNodeAllocatableResourceMapping": True}
    options = (settings, "--expose-pcie-roots")
    async with publishing(cluster.api, cluster.control_plane.admin, large_machine, *options) as driver:
        # Without the fields of these features, each of which is said, and nothing else is missing.
        assert await devices(cluster.api, cluster.until, driver) == made(large_machine)
        assert "pcieRoot" in next(line for line in driver.log.splitlines() if REFUSED in line)
        [line] = [line for line in driver.log.splitlines() if NOT_STORED in line]
        assert "nodeAllocatableResources" in line


async def test_features_that_are_on(cluster, large_machine):
    gates = f"{MAPPING}=true,{LISTS}=true"
    roots = read_pcie_roots(large_machine)
    settings = {"publishNodeAllocatableResourceMapping": True}
    async with (
        ControlPlane(programs.build(programs.KUBERNETES), feature_gates=gates) as control_plane,
        Api(control_plane.url, control_plane.admin_tls) as api,
        publishing(
            api, control_plane.admin, large_machine, settings, "--expose-pcie-roots", features=[MAPPING]
        ) as driver,
    ):
        assert await devices(api, cluster.until, driver) == made(large_machine, roots=roots, mapping=True)
        assert NOT_STORED not in driver.log
        assert REFUSED not in driver.log
