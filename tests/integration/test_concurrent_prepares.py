# SPDX-License-Identifier: Apache-2.0
"""Two hundred claims that want overlapping CPUs, all at once, from eight connections to one real driver.

That no CPU ever has two holders is watched from three sides: the answers, with the times between which a claim
certainly holds its CPUs; the folders of records and CDI specs, read over and over; and the driver's own log, whose
decisions are repeated one after the other, first on paper and then by a second driver.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from itertools import combinations
from pathlib import Path

from fastcpu import CpuSet

CONNECTIONS = 8
CLAIMS = 200
SETTINGS = {"groupBy": "numanode", "reservedCPUs": "0,32"}
GROUPS = {f"cpudevnuma00{number}": (range(8 * number, 8 * number + 8)) for number in range(4)}


class FolderWatch:
    """Reads a folder over and over, in a thread, and looks for a CPU in two files that are there at the same time."""

    def __init__(self, folder: Path, read_cpus) -> None:
        self._folder = folder
        self._read_cpus = read_cpus
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.violations: list[str] = []
        self.failure: BaseException | None = None
        self.rounds = 0
        self.most = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.002):
                self._look()
                self.rounds += 1
        except BaseException as error:
            self.failure = error

    def _look(self) -> None:
        found = {}
        for path in self._folder.glob("*.json"):
            if (file := self._read(path)) is not None:
                found[path] = file
        self.most = max(self.most, len(found))
        for (one, (one_id, one_cpus)), (two, (two_id, two_cpus)) in combinations(found.items(), 2):
            # The first was read before the second. If it is the same file still, both were there at that moment.
            if not one_cpus.isdisjoint(two_cpus) and self._identity(one) == one_id and self._identity(two) == two_id:
                self.violations.append(f"{one.name} and {two.name} both have CPUs {one_cpus & two_cpus}")

    def _read(self, path):
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                return (status.st_ino, status.st_ctime_ns), self._read_cpus(json.load(file))
        except FileNotFoundError:
            return None

    def _identity(self, path):
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_ctime_ns


def cpus_of_record(document):
    return CpuSet.parse(document["cpus"])


def cpus_of_spec(document):
    [device] = document["devices"]
    edits = device["containerEdits"]
    return CpuSet.parse(edits["env"][0].partition("=")[2]) if "env" in edits else CpuSet()


class Wish:
    """One claim, and what its user found out: the answers, and from when to when it certainly held its CPUs."""

    def __init__(self, claim, cpuset):
        self.claim = claim
        self.cpuset = cpuset
        self.answers = []
        self.refusals = []
        self.granted_at = None
        self.let_go_at = None
        self.stays = False

    @property
    def reference(self):
        return self.claim.namespace, self.claim.uid, self.claim.name

    def waits_in_vain(self, wishes):
        """Whether somebody who stays was given one of its CPUs."""
        return any(wish.stays and wish.granted_at and not wish.cpuset.isdisjoint(self.cpuset) for wish in wishes)


def make_wishes(node, chance):
    wishes = []
    for number in range(CLAIMS):
        device, cpus = chance.choice(list(GROUPS.items()))
        begin = chance.randrange(1, 7)
        cpuset = CpuSet(cpus[begin : begin + chance.randint(1, 4)])
        wish = Wish(node.add(str(cpuset), device=device), cpuset)
        # A few never end: whoever wants their CPUs waits in vain.
        wish.stays = number % 25 == 0
        wishes.append(wish)
    return wishes


async def use(wish, wishes, connections, chance):
    """Prepare a claim, maybe twice at the same time and once more later, and unprepare it after a moment.

    As the kubelet does, it tries again what was refused: on a busy machine the others are not done in ten seconds.
    """
    callers = [chance.choice(connections)]
    if chance.random() < 0.4:
        callers.append(chance.choice(connections))
    again, pause = chance.random() < 0.4, chance.uniform(0, 0.04)

    async def prepare(connection):
        answer = (await connection.prepare([wish.reference]))[wish.claim.uid]
        if answer.error:
            wish.refusals.append(answer.error)
            return
        wish.answers.append(answer)
        if wish.granted_at is None:
            wish.granted_at = time.monotonic()

    while wish.granted_at is None:
        await asyncio.gather(*(prepare(caller) for caller in callers))
        if wish.granted_at is None and wish.waits_in_vain(wishes):
            return
    await asyncio.sleep(pause)
    if again:
        await prepare(chance.choice(connections))
    if not wish.stays:
        wish.let_go_at = time.monotonic()
        errors = await chance.choice(connections).unprepare([wish.reference])
        assert errors == {wish.claim.uid: ""}


def decisions(log):
    """Return who was given what and who let it go, in the order of the driver's log."""
    kinds = {"claim prepared": True, "claim unprepared": False}
    return [(kinds[line["msg"]], line["uid"], line["cpus"]) for line in log if line["msg"] in kinds]


