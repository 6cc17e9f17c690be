# SPDX-License-Identifier: Apache-2.0
"""Ten thousand random prepares and unprepares through the gRPC socket, and how much they scatter the free CPUs.

A request *crosses* if its CPUs are of more than one L3 cache although it would fit into an empty one.

What the kubelet's CPU manager would do on this history is not known, only what it does on the states of
``tests/golden``. There both are printed side by side. These states are those on which the two differ, and a few others.
Of the 1,992 requests of the whole collection that fit into an L3 the driver crosses one in 61, the kubelet in 87.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from driver.names import CDI_KIND, CPU_CAPACITY, DRIVER_NAME
from driver.sandbox.clusterbox import ClusterBox, held_cpus
from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.machine import MachineShape
from fastcpu import CpuSet, Topology, read_topology
from fastcpu.placement import Placer

GOLDEN = Path(__file__).parents[1] / "golden/kubelet-packed.json"
LEVELS = ("cores", "l3_caches", "numa_nodes", "sockets")

STEPS = 10_000
SHAPE = MachineShape(sockets=2, numa_nodes=8, cpus=512)
RESERVED = CpuSet.parse("0,256")
SIZES = (1, 1, 2, 2, 2, 4, 4, 4, 6, 8, 8, 12, 16, 24)
EVERYTHING_EVERY = 500


def caches(topology: Topology) -> list[CpuSet]:
    return [topology.l3_caches.cpuset(row) for row in range(len(topology.l3_caches))]


def fits_an_l3(topology: Topology, cpus: CpuSet) -> bool:
    return len(cpus) <= max(map(len, caches(topology)))


def crosses(topology: Topology, cpus: CpuSet) -> bool:
    return len({int(topology.l3_caches.group_of[cpu]) for cpu in cpus}) > 1


def uids(folder: Path, prefix: str) -> set[str]:
    """Return the claims of which a folder has a file. Paths as objects would take longer than the driver does."""
    names = (name for name in os.listdir(folder) if name.startswith(prefix) and name.endswith(".json"))
    return {name.removeprefix(prefix).removesuffix(".json") for name in names}


class History:
    """The claims of one node: who holds what, as far as it shows outside of the driver."""

    def __init__(self, box: ClusterBox) -> None:
        self.box = box
        self.topology: Topology = read_topology(box.sysfs_root)
        self.placer = Placer(self.topology)
        self.records_dir = box.kubelet.plugins_dir / DRIVER_NAME / "claims"
        self.held: dict[str, CpuSet] = {}
        self.taken = CpuSet()
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    def taken_by(self, uid: str, cpus: CpuSet) -> None:
        assert cpus.isdisjoint(self.taken)
        self.held[uid] = cpus
        self.taken |= cpus

    def count(self, cpus: CpuSet, free: CpuSet) -> None:
        """Count a choice among the CPUs that were free in its device."""
        # The same request on the same state gives the same CPUs, in whichever process.
        assert cpus == self.placer.place(free, len(cpus))
        self.counts["prepared"] += 1
        if fits_an_l3(self.topology, cpus):
            self.counts["fitting"] += 1
            if crosses(self.topology, cpus):
                self.counts["crossing"] += 1
                # The driver never crosses where it need not.
                assert max(len(free & cache) for cache in caches(self.topology)) < len(cpus)

    def check_one(self) -> None:
        """Exactly the claims that hold CPUs have a record and a CDI spec."""
        records = uids(self.records_dir, "")
        specs = uids(self.box.cdi_dir, "dra.k8s.io-cpu_claim-")
        # The other history's call may be under way.
        assert len(records ^ self.held.keys()) <= 1
        assert len(specs ^ self.held.keys()) <= 1

    def check_all(self) -> None:
        """Records and CDI specs say what is held, and no CPU is held twice."""
        assert held_cpus(self.box.cdi_dir) == self.held
        documents = [json.loads(path.read_bytes()) for path in self.records_dir.glob("*.json")]
        assert {record["uid"]: CpuSet.parse(record["cpus"]) for record in documents} == self.held
        assert sum(map(len, self.held.values())) == len(self.taken) == len(CpuSet().union(*self.held.values()))


class Tenants:
    """Claims for one socket that come and go, in every run the same; what happens on the other changes nothing here."""

    def __init__(self, history: History, socket: int) -> None:
        self.history = history
        self.box = history.box
        self.device = f"cpudevsocket{socket:03}"
        self.cpus = history.topology.sockets.cpuset(socket) - RESERVED
        self.random = random.Random(socket)
        self.numbers = itertools.count()
        self.claims: list[ClaimName] = []

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            size = self.random.choice(SIZES)
            free = len(self.cpus - self.history.taken)
            # As full as it can be most of the time: then what is free is what others have left.
            if self.claims and (size > free or self.random.random() < 0.4):
                await self.unprepare(self.claims.pop(self.random.randrange(len(self.claims))))
            else:
                await self.prepare(f"{self.device}-{next(self.numbers)}", size)
            self.history.check_one()

    async def prepare(self, name: str, size: int) -> None:
        claim = self.put(name, size)
        started = time.perf_counter()
        answer = (await self.box.kubelet.prepare(DRIVER_NAME, [claim]))[claim.uid]
        self.history.seconds += time.perf_counter() - started
        assert answer.error == ""
        cpus = self.told(claim.uid)
        assert len(cpus) == size
        assert cpus <= self.cpus
        self.history.count(cpus, self.cpus - self.history.taken)
        self.history.taken_by(claim.uid, cpus)
        self.claims.append(claim)

    async def unprepare(self, claim: ClaimName) -> None:
        started = time.perf_counter()
        assert await self.box.kubelet.unprepare(DRIVER_NAME, [claim]) == {claim.uid: ""}
        self.history.seconds += time.perf_counter() - started
        self.history.taken -= self.history.held.pop(claim.uid)
        self.box.api.delete(RESOURCE_CLAIMS, claim.name)
        self.history.counts["unprepared"] += 1

    def put(self, name: str, size: int) -> ClaimName:
        capacity = {CPU_CAPACITY: str(size)}
        exactly = {"deviceClassName": DRIVER_NAME, "capacity": {"requests": capacity}}
        result = {
            "request": "cpus",
            "driver": DRIVER_NAME,
            "pool": self.box.node_name,
            "device": self.device,
            "consumedCapacity": capacity,
        }
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"devices": {"requests": [{"name": "cpus", "exactly": exactly}]}},
            "status": {"allocation": {"devices": {"results": [result]}}},
        }
        return ClaimName(namespace="default", name=name, uid=self.box.api.put(RESOURCE_CLAIMS, body)["metadata"]["uid"])

    def told(self, uid: str) -> CpuSet:
        """Return what a container that uses the claim is told."""
        spec = json.loads((self.box.cdi_dir / f"dra.k8s.io-cpu_claim-{uid}.json").read_text())
        assert spec["kind"] == CDI_KIND
        [device] = spec["devices"]
        [variable] = device["containerEdits"]["env"]
        name, _, cpus = variable.partition("=")
        assert name == f"DRA_CPUSET_{uid}"
        return CpuSet.parse(cpus)


@pytest.fixture
def memory_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make folders for temporary files in memory: a disk's syncs would take most of the time, and say nothing here."""
    if Path("/dev/shm").is_dir():
        monkeypatch.setattr("tempfile.tempdir", "/dev/shm")


