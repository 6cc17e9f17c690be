# SPDX-License-Identifier: Apache-2.0
"""What a claim is refused for, through the gRPC socket of a real driver: each fault with a message of its own.

One driver serves all cases. No refusal may leave a file behind, which is looked at after each, nor hold a CPU, which is
looked at after all of them, and none may disturb the claim that is held all the while.
"""

from __future__ import annotations

import json

import pytest
import pytest_asyncio

from driver.sandbox.kubelet import ClaimName

pytestmark = pytest.mark.asyncio(loop_scope="module")

OFFLINE = {"/sys/devices/system/cpu/online": "0-62"}
SETTINGS = {"groupBy": "numanode", "reservedCPUs": "0,32", "sysfsOverlay": OFFLINE}
HELD = "20-23"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(open_node):
    async with open_node() as node:
        await node.start(SETTINGS)
        node.holder = node.add(HELD, device="cpudevnuma002")
        assert await node.errors(node.holder) == [""]
        node.files_before = node.files()
        yield node
        assert await node.agreed() == {node.holder.uid: HELD}
        assert await node.errors(node.add("2-5"), node.add("1,33,6-7")) == ["", ""]


@pytest.fixture
def refused(node):
    """Prepare a claim that must be refused at once; return the message."""

    async def prepare(claim):
        [answer] = await node.prepare(claim)
        if not answer.error:
            await node.unprepare(claim)  # so that the other cases need not fail as well
        assert answer.error
        assert answer.devices == ()
        assert answer.error.isprintable()
        assert len(answer.error.encode()) <= 1024
        assert node.files() == node.files_before
        return answer.error

    return prepare


# 1. The claim.


async def test_a_claim_that_does_not_exist(node, refused):
    claim = ClaimName(namespace="default", name="gone", uid="c0ffee")
    assert await refused(claim) == "claim default/gone does not exist"


async def test_a_claim_that_was_made_again_under_its_name(node, refused):
    claim = node.add()
    old = ClaimName(namespace="default", name=claim.name, uid="the-old-one")
    assert f"UID '{claim.uid}', not the-old-one" in (await refused(old)).replace('"', "'")
    assert "deleted and created again" in await refused(old)


@pytest.mark.parametrize("uid", ["", "../../../etc/passwd", "-a", "a.b", "a_b", "ä", "a" * 64, "a\nb", "a/b"])
async def test_a_uid_that_is_none(node, refused, uid):
    claim = node.add(raw=True)
    error = await refused(ClaimName(namespace="default", name=claim.name, uid=uid))
    assert "malformed: expected 1 to 63 ASCII letters, digits and dashes" in error


async def test_the_longest_uid_is_looked_up(node, refused):
    claim = ClaimName(namespace="default", name="gone", uid="a" * 63)
    assert "does not exist" in await refused(claim)


@pytest.mark.parametrize(
    ("namespace", "name", "expected"),
    [
        ("../x", "a", "claim namespace '../x' is malformed"),
        ("default", "../a", "claim name '../a' is malformed"),
        ("", "a", "claim namespace '' is malformed"),
        ("default", "a?watch=1", "claim name 'a?watch=1' is malformed"),
    ],
)
async def test_a_name_that_is_none(refused, namespace, name, expected):
    assert expected in await refused(ClaimName(namespace=namespace, name=name, uid="c0ffee"))


async def test_a_claim_without_allocation(node, refused):
    body = node.claim(node.add())
    del body["status"]["allocation"]
    assert "has no allocation yet; expected status.allocation" in await refused(node.put(body, raw=True))
    del body["status"]
    assert "has no allocation yet; expected status.allocation" in await refused(node.put(body, raw=True))


async def test_administrators_access(node, refused):
    claim = node.add(results=[node.result(adminAccess=True)], raw=True)
    error = await refused(claim)
    assert "request cpus: dra.cpu offers no administrator's access; ask for the device without adminAccess" in error
    # Also for one of several devices.
    claim = node.add(
        results=[node.result(), node.result(request="watch", adminAccess=True)],
        configs=[node.config("2-5", "cpus"), node.config("6-7", "watch")],
        raw=True,
    )
    assert "request watch: dra.cpu offers no administrator's access" in await refused(claim)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"results": "all"}, "status.allocation.devices.results"),
        ({"results": ["all"]}, "status.allocation.devices.results[0]"),
        ({"results": [{"driver": "dra.cpu"}]}, "status.allocation.devices.results[0].request"),
        ({"results": [{"request": "cpus"}]}, "status.allocation.devices.results[0].driver"),
        ({"config": {"source": "FromClaim"}}, "status.allocation.devices.config"),
        ({"config": [7]}, "status.allocation.devices.config[0]"),
    ],
    ids=json.dumps,
)
async def test_what_is_not_of_the_apis_form(node, refused, changes, expected):
    claim = node.add()
    node.change(claim, **changes)
    assert expected in await refused(claim)


