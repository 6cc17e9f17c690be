# SPDX-License-Identifier: Apache-2.0
"""Devices: names, every attribute of every grouping, capacities, and what is done with what does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.attributes import LARGEST_VALUE_COUNT
from driver.devices import Device, DeviceModel, build_devices
from driver.quantity import parse_quantity
from driver.smt_layout import smt_layout
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from fastcpu.topology import Topology

NOTHING = CpuSet()


def machine(
    n_cpus: int = 16,
    *,
    threads: int = 2,
    nodes: int = 4,
    sockets: int = 2,
    l3s: int | None = 4,
    online: CpuSet | None = None,
) -> Topology:
    """Return a machine whose second threads come after all first ones, as x86 numbers them."""
    n_cores = n_cpus // threads
    core = [cpu % n_cores for cpu in range(n_cpus)]
    return Topology.from_arrays(
        CpuSet(range(n_cpus)) if online is None else online,
        cores=core,
        numa_nodes=[number * nodes // n_cores for number in core],
        sockets=[number * sockets // n_cores for number in core],
        l3_caches=None if l3s is None else [number * l3s // n_cores for number in core],
        smt_enabled=threads > 1,
    )


def built(
    topology: Topology,
    group_by: str = "numanode",
    *,
    reserved: CpuSet = NOTHING,
    allocator: str = "external",
    pcie_roots: Mapping[int, Sequence[str]] | None = None,
    node_allocatable_mapping: bool = False,
) -> DeviceModel:
    return build_devices(
        topology,
        reserved=reserved,
        group_by=group_by,
        allocator=allocator,
        pcie_roots=pcie_roots,
        node_allocatable_mapping=node_allocatable_mapping,
    )


def has_pcie_roots(device: Device) -> bool:
    return "resource.kubernetes.io/pcieRoot" in device.attributes


def names(model: DeviceModel) -> list[str]:
    return [device.name for device in model.devices]


# Names and groups.


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        ("numanode", ["cpudevnuma000", "cpudevnuma001", "cpudevnuma002", "cpudevnuma003"]),
        ("socket", ["cpudevsocket000", "cpudevsocket001"]),
        ("machine", ["cpudevmachine"]),
        ("l3cache", ["cpudevl3cache000", "cpudevl3cache001", "cpudevl3cache002", "cpudevl3cache003"]),
    ],
)
def test_devices_are_named_for_their_groups(group_by: str, expected: list[str]) -> None:
    model = built(machine(), group_by)
    assert names(model) == expected
    assert model.group_by == group_by
    assert model.by_name == {device.name: device for device in model.devices}
    assert model.warnings == ()


def test_sparse_and_large_ids_stay_as_they_are() -> None:
    topology = Topology.from_arrays(CpuSet(range(4)), numa_nodes=[0, 8, 252, 252], sockets=[36, 36, 3600, 3600])
    assert names(built(topology)) == ["cpudevnuma000", "cpudevnuma008", "cpudevnuma252"]
    assert names(built(topology, "socket")) == ["cpudevsocket036", "cpudevsocket3600"]


def test_a_group_without_allocatable_cpus_is_not_published() -> None:
    model = built(machine(), reserved=CpuSet([0, 1, 8, 9, 4]))
    assert names(model) == ["cpudevnuma001", "cpudevnuma002", "cpudevnuma003"]
    assert [str(device.cpus) for device in model.devices] == ["2-3,10-11", "5,12-13", "6-7,14-15"]
    assert [device.group for device in model.devices] == [0, 1, 2]
    assert model.warnings == ()


@pytest.mark.parametrize("group_by", ["numanode", "socket", "machine", "l3cache"])
def test_a_machine_of_reserved_cpus_has_no_devices_and_says_so(group_by: str) -> None:
    model = built(machine(), group_by, reserved=CpuSet(range(100)))
    assert model.devices == ()
    assert model.groups.shape == (0, 1)
    assert model.warnings == ("no device is published: all online CPUs (0-15) are reserved",)


def test_the_groups_are_a_matrix_for_the_pool_with_reserved_cpus() -> None:
    topology = machine(256, nodes=8)
    reserved = CpuSet([0, 128])
    model = built(topology, reserved=reserved)
    assert model.groups.flags.c_contiguous
    assert not model.groups.flags.writeable
    assert model.groups.shape == (8, topology.n_words)
    assert (model.groups == topology.numa_nodes.masks).all()
    pool = CpuPool(topology.online, reserved, model.groups)
    for device in model.devices:
        assert CpuSet.from_array(pool.allocatable[device.group]) == device.cpus
        assert pool.check(str(device.cpus), [(device.group, len(device.cpus))]) == device.cpus


def test_cpus_in_no_group_are_warned_about() -> None:
    topology = Topology.from_arrays(CpuSet(range(4)), numa_nodes=[0, 0, -1, -1], sockets=[0, 0, 0, -1])
    model = built(topology)
    assert [str(device.cpus) for device in model.devices] == ["0-1"]
    assert model.warnings == ("CPUs 2-3 are in no NUMA node and are not published; another groupBy would publish them",)
    assert built(topology, "socket").warnings == (
        "CPUs 3 are in no socket and are not published; another groupBy would publish them",
    )


def test_an_unknown_grouping_is_refused() -> None:
    with pytest.raises(ValueError, match="groupBy 'core' is not numanode, socket, l3cache or machine"):
        built(machine(), "core")


# Machines without L3 caches, or with some.


def test_without_l3_caches_numa_nodes_are_the_groups() -> None:
    model = built(machine(l3s=None), "l3cache")
    assert names(model) == ["cpudevl3cache000", "cpudevl3cache002", "cpudevl3cache004", "cpudevl3cache006"]
    assert [str(device.cpus) for device in model.devices] == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert model.devices[1].attributes["dra.cpu/cacheL3ID"] == {"int": 2}
    assert model.warnings == ("CPUs 0-15 have no L3 cache; they are grouped by NUMA node",)


def test_cpus_without_an_l3_are_grouped_apart() -> None:
    topology = Topology.from_arrays(
        CpuSet(range(8)), l3_caches=[0, 0, 1, 1, -1, -1, -1, -1], numa_nodes=[0, 0, 0, 0, 0, 0, 1, -1]
    )
    model = built(topology, "l3cache")
    assert {device.name: str(device.cpus) for device in model.devices} == {
        "cpudevl3cache000": "0-1",
        "cpudevl3cache001": "2-3",
        "cpudevl3cache004": "4-5",
        "cpudevl3cache006": "6",
        "cpudevl3cache007": "7",
    }
    assert model.warnings == ("CPUs 4-7 have no L3 cache; they are grouped by NUMA node",)


def test_an_l3_id_that_is_the_lowest_cpu_of_another_group_makes_no_two_devices_alike() -> None:
    topology = Topology.from_arrays(CpuSet(range(6)), l3_caches=[4, 4, 7, 7, -1, -1])
    model = built(topology, "l3cache")
    assert names(model) == ["cpudevl3cache000", "cpudevl3cache002", "cpudevl3cache004"]
    assert [device.attributes["dra.cpu/cacheL3ID"] for device in model.devices] == [{"int": 0}, {"int": 2}, {"int": 4}]
    assert len(model.warnings) == 2
    assert "all have their lowest CPU's number" in model.warnings[1]


# Attributes.

COMMON = {
    "dra.cpu/numCPUs": {"int": 3},
    "dra.cpu/smtEnabled": {"bool": True},
    "dra.cpu/cpuIDs": {"string": "1,8-9"},
    "dra.cpu/smtLayout": {"string": "0-15>8"},
}


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        (
            "numanode",
            {
                **COMMON,
                "resource.kubernetes.io/numaNode": {"int": 0},
                "dra.cpu/numaNodeID": {"int": 0},
                "dra.net/numaNode": {"int": 0},
                "dra.cpu/socketID": {"int": 0},
            },
        ),
        (
            "socket",
            {
                **COMMON,
                "dra.cpu/socketID": {"int": 0},
                "dra.cpu/numCPUs": {"int": 7},
                "dra.cpu/cpuIDs": {"string": "1-3,8-11"},
            },
        ),
        (
            "machine",
            {**COMMON, "dra.cpu/numCPUs": {"int": 15}, "dra.cpu/cpuIDs": {"string": "1-15"}},
        ),
        (
            "l3cache",
            {
                **COMMON,
                "resource.kubernetes.io/numaNode": {"int": 0},
                "dra.cpu/socketID": {"int": 0},
                "dra.cpu/cacheL3ID": {"int": 0},
            },
        ),
    ],
)
def test_a_device_has_exactly_the_attributes_of_its_grouping(group_by: str, expected: dict[str, object]) -> None:
    assert built(machine(), group_by, reserved=CpuSet([0])).devices[0].attributes == expected


@pytest.mark.parametrize("group_by", ["numanode", "socket", "machine", "l3cache"])
def test_only_an_external_allocator_is_told_the_cpus(group_by: str) -> None:
    external = built(machine(), group_by).devices[0].attributes
    own = built(machine(), group_by, allocator="cpumanager").devices[0].attributes
    assert set(external) - set(own) == {"dra.cpu/cpuIDs", "dra.cpu/smtLayout"}
    assert own.items() <= external.items()


def test_socket_and_node_are_told_only_where_all_cpus_of_the_group_share_one() -> None:
    topology = Topology.from_arrays(
        CpuSet(range(8)),
        sockets=[0, 0, 0, 0, 1, 1, 2, 2],
        numa_nodes=[0, 0, 1, 1, 1, 1, 2, 2],
        l3_caches=[0, 0, 0, 0, 1, 1, 2, 2],
    )
    by_node = [device.attributes.get("dra.cpu/socketID") for device in built(topology).devices]
    assert by_node == [{"int": 0}, None, {"int": 2}]
    by_l3 = built(topology, "l3cache").devices
    assert [device.attributes.get("resource.kubernetes.io/numaNode") for device in by_l3] == [
        None,
        {"int": 1},
        {"int": 2},
    ]
    assert [device.attributes.get("dra.cpu/socketID") for device in by_l3] == [{"int": 0}, {"int": 1}, {"int": 2}]
    assert all("dra.cpu/numaNodeID" not in device.attributes for device in by_l3)


def test_reserving_cpus_does_not_change_what_a_group_is() -> None:
    topology = Topology.from_arrays(CpuSet(range(4)), sockets=[0, 0, 1, 1])
    assert "dra.cpu/socketID" not in built(topology, reserved=CpuSet([2, 3])).devices[0].attributes


def test_smt_is_told_as_the_machine_says() -> None:
    assert built(machine(threads=1)).devices[0].attributes["dra.cpu/smtEnabled"] == {"bool": False}


# Capacity and the API's form.


def test_the_api_form_of_a_device() -> None:
    device = built(machine(), node_allocatable_mapping=True).devices[0].to_api()
    attributes = device.pop("attributes")
    assert isinstance(attributes, dict)
    assert attributes["dra.cpu/cpuIDs"] == {"string": "0-1,8-9"}
    assert device == {
        "name": "cpudevnuma000",
        "allowMultipleAllocations": True,
        "capacity": {
            "dra.cpu/cpu": {
                "value": "4",
                "requestPolicy": {"default": "4", "validRange": {"min": "1", "step": "1"}},
            }
        },
        "nodeAllocatableResources": {
            "cpu": {"mapping": {"capacityKey": "dra.cpu/cpu", "capacityMultiplier": "1"}},
        },
    }


def test_the_mapping_to_node_allocatable_resources_is_off_unless_asked_for() -> None:
    assert "nodeAllocatableResources" not in built(machine()).devices[0].to_api()


def test_a_group_of_one_cpu_has_one_valid_amount() -> None:
    device = built(machine(), reserved=CpuSet([0, 8, 9])).devices[0].to_api()
    assert device["capacity"] == {
        "dra.cpu/cpu": {"value": "1", "requestPolicy": {"default": "1", "validValues": ["1"]}},
    }


@given(st.integers(1, 40))
def test_the_request_policy_follows_the_rules_of_the_api(n_cpus: int) -> None:
    topology = Topology.from_arrays(CpuSet(range(n_cpus)))
    ((capacity,),) = [device.to_api()["capacity"].values() for device in built(topology).devices]  # type: ignore[attr-defined]
    value, policy = parse_quantity(capacity["value"]), capacity["requestPolicy"]
    default = parse_quantity(policy["default"])
    assert value == default == n_cpus
    if "validValues" in policy:
        assert set(policy) == {"default", "validValues"}
        assert [parse_quantity(item) for item in policy["validValues"]] == [default]
    else:
        least, step = parse_quantity(policy["validRange"]["min"]), parse_quantity(policy["validRange"]["step"])
        assert least == step == 1
        assert least + step <= value
        assert (default - least) % step == Fraction(0)


def test_the_api_form_is_json_and_shares_nothing_with_the_model() -> None:
    model = built(machine(), pcie_roots={0: ["pci0000:00"]}, node_allocatable_mapping=True)
    before = json.dumps(model.devices[0].to_api())
    api = model.devices[0].to_api()
    api["attributes"].clear()  # type: ignore[attr-defined]
    api["capacity"].clear()  # type: ignore[attr-defined]
    assert json.dumps(model.devices[0].to_api()) == before


# PCIe roots.


def test_pcie_roots_are_those_of_all_the_groups_cpus() -> None:
    roots = {
        0: ["pci0000:40", "pci0000:00"],
        8: ["pci0000:00"],
        9: ["pci0000:20"],
        2: ["pci0000:60"],
        99: ["pci0000:80"],
    }
    model = built(machine(), pcie_roots=roots)
    listed = [device.attributes.get("resource.kubernetes.io/pcieRoot") for device in model.devices]
    assert listed == [{"strings": ["pci0000:00", "pci0000:20", "pci0000:40"]}, {"strings": ["pci0000:60"]}, None, None]
    assert [has_pcie_roots(device) for device in model.devices] == [True, True, False, False]


def test_reserved_cpus_have_no_part_in_pcie_roots() -> None:
    model = built(machine(), reserved=CpuSet([0]), pcie_roots={0: ["pci0000:00"]})
    assert not has_pcie_roots(model.devices[0])


def test_the_model_without_list_attributes_is_otherwise_the_same() -> None:
    model = built(machine(), pcie_roots={cpu: ["pci0000:00"] for cpu in range(16)})
    plain = model.without_list_attributes()
    assert not any(has_pcie_roots(device) for device in plain.devices)
    assert plain.by_name == {device.name: device for device in plain.devices}
    expected = built(machine(), pcie_roots=None)
    assert plain.devices == expected.devices
    assert (plain.groups == model.groups).all()
    assert all(has_pcie_roots(device) for device in model.devices)


def test_as_many_pcie_roots_as_fit_are_published_and_more_leave_the_attribute_out() -> None:
    others = len(built(machine()).devices[0].attributes)
    room = LARGEST_VALUE_COUNT - others
    fitting = built(machine(), pcie_roots={0: [f"pci{number:04}:00" for number in range(room)]})
    assert len(fitting.devices[0].attributes["resource.kubernetes.io/pcieRoot"]["strings"]) == room  # type: ignore[arg-type]
    assert fitting.warnings == ()
    model = built(machine(), pcie_roots={cpu: [f"pci{number:04}:00" for number in range(room + 1)] for cpu in (0, 2)})
    assert not any(has_pcie_roots(device) for device in model.devices)
    assert model.left_out == {"resource.kubernetes.io/pcieRoot": ("cpudevnuma000", "cpudevnuma001")}
    assert model.warnings == (
        "attribute resource.kubernetes.io/pcieRoot is left out of cpudevnuma000, cpudevnuma001: "
        f"it would have {room + 1} values; {room} of the 48 that a device may have are free",
    )


def test_a_pcie_root_with_too_long_a_name_leaves_the_attribute_out() -> None:
    model = built(machine(), pcie_roots={0: ["pci0000:00", "p" * 65]})
    assert not has_pcie_roots(model.devices[0])
    assert "is longer than the 64 bytes of a string" in model.warnings[0]
    assert has_pcie_roots(built(machine(), pcie_roots={0: ["p" * 64]}).devices[0])


# Strings of at most 64 bytes.


def numbered_alternately(n_cpus: int) -> Topology:
    return Topology.from_arrays(CpuSet(range(n_cpus)), numa_nodes=[cpu % 2 for cpu in range(n_cpus)])


def test_a_cpulist_that_is_too_long_is_published_with_strides_instead() -> None:
    short = built(numbered_alternately(46)).devices
    assert short[0].attributes["dra.cpu/cpuIDs"] == {"string": ",".join(map(str, range(0, 46, 2)))}
    long = built(numbered_alternately(112), reserved=CpuSet([111])).devices
    assert long[0].attributes["dra.cpu/cpuIDsStrided"] == {"string": "0-110:1/2"}
    assert long[1].attributes["dra.cpu/cpuIDsStrided"] == {"string": "1-109:1/2"}
    assert "dra.cpu/cpuIDs" not in long[0].attributes


@pytest.mark.parametrize(("last", "size", "attribute"), [(1000, 64, "cpuIDs"), (10000, 65, "cpuIDsStrided")])
def test_a_string_of_64_bytes_is_the_longest(last: int, size: int, attribute: str) -> None:
    cpus = CpuSet([*range(10, 50, 2), last])
    assert len(str(cpus)) == size
    attributes = built(Topology.from_arrays(cpus)).devices[0].attributes
    assert [name for name in attributes if "cpuIDs" in name] == [f"dra.cpu/{attribute}"]


def irregular(n_cpus: int) -> CpuSet:
    return CpuSet(np.flatnonzero(np.random.default_rng(1).random(n_cpus) < 0.5).tolist())


def test_what_does_not_fit_even_with_strides_is_left_out_with_one_warning() -> None:
    model = built(machine(512, nodes=8, threads=1), reserved=irregular(512))
    assert all("dra.cpu/cpuIDs" not in device.attributes for device in model.devices)
    assert all("dra.cpu/cpuIDsStrided" not in device.attributes for device in model.devices)
    assert all(device.attributes["dra.cpu/smtLayout"] == {"string": "0-511"} for device in model.devices)
    assert model.left_out == {"dra.cpu/cpuIDs": tuple(names(model))}
    (warning,) = model.warnings
    assert re.fullmatch(
        r"attribute dra\.cpu/cpuIDs is left out of 8 devices from cpudevnuma000 to cpudevnuma007: "
        r"it would need \d+ bytes even as dra\.cpu/cpuIDsStrided; a string holds 64",
        warning,
    )


# SMT layouts.


@pytest.mark.parametrize(
    ("cores", "plain", "strided"),
    [
        ([0, 1, 2, 3, 0, 1, 2, 3], "0-7>4", "0-7>4"),
        ([0, 0, 1, 1, 2, 2], "0-5>1", "0-5>1"),
        ([*range(8), *range(8, 16), *range(8, 16)], "8-23>8;0-7", "8-23>8;0-7"),
        (list(range(64)), "0-63", "0-63"),
        ([0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 8, 9, 12, 13, 14, 15], "8-11>2;0-7>4;12-15", "8-11>2;0-7>4;12-15"),
        ([0, 1, 0, 2], "0,2>2;1,3", "0,2>2;1,3"),
        ([number // 4 for number in range(32)], None, "0-31>1*4"),
        ([number // 8 for number in range(32)], None, "0-31>1*8"),
        ([number % 8 for number in range(32)], None, "0-31>8*4"),
        ([0, 0, 0, 1, 1, 2], None, "3-4>1;0-2>1*3;5"),
        ([0, 0, 1, 0], None, None),
        ([0], "0", "0"),
    ],
)
def test_the_layout_of_smt_siblings(cores: list[int], plain: str | None, strided: str | None) -> None:
    layout = smt_layout(Topology.from_arrays(CpuSet(range(len(cores))), cores=cores).cores)
    assert (layout.plain, layout.strided) == (plain, strided)


def read_layout(text: str) -> set[frozenset[int]]:
    """Read a layout as a scheduler would."""
    cores = set()
    for entry in text.split(";"):
        cpulist, _, shape = entry.partition(">")
        stride, _, ways = shape.partition("*")
        left = set(CpuSet.parse(cpulist))
        while left:
            core = frozenset(min(left) + step * int(stride or 0) for step in range(int(ways or 2) if shape else 1))
            assert core <= left
            left -= core
            cores.add(core)
    return cores


@given(st.data())
def test_a_layout_reads_back_as_the_machines_cores(data: st.DataObject) -> None:
    core_of: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        first, stride = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 20))
        members = [first + step * stride for step in range(data.draw(st.sampled_from([1, 2, 2, 2, 4])))]
        if not set(members) & set(core_of):
            core_of |= dict.fromkeys(members, first)
    cores = [core_of.get(cpu, -1) for cpu in range(max(core_of) + 1)]
    layout = smt_layout(Topology.from_arrays(CpuSet(core_of), cores=cores).cores)
    expected = {frozenset(cpu for cpu in core_of if core_of[cpu] == core) for core in core_of.values()}
    assert layout.strided is not None
    assert read_layout(layout.strided) == expected
    if layout.plain is None:
        assert max(map(len, expected)) > 2
    else:
        assert read_layout(layout.plain) == expected


def test_the_layout_is_the_whole_nodes_reserved_cpus_included() -> None:
    model = built(machine(), reserved=CpuSet([0, 1, 8, 9]))
    assert {device.attributes["dra.cpu/smtLayout"]["string"] for device in model.devices} == {"0-15>8"}


def test_a_machine_with_four_threads_a_core_has_a_strided_layout() -> None:
    topology = Topology.from_arrays(CpuSet(range(64)), cores=[cpu // 4 for cpu in range(64)])
    attributes = built(topology).devices[0].attributes
    assert attributes["dra.cpu/smtLayoutStrided"] == {"string": "0-63>1*4"}
    assert "dra.cpu/smtLayout" not in attributes


def test_a_layout_that_is_too_long_is_published_with_strides_instead() -> None:
    # Every second core has lost its second thread.
    online = CpuSet(cpu for cpu in range(128) if cpu < 64 or cpu % 2)
    attributes = built(machine(128, online=online)).devices[0].attributes
    assert attributes["dra.cpu/smtLayoutStrided"] == {"string": "1-127:1/2>64;0-62:1/2"}
    assert "dra.cpu/smtLayout" not in attributes


def test_cores_that_no_layout_can_say_are_warned_about_once() -> None:
    topology = Topology.from_arrays(
        CpuSet(range(8)), cores=[0, 0, 1, 0, 1, 1, 2, 3], numa_nodes=[0, 0, 0, 0, 1, 1, 1, 1]
    )
    model = built(topology)
    assert all("dra.cpu/smtLayout" not in device.attributes for device in model.devices)
    assert all("dra.cpu/smtLayoutStrided" not in device.attributes for device in model.devices)
    assert model.warnings == (
        "attribute dra.cpu/smtLayout is left out of cpudevnuma000, cpudevnuma001: "
        "there are cores whose CPU numbers have no common distance",
    )


# Any machine.


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    online = CpuSet(draw(st.sets(st.integers(0, 130), min_size=1, max_size=60)))
    n_cpus = max(online) + 1

    def level(largest: int, least: int) -> st.SearchStrategy[list[int]]:
        return st.lists(st.integers(least, largest), min_size=n_cpus, max_size=n_cpus)

    return Topology.from_arrays(
        online,
        cores=draw(level(40, 0)),
        numa_nodes=draw(level(3, -1)),
        sockets=draw(level(2000, -1) | level(1, 0)),
        l3_caches=draw(st.none() | level(8, -1)),
    )


@given(
    topology=topologies(),
    reserved=st.sets(st.integers(0, 140), max_size=30).map(CpuSet),
    group_by=st.sampled_from(["numanode", "socket", "machine", "l3cache"]),
    roots=st.none() | st.dictionaries(st.integers(0, 130), st.lists(st.text(max_size=70), max_size=60), max_size=4),
)
def test_any_machine_gives_devices_that_the_api_takes(
    topology: Topology, reserved: CpuSet, group_by: str, roots: Mapping[int, Sequence[str]] | None
) -> None:
    model = built(topology, group_by, reserved=reserved, pcie_roots=roots, node_allocatable_mapping=True)
    assert len(model.by_name) == len(model.devices) == len(model.groups)
    seen = CpuSet()
    for row, device in enumerate(model.devices):
        assert re.fullmatch("[a-z0-9]{1,63}", device.name)
        assert device.group == row
        assert device.cpus
        assert device.cpus == CpuSet.from_array(model.groups[row]) - reserved
        assert device.cpus.isdisjoint(seen)
        seen |= device.cpus
        capacity = device.to_api()["capacity"]
        assert isinstance(capacity, dict)
        assert len(device.attributes) + len(capacity) <= 32
        values = [value for attribute in device.attributes.values() for value in attribute.values()]
        flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
        assert len(flat) <= 48
        assert all(len(item.encode()) <= 64 for item in flat if isinstance(item, str))
        assert all(value != [] for value in values)
    unpublished = topology.online - reserved - seen
    if group_by in ("machine", "l3cache"):
        assert not unpublished
    for cpu in unpublished:
        assert any("are not published" in warning for warning in model.warnings)
        assert (topology.numa_nodes if group_by == "numanode" else topology.sockets).group_of[cpu] == -1
    assert not any("\n" in warning for warning in model.warnings)
