# SPDX-License-Identifier: Apache-2.0
"""What this kernel says: where processes may run, and what the machine is made of.

Nothing here is the driver's code, so that it can be compared with what the driver says.
"""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_PODS = Path("/sys/fs/cgroup/kubepods")
_CONTAINER = re.compile(r"[0-9a-f]{64}")


def uptime_s() -> float:
    """Return how long the kernel has been up."""
    return float(Path("/proc/uptime").read_text().split()[0])


def wait_serving(path: str, timeout_s: float = 120.0) -> None:
    """Wait until something accepts connections on a Unix socket."""
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                return probe.connect(path)
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.1)


def containers() -> dict:
    """Return where the processes of each pod's containers, and sandboxes, may run, and what their cgroup says."""
    found = {}
    for folder, _, _ in os.walk(_PODS):
        path = Path(folder)
        if _CONTAINER.fullmatch(path.name):
            with suppress(OSError):  # it ends just now
                found[path.name] = {
                    "cpuset": (path / "cpuset.cpus").read_text().strip(),
                    "effective": (path / "cpuset.cpus.effective").read_text().strip(),
                    "processes": _processes(path),
                }
    return found


def _processes(cgroup: Path) -> dict:
    """Return where each process of a cgroup may run, and what it runs."""
    found = {}
    for pid in (cgroup / "cgroup.procs").read_text().split():
        with suppress(OSError):
            found[pid] = {"allowed": allowed(int(pid)), "program": os.readlink(f"/proc/{pid}/exe")}
    return found


def allowed(pid: int) -> str:
    """Return the CPUs on which a process may run."""
    status = Path(f"/proc/{pid}/status").read_text()
    return re.search(r"^Cpus_allowed_list:\s*(\S*)$", status, re.MULTILINE)[1]


def cpu_lists() -> dict:
    """Return the kernel's own lists of CPUs."""
    return {name: (_CPUS / name).read_text().strip() for name in ("online", "offline", "possible", "isolated")}


def machine() -> dict:
    """Return the online CPUs as the kernel describes its processors, and the CPUs of each NUMA node."""
    processors = {}
    for paragraph in Path("/proc/cpuinfo").read_text().strip().split("\n\n"):
        fields = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in paragraph.splitlines())
        cpu = int(fields["processor"])
        processors[cpu] = {
            "socket": int(fields["physical id"]),
            "core": int(fields["core id"]),
            "siblings": (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip(),
            "l3": (_CPUS / f"cpu{cpu}/cache/index3/id").read_text().strip(),
        }
    nodes = {
        path.name.removeprefix("node"): (path / "cpulist").read_text().strip() for path in _NODES.glob("node[0-9]*")
    }
    return {"processors": processors, "nodes": nodes, "smt_active": (_CPUS / "smt/active").read_text().strip()}


def set_online(cpu: int, online: bool) -> None:
    """Take a CPU offline, or online again."""
    (_CPUS / f"cpu{cpu}/online").write_text(str(int(online)))


def wait_allowed(container: str, cpus: str, timeout_s: float) -> None:
    """Wait until all processes of a container may run on these CPUs, and on no others."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = containers().get(container, {"processes": {}})
        found = {process["allowed"] for process in seen["processes"].values()}
        if found == {cpus}:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"container {container} on {found}, not on {cpus}, after {timeout_s:g} s: {seen}")
        time.sleep(0.1)