async def test_two_hundred_claims_at_once(node):
    chance = random.Random(20261129)
    await node.start(SETTINGS)
    wishes = make_wishes(node, chance)
    by_uid = {wish.claim.uid: wish for wish in wishes}
    connections = [await node.connect() for _ in range(CONNECTIONS)]
    with FolderWatch(node.records_dir, cpus_of_record) as records, FolderWatch(node.cdi_dir, cpus_of_spec) as specs:
        await asyncio.gather(*(use(wish, wishes, connections, chance) for wish in wishes))
    ended = time.monotonic()

    # Every answer is the CPUs that were asked for, or says who holds them; all answers for a claim are alike.
    granted = [wish for wish in wishes if wish.granted_at is not None]
    refused = [wish for wish in wishes if wish.granted_at is None]
    for wish in granted:
        assert len(set(wish.answers)) == 1
    assert all("held by claim" in error for wish in wishes for error in wish.refusals)
    staying = [wish for wish in granted if wish.stays]
    # How many exactly depends on who of those that stay comes first, and so on the machine.
    assert len(granted) > CLAIMS / 4
    assert refused
    assert staying
    # Nobody is refused CPUs that none of those that stay has: everybody else lets go.
    taken = CpuSet().union(*(wish.cpuset for wish in staying))
    assert [wish.cpuset for wish in refused if wish.cpuset.isdisjoint(taken)] == []

    # The times between which a claim certainly holds its CPUs.
    for one, two in combinations(granted, 2):
        if not one.cpuset.isdisjoint(two.cpuset):
            assert (one.let_go_at or ended) <= two.granted_at or (two.let_go_at or ended) <= one.granted_at

    # The folders.
    for watch in (records, specs):
        assert watch.failure is None
        assert watch.violations == []
        assert watch.rounds > 50
        assert watch.most > 10

    # The decisions one after the other, on paper.
    held = {}
    log = decisions(node.log())
    assert sum(given for given, _, _ in log) == len(granted)
    for given, uid, cpus in log:
        if given:
            assert CpuSet.parse(cpus) == by_uid[uid].cpuset
            assert uid not in held
            assert CpuSet().union(*held.values()).isdisjoint(CpuSet.parse(cpus))
            held[uid] = CpuSet.parse(cpus)
        else:
            assert held.pop(uid) == CpuSet.parse(cpus)
    final = {wish.claim.uid: str(wish.cpuset) for wish in staying}
    assert {uid: str(cpus) for uid, cpus in held.items()} == final
    assert await node.agreed() == final
    answers = {wish.claim.uid: wish.answers[0] for wish in granted}
    assert await node.prepare(*(by_uid[uid].claim for uid in final)) == [answers[uid] for uid in final]

    # And by another driver: each is granted at once, and the end is the same.
    files = node.files()
    await node.release_all()
    await node.restart(SETTINGS)
    for given, uid, _ in log:
        if given:
            assert await node.prepare(by_uid[uid].claim) == [answers[uid]]
        else:
            assert await node.unprepare(by_uid[uid].claim) == [""]
    assert node.files() == files
    assert await node.agreed() == final
    assert [line for line in node.log() if line["msg"] == "waiting for CPUs"] == []
