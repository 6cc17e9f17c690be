# SPDX-License-Identifier: Apache-2.0
"""fastcpu on an interpreter without a global lock, where there is one: importing it does not bring the lock back, and
threads share sets and topologies."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_INTERPRETERS = ("python3.15t", "python3.14t", "python3.13t")
_ROOT = Path(__file__).parents[2]

_PROGRAM = """
import sys, threading
import numpy as np
from fastcpu import CpuSet, Topology
from fastcpu.pool import CpuPool

assert not sys._is_gil_enabled(), "an import brought the lock back"
shared = CpuSet.parse("0-8191:3/7")
topology = Topology.from_arrays(CpuSet(range(512)), numa_nodes=np.arange(512) // 64, sockets=np.arange(512) // 256)
expected = (str(shared), hash(shared), str(shared & CpuSet.parse("100-900")), str(topology.numa_nodes.cpuset(3)))
wrong, barrier = [], threading.Barrier(8)

def work():
    barrier.wait()
    for _ in range(2000):
        pool = CpuPool(topology.online, CpuSet(), topology.numa_nodes.masks)
        found = (str(shared), hash(shared), str(shared & CpuSet.parse("100-900")), str(topology.numa_nodes.cpuset(3)))
        if found != expected or len(pool.check("64-67", ((1, 4),))) != 4:
            wrong.append(found)

threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not wrong, wrong[0]
print("shared by", len(threads), "threads without a lock")
"""


def test_threads_share_values_without_the_global_lock(tmp_path):
    interpreter = next(filter(None, map(shutil.which, _INTERPRETERS)), None)
    if interpreter is None:
        pytest.skip(f"no free-threaded interpreter: none of {', '.join(_INTERPRETERS)} is on PATH")
    venv = tmp_path / "venv"
    subprocess.run([interpreter, "-m", "venv", venv], check=True)
    # The driver's dependencies have no wheels for such interpreters; fastcpu needs NumPy only.
    subprocess.run([venv / "bin/pip", "install", "--quiet", "numpy"], check=True)
    subprocess.run([venv / "bin/pip", "install", "--quiet", "--no-deps", _ROOT], check=True)
    run = subprocess.run([venv / "bin/python", "-c", _PROGRAM], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "shared by 8 threads without a lock\n"
