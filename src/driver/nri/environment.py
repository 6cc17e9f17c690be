# SPDX-License-Identifier: Apache-2.0
"""The entries of a container's environment that speak of claims, found in the message's bytes.

A container may have some hundred thousand variables, of which at most a few are of claims: to make a text of each takes
ten times as long as all else that is done with the message. The bytes are searched instead, and at each mention of such
a variable it is looked whether an entry begins there: whether the tag of the field and a length come before it.
"""

from __future__ import annotations

from typing import Final

from driver.names import CPUSET_VARIABLE_PREFIX
from driver.nri.evidence import MOST_VARIABLES, Entry

_PREFIX: Final = CPUSET_VARIABLE_PREFIX.encode()
# Field 8 of `nri.Container`, of a kind that has a length.
_TAG: Final = 8 << 3 | 2
# A length takes seven bits of each byte, and no message has more than 4 MiB.
_MOST_LENGTH_BYTES: Final = 4


def claim_entries(message: bytes, longest: int) -> tuple[list[Entry], bool]:
    """Find the entries of a container's environment that begin with ``DRA_CPUSET_``.

    Whoever writes bytes into a text that look like the beginning of an entry is taken by his word.

    Parameters
    ----------
    message : bytes
        A container, as protobuf writes it.
    longest : int
        How many bytes of an entry are wanted.

    Returns
    -------
    list of Entry
        What was found.
    bool
        Whether that is all; false if such variables are mentioned more often than any container has reason to.
    """
    entries: list[Entry] = []
    at = message.find(_PREFIX)
    for _ in range(MOST_VARIABLES):
        if at < 0:
            return entries, True
        if length := _length_before(message, at):
            text = message[at : at + min(length, longest)].decode(errors="replace")
            entries.append(Entry(text, len(text) if length <= longest else length))
        at = message.find(_PREFIX, at + len(_PREFIX))
    return entries, at < 0


def _length_before(message: bytes, at: int) -> int:
    """Return how long the entry is that begins somewhere in a message; 0 if none does."""
    length = 0
    for n_bytes in range(1, min(_MOST_LENGTH_BYTES, at - 1) + 1):
        byte = message[at - n_bytes]
        # The last byte comes first here, and is the only one without the highest bit.
        if (byte < 0x80) != (n_bytes == 1):
            return 0
        length = length << 7 | byte & 0x7F
        if message[at - n_bytes - 1] == _TAG and len(_PREFIX) <= length <= len(message) - at:
            return length
    return 0
