# SPDX-License-Identifier: Apache-2.0
"""Everything at once, at random, while the kernel is asked after each step who may run where.

`DRACPU_E2E_CHURN_SECONDS` is how long, 60 by default; `DRACPU_E2E_CHURN_SEED` repeats the order of a run, and
`DRACPU_E2E_CONTAINERDS` names the runtimes: see `make churn`.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.plugins import KubeletError
from e2e import kernel, programs
from e2e.cri import CriError, CriHangsError
from e2e.goroutines import waiting_for_locks
from e2e.node import MANAGED, Node
from fastcpu import CpuSet

SECONDS = float(os.environ.get("DRACPU_E2E_CHURN_SECONDS", "60"))
SEED = int(os.environ.get("DRACPU_E2E_CHURN_SEED", "0")) or random.randrange(1, 1 << 32)
CLIENTS = 4
KILLS = max(2, round(SECONDS / 30))
AWAY_S = (1.0, 3.0)
# A start that begins before the driver is back and whose end it does not hear of counts as over after five seconds.
SETTLED_AFTER_S = 15.0
GROWN_AFTER_S = 5.0
# A runtime drops a plugin that answers later than this.
WORST_CREATE_S = 2.0
# How long the kubelet may have to create a container again and again until others are off the claim's CPUs.
CREATED_AFTER_S = 30.0
NOT_YET = "could not be moved away"


@pytest.fixture(params=programs.CHOSEN)
def version(request):
    """The line of containerd."""
    return request.param


@pytest.fixture
async def node(clean_machine, version):
    async with Node.open(programs.build(programs.CONTAINERDS[version])) as node:
        yield node


class Observer:
    """Knows what must hold, and compares it with what the kernel says.

    Parameters
    ----------
    cgroup_parent : str
        The parent of all pods' cgroups.
    from_prepare : bool
        Whether all others are off a claim's CPUs from the answer to its prepare on. Where the driver must not push,
        they are from the creation of the claim's first container on.

    Attributes
    ----------
    settled : bool
        Whether the driver lives, knows the runtime's containers and has moved those that were wrong.
    epoch : int
        How often that has changed.
    held : dict of str to CpuSet
        The claims that are prepared: from the answer to a prepare until an unprepare is sent.
    containers : dict of str to str or None
        The claim of each container, None of those on the shared pool.
    """

    def __init__(self, cgroup_parent, *, from_prepare):
        self._cgroups = kernel.cgroups(cgroup_parent)
        self._from_prepare = from_prepare
        self.settled = False
        self.epoch = 0
        self.held = {}
        self.containers = {}
        self.checks = 0
        self.processes_seen = 0

    def settle(self, settled):
        self.settled = settled
        self.epoch += 1

    def processes(self):
        """Return claim, CPUs and a name of every process that runs an image."""
        found = []
        for path in self._cgroups.glob("pod*/*/cgroup.procs"):
            container = path.parent.name
            if container not in self.containers:
                continue  # a sandbox
            # A process may end, and a container be removed, while it is looked at.
            with suppress(OSError):
                for pid in map(int, path.read_text().split()):
                    with suppress(OSError):
                        # What is not of the image is runc, which has not moved in yet.
                        if Path(f"/proc/{pid}/exe").readlink().name == "busybox":
                            found.append((self.containers[container], kernel.allowed(pid), f"{container[:12]}/{pid}"))
        return found

    def strangers(self, processes):
        """Return who is on the CPUs of a claim that it has not."""
        running = {claim for claim, _, _ in processes}
        return [
            f"{name} of claim {claim} runs on {allowed}, but claim {holder} has {cpus}"
            for claim, allowed, name in processes
            for holder, cpus in self.held.items()
            if claim != holder and not allowed.isdisjoint(cpus) and (self._from_prepare or holder in running)
        ]

    def check(self):
        """Ask the kernel. Nothing else happens in this process meanwhile."""
        processes = self.processes()
        self.checks += 1
        self.processes_seen += len(processes)
        for claim, allowed, name in processes:
            if claim in self.held:
                assert allowed == self.held[claim], f"{name} of claim {claim} runs on {allowed}, not on {self.held}"
        if self.settled:
            assert self.strangers(processes) == []


class Churn:
    """Clients of one node, and somebody who kills its driver.

    Parameters
    ----------
    node : Node
    observer : Observer
    rng : random.Random
    from_prepare : bool
        What the observer was told.

    Attributes
    ----------
    creations : list of tuple of float and bool
        How long each CreateContainer took, and whether the driver was there all the while.
    cycles : dict of str to int
        How many pods have come and gone, shared and exclusive.
    refused : int
        What failed while the driver was away.
    repeated : int
        How many containers of claims had to be created once more, because others were just being started.
    """

    def __init__(self, node, observer, rng, *, from_prepare):
        self._node = node
        self._observer = observer
        self._rng = rng
        # Two CPUs allow one claim at a time: with two, nothing else could run.
        self._turn = asyncio.Lock()
        self._from_prepare = from_prepare
        self._runs = set()
        self._forced_updates = 0
        self.creations = []
        self.cycles = {"shared": 0, "exclusive": 0}
        self.refused = 0
        self.repeated = 0
        self.over = False

    async def client(self):
        while not self.over:
            if not self._turn.locked() and self._rng.random() < 0.7:
                async with self._turn:
                    await self._exclusive()
            else:
                await self._shared()

    async def kill(self):
        """Kill the driver and start another after a while."""
        self._observer.settle(False)
        while self._forced_updates:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # Whoever answers late or not at all has been thrown out.
        assert (await self._node.metrics())["nri_reconnects_total"] == 0
        await self._node.driver.kill9()
        await asyncio.sleep(self._rng.uniform(*AWAY_S))
        await self._node.start_driver()
        await self.settle()

    async def settle(self):
        """Wait until everything is where it should be, and insist on that from then on."""
        # Nobody has told the driver what becomes of those.
        begun_without_driver = set(self._runs)

        async def settled():
            processes = self._observer.processes()
            return begun_without_driver.isdisjoint(self._runs) and not self._observer.strangers(processes)

        await self._node.until(settled, "nobody is on CPUs of others", SETTLED_AFTER_S)
        self._observer.settle(True)

    async def _shared(self):
        pod = await self._node.pod()
        containers = [await self._run(pod, f"c{number}") for number in range(self._rng.randint(1, 2))]
        await self._use(containers)
        await self._node.cri.end(pod)
        self._observer.check()
        self.cycles["shared"] += 1

    async def _exclusive(self):
        pod = await self._node.pod()
        cpus = self._rng.choice(("0", "1"))
        claim = self._node.add_claim(cpus, pod)
        while (devices := await self._prepare(claim)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self._observer.held[claim.uid] = CpuSet.parse(cpus)
        self._observer.check()
        containers = [
            await self._run(pod, f"c{number}", claim.uid, devices) for number in range(self._rng.randint(1, 3))
        ]
        await self._use(containers)
        await self._node.cri.stop_pod(pod)
        self._observer.check()
        del self._observer.held[claim.uid]
        while not await self._unprepare(claim):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self._observer.check()
        await self._node.cri.remove_pod(pod)
        self._node.box.api.delete(RESOURCE_CLAIMS, claim.name)
        self.cycles["exclusive"] += 1

    async def _prepare(self, claim):
        with self._may_fail():
            return await self._node.prepare(claim)
        return None

    async def _unprepare(self, claim):
        with self._may_fail():
            error = await self._node.unprepare(claim)
            assert not error, error
            return True
        return False

    async def _run(self, pod, name, claim=None, devices=()):
        """Create and start a container, and return its id; None if it was refused while the driver was away."""
        run = object()
        self._runs.add(run)
        try:
            return await self._create_and_start(pod, name, claim, devices)
        finally:
            self._runs.remove(run)

    async def _create_and_start(self, pod, name, claim, devices):
        with self._may_fail():
            container = await self._create(pod, name, devices)
            self._observer.containers[container] = claim
            self._observer.check()
            if self._rng.random() < 0.3:
                await self._update(container)
            await self._node.cri.start(container)
            self._observer.check()
            return container
        return None

    async def _create(self, pod, name, devices):
        """Create a container; as the kubelet does, once more if others are still on the way to the claim's CPUs."""
        give_up_at = time.monotonic() + CREATED_AFTER_S
        attempt = 0
        while True:
            epoch, started_at = self._observer.epoch, time.monotonic()
            try:
                return await self._node.cri.create(pod, name, cdi=devices, attempt=attempt)
            except CriError as error:
                if self._from_prepare or NOT_YET not in str(error) or time.monotonic() > give_up_at:
                    raise
                attempt += 1
                self.repeated += 1
            finally:
                undisturbed = self._observer.settled and epoch == self._observer.epoch
                self.creations.append((time.monotonic() - started_at, undisturbed))
            await asyncio.sleep(0.1)

    async def _use(self, containers):
        """Do something with the containers that there are."""
        living = [container for container in containers if container is not None]
        for _ in range(self._rng.randint(0, 4)):
            if living:
                await self._update(self._rng.choice(living))
            await asyncio.sleep(self._rng.uniform(0, 0.2))
            self._observer.check()
        if living and self._rng.random() < 0.5:
            container = living.pop(self._rng.randrange(len(living)))
            await self._node.cri.exec(container, "/bin/true")
            await self._node.cri.stop(container)
            self._observer.check()
            await self._node.cri.remove(container)
            self._observer.check()

    async def _update(self, container):
        # Of other CPUs only while somebody is there who objects.
        forced = self._observer.settled
        self._forced_updates += forced
        try:
            with self._may_fail():
                cpus = self._rng.choice(("", "0-1", "0", "1")) if forced else ""
                await self._node.cri.update(container, cpus=cpus, shares=self._rng.randint(2, 1024))
        finally:
            self._forced_updates -= forced
        self._observer.check()

    @contextmanager
    def _may_fail(self):
        """Let what is done fail if the driver was away meanwhile."""
        epoch = self._observer.epoch
        try:
            yield
        except (CriError, KubeletError, AssertionError):
            if self._observer.settled and epoch == self._observer.epoch:
                raise
            self.refused += 1


