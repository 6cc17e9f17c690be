# SPDX-License-Identifier: Apache-2.0
"""The box as a whole: the real driver process in it, `dracpu demo` and `dracpu box` as their users run them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml

from driver.sandbox.clusterbox import ClusterBox, held_cpus
from driver.sandbox.kinds import EVENTS, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.machine import MachineShape
from driver.sandbox.offers import allocated_claim, read_offers
from driver.sandbox.plugins import KubeletError
from driver.sandbox.pods import PodWorkers

ROOT = Path(__file__).parents[2]
DRIVER = "dra.cpu"
FINALIZER = "resource.kubernetes.io/delete-protection"


@pytest.fixture
def add_claim(cluster_box):
    """Put a claim for some CPUs of the first device into the API; returns its name for the kubelet."""

    def add(name, cpuset, cpus, **more):
        offer = read_offers(cluster_box.complete_slices())[0]
        metadata = cluster_box.api.put(RESOURCE_CLAIMS, allocated_claim(name, offer, cpuset, cpus, **more))["metadata"]
        return ClaimName(namespace=metadata["namespace"], name=name, uid=metadata["uid"])

    return add


async def test_driver_registers_publishes_prepares_and_unprepares(cluster_box, driver_process, add_claim):
    process = await driver_process({"reservedCPUs": "0,32"})
    plugin = cluster_box.kubelet.plugins[DRIVER]
    assert (plugin.service, plugin.supported_versions) == (
        "v1.DRAPlugin",
        ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"),
    )
    offers = read_offers(cluster_box.complete_slices())
    assert [(offer.device, str(offer.cpus)) for offer in offers[:2]] == [
        ("cpudevnuma000", "1-7,33-39"),
        ("cpudevnuma001", "8-15,40-47"),
    ]
    claim = add_claim("a", "2-5", 4)
    answer = (await cluster_box.kubelet.prepare(DRIVER, [claim]))[claim.uid]
    assert not answer.error
    assert [(device.device, device.request_names) for device in answer.devices] == [
        ("cpudevnuma000", ("cpu-request-1",))
    ]
    results = cluster_box.api.get(RESOURCE_CLAIMS, "a")["status"]["allocation"]["devices"]["results"]
    assert answer.devices[0].share_id == results[0]["shareID"]
    assert {uid: str(cpus) for uid, cpus in held_cpus(cluster_box.cdi_dir).items()} == {claim.uid: "2-5"}
    assert await cluster_box.kubelet.unprepare(DRIVER, [claim]) == {claim.uid: ""}
    assert held_cpus(cluster_box.cdi_dir) == {}
    assert process.resident_bytes > 10**6
    assert process.returncode is None


async def test_driver_that_was_killed_registers_again(cluster_box, driver_process, add_claim):
    process = await driver_process()
    claim = add_claim("a", "2-5", 4)
    first = await cluster_box.kubelet.prepare(DRIVER, [claim])
    pid = process.pid
    await process.kill9()
    await cluster_box.kubelet.wait_gone(DRIVER)
    await process.start()
    await cluster_box.wait_ready(process)
    assert process.pid != pid
    assert await cluster_box.kubelet.prepare(DRIVER, [claim]) == first


async def test_driver_ends_in_good_order_and_takes_its_sockets_along(cluster_box, driver_process):
    process = await driver_process()
    assert len(list(cluster_box.kubelet.registry_dir.glob("*.sock"))) == 1
    assert await process.terminate() == 0
    await cluster_box.kubelet.wait_gone(DRIVER)
    assert list(cluster_box.kubelet.registry_dir.glob("*.sock")) == []


async def test_driver_that_does_not_start_is_an_error_with_its_last_words(cluster_box, driver_process):
    with pytest.raises(KubeletError, match=r"ended with status 2\n(.*\n)*.*groupBy"):
        await driver_process({"groupBy": "nonsense"})


async def test_slices_come_back_after_a_wipe(cluster_box, driver_process):
    await driver_process()
    before = {piece["metadata"]["uid"] for piece in cluster_box.complete_slices()}
    for piece in cluster_box.api.list(RESOURCE_SLICES):
        cluster_box.api.delete(RESOURCE_SLICES, piece["metadata"]["name"])
    await cluster_box.wait_published()
    assert before.isdisjoint(piece["metadata"]["uid"] for piece in cluster_box.complete_slices())


async def test_kubelet_wipes_slices_of_a_driver_that_stays_away():
    async with ClusterBox(shape=MachineShape(cpus=16, numa_nodes=2), wipe_after_s=0.05) as box:
        process = await box.start_driver()
        await box.wait_ready(process)
        await process.kill9()
        await box.api.wait_until(lambda: not box.api.list(RESOURCE_SLICES))


async def test_a_box_leaves_nothing_behind():
    async with ClusterBox(shape=MachineShape(cpus=16, numa_nodes=2)) as box:
        process = await box.start_driver()
        await box.wait_ready(process)
        assert box.folder.is_dir()
    assert process.returncode is not None
    assert not box.folder.exists()


@pytest.fixture
async def pods(cluster_box):
    """The box's worker for pods, quick to try again."""
    workers = PodWorkers(cluster_box.api, cluster_box.kubelet, cluster_box.runtime, cluster_box.node_name, retry_s=0.05)
    task = asyncio.create_task(workers.run())
    yield workers
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def pod(name, *claims):
    references = [{"name": f"c{n}", "resourceClaimName": claim} for n, claim in enumerate(claims)]
    return {"metadata": {"name": name}, "spec": {"nodeName": "test-node", "resourceClaims": references}}


