# SPDX-License-Identifier: Apache-2.0
"""Topology and Level beside a model made of Python sets."""

from __future__ import annotations

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcpu import CpuSet, Topology
from fastcpu.topology import EFFICIENCY, PERFORMANCE, STANDARD, Level

LEVELS = ("cores", "l3_caches", "dies", "numa_nodes", "sockets", "machine")


def test_a_machine_of_two_sockets():
    topology = Topology.from_arrays(
        CpuSet.parse("0-7"),
        cores=[0, 1, 2, 3, 0, 1, 2, 3],
        l3_caches=[9, 9, 4, 4, 9, 9, 4, 4],
        numa_nodes=[0, 0, 5, 5, 0, 0, 5, 5],
        sockets=[1, 1, 0, 0, 1, 1, 0, 0],
        memory_nodes=[7, 6, 7],
        notes=["a", "b"],
    )
    assert topology.n_cpus == 8
    assert topology.n_words == 1
    assert topology.cores.ids == (0, 1, 2, 3)
    assert [str(topology.cores.cpuset(row)) for row in range(4)] == ["0,4", "1,5", "2,6", "3,7"]
    assert topology.l3_caches.ids == (4, 9)
    assert topology.l3_caches.group_of.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert topology.numa_nodes.ids == (0, 5)
    assert topology.sockets.masks.tolist() == [[0b11001100], [0b00110011]]
    assert topology.dies.group_of.tolist() == topology.sockets.group_of.tolist()
    assert topology.machine.cpuset(0) == topology.online
    assert topology.smt_enabled is True
    assert topology.memory_nodes == (6, 7)
    assert topology.notes == ("a", "b")
    assert "8 of 8 CPUs online, 4 cores, 2 L3 caches, 2 NUMA nodes, 2 sockets" in repr(topology)


def test_what_is_left_out():
    topology = Topology.from_arrays(CpuSet.parse("2,70"))
    assert (topology.n_cpus, topology.n_words) == (71, 2)
    assert topology.cores.ids == (2, 70)
    assert len(topology.l3_caches) == 0
    assert topology.l3_caches.masks.shape == (0, 2)
    assert [level.ids for level in (topology.dies, topology.numa_nodes, topology.sockets)] == [(0,)] * 3
    assert topology.present == topology.possible == topology.online
    assert topology.isolated == CpuSet()
    assert topology.smt_enabled is False
    assert topology.core_type.tolist() == [STANDARD] * 71
    assert set(topology.core_id.tolist()) == set(topology.die_id.tolist()) == {-1}
    assert topology.memory_nodes == topology.notes == ()


def test_possible_cpus_size_the_masks():
    topology = Topology.from_arrays(
        CpuSet.parse("0-1"), present=CpuSet.parse("0-3"), possible=CpuSet.parse("0-191"), isolated=CpuSet.parse("1")
    )
    assert (topology.n_cpus, topology.n_words) == (192, 3)
    assert topology.sockets.masks.tolist() == [[3, 0, 0]]
    assert topology.sockets.group_of.tolist() == [0, 0] + [-1] * 190
    assert len(topology.core_type) == len(topology.core_id) == 192
    assert topology.isolated == CpuSet([1])


def test_labels_and_core_types():
    topology = Topology.from_arrays(
        CpuSet.parse("0-2"),
        core_type=np.array([1, 2, 0], np.uint8),
        core_id=[5, -7, 2**31 - 1],
        die_id=np.array([0, 1], np.int8),
        smt_enabled=True,
    )
    assert topology.core_type.tolist() == [PERFORMANCE, EFFICIENCY, STANDARD]
    assert topology.core_type.dtype == np.uint8
    assert topology.core_id.tolist() == [5, -1, 2**31 - 1]
    assert topology.die_id.tolist() == [0, 1, -1]
    assert topology.smt_enabled is True


def test_a_cache_id_has_32_bits():
    topology = Topology.from_arrays(CpuSet([0]), l3_caches=np.array([2**32 - 1], np.uint64))
    assert topology.l3_caches.ids == (2**32 - 1,)


def test_cpus_outside_every_group():
    topology = Topology.from_arrays(CpuSet.parse("0-3"), numa_nodes=[-1, 1, -5, 1], sockets=[0, -1], l3_caches=[])
    assert topology.numa_nodes.ids == (1,)
    assert topology.numa_nodes.group_of.tolist() == [-1, 0, -1, 0]
    assert topology.sockets.cpuset(0) == CpuSet([0])
    assert topology.dies.cpuset(0) == CpuSet([0])
    assert len(topology.l3_caches) == 0


