# SPDX-License-Identifier: Apache-2.0
"""The shared pool, what is pushed, and both against a model of the runtime's windows."""

from __future__ import annotations

import pytest

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.errors import ClaimError
from driver.names import ClaimUID
from driver.nri.container import WINDOW_S
from driver.nri.errors import Refusal
from driver.nri.sharedpool import SET_ASIDE_S, SharedPool
from enforcement_model import CPUS, Model, cpus, make_ledger, prepared, run_container
from enforcement_walk import WALK, Walk
from fastcpu import CpuSet
from records import make_record

# The pool


@pytest.mark.parametrize(
    ("reserved", "isolated", "held", "expected"),
    [
        ("", "", "", "0-11"),
        ("0-1", "", "4-5", "2-3,6-11"),
        ("0-1", "8-11", "4-5", "2-3,6-7"),
        ("0-1", "2-11", "4-5", "2-3,6-11"),  # else nothing would ever be left
        ("0-1", "2-10", "11", ""),  # but what is left may all be held
        ("0-11", "", "", ""),
        ("", "", "0-11", ""),
    ],
)
def test_the_pool_is_what_is_neither_reserved_nor_held_nor_isolated(reserved, isolated, held, expected):
    ledger = make_ledger(reserved=reserved)
    pool = SharedPool(ledger, cpus(isolated))
    if held:
        ledger.hold(make_record("a", held))
    assert str(pool.cpus) == str(pool.current(0.0)) == expected
    assert pool.leaves_alone == (reserved == "0-11")


def test_with_no_managed_cpus_but_claims_nothing_is_left_alone():
    ledger = make_ledger(reserved="0-11")
    pool = SharedPool(ledger, CpuSet())
    ledger.hold_anyway(make_record("a", "4"))
    assert not pool.leaves_alone


def test_what_was_set_aside_stays_free_for_a_while_but_never_leaves_the_pool_empty():
    ledger = make_ledger()
    pool = SharedPool(ledger, CpuSet())
    pool.set_aside(ClaimUID("a"), cpus("2-5"), 10.0)
    assert str(pool.current(11.0)) == "0-1,6-11"
    assert str(pool.cpus) == "0-11"
    assert pool.aside_until == 10.0 + SET_ASIDE_S
    ledger.hold(make_record("b", "0-1,6-11"))
    assert str(pool.current(11.0)) == "2-5"
    ledger.release(ClaimUID("b"))
    assert str(pool.current(10.0 + SET_ASIDE_S)) == "0-11"
    assert pool.aside_until is None
    pool.set_aside(ClaimUID("a"), cpus("2-5"), 10.0)
    pool.take_back(ClaimUID("a"))
    assert str(pool.current(11.0)) == "0-11"


def test_cpus_that_went_offline_are_in_no_pool():
    ledger = make_ledger()
    pool = SharedPool(ledger, CpuSet())
    ledger.pool.set_offline(cpus("3"))
    assert str(pool.cpus) == "0-2,4-11"


@pytest.fixture
def model():
    model = Model()
    yield model
    model.close()


def test_a_prepare_ends_when_the_push_was_answered_and_not_before(model):
    one = run_container(model, "p")
    work = model.prepare(make_record("a", "2-5"))
    (push,) = model.pushes
    assert push.updates == [(one.message.id, "0-1,6-11")]
    model.apply_push(push)
    model.turn()
    assert not work.task.done()
    model.answer_push(push)
    assert work.task.done()
    assert "a" in model.claims


@pytest.mark.parametrize(("told_s", "alone_s"), [(0.5, 2.0), (2.0, 2.0), (10.0, 10.0)])
def test_a_runtime_that_was_told_to_be_patient_is_waited_for(model, told_s, alone_s):
    model.plugin.connected("containerd", "v2.4.2", "v0.12.3", told_s)
    model.plugin.synchronized()
    run_container(model, "p")
    model.prepare(make_record("a", "2"))
    (push,) = model.pushes
    assert push.timeout_s == alone_s
    model.answer_push(push)
    run_container(model, "q")
    model.prepare(make_record("b", "3"))
    (push,) = model.pushes
    assert (len(push.updates), push.timeout_s) == (2, 2 * alone_s)


@pytest.mark.parametrize("window", ["creating", "starting", "updating"])
def test_a_prepare_waits_for_a_window_and_the_push_after_it(model, window):
    if window == "creating":
        one = model.create("p")
    else:
        one = run_container(model, "p")
        if window == "updating":
            model.update(one, "0-3")
        else:
            one = model.create("p")
            model.post_create(one)
            model.start(one, told=True)
    work = model.prepare(make_record("a", "2-5"))
    while model.pushes:
        model.answer_push(model.pushes[0])
    assert not work.task.done()
    model.finish_windows()
    assert not work.task.done()
    while model.pushes:
        model.answer_push(model.pushes[0])
    if window == "creating":  # it is created, and may be about to start
        assert not work.task.done()
        model.start(one, told=True)
        model.finish_windows()
        model.answer_push(model.pushes[0])
    assert work.task.done()
    assert "a" in model.claims
    assert one.spec == "0-1,6-11"


def test_a_window_that_nobody_closes_holds_a_prepare_up_for_a_while(model):
    one = run_container(model, "p")
    model.update(one, "0-3")
    work = model.prepare(make_record("a", "2-5"))
    model.pass_time(WINDOW_S - 0.01)
    assert model.pushes == []
    model.pass_time(0.02)
    model.answer_push(model.pushes[0])
    assert work.task.done()
    assert "a" in model.claims


