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
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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


def read_file(path: Path, limit: int) -> bytes:
    """Read a file that may have been put there by anybody.

    Parameters
    ----------
    path : Path
        The file.
    limit : int
        The most bytes that it may have.

    Returns
    -------
    bytes

    Raises
    ------
    OSError
        If it cannot be read (`FileNotFoundError` if it is not there), is no regular file, or is larger than ``limit``.
    """
    # O_NONBLOCK: opening must not hang if somebody has put a FIFO there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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
        try:
            _write_anew(path, content, mode, durable)
        except FileNotFoundError:
            if folder_mode is None:
                raise
            path.parent.mkdir(mode=folder_mode, parents=True, exist_ok=True)
            _write_anew(path, content, mode, durable)
    if durable:
        # Also if the content was there: an earlier attempt may have failed after its rename.
        _sync_folder(path.parent)
    return is_new


def _write_anew(path: Path, content: bytes, mode: int, durable: bool) -> None:
    # The name's ending tells readers of the folder (the runtime's CDI library) that it is not for them.
    temporary = f"{path.parent}/.{path.name}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


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
    found = False
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(folder / name)
            found = True
    # Also if none was there: an earlier attempt may have failed after its unlink.
    with suppress(FileNotFoundError):
        _sync_folder(folder)
    return found


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
