# SPDX-License-Identifier: Apache-2.0
"""Moves in the answers to events, for runtimes that must not be told anything outside of them."""

from __future__ import annotations

import pytest

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.errors import ClaimError
from driver.names import ClaimUID
from driver.nri.container import IDLE_S, WINDOW_S
from driver.nri.errors import Refusal
from driver.nri.moves import _MOST_RIDERS, _SLOW_S
from enforcement_model import Living, Model, cpus, run_container
from enforcement_walk import WALK, Walk
from records import make_record


@pytest.fixture(params=[True, False], ids=["cgroups", "no cgroups"])
def readable(request):
    return request.param


@pytest.fixture
def model(readable):
    model = Model(answers=True, readable=readable)
    yield model
    model.close()


@pytest.fixture
def seeing():
    """Return a model in which cgroups can be read."""
    model = Model(answers=True)
    yield model
    model.close()


def prepare(model: Model, uid: str, text: str) -> None:
    model.prepare(make_record(uid, text))
    assert uid in model.claims, model.errors


def create(model: Model, pod: str, *uids: str) -> Living:
    one = model.create(pod, *uids)
    assert one is not None
    return one


def why_not_created(model: Model, uid: str) -> str:
    message = nri.Container(id="x", name="x", pod_sandbox_id="q")
    message.env.append(f"DRA_CPUSET_{uid}={model.claims[uid].cpus}")
    message.CDI_devices.add(name=f"dra.k8s.io/cpu=claim-{uid}")
    model.reservations.learn_pod(ClaimUID(uid), "q")
    with pytest.raises(Refusal) as refusal:
        model.run(
            model.plugin.create_container(nri.PodSandbox(id="q", uid="q", name="q", namespace="default"), message)
        )
    return str(refusal.value)


def value(model: Model, name: str) -> float | None:
    return model.registry.get_sample_value(f"dra_cpu_nri_{name}")


def test_a_prepare_does_not_wait_for_containers_that_run_and_the_claims_container_moves_them(model):
    others = [run_container(model, f"p{number}") for number in range(20)]
    prepare(model, "a", "2-5")
    assert {one.kernel for one in others} == {"0-11"}
    owner = create(model, "q", "a")
    assert {one.kernel for one in others} == {"0-1,6-11"}
    model.post_create(owner)
    model.start(owner, told=True)
    model.post_start(owner)
    assert owner.kernel == "2-5"
    assert model.pushed == 0
    assert value(model, "unsolicited_updates") == 0
    assert value(model, "moved_containers_total") == 20
    assert value(model, "unread_moves_total") == (0 if model.readable else 20)


def test_what_is_created_after_a_prepare_keeps_off_the_claims_cpus(model):
    other = run_container(model, "p")
    prepare(model, "a", "2-5")
    assert create(model, "p").spec == "0-1,6-11"
    model.update(other, "0-11")
    model.post_update(other)
    assert other.kernel == "0-1,6-11"


@pytest.mark.parametrize("window", ["creating", "created", "launching", "starting", "updating", "found created"])
def test_prepare_and_creation_wait_for_a_window(model, window):
    if window == "updating":
        one = run_container(model, "p")
        model.update(one, "0-11")
    else:
        one = create(model, "p")
        if window != "creating":
            model.post_create(one)
        if window in ("launching", "starting"):
            model.start(one, told=window == "starting")
        if window == "found created":
            model.end_driver()
            model.start_driver()
    work = model.prepare(make_record("a", "2-5"))
    assert not work.task.done()
    # The claim's record is there already, as after the restart of a driver that had prepared it.
    model.claims["a"] = work.record
    with model.enforcement.barred(ClaimUID("b"), ""):
        why = why_not_created(model, "a")
    assert "is still being prepared" in why or f"container {one.message.id} of pod" in why
    del model.claims["a"]
    model.finish_windows()
    if one.phase == "created":
        assert not work.task.done()
        model.start(one, told=True)
        model.post_start(one)
    assert work.task.done()
    assert "a" in model.claims
    assert one.kernel == "0-11"


