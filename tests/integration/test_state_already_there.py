# SPDX-License-Identifier: Apache-2.0
"""What a driver finds when it starts: specs of dra-driver-cpu, records of its own, leftovers of a crash, and junk.

A real driver is started on folders that hold all of it, and asked through its gRPC socket, its metrics and its log.
"""

from __future__ import annotations

import json

import pytest

from driver.claims import decode_claim
from driver.names import DRIVER_NAME
from driver.sandbox.kinds import NODES, RESOURCE_SLICES
from driver.sandbox.kubelet import ClaimName

SETTINGS = {"groupBy": "numanode", "reservedCPUs": "0,32"}


def cdi_device(uid, *cpusets, name=None):
    env = [f"DRA_CPUSET_{uid}={cpuset}" for cpuset in cpusets]
    return {"name": name or f"claim-{uid}", "containerEdits": {"env": env}}


def cdi_spec(*devices, kind="dra.k8s.io/cpu", version="0.8.0"):
    return json.dumps({"cdiVersion": version, "kind": kind, "devices": list(devices)})


def put_spec(node, uid, cpuset, name=None):
    """Write a claim's spec as dra-driver-cpu does; one file for each claim, or as it is called otherwise."""
    path = node.cdi_dir / (name or f"dra.k8s.io-cpu_claim-{uid}.json")
    path.write_text(cdi_spec(cdi_device(uid, cpuset)))
    return path


def named(uid):
    return ClaimName(namespace="default", name=uid, uid=uid)


async def refusal(node, cpuset, device="cpudevnuma000"):
    """Return what a claim for some CPUs is told at once, beside that it also has a wrong number of them."""
    [error] = await node.errors(node.add(cpuset, device=device, cpus="63"))
    assert "but the request consumes 63" in error
    return error


# CDI specs without a record.


async def test_specs_of_dra_driver_cpu_are_adopted_and_verified(node):
    own_file = node.add("2-5")
    in_shared_file = node.add("8-9", device="cpudevnuma001")
    other_cpus = node.add("16-17", device="cpudevnuma002")
    elsewhere = node.add("18", device="cpudevnuma002")
    allocated_elsewhere = node.add(results=[node.result("1", pool="other-node")], configs=[node.config("20")])
    put_spec(node, own_file.uid, "2,3,4,5")
    shared_file = node.cdi_dir / "dra.cpu.json"
    shared_file.write_text(
        cdi_spec(
            cdi_device(in_shared_file.uid, "8-9"),
            cdi_device(other_cpus.uid, "16,48"),
            cdi_device("gone-from-the-api", "24"),
            version="0.3.0",
        )
    )
    stray_file = put_spec(node, elsewhere.uid, "18", name="zz-copied-by-somebody.json")
    put_spec(node, allocated_elsewhere.uid, "20")
    held = {
        own_file.uid: "2-5",
        in_shared_file.uid: "8-9",
        other_cpus.uid: "16,48",
        "gone-from-the-api": "24",
        elsewhere.uid: "18",
        allocated_elsewhere.uid: "20",
    }

    await node.start(SETTINGS)
    assert await node.agreed() == held
    assert (await node.metrics())["adopted_claims"] == 6
    assert not shared_file.exists()
    assert not stray_file.exists()
    assert len(list(node.cdi_dir.iterdir())) == 6
    assert {line["uid"]: line["cpus"] for line in node.log() if line["msg"] == "adopted a claim"} == held
    record = json.loads(node.record_path(own_file).read_bytes())
    assert (record["adopted"], record["devices"], record["name"]) == (True, [], "")
    assert f"CPUs 2-5 are held by claim {own_file.uid}" in await refusal(node, "1-5")

    # Nobody has prepared them yet, so the next driver knows no more.
    await node.restart(SETTINGS)
    assert await node.agreed() == held
    assert (await node.metrics())["adopted_claims"] == 6

    # Verified at the next prepare, good and bad; what is bad stays held.
    answers = await node.prepare(
        own_file, in_shared_file, other_cpus, named("gone-from-the-api"), elsewhere, allocated_elsewhere
    )
    errors = [answer.error for answer in answers]
    assert (errors[0], errors[1], errors[4]) == ("", "", "")
    assert [device.device for answer in answers[:2] for device in answer.devices] == ["cpudevnuma000", "cpudevnuma001"]
    assert "the claim is to have CPUs 16-17, but a CDI spec found at the driver's start gives it 16,48" in errors[2]
    assert "expected the same, or that the claim is unprepared first" in errors[2]
    assert errors[3] == "claim default/gone-from-the-api does not exist"
    assert 'its pool is "other-node"' in errors[5]
    assert await node.agreed() == held
    assert (await node.metrics())["adopted_claims"] == 3
    record = json.loads(node.record_path(own_file).read_bytes())
    assert (record["adopted"], record["name"]) == (False, own_file.name)
    assert [entry["data"] for entry in await node.status_of(own_file)] == [{"cpuset": "2-5"}]
    assert "CPU 48 is held by claim" in await refusal(node, "48-49", "cpudevnuma002")

    # A verified claim is like any other from now on.
    await node.restart(SETTINGS)
    assert (await node.metrics())["adopted_claims"] == 3
    assert await node.prepare(own_file, in_shared_file) == answers[:2]

    # Unprepared, one can be prepared as the API has it.
    assert await node.unprepare(other_cpus, named("gone-from-the-api")) == ["", ""]
    assert await node.errors(other_cpus) == [""]
    del held["gone-from-the-api"]
    assert await node.agreed() == {**held, other_cpus.uid: "16-17"}
    await node.release_all()


