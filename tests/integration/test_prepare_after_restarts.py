# SPDX-License-Identifier: Apache-2.0
"""What was prepared keeps its answer and its CPUs whatever the driver is started with next; and the rules of `machine`.

Every start here follows a kill -9. Rule 7 of preparing comes before the rules about devices and CPUs.
"""

from __future__ import annotations

import pytest

from driver.sandbox.machine import MachineShape, write_machine

NUMA_NODES = {"groupBy": "numanode", "reservedCPUs": "0,32"}


async def refused(node, **claim):
    """Prepare a claim that is refused at once, and return why."""
    [error] = await node.errors(node.add(**claim))
    assert error
    return error


async def test_answers_stay_the_same_over_restarts_with_another_configuration(node):
    await node.start(NUMA_NODES)
    two_groups = node.add("2-5,8", results=[node.result("4"), node.result("1", "cpudevnuma001")])
    one_group = node.add("16-17", device="cpudevnuma002")
    changed = node.add("20", device="cpudevnuma002")
    first = await node.prepare(two_groups, one_group)
    assert await node.errors(changed) == [""]
    held = {two_groups.uid: "2-5,8", one_group.uid: "16-17", changed.uid: "20"}
    files = node.files()
    contents = {name: (node.box.folder / name).read_bytes() for name in files if name.endswith(".json")}
    node.change(changed, config=[node.config("21")])

    # Another grouping, and some of the CPUs are reserved now.
    await node.restart({"groupBy": "machine", "reservedCPUs": "3,16"})
    assert await node.prepare(two_groups, one_group) == first
    assert await node.agreed() == held
    [error] = await node.errors(changed)
    assert "the claim is prepared with CPUs 20 for another allocation than it has now" in error
    metrics = await node.metrics()
    assert metrics['record_mismatches_total{reason="reserved"}'] == 2
    assert metrics['record_mismatches_total{reason="device"}'] == 3
    assert metrics['record_mismatches_total{reason="offline"}'] == 0
    assert metrics["available_cpus"] == 64 - 2 - 6  # 3 and 16 are both reserved and taken
    warnings = [line for line in node.log() if line["msg"] == "a claim holds what it would not get today"]
    assert {line["uid"] for line in warnings} == {two_groups.uid, one_group.uid, changed.uid}
    assert {name: (node.box.folder / name).read_bytes() for name in contents} == contents
    # Their CPUs go to nobody else.
    error = await refused(node, cpuset="4-6", cpus="9", device="cpudevmachine")
    assert f"CPUs 4-5 are held by claim {two_groups.uid}" in error

    # Another machine: half of the CPUs, and 17 is gone.
    tree = write_machine(node.box.folder / "smaller", MachineShape(sockets=1, numa_nodes=1, cpus=16))
    await node.restart({"groupBy": "socket"}, [f"--sysfs-root={tree}"])
    assert await node.prepare(two_groups, one_group) == first
    assert node.files() == files
    metrics = await node.metrics()
    assert metrics["resource_claims_active"] == 3
    assert metrics['record_mismatches_total{reason="offline"}'] == 2
    error = await refused(node, cpuset="4-6", cpus="9", device="cpudevsocket000")
    assert f"CPUs 4-5 are held by claim {two_groups.uid}" in error

    # And back to where it began, with the CDI folder in memory, as after a reboot.
    for path in node.cdi_dir.iterdir():
        path.unlink()
    await node.restart(NUMA_NODES)
    assert await node.agreed() == held
    assert await node.prepare(two_groups, one_group) == first
    assert {name: (node.box.folder / name).read_bytes() for name in contents} == contents
    metrics = await node.metrics()
    assert sum(value for name, value in metrics.items() if name.startswith("record_mismatches_total")) == 0
    await node.release_all()
    assert await node.errors(node.add("2-5"), changed) == ["", ""]


async def test_the_whole_machine_as_one_device(node):
    await node.start({"groupBy": "machine", "reservedCPUs": "0"})

    def machine(cpus, request="cpus"):
        return node.result(str(cpus), "cpudevmachine", request)

    # One device, and count 1 only: of the request, or of the sub-request that was chosen.
    for request, spec in (
        ("cpus", {"cpus": {"count": 2}}),
        ("cpus/two", {"cpus/two": {"count": 2}, "cpus/one": {"count": 1}}),
    ):
        results = [machine(1, request), machine(1, request)]
        error = await refused(node, results=results, configs=[node.config("2-3")], spec=spec)
        assert f'request "{request}" has count 2, but the machine is one device' in error
        assert "expected count 1, and a request of its own for each further cpuset" in error
    error = await refused(node, cpuset="2-70", cpus="69", device="cpudevmachine")
    assert "CPUs 64-70 are not online on this node" in error
    error = await refused(node, cpuset="0-3", device="cpudevmachine")
    assert "CPU 0 is reserved on this node; cpudevmachine has CPUs 1-63" in error
    error = await refused(node, cpuset="2-3", device="cpudevnuma000")
    assert "no such device on this node, where groupBy: machine publishes cpudevmachine" in error
    assert node.files() == []

    good = [
        # Across all topology.
        node.add("7-8,39,63", device="cpudevmachine"),
        # Another sub-request has count 2, but was not chosen.
        node.add(
            results=[machine(2, "cpus/one")],
            configs=[node.config("2-3", "cpus")],
            spec={"cpus/one": {"count": 1}, "cpus/two": {"count": 2}},
        ),
        # Two requests, each of count 1.
        node.add(
            results=[machine(2, "a"), machine(1, "b")],
            configs=[node.config("10-11", "a"), node.config("12", "b")],
            spec={"a": {"count": 1}},
        ),
    ]
    assert await node.errors(*good) == ["", "", ""]
    assert await node.agreed() == {good[0].uid: "7-8,39,63", good[1].uid: "2-3", good[2].uid: "10-12"}
    await node.release_all()


@pytest.mark.parametrize("group_by", ["socket", "l3cache"])
async def test_other_groupings_have_the_same_boundary(node, group_by):
    await node.start({"groupBy": group_by})
    device, inside, outside, other = {
        "socket": ("cpudevsocket001", "16-31,48-63", "15-16", "cpudevsocket000"),
        "l3cache": ("cpudevl3cache003", "24-31,56-63", "23-24", "cpudevl3cache002"),
    }[group_by]
    error = await refused(node, cpuset=outside, device=device)
    assert f"CPU {outside[:2]} is of {other}, not of the devices allocated to the request" in error
    claim = node.add(inside, device=device)
    assert await node.errors(claim) == [""]
    assert await node.agreed() == {claim.uid: inside}
