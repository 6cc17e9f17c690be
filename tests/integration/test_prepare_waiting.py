# SPDX-License-Identifier: Apache-2.0
"""What a prepare waits for, because the kubelet repeats a failed one only after a minute or more.

Through the gRPC socket of a real driver, with its real ten seconds: everything that uses them up does so at the same
time, in one test.
"""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
import pytest_asyncio

from driver.sandbox.endpoints import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started_node(open_node):
    async with open_node() as node:
        await node.start({"reservedCPUs": "0,32"})
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def node(started_node):
    yield started_node
    started_node.box.api.fault = None
    await started_node.release_all()


async def waits(node, uid):
    """Wait until the driver says that a claim waits for CPUs."""
    await node.until(lambda: any(line["msg"] == "waiting for CPUs" and line["uid"] == uid for line in node.log()))


async def test_cpus_that_are_let_go_within_the_wait(node):
    first, second, third = node.add("2-5"), node.add("5-6"), node.add("7")
    assert await node.errors(first) == [""]
    waiting = asyncio.create_task(node.errors(second, third))
    await waits(node, second.uid)
    # The other claim of the same call has its CPUs by now; only the answer has to wait.
    await node.until(lambda: node.recorded() == {first.uid: "2-5", third.uid: "7"})
    assert not waiting.done()
    assert await node.unprepare(first) == [""]
    assert await waiting == ["", ""]
    assert await node.agreed() == {second.uid: "5-6", third.uid: "7"}


async def test_cpus_of_two_claims_that_are_let_go_one_after_the_other(node):
    holders = [node.add("2-3"), node.add("4-5")]
    assert await node.errors(*holders) == ["", ""]
    wanting = node.add("3-4")
    waiting = asyncio.create_task(node.errors(wanting))
    await waits(node, wanting.uid)
    assert await node.unprepare(holders[0]) == [""]
    assert not waiting.done()
    assert await node.unprepare(holders[1]) == [""]
    assert await waiting == [""]


