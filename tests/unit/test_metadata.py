# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import logging
import os
import stat

import pytest

from driver.ledger import PreparedDevice
from driver.metadata import MetadataStore
from driver.names import ClaimUID

UID = ClaimUID("3f6c1d2e-0b1a-4c5d-8e9f-a0b1c2d3e4f5")
OTHER = ClaimUID("b6c1d2e0-0b1a-4c5d-8e9f-a0b1c2d3e4f5")
ATTRIBUTES = {
    "cpudevnuma000": {"dra.cpu/numaNodeID": {"int": 0}, "dra.cpu/smtEnabled": {"bool": False}},
    "cpudevnuma001": {"dra.cpu/numaNodeID": {"int": 1}, "resource.kubernetes.io/pcieRoot": {"strings": ["pci0000:00"]}},
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "plugin" / "dra-device-metadata"


@pytest.fixture
def cdi_folder(tmp_path):
    return tmp_path / "cdi"


@pytest.fixture
def store(folder, cdi_folder):
    return MetadataStore(folder, cdi_folder)


def stream(path):
    """The JSON objects of a metadata file, in order."""
    text, decoder, objects = path.read_text(), json.JSONDecoder(), []
    while text.strip():
        found, end = decoder.raw_decode(text.lstrip())
        objects.append(found)
        text = text.lstrip()[end:]
    return objects


def files(folder):
    return sorted(
        os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names
    )


def device(request: str, name: str = "cpudevnuma000", cpus: int = 4, share_id: str | None = None) -> PreparedDevice:
    return PreparedDevice(request=request, pool="node-1", device=name, share_id=share_id, cpus=cpus)


async def test_a_claim_of_one_request(store, folder, cdi_folder, make_record):
    record = make_record(UID, name="cpus", devices=(device("exclusive"),), generation=9)
    assert await store.write(record, ATTRIBUTES) == {"exclusive": f"dra.cpu/metadata={UID}_exclusive"}

    path = folder / f"{UID}_exclusive.json"
    assert files(folder) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    body = {
        "kind": "DeviceMetadata",
        "metadata": {"name": "cpus", "namespace": "default", "uid": UID, "generation": 1},
        "requests": [
            {
                "name": "exclusive",
                "devices": [
                    {
                        "driver": "dra.cpu",
                        "pool": "node-1",
                        "name": "cpudevnuma000",
                        "attributes": {
                            "dra.cpu/numaNodeID": {"int": 0},
                            "dra.cpu/smtEnabled": {"bool": False},
                            "dra.cpu/allocatedNumCPUs": {"int": 4},
                        },
                    }
                ],
            }
        ],
    }
    assert stream(path) == [
        {"apiVersion": "metadata.resource.k8s.io/v1beta1", **body},
        {"apiVersion": "metadata.resource.k8s.io/v1alpha1", **body},
    ]

    cdi_file = cdi_folder / f"dra.cpu_metadata_{UID}_exclusive.json"
    assert files(cdi_folder) == [cdi_file.name]
    assert stat.S_IMODE(cdi_file.stat().st_mode) == 0o644
    assert json.loads(cdi_file.read_bytes()) == {
        "cdiVersion": "0.5.0",
        "kind": "dra.cpu/metadata",
        "devices": [
            {
                "name": f"{UID}_exclusive",
                "containerEdits": {
                    "mounts": [
                        {
                            "hostPath": str(path),
                            "containerPath": "/var/run/kubernetes.io/dra-device-attributes"
                            "/resourceclaims/cpus/exclusive/dra.cpu-metadata.json",
                            "options": ["ro", "bind"],
                        }
                    ]
                },
            }
        ],
    }


async def test_a_uid_that_begins_with_a_letter_needs_no_newer_cdi(store, cdi_folder, make_record):
    await store.write(make_record(OTHER), ATTRIBUTES)
    assert json.loads((cdi_folder / f"dra.cpu_metadata_{OTHER}_cpus.json").read_bytes())["cdiVersion"] == "0.3.0"


async def test_requests_sub_requests_and_shares(store, folder, make_record):
    record = make_record(
        UID,
        name="cpus",
        devices=(
            device("a", share_id="one"),
            device("b/large", "cpudevnuma001", 6),
            device("a", share_id="two"),
            device("a", "unknown", 0),
        ),
    )
    assert await store.write(record, ATTRIBUTES) == {
        "a": f"dra.cpu/metadata={UID}_a",
        "b": f"dra.cpu/metadata={UID}_b",
    }
    of_a, of_b = (stream(folder / f"{UID}_{request}.json")[0]["requests"] for request in "ab")
    assert [request["name"] for request in of_a] == ["a"]
    assert [found["name"] for found in of_a[0]["devices"]] == ["cpudevnuma000", "cpudevnuma000", "unknown"]
    assert "attributes" not in of_a[0]["devices"][2]
    assert of_b == [
        {
            "name": "b/large",
            "devices": [
                {
                    "driver": "dra.cpu",
                    "pool": "node-1",
                    "name": "cpudevnuma001",
                    "attributes": {**ATTRIBUTES["cpudevnuma001"], "dra.cpu/allocatedNumCPUs": {"int": 6}},
                }
            ],
        }
    ]


async def test_a_claim_from_a_template_is_found_under_the_pods_name_for_it(store, folder, cdi_folder, make_record):
    await store.write(make_record(UID, name="pod-cpus-x7k2p", pod_claim_name="cpus"), ATTRIBUTES)
    assert all(found["podClaimName"] == "cpus" for found in stream(folder / f"{UID}_cpus.json"))
    (cdi_file,) = cdi_folder.iterdir()
    mount = json.loads(cdi_file.read_bytes())["devices"][0]["containerEdits"]["mounts"][0]
    assert mount["containerPath"] == (
        "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/cpus/cpus/dra.cpu-metadata.json"
    )


async def test_no_more_attributes_than_the_format_allows(store, folder, make_record):
    most = {f"example.com/{number}": {"int": number} for number in range(32)}
    await store.write(make_record(UID, name="cpus"), {"cpudevnuma000": most})
    found = stream(folder / f"{UID}_cpus.json")[0]["requests"][0]["devices"][0]["attributes"]
    assert found == most


async def test_what_is_lost_is_written_again_and_the_rest_stays(store, folder, cdi_folder, make_record):
    record = make_record(UID, name="cpus", devices=(device("a"), device("b")))
    first = await store.write(record, ATTRIBUTES)
    inode = (folder / f"{UID}_a.json").stat().st_ino
    (folder / f"{UID}_b.json").unlink()
    (cdi_folder / f"dra.cpu_metadata_{UID}_a.json").write_text("{}")
    assert await store.write(record, ATTRIBUTES) == first
    # A container has this very file mounted: a new one in its place would not reach it.
    assert (folder / f"{UID}_a.json").stat().st_ino == inode
    assert len(stream(folder / f"{UID}_b.json")) == 2
    assert json.loads((cdi_folder / f"dra.cpu_metadata_{UID}_a.json").read_bytes())["kind"] == "dra.cpu/metadata"


HOSTILE = [
    {"name": "../../etc"},
    {"name": ".."},
    {"name": ""},
    {"devices": (device("../x/large"),)},
    {"devices": (device(".."),)},
    {"devices": (device("UPPER"),)},
    {"pod_claim_name": "../../../etc/passwd"},
    {"pod_claim_name": "a:rw"},
    {"devices": (device("r" * 64),)},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
async def test_names_are_checked_before_they_become_paths(store, tmp_path, make_record, caplog, change):
    assert await store.write(make_record(UID, **change), ATTRIBUTES) == {}
    assert set(files(tmp_path)) <= {f"plugin/dra-device-metadata/{UID}_cpus.json"}
    assert "the claim gets no device metadata" in caplog.text
    store.remove_now(UID, "default", "..")
    store.remove_now(UID, "..", "cpus")


@pytest.mark.parametrize(
    ("operation", "part", "error"),
    [
        ("mkdir", "plugin", errno.EACCES),
        ("mkdir", "cdi", errno.EROFS),
        ("write", "dra-device-metadata", errno.ENOSPC),
        ("rename", "dra.cpu_metadata", errno.EIO),
    ],
)
async def test_a_failure_is_logged_and_the_claim_gets_none(store, make_record, disk, caplog, operation, part, error):
    disk.fail(operation, part, error)
    assert await store.write(make_record(UID), ATTRIBUTES) == {}
    (line,) = caplog.records
    assert (line.levelno, line.message) == (logging.WARNING, "the claim gets no device metadata")
    assert os.strerror(error) in str(line.fields["reason"])
    disk.repair()
    assert await store.write(make_record(UID), ATTRIBUTES) == {"cpus": f"dra.cpu/metadata={UID}_cpus"}


async def test_the_longest_names_are_no_obstacle(store, make_record):
    record = make_record(UID, namespace="n" * 63, name="c" * 253, devices=(device("r" * 63),))
    assert await store.write(record, ATTRIBUTES) == {"r" * 63: f"dra.cpu/metadata={UID}_{'r' * 63}"}


@pytest.mark.parametrize("restarted", [False, True])
async def test_removing_takes_only_what_belongs_to_the_claim(store, folder, cdi_folder, make_record, restarted):
    await store.write(make_record(UID, name="cpus", devices=(device("a"), device("b"))), ATTRIBUTES)
    # The claim was made again under its name, and prepared before the old one was unprepared.
    await store.write(make_record(OTHER, name="cpus", devices=(device("b"),)), ATTRIBUTES)
    (cdi_folder / "other.json").touch()
    if restarted:
        store = MetadataStore(folder, cdi_folder)
    store.remove_now(UID, "default", "cpus")
    assert files(folder) == [f"{OTHER}_b.json"]
    assert files(cdi_folder) == [f"dra.cpu_metadata_{OTHER}_b.json", "other.json"]
    store.remove_now(OTHER, "default", "cpus")
    assert list(folder.iterdir()) == []
    assert files(cdi_folder) == ["other.json"]


async def test_what_this_process_wrote_is_removed_without_a_look_at_it(store, folder, cdi_folder, make_record, disk):
    await store.write(make_record(UID, name="cpus", devices=(device("a"), device("b"))), ATTRIBUTES)
    disk.calls.clear()
    store.remove_now(UID, "default", "cpus")
    assert {operation for operation, _ in disk.calls} == {"unlink"}
    assert list(folder.iterdir()) == list(cdi_folder.iterdir()) == []


async def test_removing_what_was_never_written(store, folder, cdi_folder, caplog):
    store.remove_now(UID, "default", "cpus")
    assert not folder.exists()
    assert not cdi_folder.exists()
    assert caplog.text == ""


def helpers_file(folder, uid, name="default_cpus"):
    """Write what Kubernetes' helper for drivers writes, as far as it matters here."""
    path = folder / name / "cpus" / "metadata.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"metadata": {"uid": uid}}))
    return path


async def test_the_helpers_files_go_with_their_claim(store, folder, make_record):
    path = helpers_file(folder, OTHER)
    await store.write(make_record(UID, name="cpus"), ATTRIBUTES)
    store.remove_now(UID, "default", "cpus")
    assert path.exists()
    store.remove_now(OTHER, "default", "cpus")
    assert list(folder.iterdir()) == []


async def test_a_helpers_file_that_does_not_say_whose_it_is_is_left_for_the_next_start(store, folder):
    for content in ("", "{", "[]", '{"metadata": {}}', '{"metadata": {"uid": 7}}', "[" * 200_000):
        path = helpers_file(folder, UID)
        path.write_text(content)
        store.remove_now(UID, "default", "cpus")
        assert path.read_text() == content
        await store.sweep({UID})
        assert not path.exists()


async def test_a_failed_removal_is_logged(store, make_record, disk, caplog):
    await store.write(make_record(UID, name="cpus"), ATTRIBUTES)
    disk.fail("unlink", "dra.cpu_metadata", errno.EROFS)
    store.remove_now(UID, "default", "cpus")
    assert "device metadata of a claim is left behind" in caplog.text


async def test_the_sweep_takes_what_belongs_to_no_known_claim(store, folder, cdi_folder, make_record):
    await store.write(make_record(UID, name="kept", devices=(device("a"),)), ATTRIBUTES)
    await store.write(make_record(OTHER, name="gone", devices=(device("a"), device("b"))), ATTRIBUTES)
    kept = helpers_file(folder, UID, "default_kept.json")
    gone = [helpers_file(folder, OTHER, f"default_{name}") for name in ("gone", "gone.json")]
    for path in (kept, *gone):
        path.with_name(".metadata.json.0123abcd.tmp").touch()
    (cdi_folder / f".dra.cpu_metadata_{UID}_a.json.0123abcd.tmp").touch()
    (folder / f".{UID}_a.json.0123abcd.tmp").touch()
    (cdi_folder / "other.json").touch()
    (folder / "a file").touch()
    await store.sweep({UID})
    assert files(folder) == [f"{UID}_a.json", "a file", "default_kept.json/cpus/metadata.json"]
    assert files(cdi_folder) == [f"dra.cpu_metadata_{UID}_a.json", "other.json"]
    assert not any(path.parent.parent.exists() for path in gone)


async def test_a_sweep_without_folders_or_rights_is_no_failure(store, folder, disk, caplog):
    await store.sweep(set())
    assert caplog.text == ""
    folder.mkdir(parents=True)
    disk.fail("listdir", folder.name, errno.EACCES)
    await store.sweep(set())
    assert "old device metadata is left behind" in caplog.text
