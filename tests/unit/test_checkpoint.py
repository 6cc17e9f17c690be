# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import os
import stat
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.checkpoint import RecordStore, decode_record, encode_record
from driver.errors import ClaimError
from driver.ledger import PreparedDevice, Record
from driver.names import ClaimUID
from fastcpu import CpuSet

UID = ClaimUID("3f6c1d2e-0b1a-4c5d-8e9f-a0b1c2d3e4f5")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "plugin" / "claims"


@pytest.fixture
def store(folder):
    return RecordStore(folder)


@pytest.fixture
def document(make_record):
    return json.loads(encode_record(make_record(UID)))


def names(folder):
    return sorted(os.listdir(folder))


async def test_what_was_written_is_read_back(store, folder, make_record):
    record = make_record(
        UID,
        "2-5,64,8000",
        pod_claim_name="cpus",
        generation=7,
        by_request={"a": CpuSet.parse("2-5"), "b/large": CpuSet([64, 8000])},
        devices=(
            PreparedDevice(request="a", pool="node-1", device="cpudevnuma000", share_id="share-1", cpus=4),
            PreparedDevice(request="b/large", pool="node-1", device="cpudevnuma001", share_id=None, cpus=2),
        ),
        fingerprint="0123456789abcdef" * 4,
        prepared_at=datetime(2026, 11, 29, 12, 30, 1, 250, tzinfo=UTC),
    )
    adopted = make_record(
        "b", "7", namespace="", name="", devices=(), by_request={}, fingerprint="", generation=0, adopted=True
    )
    assert await store.write(record) is True
    assert await store.write(adopted) is True
    loaded = await store.load()
    assert loaded.records == (record, adopted)
    assert loaded.broken == ()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert stat.S_IMODE((folder / f"{UID}.json").stat().st_mode) == 0o640


async def test_the_file_is_for_people_too(store, folder, make_record):
    await store.write(make_record("a", "2-5"))
    lines = (folder / "a.json").read_text().splitlines()
    assert '  "cpus": "2-5",' in lines
    assert '  "preparedAt": "2026-11-29T12:30:00+00:00"' in lines


async def test_writing_the_same_again_writes_nothing(store, make_record, disk):
    await store.write(make_record("a"))
    disk.calls.clear()
    assert await store.write(make_record("a")) is False
    assert "write" not in [operation for operation, _ in disk.calls]
    assert await store.write(make_record("a", "2-6")) is True


async def test_removing(store, folder, make_record):
    await store.write(make_record("a"))
    await store.write(make_record("b"))
    assert store.remove_all_now([ClaimUID("a")]) == [True]
    assert store.remove_all_now([ClaimUID("a")]) == [False]
    assert names(folder) == ["b.json"]
    assert [record.uid for record in (await store.load()).records] == ["b"]


def test_removing_where_there_is_no_folder(store, folder):
    assert store.remove_all_now([ClaimUID("a")]) == [False]
    assert not folder.exists()


async def test_an_empty_start_makes_the_folder(store, folder):
    loaded = await store.load()
    assert loaded.records == loaded.broken == ()
    assert folder.is_dir()


