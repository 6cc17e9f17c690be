# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest

from driver.hostcgroups import HostCgroups, Limit, split_cgroups_path
from fastcpu import CpuSet

ID = "3f6c1d2e"
POD = "pod0f0c1d2e_6b1a"
CGROUPFS = f"/kubepods/burstable/{POD}/{ID}"
SYSTEMD = f"kubepods-burstable-{POD}.slice:cri-containerd:{ID}"
FOLDERS = {
    CGROUPFS: ["kubepods", "burstable", POD, ID],
    SYSTEMD: [
        "kubepods.slice",
        "kubepods-burstable.slice",
        f"kubepods-burstable-{POD}.slice",
        f"cri-containerd-{ID}.scope",
    ],
}


class Tree:
    """A cgroup tree as one of the versions shows it."""

    def __init__(self, root, version):
        self.root = root
        self.hierarchy = root / "cpuset" if version == 1 else root
        self.file = "cpuset.effective_cpus" if version == 1 else "cpuset.cpus.effective"
        self.hierarchy.mkdir(parents=True)
        if version == 2:
            (root / "cgroup.controllers").write_text("cpuset cpu\n")
        else:
            (root / "unified").mkdir()
            (root / "unified" / "cgroup.controllers").write_text("\n")

    def add(self, names, cpus):
        """Make the cgroups on a way down, and say what the last one allows."""
        folder = self.hierarchy.joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file).write_text(f"{cpus}\n")


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def tree(request, tmp_path):
    tree = Tree(tmp_path / "cgroup", request.param)
    tree.add([], "0-7")
    return tree


@pytest.fixture
def host(tree):
    return HostCgroups(tree.root)


@pytest.mark.parametrize("path", [CGROUPFS, SYSTEMD], ids=["cgroupfs", "systemd"])
def test_a_containers_cpus_are_those_of_its_cgroup(tree, host, path):
    assert host.cpus(path) is None
    tree.add(FOLDERS[path], "2-3")
    assert host.cpus(path) == CpuSet([2, 3])
    tree.add(FOLDERS[path], "2")
    assert host.cpus(path) == CpuSet([2]), "nothing is kept of what was read"
    tree.add(FOLDERS[path], "")
    assert host.cpus(path) == CpuSet()


@pytest.mark.parametrize("path", [CGROUPFS, SYSTEMD], ids=["cgroupfs", "systemd"])
@pytest.mark.parametrize("narrowed", range(3))
def test_the_cgroup_that_narrows_a_container_is_named(tree, host, path, narrowed):
    above = FOLDERS[path][:-1]
    for depth in range(len(above)):
        tree.add(above[: depth + 1], "0" if depth >= narrowed else "0-7")
    assert host.parent_cpus(path) == CpuSet([0])
    assert host.parent_limit(path) == Limit(cpus=CpuSet([0]), cgroup="/" + "/".join(above[: narrowed + 1]))


def test_what_nothing_narrows_is_as_wide_as_the_machine(tree, host):
    for depth in range(3):
        tree.add(FOLDERS[CGROUPFS][: depth + 1], "0-7")
    assert host.parent_limit(CGROUPFS) == Limit(cpus=CpuSet(range(8)), cgroup="/")


@pytest.mark.parametrize("name", ["kubepods", "kubepods.slice"])
def test_the_cgroup_of_all_pods_is_found_by_its_name(tree, host, name):
    assert host.pods_limit() is None
    assert not host.readable
    tree.add([name], "0-3")
    assert host.readable
    assert host.pods_limit() == Limit(cpus=CpuSet(range(4)), cgroup=f"/{name}")


def test_the_host_is_seen_where_a_containers_cgroup_is(tree, host):
    path = "/elsewhere/pod/3f6c"
    assert (host.cpus(path), host.readable) == (None, False)
    tree.add(["elsewhere", "pod", "3f6c"], "1")
    assert (host.cpus(path), host.readable) == (CpuSet([1]), True)


def test_a_pod_that_sees_only_its_own_cgroup_sees_nothing_of_the_host(tree, host):
    tree.add([], "4-5")
    assert not host.readable
    assert host.cpus(CGROUPFS) is host.parent_cpus(CGROUPFS) is host.parent_limit(CGROUPFS) is None


