# SPDX-License-Identifier: Apache-2.0
"""What the start guard has noted: containers that were started on fewer CPUs than their claims hold.

A container inherits the affinity of the runtime, which may be narrower than the container's cpuset, and under cgroup v2
the kernel cuts a cpuset silently to what its parents allow. Nobody is harmed but the container itself, so the guard
lets it start, and leaves a note in a folder of the plugin folder: a file named after the container's id. Here notes are
looked for, told, and removed when their containers are gone.

The guard may be of another version than this driver, so a note that cannot be understood is left alone as long as its
container lives. The guard leaves no more than a thousand; whatever else there is in the folder is removed, or passed
over if it cannot be.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from driver.files import read_file
from driver.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

_log = logging.getLogger(__name__)

FOLDER: Final = "guard-notes"
_FOLDER_MODE: Final = 0o700
_LOOK_AGAIN_S: Final = 2.0
# The runtime's side may hear of a container a little later than the folder, and of its end a little earlier.
_FORGET_S: Final = 60.0
# Of a guard that still writes. Longer than it runs.
_STALE_S: Final = 60.0
_MOST_ENTRIES: Final = 2000
_MOST_NAMED: Final = 3
_LARGEST_NOTE: Final = 512

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
# The guard cuts lists that get long.
_CPULIST: Final = rb"([0-9][0-9,-]*(?:,\.\.\. \([0-9]+ CPUs\))?)"
_NOTE: Final = re.compile(rb"v1\t" + _CPULIST + rb"\t" + _CPULIST + rb"\n")

_SAYS: Final = (
    "a container was started on fewer CPUs than its claims hold: the runtime's own affinity or a parent cgroup allows "
    "no others, or they were offline"
)
_SAYS_LATE: Final = (
    "containers that have ended were started on fewer CPUs than their claims hold: the runtime's own affinity or a "
    "parent cgroup allows no others, or they were offline"
)


class Containers(Protocol):
    """The containers that live."""

    def get(self, identity: str, /) -> object | None:
        """Return a container, whose text names it and its pod; None if it does not live or is not known."""


class Runtime(Protocol):
    """What knows of the containers on this node."""

    @property
    def known(self) -> bool:
        """Whether all that live are known."""

    @property
    def containers(self) -> Containers:
        """Those that are known."""


class NoteMetrics(Protocol):
    """What counts them."""

    def count_start_on_fewer_cpus(self) -> None:
        """Count a container that was started on fewer CPUs than its claims hold."""

    def set_containers_on_fewer_cpus(self, containers: int, /) -> None:
        """Say how many of those live."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note.

    Attributes
    ----------
    used : str
        The CPUs on which the kernel let the container run when it started. A long list is cut, and ends with how many
        there are.
    claimed : str
        Those of its claims, likewise.
    """

    used: str
    claimed: str


def parse_note(content: bytes) -> Note | None:
    """Return what a note says, None if it is not of the format that is known here."""
    match = _NOTE.fullmatch(content)
    return None if match is None else Note(*(text.decode("ascii") for text in match.groups()))


class NotesFolder:
    """The folder with the notes; its methods block on the disk.

    Parameters
    ----------
    path : Path
        The folder. It is made if it is missing: without it the guard leaves no notes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, known: Collection[str]) -> tuple[list[str], dict[str, Note]]:
        """Find the notes, and remove what is none.

        Parameters
        ----------
        known : collection of str
            The names of those that need not be read.

        Returns
        -------
        names : list of str
            Of all files that may be notes, each the id of a container.
        notes : dict of str to Note
            Those that were read and understood.

        Raises
        ------
        OSError
            If the folder can be neither read nor made.
        """
        names: list[str] = []
        notes: dict[str, Note] = {}
        folder = self._open()
        try:
            with os.scandir(folder) as entries:
                # What is beyond the limit comes to light when others have been removed.
                found = [entry.name for entry in islice(entries, _MOST_ENTRIES)]
            for name in found:
                if _NAME.fullmatch(name) is None:
                    _sweep(folder, name)
                    continue
                names.append(name)
                if name not in known and (note := _read(folder, name)) is not None:
                    notes[name] = note
        finally:
            os.close(folder)
        return names, notes

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that cannot be removed is left.

        Raises
        ------
        OSError
            If the folder cannot be opened.
        """
        folder = self._open()
        try:
            for name in names:
                _unlink(folder, name)
        finally:
            os.close(folder)

    def _open(self) -> int:
        # What is removed must be in this folder, whatever somebody has put in its place.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._path, flags)
        except FileNotFoundError:
            os.mkdir(self._path, _FOLDER_MODE)
            return os.open(self._path, flags)


class GuardNotes:
    """Looks for notes, and tells of each container once.

    Parameters
    ----------
    plugin_dir : Path
        The plugin folder, in which the guard lies.
    runtime : Runtime
        What knows of the containers.
    metrics : NoteMetrics
        What counts.
    clock : callable
        The present time in seconds, monotonic.
    """

    def __init__(
        self,
        plugin_dir: Path,
        runtime: Runtime,
        metrics: NoteMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = NotesFolder(plugin_dir / FOLDER)
        self._runtime = runtime
        self._metrics = metrics
        self._clock = clock
        self._notes: dict[str, Note] = {}
        self._told: set[str] = set()
        self._gone_since: dict[str, float] = {}
        self._fault = ""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def look(self) -> None:
        """Tell of notes that were not told yet, and remove those of containers that have been gone for a while."""
        try:
            names, read = await asyncio.to_thread(self._folder.read, frozenset(self._notes))
            self._notes |= read
            self._keep(names)
            self._tell_living(names)
            if gone := self._gone(names):
                self._tell_gone(gone)
                await asyncio.to_thread(self._folder.remove, gone)
        except OSError as error:
            if str(error) != self._fault:
                self._fault = str(error)
                _log.warning("cannot look for the start guard's notes", extra=fields(reason=error))
        else:
            self._fault = ""

    def _keep(self, names: list[str]) -> None:
        """Forget what is known of notes that are not there any more."""
        there = set(names)
        self._told &= there
        for of_notes in (self._notes, self._gone_since):
            for name in of_notes.keys() - there:
                del of_notes[name]

    def _tell_living(self, names: list[str]) -> None:
        living = 0
        for name in names:
            container = self._runtime.containers.get(name)
            note = self._notes.get(name)
            if container is None or note is None:
                continue
            living += 1
            if self._is_new(name):
                _log.warning(_SAYS, extra=fields(container=container, id=name, cpus=note.used, claimed=note.claimed))
        self._metrics.set_containers_on_fewer_cpus(living)

    def _gone(self, names: list[str]) -> list[str]:
        """Return the notes whose containers have not lived for a while."""
        gone = []
        for name in names:
            if self._runtime.containers.get(name) is not None:
                self._gone_since.pop(name, None)
            elif self._runtime.known and self._clock() - self._gone_since.setdefault(name, self._clock()) >= _FORGET_S:
                gone.append(name)
        return gone

    def _tell_gone(self, gone: list[str]) -> None:
        """Tell of containers that lived so short that nobody knows of which pods they were."""
        told = [name for name in gone if name in self._notes and self._is_new(name)]
        if told:
            note = self._notes[told[0]]
            named = " ".join(told[:_MOST_NAMED])
            _log.warning(_SAYS_LATE, extra=fields(count=len(told), ids=named, cpus=note.used, claimed=note.claimed))

    def _is_new(self, name: str) -> bool:
        if name in self._told:
            return False
        self._told.add(name)
        self._metrics.count_start_on_fewer_cpus()
        return True


def _read(folder: int, name: str) -> Note | None:
    try:
        return parse_note(read_file(name, _LARGEST_NOTE, folder=folder))
    except OSError:
        return None


def _sweep(folder: int, name: str) -> None:
    with suppress(OSError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        # The guard writes under a name that begins with a dot.
        if not name.startswith(".") or time.time() - status.st_mtime > _STALE_S:
            _unlink(folder, name)


def _unlink(folder: int, name: str) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
