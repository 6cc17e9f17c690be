# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import stat
import subprocess
import sys

import pytest

from driver.health import Health
from driver.instance import LOCK_FILE, InstanceLock

HOLDER = """
import asyncio, pathlib, sys
from driver.health import Health
from driver.instance import InstanceLock
lock = InstanceLock(pathlib.Path(sys.argv[1]), Health())
asyncio.run(lock.acquire())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def plugin_dir(tmp_path):
    return tmp_path / "plugins" / "dra.cpu"


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def lock(plugin_dir, health):
    lock = InstanceLock(plugin_dir, health)
    yield lock
    lock.release()


@pytest.fixture
def other_process(plugin_dir):
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, plugin_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 -- nobody would set an event
            await asyncio.sleep(0.01)


async def test_the_first_instance_gets_the_lock_and_makes_the_folder(lock, plugin_dir, health):
    await lock.acquire()
    assert health.conditions() == {"instance": True}
    assert stat.S_IMODE(plugin_dir.stat().st_mode) & ~0o750 == 0
    file = plugin_dir / LOCK_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().startswith(f"pid {os.getpid()}, since 20")


async def test_the_lock_is_an_exclusive_flock_on_the_file(lock, plugin_dir):
    await lock.acquire()
    with (plugin_dir / LOCK_FILE).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


async def test_a_second_instance_waits_says_who_it_waits_for_and_follows(
    lock, plugin_dir, health, other_process, caplog
):
    caplog.set_level(logging.INFO, logger="driver.instance")
    waiting = asyncio.create_task(lock.acquire())
    await until(health.missing)
    assert f"pid {other_process.pid}, since" in health.missing()["instance"]
    # The loop was free all the while, and several tries made one line.
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert [record.getMessage() for record in caplog.records] == ["waiting to be the only instance"]
    assert str(other_process.pid) in caplog.records[0].fields["reason"]

    other_process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        await waiting
    assert health.missing() == {}
    assert (plugin_dir / LOCK_FILE).read_text().startswith(f"pid {os.getpid()},")


async def test_deleting_the_lock_file_lets_no_second_instance_in(lock, plugin_dir, health, other_process):
    (plugin_dir / LOCK_FILE).unlink()
    waiting = asyncio.create_task(lock.acquire())
    await until(health.missing)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_waiting_instance_can_be_stopped_and_leaves_nothing_locked(lock, plugin_dir, health, other_process):
    waiting = asyncio.create_task(lock.acquire())
    await until(health.missing)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    other_process.kill()
    other_process.wait()
    await asyncio.wait_for(InstanceLock(plugin_dir, Health()).acquire(), 10)


async def test_a_file_replaced_while_it_is_being_locked_is_not_taken_for_the_lock(
    lock, plugin_dir, health, monkeypatch
):
    real_flock = fcntl.flock
    replaced = []

    def replace_then_lock(descriptor: int, how: int) -> None:
        real_flock(descriptor, how)
        if not replaced and stat.S_ISREG(os.fstat(descriptor).st_mode):
            replaced.append(descriptor)
            (plugin_dir / LOCK_FILE).unlink()
            (plugin_dir / LOCK_FILE).touch()

    monkeypatch.setattr(fcntl, "flock", replace_then_lock)
    await asyncio.wait_for(lock.acquire(), 10)
    assert replaced
    with (plugin_dir / LOCK_FILE).open() as file, pytest.raises(BlockingIOError):
        real_flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/etc/passwd", path)])
async def test_what_is_no_lock_file_is_waited_for_and_left_alone(make, lock, plugin_dir, health):
    plugin_dir.mkdir(parents=True)
    file = plugin_dir / LOCK_FILE
    make(file)
    waiting = asyncio.create_task(lock.acquire())
    await until(health.missing)
    assert str(file) in health.missing()["instance"]
    file.rename(plugin_dir / "moved away")
    await asyncio.wait_for(waiting, 10)
    assert (plugin_dir / "moved away").is_symlink() or not (plugin_dir / "moved away").is_file()


async def test_a_folder_that_cannot_be_made_is_waited_for(lock, plugin_dir, health):
    plugin_dir.parent.write_text("not a folder")
    waiting = asyncio.create_task(lock.acquire())
    await until(health.missing)
    assert "Not a directory" in health.missing()["instance"] or "File exists" in health.missing()["instance"]
    plugin_dir.parent.unlink()
    await asyncio.wait_for(waiting, 10)


async def test_a_hostile_note_does_not_reach_the_log(lock, plugin_dir, health, other_process):
    (plugin_dir / LOCK_FILE).write_bytes(b"\x1b[2J\nlevel=ERROR \xff" + b"x" * 100_000)
    waiting = asyncio.create_task(lock.acquire())
    await until(health.missing)
    reason = health.missing()["instance"]
    assert reason.isprintable()
    assert len(reason) < 500
    waiting.cancel()


async def test_release_lets_the_next_one_in_and_keeps_the_file(lock, plugin_dir):
    await lock.acquire()
    lock.release()
    lock.release()
    assert (plugin_dir / LOCK_FILE).exists()
    successor = InstanceLock(plugin_dir, Health())
    await asyncio.wait_for(successor.acquire(), 10)
    successor.release()
