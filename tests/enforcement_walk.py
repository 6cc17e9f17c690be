# SPDX-License-Identifier: Apache-2.0
"""Anything in any order, and after each step what must hold of the kernel, for both ways of moving containers."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from driver.nri.container import WINDOW_S
from enforcement_model import Living, Model, cpus, run_container
from fastcpu import CpuSet
from records import make_record

WALK = settings(max_examples=60, stateful_step_count=60, suppress_health_check=list(HealthCheck), deadline=None)


class Walk(RuleBasedStateMachine):
    """Pods, claims, events, windows, moves and time in any order.

    A window lasts less than five seconds here: what lasts longer is made good afterwards, but not in time.
    """

    answers = False
    readable = True

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(answers=self.answers, readable=self.readable)
        self.next_claim = 0
        self.released = CpuSet()

    def teardown(self) -> None:
        self.model.settle()
        if self.answers:
            self.bring_events()
        pool = str(self.model.enforcement.pool.current(self.model.loop.now))
        for one in self.model.living.values():
            if not one.broken and one.phase == "running":
                wanted = self.exclusive(one) or pool
                assert one.kernel == wanted, f"{one.message.id} is not put right in the end"
        self.model.close()

    def bring_events(self) -> None:
        """Create containers until nobody is left to be moved in the answers."""
        for _ in range(8):
            self.model.pass_time(400)
            if (one := self.model.create("last")) is not None:
                self.model.post_create(one)
                self.model.stop(one)

    def exclusive(self, one: Living) -> str:
        return str(CpuSet().union(*(self.model.claims[uid].cpus for uid in one.claims)))

    def some(self, data: st.DataObject, phase: str | None = None, *, quiet: bool = False) -> Living | None:
        found = [
            one
            for one in self.model.living.values()
            if (phase is None or one.phase == phase) and not (quiet and one.update is not None)
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @initialize(data=st.data())
    def containers(self, data: st.DataObject) -> None:
        for number in range(data.draw(st.integers(0, 4))):
            run_container(self.model, f"p{number}")

    @rule(data=st.data(), pod=st.sampled_from(["p", "q", "r"]))
    def create(self, data: st.DataObject, pod: str) -> None:
        uids = (
            data.draw(st.lists(st.sampled_from(sorted(self.model.claims)), unique=True, max_size=2))
            if (self.model.claims and data.draw(st.booleans()))
            else []
        )
        if len(self.model.living) < 10:
            self.model.create(pod, *uids, undone=self.answers and data.draw(st.integers(0, 3)) == 0)

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), pod=st.sampled_from(["p", "q", "r"]), exclusive=st.booleans())
    def run(self, data: st.DataObject, pod: str, exclusive: bool) -> None:
        """Let a container come as far as it can without anything in between."""
        uids = [data.draw(st.sampled_from(sorted(self.model.claims)))] if exclusive and self.model.claims else []
        if len(self.model.living) >= 10:
            return
        if data.draw(st.integers(0, 3)) == 0:
            self.model.create(pod, *uids, undone=True)
        if (one := self.model.create(pod, *uids)) is not None:
            self.model.post_create(one)
            self.model.start(one, told=False)
            if self.model.tell_start(one):
                self.model.post_start(one)

    @rule(data=st.data())
    def post_create(self, data: st.DataObject) -> None:
        if one := self.some(data, "creating"):
            self.model.post_create(one)

    @rule(data=st.data(), told=st.booleans())
    def start(self, data: st.DataObject, told: bool) -> None:
        # Its start reads what is stored, also while an update goes on.
        if one := self.some(data, "created"):
            self.model.start(one, told=told)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def tell_start(self, data: st.DataObject) -> None:
        if one := self.some(data, "launching"):
            self.model.tell_start(one)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def fail_update(self, data: st.DataObject) -> None:
        if found := [one for one in self.model.living.values() if one.update is not None]:
            self.model.fail_update(data.draw(st.sampled_from(found)))

    @rule(data=st.data())
    def post_start(self, data: st.DataObject) -> None:
        if one := self.some(data, "starting"):
            self.model.post_start(one)

    @rule(data=st.data(), phase=st.sampled_from(["created", "running"]), wished=st.sampled_from(["0", "0-11", "3-7"]))
    def update(self, data: st.DataObject, phase: str, wished: str) -> None:
        if one := self.some(data, phase, quiet=True):
            self.model.update(one, wished)

    @rule(data=st.data())
    def post_update(self, data: st.DataObject) -> None:
        found = [one for one in self.model.living.values() if one.update is not None]
        if found:
            self.model.post_update(data.draw(st.sampled_from(found)))

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        if one := self.some(data):
            self.model.stop(one)

    @precondition(lambda self: self.readable)  # else one that cannot be moved counts as moved
    @rule(data=st.data())
    def toggle_broken(self, data: st.DataObject) -> None:
        if (one := self.some(data, "running", quiet=True)) and not one.claims:
            one.broken = not one.broken

    @rule(data=st.data())
    def apply_push(self, data: st.DataObject) -> None:
        waiting = [push for push in self.model.pushes if not push.applied]
        if waiting:
            self.model.apply_push(waiting[0])

    @rule()
    def answer_push(self) -> None:
        if self.model.pushes:
            self.model.answer_push(self.model.pushes[0])

    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        free = self.model.ledger.pool.available
        if self.released <= free and self.released and data.draw(st.booleans()):
            chosen = self.released  # what the others are about to be given back
        elif len(free) < 2:
            return
        else:
            chosen = CpuSet(data.draw(st.lists(st.sampled_from(list(free)), min_size=1, max_size=4, unique=True)))
        self.next_claim += 1
        self.model.prepare(make_record(f"a{self.next_claim}", str(chosen)))

    @rule(data=st.data())
    def unprepare(self, data: st.DataObject) -> None:
        busy = {work.record.uid for work in self.model.work}
        found = sorted(set(self.model.claims) - busy)
        if found:
            record = self.model.claims[data.draw(st.sampled_from(found))]
            self.released = record.cpus
            self.model.unprepare(record)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 4.0, 6.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        for one in list(self.model.living.values()):
            if one.in_window and self.model.loop.now + seconds - one.since > WINDOW_S - 0.1:
                self.model.finish_windows()
                break
        self.model.pass_time(seconds)

    @precondition(lambda self: self.model.living)
    @rule()
    def restart_driver(self) -> None:
        self.model.finish_windows()  # a synchronisation waits for what is going on
        self.model.end_driver()
        self.model.start_driver()

    @invariant()
    def no_cpu_of_a_claim_is_anyone_elses(self) -> None:
        """Where containers are moved in answers, a claim's CPUs are its own from the start of its container."""
        running = [one for one in self.model.living.values() if one.runs]
        used = {uid for one in running for uid in one.claims}
        for one in running:
            for uid, record in self.model.claims.items():
                if uid not in one.claims and (not self.answers or uid in used):
                    assert cpus(one.kernel).isdisjoint(record.cpus), f"{one.message.id} has CPUs of {uid}"

    @invariant()
    def an_exclusive_container_has_its_cpus_and_no_others(self) -> None:
        for one in self.model.living.values():
            if one.claims and one.runs:
                assert one.kernel == self.exclusive(one)

    @invariant()
    def no_claim_has_containers_of_two_pods(self) -> None:
        owners: dict[str, str] = {}
        for one in self.model.living.values():
            for uid in one.claims:
                assert owners.setdefault(uid, one.message.pod_sandbox_id) == one.message.pod_sandbox_id

    @invariant()
    def a_claim_whose_container_lives_stays_held(self) -> None:
        for one in self.model.living.values():
            for uid in one.claims:
                assert uid in self.model.ledger.records
