# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from driver.ledger import Ledger
from fastcpu import CpuSet
from fastcpu.errors import CpuHoldError
from fastcpu.pool import CpuPool
from records import make_record

N_WORDS = 2
CPUS = N_WORDS * 64


def make_pool() -> CpuPool:
    """128 CPUs, of which 120-127 are offline and 0-3 reserved, in one group."""
    groups = np.full((1, N_WORDS), ~np.uint64(0))
    return CpuPool(CpuSet(range(120)), CpuSet(range(4)), groups)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(make_pool())


def test_the_highest_cpu_that_anything_is_about_is_the_machine_s_or_some_record_s(ledger):
    assert ledger.stop == CPUS
    ledger.hold_anyway(make_record("a", "4-5000"))
    assert ledger.stop == 5001
    ledger.release("a")
    assert ledger.stop == 5001


def test_a_held_cpu_is_taken_until_its_release(ledger):
    record = make_record("a", "4-7")
    ledger.hold(record)
    assert ledger.get("a") is record
    assert ledger.records == {"a": record}
    assert ledger.pool.taken == CpuSet.parse("4-7")
    ledger.release("a")
    assert ledger.get("a") is None
    assert ledger.records == {}
    assert not ledger.pool.taken


def test_two_claims_never_hold_one_cpu(ledger):
    ledger.hold(make_record("a", "4-7"))
    with pytest.raises(CpuHoldError) as refusal:
        ledger.hold(make_record("b", "7-9"))
    assert refusal.value.cpus == CpuSet([7])
    assert ledger.get("b") is None
    assert ledger.pool.taken == CpuSet.parse("4-7")


@pytest.mark.parametrize("method", ["hold", "hold_anyway"])
def test_a_claim_is_held_once(ledger, method):
    ledger.hold(make_record("a", "4-7"))
    with pytest.raises(ValueError, match="claim a holds CPUs 4-7 already"):
        getattr(ledger, method)(make_record("a", "8"))
    assert ledger.pool.taken == CpuSet.parse("4-7")


def test_cpus_that_the_machine_has_not_cannot_be_given_out(ledger):
    with pytest.raises(CpuHoldError):
        ledger.hold(make_record("a", f"4,{CPUS}"))
    assert ledger.get("a") is None
    assert not ledger.pool.taken


def test_what_was_given_out_earlier_is_held_whatever_it_is(ledger):
    # Reserved, fine, offline, and beyond everything that this machine could have.
    others = ledger.hold_anyway(make_record("a", f"2,50,125,{CPUS},8000"))
    assert others == {}
    assert ledger.pool.taken == CpuSet([2, 50, 125])
    assert ledger.holders(CpuSet([8000, 50, 51])) == {"a": CpuSet([50, 8000])}
    ledger.release("a")
    assert not ledger.pool.taken


def test_releasing_one_of_two_holders_frees_only_what_it_held_alone(ledger):
    ledger.hold_anyway(make_record("a", "4-7"))
    assert ledger.hold_anyway(make_record("b", "6-9")) == {"a": CpuSet.parse("6-7")}
    assert ledger.holders(CpuSet.parse("7-20")) == {"a": CpuSet([7]), "b": CpuSet.parse("7-9")}
    ledger.release("a")
    assert ledger.pool.taken == CpuSet.parse("6-9")
    with pytest.raises(CpuHoldError):
        ledger.hold(make_record("c", "6"))
    ledger.release("b")
    assert not ledger.pool.taken


def test_a_record_is_replaced_only_by_one_with_the_same_cpus(ledger):
    ledger.hold(make_record("a", "4-7", adopted=True))
    with pytest.raises(CpuHoldError):
        ledger.replace(make_record("a", "4-8"))
    verified = make_record("a", "4-7")
    ledger.replace(verified)
    assert ledger.get("a") is verified
    assert ledger.pool.taken == CpuSet.parse("4-7")
    with pytest.raises(KeyError):
        ledger.replace(make_record("b", "8"))


def test_releasing_an_unknown_claim_is_an_error(ledger):
    with pytest.raises(KeyError):
        ledger.release("a")


def test_the_view_of_the_records_cannot_be_written(ledger):
    with pytest.raises(TypeError):
        ledger.records["a"] = make_record("a", "4")


def test_a_ledger_of_a_pool_without_cpus():
    ledger = Ledger(CpuPool(CpuSet(), CpuSet(), np.zeros((0, 0), np.uint64)))
    ledger.hold_anyway(make_record("a", "0-3"))
    ledger.release("a")
    assert ledger.records == {}


@pytest.mark.parametrize("change", ["hold", "hold_anyway", "replace", "release"])
async def test_every_change_wakes_who_took_the_event_before_it(ledger, change):
    if change in ("replace", "release"):
        ledger.hold(make_record("a", "4-7"))
    event = ledger.changed
    assert not event.is_set()
    if change == "release":
        ledger.release("a")
    else:
        getattr(ledger, change)(make_record("a", "4-7"))
    # Already set when it is awaited at last: nothing is lost in between.
    async with asyncio.timeout(60):
        await event.wait()
    assert not ledger.changed.is_set()


async def test_a_refused_change_wakes_nobody(ledger):
    ledger.hold(make_record("a", "4-7"))
    event = ledger.changed
    with pytest.raises(CpuHoldError):
        ledger.hold(make_record("b", "7"))
    assert not event.is_set()
    assert ledger.changed is event


uids = st.sampled_from("abcdef")
cpu_sets = st.sets(st.integers(0, CPUS + 8), min_size=1, max_size=12).map(CpuSet)


class LedgerMachine(RuleBasedStateMachine):
    """The ledger does what a dict of sets does."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(make_pool())
        self.model: dict[str, set[int]] = {}

    def held(self) -> set[int]:
        return set().union(*self.model.values())

    @rule(uid=uids, cpus=cpu_sets)
    def hold(self, uid: str, cpus: CpuSet) -> None:
        record = make_record(uid, str(cpus))
        allowed = uid not in self.model and not self.held() & set(cpus) and max(cpus) < CPUS
        try:
            self.ledger.hold(record)
        except (CpuHoldError, ValueError):
            assert not allowed
        else:
            assert allowed
            self.model[uid] = set(cpus)

    @rule(uid=uids, cpus=cpu_sets)
    def hold_anyway(self, uid: str, cpus: CpuSet) -> None:
        if uid in self.model:
            return
        overlap = {other: held & set(cpus) for other, held in self.model.items() if held & set(cpus)}
        others = self.ledger.hold_anyway(make_record(uid, str(cpus)))
        assert {other: set(found) for other, found in others.items()} == overlap
        self.model[uid] = set(cpus)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.model)))
        self.ledger.release(uid)
        del self.model[uid]

    @rule(cpus=cpu_sets)
    def holders(self, cpus: CpuSet) -> None:
        expected = {uid: held & set(cpus) for uid, held in self.model.items() if held & set(cpus)}
        assert {uid: set(found) for uid, found in self.ledger.holders(cpus).items()} == expected

    @invariant()
    def agrees(self) -> None:
        assert {uid: set(record.cpus) for uid, record in self.ledger.records.items()} == self.model
        assert set(self.ledger.pool.taken) == {cpu for cpu in self.held() if cpu < CPUS}


TestLedgerMachine = LedgerMachine.TestCase