async def test_specs_that_cannot_be_used_are_left_and_counted(node):
    folder = node.cdi_dir
    ours = "dra.k8s.io-cpu_claim-"
    broken = {
        f"{ours}cut.json": cdi_spec(cdi_device("cut", "2"))[:60],
        f"{ours}kind.json": cdi_spec(cdi_device("kind", "2"), kind="dra.k8s.io/gpu"),
        f"{ours}list.json": "[]",
        f"{ours}binary.json": "\x00\x01\x02",
        f"{ours}deep.json": "[" * 100_000,
        f"{ours}name.json": cdi_spec(cdi_device("name", "2", name="name")),
        f"{ours}uid.json": cdi_spec(cdi_device("../uid", "2")),
        f"{ours}without.json": cdi_spec({"name": "claim-without"}),
        f"{ours}empty.json": cdi_spec(cdi_device("empty", "")),
        f"{ours}none.json": cdi_spec(cdi_device("none")),
        f"{ours}junk.json": cdi_spec(cdi_device("junk", "2-")),
        f"{ours}huge.json": cdi_spec(cdi_device("huge", "0-4294967295")),
        f"{ours}other.json": cdi_spec({**cdi_device("2nd", "2"), "name": "claim-other"}),
        "dra.cpu.json": cdi_spec(cdi_device("good", "7"), cdi_device("bad", "x"), {}),
    }
    for name, text in broken.items():
        (folder / name).write_text(text)
    (folder / f"{ours}folder.json").mkdir()
    (folder / f"{ours}link.json").symlink_to(folder / f"{ours}cut.json")
    strange = {
        "nvidia.json": cdi_spec(cdi_device("x", "2"), kind="nvidia.com/gpu"),
        "broken.json": "{",
        "notes.yaml": "kind: dra.k8s.io/cpu",
        ".nvidia.json.0123abcd.tmp": "",
    }
    for name, text in strange.items():
        (folder / name).write_text(text)

    await node.start(SETTINGS)
    assert node.specified_in(f"{ours}good.json") == {"good": "7"}
    assert node.recorded() == {"good": "7"}
    metrics = await node.metrics()
    assert (metrics["resource_claims_active"], metrics["allocated_cpus"]) == (1, 1)
    # 13 files, two devices in the shared one, the folder and the link.
    assert metrics['broken_files_total{kind="cdi"}'] == 17
    assert metrics['broken_files_total{kind="record"}'] == 0
    said = {line["path"] for line in node.log() if line["msg"] == "a file cannot be used"}
    assert said == {str(folder / name) for name in [*broken, f"{ours}folder.json", f"{ours}link.json"]}
    for name, text in [*broken.items(), *strange.items()]:
        if name != "dra.cpu.json":
            assert (folder / name).read_text() == text
    left = json.loads((folder / "dra.cpu.json").read_bytes())["devices"]
    assert left == [cdi_device("bad", "x"), {}]
    # A claim whose spec is broken gets a good one when it is prepared.
    claim = node.add("2", uid="cut")
    assert await node.errors(claim) == [""]
    assert node.specified_in(f"{ours}cut.json") == {"cut": "2"}
    assert await node.unprepare(claim, named("good"), named("junk")) == ["", "", ""]
    assert not (folder / f"{ours}junk.json").exists()
    assert (await node.metrics())["allocated_cpus"] == 0