def with_containers(body, *containers, init=()):
    body["spec"] |= {"containers": list(containers), "initContainers": list(init)}
    return body


def phase_of(box, name):
    found = box.api.get(PODS, name)
    return found["status"]["phase"] if found is not None else "gone"


async def test_pods_have_their_claims_prepared_and_unprepared(cluster_box, driver_process, add_claim, pods):
    await driver_process()
    claim = add_claim("a", "2-5", 4)
    body = cluster_box.api.get(RESOURCE_CLAIMS, "a")
    body["metadata"]["finalizers"] = [FINALIZER]
    cluster_box.api.registry.update(RESOURCE_CLAIMS, "default", "a", body)
    created = cluster_box.api.create(PODS, pod("p", "a"))
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "p") == "Running")
    assert {uid: str(cpus) for uid, cpus in held_cpus(cluster_box.cdi_dir).items()} == {claim.uid: "2-5"}
    reserved = cluster_box.api.get(RESOURCE_CLAIMS, "a")["status"]["reservedFor"]
    assert reserved == [{"resource": "pods", "name": "p", "uid": created["metadata"]["uid"]}]

    # A second pod shares the claim, so the first one's end leaves it prepared.
    cluster_box.api.create(PODS, pod("q", "a"))
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "q") == "Running")
    cluster_box.api.registry.delete(PODS, "default", "p", {})
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "p") == "gone")
    assert claim.uid in held_cpus(cluster_box.cdi_dir)

    cluster_box.api.registry.delete(PODS, "default", "q", {})
    await cluster_box.api.wait_until(lambda: "finalizers" not in cluster_box.api.get(RESOURCE_CLAIMS, "a")["metadata"])
    assert phase_of(cluster_box, "q") == "gone"
    assert held_cpus(cluster_box.cdi_dir) == {}
    assert cluster_box.api.get(RESOURCE_CLAIMS, "a")["status"] == {}


def effective(box):
    runtime = box.runtime
    return {made.name: str(runtime.effective(made.id)) for made in runtime.containers.values()}


async def test_containers_of_pods_are_pinned_moved_and_refused(cluster_box, driver_process, add_claim, pods):
    await driver_process({"reservedCPUs": "0"})
    runtime = cluster_box.runtime
    add_claim("a", "2-5", 4)
    uses_claim = {"claims": [{"name": "c0"}]}
    cluster_box.api.create(PODS, with_containers(pod("shared"), {"name": "web"}))
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "shared") == "Running")
    assert effective(cluster_box) == {"web": "1-63"}
    exclusive = with_containers(
        pod("exclusive", "a"),
        {"name": "work", "resources": uses_claim},
        {"name": "log"},
        init=[{"name": "init", "resources": uses_claim}],
    )
    cluster_box.api.create(PODS, exclusive)
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "exclusive") == "Running")
    assert effective(cluster_box) == {"web": "1,6-63", "work": "2-5", "log": "1,6-63"}

    (uid,) = held_cpus(cluster_box.cdi_dir)
    forged = {"name": "bad", "env": [{"name": f"DRA_CPUSET_{uid}", "value": "2-5"}]}
    cluster_box.api.create(PODS, with_containers(pod("forged"), forged))
    events = await cluster_box.api.wait_until(lambda: cluster_box.api.list(EVENTS, "involvedObject.name=forged"))
    assert events[0]["reason"] == "Failed"
    assert "the container was not given claim default/a" in events[0]["message"]
    assert phase_of(cluster_box, "forged") == "Pending"

    for name in ("forged", "exclusive"):
        cluster_box.api.registry.delete(PODS, "default", name, {})
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "exclusive") == "gone")
    await runtime.wait_until(lambda: effective(cluster_box) == {"web": "1-63"}, 10)
    assert held_cpus(cluster_box.cdi_dir) == {}


