# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.commandline import Invocation, ReportOptions, SandboxOptions, parse_command_line
from driver.config import Config
from driver.errors import ConfigError
from driver.flags import HelpRequest
from driver.settings import FLAGS
from fastcpu import CpuSet


@pytest.mark.parametrize(
    ("arguments", "invocation"),
    [
        ([], Invocation(command="run")),
        (["--v=4"], Invocation(command="run", config=Config(verbosity=4))),
        (["--"], Invocation(command="run")),
        (["gatherinfo"], Invocation(command="gatherinfo")),
        (
            ["gatherinfo", "--stdout"],
            Invocation(command="gatherinfo", report=ReportOptions(to_stdout=True)),
        ),
        (["gatherinfo", "-stdout=false"], Invocation(command="gatherinfo")),
        (
            ["gatherinfo", "--output-dir", "a/b"],
            Invocation(command="gatherinfo", report=ReportOptions(output_dir=Path("a/b"))),
        ),
        (
            ["gatherinfo", "--stdout", "--sysfs-root=/tree"],
            Invocation(
                command="gatherinfo",
                config=Config(sysfs_root=Path("/tree")),
                report=ReportOptions(to_stdout=True, configured=True),
            ),
        ),
        (["introspect", "metrics"], Invocation(command="introspect-metrics")),
        (["demo"], Invocation(command="demo")),
        (["box"], Invocation(command="box")),
        (
            ["demo", "--sysfs-root=/sys", "--group-by", "l3cache", "--reserved-cpus=0-1"],
            Invocation(
                command="demo",
                sandbox=SandboxOptions(sysfs_root=Path("/sys"), group_by="l3cache", reserved_cpus=CpuSet.parse("0-1")),
            ),
        ),
    ],
)
def test_what_a_command_line_asks_for(arguments: list[str], invocation: Invocation) -> None:
    assert parse_command_line(arguments) == invocation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "unexpected argument 'run'; see dracpu --help"),
        ([""], "unexpected argument ''; see dracpu --help"),
        (["gather-info"], "unexpected argument 'gather-info'; did you mean gatherinfo?"),
        (["--v=4", "gatherinfo"], "unexpected argument 'gatherinfo'; a command is the first argument"),
        (["--", "demo"], "unexpected argument 'demo'; a command is the first argument"),
        (["gatherinfo", "now"], "unexpected argument 'now'; see dracpu --help"),
        (["gatherinfo", "--stdout", "--output-dir=a"], "--stdout and --output-dir cannot be given together"),
        (["gatherinfo", "--output-dir="], "flag --output-dir: '' is not accepted; expected a path"),
        (["gatherinfo", "--outputdir=a"], "unknown flag '--outputdir'; did you mean --output-dir?"),
        (["gatherinfo", "--config=/nope"], "cannot read the configuration file '/nope': No such file or directory"),
        (["--stdout"], "unknown flag '--stdout'; see dracpu --help"),
        (["introspect"], "introspect needs an object; expected: dracpu introspect metrics"),
        (["introspect", "config"], "introspect does not know 'config'; expected: dracpu introspect metrics"),
        (["introspect", "--x"], "unknown flag '--x'; see dracpu --help"),
        (["introspect", "metrics", "x"], "unexpected argument 'x'; see dracpu --help"),
        (["introspect", "metrics", "--v=4"], "unknown flag '--v'; see dracpu --help"),
        (
            ["box", "--group-by=node"],
            "flag --group-by: 'node' is not accepted; expected numanode, socket, machine or l3cache",
        ),
        (["demo", "--kubeconfig=/k"], "unknown flag '--kubeconfig'; see dracpu --help"),
        (["demo", "--sysfs-root="], "flag --sysfs-root: '' is not accepted; expected a path"),
    ],
)
def test_what_is_wrong_with_a_command_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command_line(arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["dracpu demo", "--nri-socket=SOCKET"]),
        (["--group-by=nonsense", "-h"], ["dracpu gatherinfo"]),
        (["gatherinfo", "--help"], ["--output-dir=DIR", "--sysfs-root=DIR"]),
        (["introspect", "--help"], ["dracpu introspect metrics"]),
        (["introspect", "metrics", "-h"], ["dracpu introspect metrics"]),
        (["demo", "--help"], ["--reserved-cpus=CPUS", "256 CPUs"]),
        (["box", "--help"], ["--reserved-cpus=CPUS", "until it is interrupted"]),
    ],
)
def test_each_command_has_its_help(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(HelpRequest) as caught:
        parse_command_line(arguments)
    assert all(word in str(caught.value) for word in words)
    assert str(caught.value).isascii()


def test_the_help_tells_every_flag_and_which_are_deprecated() -> None:
    with pytest.raises(HelpRequest) as caught:
        parse_command_line(["--help"])
    lines = {line.split("=")[0].split()[0]: line for line in str(caught.value).splitlines() if "--" in line[:4]}
    assert lines.keys() == {f"--{flag.name}" for flag in FLAGS}
    assert {name for name, line in lines.items() if "deprecated" in line} == {
        "--cpu-device-mode",
        "--group-by",
        "--reserved-cpus",
        "--hostname-override",
        "--sysfs-overlay",
    }


def test_warnings_are_for_the_plugin() -> None:
    assert parse_command_line(["--group-by=socket"]).warnings == (
        "flag --group-by is deprecated; set groupBy in the configuration file",
    )
    assert parse_command_line(["gatherinfo", "--group-by=socket"]).warnings == ()


WORDS = ["gatherinfo", "introspect", "metrics", "demo", "box", "--", "-", "-h", *(f"--{flag.name}" for flag in FLAGS)]


@given(
    st.lists(
        st.sampled_from(WORDS) | st.text() | st.builds("{}={}".format, st.sampled_from(WORDS), st.text()), max_size=6
    )
)
def test_any_command_line_is_understood_or_refused(arguments: list[str]) -> None:
    try:
        invocation = parse_command_line(arguments)
    except (ConfigError, HelpRequest):
        return
    assert invocation.command in ("run", "gatherinfo", "introspect-metrics", "demo", "box")
