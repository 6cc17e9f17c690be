# SPDX-License-Identifier: Apache-2.0
"""How long the node plugin takes to be loaded, and in how much memory, beside its libraries imported whole.

`load.py` measures the whole start, until the kubelet has registered it and the API server has its slices.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURED = {
    "dracpu": "import driver.app",
    "its libraries whole": "import numpy, grpc.aio, kubernetes.aio.client, prometheus_client, aiohttp.web, yaml",
    "the interpreter alone": "import asyncio",
}
RESIDENT = "; print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmRSS:')))"


@pytest.mark.parametrize("contender", MEASURED)
def test_imports(entry, contender):
    benchmark = entry("Start", "imports", contender)
    code = MEASURED[contender] + RESIDENT

    def run() -> str:
        return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    resident_kib = int(benchmark.pedantic(run, rounds=5, warmup_rounds=1))
    benchmark.extra_info["resident_mb"] = round(resident_kib * 1024 / 1e6, 1)
    assert resident_kib > 10_000
