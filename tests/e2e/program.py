# SPDX-License-Identifier: Apache-2.0
"""A program that serves: started, waited for until it does, ended or killed, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

_START_S = 120.0
_END_S = 20.0
_SHOWN_LOG_LINES = 15


class Program:
    """One program.

    Parameters
    ----------
    command : sequence of str or Path
    log_path : Path
        Takes its output; appended to at each start.
    serves : callable
        Tells whether it does what it is there for.
    environment : mapping of str to str
        Added to this process's environment.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        log_path: Path,
        serves: Callable[[], Awaitable[bool]],
        environment: Mapping[str, str],
    ) -> None:
        self.log_path = log_path
        self._command = tuple(command)
        self._serves = serves
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> str:
        """All that it has written so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def log_tail(self) -> str:
        """The last lines of it."""
        return "\n".join(self.log.splitlines()[-_SHOWN_LOG_LINES:])

    @property
    def pid(self) -> int:
        """The id of the process; valid once started."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it, also after it was stopped or killed, and wait until it serves.

        Raises
        ------
        RuntimeError
            If it ends or does not serve; the text has the end of its log.
        """
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                # An interrupt from the terminal is for the tests, which then end it in good order.
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(_START_S):
                while not await self._serves():
                    if self._process.returncode is not None:
                        raise RuntimeError(self._failure(f"ended with status {self._process.returncode}"))
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise RuntimeError(self._failure(f"does not serve after {_START_S:g} s")) from None

    async def stop(self, patience_s: float = _END_S) -> None:
        """End it in good order, or after a while without."""
        await self._end(signal.SIGTERM, patience_s)

    async def kill9(self) -> None:
        """End it without a warning."""
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals, patience_s: float = _END_S) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(number)
        try:
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _failure(self, what: str) -> str:
        return f"{Path(self._command[0]).name} {what}:\n{self.log_tail}"
