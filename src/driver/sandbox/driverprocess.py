# SPDX-License-Identifier: Apache-2.0
"""The real driver as a child process: started, watched from outside, ended or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_KIB: Final = 1024


class DriverProcess:
    """One process of the driver.

    Parameters
    ----------
    arguments : sequence of str
        The driver's flags.
    log_path : Path
        The file that takes its output; appended to if it exists.
    environment : mapping of str to str, optional
        Added to this process's environment.

    Attributes
    ----------
    arguments : tuple of str
    log_path : Path
    started_at : float
        `time.monotonic()` just before the start.
    """

    def __init__(self, arguments: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log_path = log_path
        self.started_at = 0.0
        self.arguments = tuple(arguments)
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process; it may be started again once it has ended."""
        self.started_at = time.monotonic()
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "driver",
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self._environment},
                # An interrupt from the terminal is for this process, which then ends the driver in good order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id; valid once started."""
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._started.returncode

    @property
    def resident_bytes(self) -> int:
        """The memory that it occupies now.

        Raises
        ------
        OSError
            If it does not run any more.
        """
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * _KIB

    @property
    def log(self) -> str:
        """All that it has written so far."""
        return self.log_path.read_text(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        with suppress(ProcessLookupError):
            self._started.send_signal(number)

    async def wait(self, timeout_s: float | None = 60.0) -> int:
        """Wait for its end and return the exit status.

        Raises
        ------
        TimeoutError
            If it still runs then.
        """
        async with asyncio.timeout(timeout_s):
            return await self._started.wait()

    async def kill9(self) -> None:
        """End it without a warning, as the kernel or a power cut would."""
        self.send_signal(signal.SIGKILL)
        await self._started.wait()

    async def terminate(self, timeout_s: float = 30.0) -> int:
        """Ask it to end, kill it if it does not in time, and return the exit status."""
        self.send_signal(signal.SIGTERM)
        try:
            return await self.wait(timeout_s)
        except TimeoutError:
            await self.kill9()
            return await self._started.wait()

    @property
    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the driver process has not been started")
        return self._process