@pytest.mark.parametrize("source", [None, "", "FromPod", "fromclass"])
async def test_a_configuration_of_unknown_source(node, refused, source):
    error = await refused(node.add(configs=[node.config(source=source)], raw=True))
    assert "status.allocation.devices.config[0].source" in error


# 2. The devices.


@pytest.mark.parametrize("device", ["cpudevnuma004", "cpudevsocket000", "cpudevmachine", "cpudev000", "cpudevnuma0"])
async def test_a_device_that_this_node_has_not(node, refused, device):
    error = await refused(node.add(device=device))
    assert f'request "cpus", device {device}: no such device on this node' in error
    assert "groupBy: numanode publishes cpudevnuma000 … cpudevnuma003 (4 devices)" in error


async def test_the_pool_of_another_node(node, refused):
    error = await refused(node.add(results=[node.result("4", pool="other-node")]))
    assert 'its pool is "other-node"; expected "test-node", the pool of this node' in error


@pytest.mark.parametrize("capacity", [None, {}, {"cpu": "4"}, {"dra.cpu/CPU": "4"}, {"dra.cpu/cpu": None}], ids=str)
async def test_no_consumed_capacity(node, refused, capacity):
    error = await refused(node.add(results=[node.result(consumedCapacity=capacity)], raw=True))
    assert 'device cpudevnuma000: consumedCapacity["dra.cpu/cpu"] is missing; expected the number of CPUs' in error


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("0", "is not a positive number of CPUs"),
        (0, "is not a positive number of CPUs"),
        ("-4", "is not a positive number of CPUs"),
        ("-4Gi", "is not a positive number of CPUs"),
        ("1500m", "is not a whole number of CPUs"),
        ("3.999999999", "is not a whole number of CPUs"),
        (0.5, "is not a whole number of CPUs"),
        ("1n", "is not a whole number of CPUs"),
        ("99999999", "is more CPUs than any machine has"),
        ("1e30", "is more CPUs than any machine has"),
        (10**300, "is beyond the range of quantities"),
        ("1e999999999", "has an exponent beyond"),
        ("9" * 300, "a quantity has at most 256"),
        ("four", "is not a quantity"),
        ("", "is not a quantity"),
        (" 4", "is not a quantity"),
        ("4K", "is not a quantity"),
        ("٤", "is not a quantity"),
        (True, "is not a quantity"),
    ],
    ids=lambda value: repr(value)[:24],
)
async def test_a_consumed_capacity_that_is_no_number_of_cpus(node, refused, amount, expected):
    error = await refused(node.add(cpus=amount, raw=True))
    assert 'request "cpus", device cpudevnuma000: consumedCapacity["dra.cpu/cpu"]: ' in error
    assert expected in error


@pytest.mark.parametrize("amount", [["4"], {"value": "4"}], ids=str)
async def test_a_consumed_capacity_of_another_type(node, refused, amount):
    assert 'consumedCapacity["dra.cpu/cpu"]' in await refused(node.add(cpus=amount, raw=True))


# 3. Which configuration.


async def test_no_configuration(node, refused):
    strangers = [node.config(driver="gpu.example.com"), node.config("2-5", "other"), {"source": "FromClass"}]
    for configs in ([], strangers[:1], strangers[1:2], strangers):
        error = await refused(node.add(configs=configs, raw=True))
        assert 'request "cpus": 0 configurations for dra.cpu apply to it; expected exactly one' in error
        assert "status.allocation.devices.config" in error


@pytest.mark.parametrize("count", [2, 3])
async def test_several_configurations(node, refused, count):
    # Even if all of them say the same.
    error = await refused(node.add(configs=[node.config("2-5", "cpus"), node.config(), node.config()][:count]))
    assert f"{count} configurations for dra.cpu apply to it; expected exactly one" in error