async def test_churn(node, version, tmp_path, capsys):
    from_prepare = version in programs.PUSHED_TO
    rng = random.Random(SEED)
    observer = Observer(f"{node.containerd.cgroup_parent}/kubepods", from_prepare=from_prepare)
    await node.start_driver()
    permanent = [await node.cri.run(await node.pod(), "permanent") for _ in range(3)]
    observer.containers |= dict.fromkeys(permanent)
    churn = Churn(node, observer, rng, from_prepare=from_prepare)
    await churn.settle()
    try:
        async with asyncio.timeout(SECONDS + 30 * KILLS + 120), asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(churn.client()) for _ in range(CLIENTS)]
            for _ in range(KILLS):
                await asyncio.sleep(SECONDS / (KILLS + 1))
                await churn.kill()
            await asyncio.sleep(SECONDS / (KILLS + 1))
            churn.over = True
            await asyncio.wait(clients)
    except Exception as failure:
        if await hangs(node, permanent[0]):
            waiting = await what_waits(node, tmp_path / "goroutines")
            raise AssertionError(f"containerd {version} hangs: {waiting}") from failure
        raise
    finally:
        with capsys.disabled():
            print(f"\nchurn with containerd {version}, seed {SEED}: {report(churn, observer)}")
    let_go = time.monotonic()
    if not from_prepare:
        # What has become free is given to the others with the next answer.
        observer.containers[await node.cri.run(await node.pod(), "last")] = None
    await node.wait_cpus(*permanent, cpus=str(MANAGED), timeout_s=GROWN_AFTER_S)
    metrics = await node.metrics()
    with capsys.disabled():
        print(f"all CPUs were shared again {time.monotonic() - let_go:.2f} s after the end")
    assert metrics["nri_reconnects_total"] == 0
    assert metrics["nri_unmovable_containers"] == 0
    assert metrics["nri_unsolicited_updates"] == from_prepare
    assert metrics["allocated_cpus"] == 0
    assert min(churn.cycles.values()) > 0
    assert observer.processes_seen > observer.checks  # else nothing was looked at
    if from_prepare:
        # Elsewhere the runtime moves others meanwhile, one after another.
        assert max(seconds for seconds, undisturbed in churn.creations if undisturbed) < WORST_CREATE_S
    assert node.containerd.was_pushed_to == from_prepare


