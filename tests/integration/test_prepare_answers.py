# SPDX-License-Identifier: Apache-2.0
"""What a prepared claim gets, through the gRPC socket of a real driver: answers, files, status; and how it ends.

One driver serves all cases; after each of them everything is unprepared, and nothing may be left.
"""

from __future__ import annotations

import asyncio
import json
import time

import pytest
import pytest_asyncio

from driver.sandbox.endpoints import Fault
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.plugins import PreparedDevice
from fastcpu import CpuSet

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started_node(open_node):
    async with open_node() as node:
        await node.start({"groupBy": "numanode", "reservedCPUs": "0,32"})
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def node(started_node):
    yield started_node
    started_node.box.api.fault = None
    await started_node.release_all()


def metadata_id(claim, request="cpus"):
    return f"dra.cpu/metadata={claim.uid}_{request}"


def documents(path):
    """Read a stream of JSON documents."""
    text, found = path.read_text(), []
    while text.strip():
        document, end = json.JSONDecoder().raw_decode(text)
        found.append(document)
        text = text[end:].lstrip()
    return found


# A claim and all that belongs to it.


async def test_the_claim_of_the_specification(node):
    claim = node.add("2-5")
    [answer] = await node.prepare(claim)
    share_id = node.claim(claim)["status"]["allocation"]["devices"]["results"][0]["shareID"]
    assert answer.devices == (
        PreparedDevice(
            request_names=("cpus",),
            pool="test-node",
            device="cpudevnuma000",
            cdi_ids=(f"dra.k8s.io/cpu=claim-{claim.uid}", metadata_id(claim)),
            share_id=share_id,
        ),
    )
    assert await node.agreed() == {claim.uid: "2-5"}

    spec = json.loads(node.spec_path(claim).read_bytes())
    assert (spec["cdiVersion"], spec["kind"]) == ("0.8.0", "dra.k8s.io/cpu")
    [device] = spec["devices"]
    assert device["name"] == f"claim-{claim.uid}"
    assert device["containerEdits"]["env"] == [f"DRA_CPUSET_{claim.uid}=2-5"]
    assert node.spec_path(claim).stat().st_mode & 0o777 == 0o644

    record = json.loads(node.record_path(claim).read_bytes())
    assert {key: record[key] for key in ("version", "uid", "namespace", "name", "cpus", "requests", "adopted")} == {
        "version": 1,
        "uid": claim.uid,
        "namespace": "default",
        "name": claim.name,
        "cpus": "2-5",
        "requests": {"cpus": "2-5"},
        "adopted": False,
    }
    assert await node.status_of(claim) == [
        {
            "driver": "dra.cpu",
            "pool": "test-node",
            "device": "cpudevnuma000",
            "shareID": share_id,
            "data": {"cpuset": "2-5"},
        }
    ]
    metrics = await node.metrics()
    assert metrics["available_cpus"] == 58
    assert metrics["reserved_cpus"] == 2
    assert "\nCPUs taken: 4\n" in (await node.get("/"))[1]

    assert await node.unprepare(claim) == [""]
    assert node.files() == []
    assert (await node.metrics())["available_cpus"] == 62


async def test_device_metadata_of_a_claim(node):
    claim = node.add("2-3,33", generation=7)
    assert await node.errors(claim) == [""]
    host_file = node.metadata_dir / f"{claim.uid}_cpus.json"
    newest, older = documents(host_file)
    assert (newest.pop("apiVersion"), older.pop("apiVersion")) == (
        "metadata.resource.k8s.io/v1beta1",
        "metadata.resource.k8s.io/v1alpha1",
    )
    assert newest == older
    assert newest["kind"] == "DeviceMetadata"
    assert newest["metadata"] == {"name": claim.name, "namespace": "default", "uid": claim.uid, "generation": 1}
    assert "podClaimName" not in newest
    [request] = newest["requests"]
    [device] = request["devices"]
    assert (request["name"], device["driver"], device["pool"], device["name"]) == (
        "cpus",
        "dra.cpu",
        "test-node",
        "cpudevnuma000",
    )
    published = node.box.complete_slices()[0]["spec"]["devices"][0]
    assert published["name"] == "cpudevnuma000"
    assert device["attributes"] == {**published["attributes"], "dra.cpu/allocatedNumCPUs": {"int": 3}}

    [cdi_file] = node.cdi_dir.glob("dra.cpu_metadata_*")
    assert cdi_file.name == f"dra.cpu_metadata_{claim.uid}_cpus.json"
    spec = json.loads(cdi_file.read_bytes())
    assert spec["cdiVersion"] == ("0.5.0" if claim.uid[0].isdigit() else "0.3.0")
    assert spec["kind"] == "dra.cpu/metadata"
    container_path = (
        f"/var/run/kubernetes.io/dra-device-attributes/resourceclaims/{claim.name}/cpus/dra.cpu-metadata.json"
    )
    mount = {"hostPath": str(host_file), "containerPath": container_path, "options": ["ro", "bind"]}
    assert spec["devices"] == [{"name": f"{claim.uid}_cpus", "containerEdits": {"mounts": [mount]}}]


