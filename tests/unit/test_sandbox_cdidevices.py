# SPDX-License-Identifier: Apache-2.0
"""What CDI devices bring into a container of the box, and what the start guard would make of it."""

from __future__ import annotations

import json

import pytest

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.cdi import CdiDirectory
from driver.names import ClaimUID, cdi_device_id
from driver.sandbox.cdidevices import CdiDevices
from driver.sandbox.guardmodel import run_guard_hooks
from driver.sandbox.plugins import PreparedDevice
from driver.sandbox.podcontainers import PodContainers
from driver.sandbox.runtime import ContainerRuntime, RefusedError
from fastcpu import CpuSet


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "dra.cpu" / "start-guard"
    path.parent.mkdir()
    path.touch(mode=0o755)
    return path


@pytest.fixture
def claims(tmp_path, program):
    """Write the specs of claims as the driver does."""

    def write(**cpus):
        def hook(uid, cpus):
            args = ["dracpu-start-guard", "v1", uid, str(cpus)]
            return {"hookName": "createRuntime", "path": str(program), "args": args}

        directory = CdiDirectory(tmp_path / "cdi", hook)
        for uid, text in cpus.items():
            directory.write_now(ClaimUID(uid), CpuSet.parse(text))

    return write


def container(*uids, env=()):
    made = nri.Container(env=env)
    made.CDI_devices.extend(nri.CDIDevice(name=cdi_device_id(ClaimUID(uid))) for uid in uids)
    return made


def test_devices_bring_variables_and_hooks(tmp_path, claims, program):
    claims(a="2-5", b="8")
    made = container("b", "a", "a", env=["PATH=/bin", "DRA_CPUSET_a=0-7", "X"])
    CdiDevices(tmp_path / "cdi").inject(made)
    assert list(made.env) == ["PATH=/bin", "DRA_CPUSET_a=2-5", "X", "DRA_CPUSET_b=8"]
    assert [(hook.path, list(hook.args)[2:]) for hook in made.hooks.create_runtime] == [
        (str(program), ["b", "8"]),
        (str(program), ["a", "2-5"]),
    ]


def test_devices_that_are_missing_or_stand_twice_are_refused(tmp_path, claims):
    claims(a="2-5")
    folder = tmp_path / "cdi"
    (folder / "broken.json").write_text("{")
    (folder / "list.json").write_text("[]")
    CdiDevices(folder).inject(container("a"))
    with pytest.raises(RefusedError, match=r"unresolvable CDI devices dra.k8s.io/cpu=claim-b"):
        CdiDevices(folder).inject(container("a", "b"))
    twice = {"kind": "dra.k8s.io/cpu", "devices": [{"name": "claim-a", "containerEdits": {"env": ["A=1"]}}]}
    (folder / "twice.json").write_text(json.dumps(twice))
    with pytest.raises(RefusedError, match=r"unresolvable CDI devices dra.k8s.io/cpu=claim-a"):
        CdiDevices(folder).inject(container("a"))


@pytest.mark.parametrize(
    ("uids", "cpus", "refusal"),
    [
        ((), "0-7", None),
        (("a",), "2-5", None),
        (("a",), "3", None),
        (("a", "b"), "2-5,8", None),
        (("a",), "2-6", r"createRuntime hook #0: exit status 1, .*CPUs 2-6, but its claims allow CPUs 2-5 only"),
        (("a", "b"), "0-15", r"CPUs 0-15, but its claims allow CPUs 2-5,8 only"),
    ],
)
def test_the_guard_allows_what_the_claims_allow(tmp_path, claims, uids, cpus, refusal):
    claims(a="2-5", b="8")
    made = container(*uids)
    CdiDevices(tmp_path / "cdi").inject(made)
    if refusal is None:
        run_guard_hooks(made, CpuSet.parse(cpus))
    else:
        with pytest.raises(RefusedError, match=refusal):
            run_guard_hooks(made, CpuSet.parse(cpus))


def test_a_hook_without_its_program_or_of_another_version_refuses(tmp_path, claims, program):
    claims(a="2-5")
    made = container("a")
    CdiDevices(tmp_path / "cdi").inject(made)
    made.hooks.create_runtime[0].args[1] = "v9"
    with pytest.raises(RefusedError, match="is malformed: expected dracpu-start-guard v1 UID cpulist"):
        run_guard_hooks(made, CpuSet.parse("2-5"))
    program.chmod(0o644 & ~0o111)
    if not program.stat().st_mode & 0o111:
        program.unlink()
    with pytest.raises(RefusedError, match=r"fork/exec \S+/start-guard: no such file"):
        run_guard_hooks(made, CpuSet.parse("2-5"))


# The containers of a pod


def device(cdi_id, *requests):
    return PreparedDevice(request_names=requests, pool="p", device="d", cdi_ids=(cdi_id, "v/c=both"), share_id=None)


async def test_containers_get_the_devices_that_they_refer_to(short_tmp):
    started = {}
    runtime = ContainerRuntime(
        short_tmp / "nri.sock", inject=lambda made: started.update({made.name: [d.name for d in made.CDI_devices]})
    )
    pod = {
        "metadata": {"namespace": "default", "name": "p", "uid": "u"},
        "spec": {
            "initContainers": [
                {"name": "init", "resources": {"claims": [{"name": "cpus"}]}},
                {"name": "sidecar", "restartPolicy": "Always"},
            ],
            "containers": [
                {"name": "one", "resources": {"claims": [{"name": "cpus", "request": "r2"}]}, "env": [{"name": "A"}]},
                {"name": "none", "env": [{"name": "B", "value": "1"}]},
            ],
        },
    }
    containers = PodContainers(runtime, pod)
    devices = {"cpus": [device("v/c=1", "r1"), device("v/c=2", "r2")]}
    runtime_refuses = [RefusedError("not yet")]

    def refuse_once(made, cpus):
        if made.name == "none" and runtime_refuses:
            raise runtime_refuses.pop()

    runtime._run_hooks = refuse_once
    with pytest.raises(RefusedError, match="not yet"):
        await containers.start(devices)
    before = set(runtime.containers)
    await containers.start(devices)
    assert before < set(runtime.containers)
    assert started == {
        "init": ["v/c=1", "v/c=both", "v/c=2"],
        "sidecar": [],
        "one": ["v/c=2", "v/c=both"],
        "none": [],
    }
    assert sorted(made.name for made in runtime.containers.values()) == ["none", "one", "sidecar"]
    assert [list(made.env) for made in runtime.containers.values()] == [[], ["A="], ["B=1"]]
    await containers.remove()
    assert (runtime.pods, runtime.containers) == ({}, {})
