# SPDX-License-Identifier: Apache-2.0
"""JSON: typed reading of what somebody else wrote, and writing that people can read too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, TypeVar

from driver.errors import ClaimError

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = TypeVar("_T", dict[str, object], list[object], str, int, bool)

_KINDS: Final[dict[type, str]] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    float: "a number with a fraction or an exponent",
    bool: "a boolean",
}
_SHOWN_CHARACTERS = 80


def expect(value: object, kind: type[_T], place: str) -> _T:
    """Return a JSON value if it is of the kind that belongs there.

    Parameters
    ----------
    value : object
        The value as it was decoded. A boolean is no number.
    kind : type
        ``dict``, ``list``, ``str``, ``int`` or ``bool``.
    place : str
        Where it stands, for the message.

    Returns
    -------
    dict, list, str, int or bool

    Raises
    ------
    ClaimError
        If it is of another kind, null included.
    """
    if value is None:
        raise ClaimError(f"{place} is missing; expected {_KINDS[kind]}")
    if type(value) is not kind:
        raise ClaimError(f"{place} is {_KINDS.get(type(value), type(value).__name__)}; expected {_KINDS[kind]}")
    return value


def quoted(text: str) -> str:
    """Quote a text from outside for a message of one line: escaped where it is not printable, and not too long."""
    if len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]!r}… ({len(text)} characters)"
    return repr(text)


def member_lines(document: Mapping[str, object], *, ensure_ascii: bool = True) -> bytes:
    """Write a JSON object with a line for each member.

    Indenting it all the way down would have Python's own encoder do it, at ten times the cost of the one in C.

    Parameters
    ----------
    document : mapping of str to object
    ensure_ascii : bool
        Whether other characters are escaped.

    Returns
    -------
    bytes
        UTF-8, with a newline at the end.
    """
    members = (
        f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=ensure_ascii)}" for key, value in document.items()
    )
    return ("{\n" + ",\n".join(members) + "\n}\n").encode()
