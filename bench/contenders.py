# SPDX-License-Identifier: Apache-2.0
"""Who does what with CPU sets, in whose words: fastcpu and what a user would take instead.

A task is a job with its inputs and its answer, the same for all. `start` gives a contender's loop for it: called with a
number of calls it tells how many seconds they took. The loop is in the contender's own language, so that nothing
but the job is measured: ``timeit`` runs the statement that a user would write, hwloc and Go have theirs in C and Go.
"""

from __future__ import annotations

import ctypes
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
from pyroaring import BitMap

import cases
import golang
import hwloc
import rivals
from fastcpu import CpuSet

ALGEBRA = (
    "union",
    "intersection",
    "difference",
    "is subset",
    "is disjoint",
    "equal",
    "count",
    "contains",
    "list",
    "make of numbers",
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job, its inputs and its answer; a job looks at those inputs only that concern it."""

    job: str
    n_cpus: int
    a: frozenset[int]
    b: frozenset[int] = frozenset()
    text: str = "0"
    demands: tuple[tuple[int, int], ...] = ()
    answer: object

    @cached_property
    def numbers(self) -> list[int]:
        return sorted(self.a)

    @property
    def cpu(self) -> int:
        return self.numbers[-1]

    @property
    def online(self) -> set[int]:
        return set(range(self.n_cpus))

    @property
    def reserved(self) -> set[int]:
        return cases.RESERVED

    @property
    def groups(self) -> list[set[int]]:
        return cases.members(self.n_cpus)


def algebra(job: str, n_cpus: int) -> Task:
    """Return a job on every second CPU and the middle half of a machine, so that the sets differ in every word."""
    a = frozenset(range(0, n_cpus, 2))
    b = frozenset(range(n_cpus // 4, 3 * n_cpus // 4))
    if job == "is subset":
        a &= b
    elif job == "is disjoint":
        b = frozenset(range(1, n_cpus, 2))
    elif job == "equal":
        b = frozenset(list(a))
    answers: dict[str, Callable[[], object]] = {
        "union": lambda: a | b,
        "intersection": lambda: a & b,
        "difference": lambda: a - b,
        "count": lambda: len(a),
        "list": lambda: sorted(a),
        "make of numbers": lambda: a,
    }
    return Task(job=job, n_cpus=n_cpus, a=a, b=b, answer=answers.get(job, lambda: True)())


def parsing(kind: str, n_cpus: int) -> Task:
    text, _ = cases.choice(kind, n_cpus)
    cpus = frozenset(rivals.parse_set(text))
    return Task(job="parse", n_cpus=n_cpus, a=cpus, text=text, answer=cpus)


def formatting(kind: str, n_cpus: int) -> Task:
    text, _ = cases.choice(kind, n_cpus)
    return Task(job="format", n_cpus=n_cpus, a=frozenset(rivals.parse_set(text)), text=text, answer=text)


def checking(kind: str, n_cpus: int) -> Task:
    text, demands = cases.choice(kind, n_cpus)
    cpus = frozenset(rivals.parse_set(text))
    return Task(job="check", n_cpus=n_cpus, a=cpus, text=text, demands=demands, answer=cpus)


@dataclass(frozen=True, kw_only=True)
class PythonContender:
    """How each job is written in Python.

    Attributes
    ----------
    make
        Makes a set for the task's machine of CPU numbers.
    cpus
        Gives the CPU numbers of what a job made.
    pool
        Makes what has ``check(text, demands)`` of a task.
    statements
        What is timed, by job.
    names
        What the statements speak of, besides the task's inputs.
    """

    make: Callable[[frozenset[int], int], Any]
    cpus: Callable[[Any], Any]
    pool: Callable[[Task], Any]
    statements: Mapping[str, str]
    names: Mapping[str, object] = field(default_factory=dict)

    def start(self, task: Task) -> PythonLoop:
        names = {
            **self.names,
            "a": self.make(task.a, task.n_cpus),
            "b": self.make(task.b, task.n_cpus),
            "numbers": task.numbers,
            "cpu": task.cpu,
            "size": task.n_cpus,
            "text": task.text,
            "demands": task.demands,
            "check": self.pool(task).check,
            "buffer": ctypes.create_string_buffer(len(task.text) + 1),
        }
        return PythonLoop(self, self.statements.get(task.job, "check(text, demands)"), names)


class PythonLoop:
    """A statement, run as often as asked."""

    def __init__(self, contender: PythonContender, statement: str, names: dict[str, object]) -> None:
        self._contender = contender
        self._statement = statement
        self._names = names
        self._timer = timeit.Timer(statement, globals=names)

    def __call__(self, calls: int) -> float:
        return max(self._timer.timeit(calls) - calls * _empty_loop_s(), 0.0)

    def answer(self, kind: type) -> object:
        """Return the result of the statement: of type frozenset, list, str, bool or int."""
        value = eval(self._statement, self._names)
        if kind is not frozenset:
            return kind(value)
        # Some write into a bitmap that is there already, and return something else.
        made = self._names["result"] if isinstance(value, int | None) and "result" in self._names else value
        return frozenset(self._contender.cpus(made))


@cache
def _empty_loop_s() -> float:
    """Return what one turn of timeit's own loop takes."""
    return min(timeit.Timer("pass").repeat(20, 20_000)) / 20_000


_OPERATORS = {
    "union": "a | b",
    "intersection": "a & b",
    "difference": "a - b",
    "is subset": "a <= b",
    "is disjoint": "a.isdisjoint(b)",
    "equal": "a == b",
    "count": "len(a)",
    "contains": "cpu in a",
}


def _fastcpu() -> PythonContender:
    return PythonContender(
        make=lambda cpus, size: CpuSet(cpus),
        cpus=list,
        pool=lambda task: cases.pool(task.n_cpus),
        statements=_OPERATORS
        | {"list": "list(a)", "make of numbers": "CpuSet(numbers)", "parse": "parse(text)", "format": "str(a)"},
        names={"CpuSet": CpuSet, "parse": CpuSet.parse},
    )


def _sets() -> PythonContender:
    return PythonContender(
        make=lambda cpus, size: set(cpus),
        cpus=list,
        pool=lambda task: rivals.SetPool(task.online, task.reserved, task.groups),
        statements=_OPERATORS
        | {"list": "sorted(a)", "make of numbers": "set(numbers)", "parse": "parse(text)", "format": "write(a)"},
        names={"parse": rivals.parse_set, "write": rivals.format_set},
    )


def _ints() -> PythonContender:
    return PythonContender(
        make=lambda cpus, size: rivals.make_int(cpus),
        cpus=rivals.list_int,
        pool=lambda task: rivals.IntPool(task.online, task.reserved, task.groups),
        statements={
            "union": "a | b",
            "intersection": "a & b",
            "difference": "a & ~b",
            "is subset": "not a & ~b",
            "is disjoint": "not a & b",
            "equal": "a == b",
            "count": "a.bit_count()",
            "contains": "a >> cpu & 1",
            "list": "list_int(a)",
            "make of numbers": "make(numbers)",
            "parse": "parse(text)",
            "format": "write(a)",
        },
        names={
            "list_int": rivals.list_int,
            "make": rivals.make_int,
            "parse": rivals.parse_int,
            "write": rivals.format_int,
        },
    )


def _booleans() -> PythonContender:
    return PythonContender(
        make=rivals.make_booleans,
        cpus=lambda mask: np.flatnonzero(mask).tolist(),
        pool=lambda task: rivals.BooleanPool(task.online, task.reserved, task.groups),
        statements={
            "union": "a | b",
            "intersection": "a & b",
            "difference": "a & ~b",
            "is subset": "not (a & ~b).any()",
            "is disjoint": "not (a & b).any()",
            "equal": "array_equal(a, b)",
            "count": "count_nonzero(a)",
            "contains": "a[cpu]",
            "list": "flatnonzero(a).tolist()",
            "make of numbers": "make(numbers, size)",
            "parse": "parse(text, size)",
            "format": "write(a)",
        },
        names={
            "array_equal": np.array_equal,
            "count_nonzero": np.count_nonzero,
            "flatnonzero": np.flatnonzero,
            "make": rivals.make_booleans,
            "parse": rivals.parse_booleans,
            "write": rivals.format_booleans,
        },
    )


def _roaring() -> PythonContender:
    return PythonContender(
        make=lambda cpus, size: BitMap(cpus),
        cpus=list,
        pool=lambda task: rivals.RoaringPool(task.online, task.reserved, task.groups),
        statements=_OPERATORS
        | {"list": "list(a)", "make of numbers": "BitMap(numbers)", "parse": "parse(text)", "format": "write(a)"},
        names={"BitMap": BitMap, "parse": rivals.parse_roaring, "write": rivals.format_roaring},
    )


def _hwloc() -> PythonContender:
    names = {f"{name}_": function for name, function in hwloc.functions().items()}
    return PythonContender(
        make=lambda cpus, size: hwloc.Bitmap(cpus),
        cpus=lambda bitmap: bitmap.cpus(),
        pool=lambda task: hwloc.HwlocPool(task.online, task.reserved, task.groups),
        statements={
            "union": "or_(result, a, b)",
            "intersection": "and_(result, a, b)",
            "difference": "andnot_(result, a, b)",
            "is subset": "isincluded_(a, b)",
            "is disjoint": "not intersects_(a, b)",
            "equal": "isequal_(a, b)",
            "count": "weight_(a)",
            "contains": "isset_(a, cpu)",
            "list": "a.cpus()",
            "make of numbers": "fill(result, numbers)",
            "parse": "list_sscanf_(result, text.encode())",
            "format": "write(a, buffer)",
        },
        names={**names, "result": hwloc.Bitmap(), "fill": hwloc.fill, "write": hwloc.write},
    )


FASTCPU = "fastcpu"
_IN_PYTHON: dict[str, Callable[[], PythonContender]] = {
    FASTCPU: _fastcpu,
    "Python set": _sets,
    "Python int": _ints,
    "NumPy bool": _booleans,
    "pyroaring": _roaring,
    "hwloc by ctypes": _hwloc,
}
_NATIVE = {"hwloc in C": hwloc.Loop, "Go cpuset": golang.Loop}
NAMES = (*_IN_PYTHON, *_NATIVE)


def missing(contender: str) -> str:
    """Return why a contender cannot run on this machine; empty if it can."""
    needs = {
        "hwloc by ctypes": [hwloc.functions],
        "hwloc in C": [hwloc.functions, hwloc.loops],
        "Go cpuset": [golang.program],
    }
    return next((found for need in needs.get(contender, []) if isinstance(found := need(), str)), "")


def start(contender: str, task: Task) -> PythonLoop | hwloc.Loop | golang.Loop:
    """Return a contender's loop for a task, which has an ``answer`` once it was called."""
    if contender in _NATIVE:
        return _NATIVE[contender](task)
    return _IN_PYTHON[contender]().start(task)
