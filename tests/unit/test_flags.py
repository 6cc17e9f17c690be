# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from driver.errors import ConfigError
from driver.flags import Flag, HelpRequest, describe_flags, fold, nearest, parse_flags, shown

FLAGS = (
    Flag(name="config", value="FILE", help="the file"),
    Flag(name="v", value="N", help="the verbosity"),
    Flag(name="expose-pcie-roots", help="a boolean"),
    Flag(name="a-name-too-long-for-its-line", value="SOMETHING", help="on the next line"),
)


@pytest.mark.parametrize(
    ("arguments", "values", "rest"),
    [
        ([], {}, []),
        (["--config=a"], {"config": "a"}, []),
        (["-config=a"], {"config": "a"}, []),
        (["--config", "a"], {"config": "a"}, []),
        (["-config", "a", "-v", "4"], {"config": "a", "v": "4"}, []),
        (["--config="], {"config": ""}, []),
        (["--config", ""], {"config": ""}, []),
        (["--config=a=b=c"], {"config": "a=b=c"}, []),
        # Whatever follows a flag that needs a value is the value.
        (["--config", "--v"], {"config": "--v"}, []),
        (["--v", "-1"], {"v": "-1"}, []),
        (["--config", "--"], {"config": "--"}, []),
        (["--config=a", "--config=b"], {"config": "b"}, []),
        (["--expose-pcie-roots", "--expose-pcie-roots=false"], {"expose-pcie-roots": False}, []),
        (["--expose-pcie-roots"], {"expose-pcie-roots": True}, []),
        # A boolean never takes the next argument.
        (["--expose-pcie-roots", "false"], {"expose-pcie-roots": True}, ["false"]),
        (["--v=1", "--", "--v=2"], {"v": "1"}, ["--v=2"]),
        (["--v=1", "word", "--v=2"], {"v": "1"}, ["word", "--v=2"]),
        (["-", "--v=2"], {}, ["-", "--v=2"]),
        (["", "--v=2"], {}, ["", "--v=2"]),
        (["--"], {}, []),
        (["--", "--", "a"], {}, ["--", "a"]),
    ],
)
def test_flags_are_read_as_go_reads_them(arguments: list[str], values: dict[str, str | bool], rest: list[str]) -> None:
    assert parse_flags(arguments, FLAGS) == (values, rest)


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "TRUE", "True"])
def test_spellings_of_true(text: str) -> None:
    assert parse_flags([f"--expose-pcie-roots={text}"], FLAGS)[0] == {"expose-pcie-roots": True}


@pytest.mark.parametrize("text", ["0", "f", "F", "false", "FALSE", "False"])
def test_spellings_of_false(text: str) -> None:
    assert parse_flags([f"-expose-pcie-roots={text}"], FLAGS)[0] == {"expose-pcie-roots": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], "unknown flag '--nope'; see dracpu --help"),
        (["--expose_pcie_roots"], "unknown flag '--expose_pcie_roots'; did you mean --expose-pcie-roots?"),
        (["-Config=x"], "unknown flag '--Config'; did you mean --config?"),
        (["--conf=x"], "unknown flag '--conf'; did you mean --config?"),
        (["-v4"], "unknown flag '--v4'; see dracpu --help"),
        (["--v"], "flag --v needs a value: --v=N"),
        (["--config=a", "-config"], "flag --config needs a value: --config=FILE"),
        (["---v=4"], "'---v=4' is not a flag: expected --name or --name=value"),
        (["--=4"], "'--=4' is not a flag: expected --name or --name=value"),
        (["-=4"], "'-=4' is not a flag: expected --name or --name=value"),
        (
            ["--expose-pcie-roots=yes"],
            "flag --expose-pcie-roots: 'yes' is not a boolean; expected true or false",
        ),
        (["--expose-pcie-roots="], "flag --expose-pcie-roots: '' is not a boolean; expected true or false"),
        (["--a\nb\x1b"], r"unknown flag '--a\nb\x1b'; see dracpu --help"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(arguments, FLAGS)
    assert str(caught.value) == message


@pytest.mark.parametrize("argument", ["-h", "--h", "-help", "--help", "--help=please", "-h=false"])
def test_help(argument: str) -> None:
    with pytest.raises(HelpRequest):
        parse_flags(["--v=4", argument, "--nope"], FLAGS)


def test_help_behind_the_flags_is_an_argument() -> None:
    assert parse_flags(["--", "--help"], FLAGS) == ({}, ["--help"])


@given(
    st.lists(
        st.text()
        | st.sampled_from(["--", "-", "--config", "-v", "--config=", "--expose-pcie-roots", "=", "-h"])
        | st.builds(lambda name, value: f"--{name}={value}", st.sampled_from(["config", "v", "x"]), st.text())
    )
)
@example(["--" + "x" * 1_000_000])
@example(["\ud800", "-\udcff=\udcff"])
def test_no_command_line_makes_anything_but_an_answer_or_one_short_line(arguments: list[str]) -> None:
    answer = answer_to(arguments)
    if isinstance(answer, str):
        assert answer.isprintable()
        assert len(answer) < 400
    else:
        values, rest = answer
        assert values.keys() <= {flag.name for flag in FLAGS}
        assert rest == arguments[len(arguments) - len(rest) :]


def answer_to(arguments: list[str]) -> tuple[dict[str, str | bool], list[str]] | str:
    try:
        return parse_flags(arguments, FLAGS)
    except HelpRequest:
        return "help"
    except ConfigError as error:
        return str(error)


def test_names_that_differ_in_case_and_dashes_are_nearest() -> None:
    assert fold("expose-pcie-roots") == fold("exposePCIeRoots")
    assert nearest("GROUP_BY", ["reservedCPUs", "groupBy"]) == "groupBy"
    assert nearest("groupby2", ["reservedCPUs", "groupBy"]) == "groupBy"
    assert nearest("colour", ["reservedCPUs", "groupBy"]) is None


def test_shown_values_are_short_and_escaped() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown("x" * 100).endswith("… (102 characters)")


def test_the_help_has_every_flag() -> None:
    assert describe_flags(FLAGS).splitlines() == [
        "  --config=FILE                 the file",
        "  --v=N                         the verbosity",
        "  --expose-pcie-roots           a boolean",
        "  --a-name-too-long-for-its-line=SOMETHING",
        "                                on the next line",
    ]
