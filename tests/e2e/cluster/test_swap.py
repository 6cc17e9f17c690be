# SPDX-License-Identifier: Apache-2.0
"""dra-driver-cpu is swapped for this driver by an upgrade of its chart's release, with claims in use."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from e2e import kernel
from e2e.cluster.cluster import CHART, NAMESPACE, PATIENCE_S
from e2e.cluster.deployment import Deployment
from e2e.cluster.observer import Observer
from e2e.cluster.upstream import RELEASE, Upstream
from e2e.cluster.workloads import CLAIM_VARIABLE, create_claim, create_pod
from fastcpu import CpuSet

# What users of its releases have in their values: the first one chose CPUs itself and took flags.
FIRST = {"args": {"logLevel": 4, "cpuDeviceMode": "grouped", "groupBy": "numanode", "reservedCPUs": ""}}
LATER = {"args": {"logLevel": 4}, "driverConfig": {"allocator": "external", "groupBy": "numanode"}}


@pytest_asyncio.fixture(loop_scope="session")
async def helm_release(undeployed, driver_image):
    """A release of dra-driver-cpu's chart can be installed; it is removed in the end, whatever it has become."""
    yield
    await undeployed.clear()
    await undeployed.helm("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--ignore-not-found")
    label = f"--selector=app.kubernetes.io/instance={RELEASE}"
    await undeployed.kubectl("wait", "--for=delete", "pod", f"--namespace={NAMESPACE}", label, "--timeout=60s")


async def upgrade(cluster, values):
    """Upgrade the release as its users do: another chart, their values, and the name that it has."""
    values = {**cluster.chart_values(), **values, "nameOverride": "dra-driver-cpu"}
    arguments = ("upgrade", RELEASE, str(CHART), f"--namespace={NAMESPACE}", "--values=-")
    await cluster.helm(*arguments, input=yaml.safe_dump(values))
    rolled_out = ("rollout", "status", f"--namespace={NAMESPACE}", f"daemonset/{RELEASE}")
    await cluster.kubectl(*rolled_out, f"--timeout={PATIENCE_S:g}s")


@pytest.mark.parametrize(
    ("one_file", "values", "asked"), [(True, FIRST, ""), (False, LATER, "1")], ids=["first", "later"]
)
async def test_upgraded_in_place(cluster, helm_release, one_file, values, asked):
    upstream = Upstream(cluster, one_file=one_file, cpus="1")
    await upstream.install()
    uid = (await create_claim(cluster, "exclusive", asked))["metadata"]["uid"]
    await create_pod(cluster, "web")
    await create_pod(cluster, "owner", "exclusive", containers=("main", "second"))
    await cluster.wait_running("web", "owner")
    for pod, cpus in (("web", "0"), ("owner", "1")):
        await upstream.pin(await container_ids(cluster, pod), cpus)
    before = {pod: await cluster.pids(pod) for pod in ("web", "owner")}
    await upstream.stop()
    assert ("dra.cpu.json" in upstream.cdi_specs) == one_file

    async with Observer.watching(cluster, {"exclusive": CpuSet([1])}) as observer:
        await upgrade(cluster, values)
        await observer.settle()
        driver = Deployment(cluster)
        assert {pod: await cluster.pids(pod) for pod in ("web", "owner")} == before
        assert [await cluster.cpus("web"), await cluster.cpus("owner"), await cluster.cpus("owner", "second")] == [
            *("0", "1", "1")
        ]
        [record], [name] = driver.records().values(), driver.specs()
        assert (record["uid"], record["cpus"], record["adopted"]) == (uid, "1", True)
        assert name == f"dra.k8s.io-cpu_claim-{uid}.json"
        assert driver.specs()[name]["devices"][0]["containerEdits"]["hooks"]
        assert "dra.cpu.json" not in upstream.cdi_specs
        [piece] = await cluster.slices()
        assert "requestPolicy" in piece["spec"]["devices"][0]["capacity"]["dra.cpu/cpu"]

        # The guard that its spec has now lets in what the driver pins.
        os.kill(before["owner"]["main"], signal.SIGKILL)
        await wait_again(cluster, before["owner"]["main"])
        assert await cluster.cpus("owner") == "1"
        assert (await cluster.pids("owner"))["second"] == before["owner"]["second"]

        # For a new sandbox a kubelet that has been started anew prepares once more: then the claim is like any other.
        await cluster.node.kubelet.kill9()
        await cluster.node.kubelet.start()
        await cluster.node.wait_ready()
        again = (await cluster.pids("owner"))["main"]
        os.kill(sandbox(again), signal.SIGKILL)
        await wait_again(cluster, again)
        await cluster.wait_running("owner")
        assert [await cluster.cpus("owner", name) for name in ("main", "second")] == ["1", "1"]
        [record] = driver.records().values()
        assert (record["name"], record["adopted"]) == ("exclusive", False)

        await cluster.delete_pods("owner")
        await cluster.wait_cpus("web", "0-1")
    assert driver.claim_files() == []
    assert (await driver.metrics())["allocated_cpus"] == 0


async def container_ids(cluster, pod):
    return [status["containerID"] for status in (await cluster.pod(pod))["status"]["containerStatuses"]]


async def wait_again(cluster, before):
    async def again():
        # What the API server still says may be over.
        with suppress(OSError):
            return (await cluster.pids("owner")).get("main", before) != before
        return False

    await cluster.until(again, "the container was started again")


def sandbox(pid):
    """Return the process of a container's sandbox: the one in the pod that is none of its author's."""
    pids = [int(each) for path in kernel.cgroup(pid).parent.glob("*/cgroup.procs") for each in path.read_text().split()]
    [found] = [each for each in pids if CLAIM_VARIABLE.encode() not in Path(f"/proc/{each}/environ").read_bytes()]
    return found
