# SPDX-License-Identifier: Apache-2.0
"""How values are read is tested key by key in test_settings.py; here is what they are called."""

from __future__ import annotations

import pytest

from driver.errors import ConfigError
from driver.given import Entry, Given, Other, Value, alternatives, describe_value


@pytest.mark.parametrize(
    ("value", "description"),
    [
        (None, "nothing"),
        (True, "the boolean true"),
        (False, "the boolean false"),
        ("a\nb", r"'a\nb'"),
        (Other("number", "010"), "the number 010"),
        (Other("date", "2001-01-01"), "the date 2001-01-01"),
        (Other("list"), "a list"),
        ((), "a mapping"),
        ((Entry("a", "b", 1),), "a mapping"),
    ],
)
def test_a_value_is_described_by_what_it_is(value: Value, description: str) -> None:
    assert describe_value(value) == description


@pytest.mark.parametrize(("choices", "text"), [(("a",), "a"), (("a", "b"), "a or b"), (("a", "b", "c"), "a, b or c")])
def test_alternatives_read_as_a_sentence(choices: tuple[str, ...], text: str) -> None:
    assert alternatives(choices) == text


def test_a_refusal_names_place_value_and_what_would_be_right() -> None:
    with pytest.raises(ConfigError) as caught:
        Given("x" * 200, "flag --a").refuse("something short")
    message = str(caught.value)
    assert message.startswith("flag --a: 'xxx")
    assert message.endswith("… (202 characters) is not accepted; expected something short")
