# SPDX-License-Identifier: Apache-2.0
"""Who may have some CPUs, beside a look at each."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from driver.names import ClaimUID
from driver.nri.container import Container, Phase, Pod
from driver.nri.containers import Containers
from driver.nri.occupancy import Occupancy
from fastcpu import CpuSet

POD = Pod(uid="p", sandbox="p", namespace="default", name="p")
UIDS = [ClaimUID("a"), ClaimUID("b")]
SETS = [CpuSet.parse(text) for text in ("", "0", "1-2", "63-64", "0-200", "128,300")]
CHANGES = ("moved", "update", "push", "fail", "seen", "believe", "start")
cpusets = st.sampled_from(SETS)


@given(st.lists(cpusets, max_size=8), st.data())
def test_the_sets_that_reach_some_cpus(sets, data):
    occupancy = Occupancy()
    for cpus in sets:
        occupancy.add(cpus)
    gone = data.draw(st.lists(st.sampled_from(range(len(sets))), unique=True)) if sets else []
    for index in gone:
        occupancy.remove(sets[index])
    left = [index for index in range(len(sets)) if index not in gone]
    own = data.draw(st.lists(st.sampled_from(left), unique=True)) if left else []
    wanted = data.draw(cpusets)
    expected = any(not sets[index].isdisjoint(wanted) for index in left if index not in own)
    assert occupancy.reaches(wanted, besides=[sets[index] for index in own]) is expected
    for index in left:
        occupancy.remove(sets[index])
    assert not occupancy.reaches(SETS[4])


def test_a_set_beyond_all_that_were_added_is_reached_by_none():
    occupancy = Occupancy()
    occupancy.add(CpuSet([3]))
    assert not occupancy.reaches(CpuSet([5000]))
    assert occupancy.reaches(CpuSet([3, 5000]))
    assert not occupancy.reaches(CpuSet())


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class Living(RuleBasedStateMachine):
    """Containers come, change and go; who is on a claim's CPUs is what a look at each would say."""

    def __init__(self) -> None:
        super().__init__()
        self.containers = Containers()
        self.offline = CpuSet()
        self.now = 0.0

    def some(self, data: st.DataObject) -> Container | None:
        found = list(self.containers)
        return data.draw(st.sampled_from(found)) if found else None

    @rule(number=st.integers(0, 5), uids=st.sets(st.sampled_from(UIDS)), cpus=cpusets)
    def create(self, number: int, uids: set[ClaimUID], cpus: CpuSet) -> None:
        one = Container.created(f"c{number}", "c", POD, frozenset(uids), CpuSet(), cpus, self.now)
        self.containers.add(one)

    @rule(number=st.integers(0, 5))
    def remove(self, number: int) -> None:
        self.containers.remove(f"c{number}")

    @rule(
        data=st.data(),
        cpus=cpusets,
        what=st.sampled_from(["moved", "update", "push", "fail", "seen", "believe", "start"]),
    )
    def change(self, data: st.DataObject, cpus: CpuSet, what: str) -> None:
        if (one := self.some(data)) is None:
            return
        self.now += 1
        if what == "moved":
            one.moved(cpus, self.now)
        elif what == "update":
            one.updating(cpus, self.now)
            one.updated(self.now)
        elif what == "push":
            one.pushing(cpus)
            one.pushed(cpus, self.now, one.events, self.now)
        elif what == "fail":
            one.pushing(cpus)
            one.push_failed("no", self.now, retry_s=1, settled=data.draw(st.booleans()))
        elif what == "seen":
            assert one.seen(cpus, self.now) is (cpus == one.given)
        elif what == "believe":
            one.believe(one.serial)
            assert not one.is_doubted
        else:
            one.phase = Phase.CREATED
            one.started(self.now)

    @rule(number=st.integers(0, 5))
    def replace(self, number: int) -> None:
        left = [one for one in self.containers if one.id != f"c{number}"]
        self.containers.replace_all(left)

    @rule(cpus=cpusets)
    def go_offline(self, cpus: CpuSet) -> None:
        self.offline = cpus

    @invariant()
    def others_are_those_that_one_would_find(self) -> None:
        for uid in UIDS:
            for cpus in SETS:
                expected = {
                    one.id
                    for one in self.containers
                    if uid not in one.claims
                    and ((self.offline and one.given <= self.offline) or not one.may_have.isdisjoint(cpus))
                }
                assert {one.id for one in self.containers.others(uid, cpus, self.offline)} == expected

    @invariant()
    def the_doubted_are_those_that_say_so(self) -> None:
        assert {one.id for one in self.containers.doubted} == {one.id for one in self.containers if one.is_doubted}


TestLiving = Living.TestCase
