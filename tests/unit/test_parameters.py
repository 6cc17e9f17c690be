# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters: Go's reading of keys, each refusal with its message, and the schema that ships beside."""

from __future__ import annotations

import importlib.resources
import json
import time
from collections.abc import Mapping

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from driver.errors import ClaimError
from driver.parameters import LARGEST_PARAMETERS, PLACEMENT_CHOICES, json_size_exceeds, parse_parameters
from fastcpu import CpuSet
from fastcpu.errors import CpuListError

VERSION = {"apiVersion": "v1alpha1"}


def with_cpuset(cpuset: object) -> dict[str, object]:
    return {**VERSION, "cpuConfig": {"cpuset": cpuset}}


def with_placement(placement: object) -> dict[str, object]:
    return {**VERSION, "cpuConfig": {"placement": placement}}


CPUSETS = ["2-5", "0", "2-5,2,4-9", "0-31:2/4", "0-110:1/2,128"]


@pytest.mark.parametrize("cpuset", CPUSETS)
def test_a_cpuset_is_passed_on_as_it_is(cpuset: str) -> None:
    assert parse_parameters(with_cpuset(cpuset)).cpuset == cpuset


@pytest.mark.parametrize(
    "raw",
    [
        VERSION,
        {**VERSION, "cpuConfig": {}},
        {**VERSION, "cpuConfig": None},
        with_cpuset(None),
        {**VERSION, "cpuset": "2-5"},
        {**VERSION, "cpuConfig": {"cpu_set": "2-5", "other": [1, {"deep": None}]}, "more": 5},
    ],
)
def test_no_cpuset_is_none_and_unknown_keys_are_ignored(raw: object) -> None:
    parameters = parse_parameters(raw)
    assert parameters.cpuset is None
    assert parameters.placement is None


@pytest.mark.parametrize(
    "raw",
    [
        {"APIVERSION": "v1alpha1", "cpuconfig": {"CpuSet": "2-5"}},
        {"apiverſion": "v1alpha1", "cpuConfig": {"cpuſet": "2-5"}},
        {"apiVersion": "v0", "ApiVersion": "v1alpha1", "cpuConfig": {"cpuset": "1", "CPUSET": "2-5"}},
        {"apiVersion": "v1alpha1", "APIVERSION": None, "cpuConfig": {"CPUSET": "1", "cpuset": "2-5", "cpuSet": None}},
        {**VERSION, "cpuConfig": {"cpuset": "2-5"}, "CPUCONFIG": {}},
        {**VERSION, "cpuConfig": {"cpuset": "1", "CPUSET": "3"}, "CPUCONFIG": {"cpuset": "2-5"}},
        {**VERSION, "CPUCONFIG": {"CPUSET": "1"}, "cpuConfig": {"cpuset": None, "cpuSet": "2-5"}, "cpuconfig": None},
    ],
)
def test_keys_are_read_as_go_reads_them(raw: object) -> None:
    assert parse_parameters(raw).cpuset == "2-5"


def test_case_is_folded_one_character_at_a_time() -> None:
    assert parse_parameters({**VERSION, "cpuConﬁg": {"cpuset": "2-5"}}).cpuset is None


REFUSED: list[tuple[object, str]] = [
    (None, "the opaque parameters are missing; expected an object with apiVersion and cpuConfig"),
    ("2-5", "opaque parameters is a string; expected an object"),
    ([], "opaque parameters is a list; expected an object"),
    ({}, 'the opaque parameters have no apiVersion; expected "v1alpha1"'),
    ({"apiVersion": None}, 'the opaque parameters have no apiVersion; expected "v1alpha1"'),
    (
        {"apiVersion": "v1beta1"},
        "apiVersion 'v1beta1' of the opaque parameters is not supported; expected \"v1alpha1\"",
    ),
    ({"apiVersion": ""}, "apiVersion '' of the opaque parameters is not supported; expected \"v1alpha1\""),
    ({"apiVersion": "V1alpha1"}, "apiVersion 'V1alpha1' of the opaque parameters is not supported"),
    ({"apiVersion": 1}, "apiVersion of the opaque parameters is a whole number; expected a string"),
    ({**VERSION, "cpuConfig": "2-5"}, "cpuConfig is a string; expected an object"),
    ({**VERSION, "cpuConfig": []}, "cpuConfig is a list; expected an object"),
    (with_cpuset(""), 'cpuConfig.cpuset is empty; expected CPUs such as "2-5"'),
    (with_cpuset(5), "cpuConfig.cpuset is a whole number; expected a string"),
    (with_cpuset(True), "cpuConfig.cpuset is a boolean; expected a string"),
    (with_cpuset(["2"]), "cpuConfig.cpuset is a list; expected a string"),
    (
        {**VERSION, "cpuConfig": {"CPUSET": 5, "cpuset": "2"}},
        "cpuConfig.cpuset is a whole number; expected a string",
    ),
    (with_cpuset(" "), "cpuConfig.cpuset ' ' has white space in it; expected CPUs such as \"2-5,8\""),
    (with_cpuset(" 2-5"), "cpuConfig.cpuset ' 2-5' has white space in it"),
    (with_cpuset("2-5\n"), "cpuConfig.cpuset '2-5\\n' has white space in it"),
    (with_cpuset("2-5, 8"), "cpuConfig.cpuset '2-5, 8' has white space in it"),
    (with_cpuset("2\xa05"), "cpuConfig.cpuset '2\\xa05' has white space in it"),
    (with_placement("cores"), "cpuConfig.placement is a string; expected an object"),
    (
        with_placement({"spraed": "cores"}),
        "cpuConfig.placement has no key 'spraed'; expected one of spread, fullCores, numa, coreType",
    ),
    (with_placement({"spraed": None}), "cpuConfig.placement has no key 'spraed'"),
    (
        with_placement({"spread": "Cores"}),
        "cpuConfig.placement.spread 'Cores' is unknown; expected none or cores",
    ),
    (
        with_placement({"coreType": ""}),
        "cpuConfig.placement.coreType '' is unknown; expected any or p-core or e-core",
    ),
    (with_placement({"numa": 1}), "cpuConfig.placement.numa is a whole number; expected a string"),
    (with_cpuset("1," * 6000 + "1"), "the opaque parameters are larger than 10240 bytes, the API's own limit"),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED)
