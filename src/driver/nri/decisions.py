# SPDX-License-Identifier: Apache-2.0
"""Whether a container gets its claims' CPUs, shares the others, or is refused. Pure: no I/O, no state.

Everything in a container's environment may have been written by the pod's author, so a variable by itself proves
nothing: it must say exactly what the ledger says, and the runtime must say that the container was given the claim's CDI
device. What proves that, the *mark*, is the device's id among the container's CDI devices, or the start guard's hook;
neither can be forged. A mark without its variable is refused as well: somebody has removed or overridden it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from driver.json_values import quoted
from driver.names import CPUSET_VARIABLE_PREFIX, ClaimUID, cpuset_variable
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from driver.ledger import Record
    from driver.nri.container import Pod
    from driver.nri.evidence import Evidence, Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A container that is to be decided about, as far as it matters.

    Attributes
    ----------
    name : str
        The container's name in its pod.
    pod : Pod
        Its pod.
    evidence : Evidence
        What about it speaks of claims.
    """

    name: str
    pod: Pod
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusive:
    """The container gets these CPUs, those of all its claims, for itself and others of its pod.

    Attributes
    ----------
    cpus : CpuSet
        The CPUs.
    claims : frozenset of ClaimUID
        The claims.
    unproven : frozenset of ClaimUID
        Those of them of which only the CPUs of a living container say that they are its own; the API server knows.
    """

    cpus: CpuSet
    claims: frozenset[ClaimUID]
    unproven: frozenset[ClaimUID] = field(default=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The container has no claim: it shares what no claim holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unverified:
    """It depends on whether claims are reserved for the pod, which is not known; the API server is to be asked."""

    claims: tuple[ClaimUID, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The container must not be created.

    Attributes
    ----------
    reason : str
        A word for a metric.
    message : str
        One line for the person who reads the pod's events.
    """

    reason: str
    message: str


Decision = Exclusive | Shared | Unverified | Refused


class Claims(Protocol):
    """What is known of the claims on this node."""

    @property
    def records(self) -> Mapping[ClaimUID, Record]:
        """The claims that hold CPUs here."""

    def why_barred(self, uid: ClaimUID, /) -> str:
        """Return why no container may be created with a claim just now; empty if one may."""

    def owner(self, uid: ClaimUID, /) -> tuple[Pod, str] | None:
        """Return the pod that uses a claim, and a container of it that lives; None if no container does."""

    def reserved_for(self, uid: ClaimUID, pod_uid: str, /, *, marked: bool) -> bool:
        """Tell whether a claim is known to be reserved for a pod, of which a container has a mark of it or not."""

    def is_proven(self, uid: ClaimUID, pod_uid: str, /) -> bool:
        """Tell whether the claim's own list, or a mark, has shown that it is reserved for a pod or for a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Which marks a container of a claim must be expected to have.

    Attributes
    ----------
    cdi_devices : bool
        The runtime tells a container's CDI devices.
    guard : bool
        The claims' CDI specs have the start guard's hook.
    """

    cdi_devices: bool
    guard: bool

    @property
    def any(self) -> bool:
        """Whether a container of a claim has at least one."""
        return self.cdi_devices or self.guard


def decide(request: Request, claims: Claims, marks: Marks, looked: Mapping[ClaimUID, str]) -> Decision:
    """Decide about a container that is being created.

    Parameters
    ----------
    request : Request
        The container.
    claims : Claims
        What is known of claims.
    marks : Marks
        What a container of a claim has, besides the variable.
    looked : Mapping of ClaimUID to str
        The claims that were read again for this decision; with why they could not be, or an empty text.
    """
    if request.evidence.is_none:
        return Shared()
    unknown = []
    marked = request.evidence.marked
    try:
        records = _matching(request, claims.records, expect_mark=marks.any)
        for uid, record in records.items():
            _check_usable(uid, request.pod, claims)
            if not claims.reserved_for(uid, request.pod.uid, marked=uid in marked):
                unknown.append(uid)
                _check_not_foreign(record, request.pod, looked)
    except _Fault as fault:
        return Refused(reason=fault.reason, message=f"container {quoted(request.name)}: {fault}")
    if unknown:
        return Unverified(claims=tuple(unknown))
    return _exclusive(records)


def decide_living(
    request: Request, cpus: CpuSet | None, claims: Claims, marks: Marks, looked: Mapping[ClaimUID, str]
) -> Decision:
    """Decide what a container is that lives already, and that nobody can refuse any more.

    It may be older than the driver or its start guard, so that the hook is not expected. Where it has no mark, it may
    also have been created by anybody while there was no driver. Then only the claim's ``status.reservedFor`` tells
    whose it is; until that is read, it is the claim's only if somebody has held it to the claim's CPUs before.

    Parameters
    ----------
    request, claims, marks, looked
        As in `decide`.
    cpus : CpuSet or None
        The CPUs that the runtime says it has; None if it has no restriction.
    """
    if request.evidence.is_none:
        return Shared()
    pending: list[ClaimUID] = []
    unproven: list[ClaimUID] = []
    marked = request.evidence.marked
    try:
        matching = _matching(request, claims.records, expect_mark=marks.cdi_devices)
        for uid, record in matching.items():
            if uid in marked or claims.is_proven(uid, request.pod.uid):
                continue
            if looked.get(uid) == "":
                _check_not_foreign(record, request.pod, looked)
            (unproven if is_held_to(cpus, record, matching) else pending).append(uid)
    except _Fault as fault:
        return Refused(reason=fault.reason, message=f"container {quoted(request.name)}: {fault}")
    if pending:
        return Unverified(claims=tuple(pending))
    return _exclusive(matching, unproven)


def is_held_to(cpus: CpuSet | None, record: Record, records: Mapping[ClaimUID, Record]) -> bool:
    """Tell whether a container runs on a claim's CPUs, and on none but those of the claims that it says it has.

    Parameters
    ----------
    cpus : CpuSet or None
        The CPUs that the runtime says it has; None if it has no restriction.
    record : Record
        The claim.
    records : Mapping of ClaimUID to Record
        All of its claims.
    """
    return cpus is not None and not cpus.isdisjoint(record.cpus) and cpus <= _union(records)


class _Fault(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _union(records: Mapping[ClaimUID, Record]) -> CpuSet:
    return CpuSet().union(*(record.cpus for record in records.values()))


def _exclusive(records: Mapping[ClaimUID, Record], unproven: Iterable[ClaimUID] = ()) -> Exclusive:
    return Exclusive(cpus=_union(records), claims=frozenset(records), unproven=frozenset(unproven))


def _matching(request: Request, records: Mapping[ClaimUID, Record], *, expect_mark: bool) -> dict[ClaimUID, Record]:
    """Return the records of the container's claims, if all about it agrees with them."""
    evidence = request.evidence
    if evidence.fault:
        raise _Fault("override" if evidence.override else "malformed", evidence.fault)
    marked = evidence.marked
    matching = {}
    for variable in evidence.variables:
        uid = variable.uid
        if variable.fault:
            where = "the environment of its image or its pod overrides it" if uid in marked else "do not set it"
            raise _Fault("malformed", f"{variable.fault}: {where}")
        record = records.get(uid)
        if record is None:
            raise _Fault(
                "unknown",
                f"{cpuset_variable(uid)} is set, but no claim of that UID is prepared on this node: do not set "
                f"{CPUSET_VARIABLE_PREFIX} variables, they come with a claim",
            )
        if uid not in marked and expect_mark:
            raise _Fault(
                "unmarked",
                f"{cpuset_variable(uid)} is set, but the container was not given claim {record.claim}: do not set "
                f"{CPUSET_VARIABLE_PREFIX} variables, refer to the claim in the container's resources.claims",
            )
        _check_agreement(variable, record, evidence)
        matching[uid] = record
    return matching


def _check_agreement(variable: Variable, record: Record, evidence: Evidence) -> None:
    if variable.cpus != record.cpus:
        raise _Fault(
            "mismatch",
            f"{cpuset_variable(record.uid)} is {variable.shown}, but claim {record.claim} has CPUs {record.cpus}: do "
            f"not set {CPUSET_VARIABLE_PREFIX} variables, they come with the claim",
        )
    if record.uid in evidence.guards and (allowed := evidence.guards[record.uid]) != record.cpus:
        raise _Fault(
            "mismatch",
            f"its start guard allows CPUs {allowed or 'of another list'}, but claim {record.claim} has CPUs "
            f"{record.cpus}: the claim's CDI spec was changed; delete the pod, so that the claim is prepared again",
        )


def _check_usable(uid: ClaimUID, pod: Pod, claims: Claims) -> None:
    if reason := claims.why_barred(uid):
        raise _Fault("barred", f"claim {claims.records[uid].claim} ({uid}) {reason}")
    owner = claims.owner(uid)
    if owner is not None and owner[0].uid != pod.uid:
        raise _Fault(
            "owned",
            f"claim {claims.records[uid].claim} ({uid}) is used by pod {owner[0]}, whose container {owner[1]} has not "
            "ended; only one pod at a time can use it",
        )


def _check_not_foreign(record: Record, pod: Pod, looked: Mapping[ClaimUID, str]) -> None:
    if record.uid not in looked:
        return
    if why := looked[record.uid]:
        raise _Fault(
            "unverified",
            f"whether claim {record.claim} ({record.uid}) is reserved for pod {pod} cannot be found out: {why}; "
            "it is tried again when the container is",
        )
    raise _Fault(
        "foreign",
        f"claim {record.claim} ({record.uid}) is not reserved for pod {pod}; expected the pod in its "
        "status.reservedFor: let the pod refer to the claim in spec.resourceClaims",
    )