async def test_a_configuration_for_another_sub_request_does_not_count(node, refused):
    results = [node.result("4", request="cpus/fast")]
    spec = {"cpus/slow": {}}
    error = await refused(node.add(results=results, configs=[node.config("2-5", "cpus/slow")], spec=spec))
    assert 'request "cpus/fast": 0 configurations for dra.cpu apply to it' in error
    both = [node.config("2-5", "cpus/fast"), node.config("2-5", "cpus")]
    error = await refused(node.add(results=results, configs=both))
    assert 'request "cpus/fast": 2 configurations for dra.cpu apply to it' in error


async def test_a_configuration_from_the_class(node, refused):
    from_class = node.config(source="FromClass")
    for configs in ([from_class], [from_class, node.config()], [node.config(), from_class]):
        error = await refused(node.add(configs=configs))
        assert "a DeviceClass configures it, which would give the same CPUs to every claim" in error
        assert "expected a cpuset only in the claim itself (FromClaim)" in error


# 3. The parameters.

OF_PARAMETERS = [
    (None, "the opaque parameters are missing; expected an object with apiVersion and cpuConfig"),
    ({}, 'the opaque parameters have no apiVersion; expected "v1alpha1"'),
    ({"cpuConfig": {"cpuset": "2-5"}}, 'the opaque parameters have no apiVersion; expected "v1alpha1"'),
    ({"apiVersion": None, "cpuConfig": {"cpuset": "2-5"}}, "the opaque parameters have no apiVersion"),
    ({"apiVersion": "v1", "cpuConfig": {"cpuset": "2-5"}}, 'is not supported; expected "v1alpha1"'),
    ({"apiVersion": "", "cpuConfig": {"cpuset": "2-5"}}, 'is not supported; expected "v1alpha1"'),
    ({"apiVersion": "V1alpha1", "cpuConfig": {"cpuset": "2-5"}}, 'is not supported; expected "v1alpha1"'),
    ({"apiVersion": "dra.cpu/v1alpha1", "cpuConfig": {"cpuset": "2-5"}}, 'is not supported; expected "v1alpha1"'),
    ({"apiVersion": 1, "cpuConfig": {"cpuset": "2-5"}}, "apiVersion of the opaque parameters"),
    ({"apiVersion": "v1alpha1"}, 'cpuConfig.cpuset is missing; expected CPUs such as "2-5"'),
    ({"apiVersion": "v1alpha1", "cpuset": "2-5"}, "cpuConfig.cpuset is missing"),
    ({"apiVersion": "v1alpha1", "cpuConfig": None}, "cpuConfig.cpuset is missing"),
    ({"apiVersion": "v1alpha1", "cpuConfig": {}}, "cpuConfig.cpuset is missing"),
    ({"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": None}}, "cpuConfig.cpuset is missing"),
    ({"apiVersion": "v1alpha1", "cpuConfig": {"placement": {"spread": "cores"}}}, "cpuConfig.cpuset is missing"),
    ({"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": ""}}, 'cpuConfig.cpuset is empty; expected CPUs such as "2-5"'),
    ({"apiVersion": "v1alpha1", "cpuConfig": "2-5"}, "cpuConfig"),
    ({"apiVersion": "v1alpha1", "cpuConfig": ["2-5"]}, "cpuConfig"),
    ({"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": 2}}, "cpuConfig.cpuset"),
    ({"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": [2, 3, 4, 5]}}, "cpuConfig.cpuset"),
    ({"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5", "placement": {"sprad": "cores"}}}, "sprad"),
    ({"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5", "placement": {"spread": "wide"}}}, "none or cores"),
    ("2-5", "opaque parameters"),
    (["2-5"], "opaque parameters"),
]


@pytest.mark.parametrize(("parameters", "expected"), OF_PARAMETERS, ids=[str(case[0])[:60] for case in OF_PARAMETERS])
async def test_parameters_that_say_no_cpuset(node, refused, parameters, expected):
    error = await refused(node.add(configs=[node.config(parameters=parameters)], raw=True))
    assert 'request "cpus": ' in error
    assert expected in error


