# SPDX-License-Identifier: Apache-2.0
"""The file of a listening Unix socket: private from its first moment, placed atomically, removed only if still ours.

A server binds its socket in a hidden folder of mode 0700 beside the final place; the socket gets mode 0600 and is
renamed to its final name once the server answers. So nobody else can connect at any moment, a stale socket of an
earlier process is replaced without a gap, and the kubelet, which watches the registration folder but nothing hidden,
first sees a socket that works. It also keeps gRPC, which unlinks the path it was given when a server stops, from
unlinking a successor's socket.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from driver.config import check_socket_path
from driver.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class SocketFile:
    """The place of one listening socket in the file system.

    Parameters
    ----------
    path : Path
        The final place; its name ends with ``.sock``.

    Raises
    ------
    ConfigError
        If the path is too long for a socket, or is not UTF-8, which gRPC demands of the text that tells the kubelet
        of it.
    """

    def __init__(self, path: Path) -> None:
        check_socket_path(path)
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the socket path {str(path)!r} is not valid UTF-8: choose another folder") from None
        self.path = path
        # Shorter than the final path, because "/s" and the dot take less room than ".sock".
        self._staging_dir = path.parent / f".{path.stem}"
        self._identity: tuple[int, int, int] | None = None

    @property
    def staged(self) -> Path:
        """Where the server must bind the socket between `stage` and `publish`."""
        return self._staging_dir / "s"

    def stage(self) -> None:
        """Make the private folder for binding, and the final folder with mode 0750 if it is missing.

        Raises
        ------
        ConfigError
            If something that is not a socket stands at the final place.
        OSError
            If a folder cannot be made.
        """
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise ConfigError(
                    f"{self.path} is not a socket but stands where the driver's socket belongs: remove it"
                )
        make_folder(self.path.parent)
        self._clear_staging()
        self._staging_dir.mkdir(mode=0o700)

    def publish(self) -> None:
        """Put the bound socket in its final place, replacing a stale one.

        Raises
        ------
        OSError
            If the socket was not bound at `staged`, or cannot be moved.
        """
        self.staged.chmod(0o600)
        self._identity = _identity(self.staged)
        self.staged.rename(self.path)
        self._clear_staging()

    def discard(self) -> None:
        """Forget a socket that was staged but is not going to be published."""
        with suppress(OSError):
            self._clear_staging()

    def is_ours(self) -> bool:
        """Whether the socket that was published last still stands at the final place."""
        return self._identity is not None and _identity(self.path) == self._identity

    def is_taken(self) -> bool:
        """Whether some other process listens at the final place."""
        if self.is_ours():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self.path))
            except BlockingIOError:  # its backlog is full
                return True
            except OSError:
                return False
        return True

    def remove(self) -> None:
        """Remove the published socket, unless somebody else's stands there by now."""
        if self.is_ours():
            with suppress(OSError):
                self.path.unlink()
        self._identity = None

    def _clear_staging(self) -> None:
        """Remove the private folder, also one that a killed process has left."""
        with suppress(FileNotFoundError):
            self.staged.unlink()
        with suppress(FileNotFoundError):
            self._staging_dir.rmdir()


def make_folder(folder: Path) -> None:
    """Make a folder, and those that it is in, with the mode of the kubelet's own, unless they exist.

    Raises
    ------
    OSError
        If that is not possible.
    """
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o750, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _identity(path: Path) -> tuple[int, int, int] | None:
    # Inode numbers are used again soon after a file is deleted; the time of creation tells such files apart.
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns
