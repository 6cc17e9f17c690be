# SPDX-License-Identifier: Apache-2.0
"""Programs that do one thing and end."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


async def call(
    command: Sequence[str | Path],
    arguments: Sequence[str],
    *,
    input: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end, and return what it prints.

    Parameters
    ----------
    command : sequence of str or Path
        The program, with what is the same for all its calls.
    arguments : sequence of str
        Further arguments, by which a failure is named.
    input : str, optional
        What it can read.
    environment : mapping of str to str, optional
        All of its environment; this process's if there is none.

    Raises
    ------
    RuntimeError
        If it fails; the text has what it says.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    output, error = await process.communicate(None if input is None else input.encode())
    if process.returncode != 0:
        name = Path(command[0]).name
        raise RuntimeError(f"{name} {' '.join(arguments)}: {error.decode(errors='replace').strip()}")
    return output.decode(errors="replace")