def test_what_is_wrong_is_refused_with_its_own_message(raw: object, message: str) -> None:
    with pytest.raises(ClaimError) as refusal:
        parse_parameters(raw)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(("key", "values"), PLACEMENT_CHOICES.items())
def test_every_choice_of_placement_is_read(key: str, values: tuple[str, ...]) -> None:
    for value in values:
        assert parse_parameters(with_placement({key: value})).placement == {key: value}
        assert parse_parameters(with_placement({key.upper(): value})).placement == {key: value}


def test_placements_under_several_keys_are_merged() -> None:
    raw = {
        **VERSION,
        "cpuConfig": {"placement": {"spread": "none", "numa": "pack"}, "PLACEMENT": {"Spread": "cores"}},
        "CPUConfig": {"placement": {"coreType": "any", "numa": None}},
    }
    assert parse_parameters(raw).placement == {"spread": "cores", "numa": "pack", "coreType": "any"}


def test_an_empty_placement_is_not_none() -> None:
    assert parse_parameters(with_placement({})).placement == {}
    assert parse_parameters(with_placement(None)).placement is None


def sized(size: int) -> dict[str, object]:
    empty = len(json.dumps({**VERSION, "padding": ""}, separators=(",", ":")))
    return {**VERSION, "padding": "x" * (size - empty)}


def test_the_size_limit_is_that_of_the_whole_object() -> None:
    parse_parameters(sized(LARGEST_PARAMETERS))
    with pytest.raises(ClaimError, match="larger than 10240 bytes"):
        parse_parameters(sized(LARGEST_PARAMETERS + 1))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_the_size_is_never_overestimated(raw: object) -> None:
    shortest = json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert not json_size_exceeds(raw, len(shortest))


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "raw",
    [
        with_cpuset("0," * 200_000 + "0"),
        {**VERSION, "padding": [0] * 1_000_000},
        {**VERSION, "padding": nested(100_000)},
        {**VERSION, **{f"key{number}": number for number in range(100_000)}},
        {**VERSION, "é" * 400_000: 1},
        [[]] * 1_000_000,
    ],
    ids=["cpuset of 400 kB", "long list", "deep list", "many keys", "long key", "list of lists"],
)
def test_a_huge_object_is_refused_without_being_walked(raw: object) -> None:
    best = float("inf")
    for _ in range(20):
        started = time.process_time()
        with pytest.raises(ClaimError, match="larger than 10240 bytes"):
            parse_parameters(raw)
        best = min(best, time.process_time() - started)
    assert best < 0.02  # the object itself would take many times as long; the bench has the exact numbers


def test_a_range_over_everything_is_text_to_this_module() -> None:
    assert parse_parameters(with_cpuset("0-4294967295")).cpuset == "0-4294967295"


# The schema.


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    text = importlib.resources.files("driver").joinpath("schemas/cpu-config-v1alpha1.schema.json").read_text("utf-8")
    schema = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    # In a schema's regular expressions (ECMA 262) `$` is the end; in Python's it may stand before a final newline.
    return jsonschema.Draft202012Validator(json.loads(text.replace('$"', '\\\\Z"')))


def verdict(raw: object) -> bool | None:
    """Say whether the driver takes the parameters, the cpuset's text included; None for what no schema can tell."""
    try:
        cpuset = parse_parameters(raw).cpuset
        if cpuset is not None:
            CpuSet.parse(cpuset)
    except CpuListError as error:
        numbers = any(reason in error.reason for reason in ("reversed", "too large", "1 ≤ used ≤ group"))
        return None if numbers else False
    except ClaimError:
        return False
    return True


