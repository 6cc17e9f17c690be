# SPDX-License-Identifier: Apache-2.0
"""CPUs that the cgroup of all pods does not have: what a claim for them is told, whoever chooses."""

from __future__ import annotations

import pytest

from driver.allocators import ExternalAllocator
from driver.claims import FROM_CLAIM, AllocatedClaim, DeviceResult, OpaqueConfig
from driver.cpumanager import CpuManagerAllocator
from driver.devices import build_devices
from driver.errors import ClaimError, ClaimPendingError
from driver.individual import IndividualAllocator, build_individual_devices
from driver.names import claim_uid
from driver.podlimit import PodLimit
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from fastcpu.topology import Topology

NODE = "node-a"
UID = claim_uid("11111111-aaaa")
ALLOWS = "cgroup /kubepods allows only CPUs 0-5"
TOPOLOGY = Topology.from_arrays(CpuSet(range(8)), cores=list(range(8)), numa_nodes=[0] * 4 + [1] * 4)


def limited(pool: CpuPool) -> PodLimit:
    """Pods have CPUs 0-5 of 0-7, and CPU 3 is offline."""
    limit = PodLimit()
    limit.set(CpuSet.parse("6-7"), "/kubepods", CpuSet.parse("0-5"))
    pool.set_offline(CpuSet.parse("3,6-7"))
    return limit


def claim(device: str, cpus: int, cpuset: str = "") -> AllocatedClaim:
    parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": cpuset}}
    return AllocatedClaim(
        uid=UID,
        namespace="default",
        name="claim",
        pod_claim_name=None,
        generation=1,
        request_counts={},
        results=(DeviceResult(request="cpus", pool=NODE, device=device, cpus=cpus),),
        configs=(OpaqueConfig(source=FROM_CLAIM, requests=(), parameters=parameters),) if cpuset else (),
        fingerprint="",
    )


def refusal(allocator, wanted, **held):
    with pytest.raises(ClaimError) as refused:
        allocator.choose(wanted, lambda cpus: {}, **held)
    return refused.value


@pytest.fixture
def model():
    return build_devices(
        TOPOLOGY,
        reserved=CpuSet(),
        group_by="numanode",
        allocator="external",
        pcie_roots=None,
        node_allocatable_mapping=False,
    )


@pytest.fixture
def pool(model):
    return CpuPool(TOPOLOGY.online, CpuSet(), model.groups)


@pytest.mark.parametrize(
    ("cpuset", "message"),
    [
        ("5-6", f"CPU 6 is not allowed to pods: {ALLOWS}; cpudevnuma001"),
        ("6-7", f"CPUs 6-7 are not allowed to pods: {ALLOWS}; cpudevnuma001"),
        ("3,7", f"CPU 3 is not online on this node, which has 0-2,4-7; CPU 7 is not allowed to pods: {ALLOWS}; "),
    ],
)
def test_chosen_by_somebody_else(model, pool, cpuset, message):
    error = refusal(ExternalAllocator(model, pool, NODE, limited(pool)), claim("cpudevnuma001", 2, cpuset))
    assert message in str(error)
    assert not isinstance(error, ClaimPendingError)


def test_a_choice_within_is_good(model, pool):
    allocator = ExternalAllocator(model, pool, NODE, limited(pool))
    assert allocator.choose(claim("cpudevnuma001", 2, "4-5"), lambda cpus: {}).cpus == CpuSet.parse("4-5")


def test_chosen_by_the_driver(model, pool):
    allocator = CpuManagerAllocator(model, pool, NODE, TOPOLOGY, {}, limited(pool))
    assert allocator.choose(claim("cpudevnuma001", 2), lambda cpus: {}).cpus == CpuSet.parse("4-5")
    error = refusal(allocator, claim("cpudevnuma001", 3))
    assert str(error).endswith(f"it has only 2, 4-5; CPUs 6-7 are not allowed to pods: {ALLOWS}")
    assert not isinstance(error, ClaimPendingError)
    pool.take(CpuSet.parse("4"))
    error = refusal(allocator, claim("cpudevnuma001", 2))
    assert str(error).endswith(f"CPUs 6-7 are not allowed to pods: {ALLOWS}")
    assert isinstance(error, ClaimPendingError)
    assert "not allowed" not in str(refusal(allocator, claim("cpudevnuma000", 4)))


def test_chosen_by_the_driver_for_whole_cores():
    topology = Topology.from_arrays(CpuSet(range(8)), cores=[0, 0, 1, 1, 2, 2, 3, 3], numa_nodes=[0] * 8)
    model = build_devices(
        topology,
        reserved=CpuSet(),
        group_by="numanode",
        allocator="cpumanager",
        pcie_roots=None,
        node_allocatable_mapping=False,
    )
    pool = CpuPool(topology.online, CpuSet(), model.groups)
    limit = PodLimit()
    limit.set(CpuSet.parse("1,3,5,7"), "/kubepods", CpuSet.parse("0,2,4,6"))
    pool.set_offline(limit.outside)
    allocator = CpuManagerAllocator(model, pool, NODE, topology, {"fullCores": "require"}, limit)
    error = refusal(allocator, claim("cpudevnuma000", 2))
    assert "CPUs 1,3,5,7 are not allowed to pods: cgroup /kubepods allows only CPUs 0,2,4,6" in str(error)


def test_a_device_of_one_cpu():
    model = build_individual_devices(TOPOLOGY, reserved=CpuSet(), pcie_roots=None, node_allocatable_mapping=False)
    pool = CpuPool(TOPOLOGY.online, CpuSet(), model.groups)
    allocator = IndividualAllocator(model, pool, NODE, limited(pool))
    device = next(device.name for device in model.devices if device.cpus == CpuSet([6]))
    error = refusal(allocator, claim(device, 0))
    assert str(error) == f"CPU 6 is not allowed to pods: {ALLOWS}"
    assert not isinstance(error, ClaimPendingError)
    assert allocator.choose(claim(device, 0), lambda cpus: {}, CpuSet([6])).cpus == CpuSet([6])


def test_nothing_is_told_where_nothing_lacks():
    limit = PodLimit()
    limit.set(CpuSet([1]), "/kubepods", CpuSet([0]))
    assert limit.told == "cgroup /kubepods allows only CPUs 0"
    limit.set(CpuSet(), "/kubepods", CpuSet([0, 1]))
    assert limit.told == ""
