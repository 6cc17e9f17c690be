# SPDX-License-Identifier: Apache-2.0
"""The driver's threads; all else of its assembly is shown by the whole process."""

from __future__ import annotations

import subprocess
import sys

import pytest

STARTING = """
import threading

start = threading.Thread.start

def scarce(thread):
    if threading.active_count() > {most}:
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = scarce
from driver.app import _started_threads

executor = _started_threads()
assert executor.submit(lambda: 7).result() == 7
print(threading.active_count())
"""


def start_threads(most: int) -> subprocess.CompletedProcess[str]:
    """Start them in a process that can have no more than so many besides its own."""
    code = STARTING.format(most=most)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("most", "running"), [(16, 16), (15, 8), (5, 4), (1, 1)])
def test_threads_run_from_the_start_on_as_many_as_there_can_be(most, running):
    ended = start_threads(most)
    assert (ended.returncode, ended.stdout) == (0, f"{running + 1}\n")


def test_a_driver_that_cannot_have_a_single_thread_ends_at_once():
    ended = start_threads(0)
    assert ended.returncode == 1
    assert "can't start new thread" in ended.stderr