def test_a_cgroup_without_the_controller_is_held_to_what_the_next_above_is(tmp_path):
    tree = Tree(tmp_path / "cgroup", 2)
    tree.add([], "0-7")
    tree.add(["kubepods"], "0-3")
    tree.hierarchy.joinpath(*FOLDERS[CGROUPFS]).mkdir(parents=True)
    assert HostCgroups(tree.root).cpus(CGROUPFS) == CpuSet(range(4))


def test_an_old_kernel_says_only_what_was_written(tmp_path):
    tree = Tree(tmp_path / "cgroup", 1)
    tree.file = "cpuset.cpus"
    tree.add(FOLDERS[CGROUPFS], "2-3")
    assert HostCgroups(tree.root).cpus(CGROUPFS) == CpuSet([2, 3])


def test_a_root_that_is_no_cgroup_tree_says_nothing(tmp_path):
    for root in (tmp_path, tmp_path / "missing", tmp_path / "nul\0"):
        assert HostCgroups(root).cpus(CGROUPFS) is None
        assert not HostCgroups(root).readable


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/a/b", ["a", "b"]),
        ("//a/./b/", ["a", "b"]),
        (":crio:1", ["system.slice", "crio-1.scope"]),
        ("-.slice:crio:1", ["crio-1.scope"]),
        ("a.slice::1", ["a.slice", "1.scope"]),
        ("a.slice:x:b.slice", ["a.slice", "b.slice"]),
        ("a-b_c.slice:x:1", ["a.slice", "a-b_c.slice", "x-1.scope"]),
        ("/a:b:c", ["a:b:c"]),
        ("/" + "/".join("a" * 32), ["a"] * 32),
    ],
)
def test_both_spellings_name_a_way_down(path, names):
    assert split_cgroups_path(path) == names


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/./",
        "a/b",
        "a:b",
        "a.slice:b:c:d",
        "a.slice:b:",
        "/kubepods/../secret",
        "/..",
        "..:a:b",
        "../a.slice:x:1",
        "a.slice:x:../1",
        "a.slice:../x:1",
        "a.slice:x/y:1",
        "a:x:1",
        ".slice:x:1",
        "a--b.slice:x:1",
        "-a.slice:x:1",
        "a-.slice:x:1",
        "-" * 100_000 + ".slice:x:1",
        "a" + "-a" * 120 + ".slice:x:1",
        "/a\0b",
        "/" + "a" * 256,
        "/" + "é" * 128,
        "/" + "a/" * 40,
        "/" * 5000,
        "/a\udc80/b",
    ],
)
def test_what_names_no_cgroup_is_not_looked_for(tree, host, path):
    tree.add(["kubepods"], "0-1")
    tree.add(["secret"], "0-1")
    assert host.cpus(path) is host.parent_cpus(path) is host.parent_limit(path) is None


def test_no_link_leads_out_of_the_hierarchy(tree, host, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / tree.file).write_text("5\n")
    (tree.hierarchy / "link").symlink_to(outside)
    assert host.cpus("/link") is None
    (tree.hierarchy / "inside").mkdir()
    (tree.hierarchy / "inside" / tree.file).symlink_to(outside / tree.file)
    assert host.cpus("/inside") != CpuSet([5])


@pytest.mark.parametrize("content", ["0-", "x", "0-7\n0-7", "1," * 50_000 + "1", "99999999"])
def test_what_no_kernel_writes_is_not_taken_for_cpus(tmp_path, content):
    tree = Tree(tmp_path / "cgroup", 1)
    tree.add(["a"], content)
    assert HostCgroups(tree.root).cpus("/a") is None


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path):
    tree = Tree(tmp_path / "cgroup", 1)
    tree.add([], "0-7")
    (tree.hierarchy / "a").mkdir()
    os.mkfifo(tree.hierarchy / "a" / tree.file)
    assert not HostCgroups(tree.root).cpus("/a")


def test_a_look_leaves_no_file_open(tree, host):
    tree.add(FOLDERS[CGROUPFS], "2-3")
    host.cpus(CGROUPFS)
    before = len(os.listdir("/proc/self/fd"))
    for path in (CGROUPFS, SYSTEMD, "/kubepods", "/a\udc80"):
        host.cpus(path)
        host.parent_limit(path)
    assert len(os.listdir("/proc/self/fd")) == before
