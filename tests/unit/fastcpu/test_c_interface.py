# SPDX-License-Identifier: Apache-2.0
"""The .pxd files serve another Cython package: one that uses all of them is compiled, linked and tried.

`make package` does the same against the installed wheel and sdist.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src"
CONSUMER = ROOT / "tests/packaging/consumer"


def test_the_consumer_uses_every_interface():
    used = set(re.findall(r"^from (fastcpu[\w.]*) cimport", (CONSUMER / "consumer.pyx").read_text(), re.MULTILINE))
    paths = (path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("*.pxd"))
    assert used == {".".join(path.parts) for path in paths}


def test_a_consumer_compiles_and_agrees_with_python(tmp_path):
    generated = tmp_path / "consumer.c"
    built = tmp_path / f"consumer{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_path('include')}"
    cython = [sys.executable, "-m", "cython", "-Werror", "-I", SOURCE, "-o", generated, CONSUMER / "consumer.pyx"]
    subprocess.run(cython, check=True)
    subprocess.run(["cc", "-O0", "-Wall", "-Werror", "-shared", "-fPIC", include, "-o", built, generated], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, CONSUMER / "check.py"], env=environment, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("cimport works\n", "")
