# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import logging

import pytest

from driver.errors import ApiError
from driver.ledger import PreparedDevice
from driver.names import ClaimUID
from driver.status import StatusWriter, device_entries, tells
from fastcpu import CpuSet

A, B = ClaimUID("a"), ClaimUID("b")


class Api:
    """Answers calls with what it is told, and knows what was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, list[object]]] = []
        self.failures: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.running = self.most_running = 0

    async def apply_claim_devices(self, namespace, name, uid, devices):
        self.calls.append((namespace, name, uid, list(devices)))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.failures:
                raise self.failures.pop(0)
        finally:
            self.running -= 1


@pytest.fixture
def api():
    return Api()


@pytest.fixture
async def writer(api):
    writer = StatusWriter(api, settle_s=0.0, first_delay_s=0.0)
    yield writer
    await writer.close()


def entries(record):
    return device_entries(record, {})


async def test_an_entry_is_written_in_the_background(api, writer, make_record, until):
    record = make_record("a", "2-5")
    writer.submit(record, entries(record))
    assert api.calls == []
    await until(lambda: writer.waiting == 0)
    entry = {"driver": "dra.cpu", "pool": "node-1", "device": "cpudevnuma000", "data": {"cpuset": "2-5"}}
    assert api.calls == [("default", "claim-a", A, [entry])]


async def test_a_claim_that_is_gone_before_it_has_settled_costs_no_call(api, make_record, until):
    writer = StatusWriter(api, settle_s=0.02)
    for name in "ab":
        writer.submit(make_record(name), entries(make_record(name)))
    writer.drop(A)
    await until(lambda: writer.waiting == 0)
    assert [uid for _, _, uid, _ in api.calls] == [B]


async def test_failures_that_may_pass_are_tried_again(api, writer, make_record, caplog, until):
    api.failures = [ApiError(0, "no connection"), ApiError(503, "busy"), ApiError(403, "not yet")]
    writer.submit(make_record("a"), entries(make_record("a")))
    await until(lambda: writer.waiting == 0)
    assert len(api.calls) == 4
    assert caplog.text == ""


async def test_failures_that_stay_are_not(api, writer, make_record, caplog, until):
    api.failures = [ApiError(409, "another claim of this name")]
    writer.submit(make_record("a"), entries(make_record("a")))
    await until(lambda: writer.waiting == 0)
    assert len(api.calls) == 1
    assert "the claim's status does not tell its CPUs" in caplog.text


async def test_tries_are_bounded(api, writer, make_record, caplog, until):
    api.failures = [ApiError(503, "busy")] * 100
    writer.submit(make_record("a"), entries(make_record("a")))
    await until(lambda: writer.waiting == 0)
    assert len(api.calls) == 8
    (line,) = caplog.records
    assert (line.levelno, line.fields["attempts"]) == (logging.WARNING, 8)


async def test_what_is_unprepared_meanwhile_is_dropped(api, writer, make_record, until):
    api.gate = asyncio.Event()
    for uid in "abcdef":
        writer.submit(make_record(uid), entries(make_record(uid)))
    await until(lambda: api.running == 4)
    writer.drop(A)
    writer.drop(ClaimUID("f"))
    writer.drop(ClaimUID("unknown"))
    api.gate.set()
    await until(lambda: writer.waiting == 0)
    assert [uid for _, _, uid, _ in api.calls] == ["a", "b", "c", "d", "e"]
    assert api.most_running == 4


async def test_a_newer_submission_takes_the_place_of_an_older_one(api, writer, make_record, until):
    api.gate = asyncio.Event()
    for uid in "bcde":
        writer.submit(make_record(uid), entries(make_record(uid)))
    await until(lambda: api.running == 4)
    writer.submit(make_record("a", "1"), entries(make_record("a", "1")))
    writer.submit(make_record("a", "2"), entries(make_record("a", "2")))
    api.gate.set()
    await until(lambda: writer.waiting == 0)
    assert [devices[0]["data"] for _, _, uid, devices in api.calls if uid == "a"] == [{"cpuset": "2"}]


async def test_nothing_to_say_is_not_said(api, writer, make_record):
    writer.submit(make_record("a"), [])
    assert writer.waiting == 0


async def test_what_waits_is_bounded(api, writer, make_record, caplog):
    api.gate = asyncio.Event()
    for number in range(1025):
        writer.submit(make_record(f"u{number}"), [{"driver": "dra.cpu"}])
    assert writer.waiting == 1024
    assert "too many claims wait for their status" in caplog.text


async def test_an_internal_error_is_logged(api, writer, make_record, caplog, until):
    api.failures = [ValueError("unexpected")]
    writer.submit(make_record("a"), entries(make_record("a")))
    await until(lambda: caplog.text)
    assert "internal error in writing a claim's status" in caplog.text
    assert writer.waiting == 0


async def test_closing_gives_up_what_waits(api, make_record, until):
    writer = StatusWriter(api, settle_s=0.0, first_delay_s=0.0)
    api.gate = asyncio.Event()
    writer.submit(make_record("a"), entries(make_record("a")))
    await until(lambda: api.running == 1)
    await writer.close()
    assert api.running == 0
    await until(lambda: writer.waiting == 0)


def test_each_device_is_told_its_own_cpus(make_record):
    def device(request: str, name: str, share_id: str | None) -> PreparedDevice:
        return PreparedDevice(request=request, pool="node-1", device=name, share_id=share_id, cpus=2)

    record = make_record(
        "a",
        "2-3,66-67,70",
        by_request={"r": CpuSet.parse("2-3,66-67"), "s/x": CpuSet([70])},
        devices=(device("r", "numa0", "one"), device("r", "numa1", None), device("s/x", "gone", None)),
    )
    found = device_entries(record, {"numa0": CpuSet(range(64)), "numa1": CpuSet(range(64, 128))})
    common = {"driver": "dra.cpu", "pool": "node-1"}
    assert found == [
        {**common, "device": "numa0", "shareID": "one", "data": {"cpuset": "2-3"}},
        {**common, "device": "numa1", "data": {"cpuset": "66-67"}},
        {**common, "device": "gone", "data": {"cpuset": "70"}},
    ]


def test_a_text_too_long_for_the_api_is_told_in_strides_or_not_at_all(make_record, caplog):
    every_second = CpuSet(range(0, 8192, 2))
    record = make_record("a", str(every_second))
    (entry,) = device_entries(record, {})
    assert entry["data"] == {"cpusetStrided": "0-8190:1/2"}
    assert CpuSet.parse("0-8190:1/2") == every_second
    scattered = CpuSet(cpu * cpu % 8191 for cpu in range(8192)) - CpuSet(range(0, 8192, 7))
    record = make_record("a", str(scattered))
    assert device_entries(record, {}) == []
    assert "too scattered to be told" in caplog.text


@pytest.mark.parametrize("cpulist", ["2-5", "0-8190:1/2"])
def test_no_data_is_larger_than_the_api_takes(make_record, cpulist):
    for entry in device_entries(make_record("a", cpulist), {}):
        assert len(json.dumps(entry["data"])) <= 10_240


OURS = {"driver": "dra.cpu", "pool": "n", "device": "d", "shareID": "s", "data": {"cpuset": "1"}}
THEIRS = {"driver": "gpu", "pool": "n", "device": "d"}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([OURS], True),
        ([THEIRS, {**OURS, "conditions": []}], True),
        ([{**OURS, "data": {"cpuset": "2"}}], False),
        ([{**OURS, "shareID": "t"}], False),
        ([OURS, {**OURS, "device": "e"}], False),
        ([THEIRS], False),
        ([], False),
        (None, False),
        ("text", False),
        ([7, None], False),
    ],
)
def test_what_the_status_tells_already(devices, expected):
    assert tells({"status": {"devices": devices}}, [OURS]) is expected


@pytest.mark.parametrize("claim", [{}, {"status": None}, {"status": 7}])
def test_a_claim_without_status_tells_nothing(claim):
    assert not tells(claim, [OURS])
