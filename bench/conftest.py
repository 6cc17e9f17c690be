# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: a place in the report's table for each, and a clock for calls of some nanoseconds."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

import contenders

# A round should be long against the clock's own cost, and a figure need not take longer than this together.
_ROUND_S = 0.0005
_TOGETHER_S = 0.05
_ROUNDS = range(5, 51)


class CallClock:
    """A clock that goes on by what one call took, whatever else happened.

    pytest-benchmark adds some hundred nanoseconds to each call that it makes, which is as much as some of the calls
    here. So calls are made and timed in loops of their own; pytest-benchmark reads each loop's result from this clock.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


_CLOCK = CallClock()


@pytest.fixture
def quiet():
    """Let nothing be logged, which costs more than some of what is measured."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def loop():
    """An event loop."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def pytest_collection_modifyitems(items):
    for item in items:
        if "race" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=_CLOCK))


@pytest.fixture
def entry(benchmark):
    """Give the benchmark its place in the table: ``entry(chapter, job, contender, n=…, of=…)``.

    A row of the table is one chapter, job and size, the contenders are its columns; ``unit`` says what the size counts.
    """

    def enter(chapter: str, job: str, contender: str, n: int | None = None, unit: str = "CPUs") -> Any:
        benchmark.group = f"{chapter}: {job}" if n is None else f"{chapter}: {job}, {n} {unit}"
        benchmark.name = contender
        benchmark.extra_info |= {"chapter": chapter, "job": job, "contender": contender, "n": n, "unit": unit}
        return benchmark

    return enter


@pytest.fixture
def race(entry, request):
    """Time a loop that tells itself how long its calls took: ``race(loop, chapter, job, contender, …)``."""
    together = min(float(request.config.getoption("benchmark_max_time")), _TOGETHER_S)

    def run(loop: Callable[[int], float], *place: Any, **size: Any) -> None:
        benchmark = entry(*place, **size)
        calls = 1
        # The quicker of two: an interruption must not make a round of few calls.
        while benchmark.enabled and min(loop(calls), loop(calls)) < min(_ROUND_S, together / 2) and calls < 10_000_000:
            calls *= 2

        def one_round() -> None:
            _CLOCK.now += loop(calls) / calls

        rounds = int(min(max(together / _ROUND_S, _ROUNDS.start), _ROUNDS.stop)) if calls > 1 else _ROUNDS.start
        gc.disable()
        try:
            benchmark.pedantic(one_round, rounds=rounds)
        finally:
            gc.enable()

    return run


@pytest.fixture
def compete(race):
    """Check a contender's answer to a task, and time it."""

    def run(contender, task, chapter, job):
        if reason := contenders.missing(contender):
            pytest.skip(reason)
        loop = contenders.start(contender, task)
        loop(1)
        assert loop.answer(type(task.answer)) == task.answer
        race(loop, chapter, job, contender, n=task.n_cpus)

    return run
