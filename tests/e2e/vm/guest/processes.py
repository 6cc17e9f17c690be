# SPDX-License-Identifier: Apache-2.0
"""Programs of the guest: run to their end, or started in the background with a log, and ended by name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

LOGS = Path("/var/log")

_started: dict[str, subprocess.Popen] = {}


def run(argv: list[str], stdin: str = "", timeout_s: float = 120.0) -> dict:
    """Run a program to its end."""
    ended = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
    return {"status": ended.returncode, "stdout": ended.stdout, "stderr": ended.stderr}


def start(name: str, argv: list[str], environment: dict[str, str]) -> int:
    """Start a program in the background and return its process id; its output is added to the log of its name."""
    with Path(LOGS, f"{name}.log").open("ab") as log:
        _started[name] = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    return _started[name].pid


def end(name: str, number: int, timeout_s: float = 60.0) -> int:
    """Send a signal to a program in the background, and return its exit status once it has ended."""
    process = _started.pop(name)
    process.send_signal(number)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        raise


def kill_process(pid: int) -> None:
    """End any process without a warning."""
    os.kill(pid, signal.SIGKILL)


def exit_status(name: str) -> int | None:
    """Return the exit status of a program in the background; None while it runs."""
    return _started[name].poll()


def log(name: str) -> str:
    """Return all that a program in the background has written."""
    return Path(LOGS, f"{name}.log").read_text(errors="replace")


def write_file(path: str, text: str) -> None:
    """Write a file, in a folder that is made if it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def read_file(path: str) -> str:
    """Return a file's text."""
    return Path(path).read_text()


def list_folder(path: str) -> list[str]:
    """Return the names in a folder."""
    return sorted(os.listdir(path))


def fetch(url: str) -> str:
    """Return what a server of this machine answers."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def wait_ready(url: str, timeout_s: float) -> None:
    """Wait until a server says that it is ready, or raise what it says instead."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                said = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
                raise TimeoutError(f"{url} after {timeout_s:g} s: {said}") from error
        time.sleep(0.2)
