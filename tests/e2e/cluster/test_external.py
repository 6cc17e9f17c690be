# SPDX-License-Identifier: Apache-2.0
"""The driver as users deploy it, and claims that name their CPUs: by a scheduler outside, or in the claim itself."""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from e2e import scratch
from e2e.cluster.cluster import NODE_NAME
from e2e.cluster.manifests import as_text, claim, cpuset_config, pod, request

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
SCHEDULER = "cpu-pinner"
FINALIZER = "resource.kubernetes.io/delete-protection"


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def deployed(shared_cluster, driver_image):
    await shared_cluster.install_chart({"driverConfig": {"groupBy": "machine", "allocator": "external"}})
    await shared_cluster.until(shared_cluster.slices, "slices are published")


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(cluster, deployed):
    return cluster


@pytest_asyncio.fixture(loop_scope="session")
async def external_scheduler(cluster):
    """The documentation's example, with the rights that it says."""
    await cluster.kubectl("apply", f"--filename={EXAMPLES / 'external-scheduler-rights.yaml'}")
    kubeconfig = cluster.control_plane.kubeconfig("external-scheduler", [])
    log = cluster.folder / "external-scheduler.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, EXAMPLES / "external_scheduler.py", f"--kubeconfig={kubeconfig}", f"--name={SCHEDULER}"),
            stdout=output,
            stderr=output,
            env={
                "PATH": str(cluster.control_plane.programs),
                "HOME": str(cluster.folder),
                **scratch.mark(cluster.folder),
            },
        )
    yield log
    process.terminate()
    await process.wait()
    print(log.read_text())


async def test_slices(cluster):
    [piece] = await cluster.slices()
    [device] = piece["spec"]["devices"]
    assert device["name"] == "cpudevmachine"
    assert device["attributes"]["dra.cpu/cpuIDs"] == {"string": "0-1"}
    assert device["capacity"]["dra.cpu/cpu"]["value"] == "2"
    assert "does not store a field" not in await cluster.driver_log()


async def test_scheduler_outside(cluster, external_scheduler):
    await cluster.apply(as_text(pod("plain")))
    await cluster.wait_running("plain")
    await cluster.wait_cpus("plain", "0-1")
    objects = claim("exclusive-cores-claim", request(1, "cpu-request-1")), pod("user", "exclusive-cores-claim")
    objects[1]["spec"]["schedulerName"] = SCHEDULER
    await cluster.apply(as_text(*objects))
    await cluster.wait_running("user")

    stored = await cluster.claim("exclusive-cores-claim")
    user = await cluster.pod("user")
    allocation = stored["status"]["allocation"]
    [result] = allocation["devices"]["results"]
    uuid.UUID(result.pop("shareID"))
    assert allocation.pop("allocationTimestamp")
    # The specification's example, but for this machine's names and CPUs.
    assert allocation == {
        "devices": {
            "results": [
                {
                    "request": "cpu-request-1",
                    "driver": "dra.cpu",
                    "pool": NODE_NAME,
                    "device": "cpudevmachine",
                    "consumedCapacity": {"dra.cpu/cpu": "1"},
                }
            ],
            "config": [{"source": "FromClaim", **cpuset_config("0", "cpu-request-1")}],
        },
        "nodeSelector": {
            "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE_NAME]}]}]
        },
    }
    assert stored["metadata"]["finalizers"] == [FINALIZER]
    reference = {"resource": "pods", "name": "user", "uid": user["metadata"]["uid"]}
    assert stored["status"]["reservedFor"] == [reference]
    assert user["spec"]["nodeName"] == NODE_NAME

    assert await cluster.cpus("user") == "0"
    await cluster.wait_cpus("plain", "1")
    variable = f"DRA_CPUSET_{stored['metadata']['uid']}=0"
    assert variable in (await cluster.kubectl("exec", "user", "--", "env")).splitlines()

    await cluster.delete_pods("user")
    await cluster.wait_cpus("plain", "0-1")

    async def is_given_back():
        return "allocation" not in (await cluster.claim("exclusive-cores-claim")).get("status", {})

    await cluster.until(is_given_back, "the claim is not allocated any more")