async def test_a_claim_that_stands_in_several_files(node):
    # The runtime resolves no name that stands twice: the CPUs of both are held, and one file is left.
    claim = node.add("2-3")
    put_spec(node, claim.uid, "2-3")
    (node.cdi_dir / "dra.cpu.json").write_text(cdi_spec(cdi_device(claim.uid, "4"), cdi_device("b", "6")))
    await node.start(SETTINGS)
    assert await node.agreed() == {claim.uid: "2-4", "b": "6"}
    [error] = await node.errors(claim)
    assert "the claim is to have CPUs 2-3, but a CDI spec found at the driver's start gives it 2-4" in error
    assert await node.unprepare(claim) == [""]
    assert await node.errors(claim) == [""]
    assert await node.agreed() == {claim.uid: "2-3", "b": "6"}


async def test_an_adopted_claim_that_is_to_have_nothing_of_ours(node):
    claim = node.add(results=[], configs=[])
    put_spec(node, claim.uid, "2-3")
    await node.start(SETTINGS)
    [error] = await node.errors(claim)
    assert "the claim is to have CPUs none, but a CDI spec found at the driver's start gives it 2-3" in error
    assert await node.agreed() == {claim.uid: "2-3"}


# Records.


def put_record(node, cpuset, **changes):
    """Add a claim, write record and spec as an earlier driver has left them, and return the claim."""
    claim = node.add(cpuset)
    raw = node.claim(claim)
    [result] = raw["status"]["allocation"]["devices"]["results"]
    device = {key: result[key] for key in ("request", "pool", "device", "shareID")}
    record = {
        "version": 1,
        "uid": claim.uid,
        "namespace": "default",
        "name": claim.name,
        "podClaimName": None,
        "generation": 1,
        "cpus": cpuset,
        "requests": {"cpus": cpuset},
        "devices": [{**device, "cpus": int(result["consumedCapacity"]["dra.cpu/cpu"])}],
        "fingerprint": decode_claim(raw, claim.uid).fingerprint,
        "adopted": False,
        "preparedAt": "2026-11-28T12:00:00+00:00",
        **changes,
    }
    node.records_dir.mkdir(parents=True, exist_ok=True)
    node.record_path(claim).write_text(json.dumps(record))
    put_spec(node, claim.uid, cpuset)
    return claim


async def test_records_win_over_specs(node):
    one, two, three = (put_record(node, cpuset) for cpuset in ("2-5", "6", "33-34"))
    put_spec(node, one.uid, "1-7")
    node.spec_path(two).unlink()
    (node.cdi_dir / "dra.cpu.json").write_text(cdi_spec(cdi_device(three.uid, "35")))
    await node.start(SETTINGS)
    assert await node.agreed() == {one.uid: "2-5", two.uid: "6", three.uid: "33-34"}
    assert not (node.cdi_dir / "dra.cpu.json").exists()
    metrics = await node.metrics()
    assert metrics["adopted_claims"] == 0
    assert sum(value for name, value in metrics.items() if name.startswith("record_mismatches_total")) == 0
    assert await node.errors(one, two, three) == ["", "", ""]
    assert await node.errors(node.add("1"), node.add("35")) == ["", ""]