async def test_device_metadata_of_a_claim_from_a_template(node):
    claim = node.add("2-5", annotations={"resource.kubernetes.io/pod-claim-name": "my-cpus"}, uid="0-starts-with-0")
    [answer] = await node.prepare(claim)
    assert answer.devices[0].cdi_ids[1] == metadata_id(claim)
    [document, _] = documents(node.metadata_dir / f"{claim.uid}_cpus.json")
    assert document["podClaimName"] == "my-cpus"
    spec = json.loads((node.cdi_dir / f"dra.cpu_metadata_{claim.uid}_cpus.json").read_bytes())
    assert spec["cdiVersion"] == "0.5.0"
    [mount] = spec["devices"][0]["containerEdits"]["mounts"]
    assert "/resourceclaimtemplates/my-cpus/cpus/" in mount["containerPath"]


async def test_metadata_that_cannot_be_written_stops_nothing(node):
    claim = node.add("2-5")
    blocked = node.metadata_dir / f"{claim.uid}_cpus.json"
    blocked.mkdir()
    [answer] = await node.prepare(claim)
    assert [device.cdi_ids for device in answer.devices] == [(f"dra.k8s.io/cpu=claim-{claim.uid}",)]
    assert await node.agreed() == {claim.uid: "2-5"}
    blocked.rmdir()
    [answer] = await node.prepare(claim)
    assert answer.devices[0].cdi_ids[1:] == (metadata_id(claim),)


async def test_the_longest_names(node):
    claim = node.add("4", name="n" * 253, namespace="s" * 63)
    [answer] = await node.prepare(claim)
    assert answer.error == ""
    assert len(answer.devices[0].cdi_ids) == 2
    assert await node.agreed() == {claim.uid: "4"}
    assert await node.unprepare(claim) == [""]


# 1, 2. Whose results.


async def test_results_and_configurations_of_other_drivers_are_passed_over(node):
    strange = {"request": "gpu", "driver": "gpu.example.com", "pool": "gpus", "device": "gpu-0", "adminAccess": True}
    claim = node.add(
        results=[strange, node.result("4"), {**strange, "device": "gpu-1"}],
        configs=[
            node.config("nonsense", driver="gpu.example.com"),
            node.config("1", "cpus", driver="gpu.example.com", source="FromClass"),
            node.config("2-5"),
        ],
    )
    [answer] = await node.prepare(claim)
    assert [device.device for device in answer.devices] == ["cpudevnuma000"]
    assert await node.agreed() == {claim.uid: "2-5"}


@pytest.mark.parametrize("results", [[], [{"request": "gpu", "driver": "gpu.example.com", "pool": "p", "device": "d"}]])
async def test_a_claim_with_nothing_of_ours(node, results):
    claim = node.add(results=results, configs=[node.config("2-5")])
    [answer] = await node.prepare(claim)
    assert (answer.error, answer.devices) == ("", ())
    assert node.files() == []
    assert await node.agreed() == {}


@pytest.mark.parametrize(
    "amount",
    ["4", "4000m", 4, 4.0, "4.0", "+4", "4.", "4e0", "0.004k", "4000000000n", "3.9999999991", "40e-1", "04"],
    ids=repr,
)
async def test_spellings_of_a_number_of_cpus(node, amount):
    claim = node.add("2-5", cpus=amount, raw=True)
    assert await node.errors(claim) == [""]
    assert await node.agreed() == {claim.uid: "2-5"}


