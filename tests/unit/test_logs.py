# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import logging
import re
import shlex
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver import logs
from driver.logs import fields, one_line, operation
from fastcpu import CpuSet

LOG = logging.getLogger("driver.some_module")
HOSTILE = "ns/x\ntime=2026-01-01T00:00:00.000Z level=INFO msg=forged\r\x1b[31m\x7f\x9b\u2028\u202e\ud800"


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    loggers = [logger for logger in logging.Logger.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    levels = [(logger, logger.level) for logger in [logging.getLogger("driver"), *loggers]]
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.name.startswith("driver"):
            logger.setLevel(logging.NOTSET)
    for logger, previous in levels:
        logger.setLevel(previous)


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    return lambda: capsys.readouterr().err.splitlines()


def pairs(line: str) -> dict[str, str]:
    """Read a text line as any logfmt reader does: shell words for the quoting."""
    return dict(word.split("=", 1) for word in shlex.split(line))


def test_a_text_line_has_time_level_logger_message_and_fields_in_order(written: Callable[[], list[str]]) -> None:
    logs.configure("text", 0, "")
    LOG.info("claim %s prepared", "a", extra=fields(claim="ns/a", cpus=CpuSet.parse("2-5"), again=False, count=2))
    [line] = written()
    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=INFO logger=driver\.some_module "
        r'msg="claim a prepared" claim=ns/a cpus=2-5 again=false count=2',
        line,
    )


def test_a_json_line_keeps_numbers_and_booleans(written: Callable[[], list[str]]) -> None:
    logs.configure("json", 0, "")
    LOG.warning("slow", extra=fields(cpus=CpuSet([1]), seconds=1.5, odd=float("inf"), late=True, count=3))
    [line] = written()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "WARNING",
        "logger": "driver.some_module",
        "msg": "slow",
        "cpus": "1",
        "seconds": 1.5,
        "odd": "inf",
        "late": True,
        "count": 3,
    }


