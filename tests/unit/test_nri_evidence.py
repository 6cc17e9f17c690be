# SPDX-License-Identifier: Apache-2.0
"""What of a container's text is read, and how much of it."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

import hostile
from driver.apis import nri_v1alpha1_pb2 as nri
from driver.errors import ApiError
from driver.ledger import Ledger
from driver.metrics import Metrics
from driver.nri.enforcement import Enforcement
from driver.nri.environment import claim_entries
from driver.nri.errors import Refusal
from driver.nri.evidence import NO_EVIDENCE, Entry, HeldClaims, read_evidence
from driver.nri.messages import container_evidence, read_cpulist
from driver.nri.plugin import RuntimePlugin
from driver.nri.reservations import Reservations
from driver.nri.sharedpool import SharedPool
from fastcpu import CpuSet
from fastcpu.pool import CpuPool
from kernel_model import NoCgroups
from records import make_record

UID = "0c5a1cb4-6c6e-4c0e-9f0c-5d1c7f3f9a11"
CPUS = "2-5"


class Parsed:
    """Counts the characters of which anything in the driver made a set of CPUs, and up to which CPU it might go."""

    def __init__(self) -> None:
        self.characters = 0
        self.words = 0

    def spy(self) -> type:
        parsed = self

        class Spy:
            def __new__(cls, *args: object) -> CpuSet:
                return CpuSet(*args)

            @staticmethod
            def parse(text: str, *, limit: int = 8192) -> CpuSet:
                parsed.characters += len(text)
                parsed.words += (1 + text.count(":") + text.count("-")) * limit // 64
                return CpuSet.parse(text, limit=limit)

        return Spy


@pytest.fixture
def parsed(monkeypatch, plugin) -> Parsed:
    parsed = Parsed()
    spy = parsed.spy()
    for name, module in list(sys.modules.items()):
        if name.startswith("driver.") and getattr(module, "CpuSet", None) is CpuSet:
            monkeypatch.setattr(module, "CpuSet", spy)
    return parsed


class Api:
    async def get_claim(self, namespace: str, name: str) -> dict[str, object]:
        raise ApiError(503, "the API server answered 503")


@pytest.fixture
def plugin() -> RuntimePlugin:
    online = CpuSet(range(64))
    ledger = Ledger(CpuPool(online, CpuSet(), online.words[np.newaxis]))
    ledger.hold(make_record(UID, CPUS))
    enforcement = Enforcement(ledger, SharedPool(ledger, CpuSet()), Reservations(Api()))
    plugin = RuntimePlugin(enforcement, Metrics(CollectorRegistry()), cgroups=NoCgroups(), start_guard=True)
    plugin.connected("containerd", "v2.4.2", "v0.12.3", 2.0)
    return plugin


ATTACKS = [
    *hostile.long_environments(UID, CPUS, 120_000),
    *hostile.many_variables(UID, CPUS, 120_000),
    *hostile.forgeries(UID, CPUS),
    *hostile.marks(UID, CPUS, 120_000),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_hostile_text_is_not_parsed(plugin, parsed, attack):
    pod = nri.PodSandbox(id="s", uid="u", name="p", namespace="n")
    container = attack.container("1", "s")
    words_in_values = attack.name in ("mentions in a value", "what looks like entries")
    with nullcontext() if words_in_values else pytest.raises(Refusal) as refusal:
        await plugin.create_container(pod, container)
    assert words_in_values or len(str(refusal.value)) < 700
    await plugin.synchronize([pod], [container])
    # A few bad characters may be parsed to say what is wrong with them.
    assert parsed.characters <= 2 * 64
    assert parsed.words <= 64


async def test_a_list_of_cpus_that_a_runtime_tells_is_not_parsed_beyond_the_machine(plugin, parsed):
    container = nri.Container(id="1", name="c", pod_sandbox_id="s", state=nri.CONTAINER_RUNNING)
    for text in (hostile.STRIDES * 10_000 + "0", "1," * 100_000 + "1"):
        container.linux.resources.cpu.cpus = text
        await plugin.synchronize([], [container])
        assert plugin._containers.get("1").may_have == CpuSet(range(64))
    assert parsed.characters == 0
    container.linux.resources.cpu.cpus = "0-1048575"
    await plugin.synchronize([], [container])
    assert parsed.words <= 64


async def test_the_claim_s_own_text_is_not_parsed(plugin, parsed):
    plugin._enforcement.reservations.learn_pod(UID, "u")
    [attack] = [each for each in ATTACKS if each.name == "the exact variable"]
    container = attack.container("1", "s")
    container.CDI_devices.add(name=f"dra.k8s.io/cpu=claim-{UID}")
    container.hooks.create_runtime.add(path=hostile.GUARD, args=["dracpu-start-guard", "v1", UID, CPUS])
    pod = nri.PodSandbox(id="s", uid="u", name="p", namespace="n")
    adjustment, _ = await plugin.create_container(pod, container)
    assert adjustment.linux.resources.cpu.cpus == CPUS
    assert parsed.characters == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3,8", "0-3,8"),
        ("0-62:1/2", "0-62:1/2"),
        ("", None),
        ("x", None),
        ("64", None),
        ("0-63:1/2," * 17 + "0", None),
    ],
)
def test_a_list_as_a_runtime_writes_it(text, expected):
    assert read_cpulist(text, 64) == (None if expected is None else CpuSet.parse(expected))


# What a claim's text may look like


@pytest.mark.parametrize("text", ["2-5", "2,3,4,5", "2,3-5", "5,4,3,2", "2-3,3-5"])
def test_any_spelling_of_the_claim_s_cpus_is_as_good(text):
    held = HeldClaims({UID: make_record(UID, CPUS)}, 64)
    entry = f"DRA_CPUSET_{UID}={text}"
    [variable] = read_evidence([Entry(entry, len(entry))], [], [(UID, text)], held).variables
    assert variable.cpus == CpuSet.parse(CPUS)
    assert read_evidence([], [], [(UID, text)], held).guards == {UID: CpuSet.parse(CPUS)}


def test_a_claim_may_have_cpus_that_the_machine_has_not():
    record = make_record(UID, "2,100-5000")
    held = HeldClaims({UID: record}, 5001)
    for text in ("2,100-5000", "100-5000,2"):
        entry = f"DRA_CPUSET_{UID}={text}"
        [variable] = read_evidence([Entry(entry, len(entry))], [], [], held).variables
        assert variable.cpus == record.cpus


@pytest.mark.parametrize(
    ("guards", "fault"),
    [
        ([(UID, "")], f"start guard hook of claim {UID} allows no CPUs"),
        ([(UID, "x")], f"start guard hook of claim {UID}: cpulist 'x'"),
        ([(UID, "0-4294967295")], f"start guard hook of claim {UID}: cpulist '0-4294967295'"),
    ],
)
def test_hooks_that_allow_nonsense(guards, fault):
    evidence = read_evidence([], [], guards, HeldClaims({UID: make_record(UID, CPUS)}, 64))
    assert evidence.fault.startswith(fault)


def test_a_claim_with_two_hooks_has_what_both_allow():
    held = HeldClaims({UID: make_record(UID, CPUS)}, 64)
    assert read_evidence([], [], [(UID, "2-3"), (UID, "7")], held).guards == {UID: CpuSet.parse("2-3,7")}
    assert read_evidence([], [], [("other", "2-3")], held).guards == {"other": None}


def test_of_many_variables_no_more_is_kept_than_decides():
    held = HeldClaims({UID: make_record(UID, CPUS)}, 64)
    entries = [f"DRA_CPUSET_{UID}={CPUS}", *(f"DRA_CPUSET_{number}=1" for number in range(200))]
    evidence = read_evidence([Entry(entry, len(entry)) for entry in entries], [], [], held)
    assert [variable.uid for variable in evidence.variables] == [UID, "0"]
    other = read_evidence([Entry(entries[0], len(entries[0]))], [], [], held)
    assert other.variables[0] is evidence.variables[0]


# Finding entries in bytes


def found(env: list[str], longest: int = 1000) -> list[str]:
    container = nri.Container(id="1", name="DRA_CPUSET_x=1", env=env, args=["DRA_CPUSET_y=1"])
    return [entry.text for entry in claim_entries(container.SerializeToString(), container.env, longest)]


@given(
    st.lists(
        st.one_of(
            st.text(max_size=20),
            st.builds("DRA_CPUSET_{}".format, st.text(max_size=300)),
            st.builds("X=DRA_CPUSET_{}".format, st.text(max_size=300)),
            st.just("DRA_CPUSET_"),
        ),
        max_size=30,
    )
)
def test_all_variables_of_claims_are_found_and_nothing_else(env):
    assert found(env) == [entry for entry in env if entry.startswith("DRA_CPUSET_")]


@pytest.mark.parametrize("length", [0, 115, 116, 117, 16371, 16372, 16373, 16374, 2_097_140, 2_097_141, 2_097_142])
def test_variables_are_found_whatever_their_length(length):
    entry = "DRA_CPUSET_" + "x" * length
    for beside in ([], ["A=" + "x" * 5000], ["a=b"] * 20):
        assert found([*beside, entry, "A=b"], 3_000_000) == [entry]
        container = nri.Container(env=[*beside, entry])
        [short] = claim_entries(container.SerializeToString(), container.env, 100)
        assert short == Entry(entry[:100], len(entry))


def test_a_document_about_the_driver_in_a_variable_is_no_sign_of_a_claim():
    env = ["A=b"] * 300 + ["DOC=" + "set DRA_CPUSET_x, or DRA_CPUSET_y\n" * 5000]
    held = HeldClaims({}, 64)
    assert found(env) == []
    evidence = container_evidence(nri.Container(env=env), held)
    assert evidence.is_none
    assert container_evidence(nri.Container(env=["A=b"] * 300), held) is NO_EVIDENCE


def test_among_thousands_of_variables_it_is_refused_for_mentions_without_end():
    env = ["A=b"] * 3000 + ["DOC=" + "DRA_CPUSET_" * 5000]
    evidence = container_evidence(nri.Container(env=env), HeldClaims({}, 64))
    assert evidence.fault == "it speaks of DRA_CPUSET_ variables too often; expected none, or a few"