@st.composite
def spelled(draw: st.DrawFn, key: str) -> str:
    if draw(st.integers(0, 3)):
        return key
    return draw(
        st.tuples(*(st.sampled_from([c.lower(), c.upper(), *("ſ" if c in "sS" else "")]) for c in key)).map("".join)
    )


def members(known: Mapping[str, st.SearchStrategy[object]]) -> st.SearchStrategy[dict[str, object]]:
    """Objects with some of the known keys, mostly spelled as they should be, and seldom another one."""
    wild = st.tuples(st.text(max_size=6) | st.sampled_from(["cpuset ", "cpusets", "cpuset\n", ""]), JSON)
    proper = st.fixed_dictionaries({}, optional=dict(known))
    odd = st.lists(st.one_of(*(st.tuples(spelled(key), values) for key, values in known.items()), wild), max_size=3)
    return proper | odd.map(dict)


NUMBERS = st.integers(0, 20).map(str) | st.sampled_from(["007", "8191", "8192", "4294967295", "", "+1", " 1", "٣", "x"])
STRIDES = st.tuples(*[st.integers(0, 9)] * 2, *[st.integers(1, 4)] * 2).map(
    lambda n: f"{n[0]}-{n[0] + n[1]}:{n[2]}/{n[2] + n[3]}"
)
ITEMS = st.one_of(
    STRIDES,
    STRIDES,
    NUMBERS,
    st.tuples(NUMBERS, NUMBERS).map("-".join),
    st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS).map(lambda numbers: "{}-{}:{}/{}".format(*numbers)),
    st.text(alphabet="01239,-:/\n", max_size=6),
)
CPULISTS = st.lists(ITEMS, min_size=1, max_size=3).map(",".join)
PLACEMENTS = members(
    {key: st.sampled_from([*values * 3, "", values[0].upper(), None, 1]) for key, values in PLACEMENT_CHOICES.items()}
)
CPU_CONFIGS = members(
    {"cpuset": CPULISTS | st.sampled_from(["2-5", None, 5]), "placement": PLACEMENTS | st.sampled_from([None, []])}
)
OBJECTS = st.tuples(
    st.sampled_from([*[VERSION] * 12, {}, {"APIversion": "v1alpha1"}, {"apiVersion": "v2"}, {"apiVersion": None}]),
    members({"cpuConfig": CPU_CONFIGS | CPU_CONFIGS | st.sampled_from([None, "2-5"])}),
).map(lambda parts: {**parts[0], **parts[1]})


def repeats_a_key_but_for_case(raw: object) -> bool:
    if not isinstance(raw, dict):
        return False
    folded = [key.casefold() for key in raw]
    return len(set(folded)) < len(folded) or any(repeats_a_key_but_for_case(value) for value in raw.values())


PLACEMENT_MEMBERS: list[object] = [
    {key: value} for key, values in PLACEMENT_CHOICES.items() for value in (*values, None, "", 0)
]


@pytest.mark.parametrize(
    "raw",
    [
        *(with_cpuset(cpuset) for cpuset in [*CPUSETS, None, "2,x", "-1", "1-", "1,", ",", "2:1/2", "1-2:1/", "²"]),
        *(with_placement(choice) for choice in [*PLACEMENT_MEMBERS, {}, {"SPREAD": "cores"}, {"pread": "cores"}]),
        *(raw for raw, message in REFUSED if "larger" not in message),
        {"APIVERſION": "v1alpha1", "CPUcONFIG": {"CPUſET": "2-5", "PLACEmENT": {"fullCOREſ": "require"}}},
        {**VERSION, "cpuConfig ": {"cpuset": 5}, "cpuconfi": 1, "cpuConfig\n": 2},
    ],
)
def test_schema_and_code_agree(validator: jsonschema.Draft202012Validator, raw: object) -> None:
    assert validator.is_valid(raw) is verdict(raw)


@settings(max_examples=300)
@given(raw=OBJECTS | JSON)
def test_schema_and_code_give_the_same_verdict(validator: jsonschema.Draft202012Validator, raw: object) -> None:
    assume(verdict(raw) is not None)
    assume(not repeats_a_key_but_for_case(raw))  # the schema says that it is stricter there
    assert validator.is_valid(raw) is verdict(raw)


@given(cpuset=CPULISTS)
def test_schema_and_code_read_the_same_cpusets(validator: jsonschema.Draft202012Validator, cpuset: str) -> None:
    assume(verdict(with_cpuset(cpuset)) is not None)
    assert validator.is_valid(with_cpuset(cpuset)) is verdict(with_cpuset(cpuset))


@given(raw=OBJECTS)
def test_the_driver_reads_whatever_the_schema_allows(validator: jsonschema.Draft202012Validator, raw: object) -> None:
    assert not validator.is_valid(raw) or verdict(raw) is not False


@given(raw=OBJECTS | JSON)
def test_any_json_is_read_or_refused_in_one_line(raw: object) -> None:
    refusal = ""
    try:
        parse_parameters(raw)
    except ClaimError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert refusal.encode().decode() == refusal