BROKEN = {
    "empty": (b"", "not JSON"),
    "cut short": (b'{"version": 1, "uid": "a", "na', "not JSON"),
    "not UTF-8": (b'{"version": 1, "uid": "\xff"}', "not JSON"),
    "nested too deeply": (b"[" * 200_000, "not JSON"),
    "a number of a million digits": (b"1" * 1_000_000, "not JSON"),
    "not an object": (b"[]", "the record is a list; expected an object"),
    "zeros, as some file systems leave them": (b"\0" * 4096, "not JSON"),
    "too large": (b" " * (1 << 20) + b"{}", "Larger than 1048576 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_file_is_put_aside_and_reported(store, folder, make_record, name):
    content, reason = BROKEN[name]
    await store.write(make_record("b"))
    (folder / "a.json").write_bytes(content)
    loaded = await store.load()
    assert [record.uid for record in loaded.records] == ["b"]
    assert [file.path for file in loaded.broken] == [folder / "a.json.corrupt"]
    assert reason in loaded.broken[0].reason
    assert (folder / "a.json.corrupt").read_bytes() == content
    assert names(folder) == ["a.json.corrupt", "b.json"]
    # It is reported as long as it is there, and goes with its claim.
    again = await store.load()
    assert [(file.path, file.reason) for file in again.broken] == [(folder / "a.json.corrupt", "put aside earlier")]
    assert store.remove_all_now([ClaimUID("a")]) == [True]
    assert names(folder) == ["b.json"]


CHANGES = [
    ({"version": 2}, "it is of version 2; expected 1"),
    ({"version": True}, "version is a boolean; expected a whole number"),
    ({"version": None}, "version is missing; expected a whole number"),
    ({"uid": "b"}, "it is about claim 'b'; expected"),
    ({"uid": 5}, "uid is a whole number; expected a string"),
    ({"namespace": None}, "namespace is missing; expected a string"),
    ({"namespace": ""}, "namespace or name is empty; expected the claim's"),
    ({"name": ["x"]}, "name is a list; expected a string"),
    ({"podClaimName": 3}, "podClaimName is a whole number; expected a string"),
    ({"generation": 1.5}, "generation is a number with a fraction"),
    ({"cpus": None}, "cpus is missing; expected a string"),
    ({"cpus": ""}, "cpus is empty; expected CPUs"),
    ({"cpus": "5-2"}, "cpus: cpulist '5-2', character 1: "),
    ({"cpus": "0-4294967295"}, "cpus: cpulist '0-4294967295', character 3: "),
    ({"cpus": "0-1048575:1/3," * 17 + "1"}, "it has 17 strides; expected plain ranges"),
    ({"cpus": "2-6"}, "cpus are 2-6, but its requests have 2-5 together"),
    ({"requests": []}, "requests is a list; expected an object"),
    ({"requests": {}}, "cpus are 2-5, but its requests have  together"),
    ({"requests": {"cpus": "2-5,x"}}, "requests['cpus']: cpulist '2-5,x'"),
    ({"requests": {"cpus": "2-6"}}, "cpus are 2-5, but its requests have 2-6 together"),
    ({"devices": {}}, "devices is an object; expected a list"),
    ({"devices": []}, "devices is empty; expected at least one"),
    ({"devices": [7]}, "devices[0] is a whole number; expected an object"),
    ({"devices": [{}]}, "devices[0].request is missing; expected a string"),
    ({"fingerprint": "00"}, "fingerprint '00' is malformed; expected 64 hexadecimal digits"),
    ({"fingerprint": "0" * 64 + "\n"}, "is malformed; expected 64 hexadecimal digits"),
    ({"adopted": 0}, "adopted is a whole number; expected a boolean"),
    ({"preparedAt": "yesterday"}, "preparedAt 'yesterday' is not a time"),
    ({"preparedAt": "2026-11-29T12:30:00"}, "preparedAt '2026-11-29T12:30:00' is not in UTC"),
    ({"preparedAt": "2026-11-29T12:30:00+02:00"}, "is not in UTC"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[str(change) for change, _ in CHANGES])
def test_a_record_that_no_prepare_can_have_written_is_refused(document, change, reason):
    with pytest.raises(ClaimError) as refusal:
        decode_record(json.dumps(document | change).encode(), UID)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("key", ["request", "pool", "device", "shareID", "cpus"])
def test_a_device_of_wrong_types_is_refused(document, key):
    document["devices"][0][key] = [1]
    with pytest.raises(ClaimError, match=rf"devices\[0\].{key} is a list"):
        decode_record(json.dumps(document).encode(), UID)


def test_an_adopted_record_needs_no_more_than_its_cpus(document):
    bare = {"namespace": "", "name": "", "requests": {}, "devices": [], "fingerprint": "", "adopted": True}
    record = decode_record(json.dumps(document | bare).encode(), UID)
    assert record.adopted
    assert record.cpus == CpuSet.parse("2-5")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=8,
)
KEYS = ["version", "uid", "namespace", "name", "podClaimName", "generation", "cpus", "requests", "devices"]
KEYS += ["fingerprint", "adopted", "preparedAt"]


@given(change=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3))
def test_nothing_but_a_record_or_a_reason_comes_of_any_json(change):
    document = {
        "version": 1,
        "uid": UID,
        "namespace": "default",
        "name": "cpus",
        "podClaimName": None,
        "generation": 1,
        "cpus": "2-5",
        "requests": {"cpus": "2-5"},
        "devices": [{"request": "cpus", "pool": "n", "device": "d", "shareID": None, "cpus": 4}],
        "fingerprint": "0" * 64,
        "adopted": False,
        "preparedAt": "2026-11-29T12:30:00+00:00",
    }
    try:
        record = decode_record(json.dumps(document | change).encode(), UID)
    except ClaimError:
        return
    assert isinstance(record, Record)
    assert decode_record(encode_record(record), UID) == record


async def test_files_of_others_in_the_folder_do_no_harm(store, folder, make_record):
    await store.write(make_record("a"))
    (folder / "README").write_text("not ours")
    (folder / "-b.json").write_bytes((folder / "a.json").read_bytes())
    (folder / "c.json").mkdir()
    (folder / "d.json").symlink_to(folder / "a.json")
    os.mkfifo(folder / "e.json")
    (folder / os.fsdecode(b"\xff.json")).touch()
    loaded = await store.load()
    assert [record.uid for record in loaded.records] == ["a"]
    assert len(loaded.broken) == 5
    assert all("\n" not in file.reason for file in loaded.broken)
    assert (folder / "README").read_text() == "not ours"
    assert sorted(name for name in names(folder) if name.endswith(".json")) == ["a.json"]


async def test_a_copy_of_a_record_under_another_name_is_not_believed(store, folder, make_record):
    await store.write(make_record("a"))
    (folder / "b.json").write_bytes((folder / "a.json").read_bytes())
    loaded = await store.load()
    assert [record.uid for record in loaded.records] == ["a"]
    assert "it is about claim 'a'; expected b" in loaded.broken[0].reason


async def test_temporary_files_of_a_crash_are_cleared_away(store, folder, make_record):
    await store.write(make_record("a"))
    (folder / ".b.json.0123abcd.tmp").write_text("{")
    loaded = await store.load()
    assert [record.uid for record in loaded.records] == ["a"]
    assert loaded.broken == ()
    assert names(folder) == ["a.json"]


async def test_a_file_that_cannot_be_read_or_put_aside_stays(store, folder, make_record, disk):
    await store.write(make_record("a"))
    disk.fail("read", "a.json", errno.EIO)
    disk.fail("rename", "a.json", errno.EROFS)
    loaded = await store.load()
    assert loaded.records == ()
    assert loaded.broken[0].path == folder / "a.json"
    assert os.strerror(errno.EIO) in loaded.broken[0].reason
    assert "cannot be put aside" in loaded.broken[0].reason
    disk.repair()
    assert [record.uid for record in (await store.load()).records] == ["a"]


async def test_a_folder_that_cannot_be_listed_is_an_error(store, folder, make_record, disk):
    await store.write(make_record("a"))
    disk.fail("listdir", folder.name, errno.EACCES)
    with pytest.raises(PermissionError):
        await store.load()


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("mkdir", errno.EACCES),
        ("open", errno.EACCES),
        ("write", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("rename", errno.EIO),
    ],
)
async def test_a_record_that_cannot_be_written_is_an_error_and_no_file(
    store, folder, make_record, disk, operation, error
):
    disk.fail(operation, folder.name, error)
    with pytest.raises(OSError, match=os.strerror(error)):
        await store.write(make_record("a"))
    disk.repair()
    assert (await store.load()).records == ()
    assert await store.write(make_record("a")) is True
