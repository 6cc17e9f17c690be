# SPDX-License-Identifier: Apache-2.0
"""What a figure means nothing without: the machine, the versions, the date and the command."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("numpy", "pyroaring", "grpcio", "protobuf", "aiohttp", "kubernetes", "pytest-benchmark", "cython")


def facts(root: Path) -> dict[str, str]:
    """Return what is to be known, by name."""
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    utils = re.search(r"k8s\.io/utils \S+", (root / "bench/go/go.mod").read_text())
    changed = " with changes" if _output("git", "-C", str(root), "status", "--porcelain") else ""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": "`make bench-report`",
        "revision": _output("git", "-C", str(root), "rev-parse", "--short", "HEAD") + changed,
        "machine": f"{_processor()}, {os.cpu_count()} CPUs{_guest()}, {_memory_gb():.0f} GB",
        "system": f"{platform.freedesktop_os_release()['PRETTY_NAME']}, Linux {platform.release()}",
        "Python": f"{platform.python_version()} ({platform.python_compiler()}); {packages}",
        "hwloc": _output("dpkg-query", "-W", "-f", "libhwloc15 ${Version}", "libhwloc15") or "not there",
        "Go": f"{_output('go', 'env', 'GOVERSION') or 'not there'}, {utils[0]}",
        "C compiler": _output("cc", "--version").partition("\n")[0],
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _guest() -> str:
    return " (virtual)" if re.search(r"^flags.*\bhypervisor\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE) else ""


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
