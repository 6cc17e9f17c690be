# SPDX-License-Identifier: Apache-2.0
"""Does in the guest what the tests outside ask for, over one connection that it opens itself once the guest is up.

Each line of the connection is a JSON object: a request ``{"id", "call", "arguments"}`` names a function of `observe`,
`processes` or `watch`; its answer is ``{"id", "result"}`` or ``{"id", "error"}``. Requests are worked on side by side.
The end of the connection is the end of the guest.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import observe
import processes
import watch

_FUNCTIONS = {**vars(observe), **vars(processes), **vars(watch)}


def main(address: str) -> None:
    """Serve the tests that listen at ``host:port``."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        # An answer must not wait for the next one.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sending = threading.Lock()
        for line in connection.makefile("rb"):
            threading.Thread(target=_answer, args=(json.loads(line), connection, sending), daemon=True).start()


def _answer(request: dict, connection: socket.socket, sending: threading.Lock) -> None:
    answer = {"id": request["id"]}
    try:
        answer["result"] = _FUNCTIONS[request["call"]](**request["arguments"])
    except Exception:  # whatever it is, the test outside must hear of it
        answer["error"] = traceback.format_exc()
    with sending:
        connection.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
