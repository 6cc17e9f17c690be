# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.errors import ApiError
from driver.names import ClaimUID
from driver.nri.container import Pod
from driver.nri.decisions import Exclusive, Marks, Refused, Request, Shared, Unverified, decide, decide_living
from driver.nri.evidence import Entry, HeldClaims, read_evidence
from driver.nri.reservations import Reservations, consumers
from fastcpu import CpuSet
from records import make_record as record_of

POD = Pod(uid="uid-p", sandbox="s", namespace="default", name="p")
BOTH = Marks(cdi_devices=True, guard=True)
NEITHER = Marks(cdi_devices=False, guard=False)
CDI = "dra.k8s.io/cpu=claim-"
RECORDS = {uid: record_of(uid, cpus) for uid, cpus in (("a", "2-5"), ("b", "8-9"))}


class Claims:
    """Two prepared claims, both reserved for the pod."""

    def __init__(self) -> None:
        self.records = dict(RECORDS)
        self.barred: dict[str, str] = {}
        self.owners: dict[str, tuple[Pod, str]] = {}
        self.pods: dict[str, set[str]] = {"a": {"uid-p"}, "b": {"uid-p"}}

    def why_barred(self, uid: str) -> str:
        return self.barred.get(uid, "")

    def owner(self, uid: str) -> tuple[Pod, str] | None:
        return self.owners.get(uid)

    def reserved_for(self, uid: str, pod_uid: str, *, marked: bool) -> bool:
        return pod_uid in self.pods[uid]

    def is_proven(self, uid: str, pod_uid: str) -> bool:
        return pod_uid in self.pods[uid]


@pytest.fixture
def claims() -> Claims:
    return Claims()


def request(*variables: str, cdi: str = "", guards: dict[str, str] | None = None, guard_fault: str = "") -> Request:
    evidence = read_evidence(
        [Entry(variable, len(variable)) for variable in variables],
        [CDI + uid for uid in cdi],
        [(ClaimUID(uid), text) for uid, text in (guards or {}).items()],
        HeldClaims(RECORDS, 64),
        fault=guard_fault,
    )
    return Request(name="main", pod=POD, evidence=evidence)


def living(made: Request, claims: Claims, marks: Marks = BOTH, cpus: str = "", looked: dict[str, str] | None = None):
    return decide_living(made, CpuSet.parse(cpus) or None, claims, marks, looked or {})


def exclusive(cpus: str, *uids: str) -> Exclusive:
    return Exclusive(cpus=CpuSet.parse(cpus), claims=frozenset(map(ClaimUID, uids)))


def refusal(decision: object) -> tuple[str, str]:
    assert isinstance(decision, Refused)
    assert decision.message.startswith("container 'main': ")
    assert len(decision.message) < 500
    assert decision.message.isprintable()
    return decision.reason, decision.message.removeprefix("container 'main': ")


def test_a_container_without_any_sign_of_a_claim_shares(claims):
    assert decide(request(), claims, BOTH, {}) == Shared()
    assert living(request(), claims, BOTH) == Shared()


@pytest.mark.parametrize(
    ("marks", "made"),
    [
        (BOTH, request("DRA_CPUSET_a=2-5", cdi="a", guards={"a": "2-5"})),
        (BOTH, request("DRA_CPUSET_a=2-5", cdi="a")),
        (BOTH, request("DRA_CPUSET_a=2-5", guards={"a": "2-5"})),
        (BOTH, request("DRA_CPUSET_a=2,3,4-5", cdi="a")),
        (Marks(cdi_devices=False, guard=True), request("DRA_CPUSET_a=2-5", guards={"a": "2-5"})),
        (Marks(cdi_devices=True, guard=False), request("DRA_CPUSET_a=2-5", cdi="a")),
        (NEITHER, request("DRA_CPUSET_a=2-5")),
    ],
)
def test_one_mark_is_enough_and_where_none_can_be_the_variable(claims, marks, made):
    assert decide(made, claims, marks, {}) == exclusive("2-5", "a")
    assert living(made, claims, marks) == exclusive("2-5", "a")


def test_several_claims_are_united(claims):
    made = request("DRA_CPUSET_b=8-9", "DRA_CPUSET_a=2-5", cdi="ab")
    assert decide(made, claims, BOTH, {}) == exclusive("2-5,8-9", "a", "b")


