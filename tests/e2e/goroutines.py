# SPDX-License-Identifier: Apache-2.0
"""What the goroutines of a Go program wait for: how a deadlock shows."""

from __future__ import annotations

import re
from collections import Counter

_HEAD = re.compile(r"goroutine \d+ (?:gp=.* )?\[(?P<state>[^\]]*)\]:")
_LOCK = re.compile(r"sync\.(?:RW)?Mutex\.|semacquire")
# A line of a stack is a function with its arguments; the next one says in which file it is.
_FUNCTION = re.compile(r"^(?P<name>\S+)\(.*\)$", re.MULTILINE)
_OF_GO = ("sync.", "internal/", "runtime.")
_MOST_FUNCTIONS = 6


def waiting_for_locks(dump: str, package: str) -> Counter[str]:
    """Return what waits for a lock, and how many goroutines do that: functions from the innermost one.

    Parameters
    ----------
    dump : str
        All goroutines, as Go's runtime writes them.
    package : str
        Only those with this in the name of one of their functions.
    """
    found = Counter[str]()
    for goroutine in dump.split("\n\n"):
        head = _HEAD.match(goroutine)
        if head is None or not _LOCK.match(head["state"]):
            continue
        functions = [name for name in _FUNCTION.findall(goroutine) if not name.startswith(_OF_GO)]
        if any(package in name for name in functions):
            found[" < ".join(name.rpartition("/")[2] for name in functions[:_MOST_FUNCTIONS])] += 1
    return found
