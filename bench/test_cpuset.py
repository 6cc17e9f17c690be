# SPDX-License-Identifier: Apache-2.0
"""CpuSet beside ``frozenset[int]`` and ``int``: algebra, reading, writing."""

from __future__ import annotations

import pytest

import cases
import rivals
from fastcpu import CpuSet

OPERATIONS = {
    "union": lambda a, b: a | b,
    "difference": lambda a, b: a - b,
    "is disjoint": lambda a, b: a.isdisjoint(b),
    "equal": lambda a, b: a == b,
    "hash": lambda a, b: hash(a),
    "iterate": lambda a, b: list(a),
}


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("contender", [CpuSet, frozenset], ids=["fastcpu", "frozenset"])
def test_algebra(benchmark, contender, operation, n_cpus):
    benchmark.group = f"{operation}, {n_cpus} CPUs"
    a, b = range(0, n_cpus, 2), range(1, n_cpus, 2)
    function = OPERATIONS[operation]
    result = benchmark(function, contender(a), contender(b))
    expected = function(frozenset(a), frozenset(b))
    if operation == "iterate":
        assert result == sorted(expected)
    elif operation != "hash":
        assert (set(result) if isinstance(result, CpuSet) else result) == expected


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("contender", ["fastcpu", "Python"])
def test_parse(benchmark, contender, kind, n_cpus):
    benchmark.group = f"parse {kind}, {n_cpus} CPUs"
    text, _ = cases.choice(kind, n_cpus)

    def with_sets(text):
        cpus = set()
        for first, last in rivals.ranges(text):
            cpus.update(range(first, last + 1))
        return cpus

    result = benchmark(CpuSet.parse if contender == "fastcpu" else with_sets, text)
    assert set(result) == with_sets(text)


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("form", [str, CpuSet.strided], ids=["ranges", "strided"])
def test_format(benchmark, form, n_cpus):
    benchmark.group = f"format every second CPU, {n_cpus} CPUs"
    cpus = CpuSet(range(0, n_cpus, 2))
    assert CpuSet.parse(benchmark(form, cpus)) == cpus
