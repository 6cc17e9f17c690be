# SPDX-License-Identifier: Apache-2.0
"""What the start guard would find in a container of the box.

The real guard, ``src/startguard``, asks the kernel on which CPUs the container's first process may run. Containers of
the box have no process and run on CPUs that need not exist, so the program cannot be run for them; the same comparison
is made here of what the runtime has written into the container's cgroup.
"""

from __future__ import annotations

import os

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.errors import ClaimError
from driver.sandbox.runtime import RefusedError
from driver.startguard import hook_claims
from fastcpu.cpuset import CpuSet
from fastcpu.errors import CpuListError


def run_guard_hooks(container: nri.Container, cpus: CpuSet) -> None:
    """Refuse a container that would run on CPUs that its start guard's hooks do not allow.

    Parameters
    ----------
    container : Container
        The container with its hooks.
    cpus : CpuSet
        What its cgroup allows it.

    Raises
    ------
    RefusedError
        Also if the program of one of its hooks is not there, whatever hook it is.
    """
    hooks = container.hooks.create_runtime
    for number, hook in enumerate(hooks):
        if not os.access(hook.path, os.X_OK):
            raise _refused(number, f"fork/exec {hook.path}: no such file or directory, or it cannot be executed")
    try:
        claims = hook_claims(hooks)
        union = CpuSet().union(*(CpuSet.parse(text) for _, text in claims))
    except (ClaimError, CpuListError) as error:
        raise _refused(0, f"dracpu start guard: {error}") from error
    if claims and not cpus <= union:
        raise _refused(
            0,
            f"exit status 1, stdout: , stderr: dracpu start guard: the container would run on CPUs {cpus}, "
            f"but its claims allow CPUs {union} only",
        )


def _refused(number: int, why: str) -> RefusedError:
    return RefusedError(
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
        f"unable to start container process: error during container init: error running createRuntime hook #{number}: "
        f"{why}"
    )