def test_offline_cpus_are_in_no_group():
    topology = Topology.from_arrays(CpuSet.parse("1-2"), possible=CpuSet.parse("0-3"), cores=[0, 0, 2, 3])
    assert topology.cores.ids == (0, 2)
    assert topology.cores.group_of.tolist() == [-1, 0, 1, -1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cores": [0]}, ValueError, "cores: CPU 1 is online and has no core"),
        ({"cores": [0, -1]}, ValueError, "cores: CPU 1 is online"),
        ({"cores": [[0, 1]]}, ValueError, r"cores: expected one dimension, got shape \(1, 2\)"),
        ({"sockets": 3}, ValueError, r"sockets: expected one dimension, got shape \(\)"),
        ({"sockets": [0.0, 1.0]}, TypeError, "sockets: expected integers, got float64"),
        ({"sockets": [True, False]}, TypeError, "sockets: expected integers, got bool"),
        ({"sockets": ["0", "1"]}, TypeError, "sockets: expected integers"),
        ({"sockets": [10**30, 1]}, TypeError, "sockets: expected integers, got object"),
        ({"numa_nodes": [0, 0, 0]}, ValueError, "numa_nodes: 3 entries for 2 CPUs"),
        ({"l3_caches": [0, 2**32]}, ValueError, "l3_caches: 4294967296 is above 4294967295"),
        ({"dies": np.array([0, 2**64 - 1], np.uint64)}, ValueError, "dies: 18446744073709551615 is above"),
        ({"core_type": [0, 3]}, ValueError, "core_type: 3 is above 2"),
        ({"core_id": [0, 2**31]}, ValueError, "core_id: 2147483648 is above 2147483647"),
        ({"die_id": [0, 2**31]}, ValueError, "die_id: 2147483648 is above"),
        ({"present": CpuSet([0])}, ValueError, "online CPUs 1 are not present"),
        (
            {"present": CpuSet.parse("0-4"), "possible": CpuSet.parse("0-3")},
            ValueError,
            "present CPUs 4 are not possible",
        ),
        ({"memory_nodes": [-1]}, ValueError, "memory_nodes: -1 is not an int from 0"),
        ({"memory_nodes": ["1"]}, ValueError, "memory_nodes: '1' is not an int"),
        ({"isolated": [1]}, TypeError, "isolated"),
    ],
)
def test_refused_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Topology.from_arrays(CpuSet.parse("0-1"), **arguments)


def test_a_machine_has_a_cpu():
    with pytest.raises(ValueError, match="at least one CPU"):
        Topology.from_arrays(CpuSet())
    with pytest.raises(TypeError):
        Topology.from_arrays([0, 1])
    with pytest.raises(TypeError):
        Topology.from_arrays(None)


@pytest.mark.parametrize("kind", [Topology, Level])
def test_no_half_made_objects(kind):
    with pytest.raises(TypeError, match=r"is made by Topology\.from_arrays"):
        kind()
    with pytest.raises(TypeError):
        kind.__new__(kind, object())
    with pytest.raises(TypeError):
        type("Sub", (kind,), {})


def test_nothing_can_be_changed():
    topology = Topology.from_arrays(CpuSet.parse("0-3"))
    for array in (topology.cores.masks, topology.cores.group_of, topology.core_type, topology.core_id, topology.die_id):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
    for name in ("online", "cores", "notes", "smt_enabled", "n_cpus"):
        with pytest.raises(AttributeError):
            setattr(topology, name, getattr(topology, name))
    with pytest.raises(AttributeError):
        topology.cores.ids = ()
    with pytest.raises(TypeError):
        pickle.dumps(topology)


def test_masks_are_ready_for_c():
    masks = Topology.from_arrays(CpuSet(range(300))).cores.masks
    assert masks.flags.c_contiguous
    assert masks.dtype == np.uint64
    assert masks.shape == (300, 5)


def test_views_keep_the_level_alive():
    topology = Topology.from_arrays(CpuSet(range(2000)), sockets=np.arange(2000) // 500)
    masks, group_of, level = topology.sockets.masks, topology.sockets.group_of, topology.cores
    del topology
    gc.collect()
    assert CpuSet.from_array(masks[3]) == CpuSet(range(1500, 2000))
    assert group_of[1500] == 3
    assert level.cpuset(1999) == CpuSet([1999])


@pytest.mark.parametrize("row", [-1, 2, 2**40])
def test_rows_out_of_range(row):
    level = Topology.from_arrays(CpuSet.parse("0-1")).cores
    with pytest.raises(IndexError, match=f"row {row} of a level of 2 groups"):
        level.cpuset(row)


def test_threads_share_a_topology():
    topology = Topology.from_arrays(CpuSet(range(1024)), sockets=np.arange(1024) % 4)
    expected = [CpuSet(range(row, 1024, 4)) for row in range(4)]

    def read(_):
        return all(topology.sockets.cpuset(i % 4) == expected[i % 4] for i in range(500))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(8)))


@given(st.data())
def test_levels_are_what_the_ids_say(data):
    n_cpus = data.draw(st.integers(1, 200))
    possible = data.draw(st.sets(st.integers(0, n_cpus - 1), min_size=1))
    online = data.draw(st.sets(st.sampled_from(sorted(possible)), min_size=1))
    length = max(possible) + 1
    ids = st.lists(st.integers(-2, 9), min_size=length, max_size=length)
    arguments = {name: data.draw(ids) for name in ("l3_caches", "dies", "numa_nodes", "sockets")}
    arguments["cores"] = data.draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
    topology = Topology.from_arrays(CpuSet(online), possible=CpuSet(possible), **arguments)
    for name, numbers in arguments.items():
        level = getattr(topology, name)
        groups = {}
        for cpu in online:
            if numbers[cpu] >= 0:
                groups.setdefault(numbers[cpu], set()).add(cpu)
        assert level.ids == tuple(sorted(groups))
        assert [set(level.cpuset(row)) for row in range(len(level))] == [groups[number] for number in level.ids]
        for cpu in range(length):
            row = level.group_of[cpu]
            assert (cpu in groups[level.ids[row]]) if row >= 0 else all(cpu not in group for group in groups.values())
