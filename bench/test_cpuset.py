# SPDX-License-Identifier: Apache-2.0
"""CPU-set algebra, and reading and writing the kernel's list syntax: fastcpu beside all rivals."""

from __future__ import annotations

import pytest

import cases
import contenders

TEXTS = ("one range", "eight ranges", "every second CPU")


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("job", contenders.ALGEBRA)
@pytest.mark.parametrize("contender", contenders.NAMES)
def test_algebra(compete, contender, job, n_cpus):
    compete(contender, contenders.algebra(job, n_cpus), "CPU-set algebra", job)


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("contender", contenders.NAMES)
def test_parse(compete, contender, kind, n_cpus):
    compete(contender, contenders.parsing(kind, n_cpus), "Parsing", kind)


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("contender", contenders.NAMES)
def test_format(compete, contender, kind, n_cpus):
    compete(contender, contenders.formatting(kind, n_cpus), "Formatting", kind)
