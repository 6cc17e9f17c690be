# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from driver import guardnotes
from driver.guardnotes import GuardNotes, Note, NotesFolder, parse_note
from driver.metrics import Metrics

NOTE = b"v1\t0\t0-1\n"


@dataclass
class Runtime:
    known: bool = True
    living: dict[str, str] = field(default_factory=dict)

    @property
    def containers(self) -> dict[str, str]:
        return self.living


class Told:
    """A folder with notes, what watches it, and what it has told."""

    def __init__(self, plugin_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.folder = plugin_dir / "guard-notes"
        self.runtime = Runtime()
        self.now = 1000.0
        self._plugin_dir = plugin_dir
        self._caplog = caplog
        self.restart()

    def restart(self) -> None:
        self._registry = CollectorRegistry()
        self._notes = GuardNotes(self._plugin_dir, self.runtime, Metrics(self._registry), clock=lambda: self.now)

    def note(self, name: str, content: bytes = NOTE) -> None:
        (self.folder / name).write_bytes(content)

    async def look(self) -> list[tuple[str, dict[str, str]]]:
        """Return what was logged: how it begins, and its fields."""
        self._caplog.clear()
        await self._notes.look()
        records = [record for record in self._caplog.records if record.levelno >= logging.WARNING]
        return [
            (record.getMessage().partition(" on fewer")[0], {name: str(value) for name, value in record.fields.items()})
            for record in records
        ]

    @property
    def figures(self) -> tuple[float | None, float | None]:
        """How many live, and how many there have been."""
        names = ("dra_cpu_containers_on_fewer_cpus", "dra_cpu_starts_on_fewer_cpus_total")
        return tuple(map(self._registry.get_sample_value, names))

    @property
    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder))


@pytest.fixture
def told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Told:
    plugin_dir = tmp_path / "dra.cpu"
    plugin_dir.mkdir()
    return Told(plugin_dir, caplog)


# What a note says


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"v1\t0\t0-1\n", Note("0", "0-1")),
        (b"v1\t0-1,8,64-127\t0-255\n", Note("0-1,8,64-127", "0-255")),
        (b"v1\t0\t0,2,4,... (4096 CPUs)\n", Note("0", "0,2,4,... (4096 CPUs)")),
    ],
)
def test_a_note_is_understood(content, note):
    assert parse_note(content) == note


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n", b"v1", b"v1\t0\t0-1", b"v1\t0\t0-1\n\n", b"v1\t0\n", b"v1\t0\t1\t2\n", b"v1 0 0-1\n"),
        *(b"v2\t0\t0-1\n", b"V1\t0\t0-1\n", b" v1\t0\t0-1\n", b"v1\t\t\n", b"v1\tnone\t0\n", b"v1\t0\t-1\n"),
        *(b"v1\t0\t0-1\0\n", b"v1\t0\t0-1\r\n", b"v1\t0\t0-1,...\n", b"v1\t0\t0 (1 CPUs)\n", b"v1\t\xd9\xa3\t0\n"),
        b"v1\t0\t0\x1b[31m\n",
    ],
)
def test_what_is_no_note_of_this_format_says_nothing(content):
    assert parse_note(content) is None


@given(st.binary(max_size=64) | st.from_regex(rb"v1\t[0-9,.\-]{1,9}\t[0-9,.\- (CPUs)]{1,20}\n", fullmatch=True))
def test_what_a_note_says_prints(content):
    note = parse_note(content)
    if note is not None:
        assert (note.used + note.claimed).isprintable()
        assert content == f"v1\t{note.used}\t{note.claimed}\n".encode()


# What is told


async def test_a_container_that_lives_is_told_once(told):
    assert await told.look() == []
    assert stat.S_IMODE(told.folder.stat().st_mode) == 0o700
    assert told.figures == (0, 0)
    told.note("c1")
    told.runtime.living["c1"] = "container main of pod default/p"
    said = {"container": "container main of pod default/p", "id": "c1", "cpus": "0", "claimed": "0-1"}
    assert await told.look() == [("a container was started", said)]
    for _ in range(3):
        told.now += 1000
        assert await told.look() == []
        assert told.figures == (1, 1)
    told.restart()
    assert await told.look() == [("a container was started", said)]
    assert told.figures == (1, 1)
    assert told.names == ["c1"]


async def test_a_note_is_removed_when_its_container_has_been_gone_for_a_minute(told):
    await told.look()
    told.note("c1")
    told.note("c2")
    told.runtime.living |= {"c1": "one", "c2": "two"}
    assert len(await told.look()) == 2
    assert told.figures == (2, 2)
    del told.runtime.living["c1"]
    assert await told.look() == []
    assert told.figures == (1, 2)
    told.now += 59
    await told.look()
    assert told.names == ["c1", "c2"]
    told.now += 1
    assert await told.look() == []
    assert told.names == ["c2"]


async def test_as_long_as_the_runtime_is_not_known_nothing_is_removed(told):
    await told.look()
    told.note("c1")
    told.runtime.known = False
    for _ in range(3):
        told.now += 1000
        assert await told.look() == []
    told.runtime.known = True
    told.runtime.living["c1"] = "one"
    assert len(await told.look()) == 1
    assert told.names == ["c1"]


async def test_a_container_that_comes_to_be_known_late_keeps_its_note(told):
    await told.look()
    told.note("c1")
    assert await told.look() == []
    told.now += 59
    told.runtime.living["c1"] = "one"
    assert len(await told.look()) == 1
    del told.runtime.living["c1"]
    told.now += 30
    await told.look()
    assert told.names == ["c1"]


