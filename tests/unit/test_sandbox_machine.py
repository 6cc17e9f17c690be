# SPDX-License-Identifier: Apache-2.0
"""Generated machines, as the driver's own reader sees them."""

from __future__ import annotations

import pytest

from driver.sandbox.machine import MachineShape, write_machine
from fastcpu.cpuset import CpuSet
from fastcpu.sysfs import read_topology


def cpus(level):
    return [str(level.cpuset(row)) for row in range(len(level.ids))]


def test_default_machine_is_numbered_as_servers_are(tmp_path):
    topology = read_topology(write_machine(tmp_path / "sys"))
    assert str(topology.online) == str(topology.present) == str(topology.possible) == "0-255"
    assert cpus(topology.sockets) == ["0-63,128-191", "64-127,192-255"]
    assert cpus(topology.numa_nodes)[:2] == ["0-15,128-143", "16-31,144-159"]
    assert (len(topology.numa_nodes), len(topology.l3_caches), len(topology.cores)) == (8, 16, 128)
    assert cpus(topology.l3_caches)[:2] == ["0-7,128-135", "8-15,136-143"]
    assert cpus(topology.cores)[:2] == ["0,128", "1,129"]
    assert topology.smt_enabled
    assert topology.notes == ()


@pytest.mark.parametrize(
    "shape",
    [
        MachineShape(cpus=64, numa_nodes=2),
        MachineShape(cpus=1024),
        MachineShape(cpus=96, sockets=1, numa_nodes=1, threads_per_core=1, cores_per_l3=5),
        MachineShape(cpus=64, sockets=2, numa_nodes=2, threads_per_core=8),
    ],
)
def test_machines_have_the_shape_asked_for(tmp_path, shape):
    topology = read_topology(write_machine(tmp_path / "sys", shape))
    assert len(topology.online) == shape.cpus
    assert len(topology.sockets) == shape.sockets
    assert len(topology.numa_nodes) == shape.numa_nodes
    assert len(topology.cores) == shape.cpus // shape.threads_per_core
    assert topology.smt_enabled is (shape.threads_per_core > 1)
    assert topology.notes == ()
    for level in (topology.sockets, topology.numa_nodes, topology.l3_caches, topology.cores):
        assert CpuSet().union(*(level.cpuset(row) for row in range(len(level.ids)))) == topology.online
    nodes = [topology.numa_nodes.cpuset(row) for row in range(len(topology.numa_nodes.ids))]
    for row in range(len(topology.l3_caches.ids)):
        l3 = topology.l3_caches.cpuset(row)
        assert len(l3) <= shape.cores_per_l3 * shape.threads_per_core
        assert any(l3 <= node for node in nodes)


def test_isolated_cpus_are_told(tmp_path):
    topology = read_topology(write_machine(tmp_path / "sys", MachineShape(cpus=64, isolated="4-7")))
    assert str(topology.isolated) == "4-7"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"cpus": 0}, "at least one"),
        ({"sockets": 3}, "8 NUMA nodes cannot be divided among 3 sockets"),
        ({"cpus": 100}, "100 CPUs cannot be divided into cores of 2 threads in 8 NUMA nodes"),
    ],
)
def test_impossible_shapes_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        MachineShape(**shape)
