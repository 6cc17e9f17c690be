# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that other processes start, which no two of them get."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Keep a port of the loopback address for whoever listens on it with ``SO_REUSEADDR``, as servers do.

    As long as it is kept, the system gives it to nobody who asks for any port.

    Yields
    ------
    int
        The port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