async def test_a_driver_without_a_runtime_leaves_containers_alone(cluster_box, driver_process, add_claim, pods):
    await driver_process(flags=("--nri-socket=",))
    add_claim("a", "2-5", 4)
    body = with_containers(pod("p", "a"), {"name": "work", "resources": {"claims": [{"name": "c0"}]}})
    cluster_box.api.create(PODS, body)
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "p") == "Running")
    assert cluster_box.runtime.connections == 0
    assert effective(cluster_box) == {"work": "0-63"}


async def test_failures_become_events_and_are_tried_again(cluster_box, driver_process, add_claim, pods):
    await driver_process({"reservedCPUs": "0"})
    cluster_box.api.create(PODS, pod("p", "missing"))
    events = await cluster_box.api.wait_until(lambda: cluster_box.api.list(EVENTS, "involvedObject.name=p"))
    assert events[0]["reason"] == "FailedPrepareDynamicResources"
    assert '"missing" not found' in events[0]["message"]
    add_claim("missing", "0-3", 4)
    await cluster_box.api.wait_until(
        lambda: any("reserved" in event["message"] for event in cluster_box.api.list(EVENTS))
    )
    assert phase_of(cluster_box, "p") == "Pending"
    cluster_box.api.registry.delete(PODS, "default", "p", {})
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "p") == "gone")


async def test_a_pod_stays_until_its_driver_is_back(cluster_box, driver_process, add_claim, pods):
    process = await driver_process()
    add_claim("a", "2-5", 4)
    cluster_box.api.create(PODS, pod("p", "a"))
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "p") == "Running")
    await process.terminate()
    await cluster_box.kubelet.wait_gone(DRIVER)
    cluster_box.api.registry.delete(PODS, "default", "p", {})
    await cluster_box.api.wait_until(
        lambda: any("not registered" in event["message"] for event in cluster_box.api.list(EVENTS))
    )
    assert phase_of(cluster_box, "p") == "Running"
    await process.start()
    await cluster_box.api.wait_until(lambda: phase_of(cluster_box, "p") == "gone")
    assert held_cpus(cluster_box.cdi_dir) == {}


async def run_dracpu(*arguments, **environment):
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "driver",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )


async def finish(process, timeout_s=180):
    output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    return process.returncode, output.decode()


def lines_of(text):
    return [line.strip() for line in text.splitlines()]


def without_times(text: str) -> list[str]:
    return [re.sub(r"[0-9.]+ ms", "… ms", line) for line in text.splitlines()]


