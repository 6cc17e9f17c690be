# SPDX-License-Identifier: Apache-2.0
"""Takes connections at one address to another: the API server's service address, without kube-proxy.

python forwarder.py ADDRESS PORT TO_ADDRESS TO_PORT
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress


async def forward(address: str, port: int, to_address: str, to_port: int) -> None:
    """Forward all connections for ever."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(to_address, to_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))

    async with await asyncio.start_server(accept, address, port) as server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(forward(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