async def test_missing_empty_other_version_and_unreadable_are_told_apart(node, refused):
    faults = [
        {"apiVersion": "v1alpha1", "cpuConfig": {}},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": ""}},
        {"apiVersion": "v1beta1", "cpuConfig": {"cpuset": "2-5"}},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5;"}},
    ]
    messages = [await refused(node.add(configs=[node.config(parameters=fault)], raw=True)) for fault in faults]
    assert len(set(messages)) == 4


@pytest.mark.parametrize(
    "cpuset", [" 2-5", "2-5 ", "2-5\n", "2-5, 8", "2 - 5", "\t", "2-5\u00a0", "2-5\u2003,8"], ids=repr
)
async def test_white_space_in_a_cpuset(node, refused, cpuset):
    error = await refused(node.add(configs=[node.config(cpuset)], raw=True))
    assert 'has white space in it; expected CPUs such as "2-5,8"' in error


@pytest.mark.parametrize(
    ("cpuset", "position"),
    [
        ("5-2", None),
        ("2-", 3),
        ("-5", 1),
        ("+2-5", 1),
        ("2-5,", 5),
        ("2,,3", 3),
        ("a", 1),
        ("2-5;6", 4),
        ("0x2-0x5", 2),
        ("2-5-7", 4),
        ("2-5:1", None),
        ("2-5:0/2", None),
        ("2-5:1/0", None),
        ("2-5:3/2", None),
        ("٢-٥", 1),
        ("2-5\x00", 4),
        ("2:1/2", None),
        ("all", 1),
        ("N", 1),
    ],
)
async def test_a_cpuset_that_cannot_be_read(node, refused, cpuset, position):
    error = await refused(node.add(configs=[node.config(cpuset)], raw=True))
    assert 'request "cpus": cpuConfig.cpuset ' in error
    assert (f"cannot be read, character {position}: " if position else "cannot be read, character ") in error


@pytest.mark.parametrize("cpuset", ["0-4294967295", "4294967296", "2-5," + "9" * 5000, "0-18446744073709551615:1/2"])
async def test_a_huge_number_in_a_cpuset(node, refused, cpuset):
    error = await refused(node.add(configs=[node.config(cpuset)], raw=True))
    assert "cannot be read, character " in error


@pytest.mark.parametrize(
    "parameters",
    [
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5" + ",2-5" * 100_000}},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5"}, "comment": "x" * 10_300},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5"}, "list": [0] * 6000},
        {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-5"}, **{f"key{n}": {} for n in range(2000)}},
    ],
    ids=["a cpuset of 400 kB", "a long text", "a long list", "many keys"],
)
async def test_parameters_larger_than_the_api_allows(node, refused, parameters):
    error = await refused(node.add(configs=[node.config(parameters=parameters)], raw=True))
    assert "the opaque parameters are larger than 10240 bytes, the API's own limit" in error


# 4. The CPUs.


@pytest.mark.parametrize(
    ("cpuset", "device", "cpus", "expected"),
    [
        (
            "2-5",
            "cpudevnuma000",
            "5",
            ["it has 4 CPUs, but the request consumes 5", "cpudevnuma000 has CPUs 1-7,33-39"],
        ),
        ("2-5", "cpudevnuma000", "3", ["it has 4 CPUs, but the request consumes 3"]),
        ("2", "cpudevnuma000", "2", ["it has 1 CPU, but the request consumes 2"]),
        ("2-5,4-5,2", "cpudevnuma000", "7", ["cpuset 2-5: it has 4 CPUs, but the request consumes 7"]),
        ("62-63", "cpudevnuma003", "2", ["CPU 63 is not online on this node, which has 0-62"]),
        ("2-4,9999", "cpudevnuma000", "4", ["cannot be read"]),
        ("2-4,999", "cpudevnuma000", "4", ["CPU 999 is not online on this node"]),
        ("2-4,64", "cpudevnuma000", "4", ["CPU 64 is not online on this node"]),
        ("0-3", "cpudevnuma000", "4", ["CPU 0 is reserved on this node", "cpudevnuma000 has CPUs 1-7,33-39"]),
        ("0,32", "cpudevnuma000", "2", ["CPUs 0,32 are reserved on this node"]),
        ("6-9", "cpudevnuma000", "4", ["CPUs 8-9 are of cpudevnuma001, not of the devices allocated to the request"]),
        ("2-5", "cpudevnuma001", "4", ["CPUs 2-5 are of cpudevnuma000", "cpudevnuma001 has CPUs 8-15,40-47"]),
        (
            "0,7-8,63",
            "cpudevnuma000",
            "5",
            [
                "it has 4 CPUs, but the request consumes 5",
                "CPU 63 is not online",
                "CPU 0 is reserved",
                "CPU 8 is of cpudevnuma001",
            ],
        ),
    ],
)
async def test_cpus_that_do_not_fit(node, refused, cpuset, device, cpus, expected):
    error = await refused(node.add(cpuset, device=device, cpus=cpus))
    assert 'request "cpus"' in error
    for part in expected:
        assert part in error


