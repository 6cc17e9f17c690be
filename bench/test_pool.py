# SPDX-License-Identifier: Apache-2.0
"""CpuPool.check(), the work of every prepare, beside the same work with sets, ints and NumPy booleans."""

from __future__ import annotations

import pytest

import cases
from fastcpu import CpuSet
from fastcpu.errors import CpuCheckError, CpuListError


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("contender", ["fastcpu", *cases.RIVALS])
def test_check(benchmark, compare, contender, kind, n_cpus):
    benchmark.group = f"check, {kind}, {n_cpus} CPUs"
    text, demands = cases.choice(kind, n_cpus)
    pool = cases.pool(n_cpus) if contender == "fastcpu" else cases.rival(contender, n_cpus)
    expected = CpuSet.parse(text)
    result = benchmark(pool.check, text, demands)
    if contender == "fastcpu":
        assert result == expected
    elif contender == "Python sets":
        assert CpuSet(result) == expected
    elif contender == "Python ints":
        assert result.bit_count() == len(expected)
    else:
        assert CpuSet.from_array(result) == expected
    compare(kind, n_cpus, contender, pool.check, text, demands)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a number beyond the limit", "0-4294967295", CpuListError),
        ("400 kB of text", ",".join(["0-8191"] * 57_143), CpuCheckError),
        ("400 kB of strides", ",".join(["0-8191:1/2"] * 36_364), CpuCheckError),
        ("10 KiB of good ranges, all taken", ",".join(f"{c}-{c + 1}" for c in range(0, 3300, 3)), CpuCheckError),
    ],
)
def test_refusal(benchmark, name, text, error):
    benchmark.group = f"refuse {name}"
    pool = cases.pool(8192)
    pool.take(CpuSet(range(8192)))

    def refuse():
        with pytest.raises(error):
            pool.check(text, ((0, 4),))

    benchmark(refuse)


@pytest.mark.parametrize("n_cpus", cases.SIZES)
def test_take_and_release(benchmark, n_cpus):
    benchmark.group = "take and release four CPUs"
    pool = cases.pool(n_cpus)
    cpus = CpuSet.parse("2-5")

    def take_and_release():
        pool.take(cpus)
        pool.release(cpus)

    benchmark(take_and_release)
    assert not pool.taken
