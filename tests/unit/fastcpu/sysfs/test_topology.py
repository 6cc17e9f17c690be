# SPDX-License-Identifier: Apache-2.0
"""Reading topologies: invented machines and back, each oddity of the files, and files full of garbage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastcpu import CpuSet, Topology, read_topology
from fastcpu.errors import TopologyError
from fastcpu.topology import EFFICIENCY, PERFORMANCE, STANDARD
from machines import describe
from machines.shapes import CPU, NODE, Shape, TextTree, large, shapes

LEVELS = ("cores", "l3_caches", "dies", "numa_nodes", "sockets", "machine")


def groups(topology: Topology) -> dict[str, dict[int, set[int]]]:
    return {
        name: {number: set(level.cpuset(row)) for row, number in enumerate(level.ids)}
        for name, level in ((name, getattr(topology, name)) for name in LEVELS)
    }


def lists(level) -> dict[int, str]:
    return {number: str(level.cpuset(row)) for row, number in enumerate(level.ids)}


def machine(online: str = "0-3", **texts: str) -> dict[str, str]:
    """Return the files of a machine that tells next to nothing; names are relative to the CPU folder, with __ for /."""
    return {f"{CPU}/online": f"{online}\n"} | {f"{CPU}/{name.replace('__', '/')}": text for name, text in texts.items()}


def read(texts: dict[str, str]) -> Topology:
    return read_topology(TextTree(texts))


# Invented machines


@given(shapes())
def test_from_a_shape_to_files_and_back(shape: Shape):
    topology = read(shape.files())
    assert groups(topology) == shape.topology()
    assert set(topology.online) == {thread.cpu for thread in shape.online}
    assert set(topology.possible) == {thread.cpu for thread in shape.threads}
    assert topology.memory_nodes == shape.cpuless_nodes()
    assert topology.smt_enabled is (len(shape.online) > len({thread.core for thread in shape.online}))
    if shape.die_ids:
        assert all(topology.die_id[thread.cpu] == shape._die_id(thread.die) for thread in shape.online)
    unexpected = [note for note in topology.notes if "online is missing" not in note]
    assert unexpected == []


@given(shapes(), st.randoms())
def test_an_overlay_alone_is_a_machine(shape: Shape, random):
    files = list(shape.files().items())
    random.shuffle(files)
    assert groups(read_topology("/nowhere", dict(files))) == shape.topology()


@pytest.mark.parametrize("names", ["new", "old", "both", "masks", "ids"])
def test_a_large_machine(names):
    shape = large(names=names)
    topology = read(shape.files())
    assert groups(topology) == shape.topology()
    assert topology.cores.masks.shape == (512, 16)


def test_a_large_machine_on_disk(tmp_path):
    shape = large(256)
    for path, text in shape.files().items():
        target = tmp_path / path.removeprefix("/sys/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    assert groups(read_topology(tmp_path)) == groups(read_topology(f"{tmp_path}/")) == shape.topology()


def test_what_a_list_has_told_is_not_read_again():
    tree = TextTree(large(1024).files())
    read_topology(tree)
    # A core: its list, its label. A die and an L3 of 16 threads: some more. Everything else: a few.
    assert tree.reads < 512 * 2 + 64 * 10 + 100


def test_a_machine_without_l3_is_asked_once_a_core():
    tree = TextTree(large(1024, l3="none").files())
    read_topology(tree)
    assert tree.reads < 512 * 6 + 100


# The CPUs


def test_no_machine():
    with pytest.raises(TopologyError) as caught:
        read_topology("/nowhere")
    assert caught.value.path == f"{CPU}/online"
    assert str(caught.value) == f"{CPU}/online is missing; expected a list of at least one CPU"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a list of at least one CPU"),
        ("\n", "a list of at least one CPU"),
        ("none", "a list of CPUs below 8192"),
        ("3-1", "a list of CPUs below 8192"),
        ("-1", "a list of CPUs below 8192"),
        ("0-8192", "a list of CPUs below 8192"),
        ("0-4294967295", "a list of CPUs below 8192"),
        ("0,\0,1", "a list of CPUs below 8192"),
        ("0-٣", "a list of CPUs below 8192"),
        ("0," * 40_000 + "0", "a list of CPUs below 8192"),
        (" " * 70_000 + "0", "a list of CPUs below 8192"),
        ("0\0\0", "a list of CPUs below 8192"),
    ],
)
def test_unknown_online_cpus(text, expected):
    with pytest.raises(TopologyError) as caught:
        read({f"{CPU}/online": text, f"{CPU}/cpu0/online": "1"})
    assert (caught.value.path, caught.value.expected) == (f"{CPU}/online", expected)
    assert caught.value.value.strip() == text.removesuffix("\0").strip()
    assert len(str(caught.value)) < 250


def test_without_the_online_file():
    topology = read(
        {
            f"{CPU}/cpu0/topology/core_id": "0",  # cannot be switched off
            f"{CPU}/cpu1/online": "0",
            f"{CPU}/cpu2/online": "1",
            f"{CPU}/cpu3/online": "?",
            f"{CPU}/cpu8192/online": "1",
            f"{CPU}/cpu03/online": "1",
            f"{CPU}/cpufreq/boost": "1",
        }
    )
    assert str(topology.online) == "0,2-3"
    assert any("online is missing" in note for note in topology.notes)


def test_present_and_possible_contain_what_is_online():
    topology = read(machine("0-3,9", present="0-3", possible="0-1"))
    assert str(topology.present) == str(topology.possible) == "0-3,9"
    topology = read(machine(present="0-4", possible="0-191", isolated="2-3\n"))
    assert (str(topology.present), str(topology.possible), topology.n_cpus) == ("0-4", "0-191", 192)
    assert str(topology.isolated) == "2-3"


@pytest.mark.parametrize(
    ("kernel_max", "last"), [("9999", 9999), ("1048575", 1_048_575), ("255", 8191), ("junk", 8191)]
)
def test_kernel_max(kernel_max, last):
    topology = read(machine(f"0,{last}", kernel_max=kernel_max))
    assert topology.online == CpuSet([0, last])
    with pytest.raises(TopologyError, match=f"a list of CPUs below {last + 1}"):
        read(machine(f"0,{last + 1}", kernel_max=kernel_max))


def test_a_kernel_max_beyond_all_bounds():
    topology = read(machine(kernel_max="4294967295"))
    assert f"{CPU}/kernel_max: '4294967295' is not a number up to 1048575; treated as absent" in topology.notes


# Each level


def test_nothing_but_cpus():
    topology = read(machine())
    assert lists(topology.cores) == {0: "0", 1: "1", 2: "2", 3: "3"}
    assert lists(topology.sockets) == lists(topology.dies) == lists(topology.numa_nodes) == {0: "0-3"}
    assert lists(topology.l3_caches) == {}
    assert topology.smt_enabled is False
    assert topology.memory_nodes == ()
    assert topology.notes == ("no CPU tells its socket; taken as one socket",)


def test_a_cpu_that_vanishes_while_it_is_read():
    files = large(8, package_ids={0: 3, 1: 7}).files()
    topology = read({path: text for path, text in files.items() if "/cpu1/" not in path})
    # Others still name it in their lists.
    assert lists(topology.sockets) == {3: "0-1,4-5", 7: "2-3,6-7"}
    files = {path: text.replace("0-1", "0") for path, text in files.items() if "/cpu1/" not in path}
    topology = read(files | {f"{CPU}/online": "0-4"})
    assert topology.sockets.group_of[1] == topology.dies.group_of[1] == topology.l3_caches.group_of[1] == -1
    assert topology.cores.cpuset(1) == CpuSet([1])
    assert "CPUs 1 do not tell their socket; they are in none" in topology.notes


def test_two_sockets_with_one_id():
    texts = {}
    for cpu in range(4):
        texts[f"{CPU}/cpu{cpu}/topology/package_cpus_list"] = "0-1" if cpu < 2 else "2-3"
        texts[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = "5"
    topology = read(machine() | texts)
    assert lists(topology.sockets) == {0: "0-1", 2: "2-3"}
    assert any("physical_package_id is not unique" in note for note in topology.notes)


def test_a_negative_package_id_beside_others():
    texts = {}
    for cpu, number in enumerate((7, 7, -1, -1)):
        texts[f"{CPU}/cpu{cpu}/topology/package_cpus_list"] = "0-1" if cpu < 2 else "2-3"
        texts[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = f"{number}\n"
    assert lists(read(machine() | texts).sockets) == {2: "2-3", 7: "0-1"}


def test_lists_that_contradict_each_other():
    topology = read(
        machine(
            cpu0__topology__core_cpus_list="0-1",
            cpu1__topology__core_cpus_list="1",
            cpu2__topology__core_cpus_list="1-2",
            cpu3__topology__core_cpus_list="0-2",
            cpu3__topology__thread_siblings_list="3",
        )
    )
    assert lists(topology.cores) == {0: "0-1", 2: "2", 3: "3"}
    assert "core of CPU 2: CPUs 1 of its list are in another one already" in topology.notes
    assert f"{CPU}/cpu3/topology/core_cpus_list: 0-2 is without CPU 3 itself; treated as absent" in topology.notes


def test_core_ids_repeat_from_place_to_place():
    texts = {}
    for cpu, (package, die, cluster, core) in enumerate(
        [(0, 0, 9, 0), (0, 0, 9, 0), (0, 0, 8, 0), (0, 1, 9, 0), (1, 0, 9, 0), (1, 0, 9, 1)]
    ):
        folder = f"{CPU}/cpu{cpu}/topology"
        texts[f"{folder}/physical_package_id"] = str(package)
        texts[f"{folder}/die_id"] = str(die)
        texts[f"{folder}/cluster_id"] = str(cluster)
        texts[f"{folder}/core_id"] = str(core)
    topology = read(machine("0-5") | texts)
    assert lists(topology.cores) == {0: "0-1", 2: "2", 3: "3", 4: "4", 5: "5"}
    assert topology.core_id.tolist() == [0, 0, 0, 0, 0, 1]
    assert lists(topology.dies) == {0: "0-2", 3: "3", 4: "4-5"}
    assert topology.die_id.tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("unknown", ["65535", "-1", None])
def test_clusters_without_data(unknown):
    texts = {}
    for cpu in range(4):
        texts[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = "0"
        texts[f"{CPU}/cpu{cpu}/topology/core_id"] = str(cpu // 2)
        if unknown is not None and cpu != 1:
            texts[f"{CPU}/cpu{cpu}/topology/cluster_id"] = unknown
    assert lists(read(machine() | texts).cores) == {0: "0-1", 2: "2-3"}


def test_a_die_stays_inside_its_socket():
    files = large(8).files()
    for cpu in range(8):
        files[f"{CPU}/cpu{cpu}/topology/die_cpus_list"] = "0-7\n"
    assert lists(read(files).dies) == {0: "0-1,4-5", 2: "2-3,6-7"}


def test_die_ids_are_used_if_unique():
    files = large(8).files()
    for cpu in range(8):
        files[f"{CPU}/cpu{cpu}/topology/die_id"] = "6" if cpu % 4 < 2 else "2"
        files[f"{CPU}/cpu{cpu}/topology/die_cpus_list"] = files[f"{CPU}/cpu{cpu}/topology/package_cpus_list"]
    assert lists(read(files).dies) == {2: "2-3,6-7", 6: "0-1,4-5"}


def test_meaningless_dies():
    texts = {f"{CPU}/cpu{cpu}/topology/die_id": "-1\n" for cpu in range(4)}
    texts |= {f"{CPU}/cpu{cpu}/topology/die_cpus_list": f"{cpu}\n" for cpu in range(4)}
    topology = read(machine() | texts)
    assert lists(topology.dies) == {0: "0-3"}
    assert topology.die_id.tolist() == [-1] * 4


def l3(cpu: int, index: int = 3, **texts: str) -> dict[str, str]:
    return {f"{CPU}/cpu{cpu}/cache/index{index}/{name}": text for name, text in texts.items()}


def test_an_l3_is_a_unified_cache_of_level_3():
    texts = machine("0-4")
    texts |= l3(0, 3, level="4\n", type="Unified\n", shared_cpu_list="0-4\n")
    texts |= l3(0, 1, level="3\n", type="Unified\n", shared_cpu_list="0,4\n", id="7\n")
    texts |= l3(0, 2, level="3\n", type="Instruction\n", shared_cpu_list="0-4\n")
    texts |= l3(1, 3, level="3\n", type="Data\n", shared_cpu_list="1\n")
    texts |= l3(2, 10, level="3\n", shared_cpu_list="2\n", id="4294967294\n")  # some arm64: no type; a large id
    texts |= l3(3, 3, level="three\n", type="Unified\n", shared_cpu_list="3\n")
    topology = read(texts)
    assert lists(topology.l3_caches) == {7: "0,4", 4294967294: "2"}


def test_an_empty_list_of_sharers_means_the_core():
    texts = machine(cpu0__topology__core_cpus_list="0,2", cpu1__topology__core_cpus_list="1,3")
    for cpu in range(4):
        texts |= l3(cpu, level="3", type="Unified", shared_cpu_list="\n")
    topology = read(texts)
    assert lists(topology.l3_caches) == {0: "0,2", 1: "1,3"}


def test_an_unknown_cache_id_is_none():
    texts = machine()
    for cpu in range(4):
        texts |= l3(cpu, level="3", type="Unified", shared_cpu_list="0-1" if cpu < 2 else "2-3", id="4294967295")
    topology = read(texts)
    assert lists(topology.l3_caches) == {0: "0-1", 2: "2-3"}


def test_low_power_cores_without_l3():
    texts = machine()
    for cpu in range(2):
        texts |= l3(cpu, level="3", type="Unified", shared_cpu_list="0-1", id="0")
    texts |= l3(2, 2, level="2", type="Unified", shared_cpu_list="2-3", id="1")
    topology = read(texts)
    assert lists(topology.l3_caches) == {0: "0-1"}
    assert topology.l3_caches.group_of.tolist() == [0, 0, -1, -1]


def test_numa_nodes_with_gaps_and_without_cpus():
    topology = read(
        machine()
        | {f"{NODE}/node8/cpulist": "0-1\n", f"{NODE}/node0/cpulist": "2\n", f"{NODE}/node254/cpulist": "\n"}
        | {f"{NODE}/node12/distance": "10\n", f"{NODE}/node3/cpulist": "4-7\n", f"{NODE}/node08/cpulist": "0-3"}
        | {f"{NODE}/nodes/cpulist": "0-3", f"{NODE}/has_cpu": "0,8\n"}
    )
    assert lists(topology.numa_nodes) == {0: "2", 8: "0-1"}
    assert topology.memory_nodes == (3, 12, 254)  # node 3 has offline CPUs only
    assert topology.numa_nodes.group_of.tolist() == [1, 1, 0, -1]
    assert "CPUs 3 are in no NUMA node" in topology.notes


def test_numa_nodes_that_tell_nothing():
    topology = read(machine() | {f"{NODE}/node0/cpulist": "?", f"{NODE}/node1/distance": "10\n"})
    assert lists(topology.numa_nodes) == {0: "0-3"}
    assert topology.memory_nodes == (1,)
    assert "no NUMA node tells its CPUs; taken as one node" in topology.notes


@pytest.mark.parametrize(
    ("control", "enabled"),
    [
        ("on", True),
        ("off", False),
        ("forceoff", False),
        ("notsupported", False),
        ("notimplemented", False),
        ("1", False),
        ("4", True),
        ("8\n", True),
        ("0", None),
        ("maybe", None),
        ("99999999999", None),
    ],
)
@pytest.mark.parametrize("core", ["0-1", "0"])
def test_smt(control, enabled, core):
    topology = read(machine("0-1", smt__control=control, cpu0__topology__core_cpus_list=core))
    by_cores = len(topology.cores) < 2
    assert topology.smt_enabled is (by_cores if enabled is None else enabled)
    assert any("smt/control" in note for note in topology.notes) is (enabled is None)


S, P, E = STANDARD, PERFORMANCE, EFFICIENCY


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ({}, [S, S, S, S]),
        ({"cpu_core": "0-1\n", "cpu_atom": "2-3\n"}, [P, P, E, E]),
        ({"cpu_core": "0\n", "cpu_atom": "1-2\n", "cpu_lowpower": "3\n"}, [P, E, E, E]),
        ({"cpu_core": "0-2\n", "cpu_atom": "\n"}, [P, P, P, S]),
        ({"cpu_atom": "3\n"}, [P, P, P, E]),
        ({"cpu_lowpower": "3\n"}, [P, P, P, E]),
        ({"cpu_core": "0-9\n", "cpu_atom": "3-5"}, [P, P, P, E]),
        ({"cpu_core": "junk", "cpu_atom": "junk"}, [S, S, S, S]),
        ({"cpu_core": "junk", "cpu_atom": "2-3\n"}, [P, P, E, E]),
    ],
)
def test_hybrid_x86(counters, expected):
    texts = {f"/sys/devices/{name}/cpus": text for name, text in counters.items()}
    topology = read(machine() | texts | {f"{CPU}/cpu{cpu}/cpu_capacity": "1024\n" for cpu in range(4)})
    assert topology.core_type.tolist() == expected


@pytest.mark.parametrize(
    ("capacities", "expected"),
    [
        ((1024, 1024, 1024, 1024), [S, S, S, S]),
        ((446, 446, 1024, 1024), [E, E, P, P]),
        ((718, 731, 997, 1024), [E, E, P, P]),  # boost bins in both kinds
        ((1024, 160, 512, 160), [P, E, P, E]),  # little, big and prime: the largest step counts
        ((980, 1000, 1024, 1010), [S, S, S, S]),  # favoured cores
        ((446, None, 1024, 1024), [S, S, S, S]),
        ((0, 446, 1024, 1024), [S, S, S, S]),
        (("much", 446, 1024, 1024), [S, S, S, S]),
    ],
)
def test_big_and_little_cores(capacities, expected):
    texts = {f"{CPU}/cpu{cpu}/cpu_capacity": f"{c}\n" for cpu, c in enumerate(capacities) if c is not None}
    assert read(machine() | texts).core_type.tolist() == expected


# Overlays


def test_an_overlay_has_the_last_word(tmp_path):
    shape = large(8, names="both")
    describe_files(shape, tmp_path)
    overlay = {
        # by an old name, by an id where the tree has lists, and a file that is there
        f"{CPU}/cpu5/topology/thread_siblings_list": "5\n",
        f"{CPU}/cpu6/topology/physical_package_id": "9\n",
        f"{CPU}/cpu7/topology/physical_package_id": "9\n",
        f"{CPU}/smt/control": "off\n",
        f"{NODE}/node40/cpulist": "\n",
    }
    topology = read_topology(tmp_path, overlay)
    assert lists(topology.cores) == {0: "0,4", 1: "1", 2: "2,6", 3: "3,7", 5: "5"}
    assert lists(topology.sockets) == {0: "0-1,4-5", 1: "2-3", 9: "6-7"}
    assert topology.smt_enabled is False
    assert 40 in topology.memory_nodes


def test_an_overlay_of_ids_invents_a_virtual_machine(tmp_path):
    describe_files(large(8), tmp_path)
    overlay = {f"{CPU}/online": "0-3,999"}
    for cpu in (0, 1, 2, 3, 999):
        overlay |= {
            f"{CPU}/cpu{cpu}/topology/physical_package_id": "7" if cpu else "3",
            f"{CPU}/cpu{cpu}/topology/core_id": str(cpu // 2),
            f"{CPU}/cpu{cpu}/topology/cluster_id": "4",
            f"{CPU}/cpu{cpu}/topology/die_id": "0",
            f"{CPU}/cpu{cpu}/cache/index3/level": "3",
            f"{CPU}/cpu{cpu}/cache/index3/id": str(10 + cpu // 3),
        }
    topology = read_topology(tmp_path, overlay)
    assert str(topology.possible) == "0-7,999"
    assert lists(topology.sockets) == {3: "0", 7: "1-3,999"}
    assert lists(topology.cores) == {0: "0", 1: "1", 2: "2-3", 999: "999"}
    assert lists(topology.l3_caches) == {10: "0-2", 11: "3", 343: "999"}


def describe_files(shape: Shape, folder: Path) -> None:
    for path, text in shape.files().items():
        target = folder / path.removeprefix("/sys/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def test_an_overlay_may_speak_of_cpus_that_cannot_be():
    overlay = {f"{CPU}/cpu{cpu}/topology/core_id": "1" for cpu in ("9999999", "5", "01", "x")}
    topology = read_topology(TextTree(machine()), overlay)
    assert str(topology.online) == "0-3"


# Garbage

GARBAGE = st.one_of(
    st.none(),
    st.text(max_size=40),
    st.binary(max_size=40).map(lambda data: data.decode("latin-1")),
    st.sampled_from(
        (
            *("", "\n", "\0", "-1", "0x10", "1e3", "+1", "1-0", "0-0:0/0", "0,,1", "on", "Unified", "ffffffff", "٣"),
            *("8191", "65535", "-2147483648", "2147483648", "4294967295", "18446744073709551616", "1" + "0" * 309),
            *("0-8191", "0-4294967295", "9" * 5000, "f" * 70_000, "0," * 40_000, ",".join(["ffffffff"] * 400)),
        )
    ),
    st.integers(-5, 300).map(str),
    st.lists(st.integers(0, 300), max_size=5).map(lambda cpus: str(CpuSet(cpus))),
)

MACHINES = {
    name: {f"/sys/{path}": text for path, text in describe.files(describe.load(name)) if not path.endswith("/")}
    for name in ("16em64t-4s2c2t-offlines", "20em64t-hybrid-1p6c2t+2ca4co1t", "64fake-4n2s2ca2c2t", "nvidia-dgx-gb10")
} | {"invented": large(32, names="both").files() | {"/sys/devices/cpu_core/cpus": "0-15", f"{CPU}/smt/control": "on"}}


def check(topology: Topology) -> None:
    """Check what holds of every topology."""
    online = np.zeros(topology.n_cpus, np.bool_)
    online[list(topology.online)] = True
    assert topology.online <= topology.present <= topology.possible
    assert topology.n_words * 64 >= topology.n_cpus > max(topology.possible)
    for name in LEVELS:
        level = getattr(topology, name)
        assert level.masks.shape == (len(level), topology.n_words)
        assert list(level.ids) == sorted(set(level.ids))
        members = np.zeros(topology.n_cpus, np.int64)
        for row in range(len(level)):
            cpus = list(level.cpuset(row))
            assert cpus
            assert (level.group_of[cpus] == row).all()
            members[cpus] += 1
        assert members.max(initial=0) <= 1
        assert not members[~online].any()
        assert ((level.group_of >= 0) == (members == 1)).all()
    assert (topology.cores.group_of >= 0).tolist() == online.tolist()
    assert topology.sockets.masks.any()
    assert not set(topology.memory_nodes) & set(topology.numa_nodes.ids)
    assert len(topology.notes) <= 101
    assert all(len(note) < 100_000 and "\n" not in note for note in topology.notes)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(sorted(MACHINES)))
def test_garbage_in_some_files(data, name):
    texts = dict(MACHINES[name])
    for path in data.draw(st.lists(st.sampled_from(sorted(texts)), min_size=1, max_size=6)):
        text = data.draw(GARBAGE)
        if text is None:
            texts.pop(path, None)
        else:
            texts[path] = text
    try:
        topology = read(texts)
    except TopologyError as refusal:
        error = refusal
    else:
        check(topology)
        return
    assert error.path == f"{CPU}/online"
    assert error.value in texts[error.path]
    assert len(str(error)) < 1000


@pytest.mark.parametrize("name", sorted(MACHINES))
@pytest.mark.parametrize(
    "text", ["", "\0", "junk", "-1", "0-4294967295", "9" * 100_000, "\xff\xfe\0\x01", "0," * 40_000]
)
def test_garbage_in_every_file_of_one_kind(name, text):
    kinds = sorted({path.rpartition("/")[2] for path in MACHINES[name]} - {"online"})
    for kind in kinds:
        texts = {path: text if path.endswith(f"/{kind}") else old for path, old in MACHINES[name].items()}
        check(read(texts))
    everything = {path: old if path == f"{CPU}/online" else text for path, old in MACHINES[name].items()}
    if f"{CPU}/online" in everything:
        check(read(everything))


def test_notes_are_bounded():
    files = large(1024).files()
    topology = read({path: "junk" if path.endswith("core_id") else text for path, text in files.items()})
    assert len(topology.notes) == 101
    assert topology.notes[-1] == f"and {512 - 100} more"
    assert (
        topology.notes[0] == f"{CPU}/cpu0/topology/core_id: 'junk' is not a number up to 2147483647; treated as absent"
    )


@example("\n0-1\n\n")
@example("0-1\0")
@given(st.text(alphabet=" \t\n\r", max_size=3).map(lambda space: f"{space}0-1{space}"))
def test_white_space_around_a_text(text):
    assert str(read({f"{CPU}/online": text}).online) == "0-1"
