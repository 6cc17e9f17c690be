# SPDX-License-Identifier: Apache-2.0
"""One YAML mapping, read without trust: every key once, no aliases, nothing guessed, every entry with its line.

YAML's events are read one by one, so that a hostile text costs what its bytes cost: nothing is expanded, nested deeply
or constructed. Plain scalars keep their own spelling (`010` could be eight or ten), and what is not text, a boolean,
null or a mapping is handed on as something that no caller takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import yaml

from driver.errors import ConfigError
from driver.flags import shown
from driver.given import Entry, Other, Value, describe_value

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_DEEPEST = 4
_TAG = "tag:yaml.org,2002:"
_KINDS = {"int": "number", "float": "number", "timestamp": "date", "merge": "merge key", "value": "default key"}


def read_file(path: Path, what: str, limit: int) -> str:
    """Read a file that somebody else wrote.

    Parameters
    ----------
    path : Path
        The file; a pipe will do.
    what : str
        What it is meant to be, for the messages.
    limit : int
        Most bytes that are taken.

    Returns
    -------
    str

    Raises
    ------
    ConfigError
        If it cannot be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {shown(str(path))}: {error.strerror or error}") from error
    except ValueError as error:  # a NUL byte in the path
        raise ConfigError(f"cannot read the {what} {shown(str(path))}: {error}") from error
    if len(raw) > limit:
        raise ConfigError(f"the {what} {shown(str(path))} is larger than {limit} bytes, the most that is read")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8; expected a YAML file in UTF-8"
        ) from error


def read_mapping(text: str, source: str) -> tuple[Entry, ...]:
    """Read the one mapping that a YAML text holds.

    Parameters
    ----------
    text : str
        One YAML document; an empty one is an empty mapping.
    source : str
        Where it is from, for the messages.

    Returns
    -------
    tuple of Entry
        In the text's order. A key that is given twice is there twice: the caller says so together with what else is
        wrong with the keys.

    Raises
    ------
    ConfigError
        One line that names the source, the line and what is wrong there.
    """
    try:
        return _Reader(text, source).read()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{source}, line {line}: not YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}, line {line}: not YAML: {error.reason}") from error
    except UnicodeEncodeError as error:  # half of a surrogate pair
        line = text.count("\n", 0, error.start) + 1
        raise ConfigError(f"{source}, line {line}: not YAML: {text[error.start]!a} is not a character") from error


class _Reader:
    def __init__(self, text: str, source: str) -> None:
        self._source = source
        self._loader = yaml.CSafeLoader(text)

    def read(self) -> tuple[Entry, ...]:
        events = self._events()
        value: Value = None
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, "a second document begins; expected one")
            elif isinstance(event, yaml.NodeEvent):
                value = self._value(event, events, 1)
                if not isinstance(value, tuple) and value is not None:
                    self._refuse(event, f"found {describe_value(value)}; expected a mapping of keys to values")
        return value if isinstance(value, tuple) else ()

    def _events(self) -> Iterator[yaml.Event]:
        while (event := self._loader.get_event()) is not None:
            yield event

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Value:
        if getattr(event, "anchor", None) is not None:
            self._refuse(event, "anchors and aliases are not supported; write the value out")
        if depth > _DEEPEST:
            self._refuse(event, f"nested deeper than {_DEEPEST} levels")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", f"{_TAG}map", f"{_TAG}seq"):
            self._refuse(event, f"the tag {shown(tag)} is not supported")
        if isinstance(event, yaml.MappingStartEvent):
            return tuple(self._entries(events, depth))
        for item in events:
            if isinstance(item, yaml.SequenceEndEvent):
                break
            self._value(item, events, depth + 1)
        return Other("list")

    def _entries(self, events: Iterator[yaml.Event], depth: int) -> Iterator[Entry]:
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                return
            key = self._value(event, events, depth + 1)
            if isinstance(key, Other) and key.text == "<<":
                self._refuse(event, "merge keys are not supported; write the keys out")
            if not isinstance(key, str):
                self._refuse(event, f"a key is {describe_value(key)}; expected text")
            yield Entry(key, self._value(next(events), events, depth + 1), _line(event))

    def _scalar(self, event: yaml.ScalarEvent) -> Value:
        tag: str | None = event.tag
        if tag in (None, "!"):
            tag = self._loader.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call]
        kind = str(tag).removeprefix(_TAG)
        text = str(event.value)
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in yaml.CSafeLoader.bool_values:
            return yaml.CSafeLoader.bool_values[text.lower()]
        return Other(_KINDS.get(kind, f"value tagged {shown(tag)}"), text)

    def _refuse(self, event: yaml.Event, fault: str) -> NoReturn:
        raise ConfigError(f"{self._source}, line {_line(event)}: {fault}")


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1
