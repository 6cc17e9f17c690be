# SPDX-License-Identifier: Apache-2.0
"""Files that survive a crash: each is replaced as a whole or not at all, and is on the disk before anyone relies on it.

Records, CDI specs and device metadata are all written and read through here. The functions block on the disk, so
they run in a thread. What they read may have been written by anybody: it is a regular file of bounded size or it is
refused.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_MOST_SYNCS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenFile:
    """A file of ours that cannot be used.

    Attributes
    ----------
    path : Path
        Where it is now.
    reason : str
        What is wrong with it, one line.
    """

    path: Path
    reason: str


def read_file(path: Path | str, limit: int, *, folder: int | None = None) -> bytes:
    """Read a file that may have been put there by anybody.

    Parameters
    ----------
    path : Path
        The file.
    limit : int
        The most bytes that it may have.
    folder : int, optional
        A descriptor of the folder from which a relative path leads.

    Returns
    -------
    bytes

    Raises
    ------
    OSError
        If it cannot be read (`FileNotFoundError` if it is not there), is no regular file, or is larger than ``limit``.
    """
    # O_NONBLOCK: opening must not hang if somebody has put a FIFO there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"Larger than {limit} bytes", str(path))
    return content


def replace_file(path: Path, content: bytes, *, mode: int, durable: bool, folder_mode: int | None = None) -> bool:
    """Give a file its content, atomically.

    Readers see the old content or the new one. After a failure the old content is still there, or the new one is there
    but might not survive a power failure.

    Parameters
    ----------
    path : Path
        The file.
    content : bytes
        All that it shall contain.
    mode : int
        Its permissions, whatever the umask says.
    durable : bool
        Whether the content must survive a power failure from now on. If not, a power failure may even leave an empty
        file behind, so it must be one that can be made again; it costs two waits for the disk less.
    folder_mode : int, optional
        The permissions with which its folder is made if it is missing; by default that is an error.

    Returns
    -------
    bool
        Whether it had to be written: False if it had this content already.

    Raises
    ------
    OSError
        If a step fails. The temporary file is removed again where that is possible.
    """
    is_new = not _has_content(path, content)
    if is_new:
        staged = _stage(path, content, mode, folder_mode)
        if durable:
            staged.sync()
        staged.put_in_place()
    if durable:
        # Also if the content was there: an earlier attempt may have failed after its rename.
        _sync_folder(path.parent)
    return is_new


def replace_files_durably(
    folder: Path, contents: Sequence[tuple[str, bytes]], *, mode: int, folder_mode: int
) -> list[bool | Exception]:
    """Give files of one folder their contents, each as `replace_file` does it, in hardly more time than one takes.

    The files are synced side by side, and the folder once.

    Parameters
    ----------
    folder : Path
        The folder; made with `folder_mode` if it is missing.
    contents : sequence of (str, bytes)
        The files' names and all that each shall contain.
    mode, folder_mode : int
        As for `replace_file`.

    Returns
    -------
    list of bool or Exception
        What `replace_file` would return or raise for each.
    """
    outcomes: list[bool | Exception] = []
    staged: dict[int, _Staged] = {}
    for number, (name, content) in enumerate(contents):
        path = folder / name
        try:
            outcomes.append(not _has_content(path, content))
            if outcomes[number]:
                staged[number] = _stage(path, content, mode, folder_mode)
        except OSError as error:
            outcomes[number:] = [error]
    failures: dict[int, OSError | None] = {}

    def sync(number: int) -> None:
        failures[number] = _error_of(staged[number].sync)

    if len(staged) > 1:
        # Where no more threads can be started, those that there are do it, or this one.
        with (
            suppress(RuntimeError),
            ThreadPoolExecutor(min(len(staged), _MOST_SYNCS), thread_name_prefix="sync") as pool,
        ):
            list(pool.map(sync, staged))
    for number, file in staged.items():
        if number not in failures:
            sync(number)
        if (failure := failures[number] or _error_of(file.put_in_place)) is not None:
            outcomes[number] = failure
    try:
        _sync_folder(folder)
    except OSError as error:
        return [outcome if isinstance(outcome, Exception) else error for outcome in outcomes]
    return outcomes


class _Staged:
    """A file's new content under a temporary name."""

    def __init__(self, descriptor: int, temporary: str, path: Path) -> None:
        self._descriptor = descriptor
        self._temporary = temporary
        self._path = path

    def sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError:
            self.discard()
            raise

    def put_in_place(self) -> None:
        try:
            os.rename(self._temporary, self._path)
        except OSError:
            self.discard()
            raise
        os.close(self._descriptor)

    def discard(self) -> None:
        os.close(self._descriptor)
        with suppress(OSError):
            os.unlink(self._temporary)


def _stage(path: Path, content: bytes, mode: int, folder_mode: int | None) -> _Staged:
    # The name's ending tells readers of the folder (the runtime's CDI library) that it is not for them.
    temporary = f"{path.parent}/.{path.name}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, mode)
    except FileNotFoundError:
        if folder_mode is None:
            raise
        path.parent.mkdir(mode=folder_mode, parents=True, exist_ok=True)
        descriptor = os.open(temporary, flags, mode)
    staged = _Staged(descriptor, temporary, path)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fchmod(descriptor, mode)
    except OSError:
        staged.discard()
        raise
    return staged


def _error_of(step: Callable[[], None]) -> OSError | None:
    try:
        step()
    except OSError as error:
        return error
    return None


def remove_files(folder: Path, *names: str) -> bool:
    """Remove files of a folder durably.

    Parameters
    ----------
    folder : Path
        The folder; it may be missing.
    *names : str
        The files' names; they may be missing.

    Returns
    -------
    bool
        Whether any was there.

    Raises
    ------
    OSError
        If one cannot be removed, or its removal might not survive a power failure.
    """
    (outcome,) = remove_groups_of_files(folder, [names])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def remove_groups_of_files(folder: Path, groups: Sequence[Sequence[str]]) -> list[bool | Exception]:
    """Remove files of a folder durably, for several who want some gone; the folder is synced once.

    Parameters
    ----------
    folder : Path
        The folder; it may be missing.
    groups : sequence of sequence of str
        The names of each one's files; they may be missing.

    Returns
    -------
    list of bool or Exception
        For each one what `remove_files` would return or raise.
    """
    outcomes: list[bool | Exception] = []
    for names in groups:
        found = False
        try:
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(f"{folder}/{name}")
                    found = True
            outcomes.append(found)
        except OSError as error:
            outcomes.append(error)
    try:
        # Also if none was there: an earlier attempt may have failed after its unlink.
        with suppress(FileNotFoundError):
            _sync_folder(folder)
    except OSError as error:
        return [outcome if isinstance(outcome, Exception) else error for outcome in outcomes]
    return outcomes


def remove_temporary_files(folder: Path, ours: Callable[[str], bool]) -> None:
    """Remove what `replace_file` left behind when its process was killed.

    Parameters
    ----------
    folder : Path
        The folder; it may be missing.
    ours : Callable
        Tells by a file's final name whether it is one of the caller's: others may work in the same folder.

    Raises
    ------
    OSError
        If the folder cannot be read. A file that cannot be removed is left: it does no harm.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        final_name, _, random_part = name[1:-4].rpartition(".")
        if name.startswith(".") and name.endswith(".tmp") and len(random_part) == 8 and ours(final_name):
            with suppress(OSError):
                os.unlink(folder / name)


def _has_content(path: Path, content: bytes) -> bool:
    # Most files are new, and an exception costs more than a look.
    if not os.access(path, os.F_OK):
        return False
    try:
        return read_file(path, len(content)) == content
    except OSError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
