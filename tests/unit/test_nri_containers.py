# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from driver.names import ClaimUID
from driver.nri.container import IDLE_S, TOLD_S, WINDOW_S, Container, Phase, Pod
from driver.nri.containers import Containers
from fastcpu import CpuSet

POD = Pod(uid="uid-p", sandbox="s", namespace="default", name="p")


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def created(given: str = "0-7", now: float = 0.0) -> Container:
    return Container.created("c", "main", POD, frozenset(), CpuSet(), cpus(given), now)


def running(given: str = "0-7", now: float = 0.0) -> Container:
    container = created(given, now)
    container.post_created(now)
    container.started(now)
    return container


def push(container: Container, to: str, at: float, *, answered: float | None = None) -> None:
    """Push, undisturbed."""
    container.pushing(cpus(to))
    container.pushed(cpus(to), at, container.events, at if answered is None else answered)


def due(container: Container, wanted: str, now: float) -> float | None:
    return container.push_due(cpus(wanted), now)


def test_a_container_that_went_through_undisturbed_has_what_it_was_given():
    container = created()
    assert (container.phase, str(container.may_have)) == (Phase.CREATING, "0-7")
    container.post_created(0.1)
    assert container.phase is Phase.CREATED
    container.starting(0.2)
    assert container.phase is Phase.STARTING
    container.started(0.3)
    assert (container.phase, str(container.may_have)) == (Phase.RUNNING, "0-7")
    assert due(container, "0-7", 0.4) is None
    assert str(container) == "container main of pod default/p"


# The first window: it is not known to the runtime yet


def test_while_it_is_created_nothing_is_pushed_and_then_at_once():
    container = created(now=1.0)
    assert due(container, "0-3", 1.1) == 1.0 + TOLD_S
    container.post_created(1.2)
    assert due(container, "0-3", 1.3) == 1.3
    assert str(container.may_have) == "0-7"


def test_a_creation_that_lasts_for_ever_does_not_hold_up_for_ever_but_is_not_forgotten():
    container = created(now=0.0)
    push(container, "0-3", WINDOW_S)
    assert str(container.may_have) == "0-7"
    push(container, "0-3", TOLD_S)
    assert str(container.may_have) == "0-3"
    assert due(container, "0-3", TOLD_S + 1) is None
    container.post_created(TOLD_S + 2)  # now it is known, with what was answered
    assert str(container.may_have) == "0-7"
    assert due(container, "0-3", TOLD_S + 3) == TOLD_S + 3


# Between creation and start nobody knows whether the start has begun


def test_a_push_to_a_created_container_is_believed_after_a_while():
    container = created()
    container.post_created(0.1)
    push(container, "0-3", 1.0, answered=1.1)
    assert str(container.may_have) == "0-7"
    assert due(container, "0-3", 1.2) == 1.1 + WINDOW_S
    push(container, "0-3", 1.0 + WINDOW_S, answered=1.01 + WINDOW_S)  # too early
    assert str(container.may_have) == "0-7"
    push(container, "0-3", 1.2 + WINDOW_S)
    assert str(container.may_have) == "0-3"
    assert due(container, "0-3", 1.3 + WINDOW_S) is None


def test_each_push_to_a_created_container_is_believed_by_itself():
    container = created()
    container.post_created(0.0)
    push(container, "0-3", 1.0)
    push(container, "0-1", 4.0)
    push(container, "0-1", 1.5 + WINDOW_S)
    assert str(container.may_have) == "0-3"
    assert due(container, "0-1", 1.6 + WINDOW_S) == 4.0 + WINDOW_S
    push(container, "0-1", 4.5 + WINDOW_S)
    assert str(container.may_have) == "0-1"


@pytest.mark.parametrize("told", [True, False])
def test_a_push_that_came_while_it_started_is_repeated_once_it_runs(told):
    container = created()
    container.post_created(0.1)
    push(container, "0-3", 1.0)
    if told:
        container.starting(1.1)
        assert due(container, "0-3", 1.2) == 1.1 + TOLD_S
    container.started(1.3)
    assert str(container.may_have) == "0-7"
    assert due(container, "0-3", 1.4) == 1.4
    push(container, "0-3", 1.4)
    assert str(container.may_have) == "0-3"
    assert due(container, "0-3", 1.5) is None


def test_a_start_that_took_very_long_is_made_good_when_it_is_known():
    container = created()
    container.post_created(0.1)
    push(container, "0-3", 1.0)
    push(container, "0-3", 2.0 + WINDOW_S)
    assert str(container.may_have) == "0-3"
    container.started(3.0 + WINDOW_S)
    assert str(container.may_have) == "0-7"
    assert due(container, "0-3", 3.0 + WINDOW_S) == 3.0 + WINDOW_S


def test_one_that_is_not_started_for_long_is_not_about_to_be():
    container = created()
    container.post_created(1.0)
    push(container, "0-3", 1.0 + IDLE_S - 0.1)
    assert str(container.may_have) == "0-7"
    push(container, "0-3", 1.0 + IDLE_S)
    assert str(container.may_have) == "0-3"
    push(container, "0-1", 50.0)
    assert str(container.may_have) == "0-1"
    container.started(60.0)  # it was, after all
    assert str(container.may_have) == "0-7"
    assert due(container, "0-1", 60.0) == 60.0


# The second window: it is being started


def test_a_push_that_a_start_crosses_proves_nothing():
    container = created()
    container.post_created(0.1)
    events = container.events
    container.started(1.1)
    container.pushed(cpus("0-3"), 1.0, events, 1.2)
    assert str(container.may_have) == "0-7"
    assert due(container, "0-3", 1.3) == 1.3