async def test_scheduler_outside_with_a_template(cluster, external_scheduler):
    body = pod("user", "cpus")
    body["spec"]["schedulerName"] = SCHEDULER
    body["spec"]["resourceClaims"] = [{"name": "cpus", "resourceClaimTemplateName": "one-cpu"}]
    template = {"metadata": {"name": "one-cpu"}, "spec": {"spec": claim("", request(1))["spec"]}}
    template |= {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
    waits = pod("waits", "too-many")
    waits["spec"]["schedulerName"] = SCHEDULER
    await cluster.apply(as_text(template, body, claim("too-many", request(3)), waits))
    await cluster.wait_running("user")
    assert await cluster.cpus("user") == "0"

    async def is_told():
        return "pod default/waits waits: no node has enough CPUs left" in external_scheduler.read_text()

    await cluster.until(is_told, "the other pod waits")
    await cluster.kubectl("delete", "resourceclaimtemplate", "one-cpu")


async def test_claim_names_its_cpus(cluster):
    await cluster.apply(as_text(pod("plain")))
    await cluster.wait_running("plain")
    await cluster.apply(
        as_text(claim("own", config=[cpuset_config("1")]), pod("user", "own", containers=("main", "side")))
    )
    await cluster.wait_running("user")
    # kube-scheduler has copied what the claim says of itself.
    [config] = (await cluster.claim("own"))["status"]["allocation"]["devices"]["config"]
    assert config == {"source": "FromClaim", **{k: v for k, v in cpuset_config("1").items() if v}}
    assert [await cluster.cpus("user", container) for container in ("main", "side")] == ["1", "1"]
    await cluster.wait_cpus("plain", "0")


async def test_claim_shows_its_cpus(cluster):
    await cluster.apply(as_text(claim("own", config=[cpuset_config("1")]), pod("user", "own")))
    await cluster.wait_running("user")

    async def is_told():
        text = await cluster.kubectl("get", "resourceclaim", "own", "--output=yaml")
        devices = yaml.safe_load(text)["status"].get("devices", ())
        return [(device["device"], device["data"]) for device in devices] == [("cpudevmachine", {"cpuset": "1"})]

    await cluster.until(is_told, "the claim's status tells its CPUs")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([cpuset_config("0-1")], "cpuset 0-1: it has 2 CPUs, but the request consumes 1"),
        ([cpuset_config("7")], "cpuset 7: CPU 7 is not online on this node, which has 0-1"),
        ([cpuset_config("0-4000000000")], "character 3: the number is too large"),
        ([], "0 configurations for dra.cpu apply to it"),
    ],
    ids=["too many", "not there", "hostile", "none"],
)
async def test_claim_that_names_bad_cpus(cluster, config, message):
    await cluster.apply(as_text(claim("bad", config=config), pod("user", "bad")))
    await cluster.wait_event("user", message)
    assert message in await cluster.kubectl("describe", "pod", "user")
    assert (await cluster.pod("user"))["status"]["phase"] == "Pending"


async def test_cpus_that_are_held(cluster):
    await cluster.apply(as_text(claim("first", config=[cpuset_config("1")]), pod("first", "first")))
    await cluster.wait_running("first")
    await cluster.apply(as_text(claim("second", config=[cpuset_config("1")]), pod("second", "second")))
    uid = (await cluster.claim("first"))["metadata"]["uid"]
    await cluster.wait_event("second", f"CPU 1 is held by claim {uid}")
    assert await cluster.cpus("first") == "1"
    # Nothing but the other claim stood in the way.
    await cluster.delete_pods("first")
    await cluster.wait_running("second")
    assert await cluster.cpus("second") == "1"


async def test_no_cpu_left_for_the_others(cluster):
    await cluster.apply(as_text(claim("all", request(2), config=[cpuset_config("0-1")]), pod("user", "all")))
    # The driver's own pod is one.
    await cluster.wait_event("user", "CPUs 0-1 would leave no CPU for the")
