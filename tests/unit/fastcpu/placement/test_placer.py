# SPDX-License-Identifier: Apache-2.0
"""The rules of placement by example, and what holds for every choice."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcpu import CpuSet, Topology
from fastcpu.errors import PlacementError
from fastcpu.placement import Placer, Policy, place
from fastcpu.topology import EFFICIENCY, PERFORMANCE
from placement_machines import random_machine, regular_machine
from placement_reference import Machine

SPREAD = Policy(spread="cores")
WHOLE = Policy(full_cores="require")
EVEN = Policy(numa="distribute")


@pytest.fixture(scope="module")
def server() -> Topology:
    """Two sockets, four nodes, eight L3 caches of four cores; cache k has CPUs 4k … 4k + 3 and their siblings + 32."""
    return regular_machine(sockets=2, nodes=2, caches=2, cores=4, threads=2)


@pytest.fixture(scope="module")
def placer(server) -> Placer:
    return Placer(server)


@pytest.fixture(scope="module")
def hybrid() -> Topology:
    """Two performance cores of two threads and four efficiency cores under one L3 cache."""
    types = [PERFORMANCE] * 4 + [EFFICIENCY] * 4
    return Topology.from_arrays(CpuSet(range(8)), cores=[0, 0, 1, 1, 2, 3, 4, 5], l3_caches=[0] * 8, core_type=types)


@pytest.mark.parametrize(
    ("n", "cpus"),
    [(1, "0"), (2, "0,32"), (3, "0-1,32"), (8, "0-3,32-35"), (9, "0-4,32-35"), (16, "0-7,32-39"), (17, "0-8,32-39"),
     (32, "0-15,32-47"), (33, "0-16,32-47"), (64, "0-63")],
)  # fmt: skip
def test_an_empty_machine(placer, server, n, cpus):
    assert placer.place(server.online, n) == CpuSet.parse(cpus)


# Node 0 has 5 and 3 free CPUs under its L3 caches, node 1 has 6 and 1.
UNEVEN = "0-6,32,8-12,40-41"


@pytest.mark.parametrize(
    ("available", "n", "cpus"),
    [
        # fewest domains: starting with the largest L3 cache needs a second node
        (UNEVEN, 8, "0-6,32"),
        # as many domains, fewer split cores
        (UNEVEN, 7, "8-12,40-41"),
        # two caches of one node rather than two nodes, one socket rather than the larger caches of two
        ("0-3,32-34,4-5,16-22,24", 9, "0-5,32-34"),
        # siblings rather than lower CPUs
        ("0-2,34", 2, "2,34"),
        # the rest of a core in use for one CPU, or an odd one; a whole core for two
        ("0-3,33-35", 1, "0"),
        ("0-3,33-35", 2, "1,33"),
        ("0-3,33-35", 3, "0-1,33"),
        # wholly free caches, nodes and sockets stay whole
        ("0-3,32-35,4-6,36-38", 4, "4-5,36-37"),
        ("0-7,32-39,8-11,40-43", 8, "8-11,40-43"),
        ("0-15,32-47,24-31,56-63", 16, "24-31,56-63"),
        # neither is whole: what is left over lies together
        ("16-18,48-50,20-21,52-53", 4, "20-21,52-53"),
        # neither is whole: the fuller node, socket
        ("0-3,32-35,4,8-11,40-43", 8, "8-11,40-43"),
        ("0-3,32-35,8,16-19,48-51", 8, "16-19,48-51"),
    ],
)
def test_the_best_of_what_is_free(placer, available, n, cpus):
    assert placer.place(CpuSet.parse(available), n) == CpuSet.parse(cpus)


@pytest.mark.parametrize(
    ("policy", "n", "cpus"),
    [
        (SPREAD, 4, "0-3"),
        (SPREAD, 5, "0-4"),
        (SPREAD, 16, "0-15"),
        (SPREAD, 17, "0-15,32"),
        (WHOLE, 6, "0-2,32-34"),
        (EVEN, 1, "0"),
        (EVEN, 15, "0-3,32-35,8-11,40-42"),
        (EVEN, 20, "0-4,32-36,8-12,40-44"),
        (Policy(numa="distribute", full_cores="require"), 10, "0-2,32-34,8-9,40-41"),
        (Policy(numa="distribute", spread="cores"), 7, "0-3,8-10"),
        (Policy(full_cores="require", spread="cores"), 6, "0-2,32-34"),
    ],
)
def test_wishes(placer, server, policy, n, cpus):
    assert placer.place(server.online & server.sockets.cpuset(0), n, policy) == CpuSet.parse(cpus)


def test_a_node_without_its_share_gives_all(placer):
    available = CpuSet.parse("0-1,8-15,40-47")
    assert placer.place(available, 9, EVEN) & CpuSet(range(8)) == CpuSet.parse("0-1")


def test_an_even_share_of_four_nodes(placer, server):
    chosen = placer.place(server.online, 10, EVEN)
    assert [len(chosen & server.numa_nodes.cpuset(node)) for node in range(4)] == [3, 3, 2, 2]


def test_an_even_share_of_cores_of_different_sizes():
    """Node 0 has cores of four threads, node 1 of three: 7 CPUs are 4 and 3, but 8 can only be of one node."""
    cores = [0] * 4 + [1] * 4 + [2] * 3 + [3] * 3 + [4] * 3
    topology = Topology.from_arrays(CpuSet(range(17)), cores=cores, numa_nodes=[0] * 8 + [1] * 9)
    policy = Policy(numa="distribute", full_cores="require")
    assert place(topology, topology.online, 7, policy) == CpuSet.parse("0-3,8-10")
    assert place(topology, topology.online, 8, policy) == CpuSet.parse("0-7")
    with pytest.raises(PlacementError) as caught:
        place(topology, topology.online, 5, policy)
    assert caught.value.fitting == (4, 6)


def test_an_offline_sibling_is_not_missed(server):
    topology = regular_machine(cores=4, threads=2)
    cores = topology.cores.group_of[:7]
    placer = Placer(Topology.from_arrays(CpuSet(range(7)), cores=cores))
    assert placer.place(CpuSet(range(7)), 1, WHOLE) == CpuSet([3])
    assert placer.place(CpuSet(range(7)), 1) == CpuSet([3])


@pytest.mark.parametrize(
    ("available", "n", "core_type", "cpus"),
    [
        ("0-7", 1, "any", "0"),
        ("0-7", 4, "any", "0-3"),
        ("0-7", 5, "any", "0-4"),
        ("0-7", 2, "p-core", "0-1"),
        ("0-7", 2, "e-core", "4-5"),
        ("0-1,4-7", 3, "any", "4-6"),
        ("0-1,4-7", 5, "any", "0-1,4-6"),
        ("0,4-7", 5, "any", "0,4-7"),
    ],
)
def test_types_of_core(hybrid, available, n, core_type, cpus):
    assert place(hybrid, CpuSet.parse(available), n, Policy(core_type=core_type)) == CpuSet.parse(cpus)


def test_faster_cores_first_even_with_higher_numbers():
    types = [EFFICIENCY] * 4 + [PERFORMANCE] * 4
    topology = Topology.from_arrays(CpuSet(range(8)), core_type=types, l3_caches=[0] * 8)
    assert place(topology, topology.online, 2) == CpuSet.parse("4-5")
    assert place(topology, topology.online, 6) == CpuSet.parse("0-1,4-7")


def test_cpus_without_a_cache_are_not_preferred():
    topology = Topology.from_arrays(CpuSet(range(8)), l3_caches=[0] * 4 + [-1] * 4)
    assert place(topology, CpuSet.parse("0-2,4-5"), 3) == CpuSet.parse("0-2")
    assert place(topology, CpuSet.parse("0-1,4-6"), 3) == CpuSet.parse("4-6")


def test_a_cache_of_several_nodes():
    """Three nodes of two CPUs share an L3 cache, two of three have one each: fewer nodes come before fewer caches."""
    topology = Topology.from_arrays(
        CpuSet(range(12)),
        numa_nodes=[0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4],
        l3_caches=[0] * 6 + [1] * 3 + [2] * 3,
    )
    assert place(topology, topology.online, 6) == CpuSet.parse("6-11")
    assert place(topology, topology.online, 4) == CpuSet.parse("0-3")


def test_a_node_of_half_of_two_sockets():
    """A virtual machine with three nodes on two sockets: node 1 counts once, although it is in both."""
    nodes = [0] * 4 + [1] * 4 + [2] * 4
    topology = Topology.from_arrays(CpuSet(range(12)), numa_nodes=nodes, sockets=[0] * 6 + [1] * 6)
    assert place(topology, CpuSet.parse("0,4-5,6-7,8"), 4) == CpuSet.parse("4-7")
    assert place(topology, CpuSet.parse("0-2,4-8"), 5) == CpuSet.parse("0-2,4-5")


def test_a_core_in_two_nodes_is_never_whole():
    topology = Topology.from_arrays(CpuSet(range(4)), cores=[0, 1, 0, 1], numa_nodes=[0, 0, 1, 0])
    with pytest.raises(PlacementError) as caught:
        place(topology, topology.online, 4, WHOLE)
    assert caught.value.available == 2
    assert place(topology, topology.online, 2, WHOLE) == CpuSet.parse("1,3")


@pytest.mark.parametrize(
    ("available", "n", "policy", "available_cpus", "fitting", "text"),
    [
        ("0-3", 5, Policy(), 4, (4,), "5 CPUs cannot be placed: 4 CPUs are free; 4 would fit"),
        ("", 1, Policy(), 0, (), "1 CPUs cannot be placed: no CPUs are free"),
        ("0-3,32-35", 3, WHOLE, 8, (2, 4),
         "3 CPUs cannot be placed: 8 CPUs of whole cores are free; 2 or 4 would fit"),
        ("0-63", 63, WHOLE, 64, (62, 64),
         "63 CPUs cannot be placed: 64 CPUs of whole cores are free; 62 or 64 would fit"),
        ("0-3,32-33", 6, WHOLE, 4, (4,), "6 CPUs cannot be placed: 4 CPUs of whole cores are free; 4 would fit"),
        ("0-3,32-33", 1, WHOLE, 4, (2,), "1 CPUs cannot be placed: 4 CPUs of whole cores are free; 2 would fit"),
        ("0-3", 2, WHOLE, 0, (), "2 CPUs cannot be placed: no CPUs of whole cores are free"),
        ("0-3", 2, Policy(core_type="p-core"), 0, (), "2 CPUs cannot be placed: no CPUs of p-cores are free"),
        ("0-3", 10**30, SPREAD, 4, (4,), f"{10**30} CPUs cannot be placed: 4 CPUs are free; 4 would fit"),
    ],
)  # fmt: skip
def test_says_what_would_fit(placer, available, n, policy, available_cpus, fitting, text):
    with pytest.raises(PlacementError) as caught:
        placer.place(CpuSet.parse(available), n, policy)
    error = caught.value
    assert (error.requested, error.available, error.fitting) == (n, available_cpus, fitting)
    assert str(error) == text


def test_says_which_whole_cores_would_fit(hybrid):
    with pytest.raises(PlacementError, match="4 CPUs of whole p-cores are free; 2 or 4 would fit") as caught:
        place(hybrid, hybrid.online, 3, Policy(full_cores="require", core_type="p-core"))
    assert (caught.value.whole_cores, caught.value.core_type) == (True, "p-core")


@pytest.mark.parametrize("n", [0, -1])
def test_refuses_senseless_numbers(placer, server, n):
    with pytest.raises(ValueError, match="at least 1"):
        placer.place(server.online, n)


@pytest.mark.parametrize("n", ["4", 4.0, None])
def test_refuses_what_is_no_number(placer, server, n):
    with pytest.raises(TypeError):
        placer.place(server.online, n)


def test_refuses_free_cpus_that_are_not_online(placer):
    with pytest.raises(ValueError, match="free CPUs 64,8000 are not online"):
        placer.place(CpuSet.parse("0-64,8000"), 1)


@pytest.mark.parametrize(
    "wrong", [{"spread": "threads"}, {"full_cores": True}, {"numa": "even"}, {"core_type": "standard"}]
)
def test_refuses_unknown_wishes(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is '"):
        Policy(**wrong)


policies = st.builds(
    Policy,
    spread=st.sampled_from(["none", "cores"]),
    full_cores=st.sampled_from(["prefer", "require"]),
    numa=st.sampled_from(["pack", "distribute"]),
    core_type=st.sampled_from(["any", "any", "p-core", "e-core"]),
)


@settings(max_examples=500)
@given(seed=st.integers(0, 2**32), crossing=st.booleans(), policy=policies)
def test_holds_for_every_choice(seed, crossing, policy):
    """So many free CPUs, the same ones in every call; and more free CPUs never make a request impossible."""
    random = Random(seed)
    topology = random_machine(random, crossing=crossing)
    placer, again = Placer(topology), Placer(topology)
    shuffled = random.sample(list(topology.online), len(topology.online))
    was_possible: set[int] = set()
    for size in sorted(random.sample(range(1, len(shuffled) + 1), min(4, len(shuffled)))):
        available = CpuSet(shuffled[:size])
        possible, fitting = set(), set()
        for n in range(1, size + 2):
            try:
                chosen = placer.place(available, n, policy)
            except PlacementError as refusal:
                fitting.update(refusal.fitting)
                continue
            possible.add(n)
            assert len(chosen) == n
            assert chosen <= available
            assert again.place(CpuSet(available), n, policy) == chosen
            if policy.full_cores == "require":
                assert Machine(topology).counts(chosen)[3] == 0
        assert was_possible | fitting <= possible
        was_possible = possible
        if policy.full_cores == "prefer" and policy.core_type == "any":
            assert possible == set(range(1, size + 1))


def test_is_the_same_in_every_process():
    program = """
