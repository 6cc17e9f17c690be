# SPDX-License-Identifier: Apache-2.0
"""The pieces of work that two revisions are compared by. Each is one call from Python; the set-up is not counted.

They must run with an older revision as well: what it does not have yet fails in `Kernel.set_up`, which counts as new.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cases
from fastcpu import CpuSet


@dataclass(frozen=True, slots=True)
class Kernel:
    """One piece of work.

    Attributes
    ----------
    name : str
        What it is, and on how many CPUs.
    set_up : callable
        Returns the function to call and its arguments.
    """

    name: str
    set_up: Callable[[], tuple[Callable[..., object], tuple[object, ...]]]


Call = tuple[Callable[..., object], tuple[object, ...]]


def _check(kind: str, n_cpus: int) -> Call:
    return cases.pool(n_cpus).check, cases.choice(kind, n_cpus)


def _parse(kind: str, n_cpus: int) -> Call:
    return CpuSet.parse, (cases.choice(kind, n_cpus)[0],)


def _format(kind: str, n_cpus: int) -> Call:
    return str, (CpuSet.parse(cases.choice(kind, n_cpus)[0]),)


def _algebra(function: Callable[..., object], n_cpus: int) -> Call:
    return function, (CpuSet(range(0, n_cpus, 2)), CpuSet(range(n_cpus // 4, 3 * n_cpus // 4)))


def _of_one(function: Callable[..., object], n_cpus: int) -> Call:
    return function, (CpuSet(range(0, n_cpus, 2)),)


def _place(n_cpus: int, n: int) -> Call:
    from fastcpu.placement import Placer

    topology = cases.server(n_cpus)
    placer, socket = Placer(topology), topology.sockets.cpuset(1)
    return placer.place, (socket, n)


def _decode() -> Call:
    import claimdocuments
    from driver.claims import decode_claim

    raw = claimdocuments.raw_claim(claimdocuments.with_cpuset("2-5"))
    return decode_claim, (json.loads(json.dumps(raw)), claimdocuments.UID)


_OPERATIONS = {
    "union": operator.or_,
    "intersection": operator.and_,
    "difference": operator.sub,
    "is subset": operator.le,
    "equal": operator.eq,
}
_OF_ONE = {"list": list, "hash": hash, "first": operator.attrgetter("first")}

KERNELS = tuple(
    Kernel(name, set_up)
    for name, set_up in (
        *((f"check {kind}, {n} CPUs", partial(_check, kind, n)) for kind in cases.KINDS for n in (64, 1024, 8192)),
        *((f"parse {kind}, {n} CPUs", partial(_parse, kind, n)) for kind in cases.KINDS[::3] for n in (64, 8192)),
        *((f"format {kind}, {n} CPUs", partial(_format, kind, n)) for kind in cases.KINDS[::3] for n in (64, 8192)),
        *((f"{name}, {n} CPUs", partial(_algebra, f, n)) for name, f in _OPERATIONS.items() for n in (64, 8192)),
        *((f"{name}, {n} CPUs", partial(_of_one, f, n)) for name, f in _OF_ONE.items() for n in (64, 8192)),
        *((f"place 8 CPUs in a socket, {n} CPUs", partial(_place, n, 8)) for n in (64, 1024, 8192)),
        *((f"place half a socket, {n} CPUs", partial(_place, n, n // 4)) for n in (64, 1024)),
        ("decode a claim", _decode),
    )
)
