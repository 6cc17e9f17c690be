# SPDX-License-Identifier: Apache-2.0
"""The text of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import contenders
from figures import Row

_INTRODUCTION = """\
# Benchmarks

All of this page is written by `make bench-report`. Every figure stands beside what one would use instead, measured in
the same run with the same inputs; that each contender's answer is right is asserted before it is timed. Figures of two
runs must not be compared, least of all of two machines: `make bench-compare` compares two revisions, and
`make instructions` counts, which is the same on every machine of a kind.
"""

_HOW = """\
## How it is measured

- The median of 5 to 50 rounds; Python's garbage collector is off. Calls of some nanoseconds are timed in a loop, whose
  own cost is taken off (Python) or is below a nanosecond (C, Go).
- *ours* is fastcpu, called from Python, or the driver where the job is the driver's. (n×): so many times ours. Below 1×
  the other is faster.
- *hwloc by ctypes* is libhwloc's bitmap functions as Python reaches them; nearly all its time is the call by ctypes.
  *hwloc in C* is the same functions in a loop of C. Both write into a bitmap that is there already, where fastcpu makes
  a new object.
- *Go cpuset* is `k8s.io/utils/cpuset`, which the kubelet and dra-driver-cpu use, in a loop of Go; Go's garbage
  collector runs as it does there. It cannot ask whether two sets are disjoint: there it is an empty intersection.
- *Python set*, *int* and *NumPy bool* are written as one would by hand (`bench/rivals.py`). *pyroaring* is CRoaring's
  bitmaps, with the same Python around them to read and write lists.
- *other* names its rival: placement written in Python, the Kubernetes client's models, `json` and `rename`, protobuf
  alone, a program that does nothing, a bare GET. The last ones are floors, what the same language takes for nothing but
  the unavoidable.
- Sets are every second CPU and the middle half of a machine, which no trick with runs makes easy. Sizes are CPUs, for
  NRI the containers on the node.
"""


def write(rows: Sequence[Row], facts: Mapping[str, str], load: Mapping[str, Any], shown: Mapping[str, str]) -> str:
    """Return the document.

    Parameters
    ----------
    rows : sequence of Row
        The table's.
    facts : mapping of str to str
        What is to be known about the run.
    load : mapping
        The load generator's JSON.
    shown : mapping of str to str
        Titles of the charts by file name.
    """
    lines = [_INTRODUCTION, "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += [f"![{title}](benchmarks/{path})\n" for path, title in shown.items()]
    return "\n".join([*lines, *_table(rows), *_load_section(load), _HOW])


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "## All figures\n"
    rivals = contenders.NAMES[1:]
    names = [name for name in rivals if any(name in row.rivals for row in rows)]
    yield f"| {' | '.join(['', 'size', 'ours', *names, 'other'])} |"
    yield f"|---|--:|--:|{'--:|' * len(names)}---|"
    chapter = ""
    for row in rows:
        if row.chapter != chapter:
            chapter = row.chapter
            yield f"| **{chapter}** |{' |' * (len(names) + 3)}"
        yield _line(row, names)
    yield ""
    for name in rivals:
        if name not in names:
            yield f"{name} was not measured: {contenders.missing(name) or 'it was left out'}.\n"


def _line(row: Row, names: Sequence[str]) -> str:
    cells = [_cell(row, row.rivals[name]) if name in row.rivals else "" for name in names]
    others = "; ".join(f"{name} {_cell(row, s)}" for name, s in row.rivals.items() if name not in names)
    size = "" if row.n is None else f"{row.n:,}"
    return f"| {' | '.join([row.job, size, duration(row.ours_s), *cells, others])} |"


def _cell(row: Row, seconds: float) -> str:
    return f"{duration(seconds)} ({factor(seconds / row.ours_s)}×)"


def duration(seconds: float) -> str:
    """Write a duration with three digits."""
    for unit, scale in (("ns", 1e9), ("µs", 1e6), ("ms", 1e3), ("s", 1.0)):
        value = seconds * scale
        if value < 999.5 or unit == "s":
            break
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def factor(ratio: float) -> str:
    """Write a ratio with two digits, or all of a large one."""
    return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:,.0f}"


def _load_section(load: Mapping[str, Any]) -> Iterator[str]:
    yield "## The driver under load\n"
    yield "`bench/load.py` plays a kubelet against the driver over its socket, checks every answer and every CDI spec,"
    yield "and fetches the same claims itself in between: no driver prepares a claim in less time than that takes."
    yield f"API server: {load['API server']}. Driver: `{_without_folders(load['driver'])}`.\n"
    yield "| CPUs | claims a call | GET p50 | prepare p50 | of GET | p99 | p99.9 | unprepare p50 | p99 | p99.9 |"
    yield "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for machine in load["machines"]:
        for at in machine["latency_ms"]:
            prepare, unprepare = at["prepare"], at["unprepare"]
            cells = [f"{machine['cpus']:,}", f"{at['claims']}", _ms(at["get"]["p50"]), _ms(prepare["p50"])]
            cells += [f"{at['ratio']:.2f}×", _ms(prepare["p99"]), _ms(prepare["p99.9"])]
            cells += [_ms(unprepare[percentile]) for percentile in ("p50", "p99", "p99.9")]
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| CPUs | start → registered | → slices accepted | MB idle | MB after all | claims a second | CPU a claim |"
    yield "|--:|--:|--:|--:|--:|--:|--:|"
    for machine in load["machines"]:
        cells = [f"{machine['cpus']:,}", f"{machine['registered_s']:.2f} s", f"{machine['published_s']:.2f} s"]
        cells += [f"{machine['idle_mb']:.1f}", f"{machine['loaded_mb']:.1f}"]
        if through := machine.get("throughput"):
            cells += [f"{through['claims_per_second']:.0f}", _ms(through["cpu_ms_per_claim"])]
        else:
            cells += ["", ""]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _ms(value: float) -> str:
    return f"{value:.2f} ms"


def _without_folders(command: str) -> str:
    return " ".join(Path(word).name if word.startswith("/") else word for word in command.split())