async def hangs(node, container):
    """Tell whether the runtime does not even change a container any more, for which it needs every lock of NRI's."""
    try:
        await node.cri.update(container, shares=2)
    except CriHangsError:
        return True
    except CriError:
        pass
    return False


async def what_waits(node, path):
    """Say which goroutines of the runtime wait for a lock, and keep what all of them do."""
    dump = await node.containerd.goroutines()
    path.write_text(dump)
    waiting = waiting_for_locks(dump, "nri")
    lines = [f"{count:4} × {functions}" for functions, count in waiting.most_common()]
    return "\n".join([f"{waiting.total()} of its goroutines wait for locks; {path} has all", *lines])


def report(churn, observer):
    undisturbed = sorted(seconds for seconds, undisturbed in churn.creations if undisturbed)
    if not undisturbed:
        return "no containers"
    return (
        f"{churn.cycles['shared']} shared and {churn.cycles['exclusive']} exclusive pods; "
        f"{len(churn.creations)} CreateContainer calls, worst {max(churn.creations)[0] * 1000:.0f} ms, with the driver "
        f"there all the while {undisturbed[-1] * 1000:.0f} ms, median {statistics.median(undisturbed) * 1000:.0f} ms; "
        f"{churn.refused} calls failed without it; {churn.repeated} containers of claims were created once more; "
        f"{observer.checks} checks of {observer.processes_seen} processes"
    )
