# SPDX-License-Identifier: Apache-2.0
"""Values that somebody gave, in the file or as a flag, and how each kind of them is read.

Every reader returns what `Config` holds, or raises the `ConfigError` that names the place, the value and what would be
right.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from driver.errors import ConfigError
from driver.flags import shown
from driver.logs import parse_vmodule

if TYPE_CHECKING:
    from fastcpu import CpuSet

_BIND_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(%[^\[\]\s]+)?\]|[^\[\]:/\s]*):(?P<port>[0-9]{1,5})", re.ASCII)
_DECIMAL = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_GO_INTEGER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Other:
    """A value that is neither text, boolean, null nor a mapping.

    Attributes
    ----------
    kind : str
        What it is, in words.
    text : str
        A scalar as it is spelled; empty for a list.
    """

    kind: str
    text: str = ""


Value = str | bool | None | Other | tuple["Entry", ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping, its value, and the line of the key, from 1."""

    key: str
    value: Value
    line: int


def describe_value(value: Value) -> str:
    """Return what a value is, for the message that refuses it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return f"the boolean {str(value).lower()}"
        case str():
            return shown(value)
        case Other(kind=kind, text=text):
            return f"the {kind} {shown(text)[1:-1]}" if text else f"a {kind}"
        case _:
            return "a mapping"


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody gave.

    Attributes
    ----------
    value : str, bool, None, Other or tuple of Entry
        A flag's is text or a boolean.
    place : str
        Where exactly it was given.
    source : str
        For a value of a file: the file.
    locate : callable
        Turns a path that the value names into one that can be opened here.
    """

    value: Value
    place: str
    source: str = ""
    locate: Callable[[str], Path] = Path

    def refuse(self, expected: str) -> NoReturn:
        """Raise the `ConfigError` that names the place, the value and what would be right."""
        raise ConfigError(f"{self.place}: {describe_value(self.value)} is not accepted; expected {expected}")


def alternatives(choices: Sequence[str]) -> str:
    """Return choices as a sentence has them: ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def read_text(given: Given) -> str:
    """Return a text."""
    value = given.value
    if not isinstance(value, str):
        scalar = isinstance(value, bool) or (isinstance(value, Other) and value.text)
        given.refuse("text; put it in quotes" if scalar else "text")
    return value


def read_boolean(given: Given) -> bool:
    """Return a boolean."""
    if not isinstance(given.value, bool):
        given.refuse("true or false")
    return given.value


def one_of(*choices: str) -> Callable[[Given], str]:
    """Return a reader that takes only certain texts."""

    def read(given: Given) -> str:
        if given.value not in choices:
            given.refuse(alternatives(choices))
        return read_text(given)

    return read


def read_cpus(given: Given) -> CpuSet:
    """Return the CPUs of a cpulist."""
    value = given.value
    # `reservedCPUs: 0` is a number to YAML. Only the spelling that can mean nothing else is taken: 010 is eight in YAML
    # 1.1 and ten to the kernel.
    if isinstance(value, Other) and _DECIMAL.fullmatch(value.text):
        value = value.text
    if not isinstance(value, str):
        given.refuse('CPUs in quotes, such as "0-1,64"')
    from fastcpu import CpuSet
    from fastcpu.cpuset import MAX_CPUS
    from fastcpu.errors import CpuListError

    try:
        return CpuSet.parse(value, limit=MAX_CPUS)
    except CpuListError as error:
        raise ConfigError(f"{given.place}: {error}") from error


def read_path(given: Given) -> Path:
    """Return a path."""
    text = read_text(given)
    if not text or "\0" in text:
        given.refuse("a path")
    return Path(text)


def read_absolute_path(given: Given) -> Path:
    """Return an absolute path without ``.``, ``..`` and repeated slashes."""
    text = read_text(given)
    if not text.startswith("/") or "\0" in text:
        given.refuse("an absolute path")
    # Cleaned, not resolved: what links mean is for the kubelet to say, and its mounts are rendered from the same text.
    return Path(os.path.normpath("/" + text.lstrip("/")))


def read_bind_address(given: Given) -> str:
    """Return a ``host:port`` whose host may be missing."""
    text = read_text(given)
    match = _BIND_ADDRESS.fullmatch(text)
    if not match or int(match["port"]) > 65535:
        given.refuse("host:port or :port, a port from 0 to 65535")
    return text


def read_verbosity(given: Given) -> int:
    """Return a number as Go's integer flags take it."""
    text = read_text(given)
    if not _GO_INTEGER.fullmatch(text):
        given.refuse("a whole number")
    return int(text)


def read_vmodule(given: Given) -> str:
    """Return a ``pattern=N,…`` that can be read."""
    text = read_text(given)
    try:
        parse_vmodule(text)
    except ValueError:
        given.refuse("pattern=N, several of them separated by commas")
    return text
