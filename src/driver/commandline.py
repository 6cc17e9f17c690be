# SPDX-License-Identifier: Apache-2.0
"""The command line: which command, with which flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from driver.config import Config
from driver.errors import ConfigError
from driver.flags import Flag, HelpRequest, describe_flags, nearest, parse_flags, shown
from driver.given import Given, one_of, read_cpus, read_path
from driver.settings import FLAGS, GROUPINGS, load, warnings

if TYPE_CHECKING:
    from fastcpu import CpuSet

Command = Literal["run", "gatherinfo", "introspect-metrics", "demo", "box"]

_STDOUT: Final = Flag(name="stdout", help="write the report to standard output instead of a file")
_OUTPUT_DIR: Final = Flag(name="output-dir", value="DIR", help="write the report into a new file in this folder")
_SANDBOX_FLAGS: Final = (
    Flag(name="sysfs-root", value="DIR", help="the machine (a generated one: 2 sockets, 8 NUMA nodes, 256 CPUs)"),
    Flag(name="group-by", value="LEVEL", help=f"{', '.join(GROUPINGS)} (numanode)"),
    Flag(name="reserved-cpus", value="CPUS", help="CPUs that no claim gets (those of the first core)"),
)
_COMMANDS: Final = ("gatherinfo", "introspect", "demo", "box")

_USAGE: Final = """\
dracpu, the Kubernetes DRA driver for CPUs

  dracpu [flags]               run the node plugin
  dracpu gatherinfo [flags]    describe this node's CPUs and the driver's configuration, for a bug report
  dracpu introspect metrics    list the driver's own metrics as JSON
  dracpu demo [flags]          show a claim being prepared in a one-node cluster in a box
  dracpu box [flags]           keep such a cluster running for claims of your own
  dracpu COMMAND --help        the flags of a command

A flag wins over the configuration file. Flags:
"""
_GATHERINFO_USAGE: Final = """\
dracpu gatherinfo: describe this node's CPUs and the driver's configuration as YAML

The configuration is the running driver's, unless flags give another one. Without a flag for the output the report goes
into a new file in the folder for temporary files, and its path is printed. Flags:
"""
_INTROSPECT_USAGE: Final = "dracpu introspect metrics: list the driver's own metrics as JSON, without starting it\n"
_SANDBOX_USAGE: Final = {
    "demo": "dracpu demo: show claims being prepared and refused in a one-node cluster in a box\n\nFlags:\n",
    "box": "dracpu box: run a one-node cluster in a box with the driver in it until it is interrupted\n\nFlags:\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What ``dracpu gatherinfo`` was asked for.

    Attributes
    ----------
    to_stdout : bool
        Whether the report goes to standard output.
    output_dir : Path or None
        The folder of the report's file; None: the one for temporary files.
    configured : bool
        Whether flags told the configuration; else it is the running driver's.
    """

    to_stdout: bool = False
    output_dir: Path | None = None
    configured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """What ``dracpu demo`` and ``dracpu box`` were asked for.

    Attributes
    ----------
    sysfs_root : Path or None
        The machine; None: a generated one.
    group_by : str
        As in `Config`.
    reserved_cpus : CpuSet or None
        CPUs that no claim gets; None: those of the first core.
    """

    sysfs_root: Path | None = None
    group_by: str = "numanode"
    reserved_cpus: CpuSet | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What a command line asks for.

    Attributes
    ----------
    command : str
        ``run`` is the node plugin.
    config : Config
        For ``run`` and ``gatherinfo``; else the defaults.
    warnings : tuple of str
        For ``run``: what should be logged first.
    report : ReportOptions
        For ``gatherinfo``.
    sandbox : SandboxOptions
        For ``demo`` and ``box``.
    """

    command: Command
    config: Config = field(default_factory=Config)
    warnings: tuple[str, ...] = ()
    report: ReportOptions = field(default_factory=ReportOptions)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)


def parse_command_line(arguments: Sequence[str]) -> Invocation:
    """Understand a command line.

    Parameters
    ----------
    arguments : sequence of str
        Without the program's name.

    Returns
    -------
    Invocation

    Raises
    ------
    HelpRequest
        If the command's help was asked for; its text is the message.
    ConfigError
        One line for whoever wrote the command line or the configuration file.
    """
    match list(arguments):
        case ["gatherinfo", *rest]:
            return _gatherinfo(rest)
        case ["introspect", "metrics", *rest]:
            _flags(rest, (), _INTROSPECT_USAGE)
            return Invocation(command="introspect-metrics")
        case ["introspect", *rest]:
            if rest and not rest[0].startswith("-"):
                raise ConfigError(f"introspect does not know {shown(rest[0])}; expected: dracpu introspect metrics")
            _flags(rest, (), _INTROSPECT_USAGE)
            raise ConfigError("introspect needs an object; expected: dracpu introspect metrics")
        case [("demo" | "box") as command, *rest]:
            return Invocation(command=command, sandbox=_sandbox(_flags(rest, _SANDBOX_FLAGS, _SANDBOX_USAGE[command])))
        case rest:
            flags = _flags(rest, FLAGS, _USAGE)
            config = load(flags)
            return Invocation(command="run", config=config, warnings=tuple(warnings(config, flags)))


def _flags(arguments: Sequence[str], known: Sequence[Flag], usage: str) -> dict[str, str | bool]:
    try:
        values, rest = parse_flags(arguments, known)
    except HelpRequest:
        raise HelpRequest((usage + describe_flags(known)).rstrip("\n")) from None
    if rest:
        raise ConfigError(f"unexpected argument {shown(rest[0])}{_hint(rest[0])}")
    return values


def _hint(argument: str) -> str:
    meant = nearest(argument, _COMMANDS)
    if meant == argument:
        return "; a command is the first argument"
    return f"; did you mean {meant}?" if meant else "; see dracpu --help"


def _gatherinfo(arguments: Sequence[str]) -> Invocation:
    flags = _flags(arguments, (_STDOUT, _OUTPUT_DIR, *FLAGS), _GATHERINFO_USAGE)
    to_stdout = bool(flags.pop("stdout", False))
    directory = flags.pop("output-dir", None)
    if to_stdout and directory is not None:
        raise ConfigError("--stdout and --output-dir cannot be given together")
    return Invocation(
        command="gatherinfo",
        config=load(flags),
        report=ReportOptions(
            to_stdout=to_stdout,
            output_dir=None if directory is None else read_path(Given(directory, "flag --output-dir")),
            configured=bool(flags),
        ),
    )


def _sandbox(flags: dict[str, str | bool]) -> SandboxOptions:
    given = {name: Given(value, f"flag --{name}") for name, value in flags.items()}
    return SandboxOptions(
        sysfs_root=read_path(given["sysfs-root"]) if "sysfs-root" in given else None,
        group_by=one_of(*GROUPINGS)(given["group-by"]) if "group-by" in given else "numanode",
        reserved_cpus=read_cpus(given["reserved-cpus"]) if "reserved-cpus" in given else None,
    )
