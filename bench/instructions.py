# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions of one ``CpuPool.check`` with valgrind's callgrind: the same number on a busy machine.

Run as a program it is what callgrind runs: each kernel some hundred times.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cases

_KERNELS = tuple((kind, n_cpus) for kind in cases.KINDS for n_cpus in (64, 1024, 8192))
_CALLS = 200

# Cython's names: of the method, with a running number inside, and of the property that is read after each kernel.
_COUNTED = "__pyx_pw_7fastcpu_4pool_7CpuPool_*check"
_MARK = "__pyx_getprop_7fastcpu_4pool_7CpuPool_taken"


def count_instructions() -> dict[tuple[str, int], float] | str:
    """Count per kernel, or say in one line why it cannot be done here.

    Returns
    -------
    dict of (str, int) to float, or str
        Instructions of one call, the interpreter's loop excluded, by (kind, number of CPUs).
    """
    if shutil.which("valgrind") is None:
        return "not counted: valgrind is not installed"
    try:
        return _run()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"not counted: {error}"


def _run() -> dict[tuple[str, int], float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                "--collect-atstart=no",
                f"--toggle-collect={_COUNTED}",
                f"--dump-before={_MARK}",
                f"--callgrind-out-file={out}",
                sys.executable,
                __file__,
            ],
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONHASHSEED": "0"},
            timeout=300,
        )
        totals = [_total(out.with_name(f"out.{part}")) for part in range(1, len(_KERNELS) + 1)]
    return {kernel: total / _CALLS for kernel, total in zip(_KERNELS, totals, strict=True)}


def _total(part: Path) -> int:
    found = re.search(r"^totals: ([1-9]\d*)", part.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError("callgrind met no call of check(): are the symbols stripped?")
    return int(found[1])


def _main() -> None:
    for kind, n_cpus in _KERNELS:
        pool = cases.pool(n_cpus)
        text, demands = cases.choice(kind, n_cpus)
        for _ in range(_CALLS):
            pool.check(text, demands)
        assert not pool.taken


if __name__ == "__main__":
    _main()