async def test_broken_records_are_put_aside_and_their_specs_adopted(node):
    fine = put_record(node, "6")
    broken = {
        "it is not JSON": put_record(node, "1"),
        "it is of version 2; expected 1": put_record(node, "2", version=2),
        f"it is about claim '{fine.uid}'": put_record(node, "3", uid=fine.uid),
        "cpus is empty": put_record(node, "4", cpus=""),
        "cpus are 5, but its requests have 7 together": put_record(node, "5", requests={"cpus": "7"}),
        "devices is empty": put_record(node, "7", devices=[]),
        "fingerprint '' is malformed": put_record(node, "33", fingerprint=""),
        "namespace or name is empty": put_record(node, "34", name=""),
        "preparedAt 'yesterday' is not a time": put_record(node, "35", preparedAt="yesterday"),
        "cpus: ": put_record(node, "36", cpus="0-4294967295"),
        "generation": put_record(node, "37", generation="1"),
    }
    claims = list(broken.values())
    cut = node.record_path(claims[0])
    cut.write_bytes(cut.read_bytes()[:100])
    (node.records_dir / "..json").write_text("{}")
    (node.records_dir / "folder.json").mkdir()
    (node.records_dir / "a.json.corrupt").write_text("of an earlier start")

    await node.start(SETTINGS)
    cpus = ["1", "2", "3", "4", "5", "7", "33", "34", "35", "36", "37"]
    assert await node.agreed() == {
        fine.uid: "6",
        **{claim.uid: cpuset for claim, cpuset in zip(claims, cpus, strict=True)},
    }
    metrics = await node.metrics()
    assert metrics["adopted_claims"] == 11
    assert metrics['broken_files_total{kind="record"}'] == 14
    lines = [line for line in node.log() if line["msg"] == "a file cannot be used"]
    reasons = {line["path"].rpartition("/")[2]: line["reason"] for line in lines}
    for reason, claim in broken.items():
        assert reason in reasons[f"{claim.uid}.json.corrupt"]
    assert "malformed" in reasons["..json.corrupt"]
    assert "Not a regular file" in reasons["folder.json.corrupt"]

    # As good as new after the next prepare, and what was put aside goes with the claim.
    assert await node.errors(*claims, fine) == [""] * 12
    assert (await node.metrics())["adopted_claims"] == 0
    assert await node.unprepare(*claims, fine) == [""] * 12
    assert await node.agreed() == {}
    assert sorted(path.name for path in node.records_dir.iterdir()) == [
        "..json.corrupt",
        "a.json.corrupt",
        "folder.json.corrupt",
    ]


async def test_claims_that_hold_one_cpu_together_are_both_held(node):
    one, two = put_record(node, "2-5"), put_record(node, "5-6")
    put_spec(node, "adopted", "4,7")
    await node.start(SETTINGS)
    assert await node.agreed() == {one.uid: "2-5", two.uid: "5-6", "adopted": "4,7"}
    assert (await node.metrics())['record_mismatches_total{reason="overlap"}'] == 2
    assert f"CPU 5 is held by claim {two.uid}" in await refusal(node, "5")
    # A CPU is free when the last of them lets it go.
    assert await node.unprepare(one) == [""]
    error = await refusal(node, "2-5")
    assert f"CPU 5 is held by claim {two.uid}" in error
    assert "CPU 4 is held by claim adopted" in error
    assert "CPU 2" not in error.replace("cpuset 2-5", "").replace("CPUs 2-5", "")
    assert await node.unprepare(two) == [""]
    assert await node.errors(node.add("2-3,5-6")) == [""]
    assert await node.unprepare(named("adopted")) == [""]
    assert await node.errors(node.add("4,7")) == [""]


# Leftovers of a crash.


async def test_leftovers_of_a_crash_are_cleared_away(node):
    await node.start(SETTINGS)
    claim = node.add("2-5")
    assert await node.errors(claim) == [""]
    await node.process.kill9()
    files = node.files()
    gone = [
        node.records_dir / f".{claim.uid}.json.0123abcd.tmp",
        node.records_dir / ".other.json.0123abcd.tmp",
        node.cdi_dir / f".dra.k8s.io-cpu_claim-{claim.uid}.json.0123abcd.tmp",
        node.cdi_dir / ".dra.cpu.json.0123abcd.tmp",
        node.cdi_dir / f".dra.cpu_metadata_{claim.uid}_cpus.json.0123abcd.tmp",
        node.metadata_dir / f".{claim.uid}_cpus.json.0123abcd.tmp",
        # The metadata of a claim that has no record, and what Kubernetes' helper for drivers had written of another.
        node.cdi_dir / "dra.cpu_metadata_gone_cpus.json",
        node.metadata_dir / "gone_cpus.json",
        node.metadata_dir / "default_gone" / "cpus" / "metadata.json",
    ]
    gone[-1].parent.mkdir(parents=True)
    for path in gone:
        path.write_text("")
    kept = [node.cdi_dir / ".vendor.json.0123abcd.tmp", node.records_dir / ".notes.tmp"]
    for path in kept:
        path.write_text("")
    await node.start(SETTINGS)
    assert node.files() == sorted([*files, *(str(path.relative_to(node.box.folder)) for path in kept)])
    assert await node.agreed() == {claim.uid: "2-5"}
    # An empty temporary file is nothing that cannot be used.
    metrics = await node.metrics()
    assert metrics['broken_files_total{kind="cdi"}'] == metrics['broken_files_total{kind="record"}'] == 0