async def test_demo_shows_claims_prepared_and_refused_and_containers_pinned(short_tmp):
    status, text = await finish(await run_dracpu("demo", TMPDIR=str(short_tmp)))
    assert status == 0, text
    lines = text.splitlines()
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in lines)
    assert re.search(r"exclusive-cores-claim, cpuset 2-5: prepared in [0-9.]+ ms", text)
    assert len(re.findall(r": refused in [0-9.]+ ms", text)) == 3
    flowing = " ".join(text.split())
    for reason in (
        "CPU 0 is reserved",
        "of cpudevnuma007",
        "held by claim",
        "the container was not given claim default/exclusive-cores-claim",
        "would run on CPUs 0-255, but its claims allow CPUs 4-7 only",
    ):
        assert reason in flowing
    assert "container web of pod web runs on CPUs 1-127,129-255" in lines_of(text)
    assert "before that answer web and batch were moved to CPUs 1,6-127,129-255" in lines_of(text)
    assert re.search(r"container work of pod exclusive-cores: pinned to CPUs 2-5 in [0-9.]+ ms", text)
    assert "web and batch were given CPUs 1-111,129-255" in lines_of(text)
    assert re.search(r"from the unprepare until then: [0-9.]+ s", text)
    assert "no-cpuset, 4 CPUs of cpudevnuma000: prepared with CPUs 1-2,129-130" in lines_of(text)
    assert re.search(r"memory of the idle driver: [0-9.]+ MB", text)
    [quoted] = re.findall(r"```text\n(\d\. .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = iter(without_times(text))
    assert [line for line in without_times(quoted) if line not in printed] == []
    assert re.search(r"from start to registered and published: [0-9.]+ s", text)
    assert "  node 0      0 RCC.AAAA........ 128 RCC............." in lines
    assert max(step.count("\n") for step in text.split("\n\n")) <= 24
    assert lines[-1] == "Everything went as expected."
    assert list(short_tmp.iterdir()) == []


async def test_demo_fits_small_machines_and_says_what_differs(short_tmp, machine_tree):
    tree = machine_tree(cpus=2, sockets=1, numa_nodes=1, threads_per_core=1)
    status, text = await finish(
        await run_dracpu("demo", "--group-by=machine", f"--sysfs-root={tree}", TMPDIR=str(short_tmp))
    )
    assert status == 0, text
    assert "exclusive-cores-claim, cpuset 1: prepared" in text

    (tree / "devices/system/cpu/online").unlink()
    (tree / "devices/system/cpu/online").write_text("nonsense\n")
    status, text = await finish(await run_dracpu("demo", f"--sysfs-root={tree}", TMPDIR=str(short_tmp)))
    assert status != 0
    assert "nonsense" in text
    assert list(short_tmp.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_box_cleans_up_when_it_is_interrupted(short_tmp, number):
    process = await run_dracpu("box", TMPDIR=str(short_tmp))
    text = await read_until(process, "Ctrl-C ends everything")
    (folder,) = short_tmp.iterdir()
    drivers = children_of(process.pid)
    assert len(drivers) == 1
    process.send_signal(number)
    process.send_signal(number)
    status, _ = await finish(process)
    assert status == 130, text
    assert not folder.exists()
    assert not runs(drivers[0])


async def test_box_works_as_it_says(short_tmp):
    process = await run_dracpu("box", TMPDIR=str(short_tmp))
    try:
        text = await read_until(process, "Ctrl-C ends everything")
        folder = Path(re.search(r"KUBECONFIG=(\S+)/kubeconfig", text)[1])
        assert missing(re.findall(r"^  (/\S+)$", text, re.MULTILINE)) == []
        url = re.search(r"server: (\S+)", (folder / "kubeconfig").read_text())[1]
        await use_box(url, folder)
        await read_until(process, "default/exclusive-cores, container work: CPUs 2-5")
    finally:
        process.send_signal(signal.SIGINT)
        await finish(process)


async def use_box(url, folder):
    """Do what the box tells its user to do, by HTTP."""
    claim, example_pod = (
        yaml.safe_load((folder / "claim.yaml").read_text()),
        json.loads((folder / "pod.yaml").read_text()),
    )
    claims, pods = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims", "/api/v1/namespaces/default/pods"
    async with aiohttp.ClientSession(url, raise_for_status=True) as session:
        watch = await session.get("/api/v1/pods", params={"watch": "true"}, timeout=aiohttp.ClientTimeout(total=60))
        await session.post(claims, json=claim)
        await session.put(f"{claims}/exclusive-cores-claim/status", json=claim)
        await session.post(pods, json=example_pod)

        async def wait_for_event(condition):
            while not condition(json.loads(await watch.content.readline())):
                pass

        await wait_for_event(lambda event: event["object"]["status"].get("phase") == "Running")
        assert [str(cpus) for cpus in held_cpus(folder / "cdi").values()] == ["2-5"]
        await session.delete(f"{pods}/exclusive-cores")
        await wait_for_event(lambda event: event["type"] == "DELETED")
        assert held_cpus(folder / "cdi") == {}
        watch.close()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
async def test_box_takes_the_commands_that_it_prints(short_tmp):
    process = await run_dracpu("box", TMPDIR=str(short_tmp))
    try:
        text = await read_until(process, "Ctrl-C ends everything")
        environment = {"KUBECONFIG": re.search(r"KUBECONFIG=(\S+)", text)[1], "HOME": str(short_tmp)}
        commands = re.findall(r"^  (kubectl [^#\n]*)", text, re.MULTILINE)
        assert len(commands) == 6
        for command in commands:
            kubectl = await asyncio.create_subprocess_exec(
                *command.split(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **environment},
            )
            status, output = await finish(kubectl)
            assert status == 0, f"{command}: {output}"
    finally:
        process.send_signal(signal.SIGINT)
        await finish(process)


async def read_until(process, mark):
    """Read the output of a process up to the line with `mark`, and return it."""
    lines = []
    async with asyncio.timeout(120):
        while not lines or mark not in lines[-1]:
            line = (await process.stdout.readline()).decode()
            assert line, "".join(lines)
            lines.append(line)
    return "".join(lines)


def missing(paths):
    return [path for path in paths if not Path(path).exists()]


def runs(pid):
    return Path(f"/proc/{pid}").exists()


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
