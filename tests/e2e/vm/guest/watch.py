# SPDX-License-Identifier: Apache-2.0
"""Looks again and again whether any container is where it must not be, whatever happens meanwhile.

What a container was given is read from what the runtime started it with. First all containers with claims are looked
at, then those without: a CPU is taken from these before one with a claim starts on it, and given back after that has
ended. So an overlap with one that still lives at the end of a look is no matter of the order of reading.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import observe

_BUNDLES = Path("/run/containerd/io.containerd.runtime.v2.task/k8s.io")
_VARIABLE = "DRA_CPUSET_"
_PAUSE_S = 0.05
_SHOWN = 20


class _Watch(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        # Whether the driver is there, and has put right what happened without it.
        self.settled = False
        self.looks = 0
        self.processes = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.over.wait(_PAUSE_S):
            self.look()

    def look(self) -> None:
        claimed = [one for one in _processes() if one.given]
        settled = self.settled
        sharing = [one for one in _processes() if not one.given]
        self.looks += 1
        self.processes += len(claimed) + len(sharing)
        for one in claimed:
            if one.allowed != set().union(*one.given.values()) and one.lives():
                self.wrong.append(f"{one} is not where its claims are")
        others = [*claimed, *(sharing if settled else ())]
        for at, one in enumerate(claimed):
            for other in others[at + 1 :]:
                # Nobody keeps those without a claim away if the driver was killed in between.
                counts = one.given.keys().isdisjoint(other.given) and (other.given or self.settled)
                if counts and not one.allowed.isdisjoint(other.allowed) and one.lives() and other.lives():
                    self.wrong.append(f"{one} and {other} have {sorted(one.allowed & other.allowed)}")
        del self.wrong[_SHOWN:]


class _Process:
    """A process of a container's image."""

    def __init__(self, container: str, pid: str) -> None:
        self.container = container
        self._pid = pid
        self._started = self._start()
        self.given = _given(container)
        self.allowed = _cpus(observe.allowed(int(pid)))

    def __str__(self) -> str:
        return f"process {self._pid} of {self.container[:12]}, given {self.given}, on {sorted(self.allowed)},"

    def lives(self) -> bool:
        """Tell whether it still runs."""
        with suppress(OSError):
            return self._start() == self._started
        return False

    def _start(self) -> str:
        return Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[19]


def _processes() -> list[_Process]:
    found = []
    for container, what in observe.containers().items():
        for pid, process in what["processes"].items():
            # A process may end while it is looked at; what is not of the image is runc, which has not moved in yet.
            with suppress(OSError):
                if process["program"].endswith("/busybox") and not _is_sandbox(container):
                    found.append(_Process(container, pid))
    return found


@cache
def _bundle(container: str) -> dict:
    return json.loads((_BUNDLES / container / "config.json").read_bytes())


def _is_sandbox(container: str) -> bool:
    return _bundle(container)["annotations"]["io.kubernetes.cri.container-type"] == "sandbox"


def _given(container: str) -> dict:
    variables = [text.partition("=") for text in _bundle(container)["process"]["env"] if text.startswith(_VARIABLE)]
    return {name.removeprefix(_VARIABLE): _cpus(cpus) for name, _, cpus in variables}


def _cpus(text: str) -> set:
    cpus = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


_watch = _Watch()


def watch_start() -> None:
    """Begin to look."""
    global _watch
    _watch = _Watch()
    _watch.start()


def watch_settled(settled: bool) -> None:
    """Say whether the driver is there, and has put right what happened without it."""
    _watch.settled = settled


def watch_stop() -> dict:
    """Look once more, and return what was found."""
    _watch.over.set()
    _watch.join()
    _watch.look()
    return {"looks": _watch.looks, "processes": _watch.processes, "wrong": _watch.wrong}


def strangers() -> list:
    """Return which containers without a claim are on CPUs of claims."""
    watch = _Watch()
    watch.settled = True
    watch.look()
    return watch.wrong
