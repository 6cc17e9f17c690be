# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import pytest

from driver.health import Health


@pytest.fixture
def health() -> Health:
    return Health()


def test_nothing_is_ready_before_it_has_started(health):
    assert not health.started
    assert not health.ready
    assert health.missing() == {}


def test_ready_when_started_and_every_condition_holds(health):
    health.require("started")
    health.require("slices", "no slice has been published")
    assert health.missing() == {"started": "not reported yet", "slices": "no slice has been published"}
    health.set_ok("slices")
    assert not health.started
    assert not health.ready
    health.set_ok("started")
    assert health.started
    assert health.ready
    assert health.missing() == {}


def test_a_condition_may_be_lost_and_come_back(health):
    health.set_ok("started")
    health.set_ok("registered")
    health.set_missing("registered", "the kubelet went away")
    assert health.started
    assert not health.ready
    assert health.missing() == {"registered": "the kubelet went away"}
    assert health.conditions() == {"started": True, "registered": False}
    health.set_ok("registered")
    assert health.ready


def test_declaring_again_changes_nothing(health):
    health.set_ok("started")
    health.require("started")
    assert health.started
    health.set_missing("slices", "HTTP 500")
    health.require("slices")
    assert health.missing() == {"slices": "HTTP 500"}


def test_a_reason_is_one_line_and_never_empty(health):
    health.set_missing("slices", "two\nlines\r\n\tand more")
    health.set_missing("runtime", " \n")
    assert health.missing() == {"slices": "two lines and more", "runtime": "no reason given"}


def test_what_is_returned_is_a_copy(health):
    health.set_missing("slices", "none")
    health.missing().clear()
    health.conditions().clear()
    assert health.missing() == {"slices": "none"}
    assert health.conditions() == {"slices": False}


def test_each_change_is_logged_once_and_a_loss_is_a_warning(health, caplog):
    caplog.set_level(logging.INFO, logger="driver.health")

    def logged() -> list[tuple[str, str]]:
        events = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return events

    health.set_missing("started", "the sockets are not open")
    health.set_missing("started", "the sockets are not open")
    assert logged() == [("INFO", "condition does not hold yet")]
    health.set_ok("started")
    health.set_ok("started")
    assert logged() == [("INFO", "condition holds"), ("INFO", "ready")]
    health.set_missing("started", "a socket is gone")
    assert logged() == [("WARNING", "condition does not hold any more"), ("WARNING", "not ready any more")]


def test_a_remark_changes_nothing_about_being_ready_and_is_logged_at_each_change(health, caplog):
    caplog.set_level(logging.INFO, logger="driver.health")
    health.set_ok("started")
    caplog.clear()
    for text in ("", "two\nlines", "two lines", "another", "another", "", ""):
        health.remark("kubepods", text)
        assert health.ready
        assert health.remarks() == ({"kubepods": " ".join(text.split())} if text else {})
    assert [(record.levelname, record.fields.get("reason")) for record in caplog.records] == [
        ("WARNING", "two lines"),
        ("WARNING", "another"),
        ("INFO", None),
    ]
    assert health.missing() == {}
    assert health.conditions() == {"started": True}