async def test_containers_that_ended_before_anybody_looked_are_told_in_one_line(told):
    await told.look()
    for number in range(500):
        told.note(f"c{number}")
    assert await told.look() == []
    told.now += 60
    ((what, said),) = await told.look()
    assert what == "containers that have ended were started"
    assert said["count"] == "500"
    assert len(said["ids"].split()) == 3
    assert (said["cpus"], said["claimed"]) == ("0", "0-1")
    assert told.figures == (0, 500)
    assert told.names == []
    assert await told.look() == []


async def test_a_note_of_another_version_is_left_alone_until_its_container_is_gone(told):
    await told.look()
    told.note("c1", b"v2\twhatever" + b"\0" * 10_000)
    told.note("c2", b"")
    told.runtime.living |= {"c1": "one", "c2": "two"}
    assert await told.look() == []
    assert told.figures == (0, 0)
    told.now += 1000
    await told.look()
    assert told.names == ["c1", "c2"]
    told.runtime.living.clear()
    await told.look()
    told.now += 60
    assert await told.look() == []
    assert told.names == []
    assert told.figures == (0, 0)


# What else may be in the folder


def put(folder: Path, name: str, kind: str, elsewhere: Path) -> None:
    path = folder / name
    makers: dict[str, Callable[[], object]] = {
        "file": lambda: path.write_bytes(NOTE),
        "link": lambda: path.symlink_to(elsewhere),
        "dangling": lambda: path.symlink_to(elsewhere / "nothing"),
        "fifo": lambda: os.mkfifo(path),
        "huge": lambda: (path.touch(), os.truncate(path, 1 << 40)),
        "folder": path.mkdir,
    }
    makers[kind]()


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "huge"])
async def test_what_is_no_note_is_neither_followed_nor_waited_for_nor_told(told, tmp_path, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(NOTE)
    await told.look()
    put(told.folder, "c1", kind, elsewhere)
    told.runtime.living["c1"] = "one"
    assert await told.look() == []
    assert told.figures == (0, 0)
    told.runtime.living.clear()
    await told.look()
    told.now += 60
    assert await told.look() == []
    assert told.names == []
    assert elsewhere.read_bytes() == NOTE


@pytest.mark.parametrize("name", ["a b", "-c", "_c", "ä", "a\n", "a\x1b", "x" * 129, "a:b", "~"])
async def test_names_that_no_container_has_are_swept(told, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(NOTE)
    await told.look()
    for kind in ("file", "link", "fifo"):
        put(told.folder, name, kind, elsewhere)
        assert await told.look() == []
        assert told.names == []
    assert elsewhere.exists()


async def test_a_folder_in_the_folder_hurts_nobody(told, tmp_path):
    await told.look()
    (told.folder / "c0").mkdir()
    (told.folder / "c0" / "x").touch()
    (told.folder / "a b").mkdir()
    told.note("c1")
    told.runtime.living["c1"] = "one"
    assert len(await told.look()) == 1
    told.now += 60
    assert await told.look() == []
    assert told.names == ["a b", "c0", "c1"]


async def test_what_a_guard_is_still_writing_is_left_alone_for_a_minute(told):
    await told.look()
    told.note(".c1")
    assert await told.look() == []
    assert told.names == [".c1"]
    long_ago = time.time() - 100
    os.utime(told.folder / ".c1", (long_ago, long_ago))
    assert await told.look() == []
    assert told.names == []


async def test_ten_thousand_files_are_gone_after_some_looks(told, monkeypatch):
    await told.look()
    for number in range(5000):
        told.note(f"c{number}")
        (told.folder / f"x {number}").touch()
    most = 0

    def read(self: NotesFolder, known: object) -> object:
        nonlocal most
        names, notes = real(self, known)
        most = max(most, len(names))
        return names, notes

    real = NotesFolder.read
    monkeypatch.setattr(NotesFolder, "read", read)
    looks = 0
    while told.names:
        lines = await told.look()
        assert len(lines) <= 1
        told.now += 60
        looks += 1
        assert looks < 50
    assert most <= 2000
    assert told.figures == (0, 5000)


@pytest.mark.parametrize("obstacle", ["file", "link", "dangling", "fifo"])
async def test_what_stands_in_the_folder_s_place_is_told_once_and_not_touched(told, tmp_path, caplog, obstacle):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a b").touch()
    put(told.folder.parent, told.folder.name, obstacle, elsewhere)
    [(what, said)] = await told.look()
    assert what == "cannot look for the start guard's notes"
    assert str(told.folder) in said["reason"]
    assert await told.look() == []
    assert os.listdir(elsewhere) == ["a b"]
    told.folder.unlink()
    assert await told.look() == []
    told.folder.rmdir()
    told.folder.touch()
    assert len(await told.look()) == 1


async def test_a_disk_that_lets_nothing_be_removed_is_tried_again(told, disk):
    await told.look()
    told.note("c1")
    await told.look()
    told.now += 60
    disk.fail("unlink", "c1", errno.EROFS)
    assert len(await told.look()) == 1
    assert await told.look() == []
    assert told.figures == (0, 1)
    disk.repair()
    assert await told.look() == []
    assert told.names == []


async def test_without_a_plugin_folder_it_goes_on(told):
    told.folder.parent.rmdir()
    assert len(await told.look()) == 1
    told.folder.parent.mkdir()
    assert await told.look() == []
    assert told.names == []


async def test_it_looks_again_and_again(told, until, monkeypatch):
    monkeypatch.setattr(guardnotes, "_LOOK_AGAIN_S", 0.0)
    running = asyncio.create_task(told._notes.run())
    try:
        await until(told.folder.exists)
        told.runtime.living["c1"] = "one"
        told.note("c1")
        await until(lambda: told.figures == (1, 1))
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