def test_a_start_that_never_ends_does_not_hold_up_for_ever_but_is_not_forgotten():
    container = created()
    container.post_created(0.1)
    container.starting(1.0)
    assert due(container, "0-3", 2.0) == 1.0 + TOLD_S
    push(container, "0-3", 1.0 + WINDOW_S)
    assert str(container.may_have) == "0-7"
    push(container, "0-3", 1.0 + TOLD_S)
    assert str(container.may_have) == "0-3"
    container.started(3.0 + TOLD_S)
    assert str(container.may_have) == "0-7"
    assert due(container, "0-3", 4.0 + TOLD_S) == 4.0 + TOLD_S


# The third window: an update is being carried out


def test_an_update_that_changes_nothing_needs_no_push():
    container = running()
    container.updating(cpus("0-7"), 1.0)
    container.updated(1.1)
    assert due(container, "0-7", 1.2) is None


def test_while_it_is_updated_nothing_is_pushed_and_then_at_once():
    container = running()
    container.updating(cpus("0-3"), 1.0)
    assert str(container.may_have) == "0-7"
    assert due(container, "0-1", 1.1) == 1.0 + WINDOW_S
    container.updated(1.2)
    assert due(container, "0-1", 1.3) == 1.3
    assert due(container, "0-3", 1.3) == 1.3  # what it had before may still be
    push(container, "0-3", 1.3)
    assert str(container.may_have) == "0-3"


def test_a_push_that_an_update_crosses_proves_nothing():
    container = running()
    events = container.events
    container.updating(cpus("0-7"), 1.1)
    container.pushed(cpus("0-3"), 1.0, events, 1.2)
    assert str(container.may_have) == "0-7"
    container.updated(1.3)
    assert str(container.may_have) == "0-7"
    assert due(container, "0-3", 1.4) == 1.4


def test_an_update_that_never_ends_does_not_hold_up_for_ever_but_is_not_forgotten():
    container = running()
    container.updating(cpus("0-7"), 1.0)
    push(container, "0-3", 1.0 + WINDOW_S)
    assert str(container.may_have) == "0-3"
    container.updated(4.0 + WINDOW_S)
    assert str(container.may_have) == "0-7"
    assert due(container, "0-3", 5.0 + WINDOW_S) == 5.0 + WINDOW_S


def test_an_update_before_the_start_is_what_it_may_start_with():
    container = created()
    container.post_created(0.1)
    container.updating(cpus("0-3"), 0.2)
    container.updated(0.3)
    push(container, "0-1", 5.5)
    container.started(5.6)
    assert str(container.may_have) == "0-7"


# Failures


def test_a_failed_push_may_have_worked_and_is_repeated_ever_more_seldom():
    container = running()
    waits = []
    now = 10.0
    for _ in range(9):
        container.pushing(cpus("4-9"))
        container.push_failed("no such cgroup", now, retry_s=0.5, settled=False)
        assert str(container.may_have) == "0-9"
        at = due(container, "4-9", now)
        waits.append(at - now)
        now = at
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert container.fault == "no such cgroup"
    container.retry_soon(now)
    assert due(container, "4-9", now) == now
    push(container, "4-9", now)
    assert (str(container.may_have), container.fault) == ("4-9", "")
    container.push_failed("again", now, retry_s=0.5, settled=True)
    assert due(container, "4", now) == now + 0.5


def test_a_push_that_surely_failed_has_changed_nothing():
    container = running("0-3")
    container.pushing(cpus("0-7"))
    assert str(container.may_have) == "0-7"
    container.push_failed("no such cgroup", 1.0, retry_s=0.5, settled=True)
    assert str(container.may_have) == "0-3"
    assert due(container, "0-7", 1.0) == 1.5


def test_a_container_may_have_what_is_on_the_way_to_it():
    container = running("0-3")
    container.pushing(cpus("0-7"))
    assert str(container.may_have) == "0-7"
    assert due(container, "0-3", 1.0) == 1.0
    push(container, "0-1", 1.0)
    assert str(container.may_have) == "0-1"


def test_after_many_different_failures_not_all_of_them_are_kept():
    container = running("0")
    for cpu in range(1, 200):
        container.pushing(CpuSet([cpu]))
        container.push_failed("no", 1.0, retry_s=0.5, settled=False)
    assert str(container.may_have) == "0-199"
    assert len(container._doubts) < 20


def test_one_that_is_new_to_the_driver_may_have_anything_until_it_was_pushed_to():
    container = Container.found("c", "main", POD, frozenset(), CpuSet(), cpus("0-3"), Phase.RUNNING, 0.0)
    assert due(container, "0-3", 1.0) == 1.0
    container.synchronized(cpus("0-1"), 1.0)
    assert str(container.may_have) == "0-3"
    push(container, "0-1", 1.1)
    assert container.verified
    assert str(container.may_have) == "0-1"


# The table


def test_the_table_knows_who_uses_a_claim_and_how_many_share():
    table = Containers()
    uid, other = ClaimUID("a"), ClaimUID("b")
    for name, claims in (("1", {uid}), ("2", {uid, other}), ("3", set())):
        table.add(
            Container(id=name, name=name, pod=POD, claims=frozenset(claims), phase=Phase.RUNNING, given=cpus("1"))
        )
    assert [container.id for container in table.users(uid)] == ["1", "2"]
    assert (len(table), table.shared) == (3, 1)
    assert table.remove("1").id == "1"
    assert table.remove("1") is None
    assert [container.id for container in table.users(uid)] == ["2"]
    table.add(Container(id="2", name="2", pod=POD, phase=Phase.RUNNING, given=cpus("1")))
    assert table.users(uid) == table.users(other) == ()
    assert (len(table), table.shared) == (2, 2)
    table.replace_all([])
    assert (len(table), table.shared, list(table)) == (0, 0, [])
    assert table.get("2") is None
