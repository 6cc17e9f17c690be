# SPDX-License-Identifier: Apache-2.0
"""The driver's own choice: what claims get on which state, and what they are told when they get nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.allocators import Choice
from driver.claims import FROM_CLAIM, FROM_CLASS, AllocatedClaim, DeviceResult, OpaqueConfig
from driver.cpumanager import CpuManagerAllocator
from driver.devices import DeviceModel, build_devices
from driver.errors import ClaimError, ClaimPendingError
from driver.names import ClaimUID, claim_uid
from fastcpu import CpuSet
from fastcpu.placement import Placer, Policy
from fastcpu.pool import CpuPool
from fastcpu.topology import EFFICIENCY, PERFORMANCE, Topology

NODE = "node-a"
UID = claim_uid("11111111-aaaa")
OTHER = claim_uid("22222222-bbbb")
THIRD = claim_uid("33333333-cccc")


def server() -> Topology:
    """Two sockets of two NUMA nodes of two L3 caches of two cores: CPU n and CPU n + 16 are core n."""
    core = [cpu % 16 for cpu in range(32)]
    return Topology.from_arrays(
        CpuSet(range(32)),
        cores=core,
        l3_caches=[number // 2 for number in core],
        numa_nodes=[number // 4 for number in core],
        sockets=[number // 8 for number in core],
    )


def hybrid() -> Topology:
    """Two performance cores of two threads, 0-1 and 2-3, and three efficiency cores, 4, 5 and 6."""
    return Topology.from_arrays(
        CpuSet(range(7)),
        cores=[0, 0, 1, 1, 2, 3, 4],
        core_type=[PERFORMANCE] * 4 + [EFFICIENCY] * 3,
        l3_caches=[0] * 7,
        numa_nodes=[0] * 7,
        sockets=[0] * 7,
    )


class Node:
    """A node and who holds its CPUs."""

    def __init__(
        self,
        group_by: str = "socket",
        *,
        reserved: str = "0,16",
        placement: Mapping[str, str] | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.topology = server() if topology is None else topology
        self.model: DeviceModel = build_devices(
            self.topology,
            reserved=CpuSet.parse(reserved),
            group_by=group_by,
            allocator="cpumanager",
            pcie_roots=None,
            node_allocatable_mapping=False,
        )
        self.pool = CpuPool(self.topology.online, CpuSet.parse(reserved), self.model.groups)
        self.held: dict[ClaimUID, CpuSet] = {}
        self.allocator = CpuManagerAllocator(self.model, self.pool, NODE, self.topology, placement or {})

    def hold(self, uid: ClaimUID, cpus: str) -> None:
        self.held[uid] = CpuSet.parse(cpus)
        self.pool.take(self.held[uid])

    def holders(self, cpus: CpuSet) -> Mapping[ClaimUID, CpuSet]:
        return {uid: held & cpus for uid, held in self.held.items() if not held.isdisjoint(cpus)}

    def choose(self, claim: AllocatedClaim, held: str | None = None) -> Choice:
        taken = self.pool.taken
        try:
            choice = self.allocator.choose(claim, self.holders, None if held is None else CpuSet.parse(held))
        finally:
            assert self.pool.taken == taken
        self.check(claim, choice)
        if held is None:
            assert choice.cpus <= self.pool.available
        return choice

    def check(self, claim: AllocatedClaim, choice: Choice) -> None:
        """Whatever is chosen, the numbers are right: of each device, and of each request."""
        groups = {device.name: CpuSet.from_array(self.model.groups[device.group]) for device in self.model.devices}
        for name, group in groups.items():
            wanted = sum(result.cpus for result in claim.results if result.device == name)
            assert len(choice.cpus & group) == wanted
            for request, cpus in choice.by_request.items():
                wanted = sum(r.cpus for r in claim.results if (r.request, r.device) == (request, name))
                assert len(cpus & group) == wanted
        assert sum(map(len, choice.by_request.values())) == len(choice.cpus)
        assert CpuSet().union(*choice.by_request.values()) == choice.cpus

    def cpus(self, *results: DeviceResult, configs: Sequence[OpaqueConfig] = ()) -> str:
        return str(self.choose(claim(*results, configs=configs)).cpus)

    def refusal(self, claim: AllocatedClaim, kind: type[ClaimError] = ClaimError, held: str | None = None) -> str:
        with pytest.raises(ClaimError) as refusal:
            self.choose(claim, held)
        assert type(refusal.value) is kind
        return str(refusal.value)


def result(device: str = "cpudevsocket000", cpus: int = 4, *, request: str = "cpus", fault: str = "") -> DeviceResult:
    return DeviceResult(request=request, pool=NODE, device=device, cpus=cpus, fault=fault)


def wish(*requests: str, source: str = FROM_CLAIM, **placement: str) -> OpaqueConfig:
    parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"placement": placement}}
    return OpaqueConfig(source=source, requests=requests, parameters=parameters)


def claim(*results: DeviceResult, configs: Sequence[OpaqueConfig] = ()) -> AllocatedClaim:
    return AllocatedClaim(
        uid=UID,
        namespace="default",
        name="claim",
        generation=1,
        pod_claim_name=None,
        results=results,
        configs=tuple(configs),
        request_counts={},
        fingerprint="",
    )


# What a claim gets.


@pytest.mark.parametrize(
    ("group_by", "device", "cpus", "expected"),
    [
        # The first L3 has one core left, which is the best fit for two.
        ("socket", "cpudevsocket000", 2, "1,17"),
        ("socket", "cpudevsocket000", 4, "2-3,18-19"),
        ("socket", "cpudevsocket001", 4, "8-9,24-25"),
        ("socket", "cpudevsocket000", 8, "4-7,20-23"),
        ("numanode", "cpudevnuma000", 6, "1-3,17-19"),
        ("numanode", "cpudevnuma003", 2, "12,28"),
        ("l3cache", "cpudevl3cache000", 2, "1,17"),
        ("l3cache", "cpudevl3cache005", 3, "10-11,26"),
    ],
)
def test_a_request_is_placed_in_its_device(group_by: str, device: str, cpus: int, expected: str) -> None:
    assert Node(group_by).cpus(result(device, cpus)) == expected


def test_what_others_hold_is_not_given_out() -> None:
    node = Node()
    node.hold(OTHER, "2,18")
    assert node.cpus(result(cpus=2)) == "1,17"
    node.hold(THIRD, "1,17")
    assert node.cpus(result(cpus=2)) == "3,19"
    assert node.cpus(result(cpus=10)) == "3-7,19-23"


def test_a_request_with_a_count_gets_cpus_of_each_of_its_devices() -> None:
    node = Node("numanode")
    assert node.cpus(result("cpudevnuma001", 4), result("cpudevnuma003", 4)) == "4-5,12-13,20-21,28-29"


def test_results_of_one_request_in_one_device_are_one_number() -> None:
    assert Node().cpus(result(cpus=3), result(cpus=1), result(cpus=4)) == Node().cpus(result(cpus=8))


def test_requests_in_one_device_are_placed_as_a_block() -> None:
    """One after another they would be in three L3 caches: the first fits best beside the reserved core."""
    choice = Node().choose(claim(result(cpus=2, request="a"), result(cpus=2, request="b")))
    assert str(choice.cpus) == "2-3,18-19"
    assert choice.by_request == {"a": CpuSet([2, 18]), "b": CpuSet([3, 19])}


def test_requests_may_have_devices_of_their_own() -> None:
    node = Node("numanode")
    choice = node.choose(claim(result("cpudevnuma002", 2, request="b"), result("cpudevnuma001", 2, request="a/x")))
    assert choice.by_request == {"b": CpuSet([8, 24]), "a/x": CpuSet([4, 20])}


def test_a_claim_without_devices_of_ours_gets_nothing() -> None:
    assert Node().choose(claim()) == Choice(cpus=CpuSet(), by_request={})


def test_the_order_of_results_does_not_matter() -> None:
    results = [
        result("cpudevsocket000", 3, request="a"),
        result("cpudevsocket000", 2, request="b"),
        result("cpudevsocket001", 5, request="a"),
        result("cpudevsocket000", 2, request="c"),
    ]
    configs = [wish("c", spread="cores")]
    choices = [Node().choose(claim(*order, configs=configs)) for order in itertools.permutations(results)]
    assert all(choice == choices[0] for choice in choices)


# Policies.


def test_the_nodes_placement_is_the_default() -> None:
    node = Node(placement={"spread": "cores"})
    assert node.cpus(result(cpus=2)) == "2-3"
    assert node.cpus(result(cpus=2), configs=[wish(spread="none")]) == "1,17"


def test_a_class_overrides_the_node_and_a_claim_the_class() -> None:
    node = Node(placement={"numa": "distribute"})
    of_class = wish("cpus", source=FROM_CLASS, numa="pack", fullCores="require")
    assert node.cpus(result(cpus=4)) == "1,4,17,20"
    assert node.cpus(result(cpus=4), configs=[of_class]) == "2-3,18-19"
    assert node.cpus(result(cpus=4), configs=[of_class, wish(numa="distribute")]) == "1,4,17,20"
    assert node.cpus(result(cpus=3), configs=[of_class, wish(fullCores="prefer")]) == "2-3,18"


def test_an_odd_number_is_split_as_evenly_as_it_can_be() -> None:
    node = Node("machine", reserved="", placement={"numa": "distribute"})
    cpus = node.choose(claim(result("cpudevmachine", 15))).cpus
    sizes = sorted(len(cpus & node.topology.numa_nodes.cpuset(row)) for row in range(4))
    assert sizes == [3, 4, 4, 4]


def test_each_request_has_its_own_policy() -> None:
    choice = Node().choose(
        claim(result(cpus=4, request="wide"), result(cpus=4, request="dense"), configs=[wish("wide", spread="cores")])
    )
    assert choice.by_request == {"dense": CpuSet.parse("2-3,18-19"), "wide": CpuSet.parse("4-7")}


def test_a_type_of_core_can_be_asked_for() -> None:
    node = Node(reserved="", topology=hybrid())
    assert node.cpus(result(cpus=2)) == "0-1"
    assert node.cpus(result(cpus=2), configs=[wish(coreType="e-core")]) == "4-5"


def test_a_request_for_any_core_leaves_those_that_another_needs() -> None:
    node = Node(reserved="", topology=hybrid())
    node.hold(OTHER, "2-3")
    results = [result(cpus=2, request="any"), result(cpus=2, request="fast")]
    configs = [wish("any", fullCores="require"), wish("fast", coreType="p-core")]
    choice = node.choose(claim(*results, configs=configs))
    assert choice.by_request == {"any": CpuSet([4, 5]), "fast": CpuSet([0, 1])}


class CountingPlacer:
    """Counts how often CPUs are looked for."""

    def __init__(self, topology: Topology) -> None:
        self.calls = 0
        self._placer = Placer(topology)

    def place(self, free: CpuSet, n: int, policy: Policy) -> CpuSet:
        self.calls += 1
        return self._placer.place(free, n, policy)


def test_a_claim_that_cannot_be_is_not_tried_for_ever() -> None:
    """Nothing else happens on the node meanwhile."""
    node = Node(reserved="", topology=hybrid())
    placer = node.allocator._placer = CountingPlacer(node.topology)  # type: ignore[assignment]
    results = [result(cpus=1, request=f"r{number}") for number in range(7)]
    configs = [wish(fullCores="require"), wish("r6", coreType="p-core")]
    assert "no whole p-cores have that many threads" in node.refusal(claim(*results, configs=configs))
    assert placer.calls < 100


# Refusals.


def test_more_than_is_free_is_waited_for() -> None:
    node = Node("numanode")
    node.hold(OTHER, "4-5,20")
    node.hold(THIRD, "21-22")
    message = node.refusal(claim(result("cpudevnuma001", 4)), ClaimPendingError)
    assert message == (
        'request "cpus", device cpudevnuma001: 4 CPUs wanted, but only 3 of its 8 are free; '
        f"CPUs 4-5,20 are held by claim {OTHER}; CPUs 21-22 are held by claim {THIRD}"
    )


def test_the_requests_of_a_claim_are_counted_together() -> None:
    node = Node("numanode")
    node.hold(OTHER, "4")
    results = [result("cpudevnuma001", 4, request="b"), result("cpudevnuma001", 4, request="a")]
    message = node.refusal(claim(*results), ClaimPendingError)
    assert message.startswith(
        'requests "a", "b", device cpudevnuma001: 8 CPUs wanted, but only 7 of its 8 are free; CPU 4 is held by claim'
    )


def test_many_holders_make_no_long_message() -> None:
    node = Node()
    for cpu in (1, 3, 5, 7, 17, 19, 21):
        node.hold(claim_uid(f"holder-{cpu}"), str(cpu))
    results = [result(cpus=2, request=f"request-{number}") for number in range(5)]
    message = node.refusal(claim(*results), ClaimPendingError)
    assert message == (
        'requests "request-0" … "request-4" (5 requests), device cpudevsocket000: 10 CPUs wanted, '
        "but only 7 of its 14 are free; CPU 1 is held by claim holder-1; CPU 3 is held by claim holder-3; "
        "CPU 5 is held by claim holder-5; CPUs 7,17,19,21 are held by 4 more claims"
    )


def test_more_than_there_is_is_refused_at_once() -> None:
    node = Node("numanode")
    node.hold(OTHER, "1-2")
    message = node.refusal(claim(result("cpudevnuma000", 7)))
    assert message == ('request "cpus", device cpudevnuma000: 7 CPUs wanted, but it has only 6, 1-3,17-19')


def test_what_can_never_be_comes_before_what_may_pass() -> None:
    node = Node("numanode")
    node.hold(OTHER, "4-7")
    results = [result("cpudevnuma001", 6), result("cpudevnuma003", 9)]
    assert "device cpudevnuma003: 9 CPUs wanted, but it has only 8" in node.refusal(claim(*results))


def test_full_cores_that_cannot_be_name_the_numbers_that_fit() -> None:
    message = Node().refusal(claim(result(cpus=5), configs=[wish(fullCores="require")]))
    assert message == (
        'request "cpus", device cpudevsocket000: 5 CPUs wanted, but no whole cores have that many threads together; '
        "4 or 6 CPUs would fit"
    )
    message = Node(reserved="0").refusal(claim(result(cpus=15), configs=[wish(fullCores="require")]))
    assert message == (
        'request "cpus", device cpudevsocket000: 15 CPUs of whole cores wanted, but it has only 14; 14 CPUs would fit'
    )


def test_full_cores_of_a_block_are_full_cores_of_each_request() -> None:
    results = [result(cpus=3, request="a"), result(cpus=1, request="b")]
    message = Node().refusal(claim(*results, configs=[wish(fullCores="require")]))
    assert message.startswith('request "a", device cpudevsocket000: 3 CPUs wanted, but no whole cores have')


def test_full_cores_that_others_use_are_waited_for() -> None:
    node = Node("l3cache")
    node.hold(OTHER, "4")
    message = node.refusal(claim(result("cpudevl3cache002", 3), configs=[wish(fullCores="require", source=FROM_CLASS)]))
    assert "4 CPUs would fit" in message or "2 or 4 CPUs would fit" in message
    message = node.refusal(
        claim(result("cpudevl3cache002", 4, request="x/y"), configs=[wish(fullCores="require")]), ClaimPendingError
    )
    assert message == (
        'request "x/y", device cpudevl3cache002: 4 CPUs wanted, but only 3 of its 4 are free; '
        f"CPU 4 is held by claim {OTHER}"
    )
    node = Node()
    node.hold(OTHER, "1-7")
    message = node.refusal(claim(result(cpus=2), configs=[wish(fullCores="require")]), ClaimPendingError)
    assert message == (
        'request "cpus", device cpudevsocket000: 2 CPUs of whole cores wanted, but only 0 free; '
        f"CPUs 1-7 are held by claim {OTHER}"
    )


def test_a_type_of_core_that_is_not_there_is_refused() -> None:
    message = Node().refusal(claim(result(cpus=2), configs=[wish(coreType="p-core")]))
    assert message == 'request "cpus", device cpudevsocket000: 2 CPUs of p-cores wanted, but it has only 0'


def test_a_cpuset_is_refused_even_where_nothing_else_would_be() -> None:
    parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "1,17"}}
    for source in (FROM_CLAIM, FROM_CLASS):
        config = OpaqueConfig(source=source, requests=("cpus",), parameters=parameters)
        message = Node().refusal(claim(result(cpus=2), configs=[config]))
        assert "expected no cpuset, or allocator: external in the driver's configuration" in message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (result("cpudevnuma000"), "no such device on this node, where groupBy: socket publishes cpudevsocket000"),
        (result(cpus=0, fault="consumedCapacity is odd"), "device cpudevsocket000: consumedCapacity is odd"),
        (DeviceResult(request="r", pool="b", device="cpudevsocket000", cpus=1), 'its pool is "b"; expected "node-a"'),
    ],
)
def test_a_result_that_is_wrong_is_refused(wrong: DeviceResult, message: str) -> None:
    assert message in Node().refusal(claim(result(), wrong))


# Claims that hold CPUs already.


def test_cpus_that_a_claim_holds_are_recognised_wherever_they_are() -> None:
    node = Node("numanode", placement={"fullCores": "require"})
    node.hold(UID, "5,7,8,10,22")
    results = [result("cpudevnuma001", 2, request="a"), result("cpudevnuma001", 1, request="b")]
    choice = node.choose(claim(*results, result("cpudevnuma002", 2, request="b")), "5,7,8,10,22")
    assert str(choice.cpus) == "5,7-8,10,22"
    assert choice.by_request["b"] >= CpuSet([8, 10])


def test_cpus_that_are_reserved_by_now_are_recognised() -> None:
    assert Node().choose(claim(result(cpus=3)), "0-2").cpus == CpuSet([0, 1, 2])


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            "4-5",
            "device cpudevnuma001: 3 CPUs wanted, but of the CPUs that the claim holds already, 4-5, it has 2; "
            "expected the same, or that the claim is unprepared first",
        ),
        ("8-10", "it has 0; expected"),
        (
            "4-6,8,40",
            "CPUs 8,40 are held by the claim already, but of none of its devices, cpudevnuma001; "
            "expected CPUs of these only, or that the claim is unprepared first",
        ),
    ],
)
def test_cpus_that_do_not_fit_the_claim_are_refused(held: str, message: str) -> None:
    assert message in Node("numanode").refusal(claim(result("cpudevnuma001", 3)), held=held)


def test_cpus_that_two_claims_hold_are_not_one_claims() -> None:
    node = Node()
    node.hold(OTHER, "2")
    node.held[UID] = CpuSet.parse("1-2")
    message = node.refusal(claim(result(cpus=2)), ClaimPendingError, held="1-2")
    assert message == f"of the CPUs that the claim holds already, CPU 2 is held by claim {OTHER} too"


# For all states.


FREE = st.sets(st.sampled_from([cpu for cpu in range(32) if cpu not in (0, 16)]))
PLACEMENT = st.fixed_dictionaries(
    {}, optional={"spread": st.just("cores"), "numa": st.just("distribute"), "coreType": st.just("any")}
)
RESULTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=6
)


@given(FREE, RESULTS, st.dictionaries(st.sampled_from(["a", "b", "c"]), PLACEMENT))
def test_what_fits_is_placed_and_nothing_else(
    free: set[int], wanted: list[tuple[str, int, int]], placement: Mapping[str, Mapping[str, str]]
) -> None:
    node = Node("numanode")
    node.hold(OTHER, str(CpuSet(range(32)) - CpuSet(free) - CpuSet([0, 16])))
    results = [result(f"cpudevnuma{device:03}", cpus, request=request) for request, device, cpus in wanted]
    asked = claim(*results, configs=[wish(request, **choices) for request, choices in placement.items()])
    by_device = {device.name: sum(r.cpus for r in results if r.device == device.name) for device in node.model.devices}
    sizes = {device.name: (len(device.cpus), len(device.cpus & CpuSet(free))) for device in node.model.devices}
    if any(by_device[name] > total for name, (total, _) in sizes.items()):
        node.refusal(asked)
    elif any(by_device[name] > left for name, (_, left) in sizes.items()):
        node.refusal(asked, ClaimPendingError)
    else:
        assert node.choose(asked) == node.choose(asked)


KINDS = ("any", "p-core", "e-core")


def possible(free: CpuSet, demands: Sequence[tuple[int, str, bool]]) -> bool:
    """Say whether CPUs of the hybrid machine can be divided so, by trying all ways."""
    cores = [(CpuSet([0, 1]), "p-core"), (CpuSet([2, 3]), "p-core"), *((CpuSet([cpu]), "e-core") for cpu in (4, 5, 6))]
    whole = [(len(cpus), kind) for cpus, kind in cores if cpus <= free]
    rest = [kind for cpus, kind in cores if not cpus <= free for _ in cpus & free]
    picky = [(cpus, kind) for cpus, kind, full in demands if full]
    easy = [(cpus, kind) for cpus, kind, full in demands if not full]
    for owners in itertools.product([None, *range(len(picky))], repeat=len(whole)):
        given_to = [0] * len(picky)
        left = list(rest)
        fits = True
        for owner, (cpus, kind) in zip(owners, whole, strict=True):
            if owner is None:
                left += [kind] * cpus
            else:
                given_to[owner] += cpus
                fits = fits and picky[owner][1] in ("any", kind)
        if not fits or given_to != [cpus for cpus, _ in picky]:
            continue
        if len(left) >= sum(cpus for cpus, _ in easy) and all(
            left.count(kind) >= sum(cpus for cpus, wanted in easy if wanted == kind) for kind in KINDS[1:]
        ):
            return True
    return False


@given(
    st.sets(st.integers(0, 6)),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=3),
)
def test_a_claim_that_can_be_satisfied_is(free: set[int], demands: list[tuple[int, str, bool]]) -> None:
    node = Node(reserved="", topology=hybrid())
    node.hold(OTHER, str(CpuSet(range(7)) - CpuSet(free)))
    results = [result(cpus=cpus, request=f"r{number}") for number, (cpus, _, _) in enumerate(demands)]
    configs = [
        wish(f"r{number}", coreType=kind, fullCores="require" if full else "prefer")
        for number, (_, kind, full) in enumerate(demands)
    ]
    asked = claim(*results, configs=configs)
    if possible(CpuSet(free), demands):
        for number, (_, kind, full) in enumerate(demands):
            cpus = node.choose(asked).by_request[f"r{number}"]
            assert kind == "any" or cpus <= CpuSet(range(4) if kind == "p-core" else range(4, 7))
            assert not full or len(cpus & CpuSet([0, 1])) != 1 != len(cpus & CpuSet([2, 3]))
    elif possible(CpuSet(range(7)), demands):
        node.refusal(asked, ClaimPendingError)
    else:
        node.refusal(asked)
