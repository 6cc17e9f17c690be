# SPDX-License-Identifier: Apache-2.0
"""The load generator: a run with the real driver in the sandbox, and what it says of drivers that go wrong."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from driver.cdi import CdiDirectory
from driver.names import ClaimUID
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.plugins import PreparedClaim, PreparedDevice
from fastcpu import CpuSet
from loadgenerator.claims import Checker, LoadClaim, WrongAnswerError
from loadgenerator.options import parse_options
from loadgenerator.phases import Times

LOAD = Path(__file__).parents[2] / "bench" / "load.py"
UID = ClaimUID("8a6f0d4e-6d0b-4c53-9f3c-0f6a1f1f2b11")


async def run(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(LOAD), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


async def test_a_run_in_the_sandbox(tmp_path):
    results = tmp_path / "results.json"
    status, output, errors = await run(
        *("--cpus", "64", "--per-call", "1,8,64", "--calls", "3", "--rate", "500", "--starts", "2"),
        *("--claims", "20", "--hold", "0.01", "--containers", "3", "--json", str(results)),
    )
    assert (status, errors) == (0, "")
    assert "start → registered" in output
    assert "64 claims in a call do not fit" in output
    document = json.loads(results.read_text())
    assert document["API server"].endswith("-box")
    (machine,) = document["machines"]
    assert machine["cpus"] == 64
    assert 0 < machine["registered_s"] < 60
    assert 10 < machine["idle_mb"] < 1000
    assert [latency["claims"] for latency in machine["latency_ms"]] == [1, 8]
    for latency in machine["latency_ms"]:
        for kind in ("get", "prepare", "unprepare"):
            assert 0 < latency[kind]["p50"] <= latency[kind]["p99"] <= latency[kind]["p99.9"]
        assert latency["ratio"] == pytest.approx(latency["prepare"]["p50"] / latency["get"]["p50"])
    assert machine["throughput"]["claims"] == 20
    assert machine["throughput"]["cpu_ms_per_claim"] > 0


async def test_a_driver_that_ends_is_told_with_the_end_of_its_log():
    status, _, errors = await run("--cpus", "64", "--driver", "sh -c 'echo no CPUs on {node}; exit 7'")
    assert status == 1
    assert "the driver ended with status 7:\nno CPUs on load-" in errors


@pytest.mark.parametrize("wrong", [("--calls", "0"), ("--rate", "0"), ("--rate", "nan"), ("--cpus", "64,x")])
def test_wrong_numbers_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_options(list(wrong))
    assert caught.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_percentiles():
    times = Times([number / 1000 for number in range(1, 1001)])
    assert times.percentile_ms(50) == pytest.approx(500.5)
    assert times.percentile_ms(99.9) == pytest.approx(999, abs=1.1)


@pytest.fixture
def claim():
    name = ClaimName(namespace="default", name="c", uid=UID)
    return LoadClaim(name=name, pool="node", device="cpudevsocket000", cpus=CpuSet.parse("2-5"))


def answer(device="cpudevsocket000", cdi_id=f"dra.k8s.io/cpu=claim-{UID}", error=""):
    prepared = PreparedDevice(request_names=("r",), pool="node", device=device, cdi_ids=(cdi_id,), share_id=None)
    return PreparedClaim(devices=() if error else (prepared,), error=error)


async def test_a_right_answer_passes(tmp_path, claim):
    CdiDirectory(tmp_path).write_now(UID, claim.cpus)
    Checker(tmp_path).prepared(claim, answer())
    assert CdiDirectory(tmp_path).remove_all_now([UID]) == [True]
    Checker(tmp_path).unprepared(claim, "")


async def test_a_device_in_a_file_of_all_claims_is_found(tmp_path, claim):
    CdiDirectory(tmp_path).write_now(UID, claim.cpus)
    (own,) = tmp_path.iterdir()
    own.rename(tmp_path / "dra.cpu.json")
    Checker(tmp_path).prepared(claim, answer())
    with pytest.raises(WrongAnswerError, match="still there"):
        Checker(tmp_path).unprepared(claim, "")


@pytest.mark.parametrize(
    ("cpus", "given", "message"),
    [
        ("2-5", answer(error="no CPUs"), "no CPUs"),
        ("2-5", answer(device="cpudevsocket001"), "expected node/cpudevsocket000"),
        ("2-5", answer(cdi_id="dra.k8s.io/cpu=claim-other"), "lack the claim's"),
        ("2-6", answer(), "expected CPUs 2-5"),
        (None, answer(), "expected CPUs 2-5"),
    ],
)
async def test_a_wrong_answer_is_told(tmp_path, claim, cpus, given, message):
    if cpus is not None:
        CdiDirectory(tmp_path).write_now(UID, CpuSet.parse(cpus))
    with pytest.raises(WrongAnswerError, match=message):
        Checker(tmp_path).prepared(claim, given)


async def test_what_is_left_after_an_unprepare_is_told(tmp_path, claim):
    CdiDirectory(tmp_path).write_now(UID, claim.cpus)
    with pytest.raises(WrongAnswerError, match="still there"):
        Checker(tmp_path).unprepared(claim, "")
    with pytest.raises(WrongAnswerError, match="in use"):
        Checker(tmp_path).unprepared(claim, "in use")
