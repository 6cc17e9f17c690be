# SPDX-License-Identifier: Apache-2.0
"""How the API server writes quantities back: by value the same, but not always spelled as they came."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from driver.quantity import parse_quantity

_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL: Final = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_EXPONENT: Final = re.compile(r"[eE][+-]?[0-9]+\Z", re.ASCII)
_PLAIN: Final = re.compile(r"[+-]?0*([0-9]*)\.?([0-9]*)([numkMGTPE]?|[eE][+-]?[0-9]+)", re.ASCII)
_DECIMAL_BELOW: Final = 1024


def respelled(value: object) -> str:
    """Return the quantity as the API server would answer it.

    Parameters
    ----------
    value : object
        A quantity as it stands in JSON.

    Raises
    ------
    ValueError
        If it is none.
    """
    amount = parse_quantity(value)
    text = str(value)
    if _is_kept(text):
        return text
    if text.endswith("i") and abs(amount) >= _DECIMAL_BELOW and amount.denominator == 1:
        return _binary(int(amount))
    exponent = _decimal_exponent(amount)
    mantissa = amount / Fraction(10) ** exponent
    if _EXPONENT.search(text):
        return f"{mantissa}e{exponent}" if exponent else str(mantissa)
    if exponent > max(_DECIMAL):
        mantissa, exponent = amount / Fraction(10) ** 18, 18
    return f"{mantissa}{_DECIMAL[exponent]}"


def _is_kept(text: str) -> bool:
    """Whether the server takes a decimal text for canonical, which it looks at only in passing: ``+4`` stays so."""
    match = _PLAIN.fullmatch(text)
    if match is None:
        return False
    digits, fraction, suffix = match.groups()
    powers = {letter: power for power, letter in _DECIMAL.items()}
    exponent = int(suffix[1:]) if suffix[1:] else powers[suffix]
    digits += fraction
    return (exponent - len(fraction)) % 3 == 0 and digits[:1] not in ("", "0") and not digits.endswith("000")


def _binary(amount: int) -> str:
    power = 0
    while amount and amount % 1024 == 0 and power < len(_BINARY) - 1:
        amount //= 1024
        power += 1
    return f"{amount}{_BINARY[power]}"


def _decimal_exponent(amount: Fraction) -> int:
    """Return the largest multiple of three by which the amount is a whole number times a power of ten."""
    if not amount:
        return 0
    exponent = 0
    while (amount / Fraction(10) ** exponent).denominator != 1:
        exponent -= 3
    while (amount / Fraction(10) ** (exponent + 3)).denominator == 1:
        exponent += 3
    return exponent