from random import Random
from fastcpu import CpuSet
from fastcpu.placement import Placer
from placement_machines import random_machine
random = Random(5)
for _ in range(50):
    topology = random_machine(random, crossing=True)
    free = CpuSet(cpu for cpu in topology.online if random.random() < 0.7)
    for n in range(1, len(free) + 1):
        print(Placer(topology).place(free, n))
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) > 300


def test_threads_may_share_a_placer(placer, server):
    sizes = list(range(1, 65)) * 20
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: placer.place(server.online, n), sizes))
    assert results == [placer.place(server.online, n) for n in sizes]


@pytest.mark.parametrize(
    "shape",
    [
        {"caches": 64, "cores": 64, "threads": 2},
        {"caches": 512, "cores": 8, "threads": 2},
        {"sockets": 64, "nodes": 8, "caches": 8, "threads": 2},
        {"nodes": 4096, "threads": 2},
    ],
)
def test_huge_machines(shape):
    """8,192 CPUs with some in use everywhere: the largest domains of the first kind are the fewest of that kind."""
    topology = regular_machine(**shape)
    random = Random(1)
    available = CpuSet(cpu for cpu in topology.online if random.random() < random.choice([0.3, 0.9]))
    machine, placer = Machine(topology), Placer(topology)
    kind = next(i for i, level in enumerate(machine.levels) if len(level) > 1)
    sizes = sorted((len(available & CpuSet(group)) for group in machine.levels[kind]), reverse=True)
    for n in (1, 100, len(available) // 2, len(available)):
        chosen = placer.place(available, n)
        assert len(chosen) == n
        assert machine.counts(chosen)[kind] == next(k for k in range(len(sizes) + 1) if sum(sizes[:k]) >= n)
