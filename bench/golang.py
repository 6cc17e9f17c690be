# SPDX-License-Identifier: Apache-2.0
"""The CPU sets of the kubelet, ``k8s.io/utils/cpuset``, in a program of Go that times its own loops (`go/main.go`)."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from fastcpu import CpuSet

_MODULE = Path(__file__).with_name("go")


@cache
def program() -> subprocess.Popen[str] | str:
    """Build and start the program, which runs until Python ends; or return why there is none."""
    if shutil.which("go") is None:
        return "Go is not there: apt-get install golang-go, 1.23 or later"
    folder = tempfile.TemporaryDirectory(prefix="dracpu-bench-go-")
    atexit.register(folder.cleanup)
    built = Path(folder.name, "bench")
    command = ["go", "build", "-o", built, "."]
    built_now = subprocess.run(command, cwd=_MODULE, capture_output=True, text=True)
    if built_now.returncode:
        return f"Go cannot build bench/go: {built_now.stderr.strip().splitlines()[-1]}"
    process = subprocess.Popen([built], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _ask(request: dict[str, object]) -> object:
    process = program()
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


class Loop:
    """One job in Go: calling it with a number of calls tells how many seconds they took."""

    def __init__(self, task) -> None:
        self._answer = _ask(
            {
                "task": {
                    "job": task.job,
                    "a": str(CpuSet(task.a)),
                    "b": str(CpuSet(task.b)),
                    "cpu": task.cpu,
                    "numbers": task.numbers,
                    "text": task.text,
                    "online": str(CpuSet(task.online)),
                    "reserved": str(CpuSet(task.reserved)),
                    "groups": [str(CpuSet(group)) for group in task.groups],
                    "demands": [{"group": group, "count": count} for group, count in task.demands],
                }
            }
        )

    def __call__(self, calls: int) -> float:
        return _ask({"calls": calls})

    def answer(self, kind: type) -> object:
        """Return the result of one call: of type frozenset, list, str, bool or int."""
        return frozenset(CpuSet.parse(self._answer)) if kind is frozenset else kind(self._answer)
