# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the unit tests: a disk that fails on demand, records, and a node whose driver can die and start again."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from driver.allocators import Allocator, ExternalAllocator
from driver.cdi import CdiDirectory
from driver.checkpoint import RecordStore
from driver.cpumanager import CpuManagerAllocator
from driver.devices import DeviceModel, build_devices
from driver.errors import ApiError
from driver.ledger import Ledger, Record
from driver.metadata import MetadataStore
from driver.metrics import Metrics
from driver.names import ClaimUID
from driver.prepare import ClaimReference, PreparedAnswer, Preparer
from driver.runtime import NoRuntime, Runtime
from driver.sandbox.machine import MachineShape, write_machine
from driver.status import StatusWriter
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from fastcpu.sysfs import read_topology
from fastcpu.topology import Topology
from records import make_record


class Killed(BaseException):
    """The process is dead: nothing catches this, and no further operation happens."""


class FailingDisk:
    """Makes file operations on chosen paths fail, like a disk that is full, broken or read-only.

    The operations are those of the system: ``open`` (for writing), ``read`` (opening for reading), ``write``,
    ``fsync``, ``rename``, ``unlink``, ``mkdir``, ``rmdir`` and ``listdir``. `calls` has every one that was tried,
    with its path. Parts of paths are looked for below `root` only; a part that ends in ``$`` is a path's end.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._faults: list[tuple[str, str, int, list[int]]] = []
        self._pauses: list[tuple[str, str, threading.Event, threading.Event]] = []
        self._left: int | None = None
        self.calls: list[tuple[str, str]] = []

    def fail(self, operation: str, part: str, error: int, times: int = 1_000_000) -> None:
        """Let an operation fail, so many times, on every path that has `part` in it."""
        self._faults.append((operation, part, error, [times]))

    def pause(self, operation: str, part: str) -> tuple[threading.Event, threading.Event]:
        """Let an operation wait; return what tells that it does, and what lets it go on."""
        reached, go_on = threading.Event(), threading.Event()
        self._pauses.append((operation, part, reached, go_on))
        return reached, go_on

    def kill_after(self, operations: int) -> None:
        """Let so many operations happen, and none after them."""
        self._left = operations

    def repair(self) -> None:
        """Let everything succeed again."""
        self._faults.clear()
        self._pauses.clear()
        self._left = None

    def check(self, operation: str, path: object) -> None:
        name = os.fspath(path) if isinstance(path, str | Path) else str(path)
        self.calls.append((operation, name))
        below = name.removeprefix(self._root) + "$"
        if self._left is not None:
            if self._left == 0:
                raise Killed
            self._left -= 1
        for wanted, part, reached, go_on in self._pauses:
            if wanted == operation and part in below:
                reached.set()
                assert go_on.wait(10)
        for wanted, part, error, times in self._faults:
            if wanted == operation and part in below and times[0] > 0:
                times[0] -= 1
                raise OSError(error, os.strerror(error), name)


def path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    failing = FailingDisk(tmp_path)
    real_open, real_write, real_fsync = os.open, os.write, os.fsync

    def checked_open(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        failing.check("open" if flags & os.O_ACCMODE else "read", path)
        return real_open(path, flags, mode, **rest)

    def checked_fsync(descriptor: int) -> None:
        failing.check("fsync", path_of(descriptor))
        real_fsync(descriptor)

    def checked_write(descriptor: int, content: bytes) -> int:
        failing.check("write", path_of(descriptor))
        return real_write(descriptor, content)

    def watch(operation: str, name: str) -> None:
        real = getattr(os, name)

        def checked(path: str, *rest: object, **named: object) -> object:
            failing.check(operation, path)
            return real(path, *rest, **named)

        monkeypatch.setattr(os, name, checked)

    monkeypatch.setattr(os, "open", checked_open)
    monkeypatch.setattr(os, "fsync", checked_fsync)
    monkeypatch.setattr(os, "write", checked_write)
    for operation, name in (
        ("rename", "rename"),
        ("rename", "replace"),
        ("unlink", "unlink"),
        ("mkdir", "mkdir"),
        ("listdir", "listdir"),
        ("rmdir", "rmdir"),
    ):
        watch(operation, name)
    return failing


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Let other tasks run until something is so."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110, what is waited for tells nobody
                await asyncio.sleep(0)

    return wait


@pytest.fixture(name="make_record")
def _make_record() -> Callable[..., Record]:
    return make_record


class Claims:
    """The claims of an API server: objects by namespace and name, calls that fail or hang on demand."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, object]] = {}
        self.failures: list[ApiError] = []
        self.gets: list[tuple[str, str]] = []
        self.applied: dict[str, list[object]] = {}
        self.name_cpus = True
        self.may_apply = asyncio.Event()
        self.may_apply.set()

    async def get_claim(self, namespace: str, name: str) -> dict[str, object]:
        self.gets.append((namespace, name))
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        try:
            return self.objects[namespace, name]
        except KeyError:
            words = f"the API server answered 404: {name} not found"
            raise ApiError(404, words, missing=f"resourceclaims/{name}") from None

    async def apply_claim_devices(self, namespace: str, name: str, uid: str, devices: list[object]) -> None:
        await self.may_apply.wait()
        self.applied[uid] = list(devices)

    def add(
        self,
        uid: str,
        cpuset: str,
        *,
        device: str = "cpudevnuma000",
        count: int | None = None,
        changes: dict[str, object] | None = None,
    ) -> ClaimReference:
        """Add a claim of one request with its cpuset, allocated on this node."""
        result = {
            "request": "cpus",
            "driver": "dra.cpu",
            "pool": "node-1",
            "device": device,
            "shareID": f"share-{uid}",
            "consumedCapacity": {"dra.cpu/cpu": str(count or len(CpuSet.parse(cpuset)))},
            **(changes or {}),
        }
        parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": cpuset}}
        config = {
            "source": "FromClaim",
            "requests": ["cpus"],
            "opaque": {"driver": "dra.cpu", "parameters": parameters},
        }
        return self.put(uid, [result], [config] if self.name_cpus else [])

    def put(self, uid: str, results: list[object], configs: list[object]) -> ClaimReference:
        """Add a claim with this allocation."""
        name = f"claim-{uid}"
        self.objects["default", name] = {
            "metadata": {"namespace": "default", "name": name, "uid": uid, "generation": 1, "resourceVersion": "1"},
            "spec": {"devices": {"requests": [{"name": "cpus", "exactly": {"deviceClassName": "dra.cpu"}}]}},
            "status": {"allocation": {"devices": {"results": results, "config": configs}}},
        }
        return ClaimReference(uid=ClaimUID(uid), namespace="default", name=name)


