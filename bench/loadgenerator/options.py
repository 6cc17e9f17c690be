# SPDX-License-Identifier: Apache-2.0
"""The load generator's command line."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

_OURS = (
    f"{shlex.quote(sys.executable)} -m driver --config={{config}} --kubeconfig={{kubeconfig}}"
    " --kubelet-root-dir={kubelet_root} --cdi-dir={cdi_dir} --sysfs-root={sysfs_root} --nri-socket={nri_socket}"
    " --bind-address=127.0.0.1:{port}"
)

_EPILOG = """\
Placeholders in --driver: {config} is a configuration file for dracpu (allocator external, the node's name, the first
core reserved), {reserved} those CPUs, {node} the node's name, {kubeconfig}, {kubelet_root}, {cdi_dir}, {sysfs_root}
and {nri_socket} are paths, {port} is a free port. A driver whose folders cannot be chosen needs --kubelet-root and
--cdi-dir as it knows them; one that cannot read another sysfs needs --cpus 0, which takes this machine as it is.

The kubelet's folder is made on this machine's disk (below TMPDIR) and that of CDI specs in memory, as both are on a
node.

The exit status is 0 if every answer was right, whatever the times are.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to be measured.

    Attributes
    ----------
    command : tuple of str
        The driver's command line, with placeholders.
    kubeconfig : Path or None
        The API server; None for one of the sandbox in a process of its own.
    kubelet_root, cdi_dir : Path or None
        Folders that the driver insists on.
    cpus : tuple of int
        Sizes of the machines; 0 is this machine.
    per_call : tuple of int
        Claims in a call, one measurement for each.
    calls : int
        Calls of each kind in a measurement of latency.
    rate : float
        Calls a second while latency is measured, all kinds together.
    claims : int
        How many claims are prepared and unprepared as fast as the driver can.
    concurrency : int
        How many claims are under way meanwhile.
    hold_s : float
        How long each of them stays prepared.
    cpus_per_claim : int
        How many CPUs each claim has.
    containers : int
        How many containers without a claim run on the node.
    starts : int
        How often the driver is started on each machine.
    json : Path or None
        Where the results go as JSON.
    """

    command: tuple[str, ...]
    kubeconfig: Path | None
    kubelet_root: Path | None
    cdi_dir: Path | None
    cpus: tuple[int, ...]
    per_call: tuple[int, ...]
    calls: int
    rate: float
    claims: int
    concurrency: int
    hold_s: float
    cpus_per_claim: int
    containers: int
    starts: int
    json: Path | None


def parse_options(arguments: list[str] | None = None) -> Options:
    """Read the command line; exit with a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="load.py",
        description="Play a kubelet against a DRA CPU driver, and report how fast and how right its answers are.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--driver", metavar="COMMAND", default=_OURS, help="the driver's command line (default: this checkout's)")
    add("--kubeconfig", type=Path, help="a real API server, with an administrator's rights (default: the sandbox's)")
    add("--kubelet-root", type=Path, help="the kubelet's folder, if the driver insists on one")
    add("--cdi-dir", type=Path, help="the folder of CDI specs, if the driver insists on one")
    add("--cpus", type=_numbers(0), default=(64, 512, 1024), help="sizes of the machines (64,512,1024)")
    add("--per-call", type=_numbers(1), default=(1, 8, 32), help="claims in a call (1,8,32)")
    add("--calls", type=_number(1), default=100, help="calls of each kind and number of claims (100)")
    add("--rate", type=_positive, default=20.0, help="calls a second while latency is measured (20)")
    add("--claims", type=_number(0), default=1000, help="claims of the measurement at full speed (1000)")
    add("--concurrency", type=_number(1), default=4, help="claims under way at full speed (4)")
    add("--hold", dest="hold_s", type=_not_negative, default=0.0, help="seconds that each stays prepared meanwhile (0)")
    add("--cpus-per-claim", type=_number(1), default=1, help="CPUs of each claim (1)")
    add("--containers", type=_number(0), default=0, help="containers without a claim on the node (0)")
    add("--starts", type=_number(1), default=3, help="starts of the driver on each machine (3)")
    add("--json", type=Path, help="write the results to this file as well")
    given = vars(parser.parse_args(arguments))
    return Options(command=tuple(shlex.split(given.pop("driver"))), **given)


def _number(least: int):
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    return number


def _numbers(least: int):
    number = _number(least)

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(number(part) for part in text.split(","))

    return numbers


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise ValueError
    return value
