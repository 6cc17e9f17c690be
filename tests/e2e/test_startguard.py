# SPDX-License-Identifier: Apache-2.0
"""No container with a claim runs anywhere else, whatever has become of the driver.

A runtime goes on without a plugin that is dead, hung or late. Where the driver is a validator, the creation in which
the runtime notices fails; every later one is left to the start guard.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from driver.sandbox.machine import MachineShape, write_machine
from e2e import kernel, programs
from e2e.cri import CriError
from e2e.node import EVERYTHING, Node
from fastcpu import CpuSet


async def refused(node, pod, name, devices):
    """Create and start a container of claims until the start guard refuses it, and return the errors on the way."""
    errors = []
    for attempt in range(2, 6):
        try:
            container = await node.cri.create(pod, name, cdi=devices, attempt=attempt)
        except CriError as error:
            if "validator" not in str(error):
                raise
            errors.append(str(error))
            continue
        errors.append(await node.why_not_started(container))
        assert await node.cri.wait_ended(container) == 128
        await node.cri.remove(container)
        return errors
    raise AssertionError(f"the runtime refuses all by itself: {errors}")


def guard_says(error, allowed):
    """Check that an error of the runtime has the guard's line, which names both sets."""
    said = f"the container would run on CPUs {EVERYTHING}, but its claims allow CPUs {allowed} only"
    assert said in error
    return True


async def test_driver_killed(node):
    await node.start_driver()
    shared = await node.cri.run(await node.pod(), "main")
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    running = await node.cri.run(pod, "running", cdi=devices)
    await node.driver.kill9()
    for _ in range(2):
        assert guard_says((await refused(node, pod, "main", devices))[-1], "1")
    assert [await node.cpus(running), await node.cpus(shared)] == ["1", "0"]
    await node.start_driver()
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices)) == "1"


async def test_driver_stopped(node):
    await node.start_driver()
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    node.driver.send_signal(signal.SIGSTOP)
    errors = await refused(node, pod, "main", devices)
    assert len(errors) == 2, "the creation in which the answer came too late was not refused"
    assert guard_says(errors[-1], "1")
    stray = await node.cri.run(await node.pod(), "main")
    assert await node.cpus(stray) == str(EVERYTHING)
    node.driver.send_signal(signal.SIGCONT)
    await node.until(node.is_connected_again, "the driver has been connected again")
    await node.wait_cpus(stray, cpus="0")
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices)) == "1"


async def test_two_claims_in_one_container(node, tmp_path):
    # With the CPUs of this machine alone, two claims could leave nothing that the guard might refuse.
    cpus = max(EVERYTHING) + 3
    node.box.sysfs_root = write_machine(
        tmp_path / "sys", MachineShape(sockets=1, numa_nodes=1, cpus=cpus, threads_per_core=1)
    )
    absent = cpus - 1
    await node.start_driver(managed=CpuSet([1, absent]), of=CpuSet(range(cpus)))
    pod = await node.pod()
    devices = [device for held in ("1", absent) for device in await node.prepare(node.add_claim(str(held), pod))]
    await node.driver.kill9()
    assert guard_says((await refused(node, pod, "main", devices))[-1], f"1,{absent}")
    assert guard_says((await refused(node, pod, "one", devices[:1]))[-1], "1")


async def test_claim_of_a_driver_without_a_guard(node):
    await node.start_driver("--start-guard=false")
    pod = await node.pod()
    claim = node.add_claim("1", pod)
    devices = await node.prepare(claim)
    running = await node.cri.run(pod, "running", cdi=devices)
    # Before the upgrade nothing helps a claim whose driver is dead, which is why there is a guard.
    await node.driver.kill9()
    stray = await node.run_unnoticed(pod, "stray", cdi=devices)
    assert await node.cpus(stray) == str(EVERYTHING)

    await node.start_driver()
    await node.wait_cpus(stray, cpus="1")
    assert await node.cpus(running) == "1"
    later = node.add_claim("0", pod)
    later_devices = await node.prepare(later)
    await node.driver.kill9()
    assert guard_says((await refused(node, pod, "main", devices))[-1], "1")
    assert guard_says((await refused(node, pod, "other", later_devices))[-1], "0")
    await node.start_driver()
    assert await node.cpus(await node.cri.run(pod, "main", cdi=devices)) == "1"


