# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from driver.cpulists import MOST_STRIDES, parse_cpulist
from fastcpu import CpuSet
from fastcpu.errors import CpuListError


@pytest.mark.parametrize("text", ["", "0-3,8", "0-62:1/2", ",".join(["0-63:1/3"] * MOST_STRIDES)])
def test_what_programs_write_is_read(text):
    assert parse_cpulist(text, 64) == CpuSet.parse(text)


@pytest.mark.parametrize("strides", [MOST_STRIDES + 1, 100_000])
def test_strides_without_end_are_refused_by_their_number(strides):
    with pytest.raises(CpuListError, match=f"character 10: it has {strides} strides; expected plain ranges") as refusal:
        parse_cpulist(",".join(["0-1048575:1/3"] * strides), 1 << 20)
    assert len(str(refusal.value)) < 250


def test_a_list_beyond_the_limit_is_refused():
    with pytest.raises(CpuListError, match="the highest CPU number is 63"):
        parse_cpulist("0-64", 64)
