# SPDX-License-Identifier: Apache-2.0
"""The syntax of Go's ``flag`` package, which charts and manifests of dra-driver-cpu are written in.

One or two dashes; ``-name=value`` or ``-name value``; a boolean is bare or ``-name=value`` and never takes the next
argument; the last one of several wins; ``--`` or the first argument that is no flag ends the flags.

`argparse` reads a different language: it takes a single dash as the start of a short flag, lets a boolean with an
optional value swallow the argument after it, refuses a value that begins with a dash, and finds flags behind positional
arguments. A command line that works with the Go program must mean the same here, so the forty lines of rules are
written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from driver.errors import ConfigError

# strconv.ParseBool takes exactly these.
_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}
_SHOWN_CHARACTERS = 80
_HELP_COLUMN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of a command.

    Attributes
    ----------
    name : str
        Without dashes.
    help : str
        One sentence for ``--help``.
    value : str
        What the help calls the value; empty for a boolean.
    """

    name: str
    help: str
    value: str = ""


class HelpRequest(Exception):
    """``-h`` or ``--help`` was given; the message is the help, once the command is known."""


def shown(value: object) -> str:
    """Return a value from outside as an error message quotes it: with its quotes, and never at length."""
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}… ({len(text)} characters)"


def nearest(word: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate that someone who wrote `word` most likely meant.

    Parameters
    ----------
    word : str
        As it was written; case, dashes and underscores do not count.
    candidates : sequence of str
        The right spellings.

    Returns
    -------
    str or None
        None if nothing comes close.
    """
    import difflib  # needed only on the way to an error

    folded = {fold(candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(fold(word[:_SHOWN_CHARACTERS]), folded, n=1, cutoff=0.75)
    return folded[found[0]] if found else None


def fold(word: str) -> str:
    """Return a name without what tells a flag's spelling from a key's: case, dashes and underscores."""
    return word.replace("-", "").replace("_", "").casefold()


def parse_flags(arguments: Sequence[str], flags: Sequence[Flag]) -> tuple[dict[str, str | bool], list[str]]:
    """Split arguments into flags and the rest.

    Parameters
    ----------
    arguments : sequence of str
        Without the program's name.
    flags : sequence of Flag
        The flags that are known.

    Returns
    -------
    values : dict of str to str or bool
        By flag name; only flags that were given. Booleans are `bool`, all others `str`.
    rest : list of str
        The arguments behind the flags.

    Raises
    ------
    HelpRequest
        For ``-h``, ``-help`` and the same with two dashes.
    ConfigError
        For an unknown flag, a missing value, or a boolean that is none.
    """
    known: Mapping[str, Flag] = {flag.name: flag for flag in flags}
    values: dict[str, str | bool] = {}
    left = list(reversed(arguments))
    while left:
        argument = left[-1]
        if len(argument) < 2 or argument[0] != "-":
            break
        left.pop()
        if argument == "--":
            break
        body = argument[2:] if argument[1] == "-" else argument[1:]
        if body[0] in "-=":
            raise ConfigError(f"{shown(argument)} is not a flag: expected --name or --name=value")
        name, equals, value = body.partition("=")
        flag = known.get(name)
        if flag is None:
            if name in ("h", "help"):
                raise HelpRequest
            meant = nearest(name, list(known))
            hint = f"; did you mean --{meant}?" if meant else "; see dracpu --help"
            raise ConfigError(f"unknown flag {shown('--' + name)}{hint}")
        if not flag.value:
            values[name] = _boolean(flag, value) if equals else True
        elif equals:
            values[name] = value
        elif left:
            values[name] = left.pop()
        else:
            raise ConfigError(f"flag --{name} needs a value: --{name}={flag.value}")
    return values, left[::-1]


def _boolean(flag: Flag, text: str) -> bool:
    value = _BOOLEANS.get(text)
    if value is None:
        raise ConfigError(f"flag --{flag.name}: {shown(text)} is not a boolean; expected true or false")
    return value


def describe_flags(flags: Sequence[Flag]) -> str:
    """Return the list of flags for a help text, one or two lines each."""
    lines = []
    for flag in flags:
        head = f"  --{flag.name}" + (f"={flag.value}" if flag.value else "")
        if len(head) < _HELP_COLUMN:
            lines.append(f"{head:<{_HELP_COLUMN}}{flag.help}")
        else:
            lines += [head, " " * _HELP_COLUMN + flag.help]
    return "\n".join(lines)
