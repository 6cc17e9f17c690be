# SPDX-License-Identifier: Apache-2.0
"""What `make bench-report` makes of the figures: every one beside its rivals of the same run, or not at all."""

from __future__ import annotations

import pytest

import document
from figures import read_benchmarks, read_load


def benchmark(contender: str, median: float, job: str = "union", n: int | None = 64, chapter: str = "CPU-set algebra"):
    place = {"chapter": chapter, "job": job, "contender": contender, "n": n, "unit": "CPUs"}
    return {"extra_info": place, "stats": {"median": median}}


PERCENTILES = {"p50": 4.0, "p99": 5.0, "p99.9": 6.0}
LOAD = {
    "API server": "v1.37.2",
    "driver": "/opt/bin/python -m driver",
    "machines": [
        {
            "cpus": 512,
            "registered_s": 0.4,
            "published_s": 0.5,
            "idle_mb": 70.0,
            "loaded_mb": 72.5,
            "latency_ms": [
                {
                    "claims": claims,
                    "get": {"p50": 2.0},
                    "prepare": PERCENTILES,
                    "unprepare": PERCENTILES,
                    "ratio": 2.0,
                }
                for claims in (32, 1)
            ],
        }
    ],
}


def test_a_figure_without_a_rival_is_left_out():
    rows = read_benchmarks({"benchmarks": [benchmark("fastcpu", 1e-7), benchmark("fastcpu", 1.0, job="alone")]})
    assert rows == []


def test_rows_stand_in_the_order_of_chapters_jobs_and_sizes():
    found = [
        benchmark(contender, 1e-6, job, n, chapter)
        for contender in ("Go cpuset", "fastcpu")
        for chapter, job, n in [
            ("Container start", "guard", None),
            ("CPU-set algebra", "union", 512),
            ("CPU-set algebra", "union", 64),
            ("CPU-set algebra", "count", 64),
        ]
    ]
    rows = read_benchmarks({"benchmarks": found})
    assert [(row.job, row.n) for row in rows] == [("union", 64), ("union", 512), ("count", 64), ("guard", None)]


def test_the_table_has_each_rival_with_its_ratio():
    found = [benchmark("fastcpu", 5.26e-8), benchmark("Go cpuset", 6.2e-6), benchmark("hwloc in C", 5e-9)]
    text = document.write(read_benchmarks({"benchmarks": found}), {"date": "today"}, LOAD, {"a.svg": "A"})
    assert "|  | size | ours | hwloc in C | Go cpuset | other |" in text
    assert "| union | 64 | 52.6 ns | 5.00 ns (0.10×) | 6.20 µs (118×) |  |" in text
    assert "| date | today |" in text
    assert "![A](benchmarks/a.svg)" in text
    assert "Python set was not measured" in text


def test_a_prepare_stands_beside_the_bare_get():
    rows = read_load(LOAD)
    assert [(row.job, row.n, row.ours_s, row.rivals) for row in rows] == [
        ("1 claim in a call", 512, 0.004, {"bare GET": 0.002}),
        ("32 claims in a call", 512, 0.004, {"bare GET": 0.002}),
    ]
    text = document.write(rows, {}, LOAD, {})
    assert "| 1 claim in a call | 512 | 4.00 ms | bare GET 2.00 ms (0.50×) |" in text
    assert "| 512 | 1 | 2.00 ms | 4.00 ms | 2.00× | 5.00 ms | 6.00 ms | 4.00 ms | 5.00 ms | 6.00 ms |" in text
    assert "| 512 | 0.40 s | 0.50 s | 70.0 | 72.5 |  |  |" in text
    assert "Driver: `python -m driver`" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5e-9, "5.00 ns"),
        (9.996e-9, "10.0 ns"),
        (9.996e-7, "1.00 µs"),
        (0.0123, "12.3 ms"),
        (0.123, "123 ms"),
        (61, "61.0 s"),
    ],
)
def test_durations_have_three_digits(seconds, text):
    assert document.duration(seconds) == text
