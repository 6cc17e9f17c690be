# SPDX-License-Identifier: Apache-2.0
"""The publisher and the real client against the box's API server, through everything that happens to slices."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from driver.cluster import Cluster
from driver.errors import ApiError
from driver.health import Health
from driver.publisher import Pace, Publisher
from driver.sandbox.apiserver import ApiServer, Fault
from driver.sandbox.kinds import NODES, RESOURCE_SLICES

Object = dict[str, Any]

NODE = "node-7"
FAST = Pace(
    repair_s=0.02,
    contested_s=0.2,
    patience=3,
    calm_s=0.5,
    retry_s=0.01,
    unreachable_s=0.05,
    refused_s=0.05,
    steady_s=1.0,
)
SLICES_PATH = "/apis/resource.k8s.io/v1/resourceslices"


class FakeDevice:
    def __init__(self, name: str, *, cpus: int = 4, lists: bool = False, mapped: bool = False) -> None:
        self.name, self.cpus, self.lists, self.mapped = name, cpus, lists, mapped

    def to_api(self) -> Object:
        count = str(self.cpus)
        device: Object = {
            "name": self.name,
            "allowMultipleAllocations": True,
            "attributes": {"dra.cpu/numCPUs": {"int": self.cpus}},
            "capacity": {"dra.cpu/cpu": {"value": count, "requestPolicy": {"default": count}}},
        }
        if self.lists:
            device["attributes"]["resource.kubernetes.io/pcieRoot"] = {"strings": ["pci0000:00"]}
        if self.mapped:
            mapping = {"capacityKey": "dra.cpu/cpu", "capacityMultiplier": "1"}
            device["nodeAllocatableResources"] = {"cpu": {"mapping": mapping}}
        return device


class FakeModel:
    def __init__(self, count: int, **more: Any) -> None:
        self.devices = [FakeDevice(f"cpudev{number:03}", **more) for number in range(count)]

    def without_list_attributes(self) -> FakeModel:
        model = FakeModel(0)
        model.devices = [FakeDevice(d.name, cpus=d.cpus, mapped=d.mapped) for d in self.devices]
        return model


class ObservedHealth(Health):
    """Health whose changes can be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Condition()
        self._waking: set[asyncio.Task[None]] = set()

    def set_ok(self, name: str) -> None:
        super().set_ok(name)
        self._wake()

    def set_missing(self, name: str, reason: str) -> None:
        super().set_missing(name, reason)
        self._wake()

    def _wake(self) -> None:
        async def wake() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(wake())
        self._waking.add(task)
        task.add_done_callback(self._waking.discard)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(holds)

    async def until_ok(self) -> None:
        await self.until(lambda: not self.missing())

    async def until_missing(self, words: str = "") -> None:
        await self.until(lambda: "slices" in self.missing() and words in self.missing()["slices"])


class Counts:
    """Metrics that tests can read."""

    def __init__(self) -> None:
        self.syncs: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        self.repairs = 0
        self.published: tuple[int, int] | None = None

    def count_slice_sync(self, result: str) -> None:
        self.syncs[result] += 1

    def count_slice_write(self, operation: str) -> None:
        self.writes[operation] += 1

    def count_slice_repair(self) -> None:
        self.repairs += 1

    def set_published(self, slices: int, devices: int) -> None:
        self.published = (slices, devices)


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Node:
    """What a test can do to a running publisher and around it."""

    def __init__(self, server: ApiServer, publisher: Publisher, health: ObservedHealth, counts: Counts) -> None:
        self.server, self.publisher, self.health, self.counts = server, publisher, health, counts

    @property
    def slices(self) -> list[Object]:
        return sorted(self.server.list(RESOURCE_SLICES), key=lambda item: str(item["metadata"]["name"]))

    @property
    def device_names(self) -> list[str]:
        return [device["name"] for item in self.slices for device in item["spec"].get("devices") or []]

    @property
    def generations(self) -> set[int]:
        return {item["spec"]["pool"]["generation"] for item in self.slices}

    async def wipe(self) -> None:
        """Do what the kubelet does at its start."""
        selector = f"spec.nodeName={NODE},spec.driver=dra.cpu"
        async with (
            aiohttp.ClientSession(self.server.url) as session,
            session.delete(SLICES_PATH, params={"fieldSelector": selector}) as response,
        ):
            assert response.status == 200

    async def look_again(self) -> None:
        """Make the publisher list, compare and write, and wait until it has."""
        errors, syncs = self.counts.syncs["error"], self.counts.syncs["success"]
        # A watch that is not open yet cannot be cut.
        await eventually(lambda: self.server.cut_connections() or self.counts.syncs["error"] > errors)
        await self.health.until(lambda: not self.health.missing() and self.counts.syncs["success"] > syncs)