def test_the_time_is_utc_with_milliseconds(written: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    logs.configure("text", 0, "")
    record = logging.LogRecord("driver.x", logging.INFO, __file__, 1, "m", (), None)
    record.created, record.msecs = 1_795_000_000.0, 7.9
    logging.getLogger().handle(record)
    assert written()[0].startswith("time=2026-11-18T11:06:40.007Z ")
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("place", ["message", "field", "operation", "error"])
def test_hostile_text_cannot_forge_a_line(style: str, place: str, written: Callable[[], list[str]]) -> None:
    logs.configure(style, 0, "")
    match place:
        case "message":
            LOG.info("claim %s", HOSTILE)
        case "field":
            LOG.info("claim", extra=fields(claim=HOSTILE))
        case "operation":
            with operation("prepare", claim=HOSTILE):
                LOG.info("claim")
        case _:
            try:
                raise ValueError(HOSTILE)
            except ValueError:
                LOG.exception("claim")
    [line] = written()
    assert line.isprintable()
    assert line.isascii()
    assert "ns/x\\ntime=" in line


@given(st.text())
def test_any_text_survives_one_text_line(text: str) -> None:
    line = logs._TextFormatter().format(logging.makeLogRecord({"name": "driver.x", "msg": "m", **fields(value=text)}))
    assert line.isprintable()
    value = line.partition(" value=")[2]
    assert (json.loads(value) if value.startswith('"') else value) == text


def test_quotes_are_where_they_are_needed(written: Callable[[], list[str]]) -> None:
    logs.configure("text", 0, "")
    LOG.info(
        "m", extra=fields(empty="", space="a b", quote='a"b', equals="a=b", slash="a\\b", accent="é", plain="a/b:c,d")
    )
    assert written()[0].endswith(
        'msg=m empty="" space="a b" quote="a\\"b" equals="a=b" slash="a\\\\b" accent="é" plain=a/b:c,d'
    )


def test_none_is_left_out(written: Callable[[], list[str]]) -> None:
    for style in ("text", "json"):
        logs.configure(style, 0, "")
        LOG.info("m", extra=fields(share_id=None))
        assert "share_id" not in written()[0]


def test_a_long_value_is_cut_and_says_so(written: Callable[[], list[str]]) -> None:
    logs.configure("text", 0, "")
    LOG.info("m", extra=fields(cpuset="1," * 200_000))
    [line] = written()
    assert len(line) < 5000
    assert "(400000 characters)" in line


def test_an_exception_is_one_line_with_its_trace(written: Callable[[], list[str]]) -> None:
    logs.configure("text", 0, "")
    try:
        raise RuntimeError("no luck")
    except RuntimeError:
        LOG.exception("internal error")
    [line] = written()
    assert " level=ERROR " in line
    assert 'error="RuntimeError: no luck"' in line
    assert "test_logs.py" in line


def test_an_operation_marks_every_line_in_it(written: Callable[[], list[str]]) -> None:
    logs.configure("text", 0, "")
    with operation("prepare", claims=2) as identity:
        LOG.info("one")
        with operation("prepare one", claim="ns/a") as inner:
            LOG.info("two", extra=fields(claims=1))
    LOG.info("three")
    one, two, three = map(pairs, written())
    assert re.fullmatch("[0-9a-f]{8}", identity)
    assert inner == identity
    assert (one["op"], one["operation"], one["claims"]) == (identity, "prepare", "2")
    assert (two["op"], two["operation"], two["claims"], two["claim"]) == (identity, "prepare one", "1", "ns/a")
    assert "op" not in three


def test_operations_have_different_ids() -> None:
    with operation("a") as first:
        pass
    with operation("a") as second:
        pass
    assert first != second


async def test_tasks_and_threads_keep_the_operation_they_were_started_in(written: Callable[[], list[str]]) -> None:
    logs.configure("text", 0, "")
    both_in = asyncio.Barrier(2)

    async def work(name: str) -> str:
        with operation(name) as identity:
            await both_in.wait()
            await asyncio.to_thread(LOG.info, name)
            await asyncio.create_task(asyncio.sleep(0))
            LOG.info(name)
        return identity

    first, second = await asyncio.gather(work("first"), work("second"))
    assert first != second
    lines = list(map(pairs, written()))
    assert sorted((line["msg"], line["op"]) for line in lines) == sorted(
        [("first", first)] * 2 + [("second", second)] * 2
    )


@pytest.mark.parametrize(
    ("verbosity", "vmodule", "module", "level"),
    [
        (0, "", "driver.prepare", logging.INFO),
        (3, "", "driver.prepare", logging.INFO),
        (-1, "", "driver.prepare", logging.INFO),
        (4, "", "driver.prepare", logging.DEBUG),
        (10, "", "driver.prepare", logging.DEBUG),
        (0, "logs=4", "driver.logs", logging.DEBUG),
        (0, "logs=4", "driver.ledger", logging.INFO),
        (0, "driver.logs=4", "driver.logs", logging.DEBUG),
        (0, "lo*=4", "driver.logs", logging.DEBUG),
        (4, "logs=0", "driver.logs", logging.INFO),
        (0, "other=9,logs=5", "driver.logs", logging.DEBUG),
        (0, "api*=4", "driver.sandbox.apiserver", logging.DEBUG),
        (9, "*=9", "asyncio", logging.WARNING),
    ],
)
def test_verbosity_becomes_levels(verbosity: int, vmodule: str, module: str, level: int) -> None:
    logs.configure("text", verbosity, vmodule)
    assert logging.getLogger(module).getEffectiveLevel() == level


@pytest.mark.parametrize("text", ["prepare", "=4", "prepare=", "prepare=x", "prepare=-1", "prepare=²", "a=1,b"])
def test_a_wrong_vmodule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^" + re.escape(text.split(",")[-1])):
        logs.parse_vmodule(text)


def test_configuring_again_replaces_the_form(written: Callable[[], list[str]]) -> None:
    logs.configure("text", 0, "")
    logs.configure("json", 0, "")
    LOG.info("m")
    [line] = written()
    assert json.loads(line)["msg"] == "m"


def test_a_line_that_is_not_wanted_is_never_formatted(written: Callable[[], list[str]]) -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    logs.configure("text", 0, "")
    LOG.debug("m %s", Costly(), extra=fields(value=Costly()))
    assert written() == []


@given(st.text())
def test_one_line_has_nothing_that_a_terminal_obeys(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert (line == text) is text.isprintable()


def test_one_line_keeps_what_can_be_read() -> None:
    assert one_line("clé\n\x1b[0m \ud800") == "clé\\n\\x1b[0m \\ud800"
