# SPDX-License-Identifier: Apache-2.0
"""The box's cgroups show what a kernel's would, and the driver reads them as it reads those."""

from __future__ import annotations

import pytest

from driver.hostcgroups import HostCgroups
from driver.sandbox.cgrouptree import CgroupTree
from fastcpu import CpuSet

POD = "/kubepods/burstable/pod1"
CONTAINER = f"{POD}/c"
ALL = CpuSet(range(8))


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def version(request):
    return request.param


@pytest.fixture
def tree(tmp_path, version):
    return CgroupTree(tmp_path / "cgroup", ALL, version)


@pytest.fixture
def host(tree, tmp_path):
    return HostCgroups(tmp_path / "cgroup")


def test_a_new_cgroup_has_all_that_the_one_above_it_has(tree, host):
    tree.make(POD)
    tree.write("/kubepods", cpus("0-3"))
    tree.make("/kubepods/besteffort/pod2")
    assert tree.effective("/kubepods/besteffort/pod2") == host.pods_limit().cpus == cpus("0-3")
    tree.remove("/kubepods/besteffort/pod2")
    assert host.cpus("/kubepods/besteffort/pod2") is None


def test_what_the_one_above_has_not_is_refused_or_cut(tree, host, version):
    tree.make(CONTAINER)
    tree.confine("/kubepods", cpus("0-3"))
    assert host.parent_cpus(CONTAINER) == cpus("0-3")
    if version == 1:
        with pytest.raises(PermissionError):
            tree.write(CONTAINER, cpus("3-4"))
    else:
        tree.write(CONTAINER, cpus("3-4"))
        assert host.cpus(CONTAINER) == cpus("3")
        tree.write(CONTAINER, cpus("4"))
    assert tree.effective(CONTAINER) == host.cpus(CONTAINER) == cpus("0-3")


def test_what_was_taken_comes_back_by_itself_in_version_2_only(tree, version):
    tree.make(CONTAINER)
    tree.confine("/kubepods", cpus("0-3"))
    tree.write("/kubepods", ALL)
    assert tree.effective(CONTAINER) == (cpus("0-3") if version == 1 else ALL)