@asynccontextmanager
async def publishing(
    server: ApiServer, folder: Path, model: FakeModel, pace: Pace = FAST, client: type[Cluster] = Cluster
) -> AsyncIterator[Node]:
    cluster = await client.connect(str(server.write_kubeconfig(folder / "kubeconfig")))
    health, counts = ObservedHealth(), Counts()
    publisher = Publisher(cluster, NODE, model, health, counts, pace)
    task = asyncio.create_task(publisher.run())
    try:
        yield Node(server, publisher, health, counts)
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await cluster.close()


def add_node(server: ApiServer) -> Object:
    return server.create(NODES, {"metadata": {"name": NODE}})


# --- publishing ------------------------------------------------------------------------------------------------------


async def test_the_devices_are_published_and_then_the_condition_holds(api_server: ApiServer, tmp_path: Path) -> None:
    node_uid = add_node(api_server)["metadata"]["uid"]

    async with publishing(api_server, tmp_path, FakeModel(300)) as node:
        assert node.health.missing() == {"slices": "not published yet"}
        await node.health.until_ok()

        assert node.device_names == [f"cpudev{number:03}" for number in range(300)]
        assert [item["metadata"]["name"][:-5] for item in node.slices] == [
            f"0000{index}-dra.cpu-{NODE}-" for index in range(3)
        ]
        owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": node_uid, "controller": True}
        assert [item["metadata"]["ownerReferences"] for item in node.slices] == [[owner]] * 3
        assert node.generations == {1}
        assert (node.counts.published, dict(node.counts.writes)) == ((3, 300), {"create": 3})
        assert node.counts.repairs == 0


async def test_a_node_without_devices_says_that_the_driver_is_up(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)

    async with publishing(api_server, tmp_path, FakeModel(0)) as node:
        await node.health.until_ok()
        assert len(node.slices) == 1


async def test_the_slices_stay_when_the_publisher_ends_and_a_new_one_leaves_them_alone(
    api_server: ApiServer, tmp_path: Path
) -> None:
    add_node(api_server)
    async with publishing(api_server, tmp_path, FakeModel(300)) as node:
        await node.health.until_ok()
        before = node.slices
    assert node.slices == before

    async with publishing(api_server, tmp_path, FakeModel(300)) as node:
        await node.health.until_ok()
        assert node.slices == before
        assert not node.counts.writes


async def test_a_cancelled_publisher_leaves_no_task_behind(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)
    before = asyncio.all_tasks()

    async with publishing(api_server, tmp_path, FakeModel(1)) as node:
        await node.health.until_ok()

    assert {task for task in asyncio.all_tasks() - before if "slices" in task.get_name()} == set()


async def test_other_devices_are_published_at_once(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)
    patient = Pace(repair_s=60, contested_s=60, retry_s=60)

    async with publishing(api_server, tmp_path, FakeModel(3), patient) as node:
        await node.health.until_ok()
        node.publisher.publish(FakeModel(130))
        await node.health.until(lambda: node.counts.published == (2, 130))
        node.publisher.publish(FakeModel(2))
        await node.health.until(lambda: node.counts.published == (1, 2))

        assert node.device_names == ["cpudev000", "cpudev001"]
        assert node.generations == {2}
        assert node.counts.repairs == 0


async def test_devices_that_change_while_they_are_written_are_published_in_the_end(
    api_server: ApiServer, tmp_path: Path
) -> None:
    add_node(api_server)
    node: Node

    def fault(method: str, path: str) -> None:
        if method == "POST":
            api_server.fault = None
            node.publisher.publish(FakeModel(2, cpus=8))

    api_server.fault = fault
    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await node.health.until_ok()

        (only,) = node.slices
        assert [device["attributes"]["dra.cpu/numCPUs"]["int"] for device in only["spec"]["devices"]] == [8, 8]
        assert node.counts.repairs == 0


