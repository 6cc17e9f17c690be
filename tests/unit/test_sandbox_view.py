# SPDX-License-Identifier: Apache-2.0
"""The map of CPUs, and what is printed around it."""

from __future__ import annotations

import io
import os
import pty

import pytest
from rich.text import Text

from driver.sandbox.machine import MachineShape, write_machine
from driver.sandbox.view import Story, machine_map
from fastcpu.cpuset import CpuSet
from fastcpu.sysfs import read_topology
from fastcpu.topology import Topology


def drawn(topology, reserved="", **holders):
    return machine_map(topology, CpuSet.parse(reserved), {name: CpuSet.parse(cpus) for name, cpus in holders.items()})


@pytest.fixture
def machine(tmp_path):
    def make(**shape):
        return read_topology(write_machine(tmp_path / "sys", MachineShape(**shape)))

    return make


def test_map_shows_who_holds_what(machine):
    text = drawn(machine(cpus=32, sockets=2, numa_nodes=4), "0,16", ours="2-3,18", theirs="8-15").plain
    assert text.splitlines() == [
        "socket 0",
        "  node 0     0 R.AA 16 R.A.",
        "  node 1     4 .... 20 ....",
        "socket 1",
        "  node 2     8 BBBB 24 ....",
        "  node 3    12 BBBB 28 ....",
        "",
        ". free: 19 CPUs (1,4-7,17,19-31)",
        "R reserved: 2 CPUs (0,16)",
        "A ours: 3 CPUs (2-3,18)",
        "B theirs: 8 CPUs (8-15)",
    ]


def test_holders_have_colours(machine):
    drawing = drawn(machine(cpus=32, numa_nodes=2), "0", ours="2-3", theirs="8")
    styles = {str(span.style) for span in drawing.spans}
    assert {"yellow", "bold green", "bold cyan"} <= styles


@pytest.mark.parametrize("cpus", [64, 512, 2048])
def test_map_fits_80_columns(machine, cpus):
    text = drawn(machine(cpus=cpus), "0", name="1-" + str(cpus - 1)).plain
    assert max(len(line) for line in text.splitlines()) <= 80
    assert sum(line.count("A") for line in text.splitlines() if "node" in line or line.startswith(" ")) == cpus - 1


def test_map_of_a_machine_without_nodes_or_sockets_shows_all_cpus():
    nowhere = [-1] * 4
    topology = Topology.from_arrays(
        CpuSet(range(4)), cores=list(range(4)), numa_nodes=nowhere, sockets=[0, 0, -1, -1], l3_caches=nowhere
    )
    assert drawn(topology).plain.splitlines()[:4] == [
        "socket 0",
        "  no node   0 ..",
        "no socket",
        "            2 ..",
    ]


def test_story_is_plain_text_where_there_is_no_terminal(capsys):
    story = Story()
    story.step("First")
    story.tell("a word prepared in colour, [red]brackets[/red] and :smile: as they are", emphasis="prepared")
    story.quote("x" * 100)
    story.measure("memory", 91.0, 90.0, "MB")
    story.measure("time", 1.0, 1.5, "s")
    story.show(Text("map"))
    story.complain("a difference")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "[red]brackets[/red] and :smile: as they are" in printed
    assert "memory: 91.00 MB (over the bar of 90 MB)" in printed
    assert "time: 1.00 s (within the bar of 1.5 s)" in printed
    assert "NOT AS EXPECTED: a difference" in printed
    assert all(len(line) <= 80 and line == line.rstrip() for line in printed.splitlines())


def test_story_survives_a_terminal_that_knows_ascii_only(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    Story().tell("naïve …")
    assert raw.getvalue() == b"   na?ve ?\n"


def test_story_is_coloured_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        Story().step("First")
    assert b"\x1b[1m" in os.read(leader, 1000)
    os.close(leader)
