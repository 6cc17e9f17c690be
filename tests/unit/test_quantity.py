# SPDX-License-Identifier: Apache-2.0
"""Quantities: every row of the API's table, the rounding rules, and text that is none."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.quantity import cpu_count, parse_quantity

LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("4000m", 4),
        ("4.0", 4),
        ("4.", 4),
        (".5", Fraction(1, 2)),
        ("+4", 4),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1e+3", 1000),
        ("25e-1", Fraction(5, 2)),
        ("1E", 10**18),
        ("1000", 1000),
        ("1k", 1000),
        ("2Ki", 2048),
        ("2048", 2048),
        ("1.5", Fraction(3, 2)),
        ("1.5Gi", 1610612736),
        ("0.5Ki", 512),
        ("1000Ki", 1024000),
        ("-500m", Fraction(-1, 2)),
        ("0", 0),
        ("-0", 0),
        ("007", 7),
        ("1n", Fraction(1, 10**9)),
        ("1u", Fraction(1, 10**6)),
        ("1M", 10**6),
        ("1G", 10**9),
        ("1T", 10**12),
        ("1P", 10**15),
        ("1Mi", 2**20),
        ("1Ti", 2**40),
        ("1Pi", 2**50),
        ("1Ei", 2**60),
    ],
)
def test_a_quantity_has_its_exact_value(text: str, value: Fraction | int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5n", Fraction(1, 10**9)),
        ("-0.5n", Fraction(-1, 10**9)),
        ("1.0000000001", 1 + Fraction(1, 10**9)),
        ("-1.0000000001", -1 - Fraction(1, 10**9)),
        ("1e-30", Fraction(1, 10**9)),
        ("0.0000000000001Ki", Fraction(1, 10**9)),
        ("1e-9", Fraction(1, 10**9)),
    ],
)
def test_what_is_finer_than_nano_is_rounded_away_from_zero(text: str, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8Ei", LARGEST),
        ("-8Ei", -LARGEST),
        ("99999Ei", LARGEST),
        ("7Ei", 7 * 2**60),
        ("1e20", 10**20),
        ("100E", 10**20),
    ],
)
def test_only_binary_suffixes_end_at_the_largest_value(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            " 4",
            "4 ",
            "4\n",
            "\t4",
            "1 k",
            "1_000",
            "1,5",
            "1.5.",
            "1..5",
            "--4",
            "+-4",
            "4+",
            "4-",
            "0x10",
            "٣",
        ),
        *("Ki", "-", "+", ".", "-.", "k", "e3", "E", ".Ki", "4K", "4ki", "4KI", "4mi", "4ni", "4kk", "4Kim", "4i"),
        *(
            "1e",
            "1e+",
            "1e1.5",
            "1e3k",
            "1e3Ki",
            "1E3E",
            "NaN",
            "nan",
            "inf",
            "-inf",
            "Infinity",
            "null",
            "true",
            "4\x00",
        ),
    ],
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize("value", [None, True, False, [], {}, b"4", object(), Fraction(4)])
def test_what_is_neither_text_nor_a_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(value)


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (4, 4),
        (-3, -3),
        (1.5, Fraction(3, 2)),
        (0.1, Fraction(1, 10)),
        (1e3, 1000),
        (1e22, 10**22),
        (1e-7, Fraction(1, 10**7)),
    ],
)
def test_json_numbers_are_quantities(number: float, value: Fraction | int) -> None:
    assert parse_quantity(number) == value


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_numbers_that_are_none_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(number)


@pytest.mark.parametrize("value", ["1e41", "1E-41", "1e999999999999", 1e300, 5e-324])
def test_a_huge_exponent_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"has an exponent beyond ±40"):
        parse_quantity(value)


@pytest.mark.parametrize(
    "value",
    ["9" * 1_000_000, "0." + "0" * 1_000_000 + "1", "1e" + "9" * 1_000_000, 10**5000],
    ids=["digits", "zeros", "exponent", "integer"],
)
def test_a_huge_number_costs_little_and_is_not_repeated_in_the_message(value: object) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match=r"at most 256|beyond the range") as refusal:
        parse_quantity(value)
    assert time.process_time() - started < 0.1
    assert len(str(refusal.value)) < 200


@given(st.text(max_size=40) | st.text(alphabet="0123456789.+-eEnumkMGTPiK", max_size=20))
def test_any_text_is_a_fraction_or_refused(text: str) -> None:
    try:
        assert (parse_quantity(text) * 10**9).denominator == 1
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert "\n" not in refusal


@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 9),
    st.sampled_from(
        [("", 1), ("k", 10**3), ("m", Fraction(1, 1000)), ("Mi", 2**20), ("e2", 100), ("E-2", Fraction(1, 100))]
    ),
)
def test_values_round_trip_through_their_decimal_spelling(
    number: int, places: int, suffix: tuple[str, Fraction]
) -> None:
    digits = str(abs(number)).rjust(places + 1, "0")
    spelled = digits[: len(digits) - places] + "." + digits[len(digits) - places :]
    exact = Fraction(number, 10**places) * suffix[1] * 10**9
    rounded = Fraction(math.floor(exact) if number < 0 else math.ceil(exact), 10**9)
    assert parse_quantity(("-" if number < 0 else "") + spelled + suffix[0]) == rounded


@pytest.mark.parametrize(
    ("value", "count"),
    [("4", 4), ("4000m", 4), (4, 4), (4.0, 4), ("1", 1), ("1k", 1000), ("1Ki", 1024), ("1Mi", 2**20)],
)
def test_a_count_is_whole_and_positive(value: object, count: int) -> None:
    assert cpu_count(value) == count
    assert type(cpu_count(value)) is int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1.5", r"^'1\.5' is not a whole number of CPUs; expected 1 or more$"),
        ("4000000001n", "not a whole number"),
        ("4.0000000001", "not a whole number"),
        ("0", "^'0' is not a positive number of CPUs; expected 1 or more$"),
        ("-4", "not a positive number"),
        (0, "^0 is not a positive number"),
        ("1E", "^'1E' is more CPUs than any machine has; expected at most 1048576$"),
        (2**63, "more CPUs than any machine has"),
        ("four", "^'four' is not a quantity; expected a number with at most one suffix, such as 4, 500m or 1.5Gi$"),
        (True, "^True is not a quantity"),
        (None, "^None is not a quantity"),
    ],
)
def test_what_is_no_count_of_cpus_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu_count(value)
