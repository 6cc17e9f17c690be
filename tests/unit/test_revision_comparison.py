# SPDX-License-Identifier: Apache-2.0
"""What `make bench-compare` makes of the times of two revisions."""

from __future__ import annotations

from random import Random

import pytest

from compare import compare


def noisy(random: Random, seconds: float, turns: int = 12) -> list[float]:
    """Return times that are often right and sometimes far too long, as on a shared machine."""
    return [seconds * random.uniform(0.99, 1.01) * ((random.random() < 0.15 and 3) or 1) for _ in range(turns)]


def test_equal_times_are_equal_for_sure():
    found = compare([1.0] * 5, [1.0] * 5)
    assert (found.ratio, found.low, found.high, found.verdict) == (1.0, 1.0, 1.0, "")


def test_noise_is_no_difference():
    random = Random(7)
    verdicts = [compare(noisy(random, 1.0), noisy(random, 1.0)).verdict for _ in range(50)]
    assert verdicts.count("") >= 40
    assert "CLEARLY SLOWER" not in verdicts


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (0.9, "faster")])
def test_a_tenth_is_mostly_seen_through_the_noise(factor, verdict):
    random = Random(7)
    found = [compare(noisy(random, 1.0), noisy(random, factor)) for _ in range(20)]
    assert all(one.low <= factor * 1.02 and one.high >= factor * 0.98 for one in found)
    assert sum(one.verdict == verdict for one in found) >= 15
    assert all(one.verdict in (verdict, "") for one in found)


def test_only_what_is_slower_in_every_turn_is_clearly_so():
    base = [1.0, 1.1, 0.9]
    assert compare(base, [1.4, 1.5, 1.6]).verdict == "CLEARLY SLOWER"
    assert not compare(base, [1.4, 1.5, 1.3]).clearly_slower


def test_the_same_times_give_the_same_result():
    random = Random(7)
    base, this = noisy(random, 1.0), noisy(random, 1.0)
    assert compare(base, this) == compare(base, this)
