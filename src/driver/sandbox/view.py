# SPDX-License-Identifier: Apache-2.0
"""What the demo and the box show in a terminal: what happens, and a map of the CPUs coloured by who holds them.

Every holder has a letter as well as a colour, so the map says the same without colours, and all of it fits 80 columns.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Final

from rich.console import Console
from rich.text import Text

from fastcpu.cpuset import CpuSet
from fastcpu.topology import Topology

_WIDTH: Final = 80
_LABEL_WIDTH: Final = 11
_RUN_LENGTH: Final = 32
_FREE: Final = (".", "dim")
_RESERVED: Final = ("R", "yellow")
_LETTERS: Final = "ABCDEFGHIJKLMNOPQSTUVWXYZ"
_EMPHASES: Final = {"prepared": "bold green", "pinned": "bold green", "refused": "bold red"}
_STYLES: Final = ("bold green", "bold cyan", "bold magenta", "bold blue", "bold red")


class Story:
    """Tells a person at a terminal, or whoever reads a file later, what happens; plain text where it is no terminal."""

    def __init__(self) -> None:
        # Texts from outside may hold what the terminal's encoding cannot say.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        self._console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, emoji=False)
        self._steps = 0

    def step(self, what: str) -> None:
        """Begin a new part."""
        self._steps += 1
        self._console.print(Text(f"\n{self._steps}. {what}", "bold"))

    def tell(self, what: str, emphasis: str = "") -> None:
        """Tell one thing; the word `emphasis` in it stands out."""
        text = Text(what)
        if emphasis:
            text.highlight_words([emphasis], _EMPHASES.get(emphasis, "bold"))
        self._indented(text, 3)

    def quote(self, what: str) -> None:
        """Tell what somebody else said."""
        self._indented(Text(what, "italic"), 6)

    def measure(self, what: str, value: float, bar: float, unit: str) -> None:
        """Tell a measured value beside what it should be at most."""
        verdict = Text("within", "green") if value <= bar else Text("over", "bold red")
        text = Text(f"{what}: {value:.2f} {unit} (").append_text(verdict).append(f" the bar of {bar:g} {unit})")
        self._indented(text, 3)

    def conclude(self, what: str) -> None:
        """Tell how it ended."""
        self._console.print(Text(f"\n{what}", "bold green"))

    def text(self, text: str) -> None:
        """Print a text as it is, so that commands and paths in it can be copied."""
        self._console.print(Text(text), soft_wrap=True)

    def show(self, drawing: Text) -> None:
        """Show a drawing."""
        self._console.print(drawing, no_wrap=True)

    def complain(self, what: str) -> None:
        """Tell what is wrong."""
        self._console.print(Text("\nNOT AS EXPECTED: ", "bold red").append(what, "default"))

    def _indented(self, text: Text, columns: int) -> None:
        # The console's own indentation would fill up each line with blanks.
        for line in text.wrap(self._console, self._console.width - columns):
            line.rstrip()
            self._console.print(Text(" " * columns).append_text(line))


def machine_map(topology: Topology, reserved: CpuSet, holders: Mapping[str, CpuSet]) -> Text:
    """Draw the online CPUs, one character each, by socket and NUMA node, with a legend below.

    Parameters
    ----------
    topology : Topology
    reserved : CpuSet
        CPUs that no claim gets.
    holders : mapping of str to CpuSet
        Who holds which CPUs, by the name to show.
    """
    marks = dict.fromkeys(topology.online, _FREE)
    marks |= dict.fromkeys(topology.online & reserved, _RESERVED)
    legend = [(*_FREE, "free", topology.online - reserved)]
    if topology.online & reserved:
        legend.append((*_RESERVED, "reserved", topology.online & reserved))
    for index, (name, cpus) in enumerate(holders.items()):
        mark = _LETTERS[index % len(_LETTERS)], _STYLES[index % len(_STYLES)]
        marks |= dict.fromkeys(topology.online & cpus, mark)
        legend.append((*mark, name, cpus))
        legend[0] = (*_FREE, "free", legend[0][3] - cpus)

    drawing = Text()
    placed = CpuSet()
    for socket_row, socket in enumerate(topology.sockets.ids):
        in_socket = topology.sockets.cpuset(socket_row)
        drawing.append(f"socket {socket}\n", "bold")
        for node_row, node in enumerate(topology.numa_nodes.ids):
            cpus = topology.numa_nodes.cpuset(node_row) & in_socket
            _draw_row(drawing, f"  node {node}", cpus - placed, marks)
            placed |= cpus
        _draw_row(drawing, "  no node", in_socket - placed, marks)
        placed |= in_socket
    if topology.online - placed:
        drawing.append("no socket\n", "bold")
        _draw_row(drawing, "", topology.online - placed, marks)
    for letter, style, name, cpus in legend:
        drawing.append(f"\n{letter} ", style)
        drawing.append(_fitted(f"{name}: {_counted(cpus)}", _WIDTH - 2))
    return drawing


def _draw_row(drawing: Text, label: str, cpus: CpuSet, marks: Mapping[int, tuple[str, str]]) -> None:
    """Draw one node: its runs of consecutive CPUs, each after its first CPU's number, in as many lines as needed."""
    width = len(str(max(marks)))
    left = 0
    for index, run in enumerate(_runs(cpus)):
        needed = width + 2 + len(run)
        if needed > left:
            drawing.append("\n" if index else "")
            drawing.append(f"{'' if index else label:{_LABEL_WIDTH}}")
            left = _WIDTH - _LABEL_WIDTH
        drawing.append(f" {run[0]:>{width}} ", "dim")
        for cpu in run:
            drawing.append(*marks[cpu])
        left -= needed
    drawing.append("\n" if cpus else "")


def _runs(cpus: CpuSet) -> list[list[int]]:
    """Split a set into runs of consecutive CPUs, none longer than what is easy to count."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][-1] == cpu - 1 and len(runs[-1]) < _RUN_LENGTH:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return runs


def _counted(cpus: CpuSet) -> str:
    return f"{len(cpus)} CPU{'s' if len(cpus) != 1 else ''}" + (f" ({cpus})" if cpus else "")


def _fitted(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
