# SPDX-License-Identifier: Apache-2.0
"""Typed reading of decoded JSON that somebody else wrote."""

from __future__ import annotations

from typing import Final, TypeVar

from driver.errors import ClaimError

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