async def test_nothing_is_served_while_nobody_knows_who_holds_what(node):
    claim = put_record(node, "2-5")
    records = node.records_dir.rename(node.plugin_dir / "elsewhere")
    node.records_dir.write_text("in the way")
    await node.start(SETTINGS, wait=False)
    reason = "cannot read what was prepared before"
    await node.until(lambda: any(line["msg"] == reason for line in node.log()))
    status, text = await node.get("/healthz")
    assert (status, reason in text) == (503, True)
    assert not list(node.box.kubelet.registry_dir.glob("*.sock"))
    node.records_dir.unlink()
    records.rename(node.records_dir)
    await node.box.wait_ready(node.process)
    assert (await node.get("/healthz"))[0] == 200
    assert await node.agreed() == {claim.uid: "2-5"}


# Slices.


async def test_slices_made_by_somebody_else_are_taken_over(node):
    def piece(name, devices, generation, count, owner=True, **changes):
        owners = [{"apiVersion": "v1", "kind": "Node", "name": "test-node", "uid": node_uid, "controller": True}]
        spec = {
            "driver": DRIVER_NAME,
            "nodeName": "test-node",
            "pool": {"name": "test-node", "generation": generation, "resourceSliceCount": count},
            "devices": [{"name": device} for device in devices],
            **changes,
        }
        return {"metadata": {"name": name, **({"ownerReferences": owners} if owner else {})}, "spec": spec}

    node_uid = node.box.api.get(NODES, "test-node")["metadata"]["uid"]
    for body in (
        piece("test-node-dra.cpu-aaaaa", ["cpudevnuma000", "cpudevnuma001"], 7, 2),
        piece("test-node-dra.cpu-bbbbb", ["cpudevnuma007"], 7, 2),
        piece("by-hand", ["cpudevnuma000"], 3, 1, owner=False),
        piece("other-driver", ["gpu-0"], 1, 1, driver="gpu.example.com"),
    ):
        node.box.api.create(RESOURCE_SLICES, body)
    await node.start(SETTINGS)

    def told():
        pieces = node.box.complete_slices()
        devices = [device for piece in pieces for device in piece["spec"]["devices"]]
        return {device["name"]: device.get("attributes", {}).get("dra.cpu/cpuIDs") for device in devices}

    groups = ["1-7,33-39", "8-15,40-47", "16-23,48-55", "24-31,56-63"]
    wanted = {f"cpudevnuma00{number}": {"string": cpus} for number, cpus in enumerate(groups)}
    await node.box.api.wait_until(lambda: told() == wanted, 20)
    ours = node.box.api.list(RESOURCE_SLICES, f"spec.driver={DRIVER_NAME}")
    assert len(ours) == 1
    assert ours[0]["spec"]["pool"]["generation"] > 7
    assert node.box.api.get(RESOURCE_SLICES, "other-driver") is not None


@pytest.mark.parametrize("layout", ["one file each", "one file"])
async def test_specs_of_both_layouts_survive_a_start_without_the_api_server(node, layout):
    if layout == "one file":
        (node.cdi_dir / "dra.cpu.json").write_text(cdi_spec(cdi_device("a", "2"), cdi_device("b", "3")))
    else:
        put_spec(node, "a", "2")
        put_spec(node, "b", "3")
    await node.box.api.stop()
    await node.start(SETTINGS, wait=False)
    await node.box.kubelet.wait_registered(DRIVER_NAME, 30, since=node.process.started_at)
    assert await node.agreed() == {"a": "2", "b": "3"}
    assert await node.unprepare(named("a")) == [""]
    assert await node.agreed() == {"b": "3"}
    await node.box.api.start()
