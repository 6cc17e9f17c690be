# SPDX-License-Identifier: Apache-2.0
"""Addresses on the loopback interface that nobody uses."""

from __future__ import annotations

import random
import socket

# Below the ports that Linux gives to outgoing connections, which could take one while its server is down.
_FIRST, _LAST = 16_384, 32_000


def free_ports(count: int) -> list[int]:
    """Return different ports of 127.0.0.1 on which nothing listens."""
    candidates = random.sample(range(_FIRST, _LAST), _LAST - _FIRST)
    found: list[int] = []
    while len(found) < count:
        port = candidates.pop()
        if is_free("127.0.0.1", port):
            found.append(port)
    return found


def is_free(address: str, port: int) -> bool:
    """Tell whether nothing listens on a port of an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