@pytest.mark.usefixtures("memory_folder")
async def test_a_long_history_keeps_every_cpu_with_one_claim(announce: Callable[[str], None]) -> None:
    async with ClusterBox(shape=SHAPE) as box:
        settings = {"allocator": "cpumanager", "groupBy": "socket", "reservedCPUs": str(RESERVED)}
        await box.wait_ready(await box.start_driver(settings, ["--start-guard=false"]))
        history = History(box)
        tenants = [Tenants(history, socket) for socket in range(SHAPE.sockets)]
        for _ in range(STEPS // EVERYTHING_EVERY):
            await asyncio.gather(*(tenant.run(EVERYTHING_EVERY // len(tenants)) for tenant in tenants))
            history.check_all()
    counts = history.counts
    share = counts["crossing"] / counts["fitting"]
    announce(
        f"{STEPS} steps on {SHAPE.cpus} CPUs: {counts['prepared']} prepared, {counts['unprepared']} unprepared, "
        f"{history.seconds / STEPS * 1000:.1f} ms a call; of {counts['fitting']} requests that fit into an empty "
        f"L3 {counts['crossing']} ({share:.2%}) crossed one, none while one had room"
    )


def golden_machine(machine: Mapping[str, Sequence[str]]) -> Topology:
    groups = {level: [CpuSet.parse(cpus) for cpus in machine[level]] for level in LEVELS}
    online = CpuSet().union(*groups["cores"])
    rows = {level: {cpu: row for row, cpus in enumerate(groups[level]) for cpu in cpus} for level in LEVELS}
    return Topology.from_arrays(online, **{level: [rows[level][cpu] for cpu in online] for level in LEVELS})


def test_the_kubelet_crosses_more_often_on_the_same_states(announce: Callable[[str], None]) -> None:
    golden = json.loads(GOLDEN.read_text())
    machines = [golden_machine(machine) for machine in golden["machines"]]
    placers = [Placer(machine) for machine in machines]
    counts: Counter[str] = Counter()
    for case in golden["cases"]:
        topology = machines[case["topology"]]
        kubelet = CpuSet.parse(case["kubelet"])
        if fits_an_l3(topology, kubelet):
            ours = placers[case["topology"]].place(CpuSet.parse(case["available"]), case["count"])
            assert crosses(topology, kubelet) or not crosses(topology, ours)
            counts["fitting"] += 1
            counts["ours"] += crosses(topology, ours)
            counts["kubelet"] += crosses(topology, kubelet)
    assert counts["ours"] < counts["kubelet"]
    announce(
        f"{counts['fitting']} requests of the selected golden cases fit into an empty L3; "
        f"the driver crosses one in {counts['ours']}, the kubelet in {counts['kubelet']}"
    )
