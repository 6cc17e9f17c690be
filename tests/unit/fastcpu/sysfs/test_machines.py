# SPDX-License-Identifier: Apache-2.0
"""The topology of recorded machines beside what hwloc says about them, and of this machine beside its own files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fastcpu import CpuSet, Topology, read_topology
from fastcpu.sysfs import read_pcie_roots
from fastcpu.topology import EFFICIENCY, PERFORMANCE, STANDARD, Level
from machines import describe

NAMES = sorted(path.stem for path in describe.HERE.glob("*.json"))

# Where this reader and hwloc disagree, and why.
DEVIATIONS = {
    # Each two CPUs of these AMD processors (family 15h) share a module: front end, floating-point unit, L2. Linux calls
    # them threads of one core, hwloc looks at core_id too and calls them cores. A core is what core_cpus_list says, and
    # two workloads on one module do disturb each other.
    ("64amd64-4s2n4ca2co", "cores"): [f"{cpu}-{cpu + 1}" for cpu in range(0, 64, 2)],
    # The package id is -1 (a POWER LPAR), so hwloc has no number for them. Linux lists each core as a package.
    ("256ppc-8n8s4t", "sockets"): {str(cpu): f"{cpu}-{cpu + 3}" for cpu in range(0, 256, 4)},
}


def groups(level: Level) -> dict[str, str]:
    return {str(number): str(level.cpuset(row)) for row, number in enumerate(level.ids)}


def facts(topology: Topology) -> dict[str, Any]:
    """Everything that a topology says."""
    levels = ("cores", "l3_caches", "dies", "numa_nodes", "sockets", "machine")
    sets = ("online", "present", "possible", "isolated")
    arrays = ("core_type", "core_id", "die_id")
    values = ("smt_enabled", "n_cpus", "n_words", "memory_nodes", "notes")
    return {
        **{name: groups(getattr(topology, name)) for name in levels},
        **{name: str(getattr(topology, name)) for name in sets},
        **{name: getattr(topology, name).tolist() for name in arrays},
        **{name: getattr(topology, name) for name in values},
    }


@pytest.fixture
def rebuilt(tmp_path):
    """Rebuild the tree of a machine from its description, and return the folder that stands for /sys."""

    def rebuild(name: str) -> Path:
        describe.write_tree(describe.load(name), tmp_path)
        return tmp_path

    return rebuild


def test_there_are_sixteen():
    assert len(NAMES) == 16


@pytest.mark.parametrize("name", NAMES)
def test_agreement_with_hwloc(name, rebuilt):
    topology = read_topology(rebuilt(name))
    found = {
        "online": str(topology.online),
        "sockets": groups(topology.sockets),
        "numa_nodes": groups(topology.numa_nodes),
        "l3_caches": sorted(groups(topology.l3_caches).values()),
        "cores": sorted(groups(topology.cores).values()),
    }
    expected = {
        key: DEVIATIONS.get((name, key), sorted(value) if isinstance(value, list) else value)
        for key, value in describe.load(name)["expected"].items()
    }
    assert found == {key: sorted(value) if isinstance(value, list) else value for key, value in expected.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("128arm-2pa2n8cluster4co", {"smt_enabled": False, "dies": {"0": "0-63", "64": "64-127"}, "notes": ()}),
        ("16em64t-4s2c2t-offlines", {"smt_enabled": True, "n_cpus": 16, "present": "0-1,3-4,6-12,15"}),
        ("256ppc-8n8s4t", {"smt_enabled": True, "n_words": 4}),
        ("2arm-2c", {"numa_nodes": {"0": "0-1"}, "l3_caches": {}, "memory_nodes": ()}),
        ("40intel64-2g2n4c+pcilocality", {"possible": "0-79", "n_words": 2, "core_id": [0, 0, 0, 0, 1]}),
        ("8em64t-2s2ca2c-buggynuma", {"numa_nodes": {"0": "0-7"}, "memory_nodes": (1, 2, 3, 4, 5, 6, 7)}),
        # Eight dies, numbered 0 and 1 in each socket
        ("fakecpuid1f-64intel64-2p4d2n2c2t", {"dies": {str(n): f"{n}-{n + 7}" for n in range(0, 64, 8)}}),
        ("memorysidecaches", {"smt_enabled": True, "memory_nodes": ()}),
        ("nvidia-dgx-gb10", {"core_type": [EFFICIENCY] * 5 + [PERFORMANCE] * 5 + [EFFICIENCY] * 5 + [PERFORMANCE] * 5}),
        # Recorded without performance counters, so nothing says which cores are which
        ("20em64t-hybrid-1p6c2t+2ca4co1t", {"core_type": [STANDARD] * 20, "smt_enabled": True}),
        ("offline-cpu0-node0", {"n_cpus": 192, "notes": ("CPUs 4,6,8,10,12,14,16,18,20 are in no NUMA node",)}),
    ],
)
def test_what_hwloc_is_not_asked(name, expected, rebuilt):
    found = facts(read_topology(rebuilt(name)))
    for key, value in expected.items():
        assert (found[key][: len(value)] if key == "core_id" else found[key]) == value


def test_every_oddity_is_told(rebuilt):
    notes = read_topology(rebuilt("64fake-4n2s2ca2c2t")).notes
    assert "/sys/devices/system/cpu/online is missing; taken from the CPU folders" in notes
    path = "/sys/devices/system/cpu/cpu8/cache/index3/shared_cpu_list"
    assert f"{path}: 0-7 is without CPU 8 itself; treated as absent" in notes


def test_pcie_roots_of_a_machine(rebuilt):
    roots = read_pcie_roots(rebuilt("40intel64-2g2n4c+pcilocality"))
    assert roots == dict.fromkeys(range(40), ("pci0000:00", "pci0000:40"))


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_are_true(name, tmp_path):
    raw = describe.unpack(describe.RECORDINGS / f"{name}.tar.xz", tmp_path / "raw")
    description = describe.load(name)
    assert describe.describe(raw) == {key: description[key] for key in description.keys() - {"machine", "expected"}}
    describe.write_tree(description, tmp_path / "rebuilt")
    assert facts(read_topology(raw)) == facts(read_topology(tmp_path / "rebuilt"))
    assert read_pcie_roots(raw) == read_pcie_roots(tmp_path / "rebuilt")


# This machine, whose files are read once more in the most naive way

ROOT = Path("/sys/devices/system")


def cpus_in(path: Path) -> set[int]:
    """Read a list of CPUs without any code of this project."""
    ranges = [part.split("-") for part in path.read_text().strip("\0\n").split(",") if part]
    return {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}


def test_cpus_of_this_machine():
    topology = read_topology()
    assert set(topology.online) == cpus_in(ROOT / "cpu/online")
    assert os.sched_getaffinity(0) <= set(topology.online)
    assert set(topology.possible) >= cpus_in(ROOT / "cpu/possible") >= set(topology.present)


@pytest.mark.parametrize(
    ("level", "name"),
    [
        ("cores", "topology/thread_siblings_list"),
        ("sockets", "topology/core_siblings_list"),
        ("l3_caches", "cache/index3/shared_cpu_list"),
    ],
)
def test_levels_of_this_machine(level, name):
    topology = read_topology()
    found = getattr(topology, level)
    for cpu in topology.online:
        path = ROOT / f"cpu/cpu{cpu}/{name}"
        row = found.group_of[cpu]
        expected = cpus_in(path) & set(topology.online) if path.is_file() else set()
        assert (set(found.cpuset(row)) if row >= 0 else set()) == expected


def test_ids_of_this_machine():
    topology = read_topology()
    for cpu in topology.online:
        folder = ROOT / f"cpu/cpu{cpu}/topology"
        assert topology.core_id[cpu] == int((folder / "core_id").read_text())
        package = int((folder / "physical_package_id").read_text())
        if package >= 0:
            assert topology.sockets.ids[topology.sockets.group_of[cpu]] == package


def test_numa_nodes_of_this_machine():
    topology = read_topology()
    nodes = {int(path.name[4:]): cpus_in(path / "cpulist") for path in (ROOT / "node").glob("node[0-9]*")}
    with_cpus = {node: cpus for node, cpus in nodes.items() if cpus} or {0: set(topology.online)}
    assert {int(n): set(CpuSet.parse(cpus)) for n, cpus in groups(topology.numa_nodes).items()} == with_cpus
    assert set(topology.memory_nodes) == nodes.keys() - with_cpus.keys()
