# SPDX-License-Identifier: Apache-2.0
"""Runs all benchmarks and the load generator, and writes `docs/benchmarks.md` and its charts.

    python bench/report.py [FOLDER]

With a folder the figures stay there, and if they are there already, only the document is written anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import charts
import document
import machineinfo
from figures import read_benchmarks, read_load

_ROOT = Path(__file__).parent.parent
_DOCUMENT = _ROOT / "docs/benchmarks.md"
_CHARTS = _ROOT / "docs/benchmarks"
_BENCHMARKS = [
    *("-m", "pytest", "bench", "-q", "-k", "not any_request_within_a_socket"),
    *("--benchmark-max-time=0.2", "--benchmark-disable-gc", "--benchmark-quiet"),
]
_LOAD = ["bench/load.py", "--calls=80"]


def main(folder: str = "") -> int:
    """Write the report; 1 if a benchmark or an answer failed."""
    if folder:
        return _report(Path(folder))
    with tempfile.TemporaryDirectory(prefix="dracpu-report-") as scratch:
        return _report(Path(scratch))


def _report(folder: Path) -> int:
    folder.mkdir(exist_ok=True)
    benchmarks, load, about = (folder / name for name in ("benchmarks.json", "load.json", "about.json"))
    if not about.exists():
        started = time.monotonic()
        facts = machineinfo.facts(_ROOT)
        if failed := _run([*_BENCHMARKS, f"--benchmark-json={benchmarks}"]) or _run([*_LOAD, f"--json={load}"]):
            return failed
        facts["took"] = f"{time.monotonic() - started:.0f} s; load average before {facts.pop('load')}"
        about.write_text(json.dumps(facts, indent=2))
    facts = json.loads(about.read_text())
    measured = json.loads(load.read_text())
    rows = read_benchmarks(json.loads(benchmarks.read_text())) + read_load(measured)
    _CHARTS.mkdir(exist_ok=True)
    for old in _CHARTS.glob("*.svg"):
        old.unlink()
    shown = charts.draw(rows, _CHARTS)
    _DOCUMENT.write_text(document.write(rows, facts, measured, shown))
    print(f"wrote {_DOCUMENT.relative_to(_ROOT)} and {len(shown)} charts")
    return 0


def _run(command: list[str]) -> int:
    return subprocess.run([sys.executable, *command], cwd=_ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
