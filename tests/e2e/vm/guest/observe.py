# SPDX-License-Identifier: Apache-2.0
"""What this kernel says: where processes may run, and what the machine is made of."""

from __future__ import annotations

from pathlib import Path


def uptime_s() -> float:
    """Return how long the kernel has been up."""
    return float(Path("/proc/uptime").read_text().split()[0])
