# SPDX-License-Identifier: Apache-2.0
"""One line for each event, as ``key=value`` pairs or as JSON, that nobody outside can forge or break.

Modules log with the standard library: ``log = logging.getLogger(__name__)`` and
``log.info("claim prepared", extra=fields(claim=name, cpus=cpus))``. Values are turned into text only when the line is
written, so pass the object and not its text. Everything logged within `operation` carries its id and its fields, in
every task and thread that was started there.

The levels: ERROR, something failed and stays failed; WARNING, it goes on, but less well than it should; INFO, what was
decided and why; DEBUG, how the decision came about.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

__all__ = ["configure", "fields", "one_line", "operation"]

# containerd splits a log line at 16 KiB; a reader would see the rest as a line of its own.
_LONGEST_VALUE: Final = 4096
_DEBUG_VERBOSITY: Final = 4
_PACKAGE: Final = "driver"
# What needs no quotes: printable ASCII but space, quote, equals sign and backslash.
_BARE: Final = frozenset(map(chr, range(0x21, 0x7F))) - frozenset('"=\\')

_TRACES: Final = logging.Formatter()

_operation: ContextVar[Mapping[str, object] | None] = ContextVar("operation", default=None)


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the ``extra`` argument that adds fields to a line.

    Parameters
    ----------
    **values : object
        The fields in the order in which they are written; None is left out.
    """
    return {"fields": values}


@contextmanager
def operation(name: str, **values: object) -> Iterator[str]:
    """Add an operation's id and fields to every line that is logged within.

    An operation within another one, such as a claim of a call, keeps the outer id and adds to its fields.

    Parameters
    ----------
    name : str
        What is being done, such as the name of the RPC.
    **values : object
        More fields.

    Yields
    ------
    str
        The id: eight hexadecimal digits.
    """
    outer = _operation.get()
    identity = os.urandom(4).hex() if outer is None else str(outer["op"])
    token = _operation.set({**(outer or {}), "op": identity, "operation": name, **values})
    try:
        yield identity
    finally:
        _operation.reset(token)


def one_line(text: str) -> str:
    """Return text without line breaks and other characters that a terminal or a log reader obeys."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def configure(style: str, verbosity: int, vmodule: str) -> None:
    """Send all logging of this process to stderr in one form.

    Parameters
    ----------
    style : str
        ``text`` for key=value lines, ``json`` for an object on each line.
    verbosity : int
        Kubernetes' ``--v``: 4 and more is DEBUG, less is INFO.
    vmodule : str
        Kubernetes' ``--vmodule``: ``pattern=N,…``; a pattern matches a module's name with or without its packages, and
        N is its verbosity. Others' libraries are always at WARNING.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter())
    root = logging.getLogger()
    for previous in root.handlers[:]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(_PACKAGE).setLevel(_level(verbosity))
    for pattern, module_verbosity in parse_vmodule(vmodule):
        for module in _modules():
            if fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module.rpartition(".")[2], pattern):
                logging.getLogger(module).setLevel(_level(module_verbosity))


def parse_vmodule(text: str) -> list[tuple[str, int]]:
    """Read ``pattern=N,…``; empty parts are skipped.

    Raises
    ------
    ValueError
        If a part is not of that form.
    """
    pairs = []
    for part in filter(None, text.split(",")):
        pattern, equals, number = part.rpartition("=")
        if not (pattern and equals and number.isascii() and number.isdigit() and len(number) < 10):
            raise ValueError(part)
        pairs.append((pattern, int(number)))
    return pairs


def _level(verbosity: int) -> int:
    return logging.DEBUG if verbosity >= _DEBUG_VERBOSITY else logging.INFO


def _modules() -> Iterator[str]:
    package = Path(__file__).parent
    for path in package.rglob("*.py"):
        yield ".".join((_PACKAGE, *path.relative_to(package).with_suffix("").parts))


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    found = {**(_operation.get() or {}), **getattr(record, "fields", {})}
    if record.exc_info and record.exc_info[1] is not None:
        found["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        # Where it happened is at the end.
        found["trace"] = _TRACES.formatException(record.exc_info)[-_LONGEST_VALUE:]
    return {key: value for key, value in found.items() if value is not None}


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _bounded(text: str) -> str:
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}… ({len(text)} characters)"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = _bounded(str(value))
    if text and _BARE.issuperset(text):
        return text
    if text.isprintable():
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return _escaped(text)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        logger, message = _text(record.name), _text(record.getMessage())
        parts = [f"time={_time(record)} level={record.levelname} logger={logger} msg={message}"]
        parts += [f"{key}={_text(value)}" for key, value in _fields_of(record).items()]
        return " ".join(parts)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "msg": _bounded(record.getMessage()),
        }
        for key, value in _fields_of(record).items():
            line.setdefault(key, value if _is_json_number(value) else _bounded(str(value)))
        return _escaped(line)


def _is_json_number(value: object) -> bool:
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def _escaped(value: object) -> str:
    # DEL is the one control character that JSON leaves as it is.
    return json.dumps(value).replace("\x7f", "\\u007f")
