# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the unit tests: a disk that fails on demand, records, a machine's pool."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from driver import files
from driver.ledger import PreparedDevice, Record
from driver.names import ClaimUID
from fastcpu import CpuSet


class FailingDisk:
    """Makes file operations on chosen paths fail, like a disk that is full, broken or read-only.

    The operations are those of the system: ``open`` (for writing), ``read`` (opening for reading), ``write``,
    ``fsync``, ``rename``, ``unlink``, ``mkdir`` and ``listdir``. `calls` has every one that was tried, with its path.
    """

    def __init__(self) -> None:
        self._faults: list[tuple[str, str, int, list[int]]] = []
        self.calls: list[tuple[str, str]] = []

    def fail(self, operation: str, part: str, error: int, times: int = 1_000_000) -> None:
        """Let an operation fail, so many times, on every path that has `part` in it."""
        self._faults.append((operation, part, error, [times]))

    def repair(self) -> None:
        """Let everything succeed again."""
        self._faults.clear()

    def check(self, operation: str, path: object) -> None:
        name = os.fspath(path) if isinstance(path, str | Path) else str(path)
        self.calls.append((operation, name))
        for wanted, part, error, times in self._faults:
            if wanted == operation and part in name and times[0] > 0:
                times[0] -= 1
                raise OSError(error, os.strerror(error), name)


def path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    failing = FailingDisk()
    real_open, real_fsync = os.open, os.fsync

    def checked_open(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        failing.check("open" if flags & os.O_ACCMODE else "read", path)
        return real_open(path, flags, mode, **rest)

    def checked_fsync(descriptor: int) -> None:
        failing.check("fsync", path_of(descriptor))
        real_fsync(descriptor)

    class CheckedFile(io.FileIO):
        def write(self, content: bytes) -> int:
            failing.check("write", path_of(self.fileno()))
            return super().write(content)

    def open_descriptor(descriptor: int, mode: str, *, closefd: bool = True) -> object:
        if mode == "wb":
            return io.BufferedWriter(CheckedFile(descriptor, "wb", closefd))
        return open(descriptor, mode, closefd=closefd)

    def watch(operation: str, name: str) -> None:
        real = getattr(os, name)

        def checked(path: str, *rest: object, **named: object) -> object:
            failing.check(operation, path)
            return real(path, *rest, **named)

        monkeypatch.setattr(os, name, checked)

    monkeypatch.setattr(os, "open", checked_open)
    monkeypatch.setattr(os, "fsync", checked_fsync)
    monkeypatch.setattr(files, "open", open_descriptor, raising=False)
    for operation, name in (
        ("rename", "rename"),
        ("rename", "replace"),
        ("unlink", "unlink"),
        ("mkdir", "mkdir"),
        ("listdir", "listdir"),
    ):
        watch(operation, name)
    return failing


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Let other tasks run until something is so."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110, what is waited for tells nobody
                await asyncio.sleep(0)

    return wait


@pytest.fixture
def make_record() -> Callable[..., Record]:
    def make(uid: str, cpulist: str = "2-5", **changes: object) -> Record:
        cpus = CpuSet.parse(cpulist)
        device = PreparedDevice(request="cpus", pool="node-1", device="cpudevnuma000", share_id=None, cpus=len(cpus))
        record = Record(
            uid=ClaimUID(uid),
            namespace="default",
            name=f"claim-{uid}",
            pod_claim_name=None,
            generation=1,
            cpus=cpus,
            by_request={"cpus": cpus},
            devices=(device,),
            fingerprint="0" * 64,
            adopted=False,
            prepared_at=datetime(2026, 11, 29, 12, 30, tzinfo=UTC),
        )
        return replace(record, **changes)

    return make
