# SPDX-License-Identifier: Apache-2.0
"""The driver's threads; all else of its assembly is shown by the whole process."""

from __future__ import annotations

import subprocess
import sys

import pytest

STARTING = """
import threading

left = {left}
start = threading.Thread.start

def scarce(thread):
    global left
    if not left:
        raise RuntimeError("can't start new thread")
    left -= 1
    start(thread)

threading.Thread.start = scarce
from driver.app import _started_threads

executor = _started_threads()
assert executor.submit(lambda: 7).result() == 7
print(threading.active_count())
"""


def start_threads(left: int) -> subprocess.CompletedProcess[str]:
    code = STARTING.format(left=left)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_all_threads_run_from_the_start_on():
    ended = start_threads(32)
    assert (ended.returncode, ended.stdout) == (0, "33\n")


@pytest.mark.parametrize("left", [0, 1, 31])
def test_a_driver_that_cannot_have_its_threads_ends_at_once(left):
    ended = start_threads(left)
    assert ended.returncode == 1
    assert "can't start new thread" in ended.stderr
