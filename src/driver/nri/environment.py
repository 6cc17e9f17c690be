# SPDX-License-Identifier: Apache-2.0
"""The entries of a container's environment that speak of claims, found in the message's bytes.

A container may have some hundred thousand variables, of which at most a few are of claims: to make a text of each takes
ten times as long as all else that is done with the message. The bytes are searched instead, and at each mention of such
a variable it is looked whether an entry begins there: whether the tag of the field and a length come before it.

Where there are few variables and many mentions, as of one that has a document about this driver in a variable, each
variable is looked at after all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from driver.errors import ClaimError
from driver.names import CPUSET_VARIABLE_PREFIX
from driver.nri.evidence import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PREFIX: Final = CPUSET_VARIABLE_PREFIX.encode()
# Field 8 of `nri.Container`, of a kind that has a length.
_TAG: Final = 8 << 3 | 2
# A length takes seven bits of each byte, and no message has more than 4 MiB.
_MOST_LENGTH_BYTES: Final = 4
# A mention costs as much as some hundred bytes do otherwise.
_MENTIONS: Final = 16
_BYTES_PER_MENTION: Final = 256
_MOST_MENTIONS: Final = 512
_FEW_VARIABLES: Final = 512


def claim_entries(message: bytes, environment: Sequence[str], longest: int) -> Iterator[Entry]:
    """Yield the entries of a container's environment that begin with ``DRA_CPUSET_``.

    Whoever writes bytes into a text that look like the beginning of an entry is taken by his word.

    Parameters
    ----------
    message : bytes
        A container, as protobuf writes it.
    environment : sequence of str
        Its environment.
    longest : int
        How many characters of an entry are wanted.

    Raises
    ------
    ClaimError
        If such variables are mentioned more often than any container has reason to.
    """
    most = min(_MENTIONS + len(message) // _BYTES_PER_MENTION, _MOST_MENTIONS)
    places = _mentions(message, most)
    if len(places) < most:
        for at in places:
            if length := _length_before(message, at):
                text = message[at : at + min(length, longest)].decode(errors="replace")
                yield Entry(text, len(text) if length <= longest else length)
    elif len(environment) <= _FEW_VARIABLES:
        for entry in environment:
            if entry.startswith(CPUSET_VARIABLE_PREFIX):
                yield Entry(entry[:longest], len(entry))
    else:
        raise ClaimError(f"it speaks of {CPUSET_VARIABLE_PREFIX} variables too often; expected none, or a few")


def _mentions(message: bytes, most: int) -> list[int]:
    """Return where such variables are mentioned, no more often than is wanted."""
    places: list[int] = []
    at = message.find(_PREFIX)
    while at >= 0 and len(places) < most:
        places.append(at)
        at = message.find(_PREFIX, at + len(_PREFIX))
    return places


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
