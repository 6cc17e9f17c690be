# SPDX-License-Identifier: Apache-2.0
"""How the kubelet hears of the devices' health, over the DRA socket."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import grpc
import pytest

from driver.apis import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
)
from driver.devicehealth import DeviceHealth
from driver.devices import build_devices
from driver.health import RUNTIME, Health
from driver.healthservice import HealthServicer
from driver.hostcgroups import Limit
from driver.kubelet import KubeletPlugin
from driver.ledger import Ledger
from driver.podlimit import PodLimit
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from fastcpu.sysfs import OverlaidTree, SysfsTree, read_topology
from records import make_record

ONLINE = "/sys/devices/system/cpu/online"
VERSIONS = {
    "v1": (dra_health_v1_pb2, dra_health_v1_pb2_grpc),
    "v1alpha1": (dra_health_v1alpha1_pb2, dra_health_v1alpha1_pb2_grpc),
}


class Machine:
    """Devices on a machine whose CPUs go offline on demand, and a clock."""

    def __init__(self, root, allowed: str | None = None) -> None:
        self.base = SysfsTree(root)
        self.online: str | None = "0-15"
        self.now = 0.0
        self.health = Health()
        self.health.set_ok(RUNTIME)
        topology = read_topology(root)
        model = build_devices(
            topology,
            reserved=CpuSet([0]),
            group_by="numanode",
            allocator="external",
            pcie_roots=None,
            node_allocatable_mapping=False,
        )
        self.ledger = Ledger(CpuPool(topology.online, CpuSet([0]), model.groups))
        self.withdrawn: list[str] = []
        self.told = 0
        self.limit = PodLimit()
        self.allowed = allowed
        self.devices = DeviceHealth(
            model,
            "node-1",
            self,
            self.health,
            self.ledger,
            tell_pool=self.tell,
            withdraw=lambda cpus: self.withdrawn.append(str(cpus)),
            limit=self.limit,
            read_limit=self.read_limit,
            clock=lambda: self.now,
        )

    def read(self, path: str) -> str | None:
        if path == ONLINE:
            return None if self.online is None else self.online + "\n"
        return self.base.read(path)

    def entries(self, path: str) -> list[str]:
        return self.base.entries(path)

    def read_limit(self) -> Limit | None:
        return None if self.allowed is None else Limit(cpus=CpuSet.parse(self.allowed), cgroup="/kubepods")

    def tell(self) -> None:
        self.told += 1

    def hold(self, name: str, cpus: str) -> None:
        self.ledger.hold(make_record(name, cpus, name=name))

    def faults(self) -> dict[str, str]:
        self.devices.look()
        return {state.device: state.fault for state in self.devices.states}


@pytest.fixture
def machine(machine_tree) -> Machine:
    return Machine(machine_tree(sockets=1, cpus=16, numa_nodes=2, threads_per_core=1))


NONE = {"cpudevnuma000": "", "cpudevnuma001": ""}


def test_a_device_is_unhealthy_while_a_cpu_of_a_claim_is_offline(machine):
    machine.hold("a", "6-7")
    machine.hold("b", "5")
    assert machine.faults() == NONE
    machine.online = "0-6,8-15"
    fault = "CPU 7 is offline, held by claim default/a"
    assert machine.faults() == {"cpudevnuma000": fault, "cpudevnuma001": ""}
    assert machine.withdrawn == []
    machine.online = "0-4,8-15"
    fault = "CPUs 6-7 are offline, held by claim default/a; CPU 5 is offline, held by claim default/b"
    assert machine.faults()["cpudevnuma000"] == fault
    machine.online = "0-15"
    assert machine.faults() == NONE


def test_a_free_cpu_that_went_offline_is_withdrawn_until_it_is_back(machine):
    machine.hold("a", "6")
    machine.online = "0-6,8-15"
    assert machine.faults() == NONE
    assert machine.withdrawn == ["7"]
    assert machine.told == 1
    assert str(machine.ledger.pool.available) == "1-5,8-15"
    machine.faults()
    assert machine.withdrawn == ["7"]
    machine.online = "0-15"
    assert machine.faults() == NONE
    assert machine.withdrawn == ["7", ""]
    assert str(machine.ledger.pool.available) == "1-5,7-15"


def test_a_held_cpu_that_went_offline_is_withdrawn_once_it_is_free(machine):
    machine.hold("a", "6-7")
    machine.online = "0-6,8-15"
    machine.faults()
    machine.ledger.release("a")
    assert machine.faults() == NONE
    assert machine.withdrawn == ["7"]


def test_a_reserved_cpu_that_went_offline_is_no_device_s_fault(machine):
    machine.online = "1-15"
    assert machine.faults() == NONE


def test_a_held_cpu_that_was_offline_at_the_start_is_known_to_be_until_it_is_back(machine):
    machine.ledger.hold_anyway(make_record("a", "6,40"))
    machine.faults()
    assert str(machine.ledger.pool.offline) == "40"
    machine.online = "0-15,40"
    assert machine.faults() == NONE
    assert str(machine.ledger.pool.offline) == ""
    assert machine.withdrawn == []


# CPUs that are online, and that the cgroup of all pods does not have

ALLOWS = "cgroup /kubepods allows only CPUs 0-5,8-15"


def test_cpus_that_pods_cannot_use_are_withdrawn_while_it_is_so(machine):
    machine.allowed = "0-15"
    assert machine.faults() == NONE
    assert machine.health.remarks() == {}
    machine.allowed = "0-5,8-15"
    machine.faults()
    assert machine.faults() == NONE
    assert machine.withdrawn == ["6-7"]
    assert str(machine.ledger.pool.available) == "1-5,8-15"
    assert machine.told == 1
    assert machine.health.remarks() == {"kubepods": ALLOWS}
    assert str(machine.limit.outside) == "6-7"
    machine.allowed = "0-15"
    assert machine.faults() == NONE
    assert machine.withdrawn == ["6-7", ""]
    assert str(machine.ledger.pool.available) == "1-15"
    assert machine.health.remarks() == {}
    assert machine.told == 2


def test_a_claim_whose_cpus_pods_cannot_use_any_more_is_told(machine):
    machine.hold("a", "6-7")
    machine.hold("b", "5")
    machine.allowed = "0-5,8-15"
    machine.faults()
    machine.online = "0-6,8-15"
    fault = (
        f"CPU 7 is offline, held by claim default/a; CPU 6 is not allowed to pods: {ALLOWS}, held by claim default/a"
    )
    machine.faults()
    assert machine.faults() == {"cpudevnuma000": fault, "cpudevnuma001": ""}
    assert machine.withdrawn == []
    machine.ledger.release("a")
    machine.faults()
    assert machine.withdrawn == ["6-7"]


def test_a_cpu_that_comes_or_goes_is_not_taken_for_one_that_pods_cannot_use(machine, caplog):
    """The kernel takes a CPU off the cgroups after it has taken it off the list of those that are online, or before."""
    machine.allowed = "0-15"
    machine.faults()
    machine.allowed = "0-14"
    machine.faults()
    machine.online = "0-14"
    machine.faults()
    machine.online = "0-15"
    machine.faults()
    machine.allowed = "0-15"
    machine.faults()
    assert str(machine.limit.outside) == ""
    assert "not as it should be" not in caplog.text


def test_what_pods_cannot_use_at_the_start_is_known_at_once(machine_tree):
    machine = Machine(machine_tree(sockets=1, cpus=16, numa_nodes=2, threads_per_core=1), allowed="0-5,8-15")
    assert str(machine.limit.outside) == "6-7"
    assert str(machine.ledger.pool.offline) == "6-7"


def test_a_change_of_what_pods_can_use_is_told_once(machine, caplog):
    caplog.set_level("INFO")
    for allowed in ("0-5,8-15", "0-7", "0-15"):
        machine.allowed = allowed
        for _ in range(4):
            machine.faults()
    told = [(record.levelname, getattr(record, "fields", {}).get("reason")) for record in caplog.records]
    assert [one for one in told if one != ("INFO", None)] == [
        ("WARNING", ALLOWS),
        ("WARNING", "cgroup /kubepods allows only CPUs 0-7"),
    ]
    assert "CPUs have gone offline or come back" not in caplog.text


def test_what_pods_have_is_told_without_what_of_it_is_offline(machine):
    machine.allowed = "0-5,8-15"
    machine.faults()
    machine.faults()
    machine.online, machine.allowed = "0-7,9-15", "0-5,9-15"
    machine.faults()
    assert machine.health.remarks() == {"kubepods": "cgroup /kubepods allows only CPUs 0-5,9-15"}
    assert (str(machine.limit.outside), str(machine.ledger.pool.offline)) == ("6-7", "6-8")


def test_reserved_cpus_that_pods_do_not_have_are_as_they_should_be(machine):
    machine.allowed = "1-15"
    machine.faults()
    assert machine.faults() == NONE
    assert (str(machine.limit.outside), machine.health.remarks()) == ("", {})
    machine.ledger.hold_anyway(make_record("a", "0"))
    machine.faults()
    assert (str(machine.limit.outside), len(machine.health.remarks())) == ("", 0)
    machine.faults()
    assert (str(machine.limit.outside), len(machine.health.remarks())) == ("0", 1)


def test_cpus_that_go_offline_outside_of_what_pods_have(machine):
    machine.allowed = "0-5,8-15"
    machine.faults()
    machine.faults()
    machine.online = "0-6,8-15"
    machine.faults()
    assert (str(machine.limit.outside), str(machine.ledger.pool.offline)) == ("6", "6-7")
    machine.online = None
    machine.faults()
    assert (str(machine.limit.outside), str(machine.ledger.pool.offline)) == ("6", "6-7")
    machine.allowed = None
    machine.faults()
    assert (str(machine.limit.outside), str(machine.ledger.pool.offline)) == ("", "7")


@pytest.mark.parametrize("text", [None, "nonsense", "4294967295"])
def test_what_the_kernel_does_not_say_is_no_fault(machine, text):
    machine.online = text
    assert machine.faults() == NONE


def test_without_a_runtime_all_are_unhealthy_after_a_while(machine):
    machine.health.set_missing(RUNTIME, "lost it")
    assert machine.faults() == NONE
    machine.now = 29.9
    assert machine.faults() == NONE
    machine.now = 30.0
    assert machine.faults() == dict.fromkeys(
        NONE, "the container runtime is not connected, so that no container can be held to its CPUs"
    )
    machine.hold("a", "8-9")
    machine.online = "0-7"
    fault = machine.faults()["cpudevnuma001"]
    assert fault.startswith("CPUs 8-9 are offline, held by claim default/a; the container runtime")
    machine.online = "0-15"
    machine.health.set_ok(RUNTIME)
    assert machine.faults() == NONE
    machine.health.set_missing(RUNTIME, "lost it again")
    machine.now = 59.0
    assert machine.faults() == NONE


@pytest.mark.parametrize("text", [None, "", "\0\0", "0-", "5-3", "0-99999999999"])
def test_what_was_known_stays_if_the_kernel_does_not_say(machine, text):
    machine.hold("a", "7")
    machine.online = "0-4,6,8-15"
    before = machine.faults()
    assert before != NONE
    assert str(machine.ledger.pool.offline) == "5,7"
    machine.online = text
    assert machine.faults() == before
    assert str(machine.ledger.pool.offline) == "5,7"
    assert machine.withdrawn == ["5"]
    machine.online = "0-15"
    assert machine.faults() == NONE


def test_a_change_is_told_once(machine):
    machine.hold("a", "7")
    changed = machine.devices.changed
    machine.devices.look()
    assert not changed.is_set()
    machine.online = "0-6,8-15"
    machine.devices.look()
    assert changed.is_set()


def test_an_overlay_may_say_what_is_online(machine_tree):
    tree = OverlaidTree(SysfsTree(machine_tree(sockets=1, cpus=16, numa_nodes=2)), {ONLINE: "0-3"})
    assert tree.read(ONLINE) == "0-3"


@pytest.fixture
async def served(machine, short_tmp):
    class Preparer:
        pass

    plugin = KubeletPlugin(
        dra_socket=short_tmp / "dra.sock",
        registration_socket=short_tmp / "reg.sock",
        preparer=Preparer(),
        devices=machine.devices,
        health=machine.health,
    )
    await plugin.start()
    async with grpc.aio.insecure_channel("unix:" + quote(str(short_tmp / "dra.sock"))) as channel:
        yield plugin, channel
    await plugin.stop(grace_s=0)


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_list_comes_at_once_and_at_each_change_until_the_driver_stops(machine, served, version):
    plugin, channel = served
    messages, stubs = VERSIONS[version]
    stream = stubs.DRAResourceHealthStub(channel).NodeWatchResources(messages.NodeWatchResourcesRequest())
    async with asyncio.timeout(10):
        first = await stream.read()
        assert [(one.device.pool_name, one.device.device_name, one.health, one.message) for one in first.devices] == [
            ("node-1", "cpudevnuma000", messages.HEALTHY, ""),
            ("node-1", "cpudevnuma001", messages.HEALTHY, ""),
        ]
        assert {one.health_check_timeout_seconds for one in first.devices} == {30}
        assert all(one.last_updated_time > 1_700_000_000 for one in first.devices)
        machine.hold("a", "9-15")
        machine.online = "0-8"
        machine.devices.look()
        second = await stream.read()
        assert [(one.health, one.message) for one in second.devices] == [
            (messages.HEALTHY, ""),
            (messages.UNHEALTHY, "CPUs 9-15 are offline, held by claim default/a"),
        ]
        await plugin.stop(grace_s=5)
        assert await stream.read() is grpc.aio.EOF


async def test_the_list_is_repeated_before_the_kubelet_loses_trust(machine):
    servicer = HealthServicer(dra_health_v1_pb2, machine.devices, repeat_s=0.01)
    stream = servicer.NodeWatchResources(None, None)
    lists = [await anext(stream) for _ in range(3)]
    assert [len(one.devices) for one in lists] == [2, 2, 2]
    await stream.aclose()
