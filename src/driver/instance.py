# SPDX-License-Identifier: Apache-2.0
"""The lock that lets only one driver process work on a plugin folder.

Two processes with the same records, CDI specs and sockets would each give out the same CPUs. So a process holds,
for as long as it lives, an exclusive `flock` on ``<plugin dir>/instance.lock`` and on the plugin folder itself. The
file is there to say who holds the lock; the folder's lock still holds when somebody deletes that file. The kernel
drops both when the process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import stat
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from driver.health import INSTANCE
from driver.logs import fields
from driver.sockets import make_folder

if TYPE_CHECKING:
    from pathlib import Path

    from driver.health import Health

_log = logging.getLogger(__name__)

LOCK_FILE: Final = "instance.lock"
_FIRST_WAIT_SECONDS: Final = 0.05
_LONGEST_WAIT_SECONDS: Final = 1.0
_LONGEST_NOTE: Final = 200


class InstanceLock:
    """The right to be the one driver process that works on a plugin folder.

    Parameters
    ----------
    plugin_dir : Path
        The plugin folder; created with mode 0750 if it is missing.
    health : Health
        Told, as the condition ``instance``, whether the lock is held and by whom else.
    """

    def __init__(self, plugin_dir: Path, health: Health) -> None:
        self._plugin_dir = plugin_dir
        self._health = health
        self._held: list[int] = []

    async def acquire(self) -> None:
        """Wait until the lock is ours, however long that takes, without blocking the event loop.

        A folder that cannot be created or opened, or a file that is no lock file, is waited for as well: whoever
        repairs it need not restart the driver.
        """
        wait = _FIRST_WAIT_SECONDS
        said = ""
        while (obstacle := self._try()) is not None:
            if obstacle != said:
                said = obstacle
                _log.warning("waiting to be the only instance", extra=fields(reason=obstacle))
                self._health.set_missing(INSTANCE, obstacle)
            await asyncio.sleep(wait)
            wait = min(wait * 2, _LONGEST_WAIT_SECONDS)
        _log.info("this is the only instance", extra=fields(lock=self._plugin_dir / LOCK_FILE))
        self._health.set_ok(INSTANCE)

    def release(self) -> None:
        """Give the lock up. The file stays: deleting it would let two waiting processes lock different files."""
        while self._held:
            os.close(self._held.pop())

    def _try(self) -> str | None:
        """Try once to take the lock; return what stands in the way, None if the lock is ours now."""
        path = self._plugin_dir / LOCK_FILE
        opened: list[int] = []
        try:
            make_folder(self._plugin_dir)
            opened.append(os.open(self._plugin_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            # O_NONBLOCK: opening must not hang if somebody has put a FIFO there.
            opened.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
            folder, file = opened
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return f"{path} is not a regular file but stands where the lock file belongs"
            if not (_lock(folder) and _lock(file)):
                return f"another instance works on {self._plugin_dir} ({_read_note(file)})"
            # The file may have been replaced between opening and locking it: then this is a lock on nothing.
            if not (_is_at(self._plugin_dir, folder) and _is_at(path, file)):
                return f"{path} was replaced while it was being locked"
            with suppress(OSError):  # a full disk is no reason not to work
                _write_note(file)
            self._held, opened = opened, []
        except OSError as error:
            return f"cannot lock {path}: {error.strerror or error}"
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return None


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _write_note(file: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(file, 0)
    os.pwrite(file, f"pid {os.getpid()}, since {now}\n".encode(), 0)


def _read_note(file: int) -> str:
    """Read who holds the lock. Only people read it, so anything printable will do."""
    text = os.pread(file, _LONGEST_NOTE, 0).decode("ascii", "replace")
    return "".join(character if character.isprintable() else " " for character in text).strip() or "pid unknown"
