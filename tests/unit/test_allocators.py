# SPDX-License-Identifier: Apache-2.0
"""The external allocator: each rule, good and bad, with its own message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.allocators import Choice, ExternalAllocator
from driver.claims import FROM_CLAIM, FROM_CLASS, AllocatedClaim, DeviceResult, OpaqueConfig
from driver.devices import DeviceModel, build_devices
from driver.errors import ClaimError, ClaimPendingError
from driver.names import ClaimUID, claim_uid
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from fastcpu.topology import Topology

NODE = "node-a"
UID = claim_uid("11111111-aaaa")
OTHER = claim_uid("22222222-bbbb")
THIRD = claim_uid("33333333-cccc")

# Four NUMA nodes of two cores with two threads: node n has CPUs 4n…4n+3. CPUs 16-31 are not there.
RESERVED = CpuSet([0, 1])


class Node:
    """A node and who holds its CPUs."""

    def __init__(self, group_by: str = "numanode", n_cpus: int = 16, n_nodes: int = 4) -> None:
        topology = Topology.from_arrays(
            CpuSet(range(n_cpus)),
            cores=[cpu // 2 for cpu in range(n_cpus)],
            numa_nodes=[cpu * n_nodes // n_cpus for cpu in range(n_cpus)],
            possible=CpuSet(range(2 * n_cpus)),
        )
        self.model: DeviceModel = build_devices(
            topology,
            reserved=RESERVED,
            group_by=group_by,
            allocator="external",
            pcie_roots=None,
            node_allocatable_mapping=False,
        )
        self.pool = CpuPool(topology.online, RESERVED, self.model.groups)
        self.held: dict[ClaimUID, CpuSet] = {}
        self.allocator = ExternalAllocator(self.model, self.pool, NODE)

    def hold(self, uid: ClaimUID, cpus: str) -> None:
        self.held[uid] = CpuSet.parse(cpus)
        self.pool.take(self.held[uid])

    def holders(self, cpus: CpuSet) -> Mapping[ClaimUID, CpuSet]:
        return {uid: held & cpus for uid, held in self.held.items() if not held.isdisjoint(cpus)}

    def choose(self, claim: AllocatedClaim) -> Choice:
        taken = self.pool.taken
        try:
            return self.allocator.choose(claim, self.holders)
        finally:
            assert self.pool.taken == taken

    def refusal(self, claim: AllocatedClaim) -> str:
        """Return the message of a refusal that no waiting will change."""
        with pytest.raises(ClaimError) as refusal:
            self.choose(claim)
        assert type(refusal.value) is ClaimError
        return str(refusal.value)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def whole() -> Node:
    """A node whose only device is the machine."""
    return Node("machine")


def result(
    device: str = "cpudevnuma001", cpus: int = 4, *, request: str = "cpus", pool: str = NODE, fault: str = ""
) -> DeviceResult:
    return DeviceResult(request=request, pool=pool, device=device, cpus=cpus, fault=fault)


def config(cpuset: object, *requests: str, source: str = FROM_CLAIM) -> OpaqueConfig:
    parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": cpuset}}
    return OpaqueConfig(source=source, requests=requests, parameters=parameters)


def claim(
    results: Sequence[DeviceResult], *configs: OpaqueConfig, counts: Mapping[str, int] | None = None
) -> AllocatedClaim:
    return AllocatedClaim(
        uid=UID,
        namespace="default",
        name="claim",
        generation=1,
        pod_claim_name=None,
        results=tuple(results),
        configs=configs,
        request_counts=counts or {},
        fingerprint="",
    )


# What fits.


@pytest.mark.parametrize("cpuset", ["4-7", "7,6,4-5", "4-7,5,5-6", "4-7:1/1", "4-6:1/2,5-7:1/2"])
def test_any_spelling_of_the_right_cpus_is_chosen(node: Node, cpuset: str) -> None:
    choice = node.choose(claim([result()], config(cpuset)))
    assert str(choice.cpus) == "4-7"
    assert choice.by_request == {"cpus": CpuSet.parse("4-7")}


def test_part_of_a_device_is_enough(node: Node) -> None:
    assert str(node.choose(claim([result(cpus=2)], config("5,7"))).cpus) == "5,7"


def test_each_request_gets_its_own_cpus(node: Node) -> None:
    chosen = node.choose(
        claim(
            [result(request="a", cpus=2), result("cpudevnuma002", 3, request="b")],
            config("4-5", "a"),
            config("8-10", "b"),
        )
    )
    assert chosen.by_request == {"a": CpuSet.parse("4-5"), "b": CpuSet.parse("8-10")}
    assert str(chosen.cpus) == "4-5,8-10"


def test_two_requests_may_share_a_device(node: Node) -> None:
    results = [result(request="a", cpus=2), result(request="b", cpus=2)]
    assert str(node.choose(claim(results, config("4-5", "a"), config("6-7", "b"))).cpus) == "4-7"


def test_a_request_with_a_count_shares_one_cpuset_over_its_devices(node: Node) -> None:
    results = [result(cpus=2), result("cpudevnuma002", 3), result("cpudevnuma001", 1)]
    choice = node.choose(claim(results, config("4-6,8-10"), counts={"cpus": 3}))
    assert choice.by_request == {"cpus": CpuSet.parse("4-6,8-10")}


@pytest.mark.parametrize("target", [(), ("cpus",), ("cpus/big",), ("other", "cpus/big")])
def test_a_sub_request_is_configured_by_its_own_name_or_the_requests(node: Node, target: tuple[str, ...]) -> None:
    choice = node.choose(claim([result(request="cpus/big")], config("4-7", *target)))
    assert choice.by_request == {"cpus/big": CpuSet.parse("4-7")}


def test_configs_of_other_requests_do_not_count(node: Node) -> None:
    others = [config("8-11", "other"), config("nonsense", "cpus/small"), config("0", "other", source=FROM_CLASS)]
    assert str(node.choose(claim([result()], *others, config("4-7", "cpus"))).cpus) == "4-7"


def test_the_machine_is_a_device_for_two_requests(whole: Node) -> None:
    results = [result("cpudevmachine", 2, request="a"), result("cpudevmachine", 3, request="b")]
    choice = whole.choose(claim(results, config("4,8", "a"), config("5-7", "b"), counts={"a": 1, "b": 1}))
    assert str(choice.cpus) == "4-8"


def test_a_claim_without_devices_of_ours_gets_nothing(node: Node) -> None:
    assert node.choose(claim([])) == Choice(cpus=CpuSet(), by_request={})


def test_cpus_that_the_claim_holds_itself_are_not_taken(node: Node) -> None:
    node.hold(UID, "4-6")
    assert str(node.choose(claim([result()], config("4-7"))).cpus) == "4-7"
    node.hold(OTHER, "7")
    with pytest.raises(ClaimPendingError, match=f"CPU 7 is held by claim {OTHER};"):
        node.choose(claim([result()], config("4-7")))


# Results.


def test_a_device_of_another_pool_is_refused(node: Node) -> None:
    message = node.refusal(claim([result(pool="node-b")], config("4-7")))
    assert message == (
        'request "cpus", device cpudevnuma001: its pool is "node-b"; expected "node-a", the pool of this node'
    )


def test_an_unknown_device_is_refused(node: Node) -> None:
    message = node.refusal(claim([result("cpudevsocket000")], config("4-7")))
    assert message == (
        'request "cpus", device cpudevsocket000: no such device on this node, where groupBy: numanode '
        "publishes cpudevnuma000 … cpudevnuma003 (4 devices)"
    )
    assert "publishes cpudevmachine" in Node("machine").refusal(claim([result()], config("4-7")))


def test_a_consumed_capacity_that_is_no_count_is_refused(node: Node) -> None:
    message = node.refusal(claim([result(), result(cpus=0, fault="consumedCapacity is odd")], config("4-7")))
    assert message == 'request "cpus", device cpudevnuma001: consumedCapacity is odd'


def test_all_results_are_checked_before_any_parameters(node: Node) -> None:
    results = [result(request="a"), result("cpudevnuma009", request="b")]
    assert "no such device" in node.refusal(claim(results, config("nonsense")))


# Which config.


def test_a_request_without_config_is_refused(node: Node) -> None:
    assert node.refusal(claim([result()], config("4-7", "other"))) == (
        'request "cpus": 0 configurations for dra.cpu apply to it; '
        "expected exactly one, with its cpuset, in status.allocation.devices.config"
    )


@pytest.mark.parametrize("target", [(), ("cpus",)])
def test_a_request_with_two_configs_is_refused(node: Node, target: tuple[str, ...]) -> None:
    message = node.refusal(claim([result()], config("4-7", "cpus"), config("4-7", *target)))
    assert message.startswith('request "cpus": 2 configurations for dra.cpu apply to it; expected exactly one')


@pytest.mark.parametrize("beside", [[], [config("4-7")], [config("4-7"), config("4-7")]])
def test_a_config_from_the_class_is_refused_even_beside_a_good_one(node: Node, beside: list[OpaqueConfig]) -> None:
    assert node.refusal(claim([result()], *beside, config("4-7", source=FROM_CLASS))) == (
        'request "cpus": a DeviceClass configures it, which would give the same CPUs to every claim; '
        "expected a cpuset only in the claim itself (FromClaim)"
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (None, "the opaque parameters are missing; expected an object with apiVersion and cpuConfig"),
        (
            {"apiVersion": "v1alpha1", "cpuConfig": {"placement": {"spread": "cores"}}},
            'cpuConfig.cpuset is missing; expected CPUs such as "2-5", '
            "since with allocator: external the driver chooses none",
        ),
        ({"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": ""}}, "cpuConfig.cpuset is empty; expected CPUs such as"),
        (
            {"apiVersion": "v2", "cpuConfig": {"cpuset": "4-7"}},
            "apiVersion 'v2' of the opaque parameters is not supported; expected \"v1alpha1\"",
        ),
        (
            {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "4-x"}},
            "cpuConfig.cpuset '4-x' cannot be read, character 3: 'x' is not a digit; expected a CPU number",
        ),
        (
            {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "7-4"}},
            "cpuConfig.cpuset '7-4' cannot be read, character 1: the range is reversed",
        ),
        (
            {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "0-4294967295"}},
            "cpuConfig.cpuset '0-4294967295' cannot be read, character 3: the number is too large",
        ),
    ],
)
def test_each_fault_of_the_parameters_has_its_own_message(node: Node, parameters: object, message: str) -> None:
    opaque = OpaqueConfig(source=FROM_CLAIM, requests=(), parameters=parameters)
    assert node.refusal(claim([result()], opaque)).startswith(f'request "cpus": {message}')


# The cpuset.


@pytest.mark.parametrize(
    ("cpuset", "message"),
    [
        ("4-6", "cpuset 4-6: it has 3 CPUs, but the request consumes 4; cpudevnuma001 has CPUs 4-7"),
        (
            "4-8",
            "cpuset 4-8: it has 5 CPUs, but the request consumes 4; "
            "CPU 8 is of cpudevnuma002, not of the devices allocated to the request; cpudevnuma001 has CPUs 4-7",
        ),
        ("5", "cpuset 5: it has 1 CPU, but the request consumes 4; cpudevnuma001 has CPUs 4-7"),
        (
            "4-6,99",
            "cpuset 4-6,99: CPU 99 is not online on this node, which has 0-15; cpudevnuma001 has CPUs 4-7",
        ),
        (
            "4-5,16-17",
            "cpuset 4-5,16-17: CPUs 16-17 are not online on this node, which has 0-15; cpudevnuma001 has CPUs 4-7",
        ),
        (
            "6-9",
            "cpuset 6-9: CPUs 8-9 are of cpudevnuma002, not of the devices allocated to the request; "
            "cpudevnuma001 has CPUs 4-7",
        ),
        (
            "3-6",
            "cpuset 3-6: CPU 3 is of cpudevnuma000, not of the devices allocated to the request; "
            "cpudevnuma001 has CPUs 4-7",
        ),
        (
            "0-1,4-5",
            "cpuset 0-1,4-5: CPUs 0-1 are reserved on this node; cpudevnuma001 has CPUs 4-7",
        ),
    ],
)
def test_each_fault_of_a_cpuset_has_its_own_message(node: Node, cpuset: str, message: str) -> None:
    assert node.refusal(claim([result()], config(cpuset))) == f'request "cpus", {message}'


def test_a_reserved_cpu_of_the_devices_own_group_is_refused(node: Node) -> None:
    assert node.refusal(claim([result("cpudevnuma000", 2)], config("1-2"))) == (
        'request "cpus", cpuset 1-2: CPU 1 is reserved on this node; cpudevnuma000 has CPUs 2-3'
    )


def test_the_counts_of_each_device_are_checked_not_just_their_sum(node: Node) -> None:
    results = [result(cpus=2), result("cpudevnuma002", 3)]
    assert node.refusal(claim(results, config("4-6,8-9"))) == (
        'request "cpus", cpuset 4-6,8-9: 3 of its CPUs are of cpudevnuma001, of which the request consumes 2; '
        "2 of its CPUs are of cpudevnuma002, of which the request consumes 3; "
        "cpudevnuma001 has CPUs 4-7, cpudevnuma002 has CPUs 8-11"
    )


def test_all_faults_are_told_at_once(node: Node) -> None:
    node.hold(OTHER, "6")
    assert node.refusal(claim([result()], config("0,5-6,9,31"))) == (
        'request "cpus", cpuset 0,5-6,9,31: it has 5 CPUs, but the request consumes 4; '
        "CPU 31 is not online on this node, which has 0-15; CPU 0 is reserved on this node; "
        "CPU 9 is of cpudevnuma002, not of the devices allocated to the request; "
        f"CPU 6 is held by claim {OTHER}; cpudevnuma001 has CPUs 4-7"
    )


def test_two_requests_of_a_claim_cannot_share_cpus(node: Node) -> None:
    results = [result(request="a", cpus=2), result(request="b", cpus=2)]
    assert node.refusal(claim(results, config("4-5", "a"), config("5-6", "b"))) == (
        'request "b", cpuset 5-6: CPU 5 is also in the cpuset of request "a"; '
        "expected different CPUs for each request of a claim"
    )


def test_one_config_over_two_requests_is_refused(node: Node) -> None:
    results = [result(request="a", cpus=2), result(request="b", cpus=2)]
    assert "CPUs 4-5 are also in the cpuset of request" in node.refusal(claim(results, config("4-5")))


@pytest.mark.parametrize(
    ("request_name", "counts"), [("cpus", {"cpus": 2}), ("cpus/big", {"cpus/big": 3}), ("cpus", {"cpus": 0})]
)
def test_the_machine_allows_count_one_only(whole: Node, request_name: str, counts: dict[str, int]) -> None:
    refused = claim([result("cpudevmachine", request=request_name)], config("4-7"), counts=counts)
    assert whole.refusal(refused) == (
        f'request "{request_name}" has count {counts[request_name]}, but the machine is one device; '
        "expected count 1, and a request of its own for each further cpuset"
    )


def test_a_count_of_another_sub_request_does_not_matter(whole: Node) -> None:
    allowed = claim([result("cpudevmachine", request="cpus/big")], config("4-7"), counts={"cpus/small": 2, "cpus": 2})
    assert str(whole.choose(allowed).cpus) == "4-7"


# CPUs that other claims hold.


def pending(node: Node, waiting: AllocatedClaim) -> str:
    with pytest.raises(ClaimPendingError) as refusal:
        node.choose(waiting)
    return str(refusal.value)


def test_a_conflict_names_the_other_claim_and_may_pass(node: Node) -> None:
    node.hold(OTHER, "6-9")
    assert pending(node, claim([result()], config("4-7"))) == (
        f'request "cpus", cpuset 4-7: CPUs 6-7 are held by claim {OTHER}; cpudevnuma001 has CPUs 4-7'
    )


def test_a_conflict_names_each_claim_with_its_cpus(node: Node) -> None:
    node.hold(THIRD, "6-7")
    node.hold(OTHER, "4")
    assert pending(node, claim([result()], config("4-7"))) == (
        f'request "cpus", cpuset 4-7: CPU 4 is held by claim {OTHER}; CPUs 6-7 are held by claim {THIRD}; '
        "cpudevnuma001 has CPUs 4-7"
    )


def test_a_conflict_with_many_claims_is_counted(node: Node) -> None:
    for cpu in range(4, 8):
        node.hold(claim_uid(f"claim-{cpu}"), str(cpu))
    node.hold(claim_uid("claim-8"), "8-9")
    message = pending(node, claim([result(), result("cpudevnuma002", 2)], config("4-9")))
    assert message == (
        'request "cpus", cpuset 4-9: CPU 4 is held by claim claim-4; CPU 5 is held by claim claim-5; '
        "CPU 6 is held by claim claim-6; CPUs 7-9 are held by 2 more claims; "
        "cpudevnuma001 has CPUs 4-7, cpudevnuma002 has CPUs 8-11"
    )


def test_cpus_that_are_taken_but_held_by_no_claim_are_refused_all_the_same(node: Node) -> None:
    node.pool.take(CpuSet([4]))
    assert "CPU 4 is held already" in pending(node, claim([result()], config("4-7")))
    node.held[UID] = CpuSet([5])
    assert "CPU 4 is held already" in pending(node, claim([result()], config("4-7")))


def test_a_lasting_fault_comes_before_a_conflict(node: Node) -> None:
    node.hold(OTHER, "4")
    results = [result(request="a", cpus=2), result("cpudevnuma002", 2, request="b")]
    message = node.refusal(claim(results, config("4-5", "a"), config("8-10", "b")))
    assert message.startswith('request "b", cpuset 8-10: it has 3 CPUs, but the request consumes 2')
    results = [result(request="a", cpus=2), result(request="b", cpus=2)]
    assert "also in the cpuset of request" in node.refusal(claim(results, config("4-5", "a"), config("5-6", "b")))


def test_the_first_of_two_conflicts_is_told(node: Node) -> None:
    node.hold(OTHER, "4")
    node.hold(THIRD, "8")
    results = [result(request="a", cpus=2), result("cpudevnuma002", 2, request="b")]
    assert pending(node, claim(results, config("4-5", "a"), config("8-9", "b"))).startswith('request "a", cpuset 4-5')


def test_holders_are_asked_only_about_taken_cpus(node: Node) -> None:
    def no_holders(cpus: CpuSet) -> Mapping[ClaimUID, CpuSet]:
        assert not cpus
        return {}

    node.allocator.choose(claim([result()], config("4-7")), no_holders)
    with pytest.raises(ClaimError, match="is reserved"):
        node.allocator.choose(claim([result()], config("0,4-6")), no_holders)


# Messages.


def test_the_longest_message_fits_into_an_event_and_keeps_every_fact() -> None:
    node = Node(n_cpus=4096, n_nodes=64)
    uids = [claim_uid(f"{number}8b2c7c5e-3f5f-4a8e-9f3a-6f0d1c2b3a4{number}") for number in range(5)]
    for number, uid in enumerate(uids):
        node.hold(uid, f"{256 + 40 * number}-{256 + 40 * number + 39}:1/2")
    request = "a-request-with-a-name-of-63-characters-which-is-the-longest-one"
    results = [result(f"cpudevnuma{number:03}", 40, request=request) for number in range(2, 34)]
    cpuset = ",".join(map(str, [0, 1, *range(201, 700, 3), *range(3000, 4090, 3), *range(5001, 5099, 3)]))
    message = node.refusal(claim(results, config(cpuset)))
    assert len(message) < 1000
    assert "\n" not in message
    for fact in (
        "CPUs 0-1 are reserved",
        "not online",
        "are of cpudevnuma046 … cpudevnuma063",
        *uids[:3],
        "2 more claims",
        "29 more",
    ):
        assert fact in message


def test_a_long_list_is_shortened_between_two_cpus_and_counted(node: Node) -> None:
    cpuset = ",".join(str(cpu * cpu) for cpu in range(2, 60))
    message = node.refusal(claim([result()], config(cpuset)))
    assert message.startswith('request "cpus", cpuset 4,9,16,25,36,49,64,81,100,121,144,169,196,225,256,289,324,361')
    assert ",… (58 CPUs): it has 58 CPUs" in message


@given(
    cpus=st.sets(st.integers(0, 40), min_size=1, max_size=8),
    wanted=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3),
    held=st.sets(st.integers(0, 20), max_size=5),
)
def test_a_choice_is_right_or_refused(cpus: set[int], wanted: list[tuple[int, int]], held: set[int]) -> None:
    """Against the rules written with plain sets."""
    node = Node()
    if held:
        node.hold(OTHER, str(CpuSet(held)))
    groups = {group: set(range(4 * group, 4 * group + 4)) for group, _ in wanted}
    counts = {group: sum(count for other, count in wanted if other == group) for group in groups}
    lasting = (
        not cpus <= set(range(16))
        or bool(cpus & set(RESERVED))
        or len(cpus) != sum(counts.values())
        or any(len(cpus & groups[group]) != counts[group] for group in groups)
    )
    wish = claim([result(f"cpudevnuma00{group}", count) for group, count in wanted], config(str(CpuSet(cpus))))
    if lasting:
        node.refusal(wish)
    elif cpus & held:
        pending(node, wish)
    else:
        assert set(node.choose(wish).cpus) == cpus


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(
    parameters=JSON
    | (JSON | st.text(st.characters(exclude_categories=()))).map(lambda cpuset: config(cpuset).parameters),
)
def test_any_parameters_are_right_or_refused_in_one_line(parameters: object) -> None:
    opaque = OpaqueConfig(source=FROM_CLAIM, requests=(), parameters=parameters)
    refusal = Node().refusal(claim([result()], opaque))
    assert "\n" not in refusal
    assert refusal.encode().decode() == refusal
    assert len(refusal) < 500
