# SPDX-License-Identifier: Apache-2.0
"""What a prepare and an unprepare cost beside the API server and the socket: all else, with real files.

The rival is the least that a driver could do: parse the claim, and write the same files without looking at anything.
`load.py` measures the same over the socket, with an API server.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from driver.allocators import ExternalAllocator
from driver.cdi import CdiDirectory
from driver.checkpoint import RecordStore
from driver.devices import build_devices
from driver.ledger import Ledger
from driver.metadata import MetadataStore
from driver.metrics import Metrics
from driver.names import ClaimUID
from driver.prepare import ClaimReference, Preparer
from driver.runtime import NoRuntime
from driver.sandbox.offers import Offer, allocated_claim
from driver.status import StatusWriter
from fastcpu import CpuSet, Topology
from fastcpu.pool import CpuPool

pytestmark = pytest.mark.usefixtures("quiet")

CHAPTER = "Claims, without API server and socket"
N_CPUS = 1024
GROUPS = 2
RESERVED = CpuSet([0])
PER_CALL = (1, 32)


class Claims:
    """An API server that answers at once: with text, as the real one does."""

    def __init__(self, device: str, count: int) -> None:
        self.texts = {}
        self.references = []
        for number in range(count):
            uid = f"00000000-0000-4000-8000-{number:012}"
            offer = Offer(pool="node", device=device, cpus=CpuSet())
            body = allocated_claim(f"claim-{number}", offer, str(number + 1), 1)
            body["metadata"] |= {"uid": uid, "resourceVersion": "1", "generation": 1}
            self.texts[body["metadata"]["name"]] = json.dumps(body)
            self.references.append(ClaimReference(uid=ClaimUID(uid), namespace="default", name=f"claim-{number}"))

    async def get_claim(self, namespace, name):
        return json.loads(self.texts[name])

    async def apply_claim_devices(self, namespace, name, uid, devices):
        raise AssertionError("the claim is unprepared before its status has settled")


class Node:
    """The parts of a driver that prepare claims, on a machine of 1,024 CPUs."""

    def __init__(self, root: Path, per_call: int) -> None:
        topology = Topology.from_arrays(
            CpuSet(range(N_CPUS)), sockets=[cpu * GROUPS // N_CPUS for cpu in range(N_CPUS)]
        )
        model = build_devices(
            topology,
            reserved=RESERVED,
            group_by="socket",
            allocator="external",
            pcie_roots=None,
            node_allocatable_mapping=False,
        )
        pool = CpuPool(topology.online, RESERVED, model.groups)
        self.claims = Claims(model.devices[0].name, per_call)
        self.ledger = Ledger(pool)
        self.preparer = Preparer(
            claims=self.claims,
            allocator=ExternalAllocator(model, pool, "node"),
            model=model,
            ledger=self.ledger,
            records=RecordStore(root / "plugin" / "claims"),
            cdi=CdiDirectory(root / "cdi"),
            metadata=MetadataStore(root / "plugin" / "metadata", root / "cdi"),
            status=StatusWriter(self.claims, settle_s=60.0),
            runtime=NoRuntime(),
            metrics=Metrics(CollectorRegistry()),
        )

    async def prepare(self) -> None:
        await asyncio.gather(*map(self.preparer.prepare, self.claims.references))

    async def unprepare(self) -> None:
        await asyncio.gather(*map(self.preparer.unprepare, self.claims.references))


def measure(benchmark, loop, work, *, undo):
    """Time some work, which is undone before each time."""
    benchmark.pedantic(
        lambda: loop.run_until_complete(work()),
        setup=lambda: loop.run_until_complete(undo()),
        rounds=50,
        warmup_rounds=2,
    )


@pytest.mark.parametrize("per_call", PER_CALL)
def test_prepare(entry, loop, tmp_path, per_call):
    benchmark = entry(CHAPTER, "prepare", "dracpu", n=per_call, unit="at once")
    node = Node(tmp_path, per_call)
    measure(benchmark, loop, node.prepare, undo=node.unprepare)
    assert len(node.ledger.records) == per_call
    assert len(list((tmp_path / "plugin/claims").iterdir())) == per_call
    loop.run_until_complete(node.unprepare())


@pytest.mark.parametrize("per_call", PER_CALL)
def test_unprepare(entry, loop, tmp_path, per_call):
    benchmark = entry(CHAPTER, "unprepare", "dracpu", n=per_call, unit="at once")
    node = Node(tmp_path, per_call)
    measure(benchmark, loop, node.unprepare, undo=node.prepare)
    assert not node.ledger.records
    assert not list((tmp_path / "plugin/claims").iterdir())


@pytest.mark.parametrize("per_call", PER_CALL)
def test_bare_prepare(entry, loop, tmp_path, per_call):
    """Parse the claims and write what a prepare writes, one after the other, with the same syncs."""
    benchmark = entry(CHAPTER, "prepare", "json and rename", n=per_call, unit="at once")
    node = Node(tmp_path / "node", per_call)
    loop.run_until_complete(node.prepare())
    contents = {path: path.read_bytes() for path in (tmp_path / "node").rglob("*.json")}
    loop.run_until_complete(node.unprepare())
    synced = tmp_path / "node/plugin/claims"

    def write() -> None:
        for text in node.claims.texts.values():
            json.loads(text)
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            with temporary.open("wb") as file:
                file.write(content)
                if path.parent == synced:
                    os.fsync(file.fileno())
            temporary.rename(path)
        descriptor = os.open(synced, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def remove() -> None:
        for path in contents:
            path.unlink(missing_ok=True)

    benchmark.pedantic(write, setup=remove, rounds=50, warmup_rounds=2)
    assert len(contents) == 4 * per_call


@pytest.mark.parametrize("per_call", PER_CALL)
def test_bare_unprepare(entry, loop, tmp_path, per_call):
    """Remove what an unprepare removes, one after the other, with the same syncs."""
    benchmark = entry(CHAPTER, "unprepare", "json and rename", n=per_call, unit="at once")
    node = Node(tmp_path / "node", per_call)
    loop.run_until_complete(node.prepare())
    contents = {path: path.read_bytes() for path in (tmp_path / "node").rglob("*.json")}
    synced = (tmp_path / "node/cdi", tmp_path / "node/plugin/claims")

    def write() -> None:
        for path, content in contents.items():
            path.write_bytes(content)

    def remove() -> None:
        for path in contents:
            path.unlink()
        for folder in synced:
            descriptor = os.open(folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    benchmark.pedantic(remove, setup=write, rounds=50, warmup_rounds=2)
    assert len(contents) == 4 * per_call
    loop.run_until_complete(node.unprepare())