@pytest.mark.parametrize(
    ("made", "reason", "message"),
    [
        (request("DRA_CPUSET_a=2-5"), "unmarked", "was not given claim default/claim-a: do not set DRA_CPUSET_"),
        (
            request("DRA_CPUSET_a=2-5", "DRA_CPUSET_b=8-9", cdi="a"),
            "unmarked",
            "DRA_CPUSET_b is set, but the container",
        ),
        (request("DRA_CPUSET_c=2-5"), "unknown", "DRA_CPUSET_c is set, but no claim of that UID is prepared"),
        (request("DRA_CPUSET_c=2-5", cdi="c"), "unknown", "no claim of that UID is prepared on this node"),
        (request("DRA_CPUSET_a=2-4", cdi="a"), "mismatch", "is '2-4', but claim default/claim-a has CPUs 2-5"),
        (request("DRA_CPUSET_a=2-6", cdi="a"), "mismatch", "is '2-6', but claim default/claim-a has CPUs 2-5"),
        (request("DRA_CPUSET_a=8-9", cdi="a"), "mismatch", "is '8-9', but claim default/claim-a has CPUs 2-5"),
        (request("DRA_CPUSET_a=", cdi="a"), "malformed", "DRA_CPUSET_a is empty; expected the claim's CPUs"),
        (request("DRA_CPUSET_a", cdi="a"), "malformed", "'DRA_CPUSET_a' has no value; expected NAME=cpulist"),
        (request("DRA_CPUSET_a=2-5 ", cdi="a"), "malformed", "DRA_CPUSET_a is '2-5 '"),
        (request("DRA_CPUSET_a=x", cdi="a"), "malformed", "its image or its pod overrides it"),
        (request("DRA_CPUSET_a=0-4294967295"), "malformed", "DRA_CPUSET_a is '0-4294967295'"),
        (request(f"DRA_CPUSET_a={'1,' * 99999}1", cdi="a"), "mismatch", "characters), but claim default/claim-a"),
        (request("DRA_CPUSET_=1"), "malformed", "claim UID '' is malformed"),
        (request("DRA_CPUSET_../x=1"), "malformed", "claim UID '../x' is malformed"),
        (request(f"DRA_CPUSET_{'u' * 99999}=1"), "malformed", "is malformed"),
        (request("DRA_CPUSET_\n=1"), "malformed", "is malformed"),
        (
            request(*(f"DRA_CPUSET_{n}=1" for n in range(999))),
            "unknown",
            "DRA_CPUSET_0 is set, but no claim of that UID",
        ),
        (request(*(f"DRA_CPUSET_{n}=1" for n in range(999)), cdi="a"), "malformed", "it has more than 256 DRA_CPUSET_"),
        (request("DRA_CPUSET_a=2-5", "DRA_CPUSET_a=2-5", cdi="a"), "override", "DRA_CPUSET_a is set more than once"),
        (request("DRA_CPUSET_a=2-5", "DRA_CPUSET_a=8", cdi="a"), "override", "DRA_CPUSET_a is set more than once"),
        (request(cdi="a"), "override", "has the CDI device of claim a, but DRA_CPUSET_a is missing"),
        (request(guards={"a": "2-5"}), "override", "DRA_CPUSET_a is missing from its environment"),
        (request("DRA_CPUSET_b=8-9", cdi="ab"), "override", "has the CDI device of claim a"),
        (request("DRA_CPUSET_a=2-5", guards={"a": "2-6"}), "mismatch", "its start guard allows CPUs 2-6, but claim"),
        (request(guard_fault="start guard hook is odd"), "malformed", "start guard hook is odd"),
        (request("DRA_CPUSET_a=2-5", cdi="a", guard_fault="odd"), "malformed", "odd"),
        (
            request("DRA_CPUSET_a=2-5", cdi=("a", "")),
            "malformed",
            "CDI device 'dra.k8s.io/cpu=claim-' is none of a claim",
        ),
    ],
)
def test_whatever_does_not_agree_is_refused_and_says_what(claims, made, reason, message):
    assert refusal(decide(made, claims, BOTH, {}))[0] == reason
    assert message in refusal(decide(made, claims, BOTH, {}))[1]
    assert refusal(living(made, claims, BOTH))[0] == reason


def test_a_living_container_may_be_older_than_the_guard(claims):
    marks = Marks(cdi_devices=False, guard=True)
    made = request("DRA_CPUSET_a=2-5")
    assert refusal(decide(made, claims, marks, {}))[0] == "unmarked"
    assert living(made, claims, marks) == exclusive("2-5", "a")


def test_a_claim_that_is_coming_or_going_takes_no_container(claims):
    claims.barred["a"] = "is being unprepared"
    reason, message = refusal(decide(request("DRA_CPUSET_a=2-5", cdi="a"), claims, BOTH, {}))
    assert (reason, message) == ("barred", "claim default/claim-a (a) is being unprepared")


def test_only_the_pod_whose_container_lives_uses_a_claim(claims):
    made = request("DRA_CPUSET_a=2-5", cdi="a")
    claims.owners["a"] = (Pod(uid="uid-q", sandbox="s", namespace="other", name="q"), "first")
    reason, message = refusal(decide(made, claims, BOTH, {}))
    assert reason == "owned"
    assert "used by pod other/q, whose container first has not ended; only one pod" in message
    claims.owners["a"] = (POD, "first")
    assert decide(made, claims, BOTH, {}) == exclusive("2-5", "a")