async def test_a_result_without_share_id(node):
    claim = node.add(results=[node.result("4", shareID=None)])
    [answer] = await node.prepare(claim)
    assert [device.share_id for device in answer.devices] == [None]
    assert [sorted(entry) for entry in await node.status_of(claim)] == [["data", "device", "driver", "pool"]]


# 3. Which configuration, and what it says.


@pytest.mark.parametrize(
    ("request_name", "applies", "does_not"),
    [
        ("cpus", [], None),
        ("cpus", ["cpus"], ["other"]),
        ("cpus", ["other", "cpus"], ["cpus/fast"]),
        ("cpus/fast", [], ["cpus/slow"]),
        ("cpus/fast", ["cpus"], ["cpus/slow", "other"]),
        ("cpus/fast", ["cpus/fast"], ["fast"]),
        ("cpus/fast", ["cpus/slow", "cpus/fast"], ["cpus/fas"]),
    ],
)
async def test_the_one_configuration_that_applies(node, request_name, applies, does_not):
    configs = [node.config("2-5", *applies)]
    if does_not is not None:
        # Not even one from the class counts.
        configs = [node.config("6-9", *does_not, source="FromClass"), *configs, node.config("6-9", *does_not)]
    claim = node.add(results=[node.result("4", request=request_name)], configs=configs, raw=True)
    [answer] = await node.prepare(claim)
    assert answer.error == ""
    assert answer.devices[0].request_names == ("cpus",)
    assert await node.agreed() == {claim.uid: "2-5"}
    [document, _] = documents(node.metadata_dir / f"{claim.uid}_cpus.json")
    assert [request["name"] for request in document["requests"]] == [request_name]


@pytest.mark.parametrize(
    "parameters",
    [
        {"APIVERSION": "v1alpha1", "CPUCONFIG": {"CPUSET": "2-5"}},
        {"apiversion": "v1alpha1", "cpuconfig": {"CpuSet": "2-5"}},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "1", "CPUSET": "2-5"}},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5", "CPUSET": None}},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "1"}, "CPUConfig": {"cpuset": "2-5"}},
        {"apiVersion": "v1alpha1", "kind": "CPUConfig", "cpuConfig": {"cpuset": "2-5", "mems": "0"}, "more": [1]},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5", "placement": {"spread": "cores"}}},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5", "placement": None}},
    ],
    ids=str,
)
async def test_keys_are_read_as_go_reads_them(node, parameters):
    claim = node.add(results=[node.result("4")], configs=[node.config(parameters=parameters)])
    assert await node.errors(claim) == [""]
    assert await node.agreed() == {claim.uid: "2-5"}


@pytest.mark.parametrize(
    ("cpuset", "expected"),
    [
        ("2-5", "2-5"),
        ("2,3,4,5", "2-5"),
        ("5,4,3,2", "2-5"),
        ("2-4,3-5,2", "2-5"),
        ("002-5", "2-5"),
        ("1-7:1/2", "1,3,5,7"),
        ("33-39:2/4,1", "1,33-34,37-38"),
        ("1-7,33-39", "1-7,33-39"),
        ("39", "39"),
    ],
)
async def test_spellings_of_a_cpuset(node, cpuset, expected):
    claim = node.add(cpuset, cpus=str(len(CpuSet.parse(expected))))
    assert await node.errors(claim) == [""]
    # Plain ranges come out.
    assert await node.agreed() == {claim.uid: expected}
    assert [entry["data"] for entry in await node.status_of(claim)] == [{"cpuset": expected}]


