# SPDX-License-Identifier: Apache-2.0
"""Whether a container gets its claims' CPUs, shares the others, or is refused. Pure: no I/O, no state.

Everything in a container's environment may have been written by the pod's author, so a variable by itself proves
nothing: it must say exactly what the ledger says, and the runtime must say that the container was given the claim's CDI
device. What proves that, the *mark*, is the device's id among the container's CDI devices, or the start guard's hook;
neither can be forged. A mark without its variable is refused as well: somebody has removed or overridden it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from driver.errors import ClaimError
from driver.json_values import quoted
from driver.names import CDI_KIND, CPUSET_VARIABLE_PREFIX, ClaimUID, cdi_device_name, claim_uid, cpuset_variable
from fastcpu import CpuSet
from fastcpu.cpuset import MAX_CPUS
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from driver.ledger import Record
    from driver.nri.containers import Pod

_MOST_VARIABLES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A container that is to be decided about, as far as it matters.

    Attributes
    ----------
    name : str
        The container's name in its pod.
    pod : Pod
        Its pod.
    variables : tuple of str
        The entries of its environment that begin with ``DRA_CPUSET_``, as they are.
    cdi_devices : tuple of str
        Its CDI devices of our kind, by full id.
    guards : Mapping of ClaimUID to CpuSet
        The claims of which it has the start guard's hook, with the CPUs that the hook allows.
    guard_fault : str
        What is wrong with a hook of the start guard; empty if nothing is.
    """

    name: str
    pod: Pod
    variables: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    guards: Mapping[ClaimUID, CpuSet]
    guard_fault: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing about it that concerns any claim."""
        return not (self.variables or self.cdi_devices or self.guards or self.guard_fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusive:
    """The container gets these CPUs, those of all its claims, for itself and others of its pod."""

    cpus: CpuSet
    claims: frozenset[ClaimUID]


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
    if request.is_plain:
        return Shared()
    unknown = []
    try:
        records, marked = _matching(request, claims.records, expect_mark=marks.any)
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


def decide_living(request: Request, records: Mapping[ClaimUID, Record], marks: Marks) -> Exclusive | Shared | Refused:
    """Decide what a container is that lives already, and that nobody can refuse any more.

    It may be older than the driver or its start guard, so that the hook is not expected; and what the API server says
    of its pod does not matter, since its CPUs could not be taken away from it.

    Parameters
    ----------
    request, records, marks
        As in `decide`.
    """
    if request.is_plain:
        return Shared()
    try:
        matching, _ = _matching(request, records, expect_mark=marks.cdi_devices)
    except _Fault as fault:
        return Refused(reason=fault.reason, message=f"container {quoted(request.name)}: {fault}")
    return _exclusive(matching)


def marked_claims(request: Request) -> set[ClaimUID]:
    """Return the claims of which a container bears a mark, one that `decide_living` has not refused."""
    return _marked(request.cdi_devices) | set(request.guards)


class _Fault(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _exclusive(records: Mapping[ClaimUID, Record]) -> Exclusive:
    return Exclusive(cpus=CpuSet().union(*(record.cpus for record in records.values())), claims=frozenset(records))


def _matching(
    request: Request, records: Mapping[ClaimUID, Record], *, expect_mark: bool
) -> tuple[dict[ClaimUID, Record], set[ClaimUID]]:
    """Return the records of the container's claims, if all about it agrees with them, and those it has marks of."""
    if request.guard_fault:
        raise _Fault("malformed", request.guard_fault)
    variables = _variables(request.variables)
    marked = marked_claims(request)
    for uid in sorted(marked - set(variables)):
        raise _Fault(
            "override",
            f"it has the CDI device of claim {uid}, but {cpuset_variable(uid)} is missing from its environment: "
            "something has removed it",
        )
    matching = {}
    for uid, value in variables.items():
        cpus = _cpus(uid, value, overridable=uid in marked)
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
        if cpus != record.cpus:
            raise _Fault(
                "mismatch",
                f"{cpuset_variable(uid)} is {quoted(value)}, but claim {record.claim} has CPUs {record.cpus}: do not "
                f"set {CPUSET_VARIABLE_PREFIX} variables, they come with the claim",
            )
        allowed = request.guards.get(uid)
        if allowed is not None and allowed != record.cpus:
            raise _Fault(
                "mismatch",
                f"its start guard allows CPUs {allowed}, but claim {record.claim} has CPUs {record.cpus}: the claim's "
                "CDI spec was changed; delete the pod, so that the claim is prepared again",
            )
        matching[uid] = record
    return matching, marked


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


def _variables(entries: Sequence[str]) -> dict[ClaimUID, str]:
    if len(entries) > _MOST_VARIABLES:
        raise _Fault(
            "malformed", f"it has {len(entries)} {CPUSET_VARIABLE_PREFIX} variables; expected at most {_MOST_VARIABLES}"
        )
    variables: dict[ClaimUID, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        try:
            uid = claim_uid(name.removeprefix(CPUSET_VARIABLE_PREFIX))
        except ClaimError as error:
            raise _Fault(
                "malformed",
                f"environment variable {quoted(name)}: {error}; do not set {CPUSET_VARIABLE_PREFIX} variables, they "
                "come with a claim",
            ) from error
        if not equals:
            raise _Fault("malformed", f"environment variable {quoted(name)} has no value; expected NAME=cpulist")
        if uid in variables:
            raise _Fault(
                "override",
                f"{cpuset_variable(uid)} is set more than once: do not set {CPUSET_VARIABLE_PREFIX} variables, they "
                "come with a claim",
            )
        variables[uid] = value
    return variables


def _cpus(uid: ClaimUID, value: str, *, overridable: bool) -> CpuSet:
    where = "the environment of its image or its pod overrides it" if overridable else "do not set it"
    try:
        cpus = CpuSet.parse(value, limit=MAX_CPUS)
    except CpuListError as error:
        raise _Fault("malformed", f"{cpuset_variable(uid)} is {quoted(value)}: {error}; {where}") from error
    if not cpus:
        raise _Fault("malformed", f"{cpuset_variable(uid)} is empty; expected the claim's CPUs: {where}")
    if value != value.strip():
        raise _Fault(
            "malformed", f"{cpuset_variable(uid)} is {quoted(value)}; expected a cpulist without spaces: {where}"
        )
    return cpus


def _marked(cdi_devices: Iterable[str]) -> set[ClaimUID]:
    marked = set()
    prefix = cdi_device_name(ClaimUID(""))
    for device in cdi_devices:
        name = device.removeprefix(f"{CDI_KIND}=")
        try:
            uid = claim_uid(name.removeprefix(prefix))
        except ClaimError:
            uid = None
        if uid is None or name != cdi_device_name(uid):
            raise _Fault(
                "malformed", f"CDI device {quoted(device)} is none of a claim; expected {CDI_KIND}={prefix}<claim UID>"
            )
        marked.add(uid)
    return marked