def test_a_container_that_cannot_be_moved_fails_the_claims_that_need_its_cpus_and_no_other(model):
    stuck = run_container(model, "p")
    prepared(model, "a", "8-11")
    others = [run_container(model, f"q{number}") for number in range(5)]
    model.ledger.hold(make_record("blocker", "0-1"))  # so that the new ones have less
    model.enforcement.notify()
    model.settle()
    stuck.broken = True
    work = model.prepare(make_record("b", "4-5"))
    for _ in range(60):
        if model.pushes:
            model.answer_push(model.pushes[0])
        else:
            model.pass_time(0.25)
    assert work.task.done()
    assert "b" not in model.claims
    assert model.errors == [
        "CPUs 4-5 are not free of other containers: container c1 of pod default/p (an update failed) could not be "
        "moved away yet"
    ]
    assert model.registry.get_sample_value("dra_cpu_nri_unmovable_containers") == 1
    # What was moved away stays away for the retry, and comes back if there is none.
    assert {one.kernel for one in others} == {"2-3,6-7"}
    model.pass_time(SET_ASIDE_S)
    model.settle()
    assert {one.kernel for one in others} == {"2-7"}
    stuck.broken = False
    model.pass_time(61)
    model.settle()
    assert stuck.kernel == "2-7"
    assert model.registry.get_sample_value("dra_cpu_nri_unmovable_containers") == 0


def test_a_claim_elsewhere_does_not_mind_a_container_that_cannot_be_moved(model):
    prepared(model, "a", "8-11")
    stuck = run_container(model, "p")
    model.unprepare(model.claims["a"])
    stuck.broken = True
    model.settle()
    assert stuck.kernel == "0-7"
    prepared(model, "b", "8-9")


def test_a_retry_finds_what_was_moved_away_and_does_not_wait_for_the_back_off(model):
    stuck = run_container(model, "p")
    stuck.broken = True
    for _ in range(2):
        model.prepare(make_record("a", "4-5"))
        model.settle()
    stuck.broken = False
    work = model.prepare(make_record("a", "4-5"))
    model.pass_time(1.0)
    model.answer_push(model.pushes[0])
    assert work.task.done()
    assert "a" in model.claims


def test_cpus_that_are_on_their_way_back_to_others_are_not_confirmed_to_a_claim(model):
    one = run_container(model, "p")
    model.unprepare(prepared(model, "a", "2-5"))
    model.pass_time(0.3)
    (push,) = model.pushes
    model.apply_push(push)  # and not answered yet
    assert one.kernel == "0-11"
    work = model.prepare(make_record("b", "2-5"))
    assert not work.task.done()
    model.answer_push(push)
    assert not work.task.done()
    model.answer_push(model.pushes[0])
    assert work.task.done()
    assert one.kernel == "0-1,6-11"


def test_many_unprepares_make_few_pushes(model):
    one = run_container(model, "p")
    for cpu in range(1, CPUS):
        prepared(model, f"a{cpu}", str(cpu))
    assert one.kernel == "0"
    before = model.pushed
    for record in list(model.claims.values()):
        model.unprepare(record)
        model.pass_time(0.05)
        while model.pushes:
            model.answer_push(model.pushes[0])
    model.pass_time(0.25)
    while model.pushes:
        model.answer_push(model.pushes[0])
    assert one.kernel == "0-11"
    assert model.pushed - before <= 4


def test_a_claim_that_would_leave_the_others_nothing_is_not_admitted(model):
    run_container(model, "p")
    run_container(model, "q")
    with pytest.raises(
        ClaimError, match=r"^CPUs 0-11 would leave no CPU for the 2 containers that have no claim and run on this node;"
    ):
        model.enforcement.admit(cpus("0-11"))
    model.enforcement.admit(cpus("1-11"))


def test_an_empty_pool_takes_no_container_without_a_claim(model):
    prepared(model, "a", "0-11")
    assert model.create("p") is None
    assert model.create("q", "a") is not None


def test_an_exclusive_container_is_refused_where_others_cannot_be_moved_away(model):
    run_container(model, "p")
    record = make_record("a", "0-11")  # as restored after another driver
    model.end_driver()
    model.ledger.hold(record)
    model.claims["a"] = record
    model.start_driver()
    with pytest.raises(Refusal, match=r"has CPUs 0-11, but container c1 of pod ./p could not be moved away"):
        model.run(model.plugin.create_container(*exclusive_request(model, "a")))
    assert model.pushes == []


def exclusive_request(model: Model, uid: str) -> tuple[nri.PodSandbox, nri.Container]:
    message = nri.Container(id="x", name="x", pod_sandbox_id="q")
    message.env.append(f"DRA_CPUSET_{uid}={model.claims[uid].cpus}")
    message.CDI_devices.add(name=f"dra.k8s.io/cpu=claim-{uid}")
    model.reservations.learn_pod(ClaimUID(uid), "q")
    return nri.PodSandbox(id="q", uid="q", name="q", namespace="default"), message


def test_with_no_managed_cpus_and_no_claims_containers_are_left_alone():
    model = Model(reserved=f"0-{CPUS - 1}")
    message = nri.Container(id="x", name="x", pod_sandbox_id="p")
    pod = nri.PodSandbox(id="p", uid="p", name="p", namespace="default")
    adjust, _ = model.run(model.plugin.create_container(pod, message))
    assert adjust == nri.ContainerAdjustment()
    assert model.run(model.plugin.update_container(pod, message, nri.LinuxResources())) == ()
    assert model.run(model.plugin.synchronize([pod], [message])) == []
    model.plugin.synchronized()
    model.settle()
    assert model.pushed == 0
    model.close()


# Anything, in any order


class Enforced(Walk):
    """Containers are moved by pushes."""


TestEnforced = Enforced.TestCase
TestEnforced.settings = WALK
