# SPDX-License-Identifier: Apache-2.0
"""Prints, after pytest-benchmark's own table, what one call of ``CpuPool.check`` costs beside its rivals.

pytest-benchmark's loop adds its own hundred nanoseconds to each call, which is as much as the call itself. So the table
below times the bare call with ``timeit``, takes the median of several rounds and subtracts the empty loop.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import timeit

import pytest

import cases
import instructions

_ROUNDS = 7
_nanoseconds: dict[tuple[str, int, str], float] = {}


def _median_ns(statement: str, names: dict[str, object], target_s: float) -> float:
    timer = timeit.Timer(statement, globals=names)
    once = max(timer.timeit(20) / 20, 1e-8)
    number = max(20, int(target_s / once))
    return statistics.median(timer.repeat(_ROUNDS, number)) / number * 1e9


@pytest.fixture
def compare(benchmark):
    """Time ``check(text, demands)`` for the summary; one call only where benchmarks are merely smoke-tested."""

    def measure(kind, n_cpus, contender, check, text, demands):
        if benchmark.disabled:
            return
        gc.disable()
        try:
            names = {"check": check, "text": text, "demands": demands}
            empty = _median_ns("pass", names, 0.005)
            _nanoseconds[kind, n_cpus, contender] = _median_ns("check(text, demands)", names, 0.02) - empty
        finally:
            gc.enable()

    return measure


def pytest_terminal_summary(terminalreporter):
    if not _nanoseconds:
        return
    write = terminalreporter.write_line
    terminalreporter.section("one call of check(), nanoseconds")
    write(
        f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, Python {sys.version.split()[0]}; "
        f"median of {_ROUNDS} rounds without the loop"
    )
    for kind in cases.KINDS:
        write(f"\n{kind}")
        write(f"{'CPUs':>6} {'fastcpu':>9}" + "".join(f" {name:>24}" for name in cases.RIVALS))
        for n_cpus in cases.SIZES:
            ours = _nanoseconds.get((kind, n_cpus, "fastcpu"))
            if ours is None:
                continue
            row = f"{n_cpus:>6} {ours:>9.0f}"
            for name in cases.RIVALS:
                theirs = _nanoseconds.get((kind, n_cpus, name))
                row += f" {theirs:>15.0f} {f'({theirs / ours:.0f}×)':>8}" if theirs else f" {'–':>24}"
            write(row)
    counts = instructions.count_instructions()
    write("\ninstructions of one call (callgrind)")
    if isinstance(counts, str):
        write(counts)
    else:
        for (kind, n_cpus), count in counts.items():
            write(f"{kind}, {n_cpus} CPUs: {count:.0f}")
