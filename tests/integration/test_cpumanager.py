# SPDX-License-Identifier: Apache-2.0
"""The driver's own choice through the gRPC socket of a real driver: what claims get, rules, restarts, many at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest
import pytest_asyncio

from fastcpu import CpuSet, read_topology

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {"allocator": "cpumanager", "reservedCPUs": "0,32"}


def placement(*requests, source="FromClaim", **choices):
    """Return an entry of configuration that wishes for a placement."""
    parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"placement": choices}}
    entry = {"source": source, "opaque": {"driver": "dra.cpu", "parameters": parameters}}
    return {**entry, "requests": list(requests)} if requests else entry


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started_node(open_node):
    async with open_node() as node:
        await node.start(SETTINGS)
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def node(started_node):
    """A node with 8 cores of two threads in each NUMA node: node 0 has CPUs 0-7,32-39, of which 0,32 are reserved."""
    yield started_node
    await started_node.release_all()


def add(node, *results, configs=(), **more):
    """Add a claim with these results: the number of CPUs, and perhaps device and request."""
    return node.add(results=[node.result(str(cpus), *rest) for cpus, *rest in results], configs=list(configs), **more)


# What claims get.


async def test_a_claim_gets_as_many_cpus_as_it_consumes(node):
    claim = add(node, (4,))
    [answer] = await node.prepare(claim)
    assert [(device.device, device.request_names) for device in answer.devices] == [("cpudevnuma000", ("cpus",))]
    assert answer.devices[0].share_id is not None
    assert await node.agreed() == {claim.uid: "1-2,33-34"}
    [status] = await node.status_of(claim)
    assert status["data"] == {"cpuset": "1-2,33-34"}
    [path] = node.metadata_dir.glob("*_cpus.json")
    document, _ = json.JSONDecoder().raw_decode(path.read_text())
    assert document["requests"][0]["devices"][0]["attributes"]["dra.cpu/allocatedNumCPUs"] == {"int": 4}


async def test_the_claims_of_a_call_share_nothing(node):
    claims = [add(node, (size,)) for size in (3, 5, 1, 4)]
    assert await node.errors(*claims) == [""] * 4
    held = {uid: CpuSet.parse(cpus) for uid, cpus in (await node.agreed()).items()}
    assert [len(held[claim.uid]) for claim in claims] == [3, 5, 1, 4]
    assert len(CpuSet().union(*held.values())) == 13


async def test_one_claim_of_a_call_that_fails_fails_alone(node):
    claims = [add(node, (4,)), add(node, (15,)), add(node, (4,), configs=[node.config("2-5")]), add(node, (2,))]
    errors = await node.errors(*claims)
    assert [bool(error) for error in errors] == [False, True, True, False]
    assert set(await node.agreed()) == {claims[0].uid, claims[3].uid}


async def test_a_claim_with_several_results_gets_all_or_nothing(node):
    results = [(2, "cpudevnuma001", "a"), (6, "cpudevnuma002", "b"), (2, "cpudevnuma001", "c/big")]
    claim = add(node, *results)
    [answer] = await node.prepare(claim)
    assert [device.request_names for device in answer.devices] == [("a",), ("b",), ("c",)]
    assert await node.agreed() == {claim.uid: "8-9,16-18,40-41,48-50"}
    status = await node.status_of(claim)
    assert [entry["data"]["cpuset"] for entry in status] == ["8,40", "16-18,48-50", "9,41"]

    greedy = add(node, (2, "cpudevnuma003", "a"), (17, "cpudevnuma001", "b"))
    [error] = await node.errors(greedy)
    assert "device cpudevnuma001: 17 CPUs wanted, but it has only 16" in error
    assert set(await node.agreed()) == {claim.uid}


async def test_the_same_state_and_request_give_the_same_cpus(node):
    picked = []
    for order in itertools.permutations(
        [(3, "cpudevnuma000", "a"), (2, "cpudevnuma001", "b"), (5, "cpudevnuma000", "c")]
    ):
        before, claim = add(node, (3,)), add(node, *order)
        assert await node.errors(before) == await node.errors(claim) == [""]
        picked.append((await node.agreed())[claim.uid])
        await node.unprepare(before, claim)
    assert len(set(picked)) == 1


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ([], "1,33"),
        ([placement(spread="cores", source="FromClass")], "1-2"),
        ([placement(spread="cores", source="FromClass"), placement("cpus", spread="none")], "1,33"),
        ([placement("cpus", spread="none"), placement(spread="cores", source="FromClass")], "1,33"),
        ([placement(SPREAD="cores")], "1-2"),
    ],
)
async def test_wishes_of_class_and_claim(node, configs, expected):
    claim = add(node, (2,), configs=configs)
    assert await node.errors(claim) == [""]
    assert await node.agreed() == {claim.uid: expected}


# The rules.


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"configs": "cpuset"}, "the claim gives it the cpuset '1,33', but on this node the driver itself chooses"),
        ({"configs": "class cpuset"}, "a DeviceClass gives it the cpuset '1,33', but on this node the driver itself"),
        ({"configs": [placement(spread="wide")]}, "placement.spread 'wide' is unknown; expected none or cores"),
        ({"configs": [placement(sprawl="x", source="FromClass")]}, "configured by a DeviceClass: cpuConfig.placement"),
        ({"configs": [placement(fullCores="require")], "cpus": "3"}, "2 or 4 CPUs would fit"),
        ({"configs": [placement(coreType="p-core")]}, "2 CPUs of p-cores wanted, but it has only 0"),
        ({"cpus": "15"}, "15 CPUs wanted, but it has only 14, 1-7,33-39"),
        ({"cpus": "1500m"}, "consumedCapacity"),
        ({"cpus": "0"}, "consumedCapacity"),
        ({"consumedCapacity": None}, 'consumedCapacity["dra.cpu/cpu"] is missing'),
        ({"device": "cpudevnuma004"}, "no such device on this node, where groupBy: numanode publishes cpudevnuma000"),
        ({"pool": "elsewhere"}, 'its pool is "elsewhere"; expected "test-node"'),
        ({"adminAccess": True}, "offers no administrator's access"),
    ],
)
async def test_what_is_wrong_is_refused_at_once(node, change, expected):
    change = dict(change)
    configs = change.pop("configs", [])
    if isinstance(configs, str):
        configs = [node.config("1,33", source="FromClass" if "class" in configs else "FromClaim")]
    result = node.result(**{"cpus": "2", **change})
    claim = node.add(results=[result], configs=configs, raw=True)
    [error] = await node.errors(claim)
    assert expected in error
    assert not any(line["msg"] == "waiting for CPUs" for line in node.log())
    assert await node.agreed() == {}


async def test_cpus_that_become_free_are_waited_for(node):
    first, second = add(node, (10,)), add(node, (8,))
    assert await node.errors(first) == [""]
    waiting = asyncio.create_task(node.errors(second))
    async with asyncio.timeout(60):
        while not any(line["msg"] == "waiting for CPUs" for line in node.log()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await node.unprepare(first) == [""]
    assert await waiting == [""]
    assert set(await node.agreed()) == {second.uid}


async def test_a_claim_that_waits_in_vain_is_told_who_holds_the_cpus(node):
    first, second = add(node, (10,)), add(node, (8,))
    assert await node.errors(first) == [""]
    [error] = await node.errors(second)
    cpus = (await node.agreed())[first.uid]
    assert error == (
        'request "cpus", device cpudevnuma000: 8 CPUs wanted, but only 4 of its 14 are free; '
        f"CPUs {cpus} are held by claim {first.uid}"
    )
    assert set(await node.agreed()) == {first.uid}


async def test_a_prepared_claim_is_never_placed_again(node):
    lower, claim = add(node, (2,)), add(node, (2,))
    assert await node.errors(lower) == await node.errors(claim) == [""]
    held = (await node.agreed())[claim.uid]
    await node.unprepare(lower)
    assert await node.errors(claim) == [""]
    assert await node.agreed() == {claim.uid: held}
    node.change(claim, results=[node.result("4")])
    [error] = await node.errors(claim)
    assert error.startswith(f"the claim is prepared with CPUs {held} for another allocation than it has now")
    node.change(claim, results=node.claim(lower)["status"]["allocation"]["devices"]["results"])
    assert "for another allocation" in (await node.errors(claim))[0]


async def test_another_wish_is_another_allocation(node):
    claim = add(node, (2,))
    assert await node.errors(claim) == [""]
    node.change(claim, config=[placement(spread="cores")])
    assert "for another allocation than it has now" in (await node.errors(claim))[0]


async def test_many_claims_at_once_never_share_a_cpu(node):
    """Clients that know nothing of each other ask for more than there is, let go and ask again."""
    held, taken = {}, CpuSet()
    allowed = {
        f"cpudevnuma{row:03}": CpuSet.parse(cpus)
        for row, cpus in enumerate(("1-7,33-39", "8-15,40-47", "16-23,48-55", "24-31,56-63"))
    }

    async def use(number):
        nonlocal taken
        chance = random.Random(number)
        connection = await node.connect()
        for _ in range(25):
            results = [
                (chance.choice([1, 1, 2, 2, 3, 4, 6]), device, f"r{index}")
                for index, device in enumerate(chance.sample(sorted(allowed), chance.choice([1, 1, 2])))
            ]
            claim = add(node, *results)
            asked = [(claim.namespace, claim.uid, claim.name)]
            for _ in range(20):
                answer = (await connection.prepare(asked))[claim.uid]
                if not answer.error:
                    break
                assert "are free; " in answer.error
            assert not answer.error
            cpus = CpuSet.parse(json.loads(node.record_path(claim).read_bytes())["cpus"])
            assert {device: len(cpus & allowed[device]) for _, device, _ in results} == {
                device: size for size, device, _ in results
            }
            # No other claim that has been answered and not been asked back has any of them.
            assert cpus.isdisjoint(taken)
            held[claim.uid] = cpus
            taken |= cpus
            await asyncio.sleep(chance.random() / 50)
            taken -= held.pop(claim.uid)
            assert await connection.unprepare(asked) == {claim.uid: ""}

    await asyncio.gather(*(use(number) for number in range(8)))
    assert await node.agreed() == {}


# Restarts.


async def test_what_was_given_out_stays_so_whatever_the_configuration_says(open_node):
    async with open_node() as node:
        await node.start({**SETTINGS, "groupBy": "socket", "placement": {"numa": "distribute"}})
        claims = [add(node, (4, "cpudevsocket000")), add(node, (3, "cpudevsocket001"))]
        assert await node.errors(*claims) == ["", ""]
        held = await node.agreed()
        assert sorted(held.values()) == ["1,8,33,40", "16,24,48"]
        for settings in (
            {**SETTINGS, "groupBy": "socket"},
            {**SETTINGS, "groupBy": "l3cache", "reservedCPUs": "0-1,32-33"},
            {"allocator": "external", "groupBy": "machine"},
            {"cpuDeviceMode": "individual"},
        ):
            await node.restart(settings)
            assert await node.agreed() == held
            assert await node.errors(*claims) == ["", ""]
            assert await node.agreed() == held
        await node.restart({**SETTINGS, "groupBy": "numanode"})
        # Nobody else gets them.
        rest = [add(node, (size, f"cpudevnuma{row:03}")) for row, size in enumerate((12, 14, 14, 15))]
        assert await node.errors(*rest) == [""] * 4
        assert len(CpuSet().union(*map(CpuSet.parse, (await node.agreed()).values()))) == 62


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ("2,7,9,33", ""),
        ("2,7,33", "device cpudevnuma001: 1 CPU wanted, but of the CPUs that the claim holds already"),
        ("2,7,9,33,63", "CPU 63 is held by the claim already, but of none of its devices"),
    ],
)
async def test_a_spec_without_record_is_adopted_if_its_numbers_are_right(open_node, found, error):
    async with open_node() as node:
        claim = add(node, (3,), (1, "cpudevnuma001", "more"))
        edits = {"env": [f"DRA_CPUSET_{claim.uid}={found}"]}
        devices = [{"name": f"claim-{claim.uid}", "containerEdits": edits}]
        spec = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": devices}
        (node.cdi_dir / "dra.k8s.io-cpu.json").write_text(json.dumps(spec))
        await node.start({**SETTINGS, "placement": {"fullCores": "require"}})
        [answer] = await node.errors(claim)
        assert (error in answer) if error else (answer == "")
        assert await node.agreed() == {claim.uid: found}
        record = json.loads(node.record_path(claim).read_bytes())
        assert record["adopted"] is bool(error)
        if not error:
            assert record["requests"] == {"cpus": "2,7,33", "more": "9"}


async def test_a_driver_that_is_killed_at_any_time_forgets_nothing_and_gives_nothing_twice(open_node):
    async with open_node() as node:
        await node.start(SETTINGS)
        topology = read_topology(node.box.sysfs_root)
        chance = random.Random(5)
        claims = [add(node, (chance.choice([1, 2, 3]), f"cpudevnuma{row % 4:03}")) for row in range(20)]
        promised = {}
        for _ in range(5):
            work = asyncio.gather(*(node.prepare(claim) for claim in claims), return_exceptions=True)
            await asyncio.sleep(chance.random() / 10)
            await node.process.kill9()
            for claim, answer in zip(claims, await work, strict=True):
                if not isinstance(answer, BaseException) and not answer[0].error:
                    promised.setdefault(claim.uid, None)
            await node.start(SETTINGS)
            held = await node.agreed()
            for uid, cpus in held.items():
                assert promised.get(uid) in (None, cpus)
            assert promised.keys() <= held.keys()
            promised = dict(held)
            sets = [CpuSet.parse(cpus) for cpus in held.values()]
            assert sum(map(len, sets)) == len(CpuSet().union(*sets))
        assert await node.errors(*claims) == [""] * 20
        for claim in claims:
            cpus = CpuSet.parse((await node.agreed())[claim.uid])
            [result] = node.claim(claim)["status"]["allocation"]["devices"]["results"]
            assert len(cpus) == int(result["consumedCapacity"]["dra.cpu/cpu"])
            assert cpus <= topology.numa_nodes.cpuset(int(result["device"][-1])) - CpuSet([0, 32])


# Groupings.


@pytest.mark.parametrize(
    ("group_by", "device", "cpus", "expected"),
    [
        ("numanode", "cpudevnuma003", 4, "24-25,56-57"),
        ("socket", "cpudevsocket001", 18, "16-24,48-56"),
        ("socket", "cpudevsocket000", 15, "8-15,40-46"),
        ("l3cache", "cpudevl3cache002", 5, "16-18,48-49"),
    ],
)
async def test_each_grouping_is_placed_in_its_devices(open_node, group_by, device, cpus, expected):
    async with open_node() as node:
        await node.start({**SETTINGS, "groupBy": group_by})
        claim = add(node, (cpus, device))
        assert await node.errors(claim) == [""]
        assert await node.agreed() == {claim.uid: expected}


async def test_the_machine_cannot_be_one_device(open_node):
    async with open_node() as node:
        process = await node.start({**SETTINGS, "groupBy": "machine"}, wait=False)
        assert await process.wait() == 2
        assert "machine needs allocator: external in the configuration file" in process.log
