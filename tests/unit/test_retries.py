# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import islice

import pytest

from driver.errors import ApiError
from driver.retries import delays, may_pass


@pytest.mark.parametrize("status", [0, 401, 403, 408, 429, 500, 502, 503, 504])
def test_what_the_server_may_answer_otherwise_next_time(status):
    assert may_pass(ApiError(status, ""))


@pytest.mark.parametrize("status", [400, 404, 405, 409, 410, 422])
def test_what_the_server_will_answer_again(status):
    assert not may_pass(ApiError(status, ""))


def test_delays_double_up_to_the_longest_less_some_chance():
    for delay, most in zip(islice(delays(0.1, 2.0), 8), [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0], strict=True):
        assert 0.75 * most <= delay <= most
    assert len(set(islice(delays(1.0, 1.0), 20))) > 1