def test_a_creation_is_refused_while_another_container_is_in_a_window(seeing):
    one = create(seeing, "p")
    seeing.post_create(one)
    record = make_record("a", "2-5")
    seeing.ledger.hold(record)  # as restored at the driver's start
    seeing.claims["a"] = record
    assert why_not_created(seeing, "a") == (
        "container 'x': claim default/claim-a (a) has CPUs 2-5, but container c1 of pod default/p (which is created "
        "but not started) could not be moved away from them yet"
    )
    seeing.start(one, told=True)
    assert "which is being started" in why_not_created(seeing, "a")
    seeing.post_start(one)
    create(seeing, "q", "a")
    assert one.kernel == "0-1,6-11"


def test_a_prepare_names_the_container_that_stays_in_a_window_before_the_kubelet_gives_up(seeing):
    one = create(seeing, "p")
    seeing.post_create(one)
    seeing.start(one, told=True)
    work = seeing.prepare(make_record("a", "2-5"))
    seeing.pass_time(39.9)
    assert not work.task.done()
    seeing.pass_time(0.2)
    assert work.task.done()
    assert seeing.errors == [
        "CPUs 2-5 are not free of other containers: container c1 of pod default/p (which is being started) could not "
        "be moved away yet"
    ]


def test_a_start_that_has_failed_without_a_word_holds_a_prepare_up_but_does_not_fail_it(seeing):
    one = create(seeing, "p")
    seeing.post_create(one)
    work = seeing.prepare(make_record("a", "2-5"))
    seeing.pass_time(IDLE_S - 0.1)
    assert not work.task.done()
    seeing.pass_time(0.2)
    assert work.task.done()
    assert "a" in seeing.claims


def test_an_update_that_has_failed_without_a_word_is_not_believed(model):
    one = run_container(model, "p")
    prepare(model, "a", "2-5")
    model.update(one, "0-11")
    model.fail_update(one)
    model.pass_time(WINDOW_S + 0.1)
    owner = create(model, "q", "a")
    assert one.kernel == "0-1,6-11"
    model.post_create(owner)
    model.start(owner, told=True)
    assert owner.phase == "starting"


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "pushes"])
def test_an_update_of_a_container_that_may_be_starting_proves_nothing(answers, readable):
    model = Model(answers=answers, readable=readable)
    one = create(model, "p")
    model.post_create(one)
    work = model.prepare(make_record("a", "2-5"))
    while model.pushes:
        model.answer_push(model.pushes[0])
    model.update(one, "0-11")
    model.start(one, told=False)  # with what was stored before, and nobody knows
    model.post_update(one)
    while model.pushes:
        model.answer_push(model.pushes[0])
    assert not work.task.done()
    assert (one.kernel, one.spec) == ("0-11" if answers else "0-1,6-11", "0-1,6-11")
    model.close()


def test_what_was_told_in_an_answer_that_came_to_nothing_is_told_again(model):
    one = run_container(model, "p")
    prepare(model, "a", "2-5")
    assert model.create("q", "a", undone=True) is None
    assert one.kernel == "0-11"
    create(model, "q", "a")
    assert one.kernel == "0-1,6-11"


def test_a_start_is_refused_while_a_container_is_where_it_was(seeing):
    one = run_container(seeing, "p")
    prepare(seeing, "a", "2-5")
    one.broken = True
    owner = create(seeing, "q", "a")
    seeing.post_create(owner)
    seeing.start(owner, told=True)
    assert seeing.errors == [
        "container c2 of pod default/q cannot start on CPUs 2-5, which are those of its claims alone: container c1 of "
        "pod default/p (CPUs 0-11) could not be moved away from them; it is tried again when the container is"
    ]
    assert seeing.registry.get_sample_value("dra_cpu_nri_refused_containers_total", {"reason": "not_moved"}) == 1
    # A failed start may end a pod, so the next creation is refused instead, until it is worth another try.
    assert "(its cgroup still has CPUs 0-11) could not be moved away" in why_not_created(seeing, "a")
    assert value(seeing, "unmovable_containers") == 1
    one.broken = False
    seeing.pass_time(11)
    owner = create(seeing, "q", "a")
    seeing.post_create(owner)
    seeing.start(owner, told=True)
    assert owner.phase == "starting"
    assert one.kernel == "0-1,6-11"
    create(seeing, "r")
    assert value(seeing, "unmovable_containers") == 0


def test_where_cgroups_cannot_be_read_a_container_that_runs_counts_as_moved():
    model = Model(answers=True, readable=False)
    one = run_container(model, "p")
    prepare(model, "a", "2-5")
    one.broken = True
    owner = create(model, "q", "a")
    model.post_create(owner)
    model.start(owner, told=True)
    assert owner.phase == "starting"
    assert value(model, "unread_moves_total") == 1
    model.close()


