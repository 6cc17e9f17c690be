# SPDX-License-Identifier: Apache-2.0
"""Which claims are released because nobody will unprepare them any more, and when that is looked at."""

from __future__ import annotations

import asyncio

import pytest

from driver import orphans
from driver.errors import ApiError
from driver.metrics import Metrics
from driver.orphans import Orphans
from driver.runtime import NoRuntime


class Runtime(NoRuntime):
    """Containers are known when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._known = False

    @property
    def known(self) -> bool:
        return self._known

    def become_known(self) -> None:
        self._known = True
        self.changed.set()


@pytest.fixture
def looker(node) -> Orphans:
    node.runtime = Runtime()
    return Orphans(
        claims=node.claims,
        preparer=node.preparer,
        ledger=node.ledger,
        runtime=node.runtime,
        pool_name="node-1",
        metrics=Metrics(),
    )


def claim(node) -> dict[str, object]:
    return node.claims.objects["default", "claim-a"]


def remove(node) -> None:
    del node.claims.objects["default", "claim-a"]


def replace_uid(node) -> None:
    claim(node)["metadata"]["uid"] = "another"


def deallocate(node) -> None:
    del claim(node)["status"]["allocation"]


def drop_status(node) -> None:
    claim(node)["status"] = None


def move(node) -> None:
    claim(node)["status"]["allocation"]["devices"]["results"][0]["pool"] = "node-2"


def give_to_another_driver(node) -> None:
    claim(node)["status"]["allocation"]["devices"]["results"][0]["driver"] = "gpu.example.com"


def nothing(node) -> None:
    pass


def add_another_nodes_result(node) -> None:
    results = claim(node)["status"]["allocation"]["devices"]["results"]
    results.insert(0, {**results[0], "pool": "node-2"})


def fail(node) -> None:
    node.claims.failures.append(ApiError(503, "busy"))


def answer_for_something_else(node) -> None:
    node.claims.failures.append(ApiError(404, "default backend - 404"))


def answer_nonsense(node) -> None:
    node.claims.objects["default", "claim-a"] = {"metadata": []}


@pytest.mark.parametrize("orphan", [remove, replace_uid, deallocate, drop_status, move, give_to_another_driver])
async def test_an_orphan_is_released(node, looker, orphan):
    await node.prepare(node.claims.add("a", "2-5"))
    orphan(node)
    await looker.look()
    assert node.agreed() == {}


@pytest.mark.parametrize(
    "wanted", [nothing, add_another_nodes_result, fail, answer_for_something_else, answer_nonsense]
)
async def test_what_is_no_orphan_for_sure_is_not_released(node, looker, wanted):
    await node.prepare(node.claims.add("a", "2-5"))
    wanted(node)
    await looker.look()
    assert node.agreed() == {"a": "2-5"}


async def test_an_adopted_claim_cannot_be_looked_for(node, looker, make_record):
    node.ledger.hold(make_record("a", "2-5", adopted=True, name="", namespace=""))
    await looker.look()
    assert node.held() == {"a": "2-5"}
    assert node.claims.gets == []


async def test_a_claim_that_cannot_be_released_does_not_keep_the_others(node, looker, disk, caplog):
    for uid, cpuset in (("a", "2"), ("b", "3")):
        await node.prepare(node.claims.add(uid, cpuset))
    node.claims.objects.clear()
    disk.fail("unlink", "claim-a", 5)
    await looker.look()
    assert node.held() == {"a": "2"}
    assert any("cannot be released" in line.message for line in caplog.records)


async def test_it_is_looked_when_the_containers_are_known_and_again_after_a_while(node, looker, until, monkeypatch):
    monkeypatch.setattr(orphans, "_FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(orphans, "_LOOK_AGAIN_S", 0.01)
    await node.prepare(node.claims.add("a", "2-5"))
    remove(node)
    looking = asyncio.create_task(looker.run())
    await asyncio.sleep(0.05)
    assert node.agreed() == {"a": "2-5"}
    node.runtime.become_known()
    await until(lambda: not node.held())
    await node.prepare(node.claims.add("a", "2-5"))
    remove(node)
    await until(lambda: not node.held())
    looking.cancel()
    await asyncio.wait([looking])
