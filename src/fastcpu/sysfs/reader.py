# SPDX-License-Identifier: Apache-2.0
"""Checked values from sysfs files: numbers, lists and masks of CPUs, with notes on texts that are none of these."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Final

from fastcpu.cpuset import DEFAULT_LIMIT, MAX_CPUS, CpuSet
from fastcpu.errors import CpuListError, TopologyError
from fastcpu.sysfs.filetree import MAX_FILE_SIZE, FileTree

__all__ = ["CPU_FOLDER", "LARGEST_ID", "NODE_FOLDER", "SysfsReader"]

CPU_FOLDER: Final = "/sys/devices/system/cpu"
NODE_FOLDER: Final = "/sys/devices/system/node"

LARGEST_ID: Final = 2**31 - 1

_MAX_NOTES: Final = 100
_WHITE_SPACE: Final = " \t\n\r\v\f"
_NUMBER: Final = re.compile("-?[0-9]{1,10}")
_MASK: Final = re.compile("[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{8})*")


class SysfsReader:
    """Checked access to a tree: the value of a file, or None with a note if its text has no meaning.

    Parameters
    ----------
    tree : FileTree
        Where to read.

    Attributes
    ----------
    tree : FileTree
        Where it reads.
    limit : int
        CPU numbers are below it: 8,192, or more where ``kernel_max`` says so.
    """

    def __init__(self, tree: FileTree) -> None:
        self.tree = tree
        self._notes: list[str] = []
        self._notes_left_out = 0
        highest = self.number(f"{CPU_FOLDER}/kernel_max", MAX_CPUS - 1)
        self.limit = max(DEFAULT_LIMIT, (highest or 0) + 1)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes so far: at most a hundred, and the number of those left out."""
        if self._notes_left_out:
            return (*self._notes, f"and {self._notes_left_out} more")
        return tuple(self._notes)

    def note(self, text: str) -> None:
        """Keep a sentence for `notes`."""
        if len(self._notes) < _MAX_NOTES:
            self._notes.append(text)
        else:
            self._notes_left_out += 1

    def text(self, path: str) -> str | None:
        """Return the text of a file without white space around it, or None if it cannot be read.

        A text longer than ``MAX_FILE_SIZE`` comes unchanged: it has no meaning, and must not become one that has.
        """
        text = self.tree.read(path)
        if text is None or len(text) > MAX_FILE_SIZE:
            return text
        # Some kernels from Linux 5.15 on include the zero byte after the end of a list or mask.
        return text.removesuffix("\0").strip(_WHITE_SPACE)

    def number(self, path: str, largest: int = LARGEST_ID) -> int | None:
        """Return the number in a file; None if it is absent, negative (the kernel's "unknown") or too large."""
        text = self.text(path)
        if text is None:
            return None
        if _NUMBER.fullmatch(text):
            number = int(text)
            if number <= largest:
                return number if number >= 0 else None
        self.refuse(path, text, f"a number up to {largest}")
        return None

    def cpus(self, path: str) -> CpuSet | None:
        """Return the CPUs of a list; None if it is absent or no list of CPUs."""
        text = self.text(path)
        if text is None:
            return None
        try:
            return self.parse_list(path, text)
        except TopologyError as error:
            self.note(f"{error}; treated as absent")
            return None

    def members(self, folder: str, names: Iterable[str], cpu: int | None = None) -> CpuSet | None:
        """Return the CPUs of the first file with a meaning among several.

        Parameters
        ----------
        folder : str
            The folder of the files.
        names : iterable of str
            Their names, the preferred first. The name of a list contains ``list``; other files are masks.
        cpu : int, optional
            The CPU that the files belong to. A file that does not name it has no meaning.

        Returns
        -------
        CpuSet or None
        """
        for name in names:
            path = f"{folder}/{name}"
            cpus = self.cpus(path) if "list" in name else self._mask(path)
            if cpus is None:
                continue
            if cpu is None or cpu in cpus:
                return cpus
            if cpus:
                self.note(f"{path}: {cpus} is without CPU {cpu} itself; treated as absent")
        return None

    def parse_list(self, path: str, text: str) -> CpuSet:
        """Return the CPUs of a list that has been read.

        Raises
        ------
        TopologyError
            If the text is no list of CPUs.
        """
        try:
            if len(text) <= MAX_FILE_SIZE:
                return CpuSet.parse(text, limit=self.limit)
        except CpuListError:
            pass
        raise TopologyError(path, text, f"a list of CPUs below {self.limit}")

    def refuse(self, path: str, text: str, expected: str) -> None:
        """Note that the text of a file has no meaning and counts as absent."""
        self.note(f"{TopologyError(path, text, expected)}; treated as absent")

    def _mask(self, path: str) -> CpuSet | None:
        text = self.text(path)
        if text is None:
            return None
        if len(text) <= MAX_FILE_SIZE and _MASK.fullmatch(text):
            bits = int(text.replace(",", ""), 16)
            if bits.bit_length() <= self.limit:
                n_bytes = -(-bits.bit_length() // 64) * 8
                return CpuSet.from_array(memoryview(bits.to_bytes(n_bytes, sys.byteorder)).cast("Q"))
        self.refuse(path, text, f"a mask of CPUs below {self.limit}")
        return None
