# SPDX-License-Identifier: Apache-2.0
"""CpuPool.check(), the work of every prepare, beside the same work with what a user would take instead."""

from __future__ import annotations

import pytest

import cases
import contenders
import rivals
from fastcpu import CpuSet
from fastcpu.errors import CpuCheckError, CpuListError


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("contender", contenders.NAMES)
def test_check(compete, contender, kind, n_cpus):
    compete(contender, contenders.checking(kind, n_cpus), "Check of a choice", kind)


REFUSED = {
    "a number beyond the limit": ("0-4294967295", CpuListError),
    "400 kB of text": (",".join(["0-8191"] * 57_143), CpuCheckError),
    "400 kB of strides": (",".join(["0-8191:1/2"] * 36_364), CpuCheckError),
    "10 KiB of good ranges, all taken": (",".join(f"{c}-{c + 1}" for c in range(0, 3300, 3)), CpuCheckError),
}


def refusing(pool, text: str, error: type[Exception]):
    def refuse():
        with pytest.raises(error):
            pool.check(text, ((0, 4),))

    return refuse


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(entry, name):
    pool = cases.pool(8192)
    pool.take(CpuSet(range(8192)))
    entry("Check of a choice", f"refuse {name}", "fastcpu", n=8192)(refusing(pool, *REFUSED[name]))


# Of the others ints and booleans notice nothing, sets need minutes or 200 GB, and none knows strides.
@pytest.mark.parametrize("name", ["400 kB of text", "10 KiB of good ranges, all taken"])
def test_refusal_by_booleans(entry, name):
    pool = rivals.BooleanPool(set(range(8192)), cases.RESERVED, cases.members(8192))
    pool.taken[:] = True
    entry("Check of a choice", f"refuse {name}", "NumPy bool", n=8192)(refusing(pool, REFUSED[name][0], ValueError))


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("contender", ["fastcpu", "Python set"])
def test_take_and_release(entry, contender, n_cpus):
    if contender == "fastcpu":
        pool, cpus = cases.pool(n_cpus), CpuSet.parse("2-5")
        take, release = pool.take, pool.release
    else:
        taken, cpus = set(range(n_cpus // 2, n_cpus)), set(range(2, 6))
        take, release = taken.update, taken.difference_update

    def take_and_release():
        take(cpus)
        release(cpus)

    entry("Check of a choice", "take and release four CPUs", contender, n=n_cpus)(take_and_release)
    if contender == "fastcpu":
        assert not pool.taken
    else:
        assert taken == set(range(n_cpus // 2, n_cpus))
