# SPDX-License-Identifier: Apache-2.0
"""The results as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from loadgenerator.options import Options
from loadgenerator.phases import Latency, Throughput, Times

_PERCENTILES = (50.0, 99.0, 99.9)


@dataclass(slots=True, kw_only=True)
class MachineResult:
    """What was measured on a machine of one size; `left_out` are numbers of claims in a call that it cannot hold."""

    cpus: int
    registered_s: list[float] = field(default_factory=list)
    published_s: list[float] = field(default_factory=list)
    idle_mb: list[float] = field(default_factory=list)
    loaded_mb: float = 0.0
    latency: list[Latency] = field(default_factory=list)
    throughput: Throughput | None = None
    left_out: list[int] = field(default_factory=list)


class Report:
    """Prints results as they come, and writes them to a file at the end."""

    def __init__(self, options: Options, server: str) -> None:
        self._options = options
        self._about = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
            "python": platform.python_version(),
            "grpcio": version("grpcio"),
            "API server": server,
            "driver": shlex.join(options.command),
            "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        }
        self._machines: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Say what is measured where."""
        for key, value in self._about.items():
            print(f"{key}: {value}")

    def add(self, result: MachineResult) -> None:
        """Print one machine's results."""
        summary = _summary(result)
        self._machines.append(summary)
        print(f"\n{result.cpus or os.cpu_count()} CPUs")
        print(
            f"  start → registered {summary['registered_s']:.2f} s, → slices accepted {summary['published_s']:.2f} s "
            f"(median of {len(result.registered_s)}); {summary['idle_mb']:.1f} MB idle, "
            f"{summary['loaded_mb']:.1f} MB after all claims"
        )
        print(f"  {'milliseconds':<34}" + "".join(f"{f'p{percent:g}':>9}" for percent in _PERCENTILES))
        for latency in result.latency:
            claims = f"{latency.per_call} claim{'s' if latency.per_call > 1 else ''}"
            _print_times(f"{claims}: bare GET", latency.get)
            _print_times(f"{claims}: prepare", latency.prepare, f"  {latency.ratio:.2f}× of the bare GET")
            _print_times(f"{claims}: unprepare", latency.unprepare)
        for per_call in result.left_out:
            print(f"  {per_call} claims in a call do not fit")
        through = result.throughput
        if through is not None:
            held = f", held {through.hold_s:g} s" if through.hold_s else ""
            _print_times(f"{through.concurrency} at a time{held}: prepare", through.prepare)
            _print_times(f"{through.concurrency} at a time{held}: unprepare", through.unprepare)
            print(
                f"  {through.per_second:.0f} claims a second prepared and unprepared, "
                f"{through.cpu_ms:.2f} ms of CPU time each ({through.claims} claims)"
            )

    def end(self) -> None:
        """Write the file, if one is wanted."""
        if self._options.json is not None:
            self._options.json.write_text(json.dumps({**self._about, "machines": self._machines}, indent=2) + "\n")


def _print_times(label: str, times: Times, remark: str = "") -> None:
    values = "".join(f"{times.percentile_ms(percent):>9.2f}" for percent in _PERCENTILES)
    print(f"  {label:<34}{values}{remark}")


def _summary(result: MachineResult) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "cpus": result.cpus or os.cpu_count(),
        "registered_s": statistics.median(result.registered_s),
        "published_s": statistics.median(result.published_s),
        "idle_mb": statistics.median(result.idle_mb),
        "loaded_mb": result.loaded_mb,
        "latency_ms": [
            {
                "claims": latency.per_call,
                "get": _percentiles(latency.get),
                "prepare": _percentiles(latency.prepare),
                "unprepare": _percentiles(latency.unprepare),
                "ratio": latency.ratio,
            }
            for latency in result.latency
        ],
    }
    if (through := result.throughput) is not None:
        summary["throughput"] = {
            "claims": through.claims,
            "concurrency": through.concurrency,
            "hold_s": through.hold_s,
            "claims_per_second": through.per_second,
            "cpu_ms_per_claim": through.cpu_ms,
            "prepare_ms": _percentiles(through.prepare),
            "unprepare_ms": _percentiles(through.unprepare),
        }
    return summary


def _percentiles(times: Times) -> dict[str, float]:
    return {f"p{percent:g}": times.percentile_ms(percent) for percent in _PERCENTILES}
