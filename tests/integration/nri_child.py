# SPDX-License-Identifier: Apache-2.0
"""A process with nothing but a connection to the runtime, so that its memory is that of the connection."""

from __future__ import annotations

import asyncio
import sys

from driver.health import Health
from driver.nri.connection import NriConnection, Timing


class Plugin:
    def connected(self, *_):
        pass

    def disconnected(self, reason):
        pass

    async def synchronize(self, pods, containers):
        return []

    def synchronized(self):
        pass

    async def create_container(self, pod, container):
        await asyncio.get_running_loop().create_future()


class Metrics:
    def set_nri_connected(self, connected):
        pass

    def count_nri_reconnect(self):
        pass


timing = Timing(first_retry_s=0.01, longest_retry_s=0.01)
asyncio.run(NriConnection(sys.argv[1], Plugin(), health=Health(), metrics=Metrics(), timing=timing).run())