async def test_cpus_that_another_claim_holds_are_named_beside_a_lasting_fault(node, refused):
    error = await refused(node.add("19-21", device="cpudevnuma002", cpus="4"))
    assert "it has 3 CPUs, but the request consumes 4" in error
    assert f"CPUs 20-21 are held by claim {node.holder.uid}" in error


async def test_the_number_of_cpus_in_each_group(node, refused):
    results = [node.result("3"), node.result("1", "cpudevnuma001")]
    error = await refused(node.add("2-3,8-9", results=results))
    assert "2 of its CPUs are of cpudevnuma000, of which the request consumes 3" in error
    assert "2 of its CPUs are of cpudevnuma001, of which the request consumes 1" in error
    assert "cpudevnuma000 has CPUs 1-7,33-39, cpudevnuma001 has CPUs 8-15,40-47" in error
    error = await refused(node.add("2-5", results=results))
    assert "4 of its CPUs are of cpudevnuma000, of which the request consumes 3" in error
    assert "0 of its CPUs are of cpudevnuma001, of which the request consumes 1" in error


async def test_two_requests_with_a_cpu_in_common(node, refused):
    results = [node.result("4", request="one"), node.result("2", request="two")]
    error = await refused(node.add(results=results, configs=[node.config("2-5", "one"), node.config("5-6", "two")]))
    assert 'request "two", cpuset 5-6: CPU 5 is also in the cpuset of request "one"' in error
    assert "expected different CPUs for each request of a claim" in error


async def test_one_configuration_over_two_requests(node, refused):
    results = [node.result("4", request="one"), node.result("4", request="two")]
    for configs in ([node.config()], [node.config("2-5", "one", "two")]):
        error = await refused(node.add(results=results, configs=configs))
        assert 'request "two", cpuset 2-5: CPUs 2-5 are also in the cpuset of request "one"' in error


async def test_a_fault_in_one_request_of_several(node, refused):
    results = [node.result("4", request="one"), node.result("2", "cpudevnuma001", "two/sub")]
    error = await refused(node.add(results=results, configs=[node.config("2-5", "one"), node.config("10", "two")]))
    assert 'request "two/sub", cpuset 10: it has 1 CPU, but the request consumes 2' in error


# One claim's failure is that claim's.


async def test_claims_of_one_call_fail_alone(node, refused):
    good = [node.add("2-5"), node.add("8-9", device="cpudevnuma001")]
    bad = [
        ClaimName(namespace="default", name="gone", uid="c0ffee"),
        ClaimName(namespace="default", name="bad", uid="../escape"),
        node.add("2-5", cpus=[], raw=True),
        node.add(configs=[]),
        node.add("0"),
    ]
    answers = await node.prepare(bad[0], good[0], *bad[1:4], good[1], bad[4])
    assert [bool(answer.error) for answer in answers] == [True, False, True, True, True, False, True]
    assert len({answer.error for answer in answers if answer.error}) == 5
    assert await node.agreed() == {node.holder.uid: HELD, good[0].uid: "2-5", good[1].uid: "8-9"}
    assert await node.unprepare(good[0], *bad[:2], good[1]) == ["", "", "", ""]
    assert await node.agreed() == {node.holder.uid: HELD}


async def test_refusals_are_counted(node):
    before = await node.metrics()
    await node.errors(node.add(configs=[]), node.add("0"))
    after = await node.metrics()
    for result, count in (("error", 2), ("success", 0), ("unknown", 0)):
        name = f'prepare_claims_total{{result="{result}"}}'
        assert after[name] - before[name] == count
    assert after["prepare_claim_duration_seconds_count"] - before["prepare_claim_duration_seconds_count"] == 2