async def test_the_publisher_waits_for_its_node(
    api_server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with publishing(api_server, tmp_path, FakeModel(1)) as node:
        await node.health.until_missing("node 'node-7' does not exist yet")
        await node.health.until(lambda: node.counts.syncs["error"] >= 4)
        assert node.slices == []
        add_node(api_server)
        await node.health.until_ok()

    assert len([r for r in caplog.records if r.levelno == logging.WARNING and "trying again" in r.message]) == 1


# --- what others do --------------------------------------------------------------------------------------------------


async def test_slices_that_the_kubelet_wiped_are_back_within_five_seconds_in_one_go(
    api_server: ApiServer, tmp_path: Path
) -> None:
    add_node(api_server)

    async with publishing(api_server, tmp_path, FakeModel(300), Pace()) as node:
        await node.health.until_ok()
        for repairs in (1, 2):
            started = time.monotonic()
            await node.wipe()
            await node.health.until_missing("somebody else deleted or changed them")
            await node.health.until_ok()
            assert time.monotonic() - started < 5
            assert node.device_names == [f"cpudev{number:03}" for number in range(300)]
            assert (node.counts.repairs, node.counts.writes["create"]) == (repairs, 3 + 3 * repairs)


async def test_a_slice_that_is_deleted_alone_is_back_in_a_new_generation(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)

    async with publishing(api_server, tmp_path, FakeModel(300)) as node:
        await node.health.until_ok()
        api_server.delete(RESOURCE_SLICES, node.slices[1]["metadata"]["name"])
        await node.health.until_missing()
        await node.health.until_ok()

        assert node.device_names == [f"cpudev{number:03}" for number in range(300)]
        assert node.generations == {2}


async def test_a_slice_that_somebody_changed_is_changed_back_and_keeps_their_labels(
    api_server: ApiServer, tmp_path: Path
) -> None:
    add_node(api_server)

    async with publishing(api_server, tmp_path, FakeModel(3)) as node:
        await node.health.until_ok()
        (changed,) = node.slices
        changed["spec"]["devices"].pop()
        changed["metadata"]["labels"] = {"team": "hpc"}
        api_server.put(RESOURCE_SLICES, changed)
        await node.health.until_missing()
        await node.health.until_ok()

        (only,) = node.slices
        assert len(only["spec"]["devices"]) == 3
        assert only["metadata"]["labels"] == {"team": "hpc"}
        assert only["metadata"]["name"] == changed["metadata"]["name"]
        assert dict(node.counts.writes) == {"create": 1, "update": 1}


async def test_a_label_alone_is_nobodys_business(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)

    async with publishing(api_server, tmp_path, FakeModel(3)) as node:
        await node.health.until_ok()
        (changed,) = node.slices
        changed["metadata"]["labels"] = {"team": "hpc"}
        api_server.put(RESOURCE_SLICES, changed)
        await node.look_again()

        assert dict(node.counts.writes) == {"create": 1}
        assert node.counts.repairs == 0


async def test_slices_of_another_driver_with_our_name_are_taken_over(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)
    left = []
    for number, (pool, generation) in enumerate([(NODE, 3), (NODE, 7), ("elsewhere", 1)]):
        body = {
            "metadata": {"name": f"{NODE}-dra.cpu-{number}"},
            "spec": {
                "driver": "dra.cpu",
                "nodeName": NODE,
                "pool": {"name": pool, "generation": generation, "resourceSliceCount": 1},
                "devices": [{"name": "cpudevnuma000"}],
            },
        }
        left.append(api_server.create(RESOURCE_SLICES, body))
    foreign = copy.deepcopy(body)
    foreign["metadata"] = {"name": "gpus"}
    foreign["spec"] |= {"driver": "gpu.example.com"}
    foreign = api_server.create(RESOURCE_SLICES, foreign)

    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await node.health.until_ok()

        ours = [item for item in node.slices if item["spec"]["driver"] == "dra.cpu"]
        assert [item["spec"]["pool"] for item in ours] == [{"name": NODE, "generation": 8, "resourceSliceCount": 1}]
        assert foreign in node.slices
        assert dict(node.counts.writes) == {"delete": 3, "create": 1}


async def test_a_node_that_registers_again_owns_the_slices_that_follow(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)

    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await node.health.until_ok()
        api_server.delete(NODES, NODE)
        uid = add_node(api_server)["metadata"]["uid"]
        await node.wipe()
        await node.health.until_missing()
        await node.health.until_ok()

        assert [item["metadata"]["ownerReferences"][0]["uid"] for item in node.slices] == [uid]


async def test_against_another_writer_repairs_are_paced_and_it_is_said_once(
    api_server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_node(api_server)
    written: list[float] = []

    def fault(method: str, path: str) -> None:
        if method == "PUT":
            written.append(time.monotonic())

    api_server.fault = fault
    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await node.health.until_ok()

        async def compete() -> None:
            while True:
                (theirs,) = api_server.list(RESOURCE_SLICES)
                if len(theirs["spec"]["devices"]) == 2:
                    theirs["spec"]["devices"].pop()
                    with suppress(Exception):
                        api_server.registry.update(RESOURCE_SLICES, "", theirs["metadata"]["name"], theirs, "", "rival")
                await asyncio.sleep(0.001)

        rival = asyncio.create_task(compete())
        await node.health.until_missing("somebody else keeps deleting or changing them")
        await node.health.until(lambda: node.counts.repairs >= 7)
        rival.cancel()

        # It stays missing until nobody has interfered for a while; flapping would tell nothing.
        assert node.health.missing()
        await node.health.until_ok()
        assert len(node.device_names) == 2

    gaps = [later - earlier for earlier, later in itertools.pairwise(written)]
    assert min(gaps[FAST.patience :]) >= FAST.contested_s
    said = [record for record in caplog.records if record.message.startswith("somebody else keeps")]
    assert [record.__dict__["fields"]["writer"] for record in said] == ["rival"]
    assert caplog.text.count("condition does not hold any more") <= FAST.patience + 1


# --- what the server does --------------------------------------------------------------------------------------------


async def test_errors_are_tried_again_and_an_outage_is_one_line(
    api_server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_node(api_server)
    api_server.fault = lambda method, path: 500 if method == "POST" else None

    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await node.health.until_missing("answered 500")
        await node.health.until(lambda: node.counts.syncs["error"] >= 5)
        api_server.fault = None
        await node.health.until_ok()

        assert len(node.slices) == 1
    assert len([record for record in caplog.records if "trying again" in record.message]) == 1


@pytest.mark.parametrize("status", [403, 422, 429, 503])
@pytest.mark.parametrize("method", ["GET", "WATCH", "POST"])
async def test_every_refusal_is_survived(api_server: ApiServer, tmp_path: Path, method: str, status: int) -> None:
    add_node(api_server)
    api_server.fault = lambda asked, path: status if asked == method and "slices" in path else None

    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await node.health.until_missing(f"answered {status}")
        api_server.fault = None
        await node.health.until(lambda: not node.health.missing() and node.counts.syncs["success"] >= 1)
        assert len(node.slices) == 1


async def test_a_server_that_was_away_is_used_again_and_its_slices_repaired(
    api_server: ApiServer, tmp_path: Path
) -> None:
    add_node(api_server)

    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await node.health.until_ok()
        await api_server.stop()
        await node.health.until_missing("the API server")
        await node.health.until(lambda: node.counts.syncs["error"] >= 3)
        api_server.delete(RESOURCE_SLICES, node.slices[0]["metadata"]["name"])
        await api_server.start()
        await node.health.until_ok()

        assert len(node.slices) == 1


async def test_a_server_that_is_away_at_the_start_is_waited_for(tmp_path: Path) -> None:
    server = ApiServer()
    await server.start()
    await server.stop()

    async with publishing(server, tmp_path, FakeModel(2)) as node:
        await node.health.until_missing("the API server")
        await server.start()
        add_node(server)
        await node.health.until_ok()
    await server.stop()


async def test_a_history_that_is_gone_is_not_an_error(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)
    asked = Counter[str]()

    def fault(method: str, path: str) -> int | None:
        asked[method] += 1
        return 410 if method == "WATCH" and asked["WATCH"] < 4 else None

    api_server.fault = fault
    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await eventually(lambda: asked["WATCH"] >= 4)
        await node.health.until_ok()

        assert len(node.slices) == 1
        assert node.counts.syncs["error"] == 0


async def test_a_conflict_is_resolved_by_looking_again(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)
    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await node.health.until_ok()

        def fault(method: str, path: str) -> None:
            if method == "PUT":
                api_server.fault = None
                (stored,) = api_server.list(RESOURCE_SLICES)
                stored["metadata"]["labels"] = {"a": "b"}
                api_server.put(RESOURCE_SLICES, stored)

        api_server.fault = fault
        node.publisher.publish(FakeModel(3))
        await node.health.until(lambda: node.counts.published == (1, 3) and not node.health.missing())

        (only,) = node.slices
        assert len(only["spec"]["devices"]) == 3
        assert only["metadata"]["labels"] == {"a": "b"}
        assert node.counts.syncs["error"] == 0


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_a_slice_that_vanishes_before_it_is_written_is_no_error(
    api_server: ApiServer, tmp_path: Path, method: str
) -> None:
    add_node(api_server)
    async with publishing(api_server, tmp_path, FakeModel(130)) as node:
        await node.health.until_ok()

        def fault(asked: str, path: str) -> None:
            if asked == method:
                api_server.fault = None
                api_server.delete(RESOURCE_SLICES, path.rpartition("/")[2])

        api_server.fault = fault
        node.publisher.publish(FakeModel(3))
        await node.health.until(lambda: node.counts.published == (1, 3) and not node.health.missing())

        assert len(node.slices) == 1
        assert len(node.device_names) == 3
        assert node.counts.syncs["error"] == 0


async def test_a_write_whose_answer_is_lost_is_not_repeated(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)

    class Deaf(Cluster):
        async def create_slice(self, body: Mapping[str, Any]) -> Object:
            stored = await super().create_slice(body)
            if api_server.fault is None:
                api_server.fault = lambda method, path: None
                raise ApiError(0, "the answer got lost")
            return stored

    async with publishing(api_server, tmp_path, FakeModel(2), client=Deaf) as node:
        await node.health.until_ok()

        assert len(node.slices) == 1
        assert node.counts.writes["create"] == 0


async def test_a_slow_watch_makes_no_duplicates(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)
    released = asyncio.Event()

    class Slow(Cluster):
        async def watch_slices(self, node: str, resource_version: str) -> AsyncGenerator[tuple[str, Object], None]:
            async for event in super().watch_slices(node, resource_version):
                await released.wait()
                yield event

    async with publishing(api_server, tmp_path, FakeModel(130), client=Slow) as node:
        await node.health.until_ok()
        for cpus in (5, 6, 7):
            node.publisher.publish(FakeModel(130, cpus=cpus))
            await node.health.until_missing()
            await node.health.until_ok()
        # All events of the past arrive now, each older than what is known.
        released.set()
        await node.look_again()

        assert len(node.slices) == 2
        assert dict(node.counts.writes) == {"create": 2, "update": 6}
        assert node.counts.repairs == 0


async def test_writes_are_never_in_parallel(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)
    writing, most = 0, 0

    class Counting(Cluster):
        async def _call(self, method: str, path: str, **more: Any) -> Object:
            nonlocal writing, most
            writing += method != "GET"
            most = max(most, writing)
            try:
                return await super()._call(method, path, **more)
            finally:
                writing -= method != "GET"

    async with publishing(api_server, tmp_path, FakeModel(300), client=Counting) as node:
        for count in (300, 1, 200):
            node.publisher.publish(FakeModel(count))
            api_server.cut_connections()
            await node.wipe()
        await node.health.until(lambda: node.counts.published == (2, 200) and not node.health.missing())

    assert most == 1


# --- what the server does not take -----------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture, words: str) -> list[Object]:
    return [
        record.__dict__["fields"]
        for record in caplog.records
        if record.levelno == logging.WARNING and words in record.message
    ]


async def test_a_field_that_the_server_drops_is_named_once_and_not_fought_over(
    api_server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_node(api_server)

    async with publishing(api_server, tmp_path, FakeModel(300, mapped=True)) as node:
        await node.health.until_ok()
        await node.look_again()
        assert dict(node.counts.writes) == {"create": 3}
        assert "nodeAllocatableResources" not in node.slices[0]["spec"]["devices"][0]

        await node.wipe()
        await node.health.until_missing()
        await node.health.until_ok()
        assert dict(node.counts.writes) == {"create": 6}
        assert node.counts.repairs == 1

    named = warnings(caplog, "does not store a field as it was sent")
    assert [fields["field"] for fields in named] == ["spec.devices[].nodeAllocatableResources"]


async def test_what_the_server_adds_is_not_fought_over_but_what_others_change_is_changed_back(
    api_server: ApiServer, tmp_path: Path
) -> None:
    add_node(api_server)

    class Mutating(Cluster):
        """As if a webhook gave every device an attribute."""

        async def create_slice(self, body: Mapping[str, Any]) -> Object:
            return await super().create_slice(self._mutated(body))

        async def replace_slice(self, body: Mapping[str, Any]) -> Object:
            return await super().replace_slice(self._mutated(body))

        def _mutated(self, body: Mapping[str, Any]) -> Object:
            mutated = copy.deepcopy(dict(body))
            for device in mutated["spec"]["devices"]:
                device["attributes"]["example.com/rack"] = {"string": "r1"}
            return mutated

    async with publishing(api_server, tmp_path, FakeModel(2), client=Mutating) as node:
        await node.health.until_ok()
        await node.look_again()
        assert dict(node.counts.writes) == {"create": 1}

        (stored,) = node.slices
        del stored["spec"]["devices"][0]["attributes"]["dra.cpu/numCPUs"]
        api_server.put(RESOURCE_SLICES, stored)
        await node.health.until_missing()
        await node.health.until_ok()
        assert dict(node.counts.writes) == {"create": 1, "update": 1}
        assert set(node.slices[0]["spec"]["devices"][0]["attributes"]) == {"dra.cpu/numCPUs", "example.com/rack"}


async def test_a_server_that_refuses_lists_gets_the_devices_without_and_one_warning_is_given(
    api_server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_node(api_server)

    async with publishing(api_server, tmp_path, FakeModel(130, lists=True)) as node:
        await node.health.until_ok()
        assert [len(item["spec"]["devices"]) for item in node.slices] == [128, 2]
        assert set(node.slices[0]["spec"]["devices"][0]["attributes"]) == {"dra.cpu/numCPUs"}
        await node.wipe()
        await node.health.until_missing()
        await node.health.until_ok()
        assert node.counts.syncs["error"] == 0

    (warning,) = warnings(caplog, "refuses a slice")
    assert warning["left_out"] == "list attributes such as pcieRoot"
    assert "422" in str(warning["reason"])


async def test_a_server_that_takes_lists_gets_them_in_smaller_slices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ApiServer(gates=["DRAListTypeAttributes"]) as server:
        add_node(server)
        async with publishing(server, tmp_path, FakeModel(130, lists=True)) as node:
            await node.health.until_ok()
            assert [len(item["spec"]["devices"]) for item in node.slices] == [64, 64, 2]
            assert "resource.kubernetes.io/pcieRoot" in node.slices[0]["spec"]["devices"][0]["attributes"]
    assert not warnings(caplog, "")


async def test_a_mapping_that_is_refused_is_left_out_and_offered_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pace = Pace(retry_s=0.01, repair_s=0.02, unreachable_s=0.05, offer_s=0.0)
    older_kubelet = {"metadata": {"name": NODE}, "status": {"declaredFeatures": ["SomethingElse"]}}
    async with ApiServer(gates=["DRANodeAllocatableResources"]) as server:
        registered = server.create(NODES, older_kubelet)
        async with publishing(server, tmp_path, FakeModel(2, mapped=True), pace) as node:
            await node.health.until_ok()
            assert "nodeAllocatableResources" not in node.slices[0]["spec"]["devices"][0]
            await node.look_again()
            assert dict(node.counts.writes) == {"create": 1}

            registered["status"]["declaredFeatures"] = ["DRANodeAllocatableResources"]
            server.put(NODES, registered)
            await node.look_again()
            assert dict(node.counts.writes) == {"create": 1, "update": 1}
            assert "nodeAllocatableResources" in node.slices[0]["spec"]["devices"][0]

    assert [warning["left_out"] for warning in warnings(caplog, "refuses a slice")] == ["nodeAllocatableResources"]


async def test_a_refusal_that_has_another_cause_stays_an_error(api_server: ApiServer, tmp_path: Path) -> None:
    add_node(api_server)
    invalid = FakeModel(2, lists=True)
    invalid.devices[1].name = "Not A Device Name"

    async with publishing(api_server, tmp_path, invalid) as node:
        await node.health.until_missing("answered 422")
        node.publisher.publish(FakeModel(2))
        await node.health.until_ok()


async def test_hanging_answers_do_not_stop_the_publisher(
    api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver.cluster._CALL_TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    add_node(api_server)
    api_server.fault = lambda method, path: Fault(hang=True) if method == "POST" else None

    async with publishing(api_server, tmp_path, FakeModel(2)) as node:
        await node.health.until_missing("no answer in time")
        api_server.fault = None
        await node.health.until_ok()
        assert len(node.slices) == 1


async def test_what_nobody_has_thought_of_ends_nothing(
    api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(api_server)
    answers = [[{"metadata": {"name": "a", "uid": "u", "resourceVersion": "1"}, "spec": "text"}]]

    class Odd(Cluster):
        async def list_slices(self, node: str) -> tuple[list[Object], str]:
            items, version = await super().list_slices(node)
            return (answers.pop() if answers else items), version

    async with publishing(api_server, tmp_path, FakeModel(3), client=Odd) as node:
        await node.health.until_ok()
        assert node.device_names == ["cpudev000", "cpudev001", "cpudev002"]
    assert answers == []
