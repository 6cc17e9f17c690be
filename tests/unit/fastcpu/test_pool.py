# SPDX-License-Identifier: Apache-2.0
"""CpuPool beside a model made of Python sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastcpu import CpuSet
from fastcpu.errors import CpuCheckError, CpuHoldError, CpuListError
from fastcpu.pool import CpuPool


def rows(*cpulists: str, n_words: int = 2) -> np.ndarray:
    masks = np.zeros((len(cpulists), n_words), np.uint64)
    for row, text in zip(masks, cpulists, strict=True):
        words = CpuSet.parse(text).words
        row[: len(words)] = words
    return masks


@pytest.fixture
def pool() -> CpuPool:
    """Two groups of 32 CPUs each on 64 CPUs; 0 and 32 reserved, 31 and 63 offline."""
    return CpuPool(CpuSet.parse("0-30,32-62"), CpuSet.parse("0,32"), rows("0-31", "32-63"))


def test_a_good_choice(pool):
    assert pool.check("2-5", [(0, 4)]) == CpuSet.parse("2-5")
    assert pool.check("2-5,40", ((0, 4), (1, 1))) == CpuSet.parse("2-5,40")
    assert pool.check("1-30", [(0, 30)]) == CpuSet.parse("1-30")
    assert pool.check("2,2,2-3,3", [(0, 2)]) == CpuSet.parse("2-3")
    assert pool.check("1-8:1/2", [(0, 4)]) == CpuSet.parse("1,3,5,7")


def test_the_demands_of_one_group_add_up(pool):
    assert pool.check("2-5,33", [(0, 1), (1, 1), (0, 3)])
    with pytest.raises(CpuCheckError) as caught:
        pool.check("2-5,33", [(0, 1), (1, 1), (0, 2)])
    assert caught.value.miscounted == ((0, 3, 4),)


@pytest.mark.parametrize(
    ("cpulist", "demands", "fault", "value"),
    [
        ("30-31", [(0, 2)], "unmanaged", "31"),
        ("5,100", [(0, 2)], "unmanaged", "100"),
        ("5,8000", [(0, 2)], "unmanaged", "8000"),
        ("0-3", [(0, 4)], "reserved", "0"),
        ("3,40", [(0, 2)], "outside", "40"),
        ("16-17", [(0, 2)], "taken", "16"),
    ],
)
def test_names_the_cpus_at_fault(pool, cpulist, demands, fault, value):
    pool.take(CpuSet.parse("10-16"))
    with pytest.raises(CpuCheckError) as caught:
        pool.check(cpulist, demands)
    faults = {name: str(getattr(caught.value, name)) for name in ("unmanaged", "reserved", "outside", "taken")}
    assert faults.pop(fault) == value
    assert not any(faults.values())
    assert f"CPUs {value} " in str(caught.value)


def test_says_everything_that_is_wrong_at_once(pool):
    pool.take(CpuSet.parse("10"))
    with pytest.raises(CpuCheckError) as caught:
        pool.check("0,10,31,40", [(0, 5)])
    error = caught.value
    assert str(error.unmanaged) == "31"
    assert str(error.reserved) == "0"
    assert str(error.outside) == "40"
    assert str(error.taken) == "10"
    assert error.miscounted == ((0, 5, 3),)
    assert str(error).count(";") == 4


@pytest.mark.parametrize(
    ("cpulist", "demands", "miscounted"),
    [("2-5", [(0, 5)], ((0, 5, 4),)), ("2-5", [(0, 3)], ((0, 3, 4),)), ("", [(0, 1)], ((0, 1, 0),)),
     ("2-3,40", [(0, 1), (1, 2)], ((0, 1, 2), (1, 2, 1)))],
)  # fmt: skip
def test_counts_per_group(pool, cpulist, demands, miscounted):
    with pytest.raises(CpuCheckError) as caught:
        pool.check(cpulist, demands)
    assert caught.value.miscounted == miscounted


def test_nothing_demanded_and_nothing_chosen_fits(pool):
    assert pool.check("", []) == CpuSet()
    with pytest.raises(CpuCheckError):
        pool.check("5", [])


@pytest.mark.parametrize("demands", [[(2, 1)], [(-1, 1)], [(0, -1)], [(0,)], [(0, 1, 2)], [("0", 1)], [0], 3])
def test_refuses_senseless_demands(pool, demands):
    with pytest.raises((ValueError, TypeError)):
        pool.check("2", demands)
    with pytest.raises((ValueError, TypeError)):
        pool.check("2", tuple(demands) if isinstance(demands, list) else demands)


@pytest.mark.parametrize("cpulist", ["0-4294967295", "5-2", "x"])
def test_refuses_what_is_no_cpulist(pool, cpulist):
    with pytest.raises(CpuListError):
        pool.check(cpulist, [(0, 1)])


def test_take_is_all_or_nothing(pool):
    pool.take(CpuSet.parse("4-7"))
    with pytest.raises(CpuHoldError) as caught:
        pool.take(CpuSet.parse("6-9"))
    assert caught.value.cpus == CpuSet.parse("6-7")
    assert pool.taken == CpuSet.parse("4-7")
    with pytest.raises(CpuHoldError) as caught:
        pool.take(CpuSet.parse("1,128-129"))
    assert caught.value.cpus == CpuSet.parse("128-129")
    assert pool.taken == CpuSet.parse("4-7")


def test_release_is_all_or_nothing(pool):
    pool.take(CpuSet.parse("4-7"))
    for cpus in ("7-8", "7,300"):
        with pytest.raises(CpuHoldError, match="not taken"):
            pool.release(CpuSet.parse(cpus))
    assert pool.taken == CpuSet.parse("4-7")
    pool.release(CpuSet.parse("5"))
    assert pool.taken == CpuSet.parse("4,6-7")


def test_what_an_older_configuration_gave_out_can_stay_taken(pool):
    pool.take(CpuSet.parse("0,31,70"))
    assert pool.taken == CpuSet.parse("0,31,70")
    assert pool.available == CpuSet.parse("1-30,33-62")


def test_a_cpu_that_went_offline_is_given_to_nobody_until_it_is_back(pool):
    before = (str(pool.available), pool.allocatable.tolist(), str(pool.online))
    pool.take(CpuSet.parse("4"))
    pool.set_offline(CpuSet.parse("4-5,8000"))
    assert 5 not in pool.available
    assert str(pool.offline) == "4-5"
    assert str(pool.online) == before[2]
    with pytest.raises(CpuCheckError) as caught:
        pool.check("4-6", [(0, 3)])
    assert (str(caught.value.unmanaged), str(caught.value.taken)) == ("4-5", "4")
    # Who holds one lets go of it as ever.
    pool.release(CpuSet.parse("4"))
    assert 4 not in pool.available
    pool.set_offline(CpuSet())
    assert (str(pool.available), pool.allocatable.tolist(), str(pool.online)) == before


def test_allocatable_is_a_read_only_view(pool):
    assert CpuSet.from_array(pool.allocatable[1]) == CpuSet.parse("33-62")
    with pytest.raises(ValueError, match="read-only"):
        pool.allocatable[0, 0] = 0


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (rows("0-3", "3-5"), "share a CPU"),
        (rows("0-3", "0-3", "0-3"), "share a CPU"),
        (np.zeros(2, np.uint64), "two dimensions"),
        (np.zeros((1, 2), np.int64), "uint64"),
        (np.zeros((1, 0), np.uint64), "do not fit in 0 words"),
    ],
)
def test_refuses_bad_groups(groups, message):
    with pytest.raises(ValueError, match=message):
        CpuPool(CpuSet([1]), CpuSet(), groups)


def test_does_not_share_the_callers_array():
    groups = rows("0-3")
    pool = CpuPool(CpuSet.parse("0-3"), CpuSet(), groups)
    groups[:] = 0
    assert pool.check("0-3", [(0, 4)])


def test_machines_without_groups_or_words():
    empty = CpuPool(CpuSet(), CpuSet.parse("0-500"), np.zeros((0, 0), np.uint64))
    assert empty.check("", []) == CpuSet()
    assert empty.available == CpuSet()


small = st.frozensets(st.integers(0, 140), max_size=30)


@given(
    online=small,
    reserved=small,
    taken=small,
    chosen=small,
    split=st.integers(1, 139),
    counts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    honest=st.booleans(),
)
def test_agrees_with_sets(online, reserved, taken, chosen, split, counts, honest):
    members = [set(range(split)), set(range(split, 140))]
    pool = CpuPool(CpuSet(online), CpuSet(reserved), rows(f"0-{split - 1}", f"{split}-139", n_words=3))
    pool.take(CpuSet(taken))
    if honest:
        counts = tuple(len(chosen & group) for group in members)
    wrong = {
        "unmanaged": chosen - online,
        "reserved": chosen & online & reserved,
        "outside": (chosen & online) - reserved - members[0] - members[1],
        "taken": chosen & taken,
    }
    miscounted = tuple(
        (i, count, len(chosen & group))
        for i, (count, group) in enumerate(zip(counts, members, strict=True))
        if len(chosen & group) != count
    )
    text = ",".join(map(str, chosen))
    demands = list(enumerate(counts))
    if not any(wrong.values()) and not miscounted:
        assert set(pool.check(text, demands)) == chosen
        return
    with pytest.raises(CpuCheckError) as caught:
        pool.check(text, demands)
    assert {name: set(getattr(caught.value, name)) for name in wrong} == wrong
    assert caught.value.miscounted == miscounted


class PoolMachine(RuleBasedStateMachine):
    """Take and release beside one Python set."""

    def __init__(self):
        super().__init__()
        self.pool = CpuPool(CpuSet(range(140)), CpuSet([0]), rows("0-139", n_words=3))
        self.taken: set[int] = set()

    @rule(cpus=small)
    def take(self, cpus):
        if cpus & self.taken:
            with pytest.raises(CpuHoldError) as caught:
                self.pool.take(CpuSet(cpus))
            assert set(caught.value.cpus) == cpus & self.taken
        else:
            self.pool.take(CpuSet(cpus))
            self.taken |= cpus

    @rule(cpus=small)
    def release(self, cpus):
        if cpus <= self.taken:
            self.pool.release(CpuSet(cpus))
            self.taken -= cpus
        else:
            with pytest.raises(CpuHoldError) as caught:
                self.pool.release(CpuSet(cpus))
            assert set(caught.value.cpus) == cpus - self.taken

    @invariant()
    def agrees(self):
        assert set(self.pool.taken) == self.taken
        assert set(self.pool.available) == set(range(1, 140)) - self.taken


TestPoolMachine = PoolMachine.TestCase
