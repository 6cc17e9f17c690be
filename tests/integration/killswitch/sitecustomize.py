# SPDX-License-Identifier: Apache-2.0
"""Kills its own process just before a chosen change of files.

Python loads this module at the start of every process that has its folder on PYTHONPATH. Changes below the folders in
KILLSWITCH_FOLDERS count as soon as there is a file KILLSWITCH_ORDERS: it holds what the round is called and how many
changes may still happen in it. What has happened or was about to goes to the file KILLSWITCH_TRACE, a line for each.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_FOLDERS = tuple(os.environ["KILLSWITCH_FOLDERS"].split(os.pathsep))
_ORDERS = os.environ["KILLSWITCH_ORDERS"]
_TRACE = os.environ["KILLSWITCH_TRACE"]
_WRITING = os.O_WRONLY | os.O_RDWR
_FUNCTIONS = ("link", "mkdir", "remove", "rename", "rmdir", "symlink", "truncate")
_CHANGES = frozenset(("open", "killswitch.fsync", *(f"os.{name}" for name in _FUNCTIONS)))

_lock = threading.Lock()
_round = ""
_happened = 0


def _changes_something(event: str, path: str) -> bool:
    if event == "os.mkdir":
        return os.path.isdir(os.path.dirname(path)) and not os.path.isdir(path)
    return event != "os.remove" or os.path.lexists(path)


def _watch(event: str, arguments: tuple) -> None:
    global _round, _happened
    if event not in _CHANGES or (event == "open" and not arguments[2] & _WRITING):
        return
    path = arguments[0]
    path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)
    if not path.startswith(_FOLDERS):
        return
    if not _changes_something(event, path):
        return
    with _lock:
        try:
            with open(_ORDERS) as file:
                name, allowed = file.read().split()
        except FileNotFoundError:
            return
        if name != _round:
            _round, _happened = name, 0
        with open(_TRACE, "a") as file:
            file.write(f"{event.rpartition('.')[2]} {path}\n")
        if _happened == int(allowed):
            os.kill(os.getpid(), signal.SIGKILL)
        _happened += 1


_fsync = os.fsync


def _audited_fsync(descriptor: int) -> None:
    sys.audit("killswitch.fsync", descriptor)
    _fsync(descriptor)


os.fsync = _audited_fsync
sys.addaudithook(_watch)