async def test_parameters_as_large_as_the_api_allows(node):
    def parameters(cpuset):
        return {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": cpuset}}

    room = 10_240 - len(json.dumps(parameters(""), separators=(",", ":")))
    cpuset = ("2-5," * room)[:room].rstrip(",-").ljust(room, "5")
    assert len(json.dumps(parameters(cpuset), separators=(",", ":"))) == 10_240
    CpuSet.parse(cpuset)
    claim = node.add(results=[node.result("4")], configs=[node.config(cpuset)])
    assert await node.errors(claim) == [""]
    assert await node.agreed() == {claim.uid: "2-5"}


# 4. Requests and groups.


async def test_a_request_with_several_devices_shares_one_cpuset(node):
    results = [node.result("2"), node.result("1", "cpudevnuma001"), node.result("2")]
    claim = node.add(results=results, configs=[node.config("2-5,8", "cpus")], spec={"cpus": {"count": 3}})
    [answer] = await node.prepare(claim)
    assert [(device.device, device.share_id) for device in answer.devices] == [
        (result["device"], result["shareID"]) for result in results
    ]
    # The metadata comes into the container with the request's first device only.
    assert [device.cdi_ids[1:] for device in answer.devices] == [(metadata_id(claim),), (), ()]
    assert {device.cdi_ids[0] for device in answer.devices} == {f"dra.k8s.io/cpu=claim-{claim.uid}"}
    assert await node.agreed() == {claim.uid: "2-5,8"}
    status = {entry["shareID"]: entry["data"]["cpuset"] for entry in await node.status_of(claim)}
    assert [status[result["shareID"]] for result in results] == ["2-5", "8", "2-5"]
    [document, _] = documents(node.metadata_dir / f"{claim.uid}_cpus.json")
    [request] = document["requests"]
    allocated = [device["attributes"]["dra.cpu/allocatedNumCPUs"]["int"] for device in request["devices"]]
    assert allocated == [2, 1, 2]


async def test_two_requests_with_a_cpuset_each(node):
    results = [node.result("4", request="one"), node.result("2", request="two/small")]
    configs = [node.config("2-5", "one"), node.config("6-7", "two")]
    claim = node.add(results=results, configs=configs, spec={"two/large": {}})
    [answer] = await node.prepare(claim)
    assert [device.request_names for device in answer.devices] == [("one",), ("two",)]
    assert [device.cdi_ids[1] for device in answer.devices] == [metadata_id(claim, "one"), metadata_id(claim, "two")]
    assert await node.agreed() == {claim.uid: "2-7"}
    record = json.loads(node.record_path(claim).read_bytes())
    assert record["requests"] == {"one": "2-5", "two/small": "6-7"}


async def test_a_group_is_filled_by_claims_of_several_kinds(node):
    claims = [node.add(cpuset) for cpuset in ("1-2", "3,33-34", "4-7,35-39")]
    assert await node.errors(*claims) == [""] * 3
    assert await node.agreed() == {
        claims[0].uid: "1-2",
        claims[1].uid: "3,33-34",
        claims[2].uid: "4-7,35-39",
    }


# The two versions of the service.


async def test_v1beta1_answers_the_same_without_share_ids(node):
    claim, bad = node.add("2-5"), node.add("0")
    older = await node.connect("v1beta1.DRAPlugin")
    reference = (claim.namespace, claim.uid, claim.name)
    answers = await older.prepare([reference, (bad.namespace, bad.uid, bad.name)])
    assert "CPU 0 is reserved on this node" in answers[bad.uid].error
    [device] = answers[claim.uid].devices
    assert (device.device, device.share_id) == ("cpudevnuma000", None)
    assert device.cdi_ids == (f"dra.k8s.io/cpu=claim-{claim.uid}", metadata_id(claim))
    # The kubelet was updated meanwhile: the same claim through the other version.
    [answer] = await node.prepare(claim)
    assert answer.devices[0].share_id is not None
    assert await older.unprepare([reference]) == {claim.uid: ""}
    assert await node.agreed() == {}


# 7. What is prepared already.


async def test_the_same_again(node):
    claim = node.add("2-5")
    first = await node.prepare(claim)
    await node.status_of(claim)
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in node.box.folder.rglob("*.json")}
    assert await node.prepare(claim) == first
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in before} == before
    assert await node.agreed() == {claim.uid: "2-5"}


async def test_the_same_in_other_words(node):
    claim = node.add(results=[node.result("4"), node.result("1", "cpudevnuma001")], configs=[node.config("2-5,8")])
    first = await node.prepare(claim)
    results = node.claim(claim)["status"]["allocation"]["devices"]["results"]
    results[0]["consumedCapacity"] = {"dra.cpu/cpu": "4000m"}
    other_words = {"APIVersion": "v1alpha1", "cpuConfig": {"cpuset": "8,5,2-4", "unknown": 1}}
    node.change(claim, results=results, config=[node.config(parameters=other_words)])
    assert await node.prepare(claim) == first


