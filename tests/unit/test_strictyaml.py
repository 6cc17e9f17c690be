# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.errors import ConfigError
from driver.given import Entry, Other, describe_value
from driver.strictyaml import read_file, read_mapping


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_mapping(text, "c.yaml")
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 400
    return message


@pytest.mark.parametrize("text", ["", "\n", "# a comment\n", "---\n", "null\n", "~", "{}", "--- {}\n...\n"])
def test_an_empty_document_is_an_empty_mapping(text: str) -> None:
    assert read_mapping(text, "c.yaml") == ()


def test_entries_have_their_lines_and_their_own_spelling() -> None:
    text = """\
# a comment
a: text
b: "quoted 1"
c: 0-3

d: 010
e: on
f: False
g:
h: 2001-01-01
i: 1.5
j: [1, {x: y}]
k:
  l: m
o: |
  p: q
r: !!str 7
"""
    assert read_mapping(text, "c.yaml") == (
        Entry("a", "text", 2),
        Entry("b", "quoted 1", 3),
        Entry("c", "0-3", 4),
        Entry("d", Other("number", "010"), 6),
        Entry("e", True, 7),
        Entry("f", False, 8),
        Entry("g", None, 9),
        Entry("h", Other("date", "2001-01-01"), 10),
        Entry("i", Other("number", "1.5"), 11),
        Entry("j", Other("list"), 12),
        Entry("k", (Entry("l", "m", 14),), 13),
        Entry("o", "p: q\n", 15),
        Entry("r", "7", 17),
    )


def test_repeated_keys_are_all_there() -> None:
    assert [entry.line for entry in read_mapping("a: 1\na: 2\n", "c.yaml")] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("just text\n", "c.yaml, line 1: found 'just text'; expected a mapping of keys to values"),
        ("\n- a\n- b\n", "c.yaml, line 2: found a list; expected a mapping of keys to values"),
        ("7", "c.yaml, line 1: found the number 7; expected a mapping of keys to values"),
        ("a: 1\n---\nb: 2\n", "c.yaml, line 2: a second document begins; expected one"),
        ("a: &x 1\n", "c.yaml, line 1: anchors and aliases are not supported; write the value out"),
        ("a: 1\nb: *x\n", "c.yaml, line 2: anchors and aliases are not supported; write the value out"),
        ("&x a: 1\n", "c.yaml, line 1: anchors and aliases are not supported; write the value out"),
        ("a: 1\n<<: {b: 2}\n", "c.yaml, line 2: merge keys are not supported; write the keys out"),
        ("1: a\n", "c.yaml, line 1: a key is the number 1; expected text"),
        ("true: a\n", "c.yaml, line 1: a key is the boolean true; expected text"),
        ("? [a]\n: b\n", "c.yaml, line 1: a key is a list; expected text"),
        ("? {a: b}\n: b\n", "c.yaml, line 1: a key is a mapping; expected text"),
        ("? \n: b\n", "c.yaml, line 1: a key is nothing; expected text"),
        ("a: !!python/dict {}\n", "c.yaml, line 1: the tag 'tag:yaml.org,2002:python/dict' is not supported"),
        ("a: !x [1]\n", "c.yaml, line 1: the tag '!x' is not supported"),
        ("a: {a: {a: {a: {a: 1}}}}\n", "c.yaml, line 1: nested deeper than 4 levels"),
        ("[" * 100, "c.yaml, line 1: nested deeper than 4 levels"),
        ("[" * 1_000_000, "c.yaml, line 1: not YAML: exceeded maximum nesting depth"),
        ("- " * 500_000, "c.yaml, line 1: nested deeper than 4 levels"),
        ("a: {b: 1\n", "c.yaml, line 2: not YAML: did not find expected ',' or '}'"),
        ("a: b: c\n", "c.yaml, line 1: not YAML: mapping values are not allowed in this context"),
        ('a: "b\n', "c.yaml, line 2: not YAML: found unexpected end of stream"),
        ("a:\n\t- b\n", "c.yaml, line 2: not YAML: found character that cannot start any token"),
        ("a: 1\nb: \x07\n", "c.yaml, line 2: not YAML: control characters are not allowed"),
        ("\0", "c.yaml, line 1: not YAML: control characters are not allowed"),
        ("%YAML 9.9\n---\na: b\n", "c.yaml, line 1: not YAML: found incompatible YAML document"),
    ],
)
def test_hostile_and_broken_texts_are_refused_in_one_line(text: str, message: str) -> None:
    assert refusal(text) == message


def test_a_bomb_of_aliases_costs_nothing() -> None:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
    )
    before = time.process_time()
    assert "anchors and aliases" in refusal(bomb)
    assert time.process_time() - before < 1


def test_tagged_scalars_are_never_built() -> None:
    [entry] = read_mapping("a: !!python/object/apply:os.system [x]\n".replace("[x]", "x"), "c.yaml")
    assert describe_value(entry.value) == "the value tagged 'tag:yaml.org,2002:python/object/apply:os.system' x"


@given(st.text(st.sampled_from("ab:-#{}[]&*!|>'\"%@ \n\t?,<~0") | st.characters(), max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    assert re.fullmatch(r"(c\.yaml, line \d+: .+)?", fault_of(text))


def test_half_a_surrogate_pair_is_refused() -> None:
    assert fault_of("a: b\n\ud800") == "c.yaml, line 2: not YAML: '\\ud800' is not a character"


def fault_of(text: str) -> str:
    try:
        read_mapping(text, "c.yaml")
    except ConfigError as error:
        return str(error)
    return ""


@given(st.dictionaries(st.text(st.characters(codec="ascii", categories=["L", "N", "P"])), st.text()))
def test_what_yaml_writes_is_read_back(texts: dict[str, str]) -> None:
    import yaml

    written = yaml.dump(texts, Dumper=yaml.CSafeDumper)
    assert {entry.key: entry.value for entry in read_mapping(written, "c.yaml")} == texts


def test_a_file_is_read_as_text_with_or_without_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes("\ufeffa: é\n".encode())
    assert read_file(path, "file", 100) == "a: é\n"


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a: b\n")
    os.close(writing)
    assert read_file(Path(f"/dev/fd/{reading}"), "file", 100) == "a: b\n"
    os.close(reading)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: \xff\xfe\n", "{path}, line 2: byte 0xff is not UTF-8; expected a YAML file in UTF-8"),
        ("a: b\n".encode("utf-16"), "{path}, line 1: byte 0xff is not UTF-8; expected a YAML file in UTF-8"),
        (b"\x7fELF\x02\x01\x01\x80", "{path}, line 1: byte 0x80 is not UTF-8; expected a YAML file in UTF-8"),
        (b"x" * 101, "the file '{path}' is larger than 100 bytes, the most that is read"),
    ],
)
def test_a_file_that_is_no_text_is_refused(content: bytes, message: str) -> None:
    path = Path("/tmp") / f"strictyaml-{os.getpid()}"
    path.write_bytes(content)
    try:
        with pytest.raises(ConfigError) as caught:
            read_file(path, "file", 100)
    finally:
        path.unlink()
    assert str(caught.value) == message.format(path=path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/file", "cannot read the file '/no/such/file': No such file or directory"),
        ("/", "cannot read the file '/': Is a directory"),
        ("/a\0b", r"cannot read the file '/a\x00b': embedded null byte"),
        ("/dev/zero", "the file '/dev/zero' is larger than 100 bytes, the most that is read"),
    ],
)
def test_a_path_that_is_no_file_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(Path(path), "file", 100)
    assert str(caught.value) == message
