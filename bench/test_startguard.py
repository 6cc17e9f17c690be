# SPDX-License-Identifier: Apache-2.0
"""What the start guard adds to a container's start: one run of the program, beside a program that does nothing."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from driver.startguard import shipped_program
from fastcpu import CpuSet

# Those on which this process, which stands for the container's, may run: a container on fewer is noted for the driver.
CPUS = str(CpuSet(os.sched_getaffinity(0)))


@pytest.fixture
def bundle(tmp_path):
    """Write a configuration of about so many bytes, as runtimes do: much of it the system call filter and mounts."""

    def write(size: int, claims: int) -> str:
        hooks = [
            {"path": str(shipped_program()), "args": ["dracpu-start-guard", "v1", f"claim-{claim}", CPUS]}
            for claim in range(claims)
        ]
        rule = {"names": ["clone", "unshare"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 2114060288}]}
        config = {
            "ociVersion": "1.2.0",
            "process": {"env": [f"SERVICE_{number}=10.96.0.{number}" for number in range(100)]},
            "linux": {"seccomp": {"syscalls": [rule] * (size // len(json.dumps(rule)))}},
            "hooks": {"createRuntime": hooks},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    ("name", "size", "claims"),
    [("4 KiB", 1 << 10, 1), ("64 KiB", 64 << 10, 1), ("64 KiB, 16 claims", 64 << 10, 16), ("6 MiB", 6 << 20, 1)],
)
@pytest.mark.parametrize("contender", ["dracpu", "a program that does nothing"])
def test_container_start(entry, bundle, tmp_path, contender, name, size, claims):
    """Run the guard, or ``true``, which is a program of the dynamic linker and so not quite nothing."""
    benchmark = entry("Container start", f"the start guard, config.json of {name}", contender)
    state = {"ociVersion": "1.2.0", "id": "c", "status": "creating", "pid": os.getpid()}
    (tmp_path / "state").write_text(json.dumps({**state, "bundle": bundle(size, claims)}))
    state_file = str(tmp_path / "state")
    program = str(shipped_program()) if contender == "dracpu" else shutil.which("true")
    assert benchmark(run, program, ["dracpu-start-guard", "v1", "claim-0", CPUS], state_file) == 0


def run(program: str, arguments: list[str], standard_input: str) -> int:
    """Run a program as cheaply as the kernel allows, so that little but the program itself is measured."""
    process = os.posix_spawn(
        program, arguments, {"LC_ALL": "C"}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, standard_input, os.O_RDONLY, 0)]
    )
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