async def test_claim_that_dra_driver_cpu_prepared(node):
    claim_uid = "2b1f7a52-60a5-4b49-8f0e-4a40f3e9b2d7"
    spec = {
        "cdiVersion": "0.8.0",
        "kind": "dra.k8s.io/cpu",
        "devices": [{"name": f"claim-{claim_uid}", "containerEdits": {"env": [f"DRA_CPUSET_{claim_uid}=1"]}}],
    }
    path = node.box.cdi_dir / f"dra.k8s.io-cpu_claim-{claim_uid}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(spec))
    temporary.rename(path)
    devices = [f"dra.k8s.io/cpu=claim-{claim_uid}"]
    pod = await node.pod()
    await node.start_driver()
    container = await node.cri.run(pod, "main", cdi=devices)
    assert await node.cpus(container) == "1"
    assert await node.cpus(await node.cri.run(await node.pod(), "main")) == "0"
    await node.driver.kill9()
    assert guard_says((await refused(node, pod, "other", devices))[-1], "1")


async def test_guard_of_another_version(node):
    await node.start_driver()
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    await node.driver.kill9()
    # An older one that lets everything in, in use while it is replaced.
    guard = node.box.kubelet.plugins_dir / "dra.cpu/start-guard"
    older = guard.with_name("older")
    older.write_text("#!/bin/sh\nexit 0\n")
    older.chmod(0o755)
    older.replace(guard)
    stray = await node.run_unnoticed(pod, "stray", cdi=devices)
    assert await node.cpus(stray) == str(EVERYTHING)
    await node.cri.stop(stray)
    await node.start_driver()
    await node.driver.kill9()
    assert guard_says((await refused(node, pod, "main", devices))[-1], "1")


async def test_guard_uninstalled(node):
    await node.start_driver()
    pod = await node.pod()
    devices = await node.prepare(node.add_claim("1", pod))
    guard = node.box.kubelet.plugins_dir / "dra.cpu/start-guard"
    os.unlink(guard)
    container = await node.cri.create(pod, "main", cdi=devices)
    assert str(guard) in await node.why_not_started(container)


def notes(node):
    return os.listdir(node.box.kubelet.plugins_dir / "dra.cpu/guard-notes")


def told(node):
    return [line for line in node.driver.log.splitlines() if "started on fewer CPUs than" in line]


@pytest.mark.parametrize("version", [programs.CURRENT, *programs.OLDER])
async def test_runtime_with_a_narrower_affinity(clean_machine, version):
    async with Node.open(programs.build(programs.CONTAINERDS[version]), cpus="0") as node:
        await node.start_driver()
        pod = await node.pod()
        claim = node.add_claim("0-1", pod)
        devices = await node.prepare(claim)
        container = await node.cri.run(pod, "main", cdi=devices)
        pid = await node.cri.pid(container)
        assert kernel.cpuset(pid) == CpuSet([0, 1])
        if kernel.allowed(pid) == CpuSet([0, 1]):
            pytest.skip("this machine's runc, or its kernel, lets no container inherit the runtime's affinity")
        assert kernel.allowed(pid) == CpuSet([0])
        assert notes(node) == [container]
        await node.wait_logged("started on fewer CPUs than its claims hold")
        [line] = told(node)
        assert f'container="container main of pod default/{pod.name}" id={container} cpus=0 claimed=0-1' in line
        assert "level=WARNING" in line

        await node.driver.kill9()
        again = len(told(node))
        await node.start_driver()
        await node.until(lambda: is_told(node, living=1), "the new driver tells of it")
        assert len(told(node)) == again + 1
        await node.cri.end(pod)
        await node.until(lambda: is_told(node, living=0), "it has ended")
        assert await node.unprepare(claim) == ""


async def is_told(node, *, living):
    metrics = await node.metrics()
    return (metrics["containers_on_fewer_cpus"], metrics["starts_on_fewer_cpus_total"]) == (living, 1)


async def test_containers_on_all_of_their_cpus_are_not_noted(node):
    await node.start_driver()
    pod = await node.pod()
    both = await node.cri.run(pod, "both", cdi=await node.prepare(node.add_claim("0-1", pod)))
    assert await node.cpus(both) == "0-1"
    assert notes(node) == []
    assert told(node) == []
