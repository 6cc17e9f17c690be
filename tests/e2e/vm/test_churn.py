# SPDX-License-Identifier: Apache-2.0
"""Many claims come and go at once, while a watch in the guest asks its kernel who may run where.

`DRACPU_VM_CHURN_SECONDS` is how long, 60 by default; `DRACPU_VM_CHURN_SEED` repeats the choices of a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal

from e2e.cluster.manifests import request
from e2e.vm.checks import MANAGED, settings
from e2e.vm.node import ISOLATED, PATIENCE_S

SECONDS = float(os.environ.get("DRACPU_VM_CHURN_SECONDS", "60"))
SEED = int(os.environ.get("DRACPU_VM_CHURN_SEED", "0")) or random.randrange(1, 1 << 32)
# Together they never ask for more than there is, whatever they ask for: nobody has to wait for others.
CLIENTS = 3
SIZES = (1, 1, 1, 2)


async def client(node, rng, over, counts):
    while not over.is_set():
        claims = [await node.claim(request(rng.choice(SIZES))) for _ in range(rng.randint(0, 2))]
        pod = await node.run(*([claim] for claim in claims), [])
        await node.running(pod)
        await asyncio.sleep(rng.uniform(0, 2))
        await node.end([pod], claims)
        counts["pods"] += 1
        counts["claims"] += len(claims)


async def settle(node):
    """Wait until nobody is on CPUs of others, and have that watched from then on."""
    async with asyncio.timeout(PATIENCE_S):
        while await node.vm.call("strangers"):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    await node.vm.call("watch_settled", settled=True)


async def test_churn(node, capsys):
    configuration = settings("cpumanager", "socket")
    await node.use_driver(**configuration)
    sharing = await node.run([])
    ids = await node.running(sharing)
    counts = {"pods": 0, "claims": 0}
    over = asyncio.Event()
    await node.vm.call("watch_start")
    await settle(node)
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(client(node, random.Random(SEED + number), over, counts))
            await asyncio.sleep(SECONDS / 2)
            await node.vm.call("watch_settled", settled=False)
            await node.stop_driver(signal.SIGKILL)
            await node.start_driver(**configuration)
            await settle(node)
            await asyncio.sleep(SECONDS / 2)
            over.set()
    finally:
        watched = await node.vm.call("watch_stop")
        with capsys.disabled():
            print(f"\nchurn with seed {SEED}: {counts}, {watched['looks']} looks at {watched['processes']} processes")
    assert watched["wrong"] == []
    assert min(counts.values()) > 0
    await node.until_seen(*ids[sharing], cpus=MANAGED - ISOLATED)
    assert (await node.metrics())["allocated_cpus"] == 0
    assert (await node.metrics())["nri_unmovable_containers"] == 0
