# SPDX-License-Identifier: Apache-2.0
"""How messages name things: short, whatever there is to name."""

from __future__ import annotations

import pytest

from driver.names import claim_uid
from driver.wording import count, held_by, names, shown, subject
from fastcpu import CpuSet


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        ("", ""),
        ("3", "3"),
        ("0-4,7", "0-4,7"),
        # Too long as ranges, but short with strides.
        (",".join(map(str, range(0, 100, 2))), "0-98:1/2"),
    ],
)
def test_cpus_are_shown_as_short_as_they_can_be(cpus: str, expected: str) -> None:
    assert shown(CpuSet.parse(cpus)) == expected


def test_many_scattered_cpus_are_shown_by_their_beginning_and_number() -> None:
    cpus = CpuSet(number * number for number in range(60))
    text = shown(cpus)
    assert text.startswith("0-1,4,9,16,25,")
    assert text.endswith(",… (60 CPUs)")
    assert len(text) < 80
    beginning = text.partition(",…")[0]
    assert CpuSet.parse(beginning) <= cpus


def test_one_is_singular_and_more_are_plural() -> None:
    assert [count(0), count(1), count(2)] == ["0 CPUs", "1 CPU", "2 CPUs"]
    assert subject(CpuSet([5])) == "CPU 5 is"
    assert subject(CpuSet([5, 6])) == "CPUs 5-6 are"


def test_few_names_are_all_said_and_many_are_counted() -> None:
    assert names([]) == "none"
    assert names(["a", "b", "c"]) == "a, b, c"
    assert names(["a", "b", "c", "d"]) == "a … d (4 devices)"
    assert names(["a", "b", "c", "d"], "requests") == "a … d (4 requests)"


def test_holders_are_said_from_the_lowest_cpu_on_and_the_rest_together() -> None:
    holders = {claim_uid(f"claim-{cpu}"): CpuSet([cpu]) for cpu in (9, 1, 7, 3, 5)}
    assert list(held_by(holders)) == [
        "CPU 1 is held by claim claim-1",
        "CPU 3 is held by claim claim-3",
        "CPU 5 is held by claim claim-5",
        "CPUs 7,9 are held by 2 more claims",
    ]
    assert list(held_by({})) == []