def test_a_pod_for_which_the_claim_is_not_known_to_be_reserved_is_looked_for_once(claims):
    claims.pods["a"] = set()
    made = request("DRA_CPUSET_a=2-5", "DRA_CPUSET_b=8-9", cdi="ab")
    assert decide(made, claims, BOTH, {}) == Unverified(claims=(ClaimUID("a"),))
    reason, message = refusal(decide(made, claims, BOTH, {ClaimUID("a"): ""}))
    assert reason == "foreign"
    assert "claim default/claim-a (a) is not reserved for pod default/p; expected the pod in its" in message
    reason, message = refusal(decide(made, claims, BOTH, {ClaimUID("a"): "the API server answered 503"}))
    assert reason == "unverified"
    assert "cannot be found out: the API server answered 503" in message
    claims.pods["a"] = {"uid-p"}
    assert decide(made, claims, BOTH, {ClaimUID("a"): ""}) == exclusive("2-5,8-9", "a", "b")


def test_nobody_is_asked_about_a_container_that_is_refused_anyway(claims):
    claims.pods = {"a": set(), "b": set()}
    assert refusal(decide(request("DRA_CPUSET_a=2-5"), claims, BOTH, {}))[0] == "unmarked"


TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["a", "b", "c", "", "2-5", "8-9", "2-5,8-9", "0-63", "-", "A", "a=", "2-5=", " "]),
)


@given(
    variables=st.lists(
        st.one_of(
            st.builds("DRA_CPUSET_{}={}".format, TEXTS, TEXTS),
            st.builds("DRA_CPUSET_{}".format, TEXTS),
            st.sampled_from(["DRA_CPUSET_a=2-5", "DRA_CPUSET_b=8-9"]),
        ),
        max_size=4,
    ),
    devices=st.sets(st.sampled_from([CDI + "a", CDI + "b", CDI + "c", "dra.k8s.io/cpu=x"])),
    guards=st.sets(st.sampled_from("abc")),
    marks=st.builds(Marks, cdi_devices=st.booleans(), guard=st.booleans()),
)
def test_cpus_are_only_given_as_the_ledger_says_and_signs_of_a_claim_are_never_shared(
    variables, devices, guards, marks
):
    claims = Claims()
    every = {"a": "2-5", "b": "8-9", "c": "0"}
    evidence = read_evidence(
        [Entry(variable, len(variable)) for variable in variables],
        list(devices),
        [(ClaimUID(uid), every[uid]) for uid in guards],
        HeldClaims(RECORDS, 64),
    )
    made = Request(name="main", pod=POD, evidence=evidence)
    for decision in (decide(made, claims, marks, {}), living(made, claims, marks)):
        if isinstance(decision, Shared):
            assert not variables
            assert not devices
            assert not guards
        elif isinstance(decision, Exclusive):
            assert decision.cpus == CpuSet().union(*(claims.records[uid].cpus for uid in decision.claims))
            assert sorted(variables) == [f"DRA_CPUSET_{uid}={every[uid]}" for uid in sorted(decision.claims)] or all(
                CpuSet.parse(variable.partition("=")[2]) == claims.records[variable[11:].partition("=")[0]].cpus
                for variable in variables
            )
            assert {device.removeprefix(CDI) for device in devices} | guards <= set(decision.claims)
        else:
            assert isinstance(decision, Refused)


# For which pods claims are reserved


def reserved(*entries: object) -> dict[str, object]:
    return {"metadata": {"uid": "a"}, "status": {"reservedFor": list(entries)}}


def pod(uid: object) -> dict[str, object]:
    return {"resource": "pods", "name": "x", "uid": uid}


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (reserved(pod("1"), pod("2")), {"1", "2"}),
        (reserved(pod("1"), {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "uid": "3"}), {"1", ""}),
        (reserved({"apiGroup": "x", "resource": "pods", "uid": "3"}), {""}),
        (reserved(pod(3), pod(""), pod(None), "x", None), set()),
        ({"status": {"reservedFor": "x"}}, set()),
        ({"status": []}, set()),
        ({}, set()),
    ],
)
def test_the_pods_of_a_claim_are_read(claim, expected):
    assert consumers(claim) == expected


class Api:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def get_claim(self, namespace: str, name: str) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_a_claim_is_read_again(make_record):
    record = make_record("a")
    reservations = Reservations(Api(reserved(pod("1"))))
    assert not reservations.reserved_for("a", "1", marked=True)
    assert await reservations.look(record, 1.0) == ""
    assert reservations.reserved_for("a", "1", marked=False)
    assert not reservations.reserved_for("a", "2", marked=True)
    reservations.learn_pod("a", "2")
    assert reservations.reserved_for("a", "2", marked=False)
    reservations.forget("a")
    assert not reservations.reserved_for("a", "1", marked=True)


async def test_a_claim_reserved_for_others_than_pods_needs_the_mark(make_record):
    reservations = Reservations(Api({}))
    reservations.learn("a", reserved({"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "uid": "3"}))
    assert reservations.reserved_for("a", "1", marked=True)
    assert not reservations.reserved_for("a", "1", marked=False)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ApiError(503, "the API server answered 503"), "the API server answered 503"),
        (TimeoutError(), "the API server did not answer within 0.5 s"),
        ({"metadata": {"uid": "b"}}, "the API server has another claim of that name by now"),
        ({}, "the API server has another claim of that name by now"),
    ],
)
async def test_a_claim_that_cannot_be_read_says_why(make_record, answer, why):
    assert await Reservations(Api(answer)).look(make_record("a"), 0.5) == why
