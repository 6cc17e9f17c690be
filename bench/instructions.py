# SPDX-License-Identifier: Apache-2.0
"""The gate on instruction counts: the kernels of a base revision and of this one, built and counted in one run.

callgrind counts the same on a busy machine as on a quiet one, so 5 % more is a change of the program and no accident.

    python bench/instructions.py [BASE]
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import revisions

_LIMIT = 1.05
_CALLS = 20
_WARM_UP_CALLS = 10
# What malloc does depends on what lies about: each kernel is counted in several states of the heap, the least counts.
_HEAPS = 3
_HELPER = Path(__file__).with_name("callgrind_calls.c")
_COUNT = "count"


def judge(base: Mapping[str, float | None], this: Mapping[str, float | None]) -> tuple[list[str], list[str]]:
    """Compare the counts of two revisions.

    Parameters
    ----------
    base, this : mapping of str to float or None
        Instructions of one call by kernel; None if the revision does not have it. An empty ``base`` compares nothing.

    Returns
    -------
    tuple of list of str
        The lines of a table, and the faults: kernels that got slower by more than 5 %, and those that are gone.
    """
    width = max(map(len, this))
    lines = [f"{'instructions of one call':<{width}} {'base':>12} {'now':>12} {'change':>9}"]
    faults = []
    for name, now in this.items():
        before = base.get(name)
        if now is None:
            faults.append(f"{name}: cannot be run with this revision")
            continue
        change = "new" if base and before is None else ""
        if before is not None:
            change = f"{now / before - 1:+.1%}"
            if now > before * _LIMIT:
                faults.append(f"{name}: {before:.0f} → {now:.0f} instructions ({change})")
        lines.append(f"{name:<{width}} {'' if before is None else f'{before:.0f}':>12} {now:>12.0f} {change:>9}")
    return lines, faults


def count(site: Path) -> dict[str, float | None]:
    """Count all kernels with the revision that is installed in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        helper = _compile_helper(Path(folder))
        out = Path(folder, "out")
        command, environment = revisions.python(site)
        # Imports are run without callgrind's instrumentation, in a fifth of the time.
        callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        callgrind += [f"--callgrind-out-file={out}"]
        program = [*command, __file__, _COUNT, helper]
        run = subprocess.run([*callgrind, *program], capture_output=True, text=True, env=environment)
        if run.returncode:
            raise RuntimeError(f"callgrind failed:\n{run.stdout}{run.stderr}")
        counts: dict[str, float | None] = {}
        part = 0
        for name, absent in json.loads(run.stdout).items():
            if absent:
                counts[name] = None
                print(f"{name}: {absent}", file=sys.stderr)
                continue
            parts = [Path(f"{out}.{part + heap}") for heap in range(1, _HEAPS + 1)]
            part += _HEAPS
            counts[name] = min(_total(path, name) for path in parts) / _CALLS
    return counts


def _total(part: Path, name: str) -> int:
    text = part.read_text()
    found = re.search(r"^totals: ([1-9]\d*)", text, re.MULTILINE)
    if found is None or name not in text:
        raise RuntimeError(f"callgrind has not counted {name}")
    return int(found[1])


def _compile_helper(folder: Path) -> Path:
    helper = folder / "callgrind_calls.so"
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", include, "-o", helper, _HELPER], check=True)
    return helper


def _run_kernels(helper: str) -> None:
    """Call each kernel; this is what callgrind runs."""
    from kernels import KERNELS

    count_calls = ctypes.PyDLL(helper).count_calls
    count_calls.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.c_long, ctypes.c_char_p]
    absent = {}
    for kernel in KERNELS:
        try:
            function, arguments = kernel.set_up()
            for _ in range(_WARM_UP_CALLS):
                function(*arguments)
        except (ImportError, AttributeError, TypeError) as error:
            absent[kernel.name] = f"{type(error).__name__}: {error}"
            continue
        absent[kernel.name] = ""
        lying_about = []
        for heap in range(_HEAPS):
            count_calls(function, arguments, _CALLS, kernel.name.encode())
            lying_about += [bytes(size) for size in range(600 + heap, 5000, 311)]
    print(json.dumps(absent))


def main(given: str) -> int:
    """Compare this revision with another one; 1 if a kernel's count grew too much."""
    if shutil.which("valgrind") is None:
        print("cannot count instructions: apt-get install valgrind", file=sys.stderr)
        return 1
    commit = None
    try:
        commit = revisions.choose_base(given)
        print(f"base: {revisions.describe(commit)}", flush=True)
    except revisions.NothingToCompareError as reason:
        print(f"not compared: {reason}", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="dracpu-revisions-") as folder:
        sites = [revisions.build(revisions.ROOT, Path(folder, "this"))]
        if commit is not None:
            sites.append(revisions.build(revisions.unpack(commit, Path(folder, "source")), Path(folder, "base")))
        with ThreadPoolExecutor() as pool:
            this, *others = pool.map(count, sites)
        base = others[0] if others else {}
    lines, faults = judge(base, this)
    print(*lines, sep="\n")
    for fault in faults:
        print(f"SLOWER by more than {_LIMIT - 1:.0%}: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == [_COUNT]:
        _run_kernels(sys.argv[2])
    else:
        sys.exit(main(*sys.argv[1:2] or [""]))
