# SPDX-License-Identifier: Apache-2.0
"""Times the kernels of a base revision and of this one in turns, so that a noisy hour is noisy for both.

    python bench/compare.py [BASE]

Each turn is a process of its own, which has its own layout of memory. The figure of a kernel in a turn is the fastest
of a few rounds. Two neighbouring turns make one ratio; the table has the median of the ratios and where it lies with
95 % confidence, by resampling them. The exit status is 1 only where every turn of this revision took more than 1.25
times as long as every turn of the base: less than that is not told apart from noise on shared machines.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import revisions

_TURNS = 12
_ROUNDS = 5
_ROUND_S = 0.001
_RESAMPLES = 2000
_CONFIDENCE = 0.95
_CLEARLY_SLOWER = 1.25
_TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two revisions' times of one kernel, in seconds, and their ratio."""

    base_s: float
    this_s: float
    ratio: float
    low: float
    high: float
    clearly_slower: bool

    @property
    def verdict(self) -> str:
        """What can be said with confidence; empty if nothing."""
        if self.clearly_slower:
            return "CLEARLY SLOWER"
        return "slower" if self.low > 1 else "faster" if self.high < 1 else ""


def compare(base: Sequence[float], this: Sequence[float]) -> Comparison:
    """Compare what turns took that were made one after the other.

    Parameters
    ----------
    base, this : sequence of float
        Seconds of each turn; those with one index are neighbours.
    """
    ratios = [now / before for before, now in zip(base, this, strict=True)]
    # Seeded: one set of times has one result.
    draw = random.Random(len(ratios)).choices
    medians = sorted(statistics.median(draw(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    tail = round(_RESAMPLES * (1 - _CONFIDENCE) / 2)
    return Comparison(
        base_s=statistics.median(base),
        this_s=statistics.median(this),
        ratio=statistics.median(ratios),
        low=medians[tail],
        high=medians[-1 - tail],
        clearly_slower=min(this) > max(base) * _CLEARLY_SLOWER,
    )


def _table(compared: Mapping[str, Comparison]) -> list[str]:
    width = max(map(len, compared))
    lines = [f"{'microseconds of one call':<{width}} {'base':>10} {'now':>10} {'ratio':>6}  95 % confidence"]
    for name, one in compared.items():
        times = f"{one.base_s * 1e6:>10.3f} {one.this_s * 1e6:>10.3f}"
        lines.append(f"{name:<{width}} {times} {one.ratio:>6.3f}  {one.low:.3f} … {one.high:.3f}  {one.verdict}")
    return lines


def _time_kernels() -> None:
    """Time each kernel; this is one turn."""
    from kernels import KERNELS

    times = {}
    for kernel in KERNELS:
        try:
            function, arguments = kernel.set_up()
            function(*arguments)
        except (ImportError, AttributeError, TypeError):
            continue
        timer = timeit.Timer("function(*arguments)", globals={"function": function, "arguments": arguments})
        calls = max(1, round(_ROUND_S / max(timer.timeit(1), 1e-7)))
        times[kernel.name] = min(timer.repeat(_ROUNDS, calls)) / calls
    print(json.dumps(times))


def _turn(site: Path) -> dict[str, float]:
    command, environment = revisions.python(site)
    answer = subprocess.run([*command, __file__, _TIME], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(answer.stdout)


def main(given: str) -> int:
    """Compare this revision with another one; 1 if it is clearly slower."""
    try:
        commit = revisions.choose_base(given)
    except (revisions.NothingToCompareError, ValueError) as reason:
        print(f"bench-compare: {reason}", file=sys.stderr)
        return 1
    print(f"base: {revisions.describe(commit)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="dracpu-revisions-") as folder:
        source = revisions.unpack(commit, Path(folder, "source"))
        base_site = revisions.build(source, Path(folder, "base"))
        this_site = revisions.build(revisions.ROOT, Path(folder, "this"))
        turns = [(_turn(base_site), _turn(this_site)) for _ in range(_TURNS)]
    first_base, first_this = turns[0]
    compared = {
        name: compare([base[name] for base, _ in turns], [this[name] for _, this in turns])
        for name in first_base
        if name in first_this
    }
    print(*_table(compared), sep="\n")
    for name in first_this.keys() - first_base.keys():
        print(f"{name}: new, {first_this[name] * 1e6:.3f} µs")
    return 1 if any(one.clearly_slower for one in compared.values()) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == [_TIME]:
        _time_kernels()
    else:
        sys.exit(main(*sys.argv[1:2] or [""]))