def test_a_container_that_is_started_late_is_not_started_on_cpus_that_were_taken_meanwhile(model):
    late = create(model, "p")
    model.post_create(late)
    model.pass_time(IDLE_S + 0.1)
    model.start(late, told=False)  # with what is stored now, and nobody knows
    prepare(model, "a", "2-5")
    owner = create(model, "q", "a")
    assert late.spec == "0-1,6-11"
    assert late.kernel == "0-11"
    model.post_create(owner)
    model.start(owner, told=True)
    if model.readable:
        assert owner.phase == "launching"
        assert "container c1 of pod default/p (CPUs 0-11) could not be moved away" in model.errors[0]
    else:
        assert not model.tell_start(late)
        assert "would run on CPUs 2-5 of claim a" in model.errors[0]


def test_a_container_gets_cpus_back_with_the_answers_that_come(model):
    others = [run_container(model, f"p{number}") for number in range(2 * _MOST_RIDERS)]
    prepare(model, "a", "2-5")
    owner = create(model, "q", "a")
    model.post_create(owner)
    model.stop(owner)
    model.unprepare(model.claims["a"])
    assert {one.kernel for one in others} == {"0-1,6-11"}
    model.post_create(create(model, "r"))
    assert sorted(one.kernel for one in others) == ["0-1,6-11"] * _MOST_RIDERS + ["0-11"] * _MOST_RIDERS
    model.update(others[0], "")
    model.post_update(others[0])
    assert {one.kernel for one in others} == {"0-11"}


def test_nothing_rides_on_the_answer_to_the_end_of_a_container(model):
    one = run_container(model, "p")
    prepare(model, "a", "2-5")
    owner = create(model, "q", "a")
    model.post_create(owner)
    model.start(owner, told=True)
    model.post_start(owner)
    other = run_container(model, "r")
    model.stop(owner)
    model.unprepare(model.claims["a"])
    assert model.run(model.plugin.stop_container(model.pod(other), other.message)) == ()
    assert one.kernel == "0-1,6-11"


def test_what_holds_the_runtime_up_is_left_alone_for_a_while(seeing):
    one = run_container(seeing, "p")
    prepare(seeing, "a", "2-5")
    owner = create(seeing, "q", "a")
    seeing.post_create(owner)
    seeing.stop(owner)
    seeing.unprepare(seeing.claims["a"])
    one.broken = True  # its shim hangs, until the kubelet gives up
    other = create(seeing, "r")
    seeing.pass_time(_SLOW_S + 0.1)
    seeing.post_create(other)
    moved = value(seeing, "moved_containers_total")
    create(seeing, "s")
    assert value(seeing, "moved_containers_total") == moved
    one.broken = False
    seeing.pass_time(301)
    create(seeing, "t")
    assert one.kernel == "0-11"


def test_a_container_that_the_kernel_holds_to_other_cpus_than_the_runtime_says_is_put_right(seeing):
    one = run_container(seeing, "p")
    prepare(seeing, "a", "2-5")
    seeing.end_driver()
    one.spec = "0-1,6-11"  # an update that has failed half way
    seeing.start_driver()
    assert one.kernel == "0-11"
    create(seeing, "r")
    assert one.kernel == "0-1,6-11"


def test_more_containers_than_an_answer_can_carry_refuse_the_creation(seeing, monkeypatch):
    for number in range(3):
        run_container(seeing, f"p{number}")
    prepare(seeing, "a", "2-5")
    monkeypatch.setattr("driver.nri.moves._MOST_UPDATE_BYTES", 40)
    assert "3 containers have to be moved away" in why_not_created(seeing, "a")


def test_a_claim_that_leaves_the_others_no_cpu_is_not_admitted(model):
    run_container(model, "p")
    with pytest.raises(ClaimError, match="would leave no CPU"):
        model.enforcement.admit(cpus("0-11"))


class Moved(Walk):
    """Containers are moved in answers, and what came of that is read from their cgroups."""

    answers = True


class MovedUnread(Moved):
    """The host's cgroups cannot be read: what was tried counts as done."""

    readable = False


TestMoved = Moved.TestCase
TestMoved.settings = WALK
TestMovedUnread = MovedUnread.TestCase
TestMovedUnread.settings = WALK
