# SPDX-License-Identifier: Apache-2.0
"""The cgroups that containers are in allow fewer CPUs than are online, as the kernel leaves it in cgroup v1 after a CPU
was offline.
"""

from __future__ import annotations

from pathlib import Path

from driver.hostcgroups import HostCgroups
from e2e import kernel, narrowing


async def test_containers_get_what_the_cgroup_of_all_pods_has(node):
    narrowing.confine(node.pods_cgroup, "0")
    await node.start_driver()
    container = await node.cri.run(await node.pod(), "main")
    assert await node.cpus(container) == "0"
    allows = f"cgroup {node.containerd.cgroup_parent}/kubepods allows only CPUs 0"
    await node.wait_remarked(f"kubepods: {allows}")
    assert node.driver.log.count("kubepods allows only CPUs 0") == 1
    claim = node.add_claim("1")
    refused = f"CPU 1 is not allowed to pods: {allows}"
    assert refused in await node.why_not_prepared(claim)

    narrowing.widen(node.pods_cgroup)
    await node.wait_cpus(container, cpus="0-1")
    await node.wait_remarked()
    await node.prepare(claim)
    await node.wait_cpus(container, cpus="0")


async def test_a_container_of_a_claim_that_has_lost_a_cpu_gets_it_back(node):
    await node.start_driver()
    pod = await node.pod()
    claim = node.add_claim("0-1", pod)
    container = await node.cri.run(pod, "main", cdi=await node.prepare(claim))
    narrowing.confine(node.pods_cgroup, "0")
    assert await node.cpus(container) == "0"
    await node.wait_remarked("kubepods allows only CPUs 0")
    narrowing.widen(node.pods_cgroup)
    await node.wait_cpus(container, cpus="0-1")


async def test_a_container_sees_nothing_of_the_host_s_cgroups_in_their_usual_place(node):
    await node.start_driver()
    pid = await node.cri.pid(await node.cri.run(await node.pod(), "main"))
    seen_there = HostCgroups(Path(f"/proc/{pid}/root/sys/fs/cgroup"))
    assert not seen_there.readable
    path = kernel.cgroup_path(pid)
    assert HostCgroups(Path("/sys/fs/cgroup")).cpus(path) == kernel.cpuset(pid)
    assert seen_there.cpus(path) is seen_there.parent_limit(path) is None
    assert not seen_there.readable


async def test_what_nobody_can_read_is_told_when_the_kernel_refuses(node):
    await node.start_driver("--cgroup-root=/nowhere")
    container = await node.cri.run(await node.pod("web"), "main")
    claim = node.add_claim("1")
    await node.prepare(claim)
    await node.wait_cpus(container, cpus="0")
    narrowing.confine(node.pods_cgroup, "0")
    assert await node.unprepare(claim) == ""
    await node.wait_remarked("updates: some containers cannot be given their CPUs")
    assert "a container cannot be given its CPUs" in node.driver.log
