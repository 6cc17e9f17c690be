# SPDX-License-Identifier: Apache-2.0
"""The server's spelling of quantities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.quantity import parse_quantity
from driver.sandbox.amounts import respelled


@pytest.mark.parametrize(
    ("spelled", "answered"),
    [
        ("4", "4"),
        ("4000m", "4"),
        ("4.0", "4"),
        ("0", "0"),
        ("0Ki", "0"),
        ("1000", "1k"),
        ("12000", "12k"),
        ("1e3", "1e3"),
        ("10e2", "1e3"),
        ("2Ki", "2Ki"),
        ("2048", "2048"),
        ("2048Ki", "2Mi"),
        ("1000Ki", "1000Ki"),
        ("0.5Ki", "512"),
        ("156.250Ki", "160000"),
        ("160000", "160k"),
        ("1.5", "1500m"),
        ("1.5Gi", "1536Mi"),
        ("-500m", "-500m"),
        ("+4", "+4"),
        ("1.500", "1.500"),
        ("+4000m", "4"),
        ("1E", "1E"),
        (4, "4"),
        (0.5, "500m"),
    ],
)
def test_spelling(spelled, answered):
    assert respelled(spelled) == answered


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["", "m", "u", "n", "k", "M", "G", "Ki", "Mi", "Gi", "e3", "E-2", ".5", ".250Ki"]),
)
def test_spelling_keeps_the_value_and_is_final(number, suffix):
    answered = respelled(f"{number}{suffix}")
    assert parse_quantity(answered) == parse_quantity(f"{number}{suffix}")
    if suffix.endswith("i"):
        # What is no multiple of 1,024 loses its suffix, and is decimal from then on.
        answered = respelled(answered)
        assert parse_quantity(answered) == parse_quantity(f"{number}{suffix}")
    assert respelled(answered) == answered


@pytest.mark.parametrize("text", ["", "x", "1 ", "Ki", None, [1]])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match="quantity"):
        respelled(text)
