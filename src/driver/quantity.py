# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities, exactly.

A quantity is a decimal number with one suffix (``4``, ``4000m``, ``1.5Gi``, ``1e3``). The same value has many spellings
and the API server rewrites some of them, so quantities are compared by value, never as text. What the server tolerates
beyond the grammar (white space around, no digit at all, ``null``) is refused here.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

from fastcpu.cpuset import MAX_CPUS

__all__ = ["cpu_count", "parse_quantity"]

_PLAIN = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<fraction>[0-9]*))?"
    r"(?:[eE](?P<exponent>[+-]?[0-9]+)|(?P<suffix>[numkMGTPE]|[KMGTPE]i))?",
    re.ASCII,
)
_FACTORS: Final[dict[str, Fraction]] = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
_NANO: Final = 10**9
_LARGEST_BINARY: Final = Fraction(2**63 - 1)

# No sensible quantity is longer; the bound keeps the cost of a hostile one small.
_LONGEST: Final = 256
_LARGEST_EXPONENT: Final = 40
_EXPECTED: Final = "expected a number with at most one suffix, such as 4, 500m or 1.5Gi"


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**_LARGEST_EXPONENT else "a huge number"
    return text if len(text) <= 60 else f"{text[:60]}…"


def parse_quantity(value: object) -> Fraction:
    """Return the exact value of a quantity.

    Parameters
    ----------
    value : object
        The quantity as it stands in decoded JSON: a string, or a number.

    Returns
    -------
    Fraction
        The value; finer than 10⁻⁹ it is rounded away from zero, and with a binary suffix it ends at ±(2⁶³ − 1), as the
        API server does both.

    Raises
    ------
    ValueError
        If it is no quantity, longer than 256 characters, or has an exponent beyond ±40.
    """
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_shown(value)} is not a quantity; {_EXPECTED}")
    if isinstance(value, int):
        if abs(value) >= 10**_LARGEST_EXPONENT:
            raise ValueError(f"{_shown(value)} is beyond the range of quantities")
        return Fraction(value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a quantity; {_EXPECTED}")
    return _parse_text(repr(value))  # the shortest decimal that reads back as this float is what was written


def _parse_text(text: str) -> Fraction:
    if len(text) > _LONGEST:
        raise ValueError(f"{_shown(text)} has {len(text)} characters; a quantity has at most {_LONGEST}")
    match = _QUANTITY.fullmatch(text)
    if match is None or not (match["whole"] or match["fraction"]):
        raise ValueError(f"{_shown(text)} is not a quantity; {_EXPECTED}")
    fraction, suffix = match["fraction"] or "", match["suffix"]
    result = Fraction(int(match["whole"] + fraction), 10 ** len(fraction))
    if match["exponent"]:
        exponent = int(match["exponent"])
        if abs(exponent) > _LARGEST_EXPONENT:
            raise ValueError(f"{_shown(text)} has an exponent beyond ±{_LARGEST_EXPONENT}")
        result *= Fraction(10) ** exponent
    elif suffix:
        result *= _FACTORS[suffix]
    result = Fraction(math.ceil(result * _NANO), _NANO)
    if suffix and suffix.endswith("i"):
        result = min(result, _LARGEST_BINARY)
    return -result if match["sign"] == "-" else result


def cpu_count(value: object) -> int:
    """Return the number of CPUs that a quantity says.

    Parameters
    ----------
    value : object
        The quantity as it stands in decoded JSON.

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    ValueError
        If it is no quantity, not whole, not positive, or more than any machine has.
    """
    if isinstance(value, str) and _PLAIN.fullmatch(value) and (count := int(value)) <= MAX_CPUS:
        return count  # as nearly everybody writes it
    quantity = parse_quantity(value)
    if quantity.denominator != 1:
        raise ValueError(f"{_shown(value)} is not a whole number of CPUs; expected 1 or more")
    if quantity <= 0:
        raise ValueError(f"{_shown(value)} is not a positive number of CPUs; expected 1 or more")
    if quantity > MAX_CPUS:
        raise ValueError(f"{_shown(value)} is more CPUs than any machine has; expected at most {MAX_CPUS}")
    return int(quantity)