async def test_one_of_several_that_wait_gets_the_cpus_and_the_others_wait_on(node):
    holder = node.add("2-5")
    assert await node.errors(holder) == [""]
    claims = [node.add("2-5") for _ in range(4)]
    tasks = {claim.uid: asyncio.create_task(node.errors(claim)) for claim in claims}
    for claim in claims:
        await waits(node, claim.uid)
    order = []
    while tasks:
        assert await node.unprepare(holder) == [""]
        done, _ = await asyncio.wait(tasks.values(), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        [uid] = [uid for uid, task in tasks.items() if task in done]
        assert tasks.pop(uid).result() == [""]
        assert await node.agreed() == {uid: "2-5"}
        holder = next(claim for claim in claims if claim.uid == uid)
        order.append(uid)
    assert sorted(order) == sorted(claim.uid for claim in claims)


async def test_an_api_server_that_is_away_for_a_moment(node):
    claims = [node.add("2-5"), node.add("6-7")]
    await node.box.api.stop()
    waiting = asyncio.create_task(node.errors(*claims))
    await asyncio.sleep(1.5)  # how long it is away
    assert not waiting.done()
    await node.box.api.start()
    assert await waiting == ["", ""]
    assert await node.agreed() == {claims[0].uid: "2-5", claims[1].uid: "6-7"}


@pytest.mark.parametrize("fault", [500, 503, 429, 403, Fault(reset=True)], ids=str)
async def test_failures_of_the_api_server_that_pass(node, fault):
    claim = node.add("2-5")
    faults = [fault, fault]
    node.box.api.fault = lambda method, path: faults.pop() if faults and path.endswith(claim.name) else None
    assert await node.errors(claim) == [""]
    assert faults == []


async def test_a_failure_of_the_api_server_that_lasts_is_not_waited_for(node):
    claim = node.add("2-5")
    node.box.api.fault = lambda method, path: 400 if path.endswith(claim.name) else None
    [error] = await node.errors(claim)
    assert "cannot read the claim: " in error
    assert "400" in error
    assert len([path for _, path in node.box.api.requests if path.endswith(claim.name)]) == 1


async def test_what_does_not_pass_within_ten_seconds(node):
    one, two = node.add("2-5"), node.add("8-9", device="cpudevnuma001")
    assert await node.errors(one, two) == ["", ""]
    await asyncio.gather(node.status_of(one), node.status_of(two))
    inside = node.add("5-6")
    across = node.add(
        results=[node.result("2", request="a"), node.result("3", "cpudevnuma001", "b")],
        configs=[node.config("1-2", "a"), node.config("9-11", "b")],
    )
    across_groups = node.add("4,8", results=[node.result("1"), node.result("1", "cpudevnuma001")])
    unread, unanswered, unbroken = node.add("33"), node.add("34"), node.add("35")
    faults = {unread.name: 503, unanswered.name: Fault(reset=True)}
    node.box.api.fault = lambda method, path: faults.get(path.rpartition("/")[2])

    started = time.monotonic()
    errors, repeated = await asyncio.gather(
        node.errors(inside, across, across_groups, unread, unanswered, unbroken),
        # The same claims again, meanwhile: this waits no longer than the first.
        node.errors(inside, unread),
    )
    assert time.monotonic() - started >= 9
    assert repeated == [errors[0], errors[3]]
    assert f'request "cpus", cpuset 5-6: CPU 5 is held by claim {one.uid}' in errors[0]
    assert "cpudevnuma000 has CPUs 1-7,33-39" in errors[0]
    assert f'request "a", cpuset 1-2: CPU 2 is held by claim {one.uid}' in errors[1]
    assert f"CPU 4 is held by claim {one.uid}; CPU 8 is held by claim {two.uid}" in errors[2]
    assert "cannot read the claim for 10 s: " in errors[3]
    assert "503" in errors[3]
    assert "cannot read the claim for 10 s: " in errors[4]
    assert errors[5] == ""
    assert await node.agreed() == {one.uid: "2-5", two.uid: "8-9", unbroken.uid: "35"}
    # The kubelet asks again later, and by then all is well.
    node.box.api.fault = None
    assert await node.unprepare(one) == [""]
    assert await node.errors(inside, unread, unanswered) == ["", "", ""]


async def test_a_kubelet_that_hangs_up_while_a_prepare_waits(node):
    holder, claim = node.add("2-5"), node.add("5")
    assert await node.errors(holder) == [""]
    connection = await node.connect()
    waiting = asyncio.create_task(connection.prepare([(claim.namespace, claim.uid, claim.name)]))
    await waits(node, claim.uid)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(60):
        while not (await node.metrics())['prepare_claims_total{result="unknown"}']:
            pass
    assert await node.unprepare(holder) == [""]
    # Nobody waits for them any more.
    assert await node.agreed() == {}


async def test_a_prepare_that_waits_is_answered_when_the_driver_stops(open_node):
    async with open_node() as node:
        await node.start({"reservedCPUs": "0,32"})
        holder = node.add("2-5")
        assert await node.errors(holder) == [""]
        wanting, unread = node.add("5-6"), node.add("7")
        node.box.api.fault = lambda method, path: 503 if path.endswith(unread.name) else None
        waiting = asyncio.create_task(node.errors(wanting, unread))
        await waits(node, wanting.uid)
        await node.until(lambda: any(line["msg"] == "cannot read the claim yet" for line in node.log()))
        node.process.send_signal(signal.SIGTERM)
        # Without it both would be cut off at the end of the driver's patience, with an error of the call as a whole.
        errors = await waiting
        assert "the driver is stopping, and cannot wait any longer: " in errors[0]
        assert f"held by claim {holder.uid}" in errors[0]
        assert "the driver is stopping, and cannot wait any longer: " in errors[1]
        assert "503" in errors[1]
        assert await node.process.wait() == 0
        assert node.recorded() == {holder.uid: "2-5"}
