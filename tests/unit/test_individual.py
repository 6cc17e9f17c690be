# SPDX-License-Identifier: Apache-2.0
"""Individual mode: how CPUs are numbered and described, and what a claim of such devices gets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.claims import FROM_CLAIM, AllocatedClaim, DeviceResult, OpaqueConfig
from driver.devices import DeviceModel
from driver.errors import ClaimError, ClaimPendingError
from driver.individual import IndividualAllocator, build_individual_devices
from driver.names import ClaimUID, claim_uid
from driver.slices import divide
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from fastcpu.topology import EFFICIENCY, PERFORMANCE, Topology

NODE = "node-a"
UID = claim_uid("11111111-aaaa")
OTHER = claim_uid("22222222-bbbb")


def machine(n_cpus: int = 8, threads: int = 2, **levels: object) -> Topology:
    """Return a machine whose second threads come after all first ones, as x86 numbers them."""
    n_cores = n_cpus // threads
    core = [cpu % n_cores for cpu in range(n_cpus)]
    layout: dict[str, object] = {
        "cores": core,
        "core_id": core,
        "numa_nodes": [number * 2 // n_cores for number in core],
        "sockets": [0] * n_cpus,
        "l3_caches": [number * 2 // n_cores + 7 for number in core],
        "smt_enabled": threads > 1,
    }
    return Topology.from_arrays(CpuSet(range(n_cpus)), **{**layout, **levels})  # type: ignore[arg-type]


def built(
    topology: Topology,
    reserved: str = "",
    pcie_roots: Mapping[int, Sequence[str]] | None = None,
    node_allocatable_mapping: bool = False,
) -> DeviceModel:
    return build_individual_devices(
        topology,
        reserved=CpuSet.parse(reserved),
        pcie_roots=pcie_roots,
        node_allocatable_mapping=node_allocatable_mapping,
    )


def cpu_of(model: DeviceModel) -> dict[str, int]:
    return {device.name: device.cpus.first for device in model.devices}


# Devices.


def test_siblings_are_neighbours() -> None:
    assert cpu_of(built(machine())) == {
        "cpudev000": 0,
        "cpudev001": 4,
        "cpudev002": 1,
        "cpudev003": 5,
        "cpudev004": 2,
        "cpudev005": 6,
        "cpudev006": 3,
        "cpudev007": 7,
    }


def test_the_numbers_are_those_of_the_allocatable_cpus() -> None:
    """A core stands where its lowest allocatable CPU does: CPU 4 comes after core 3 when CPU 0 is reserved."""
    assert list(cpu_of(built(machine(), reserved="0,6")).values()) == [1, 5, 2, 3, 7, 4]


def test_four_threads_of_a_core_are_neighbours() -> None:
    assert list(cpu_of(built(machine(8, threads=4))).values()) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_number_has_as_many_digits_as_it_needs() -> None:
    names = list(cpu_of(built(machine(2048))))
    assert (names[7], names[999], names[1000], names[-1]) == ("cpudev007", "cpudev999", "cpudev1000", "cpudev2047")


@given(st.sets(st.integers(0, 31)), st.integers(0, 3))
def test_every_allocatable_cpu_is_one_device(reserved: set[int], power: int) -> None:
    topology = machine(32, threads=2**power)
    model = built(topology, str(CpuSet(reserved)))
    cpus = [device.cpus.first for device in model.devices]
    assert sorted(cpus) == sorted(set(range(32)) - reserved)
    assert [model.by_name[f"cpudev{index:03}"].cpus.first for index in range(len(cpus))] == cpus
    cores = [cpu % (32 >> power) for cpu in cpus]
    assert len([1 for one, two in itertools.pairwise(cores) if one != two]) == max(len(set(cores)) - 1, 0)


def test_a_device_has_every_attribute() -> None:
    device = built(machine(), reserved="0").by_name["cpudev001"]
    assert device.to_api() == {
        "name": "cpudev001",
        "attributes": {
            "resource.kubernetes.io/numaNode": {"int": 0},
            "dra.cpu/numaNodeID": {"int": 0},
            "dra.net/numaNode": {"int": 0},
            "dra.cpu/socketID": {"int": 0},
            "dra.cpu/cacheL3ID": {"int": 7},
            "dra.cpu/coreID": {"int": 1},
            "dra.cpu/cpuID": {"int": 5},
            "dra.cpu/coreType": {"string": "standard"},
            "dra.cpu/smtEnabled": {"bool": True},
        },
    }


def test_a_device_of_a_sparse_machine_says_what_is_known() -> None:
    topology = machine(4, threads=1, numa_nodes=[-1] * 4, l3_caches=None, core_id=[5, -1, -1, -1])
    attributes = built(topology).by_name["cpudev002"].attributes
    assert attributes["dra.cpu/cacheL3ID"] == {"int": -1}
    assert attributes["dra.cpu/coreID"] == {"int": 2}
    assert attributes["dra.cpu/smtEnabled"] == {"bool": False}
    assert not [name for name in attributes if "numa" in name.lower()]


def test_core_types_are_named() -> None:
    topology = machine(4, threads=1, core_type=[PERFORMANCE, PERFORMANCE, EFFICIENCY, EFFICIENCY])
    kinds = [device.attributes["dra.cpu/coreType"]["string"] for device in built(topology).devices]
    assert kinds == ["p-core", "p-core", "e-core", "e-core"]


def test_a_device_counts_against_the_nodes_allocatable_cpus() -> None:
    [device] = [device.to_api() for device in built(machine(), "1-7", node_allocatable_mapping=True).devices]
    assert device["nodeAllocatableResources"] == {"cpu": {"mapping": {"deviceMultiplier": "1"}}}


def test_pcie_roots_are_those_of_the_cpu_and_halve_the_slices() -> None:
    topology = machine(256)
    roots = {cpu: ("pci0000:00",) if cpu < 64 else ("pci0000:40", "pci0000:10") for cpu in range(128)}
    model = built(topology, pcie_roots=roots)
    assert model.by_name["cpudev000"].attributes["resource.kubernetes.io/pcieRoot"] == {"strings": ["pci0000:00"]}
    assert "resource.kubernetes.io/pcieRoot" not in model.by_name["cpudev001"].attributes
    assert model.by_name["cpudev254"].attributes["resource.kubernetes.io/pcieRoot"] == {
        "strings": ["pci0000:10", "pci0000:40"]
    }
    for described, sizes in ((model, [64] * 4), (model.without_list_attributes(), [128] * 2)):
        pool = divide([device.to_api() for device in described.devices], node_name=NODE, node_uid="u")
        assert [len(chunk) for chunk in pool.chunks] == sizes


def test_too_many_pcie_roots_are_left_out_with_one_warning() -> None:
    model = built(machine(), pcie_roots={cpu: [f"pci{root:04x}:00" for root in range(40)] for cpu in range(8)})
    assert "resource.kubernetes.io/pcieRoot" not in model.devices[0].attributes
    assert model.warnings == (
        "attribute resource.kubernetes.io/pcieRoot is left out of 8 devices from cpudev000 to cpudev007: "
        "it would have 40 values; 39 of the 48 that a device may have are free",
    )
    assert len(model.left_out["resource.kubernetes.io/pcieRoot"]) == 8


def test_a_machine_that_is_all_reserved_has_no_device() -> None:
    model = built(machine(), "0-7")
    assert model.devices == ()
    assert model.warnings == ("no device is published: all online CPUs (0-7) are reserved",)


# Claims.


class Node:
    """A node of four cores with two threads each, core 0 reserved, and who holds its CPUs."""

    def __init__(self) -> None:
        topology = machine()
        self.model = built(topology, reserved="0,4")
        self.pool = CpuPool(topology.online, CpuSet([0, 4]), self.model.groups)
        self.held: dict[ClaimUID, CpuSet] = {}
        self.allocator = IndividualAllocator(self.model, self.pool, NODE)

    def hold(self, uid: ClaimUID, cpus: str) -> None:
        self.held[uid] = CpuSet.parse(cpus)
        self.pool.take(self.held[uid])

    def holders(self, cpus: CpuSet) -> Mapping[ClaimUID, CpuSet]:
        return {uid: held & cpus for uid, held in self.held.items() if not held.isdisjoint(cpus)}


def claim(*devices: str, request: str = "cpus", configs: tuple[OpaqueConfig, ...] = ()) -> AllocatedClaim:
    results = tuple(
        DeviceResult(request=request, pool=NODE, device=device, cpus=0, fault="no capacity") for device in devices
    )
    return AllocatedClaim(
        uid=UID,
        namespace="default",
        name="claim",
        generation=1,
        pod_claim_name=None,
        results=results,
        configs=configs,
        request_counts={},
        fingerprint="",
    )


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_claim_gets_the_cpus_of_its_devices(node: Node) -> None:
    choice = node.allocator.choose(claim("cpudev000", "cpudev001", "cpudev004"), node.holders)
    assert str(choice.cpus) == "1,3,5"
    assert choice.by_request == {"cpus": choice.cpus}


def test_requests_have_their_own_cpus(node: Node) -> None:
    one, two = claim("cpudev000", request="a"), claim("cpudev001", "cpudev002", request="b/c")
    both = AllocatedClaim(
        **{name: getattr(one, name) for name in AllocatedClaim.__slots__ if name != "results"},
        results=one.results + two.results,
    )
    choice = node.allocator.choose(both, node.holders)
    assert choice.by_request == {"a": CpuSet([1]), "b/c": CpuSet([2, 5])}


def test_opaque_parameters_mean_nothing(node: Node) -> None:
    config = OpaqueConfig(source=FROM_CLAIM, requests=(), parameters={"cpuConfig": {"cpuset": "7"}})
    assert node.allocator.choose(claim("cpudev000", configs=(config,)), node.holders).cpus == CpuSet([1])


def test_a_device_that_another_claim_has_is_waited_for(node: Node) -> None:
    node.hold(OTHER, "1-2")
    with pytest.raises(ClaimPendingError) as refusal:
        node.allocator.choose(claim("cpudev000", "cpudev001"), node.holders)
    assert str(refusal.value) == (
        f"the claim's devices overlap with those of other claims: CPU 1 is held by claim {OTHER}"
    )


def test_cpus_that_the_claim_holds_itself_are_not_taken(node: Node) -> None:
    node.hold(UID, "1,5")
    assert str(node.allocator.choose(claim("cpudev000"), node.holders, CpuSet([1, 5])).cpus) == "1"
    node.hold(OTHER, "2")
    with pytest.raises(ClaimPendingError, match=re.escape(f"CPU 2 is held by claim {OTHER}")):
        node.allocator.choose(claim("cpudev000", "cpudev002"), node.holders, CpuSet([1, 5]))


def test_cpus_that_two_claims_hold_are_not_one_claims(node: Node) -> None:
    """Files of an older driver may say so."""
    node.hold(OTHER, "1")
    node.held[UID] = CpuSet([1, 5])
    with pytest.raises(ClaimPendingError, match=f"CPU 1 is held by claim {OTHER}"):
        node.allocator.choose(claim("cpudev000", "cpudev001"), node.holders, CpuSet([1, 5]))


def test_taken_cpus_are_never_given_out_though_nobody_is_known_to_hold_them(node: Node) -> None:
    node.pool.take(CpuSet([1]))
    with pytest.raises(ClaimPendingError, match="CPU 1 is held already"):
        node.allocator.choose(claim("cpudev000"), node.holders)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            ("cpudev000", "cpudev000"),
            'request "cpus", device cpudev000: it is allocated to this claim twice; '
            "expected a device of its own for each result, since a device is one CPU",
        ),
        (
            ("cpudev006",),
            'request "cpus", device cpudev006: no such device on this node, where cpuDeviceMode: individual '
            "publishes cpudev000 … cpudev005 (6 devices)",
        ),
    ],
)
def test_a_claim_that_cannot_be_is_refused(node: Node, devices: tuple[str, ...], message: str) -> None:
    with pytest.raises(ClaimError) as refusal:
        node.allocator.choose(claim(*devices), node.holders)
    assert type(refusal.value) is ClaimError
    assert str(refusal.value) == message


def test_a_device_of_another_pool_is_refused(node: Node) -> None:
    stranger = IndividualAllocator(node.model, node.pool, "node-b")
    with pytest.raises(ClaimError, match='its pool is "node-a"; expected "node-b", the pool of this node'):
        stranger.choose(claim("cpudev000"), node.holders)


def test_a_claim_without_devices_of_ours_gets_nothing(node: Node) -> None:
    assert node.allocator.choose(claim(), node.holders).cpus == CpuSet()
