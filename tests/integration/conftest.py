# SPDX-License-Identifier: Apache-2.0
"""A node with the real driver on it, and claims as an external scheduler or somebody hostile writes them."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from driver.names import DRIVER_NAME
from driver.sandbox.clusterbox import ClusterBox, held_cpus
from driver.sandbox.driverprocess import DriverProcess
from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.machine import MachineShape
from driver.sandbox.nriplugin import RuntimeTraits
from driver.sandbox.plugins import Plugin, PreparedClaim
from fastcpu import CpuSet

Json = dict[str, Any]

V1 = "v1.DRAPlugin"


class Node:
    """A box, the driver process that runs in it now, and the files that outlive every process.

    Without another `shape` the machine has 64 CPUs in 2 sockets and 4 NUMA nodes: 0-7,32-39 and so on.
    """

    def __init__(self, box: ClusterBox) -> None:
        self.box = box
        self.plugin_dir = box.kubelet.plugins_dir / DRIVER_NAME
        self.records_dir = self.plugin_dir / "claims"
        self.metadata_dir = self.plugin_dir / "dra-device-metadata"
        self.cdi_dir = box.cdi_dir
        self.url = ""
        self.process: DriverProcess
        self._numbers = itertools.count(1)
        self._connections: list[Plugin] = []
        self._log_begins = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, *, traits: RuntimeTraits | None = None, **shape: Any) -> AsyncIterator[Node]:
        machine = MachineShape(**{"cpus": 64, "numa_nodes": 4, **shape})
        async with ClusterBox(shape=machine, traits=traits or RuntimeTraits()) as box:
            node = cls(box)
            try:
                yield node
            finally:
                for connection in node._connections:
                    await connection.close()

    # The process.

    async def start(
        self,
        settings: Mapping[str, object] | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        wait: bool = True,
    ) -> DriverProcess:
        """Start a driver and, unless told otherwise, wait until it serves claims."""
        address = f"127.0.0.1:{self.box.reserve_port()}"
        self.url = f"http://{address}"
        log = self.box.folder / "driver.log"
        self._log_begins = log.stat().st_size if log.exists() else 0
        own = (f"--bind-address={address}", "--log-format=json", "--start-guard=false", *flags)
        self.process = await self.box.start_driver(settings, own, environment)
        if wait:
            await self.box.wait_ready(self.process)
        return self.process

    async def restart(self, settings: Mapping[str, object] | None = None, flags: Sequence[str] = ()) -> None:
        """Kill the driver as the kernel would, and start another."""
        await self.process.kill9()
        await self.start(settings, flags)

    def log(self) -> list[Json]:
        """Return what the latest process has logged so far."""
        text = self.process.log_path.read_bytes()[self._log_begins :].decode()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    async def get(self, path: str) -> tuple[int, str]:
        """Return status and body of one of the driver's HTTP paths."""
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def metrics(self) -> dict[str, float]:
        """Return all metrics by name and labels as they are written, without their common prefix."""
        _, text = await self.get("/metrics")
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("dra_cpu_")]
        return {name.removeprefix("dra_cpu_"): float(value) for name, value in lines}

    async def until(self, condition: Callable[[], object], timeout_s: float = 60) -> object:
        """Wait for something that a driver does and tells nobody here; return what came true."""
        async with asyncio.timeout(timeout_s):
            while not (found := condition()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            return found

    # What is held.

    def recorded(self) -> dict[str, str]:
        """Return who holds what, as the records say."""
        documents = [json.loads(path.read_bytes()) for path in self.records_dir.glob("*.json")]
        return {document["uid"]: document["cpus"] for document in documents}

    def specified(self) -> dict[str, str]:
        """Return who holds what, as the CDI specs say."""
        return {uid: str(cpus) for uid, cpus in held_cpus(self.cdi_dir).items()}

    def specified_in(self, name: str) -> dict[str, str]:
        """Return the CPUs of each device of one CDI spec."""
        devices = json.loads((self.cdi_dir / name).read_bytes())["devices"]
        texts = {device["name"]: device["containerEdits"]["env"] for device in devices}
        return {name.removeprefix("claim-"): env[0].partition("=")[2] for name, env in texts.items()}

    async def agreed(self) -> dict[str, str]:
        """Return who holds what, where records, CDI specs and the driver's own figures agree."""
        recorded = self.recorded()
        assert recorded == self.specified()
        metrics = await self.metrics()
        assert metrics["resource_claims_active"] == len(recorded)
        assert metrics["allocated_cpus"] == len(CpuSet().union(*map(CpuSet.parse, recorded.values())))
        return recorded

    def files(self) -> list[str]:
        """Return all files and folders that are there because of claims, temporary ones too."""
        found = [*self.records_dir.iterdir(), *self.metadata_dir.rglob("*"), *self.cdi_dir.iterdir()]
        return sorted(str(path.relative_to(self.box.folder)) for path in found)

    def record_path(self, claim: ClaimName) -> Path:
        return self.records_dir / f"{claim.uid}.json"

    def spec_path(self, claim: ClaimName) -> Path:
        return self.cdi_dir / f"dra.k8s.io-cpu_claim-{claim.uid}.json"

    # Claims.

    def result(self, cpus: object = 4, device: str = "cpudevnuma000", request: str = "cpus", **changes: object) -> Json:
        """Return an allocation result; a change to None takes the field out."""
        result = {
            "request": request,
            "driver": DRIVER_NAME,
            "pool": self.box.node_name,
            "device": device,
            "shareID": str(uuid.uuid4()),
            "consumedCapacity": {"dra.cpu/cpu": cpus},
            **changes,
        }
        return {key: value for key, value in result.items() if value is not None}

    def config(self, cpuset: object = "2-5", *requests: str, **changes: object) -> Json:
        """Return an entry of configuration for some requests, for all if none is named."""
        parameters = changes.pop("parameters", {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": cpuset}})
        driver = changes.pop("driver", DRIVER_NAME)
        entry = {"source": "FromClaim", "opaque": {"driver": driver, "parameters": parameters}, **changes}
        return {**entry, "requests": list(requests)} if requests else entry

    def add(
        self,
        cpuset: str = "2-5",
        *,
        cpus: object = None,
        device: str = "cpudevnuma000",
        results: Sequence[object] | None = None,
        configs: Sequence[object] | None = None,
        spec: Mapping[str, Mapping[str, object]] | None = None,
        raw: bool = False,
        **metadata: object,
    ) -> ClaimName:
        """Put a claim with its allocation into the API server and return how the kubelet names it.

        Parameters
        ----------
        cpuset, cpus, device
            What one request gets, where `results` and `configs` do not say it.
        spec : mapping
            What the spec says of requests and sub-requests beyond the class, by name.
        raw : bool
            Put it there as no API server would take it.
        **metadata : object
            More of the claim's metadata.
        """
        if results is None:
            count = len(CpuSet.parse(cpuset)) if cpus is None else cpus
            results = [self.result(count if raw else str(count), device)]
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {
                "name": f"claim-{next(self._numbers)}",
                "namespace": "default",
                "uid": str(uuid.uuid4()),
                **metadata,
            },
            "spec": {"devices": {"requests": _requests(results, spec or {})}},
            "status": {
                "allocation": {
                    "devices": {"results": results, "config": [self.config(cpuset)] if configs is None else configs}
                }
            },
        }
        return self.put(body, raw=raw)

    def put(self, body: Json, *, raw: bool = False) -> ClaimName:
        """Put a claim into the API server as it is."""
        metadata = body["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        if raw:
            self.box.api._store.put(RESOURCE_CLAIMS, namespace, name, body)
        else:
            self.box.api.put(RESOURCE_CLAIMS, body)
        return ClaimName(namespace=namespace, name=name, uid=metadata["uid"])

    def claim(self, claim: ClaimName) -> Json:
        """Return a claim as the API server has it."""
        found = self.box.api.get(RESOURCE_CLAIMS, claim.name, claim.namespace)
        assert found is not None
        return found

    def change(self, claim: ClaimName, **devices: object) -> None:
        """Change a claim's allocation, which no API server allows."""
        body = self.claim(claim)
        body["status"]["allocation"]["devices"].update(devices)
        self.put(body, raw=True)

    async def status_of(self, claim: ClaimName) -> list[Json]:
        """Wait until the driver has written a claim's `status.devices`, and return it without what is null."""
        found = await self.box.api.wait_until(lambda: self.claim(claim)["status"].get("devices"))
        return [{key: value for key, value in entry.items() if value is not None} for entry in found]

    # Calls.

    async def prepare(self, *claims: ClaimName) -> list[PreparedClaim]:
        """Prepare claims in one call of the kubelet."""
        answers = await self.box.kubelet.prepare(DRIVER_NAME, claims)
        return [answers[claim.uid] for claim in claims]

    async def unprepare(self, *claims: ClaimName) -> list[str]:
        """Unprepare claims in one call of the kubelet, and return the error of each."""
        errors = await self.box.kubelet.unprepare(DRIVER_NAME, claims)
        return [errors[claim.uid] for claim in claims]

    async def errors(self, *claims: ClaimName) -> list[str]:
        """Prepare claims in one call of the kubelet, and return the error of each."""
        return [answer.error for answer in await self.prepare(*claims)]

    async def release_all(self) -> None:
        """Unprepare everything, and make sure that nothing is left of it."""
        claims = [ClaimName(namespace="default", name=uid.lower(), uid=uid) for uid in self.recorded()]
        assert await self.unprepare(*claims) == [""] * len(claims)
        assert self.files() == []
        assert await self.agreed() == {}

    async def connect(self, service: str = V1) -> Plugin:
        """Open a connection of its own to the driver's DRA socket."""

        async def changed(plugin: Plugin) -> None: ...

        plugin = Plugin(
            name=DRIVER_NAME,
            endpoint=str(self.plugin_dir / "dra.sock"),
            service=service,
            supported_versions=(service,),
            connection_changed=changed,
        )
        self._connections.append(plugin)
        return plugin


def _requests(results: Sequence[object], more: Mapping[str, Mapping[str, object]]) -> list[Json]:
    """Return a spec in which every request of some results, and every one of which more is said, exists."""
    named = [*(str(result.get("request")) for result in results if isinstance(result, dict)), *more]
    requests: dict[str, Json] = {}
    for name in dict.fromkeys(named):
        base, slash, sub_request = name.partition("/")
        request = requests.setdefault(base, {"name": base})
        wanted = {"deviceClassName": DRIVER_NAME, **more.get(name, {})}
        if slash:
            request.setdefault("firstAvailable", []).append({"name": sub_request, **wanted})
        else:
            request["exactly"] = wanted
    return list(requests.values())


@pytest.fixture(scope="session")
def open_node() -> Callable[..., AbstractAsyncContextManager[Node]]:
    """Open a node, `async with open_node(cpus=16, numa_nodes=2) as node`: for fixtures that outlive one test."""
    return Node.open


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """A node on which no driver has been started yet."""
    async with Node.open() as node:
        yield node
