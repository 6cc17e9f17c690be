# SPDX-License-Identifier: Apache-2.0
"""The rows of the report: one job at one size, what it takes us and what it takes the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_OURS = ("fastcpu", "dracpu")
_CHAPTERS = (
    "CPU-set algebra",
    "Parsing",
    "Formatting",
    "Check of a choice",
    "Placement",
    "Devices",
    "Claims",
    "Files",
    "NRI handlers, request to answer",
    "A hostile container, request to answer",
    "Container start",
)


@dataclass(slots=True, kw_only=True)
class Row:
    """One job at one size; all times are of one call, in seconds."""

    chapter: str
    job: str
    n: int | None
    ours_s: float = 0.0
    rivals: dict[str, float] = field(default_factory=dict)


def read_benchmarks(document: Mapping[str, Any]) -> list[Row]:
    """Read pytest-benchmark's JSON.

    Returns
    -------
    list of Row
        By chapter, job and size; only of jobs that a rival has done too.
    """
    found: dict[tuple[str, str, int | None], Row] = {}
    for benchmark in document["benchmarks"]:
        place = benchmark["extra_info"]
        key = place["chapter"], place["job"], place["n"]
        row = found.setdefault(key, Row(chapter=key[0], job=key[1], n=key[2]))
        # The loop that is taken off may be longer than a call that is next to nothing.
        median = max(benchmark["stats"]["median"], 1e-10)
        if place["contender"] in _OURS:
            row.ours_s = median
        else:
            row.rivals[place["contender"]] = median
    rows = [row for row in found.values() if row.ours_s and row.rivals]
    chapters = list(dict.fromkeys([*_CHAPTERS, *(row.chapter for row in rows)]))
    jobs = list(dict.fromkeys((row.chapter, row.job) for row in rows))
    return sorted(rows, key=lambda row: (chapters.index(row.chapter), jobs.index((row.chapter, row.job)), row.n or 0))


def read_load(document: Mapping[str, Any]) -> list[Row]:
    """Read what the load generator measured: each prepare beside bare GETs of the same claims."""
    rows = [
        Row(
            chapter="Prepare over the socket, p50",
            job=f"{at['claims']} claim{'s' if at['claims'] > 1 else ''} in a call",
            n=machine["cpus"],
            ours_s=at["prepare"]["p50"] / 1000,
            rivals={"bare GET": at["get"]["p50"] / 1000},
        )
        for machine in document["machines"]
        for at in machine["latency_ms"]
    ]
    return sorted(rows, key=lambda row: (int(row.job.split()[0]), row.n or 0))
