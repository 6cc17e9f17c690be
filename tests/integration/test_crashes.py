# SPDX-License-Identifier: Apache-2.0
"""Kill the real driver before each single change of a file that prepare or unprepare makes, and at random times.

After each kill the next driver must hold exactly what its files say, keep every CPU that was given out, lose none, and
answer the kubelet's retry of the same call.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from pathlib import Path

import pytest

from driver.sandbox.plugins import KubeletError
from fastcpu import CpuSet

SETTINGS = {"groupBy": "numanode", "reservedCPUs": "0,32"}


class KillSwitch:
    """What makes a driver process kill itself before its n-th change of a file; see `killswitch/sitecustomize.py`."""

    def __init__(self, node):
        self._orders = node.box.folder / "killswitch-orders"
        self._trace = node.box.folder / "killswitch-trace"
        self._rounds = itertools.count(1)
        self._folder = node.box.folder
        inherited = os.environ.get("PYTHONPATH", "")
        self.environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent / "killswitch"), inherited))),
            "KILLSWITCH_FOLDERS": os.pathsep.join((str(node.plugin_dir), str(node.cdi_dir))),
            "KILLSWITCH_ORDERS": str(self._orders),
            "KILLSWITCH_TRACE": str(self._trace),
        }

    def arm(self, changes):
        """Let so many changes happen from now on, and none after them."""
        self._trace.write_text("")
        orders = self._orders.with_suffix(".new")
        orders.write_text(f"round-{next(self._rounds)} {changes}")
        orders.rename(self._orders)

    def disarm(self):
        """Let everything happen again; return the changes since `arm`, without the random part of temporary names."""
        self._orders.unlink()
        lines = [line.split(" ", 1) for line in self._trace.read_text().splitlines()]
        return [(operation, self._name(Path(path))) for operation, path in lines]

    def _name(self, path):
        is_temporary = path.suffix == ".tmp"
        return str((path.with_suffix("").with_suffix("") if is_temporary else path).relative_to(self._folder))


async def each_kill(node, switch, set_up, work, check):
    """Kill the driver before each change that some work makes, start it again and check; return all the changes."""
    for changes in range(100):
        await set_up()
        switch.arm(changes)
        try:
            await work()
        except KubeletError:
            killed = True
        else:
            killed = False
        trace = switch.disarm()
        if not killed:
            assert len(trace) == changes > 5
            return trace
        assert await node.process.wait() == -signal.SIGKILL
        # Also before anybody has put anything right.
        assert node.specified().items() <= node.recorded().items()
        await node.start(SETTINGS, environment=switch.environment)
        await check()
    raise AssertionError("the work never ends")


async def test_a_kill_before_each_change_of_prepare_and_of_unprepare(node):
    switch = KillSwitch(node)
    await node.start(SETTINGS, environment=switch.environment)
    bystander, claim = node.add("6"), node.add("2-5")
    assert await node.errors(bystander) == [""]
    without_claim = node.files()
    first = await node.prepare(claim)
    with_claim = node.files()
    seen = set()

    async def check():
        held = await node.agreed()
        assert held in ({bystander.uid: "6"}, {bystander.uid: "6", claim.uid: "2-5"})
        seen.add(claim.uid in held)
        if claim.uid in held:
            [error] = await node.errors(node.add("4-7", cpus="63"))
            assert f"CPUs 4-5 are held by claim {claim.uid}; CPU 6 is held by claim {bystander.uid}" in error
        else:
            rival = node.add("2-5")
            assert await node.errors(rival) == [""]
            assert await node.unprepare(rival) == [""]

    async def check_prepare():
        await check()
        assert await node.prepare(claim) == first
        assert node.files() == with_claim
        assert await node.agreed() == {bystander.uid: "6", claim.uid: "2-5"}

    async def unprepared():
        assert await node.unprepare(claim) == [""]
        assert node.files() == without_claim

    trace = await each_kill(node, switch, unprepared, lambda: node.prepare(claim), check_prepare)
    assert seen == {False, True}
    record = f"kubelet/plugins/dra.cpu/claims/{claim.uid}.json"
    spec = f"cdi/dra.k8s.io-cpu_claim-{claim.uid}.json"
    steps = [("rename", f".{record.rpartition('/')[2]}"), ("fsync", "claims"), ("rename", f".{spec[4:]}")]
    places = [
        next(place for place, (operation, name) in enumerate(trace) if (operation, name.rpartition("/")[2]) == step)
        for step in steps
    ]
    assert places == sorted(places), "the record must be there and durable before the spec"

    async def check_unprepare():
        await check()
        await unprepared()
        assert await node.agreed() == {bystander.uid: "6"}

    async def prepared():
        assert await node.prepare(claim) == first

    seen.clear()
    trace = await each_kill(node, switch, prepared, lambda: node.unprepare(claim), check_unprepare)
    assert seen == {False, True}
    assert trace.index(("remove", spec)) < trace.index(("fsync", "cdi")) < trace.index(("remove", record))
    assert node.files() == without_claim


# Random times.

CONNECTIONS = 6
GROUPS = {f"cpudevnuma00{number}": range(8 * number, 8 * number + 8) for number in range(4)}


class Users:
    """Pods that come and go: each has a claim prepared, uses its CPUs for a while, and lets it be unprepared.

    The kubelet's calls are repeated until they are answered. From the first answer until unprepare is asked for a claim
    certainly holds its CPUs, whatever happens to the driver meanwhile.
    """

    def __init__(self, node, chance):
        self._node = node
        self._chance = chance
        self.certain = {}
        self.prepared = 0
        self.conflicts = 0
        self.leaving = False

    async def run(self):
        connection = await self._node.connect()
        while not self.leaving:
            await self._use(connection)

    async def _use(self, connection):
        device, cpus = self._chance.choice(list(GROUPS.items()))
        begin = self._chance.randrange(1, 6)
        cpuset = CpuSet(cpus[begin : begin + self._chance.randint(1, 3)])
        claim = self._node.add(str(cpuset), device=device)
        reference = (claim.namespace, claim.uid, claim.name)
        answer = await self._answered(connection.prepare, reference)
        if answer.error:
            assert "held by claim" in answer.error
            self.conflicts += 1
            return
        for uid, others in self.certain.items():
            assert cpuset.isdisjoint(others), f"CPUs {cpuset & others} were given to {claim.uid}, but {uid} has them"
        self.certain[claim.uid] = cpuset
        self.prepared += 1
        await asyncio.sleep(self._chance.uniform(0, 0.2))
        if self._chance.random() < 0.3:
            assert await self._answered(connection.prepare, reference) == answer
        del self.certain[claim.uid]
        assert await self._answered(connection.unprepare, reference) == ""

    async def _answered(self, call, reference):
        while True:
            try:
                return (await call([reference]))[reference[1]]
            except KubeletError:
                await asyncio.sleep(0.01)  # the driver was killed


@pytest.mark.parametrize("seed", [1])
async def test_kills_at_random_times_under_load(node, seed):
    chance = random.Random(seed)
    await node.start(SETTINGS)
    users = Users(node, chance)
    tasks = [asyncio.create_task(users.run()) for _ in range(CONNECTIONS)]
    for kill in range(4):
        enough = users.prepared + chance.randint(3, 12)
        await node.until(lambda enough=enough: users.prepared >= enough)
        await asyncio.sleep(chance.uniform(0, 0.05))
        await node.process.kill9()
        on_disk = {uid: CpuSet.parse(cpus) for uid, cpus in node.recorded().items()}
        assert users.certain.items() <= on_disk.items()
        assert len(CpuSet().union(*on_disk.values())) == sum(map(len, on_disk.values()))
        assert node.specified().items() <= node.recorded().items()
        if kill == 1:
            # Once more while it starts.
            await node.start(SETTINGS, wait=False)
            await asyncio.sleep(chance.uniform(0.3, 1.5))
            await node.process.kill9()
        await node.start(SETTINGS)
        for task in tasks:
            if task.done():
                task.result()
    users.leaving = True
    await asyncio.gather(*tasks)
    assert node.files() == []
    assert await node.agreed() == {}