@pytest.mark.parametrize(
    "change",
    ["cpuset", "capacity", "device", "share", "one more", "nothing of ours", "unreadable"],
)
async def test_another_allocation_of_a_prepared_claim(node, change):
    claim = node.add("2-5")
    first = await node.prepare(claim)
    devices = node.claim(claim)["status"]["allocation"]["devices"]
    result = devices["results"][0]
    node.change(
        claim,
        **{
            "cpuset": {"config": [node.config("2-4,6")]},
            "capacity": {"results": [{**result, "consumedCapacity": {"dra.cpu/cpu": "3"}}]},
            "device": {"results": [{**result, "device": "cpudevnuma001"}]},
            "share": {"results": [{**result, "shareID": "00000000-0000-0000-0000-000000000000"}]},
            "one more": {"results": [result, node.result("1", "cpudevnuma001")]},
            "nothing of ours": {"results": []},
            "unreadable": {"config": [node.config("2-5;")]},
        }[change],
    )
    [error] = await node.errors(claim)
    assert "the claim is prepared with CPUs 2-5 for another allocation than it has now" in error
    assert "expected the same, or that the claim is unprepared first" in error
    assert await node.agreed() == {claim.uid: "2-5"}
    # Once the allocation is as it was, all is well again.
    node.change(claim, **devices)
    assert await node.prepare(claim) == first


async def test_an_unprepared_claim_may_come_back_with_another_allocation(node):
    claim = node.add("2-5")
    assert await node.errors(claim) == [""]
    await node.status_of(claim)
    assert await node.unprepare(claim) == [""]
    node.change(claim, config=[node.config("4-7")])
    assert await node.errors(claim) == [""]
    assert await node.agreed() == {claim.uid: "4-7"}
    told = {"cpuset": "4-7"}
    await node.box.api.wait_until(lambda: [entry["data"] for entry in node.claim(claim)["status"]["devices"]] == [told])


@pytest.mark.parametrize("lost", ["record", "spec", "both", "metadata", "emptied", "everything"])
async def test_what_was_lost_meanwhile_is_restored(node, lost):
    claim = node.add("2-5")
    first = await node.prepare(claim)
    before = {name: (node.box.folder / name) for name in node.files()}
    contents = {name: path.read_bytes() for name, path in before.items() if path.is_file()}
    if lost in ("record", "both", "everything"):
        node.record_path(claim).unlink()
    if lost in ("spec", "both", "everything"):
        node.spec_path(claim).unlink()
    if lost in ("metadata", "everything"):
        for name, path in before.items():
            if "metadata" in name and path.is_file():
                path.unlink()
    if lost == "emptied":
        node.record_path(claim).write_bytes(b"")
        node.spec_path(claim).write_bytes(contents[f"cdi/{node.spec_path(claim).name}"][:40])
    if lost == "everything":
        node.records_dir.rmdir()
        node.cdi_dir.rmdir()
    assert await node.prepare(claim) == first
    assert {name: (node.box.folder / name).read_bytes() for name in contents} == contents
    assert node.files() == sorted(before)
    assert await node.agreed() == {claim.uid: "2-5"}


# One call, many claims.


async def test_the_claims_of_a_call_are_fetched_at_the_same_time(node):
    claims = [node.add(f"{cpu}", device="cpudevnuma001") for cpu in range(8, 16)]
    node.box.api.fault = lambda method, path: Fault(delay_s=1) if "/resourceclaims/" in path else None
    started = time.monotonic()
    assert await node.errors(*claims) == [""] * 8
    assert 1 <= time.monotonic() - started < 8


async def test_a_slow_claim_holds_no_other_call_up(node):
    slow, fast = node.add("2"), node.add("3")
    node.box.api.fault = lambda method, path: Fault(delay_s=3) if path.endswith(f"/{slow.name}") else None
    waiting = asyncio.create_task(node.prepare(slow))
    assert await node.errors(fast) == [""]
    assert not waiting.done()
    node.box.api.fault = None
    assert [answer.error for answer in await waiting] == [""]


