# SPDX-License-Identifier: Apache-2.0
"""Which failures of the API server are worth another try, and how soon."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.errors import ApiError

# Credentials and rights are replaced while drivers run: 401 and 403 pass too, mostly right after an installation.
_MAY_PASS: Final = frozenset({0, 401, 403, 408, 429})


def may_pass(error: ApiError) -> bool:
    """Tell whether the same call may succeed a little later.

    Parameters
    ----------
    error : ApiError
        Why it failed.

    Returns
    -------
    bool
        False if the server understood the call and its answer will be the same.
    """
    return error.status in _MAY_PASS or error.status >= 500


def delays(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield for ever how long to wait before each further attempt, in seconds.

    Each is twice the one before until the longest is reached, less up to a quarter by chance, so that many nodes do not
    come back in step.

    Parameters
    ----------
    first_s, longest_s : float
        The first and the longest of them, in seconds.
    """
    delay = first_s
    while True:
        yield delay * random.uniform(0.75, 1.0)
        delay = min(2 * delay, longest_s)
