# SPDX-License-Identifier: Apache-2.0
"""The kernel's list syntax: what is read, what is refused and what it costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcpu import CpuSet
from fastcpu.errors import CpuListError


def expand(text: str) -> set[int]:
    """Read a valid cpulist the slow and obvious way."""
    found: set[int] = set()
    for item in filter(None, text.strip().split(",")):
        cpus, _, stride = item.partition(":")
        first, _, last = cpus.partition("-")
        used, _, group = (stride or "1/1").partition("/")
        found.update(
            cpu for cpu in range(int(first), int(last or first) + 1) if (cpu - int(first)) % int(group) < int(used)
        )
    return found


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", []),
        ("\n", []),
        (" \t\r\n\v\f", []),
        ("0", [0]),
        ("0-3,8", [0, 1, 2, 3, 8]),
        (" 0-3,8\n", [0, 1, 2, 3, 8]),
        ("8,0-3,2-4,8", [0, 1, 2, 3, 4, 8]),
        ("007", [7]),
        ("5-5", [5]),
        ("0-31:2/4", [c for c in range(32) if c % 4 < 2]),
        ("1-10:1/3", [1, 4, 7, 10]),
        ("0-7:2/4", [0, 1, 4, 5]),
        ("0-8:4/4", list(range(9))),
        ("3-300:65/130", [*range(3, 68), *range(133, 198), *range(263, 301)]),
        ("8191", [8191]),
    ],
)
def test_reads(text, cpus):
    assert list(CpuSet.parse(text)) == cpus


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("3-1", 0, "reversed"),
        ("0,3-1", 2, "reversed"),
        ("-1", 0, "not a digit"),
        ("+1", 0, "not a digit"),
        ("1-", 2, "ends where a CPU number should be"),
        ("1,", 2, "ends where a CPU number should be"),
        ("1, \n", 2, "ends where a CPU number should be"),
        (",1", 0, "not a digit"),
        ("1,,2", 2, "not a digit"),
        ("1 2", 1, "unexpected ' '"),
        ("1, 2", 2, "not a digit"),
        ("1-2-3", 3, "unexpected '-'"),
        ("0x10", 1, "unexpected 'x'"),
        ("1\x002", 1, "unexpected"),
        ("all", 0, "not a digit"),
        ("0-N", 2, "not a digit"),
        ("٣", 0, "not an ASCII character"),
        ("1,²", 2, "not an ASCII character"),
        ("1\u00a0", 1, "not an ASCII character"),
        ("\ud800", 0, "not an ASCII character"),
        ("8192", 0, "too large; the highest CPU number is 8191"),
        ("0-4294967295", 2, "too large"),
        ("18446744073709551616", 0, "too large"),
        ("9" * 1000, 0, "too large"),
        ("1:2/4", 1, "needs a range"),
        ("0-3:", 4, "ends where"),
        ("0-3:1", 5, "used/group"),
        ("0-3:1/", 6, "ends where"),
        ("0-3:0/4", 4, "used/group"),
        ("0-3:5/4", 4, "used/group"),
        ("0-3:1/0", 4, "used/group"),
        ("0-3:1/99999", 6, "too large"),
        ("0-3:1/2/3", 7, "unexpected '/'"),
    ],
)
def test_refuses(text, position, reason):
    with pytest.raises(CpuListError) as caught:
        CpuSet.parse(text)
    assert caught.value.position == position
    assert reason in caught.value.reason
    assert isinstance(caught.value, ValueError)


def test_message_is_one_short_line_whatever_the_text():
    with pytest.raises(CpuListError) as caught:
        CpuSet.parse("1\n" * 100_000)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    assert "200000 characters" in message


@pytest.mark.parametrize("text", [None, b"0-3", 3, ["0"]])
def test_only_text_is_parsed(text):
    with pytest.raises(TypeError):
        CpuSet.parse(text)


def test_limit():
    assert CpuSet.parse("9999", limit=10_000)[0] == 9999
    assert CpuSet.parse("1048575", limit=1 << 20)[0] == (1 << 20) - 1
    with pytest.raises(CpuListError, match="highest CPU number is 7"):
        CpuSet.parse("0-8", limit=8)
    for limit in (0, -1, (1 << 20) + 1):
        with pytest.raises(ValueError, match=f"limit {limit} is not between 1 and 1048576"):
            CpuSet.parse("0", limit=limit)


strides = st.builds(
    lambda first, length, group, used: f"{first}-{first + length}:{min(used, group)}/{group}",
    st.integers(0, 4000),
    st.integers(0, 4000),
    st.integers(1, 200),
    st.integers(1, 200),
)
ranges = st.builds(lambda first, length: f"{first}-{first + length}", st.integers(0, 4000), st.integers(0, 4000))
lists = st.lists(st.one_of(strides, ranges, st.integers(0, 8191).map(str)), max_size=6).map(",".join)


@given(lists)
def test_agrees_with_the_obvious_reader(text):
    cpuset = CpuSet.parse(text)
    expected = expand(text)
    assert set(cpuset) == expected
    assert expand(str(cpuset)) == expected
    assert expand(cpuset.strided()) == expected
    assert len(cpuset.strided()) <= len(str(cpuset))


def test_canonical_form_is_ascending_ranges():
    assert str(CpuSet.parse("9,8,0-1,2,64,63")) == "0-2,8-9,63-64"
    assert str(CpuSet([5, 7])) == "5,7"


@pytest.mark.parametrize(
    ("cpus", "text"),
    [
        (range(0, 112, 2), "0-110:1/2"),
        ([c for c in range(256) if c % 16 < 8], "0-247:8/16"),
        ([*range(0, 40, 2), 100], "0-38:1/2,100"),
        ([*range(0, 40, 2), *range(200, 400, 5)], "0-38:1/2,200-395:1/5"),
        ([0, 2], "0,2"),
        (range(8), "0-7"),
    ],
)
def test_strided_form(cpus, text):
    assert CpuSet(cpus).strided() == text


def mutated_cpulists(count: int, seed: int = 0):
    """Yield texts that are nearly cpulists: the corpus of the sanitizer run."""
    random_ = random.Random(seed)
    alphabet = "0123456789,-:/ \t\n\0ax٣\ud800"
    corpus = [
        "0-3,8",
        "0-31:2/4",
        "0-8191",
        "1000-1100:63/64,5",
        "8191",
        "",
        "0-4294967295",
        "7-7:1/1,0-1:1/8192",
    ]
    for _ in range(count):
        text = list(random_.choice(corpus) if random_.random() < 0.7 else ",".join(random_.choices(corpus, k=9)))
        for _ in range(random_.randrange(4)):
            at = random_.randrange(len(text) + 1)
            kind = random_.randrange(3)
            if kind == 0:
                text.insert(at, random_.choice(alphabet))
            elif at < len(text):
                text[at : at + 1] = random_.choice(alphabet) if kind == 1 else []
        yield "".join(text)


def test_survives_mutated_texts():
    accepted = refused = 0
    for text in mutated_cpulists(20_000):
        try:
            cpuset = CpuSet.parse(text)
        except CpuListError:
            refused += 1
        else:
            accepted += 1
            assert set(cpuset) == expand(text)
    assert accepted > 1000
    assert refused > 1000
