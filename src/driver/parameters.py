# SPDX-License-Identifier: Apache-2.0
"""The driver's opaque parameters: what a claim or a DeviceClass may ask of it, version ``v1alpha1``.

Keys are read as Go's JSON reads them, because claims are written for a driver in Go: a key matches without regard
to case, of several matching keys the later one wins, objects under matching keys are merged, and ``null`` says
nothing. Unknown keys are ignored, except in ``placement``. One thing is lost before the parameters arrive here: of a
key repeated in the same spelling Python's reader keeps the last value in the place of the first.

The JSON Schema of the same rules is ``schemas/cpu-config-v1alpha1.schema.json``. Nothing here expands a cpuset: the
text is only bounded; `fastcpu` reads it where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from driver.errors import ClaimError
from driver.json_values import expect, quoted
from driver.names import PARAMETERS_VERSION

__all__ = ["LARGEST_PARAMETERS", "PLACEMENT_CHOICES", "Parameters", "json_size_exceeds", "parse_parameters"]

LARGEST_PARAMETERS: Final = 10_240
"""Bytes of JSON that the API server lets one object of opaque parameters have."""

PLACEMENT_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "spread": ("none", "cores"),
    "fullCores": ("prefer", "require"),
    "numa": ("pack", "distribute"),
    "coreType": ("any", "p-core", "e-core"),
}
"""Keys of ``placement`` and the values of each."""

_Members = list[tuple[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What one object of opaque parameters says.

    Attributes
    ----------
    cpuset : str or None
        CPUs in the kernel's list syntax, not yet read; neither empty nor with white space in it.
    placement : mapping of str to str, or None
        Choices for an allocator that may choose, keys in their proper spelling; only those that were made.
    """

    cpuset: str | None = None
    placement: Mapping[str, str] | None = None


def parse_parameters(raw: object) -> Parameters:
    """Read opaque parameters.

    Parameters
    ----------
    raw : object
        The decoded JSON of ``opaque.parameters``; None where there is none.

    Returns
    -------
    `Parameters`

    Raises
    ------
    ClaimError
        If they are missing, larger than the API allows, of another version, or not of the version's form.
    """
    if raw is None:
        raise ClaimError("the opaque parameters are missing; expected an object with apiVersion and cpuConfig")
    if json_size_exceeds(raw, LARGEST_PARAMETERS):
        raise ClaimError(f"the opaque parameters are larger than {LARGEST_PARAMETERS} bytes, the API's own limit")
    parameters = list(expect(raw, dict, "opaque parameters").items())
    version = _text(parameters, "apiVersion", "apiVersion of the opaque parameters")
    if version is None:
        raise ClaimError(f'the opaque parameters have no apiVersion; expected "{PARAMETERS_VERSION}"')
    if version != PARAMETERS_VERSION:
        raise ClaimError(
            f'apiVersion {quoted(version)} of the opaque parameters is not supported; expected "{PARAMETERS_VERSION}"'
        )
    cpu_config = _members(parameters, "cpuConfig", "cpuConfig") or []
    placement = _members(cpu_config, "placement", "cpuConfig.placement")
    return Parameters(
        cpuset=_cpuset(_text(cpu_config, "cpuset", "cpuConfig.cpuset")),
        placement=None if placement is None else _choices(placement),
    )


def _cpuset(text: str | None) -> str | None:
    if text == "":
        raise ClaimError('cpuConfig.cpuset is empty; expected CPUs such as "2-5"')
    if text is not None and text.split(None, 1) != [text]:
        raise ClaimError(f'cpuConfig.cpuset {quoted(text)} has white space in it; expected CPUs such as "2-5,8"')
    return text


def _choices(placement: _Members) -> dict[str, str]:
    known = {_fold(key): key for key in PLACEMENT_CHOICES}
    choices: dict[str, str] = {}
    for given, value in placement:
        key = known.get(_fold(given))
        if key is None:
            raise ClaimError(
                f"cpuConfig.placement has no key {quoted(given)}; expected one of {', '.join(PLACEMENT_CHOICES)}"
            )
        if value is None:
            continue
        choice = expect(value, str, f"cpuConfig.placement.{key}")
        if choice not in PLACEMENT_CHOICES[key]:
            raise ClaimError(
                f"cpuConfig.placement.{key} {quoted(choice)} is unknown; expected {' or '.join(PLACEMENT_CHOICES[key])}"
            )
        choices[key] = choice
    return choices


def _values(members: _Members, key: str) -> Iterator[object]:
    """Yield in their order the values of what Go takes for a key."""
    folded = _fold(key)
    return (value for given, value in members if value is not None and (given == key or _fold(given) == folded))


def _text(members: _Members, key: str, place: str) -> str | None:
    text = None
    for value in _values(members, key):
        text = expect(value, str, place)
    return text


def _members(members: _Members, key: str, place: str) -> _Members | None:
    """Return the members of all objects under a key, one after the other, which is how Go merges them."""
    objects = [expect(value, dict, place) for value in _values(members, key)]
    return [member for found in objects for member in found.items()] if objects else None


def _fold(key: str) -> str:
    """Fold the case of a key one character at a time, as Go does: ``ſ`` is an ``s``, but ``ß`` is not ``ss``."""
    if key.isascii():
        return key.lower()
    folded = ((character, character.casefold()) for character in key)
    return "".join(fold if len(fold) == 1 else character for character, fold in folded)


def json_size_exceeds(raw: object, limit: int) -> bool:
    """Say whether a value needs more than some bytes of JSON, however it is written.

    The cost is bounded by the limit, not by the value, and no depth of nesting matters.
    """
    size = 1
    pending: list[Iterable[object]] = [(raw,)]
    while pending:
        for value in pending.pop():
            # One byte of each value is counted with what it is in.
            if type(value) is str:
                size += 1 + _utf8_size(value, limit)
            elif type(value) is list:
                size += 2 * len(value)
                if size <= limit:
                    pending.append(value)
            elif type(value) is dict:
                size += 5 * len(value)
                if size <= limit:
                    size += sum(_utf8_size(key, limit) for key in value)
                    pending.append(value.values())
            if size > limit:
                return True
    return False


def _utf8_size(text: str, limit: int) -> int:
    if len(text) > limit or text.isascii():
        return len(text)
    return len(text.encode("utf-8", "surrogatepass"))