class Node:
    """A node of 64 CPUs in two NUMA nodes, and the parts of a driver there that prepare claims.

    The folders and the API server outlive a driver: `restart` leaves it as a kill would, and starts another.
    """

    def __init__(self, root: Path, topology: Topology) -> None:
        self.topology = topology
        self.claims = Claims()
        self.records_folder = root / "plugin" / "claims"
        self.cdi_folder = root / "cdi"
        self.metadata_folder = root / "plugin" / "dra-device-metadata"
        self.wait_s = 0.0
        self.allocator = "external"
        self.runtime: Runtime = NoRuntime()
        self.start()

    def start(self, *, group_by: str = "numanode", reserved: str = "0-1") -> None:
        """Make the parts of a driver, which know nothing yet."""
        self.registry = CollectorRegistry()
        self.model: DeviceModel = build_devices(
            self.topology,
            reserved=CpuSet.parse(reserved),
            group_by=group_by,
            allocator=self.allocator,
            pcie_roots=None,
            node_allocatable_mapping=False,
        )
        self.pool = CpuPool(self.topology.online, CpuSet.parse(reserved), self.model.groups)
        self.ledger = Ledger(self.pool)
        self.status = StatusWriter(self.claims, settle_s=0.0, first_delay_s=0.0)
        self.preparer = Preparer(
            claims=self.claims,
            allocator=self._make_allocator(),
            model=self.model,
            ledger=self.ledger,
            records=RecordStore(self.records_folder),
            cdi=CdiDirectory(self.cdi_folder),
            metadata=MetadataStore(self.metadata_folder, self.cdi_folder),
            status=self.status,
            runtime=self.runtime,
            metrics=Metrics(self.registry),
            wait_s=self.wait_s,
        )

    def let_the_driver_choose(self) -> None:
        """Start a driver that chooses CPUs itself, and have claims only say how many they want from now on."""
        self.allocator = "cpumanager"
        self.claims.name_cpus = False
        self.start()

    def _make_allocator(self) -> Allocator:
        if self.allocator == "external":
            return ExternalAllocator(self.model, self.pool, "node-1")
        return CpuManagerAllocator(self.model, self.pool, "node-1", self.topology, {})

    async def restart(self, **config: str) -> None:
        """Forget everything but the files, as a killed process does, and start again from them."""
        await self.status.close()
        self.start(**config)
        await self.preparer.restore()

    async def prepare(self, reference: ClaimReference) -> tuple[PreparedAnswer, ...]:
        return await self.preparer.prepare(reference)

    async def unprepare(self, reference: ClaimReference) -> None:
        await self.preparer.unprepare(reference)

    def held(self) -> dict[str, str]:
        """Return who holds what, as the ledger says, once it is sure that the pool says so too."""
        assert CpuSet().union(*(record.cpus for record in self.ledger.records.values())) == self.pool.taken
        return {uid: str(record.cpus) for uid, record in self.ledger.records.items()}

    def recorded(self) -> dict[str, str]:
        """Return who holds what, as the record files say."""
        documents = [json.loads(path.read_bytes()) for path in self.records_folder.glob("*.json")]
        return {document["uid"]: document["cpus"] for document in documents}

    def specified(self) -> dict[str, str]:
        """Return who holds what, as the CDI specs say."""
        found = {}
        for path in self.cdi_folder.glob("dra.k8s.io-cpu_claim-*.json"):
            (device,) = json.loads(path.read_bytes())["devices"]
            (variable,) = device["containerEdits"]["env"]
            name, _, found_cpus = variable.partition("=")
            assert path.name == f"dra.k8s.io-cpu_{device['name']}.json"
            found[name.removeprefix("DRA_CPUSET_")] = found_cpus
        return found

    def agreed(self) -> dict[str, str]:
        """Return who holds what, where the ledger, the records and the CDI specs agree on it."""
        assert self.held() == self.recorded() == self.specified()
        return self.held()

    def metadata_files(self) -> list[str]:
        """Return all files of device metadata."""
        hosts = [str(path.relative_to(self.metadata_folder)) for path in self.metadata_folder.rglob("*.json")]
        return sorted(hosts + [path.name for path in self.cdi_folder.glob("dra.cpu_metadata_*")])

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"dra_cpu_{name}", labels)


@pytest.fixture(scope="session")
def small_machine(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """A machine of 64 CPUs without SMT in two NUMA nodes: 0-31 and 32-63."""
    shape = MachineShape(sockets=1, numa_nodes=2, cpus=64, threads_per_core=1)
    return read_topology(write_machine(tmp_path_factory.mktemp("machine") / "sys", shape))


@pytest.fixture
async def node(tmp_path: Path, small_machine: Topology) -> AsyncIterator[Node]:
    node = Node(tmp_path, small_machine)
    await node.preparer.restore()
    yield node
    await node.status.close()
