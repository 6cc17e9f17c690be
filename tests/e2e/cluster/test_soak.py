# SPDX-License-Identifier: Apache-2.0
"""Pods with claims come and go as fast as the kubelet lets them, while driver and kubelet are killed at random.

`DRACPU_E2E_SOAK_PODS` is how many, 24 by default; `DRACPU_E2E_SOAK_SEED` repeats what is drawn in a run. The driver is
deployed as its users do it and so needs a CPU, like the pods without a claim here; of two CPUs one is left, for which
all claims compete: of those that are allocated one has its CPU, and the others wait in the driver.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from contextlib import suppress

import pytest_asyncio

from e2e.cluster.api import CLAIMS, PODS
from e2e.cluster.deployment import Deployment
from e2e.cluster.observer import Observer
from e2e.cluster.workloads import create_claim, create_pod

PODS_WITH_CLAIMS = int(os.environ.get("DRACPU_E2E_SOAK_PODS", "24"))
SEED = int(os.environ.get("DRACPU_E2E_SOAK_SEED", "0")) or random.randrange(1, 1 << 32)
# As many as there are CPUs: of pods that wait longer, the scheduler prefers the youngest.
AT_A_TIME = 2
KILLED_AFTER = (2, max(4, PODS_WITH_CLAIMS // 25))
AWAY_S = 2.0
CONTAINER_ID = re.compile("^[0-9a-f]{64}$", re.MULTILINE)
MIB = 1 << 20
# A pod leaves at least its claim's record, answer and status behind if anything, which are some 10 kB as objects;
# what an interpreter keeps for later, and libraries cache, is less than this once it has seen some pods.
GROWTH_BYTES = 2 * MIB


@pytest_asyncio.fixture(loop_scope="session")
async def driver(undeployed, driver_image):
    await undeployed.install_chart({"driverConfig": {"allocator": "external", "groupBy": "machine"}})
    yield Deployment(undeployed)
    await undeployed.uninstall_chart()


class Soak:
    """What happens to pods, and to those who look after them.

    Attributes
    ----------
    done : int
        How many pods with claims have come and gone.
    kills : dict of str to int
    failed : list of str
        Why pods failed that are not started again.
    """

    def __init__(self, cluster, driver, observer, rng):
        self._cluster = cluster
        self._driver = driver
        self._observer = observer
        self._rng = rng
        self._names = iter(range(1, PODS_WITH_CLAIMS + 1))
        self._finished = asyncio.Event()
        self.done = 0
        self.kills = {"driver": 0, "kubelet": 0}
        self._next = rng.sample(tuple(self.kills), 2)
        self.failed = []

    async def work(self):
        """Let one pod after the other come and go until there have been enough."""
        lives = (self.run_and_delete, self.complete, self.delete_at_once, self.delete_by_force, self.crash)
        for number in self._names:
            name = f"soak-{number}"
            live = self._rng.choices(lives, (4, 3, 1, 1, 1))[0]
            self._observer.learn(await create_claim(self._cluster, name, self._rng.choice("01")))
            try:
                await live(name)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{await self._cluster.events(name)}") from error
            for path in (PODS, CLAIMS):
                await self._cluster.api.delete(f"{path}/{name}")
            await self._wait_gone(name)
            self.done += 1
            self._finished.set()

    async def run_and_delete(self, name):
        await create_pod(self._cluster, name, name)
        await self._cluster.wait_running(name)
        await asyncio.sleep(self._rng.uniform(0, 1))

    async def complete(self, name):
        command = ("/bin/sleep", f"{self._rng.uniform(0, 0.5):.1f}")
        await create_pod(self._cluster, name, name, command=command, restart="Never")

        async def completed():
            return (await self._cluster.pod(name))["status"]["phase"] in ("Succeeded", "Failed")

        await self._cluster.until(completed, f"pod {name} has completed")
        pod = await self._cluster.pod(name)
        if pod["status"]["phase"] == "Failed":
            self.failed += [
                status["state"]["terminated"].get("message", "")
                for status in pod["status"].get("containerStatuses", [])
            ]

    async def delete_at_once(self, name):
        await create_pod(self._cluster, name, name)
        await asyncio.sleep(self._rng.uniform(0, 1))

    async def delete_by_force(self, name):
        await create_pod(self._cluster, name, name)
        await self._cluster.wait_running(name)
        await self._cluster.api.delete(f"{PODS}/{name}", grace_s=0)

    async def crash(self, name):
        await create_pod(self._cluster, name, name)
        await self._cluster.wait_running(name)
        for each in self._observer.processes():
            if each.claim == name:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
        await asyncio.sleep(self._rng.uniform(0, 3))

    async def _wait_gone(self, name):
        async def gone():
            return not any([await self._cluster.api.get(f"{path}/{name}") for path in (PODS, CLAIMS)])

        await self._cluster.until(gone, f"pod and claim {name} are gone")

    async def come_and_go(self):
        """Let pods without a claim come and go beside them until cancelled."""
        for number in range(1, 1 << 32):
            name = f"shared-{number}"
            await create_pod(self._cluster, name)
            await self._cluster.wait_running(name)
            await asyncio.sleep(self._rng.uniform(0, 2))
            await self._cluster.delete_pods(name)

    async def wait_done(self, count):
        """Wait until so many pods with claims have come and gone."""
        while self.done < count:
            self._finished.clear()
            await self._finished.wait()

    async def kill(self):
        """Kill one of those who look after pods, and wait until it works again."""
        who = self._next.pop() if self._next else self._rng.choice(tuple(self.kills))
        self.kills[who] += 1
        if who == "kubelet":
            await self._cluster.node.kubelet.kill9()
            await asyncio.sleep(self._rng.uniform(0, AWAY_S))
            await self._cluster.node.kubelet.start()
            await self._cluster.node.wait_ready()
            return
        self._observer.disturb()
        self._driver.kill9()
        await self._driver.wait_not_ready()
        await self._driver.wait_ready()
        await self._observer.settle()


async def test_soak(driver, cluster, announce):
    rng = random.Random(SEED)
    started = time.monotonic()
    await create_pod(cluster, "web")
    await cluster.wait_running("web")
    async with Observer.watching(cluster) as observer:
        await observer.settle()
        soak = Soak(cluster, driver, observer, rng)
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = tasks.create_task(soak.come_and_go())
                working = [tasks.create_task(soak.work()) for _ in range(AT_A_TIME)]
                kills_until = PODS_WITH_CLAIMS // 2
                while soak.done < kills_until:
                    await soak.wait_done(min(kills_until, soak.done + rng.randint(*KILLED_AFTER)))
                    await soak.kill()
                # The same process from here on, which has seen some pods before its memory is looked at.
                await soak.wait_done(min(PODS_WITH_CLAIMS, soak.done + min(50, PODS_WITH_CLAIMS // 4)))
                early = driver.resident_bytes()
                await asyncio.wait(working)
                beside.cancel()
        finally:
            announce(
                f"soak with seed {SEED}: {soak.done} pods with claims in {time.monotonic() - started:.0f} s, "
                f"killed {soak.kills}; {observer.samples} looks at {observer.seen} processes of claims; "
                f"{len(soak.failed)} pods failed: {set(soak.failed)}"
            )
        assert soak.done == PODS_WITH_CLAIMS
        await cluster.wait_cpus("web", "0-1")
    late = driver.resident_bytes()
    announce(f"the driver's memory: {early[1] / MIB:.1f} MiB early, {late[1] / MIB:.1f} MiB in the end")
    assert late[0] == early[0]
    assert late[1] - early[1] < GROWTH_BYTES
    assert (await driver.metrics())["allocated_cpus"] == 0
    assert driver.claim_files() == []
    assert len(await cluster.slices()) == 1

    await cluster.clear()
    await cluster.uninstall_chart()

    async def containers_gone():
        return not CONTAINER_ID.findall(await cluster.node.containerd.ctr("containers", "list", "--quiet"))

    async def slices_gone():
        return not await cluster.slices()

    await cluster.until(containers_gone, "no container is left")
    # The kubelet gives a driver half a minute to come back.
    await cluster.until(slices_gone, "no slice is left")
    # A note of an earlier test's container goes when it has been gone for a minute.
    left = {path.name for path in driver.folder.rglob("*") if path.parent.name != "guard-notes"}
    assert left == {"claims", "dra-device-metadata", "guard-notes", "instance.lock", "start-guard"}
    assert list((cluster.node.kubelet_root / "plugins_registry").iterdir()) == []