# Unprepare.


async def test_an_unknown_claim_is_unprepared(node):
    assert await node.unprepare(ClaimName(namespace="default", name="never", uid="c0ffee")) == [""]
    claim = node.add("2-5")
    assert await node.errors(claim) == [""]
    # Nobody asks the API server, which may have forgotten the claim; and the name may be another one's by now.
    node.box.api.fault = lambda method, path: 500
    renamed = ClaimName(namespace="elsewhere", name="renamed", uid=claim.uid)
    assert await node.unprepare(renamed) == [""]
    assert await node.unprepare(claim) == [""]
    assert node.files() == []


async def test_a_spec_that_cannot_be_removed_keeps_the_cpus_held(node):
    claim, other = node.add("2-5"), node.add("6")
    first = await node.prepare(claim)
    spec = node.spec_path(claim)
    content = spec.read_bytes()
    spec.unlink()
    (spec / "folder").mkdir(parents=True)

    errors = await node.unprepare(claim, other)
    assert "cannot remove the claim's files, its CPUs 2-5 stay held" in errors[0]
    assert str(spec) in errors[0]
    assert errors[1] == ""
    assert node.recorded() == {claim.uid: "2-5"}
    [error] = await node.errors(node.add("4-6", cpus="4"))
    assert f"CPUs 4-5 are held by claim {claim.uid}" in error
    [error] = await node.errors(claim)
    assert "the claim holds CPUs 2-5, but cannot write its files" in error
    metrics = await node.metrics()
    assert (metrics["resource_claims_active"], metrics["allocated_cpus"]) == (1, 4)

    # The same for a claim that holds nothing here.
    stray = node.cdi_dir / "dra.k8s.io-cpu_claim-c0ffee.json"
    stray.mkdir()
    [error] = await node.unprepare(ClaimName(namespace="default", name="stray", uid="c0ffee"))
    assert "cannot remove the claim's files, it holds no CPUs" in error
    stray.rmdir()

    # Repaired, in both directions.
    (spec / "folder").rmdir()
    spec.rmdir()
    assert await node.prepare(claim) == first
    assert spec.read_bytes() == content
    assert await node.unprepare(claim) == [""]
    assert node.files() == []
    assert await node.agreed() == {}
    assert (await node.metrics())['unprepare_claims_total{result="error"}'] >= 2


async def test_nobody_elses_files_are_touched(node):
    claim = node.add("2-5")
    strange = {
        node.cdi_dir / "vendor.json": b'{"cdiVersion": "0.6.0", "kind": "vendor.com/device", "devices": []}',
        node.cdi_dir / "broken.json": b"{",
        node.cdi_dir / ".vendor.json.0123abcd.tmp": b"",
        node.records_dir / "notes.txt": b"do not delete",
    }
    for path, content in strange.items():
        path.write_bytes(content)
    assert await node.errors(claim) == [""]
    assert await node.unprepare(claim) == [""]
    assert {path: path.read_bytes() for path in strange} == strange
    for path in strange:
        path.unlink()


async def test_prepares_and_unprepares_are_counted(node):
    before = await node.metrics()
    claims = [node.add("2-5"), node.add("6")]
    await node.prepare(*claims)
    await node.unprepare(*claims)
    after = await node.metrics()
    for name, more in {
        'prepare_claims_total{result="success"}': 2,
        'unprepare_claims_total{result="success"}': 2,
        "prepare_claim_duration_seconds_count": 2,
        "unprepare_claim_duration_seconds_count": 2,
        "claim_allocated_cpus_count": 2,
        "claim_allocated_cpus_sum": 5,
    }.items():
        assert after[name] - before[name] == more


async def test_one_operation_id_for_all_lines_of_a_call(node):
    claims = [node.add("2-5"), node.add("0")]
    await node.prepare(*claims)
    lines = [line for line in node.log() if line.get("uid") in {claim.uid for claim in claims}]
    assert {line["msg"] for line in lines} == {"claim prepared", "claim not prepared"}
    assert len({line["op"] for line in lines}) == 1
    assert {line["claim"] for line in lines} == {f"default/{claim.name}" for claim in claims}
