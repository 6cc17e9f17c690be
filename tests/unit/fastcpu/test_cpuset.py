# SPDX-License-Identifier: Apache-2.0
"""CpuSet beside ``set[int]``, its model."""

from __future__ import annotations

import copy
import pickle
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

import fastcpu.cpuset
from fastcpu import CpuSet
from fastcpu.cpuset import MAX_CPUS

# Word and storage boundaries (64, 1,024) and ordinary ids, so that small examples meet the interesting places.
cpus = st.one_of(
    st.integers(0, 200),
    st.sampled_from([0, 63, 64, 127, 128, 1022, 1023, 1024, 1025, 4095, 4096, 8190, 8191]),
    st.integers(0, 8191),
)
models = st.frozensets(cpus, max_size=40)


class CpuSetMachine(RuleBasedStateMachine):
    """Every operation, on sets that came out of earlier operations."""

    pairs = Bundle("pairs")

    @rule(target=pairs, model=models)
    def new(self, model):
        return CpuSet(model), model

    @rule(target=pairs, model=models)
    def parsed(self, model):
        return CpuSet.parse(",".join(map(str, model))), model

    @rule(target=pairs, first=cpus, length=st.integers(1, 300))
    def parsed_range(self, first, length):
        last = min(first + length, 8191)
        return CpuSet.parse(f"{first}-{last}"), frozenset(range(first, last + 1))

    @rule(target=pairs, a=pairs, b=pairs, operation=st.sampled_from(["or", "and", "sub", "xor"]))
    def operator(self, a, b, operation):
        name = f"__{operation}__"
        return getattr(a[0], name)(b[0]), getattr(a[1], name)(b[1])

    @rule(
        target=pairs,
        a=pairs,
        others=st.lists(models, max_size=3),
        method=st.sampled_from(["union", "intersection", "difference"]),
    )
    def method(self, a, others, method):
        return getattr(a[0], method)(*others), getattr(a[1], method)(*others)

    @rule(target=pairs, a=pairs, other=models)
    def symmetric_difference(self, a, other):
        return a[0].symmetric_difference(other), a[1].symmetric_difference(other)

    @rule(
        target=pairs,
        a=pairs,
        start=st.integers(-50, 50),
        stop=st.integers(-50, 50),
        step=st.sampled_from([1, 2, 3, -1, -2]),
    )
    def slices(self, a, start, stop, step):
        wanted = sorted(a[1])[start:stop:step]
        got = a[0][start:stop:step]
        assert list(got) == sorted(wanted)
        return got, frozenset(wanted)

    @rule(target=pairs, a=pairs, way=st.sampled_from(["pickle", "copy", "words", "booleans", "text", "strided"]))
    def round_trip(self, a, way):
        cpuset, model = a
        if way == "pickle":
            again = pickle.loads(pickle.dumps(cpuset))
        elif way == "copy":
            again = copy.deepcopy(cpuset)
        elif way == "words":
            again = CpuSet.from_array(cpuset.words)
        elif way == "booleans":
            flags = np.zeros(8192, bool)
            flags[sorted(model)] = True
            again = CpuSet.from_array(flags)
        elif way == "text":
            again = CpuSet.parse(f"\t {cpuset}\n")
        else:
            assert len(cpuset.strided()) <= len(str(cpuset))
            again = CpuSet.parse(cpuset.strided())
        assert again == cpuset
        return again, model

    @rule(a=pairs, b=pairs)
    def compare(self, a, b):
        for name in ("__eq__", "__ne__", "__le__", "__lt__", "__ge__", "__gt__"):
            assert getattr(a[0], name)(b[0]) == getattr(a[1], name)(b[1]), name
        for name in ("issubset", "issuperset", "isdisjoint"):
            assert getattr(a[0], name)(b[0]) == getattr(a[1], name)(b[1]), name
            assert getattr(a[0], name)(b[1]) == getattr(a[1], name)(b[1]), name
        if a[1] == b[1]:
            assert hash(a[0]) == hash(b[0])

    @rule(a=pairs, cpu=cpus)
    def look(self, a, cpu):
        cpuset, model = a
        assert list(cpuset) == sorted(model)
        assert len(cpuset) == len(model)
        assert bool(cpuset) == bool(model)
        assert (cpu in cpuset) == (cpu in model)
        assert [int(word) for word in cpuset.words] == [
            sum(1 << cpu % 64 for cpu in model if cpu // 64 == word)
            for word in range((max(model, default=-1) // 64) + 1)
        ]
        if model:
            assert cpuset.first == min(model)
            assert cpuset[-1] == max(model)

    @invariant()
    def empty_stays_empty(self):
        assert not CpuSet()


CpuSetMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestCpuSetMachine = CpuSetMachine.TestCase


@pytest.mark.parametrize(
    ("cpus", "error"),
    [([-1], ValueError), ([MAX_CPUS], ValueError), ([2**80], ValueError), (["1"], TypeError), ([1.0], TypeError),
     ("0-3", TypeError), (b"\x01", TypeError), (5, TypeError), ([None], TypeError)],
)  # fmt: skip
def test_refuses_what_is_no_cpu(cpus, error):
    with pytest.raises(error):
        CpuSet(cpus)


def test_error_names_the_value_and_the_range():
    with pytest.raises(ValueError, match=r"CPU -3 is not between 0 and 1048575"):
        CpuSet([1, -3])


def test_accepts_numpy_integers_and_the_highest_cpu():
    assert list(CpuSet(np.array([3, 1, 3]))) == [1, 3]
    assert CpuSet([MAX_CPUS - 1])[0] == MAX_CPUS - 1


def test_operators_take_sets_of_cpus_only():
    with pytest.raises(TypeError):
        CpuSet([1]) | {1}
    with pytest.raises(TypeError):
        CpuSet([1]) < {1, 2}  # noqa: B015
    assert CpuSet([1]) != {1}
    assert 1.0 not in CpuSet([1])
    assert -1 not in CpuSet([1])
    assert 2**70 not in CpuSet([1])


def test_is_immutable():
    cpuset = CpuSet([1])
    with pytest.raises(AttributeError):
        cpuset.first = 3
    with pytest.raises(AttributeError):
        cpuset.anything = 3
    with pytest.raises(ValueError, match="read-only"):
        cpuset.words[0] = 0
    with pytest.raises(TypeError):
        memoryview(cpuset)[0] = 0
    cpuset.__init__([2, 3])
    assert list(cpuset) == [1]


def test_view_shares_memory_and_keeps_the_set_alive():
    cpuset = CpuSet.parse("0-2000")
    words = cpuset.words
    assert np.shares_memory(words, np.asarray(memoryview(cpuset)))
    assert words.dtype == np.uint64
    expected = words.copy()
    del cpuset
    for _ in range(100):
        CpuSet.parse("5-1999")
    assert (words == expected).all()


def test_empty_set_has_an_empty_view_and_no_first():
    assert CpuSet().words.shape == (0,)
    assert str(CpuSet()) == CpuSet().strided() == ""
    with pytest.raises(ValueError, match="empty"):
        CpuSet().first  # noqa: B018
    with pytest.raises(IndexError):
        CpuSet()[0]


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.zeros(2, np.int64), TypeError),
        (np.zeros(2, ">u8"), TypeError),
        (np.zeros((2, 2), np.uint64), ValueError),
        (np.zeros(MAX_CPUS // 64 + 1, np.uint64), ValueError),
        (np.zeros(MAX_CPUS + 1, bool), ValueError),
        ([1, 2], TypeError),
        (b"12345678", TypeError),
    ],
)
def test_from_array_refuses(array, error):
    with pytest.raises(error):
        CpuSet.from_array(array)


def test_from_array_takes_strided_views_and_trailing_zeros():
    words = np.array([1, 7, 2, 7, 0, 7], np.uint64)
    assert list(CpuSet.from_array(words[::2])) == [0, 65]


@pytest.mark.parametrize("data", [b"x", b"\0" * (MAX_CPUS // 8 + 8)])
def test_unpickling_refuses_what_no_pickle_says(data):
    with pytest.raises(ValueError, match="no pickled CpuSet"):
        fastcpu.cpuset.restore(data)


@given(models)
def test_size_in_memory_is_bounded(model):
    cpuset = CpuSet(model)
    assert sys.getsizeof(cpuset) <= 256
    assert cpuset.words.nbytes <= 1024


def test_threads_share_a_set():
    shared = CpuSet.parse("0-8191:3/7")
    other = CpuSet.parse("1000-3000")
    expected = (str(shared), hash(shared), len(shared & other), list(shared)[-5:])
    wrong = []
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        for _ in range(300):
            if (str(shared), hash(shared), len(shared & other), list(shared)[-5:]) != expected:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
