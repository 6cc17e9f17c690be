# SPDX-License-Identifier: Apache-2.0
"""What about a container speaks of claims, compared with the claims that hold CPUs here.

A pod's author writes the environment, and whoever writes a CDI spec its hooks; both may be as long as a message. So the
name of a claim comes first: what is said of a claim that is not here is not read. A text that is the claim's own is not
read either. All others are refused by their length, or by having more entries than the claim has CPUs, before they are
parsed, and never beyond the highest of the claim's CPUs.

Pure: no I/O, no state that lasts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from driver.errors import ClaimError
from driver.json_values import quoted
from driver.names import CDI_KIND, CPUSET_VARIABLE_PREFIX, ClaimUID, cdi_device_name, claim_uid, cpuset_variable
from fastcpu import CpuSet
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from driver.ledger import Record

MOST_VARIABLES: Final = 256
"""So many variables of claims, or marks of them, a container has at most."""

# No good text is shorter than that of one CPU, and a little more shows better what is wrong with a bad one.
_SHORTEST_BOUND: Final = 64
# Ranges may be cut up, as nobody does; each costs as much as a whole row of words.
_MORE_RANGES: Final = 16
_SHOWN: Final = 80
_LONGEST_UID: Final = 63
_DEVICE_PREFIX: Final = cdi_device_name(ClaimUID(""))


class Entry(NamedTuple):
    """An entry of a container's environment, or as much of it as may be good.

    Attributes
    ----------
    text : str
        The entry, or its beginning.
    length : int
        How long the whole entry is.
    """

    text: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """What a container's environment says of one claim.

    Attributes
    ----------
    uid : ClaimUID
        The claim.
    cpus : CpuSet or None
        The CPUs that it says; None if it says none, or the claim is not here, so that it was not read.
    shown : str
        Its value for a message, quoted and cut.
    fault : str
        What is wrong with it as a list of CPUs; empty if nothing is.
    """

    uid: ClaimUID
    cpus: CpuSet | None
    shown: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that speaks of claims in a container.

    Attributes
    ----------
    variables : tuple of Variable
        What its environment says, up to the first that is not exactly what a claim here has: no other counts then.
    cdi_devices : frozenset of ClaimUID
        The claims of which it has the CDI device.
    guards : Mapping of ClaimUID to CpuSet or None
        The claims of which it has the start guard's hook, with the CPUs that this allows; None if the claim is not
        here.
    fault : str
        Why nothing of it counts; empty if it does.
    override : bool
        Whether the fault is that somebody has overridden a variable.
    """

    variables: tuple[Variable, ...] = ()
    cdi_devices: frozenset[ClaimUID] = frozenset()
    guards: Mapping[ClaimUID, CpuSet | None]
    fault: str = ""
    override: bool = False

    @property
    def is_none(self) -> bool:
        """Whether nothing speaks of any claim."""
        return not (self.variables or self.cdi_devices or self.guards or self.fault)

    @property
    def marked(self) -> frozenset[ClaimUID]:
        """The claims of which it has a mark: a CDI device or a hook."""
        return self.cdi_devices.union(self.guards)


NO_EVIDENCE: Final = Evidence(guards={})


class HeldClaims:
    """The claims that hold CPUs here, as what containers say is compared with them.

    Good for one look at one container or at many, not to be kept.

    Parameters
    ----------
    records : Mapping of ClaimUID to Record
        The claims.
    limit : int
        One more than the highest CPU that the machine or a claim may have.

    Attributes
    ----------
    records, limit
        As above.
    """

    def __init__(self, records: Mapping[ClaimUID, Record], limit: int) -> None:
        self.records = records
        self.limit = limit
        self._exact: dict[ClaimUID, Variable] = {}

    @property
    def longest_list(self) -> int:
        """How many characters a list of CPUs has at most, one that says each once."""
        return longest_list(self.limit, self.limit)

    @property
    def longest_entry(self) -> int:
        """How many characters of an entry of the environment are worth a look."""
        return len(CPUSET_VARIABLE_PREFIX) + _LONGEST_UID + 2 + self.longest_list

    def exact(self, record: Record) -> Variable:
        """Return the variable that says exactly what a claim has; the same one each time."""
        variable = self._exact.get(record.uid)
        if variable is None or variable.cpus is not record.cpus:
            variable = Variable(uid=record.uid, cpus=record.cpus, shown=str(record.cpus))
            self._exact[record.uid] = variable
        return variable


def longest_list(n_cpus: int, limit: int) -> int:
    """Return how many characters a list of so many CPUs below a limit has that says each of them once."""
    return max(_SHORTEST_BOUND, n_cpus * (len(str(limit)) + 1))


def read_evidence(
    entries: Iterable[Entry],
    cdi_devices: Sequence[str],
    guards: Iterable[tuple[ClaimUID, str]],
    held: HeldClaims,
    *,
    fault: str = "",
) -> Evidence:
    """Compare what speaks of claims with the claims.

    Parameters
    ----------
    entries : iterable of Entry
        The entries of the environment that begin with ``DRA_CPUSET_``; no more are taken than count, and it may raise
        `ClaimError`.
    cdi_devices : sequence of str
        The CDI devices of our kind, by full id.
    guards : iterable of (ClaimUID, str)
        The claims of the start guard's hooks, with the lists of CPUs that they allow.
    held : HeldClaims
        The claims.
    fault : str
        What was found to be wrong with it before.
    """
    override = False
    variables: tuple[Variable, ...] = ()
    devices: frozenset[ClaimUID] = frozenset()
    allowed: dict[ClaimUID, CpuSet | None] = {}
    try:
        if not fault:
            allowed = _allowed(guards, held)
            devices = frozenset(_claim_of(device, held) for device in cdi_devices)
            marked = devices.union(allowed)
            values = _values(entries, marked, held)
            _check_complete(marked, values)
            variables = _variables(values, held)
    except _OverrideError as error:
        fault, override = str(error), True
    except ClaimError as error:
        fault = str(error)
    return Evidence(variables=variables, cdi_devices=devices, guards=allowed, fault=fault, override=override)


class _OverrideError(Exception):
    pass


def _stop(cpus: CpuSet) -> int:
    return cpus[-1] + 1 if cpus else 1


def _known(uid: ClaimUID, held: HeldClaims) -> ClaimUID:
    """Return a UID of which there is one copy only, if its claim is here."""
    record = held.records.get(uid)
    return uid if record is None else record.uid


def _claim_of(device: str, held: HeldClaims) -> ClaimUID:
    name = device[len(CDI_KIND) + 1 :]
    try:
        uid = claim_uid(name.removeprefix(_DEVICE_PREFIX))
    except ClaimError:
        uid = None
    if uid is None or name != cdi_device_name(uid):
        raise ClaimError(
            f"CDI device {quoted(device)} is none of a claim; expected {CDI_KIND}={_DEVICE_PREFIX}<claim UID>"
        )
    return _known(uid, held)


def _allowed(guards: Iterable[tuple[ClaimUID, str]], held: HeldClaims) -> dict[ClaimUID, CpuSet | None]:
    """Return what the hooks of each claim allow together."""
    allowed: dict[ClaimUID, CpuSet | None] = {}
    for uid, text in guards:
        record = held.records.get(uid)
        if record is None:
            allowed[uid] = None
            continue
        try:
            cpus = _read(text, len(text), record, held)
        except CpuListError as error:
            raise ClaimError(f"start guard hook of claim {uid}: {error}") from error
        if cpus is not None and not cpus:
            raise ClaimError(f"start guard hook of claim {uid} allows no CPUs")
        before = allowed.get(uid)
        together = CpuSet() if cpus is None else cpus
        allowed[record.uid] = together if before is None or before == together else before | together
    return allowed


def _values(entries: Iterable[Entry], marked: frozenset[ClaimUID], held: HeldClaims) -> dict[ClaimUID, Entry]:
    """Return the value of each claim's variable, up to one that decides about all."""
    values: dict[ClaimUID, Entry] = {}
    for entry in entries:
        if len(values) == MOST_VARIABLES:
            raise ClaimError(
                f"it has more than {MOST_VARIABLES} {CPUSET_VARIABLE_PREFIX} variables; expected none, or a few"
            )
        name, equals, value = entry.text.partition("=")
        try:
            uid = claim_uid(name[len(CPUSET_VARIABLE_PREFIX) :])
        except ClaimError as error:
            raise ClaimError(
                f"environment variable {quoted(name)}: {error}; do not set {CPUSET_VARIABLE_PREFIX} variables, they "
                "come with a claim"
            ) from error
        if not equals:
            raise ClaimError(f"environment variable {quoted(name)} has no value; expected NAME=cpulist")
        if uid in values:
            raise _OverrideError(
                f"{cpuset_variable(uid)} is set more than once: do not set {CPUSET_VARIABLE_PREFIX} variables, they "
                "come with a claim"
            )
        values[_known(uid, held)] = Entry(value, entry.length - len(name) - 1)
        if not marked and uid not in held.records:
            break
    return values


def _check_complete(marked: frozenset[ClaimUID], values: Mapping[ClaimUID, Entry]) -> None:
    for uid in sorted(marked.difference(values)):
        raise _OverrideError(
            f"it has the CDI device of claim {uid}, but {cpuset_variable(uid)} is missing from its environment: "
            "something has removed it"
        )


def _variables(values: Mapping[ClaimUID, Entry], held: HeldClaims) -> tuple[Variable, ...]:
    variables = []
    for uid, (value, length) in values.items():
        record = held.records.get(uid)
        if record is None:
            variables.append(Variable(uid=uid, cpus=None))
            break
        exact = held.exact(record)
        variable = exact if value == exact.shown and length == len(value) else _other(value, length, record, held)
        variables.append(variable)
        if variable is not exact:
            break
    return tuple(variables)


def _other(value: str, length: int, record: Record, held: HeldClaims) -> Variable:
    """Read a value that is not the claim's own text."""
    shown = repr(value) if length <= _SHOWN else f"{value[:_SHOWN]!r}… ({length} characters)"
    fault, cpus = "", None
    try:
        cpus = _read(value, length, record, held)
    except CpuListError as error:
        fault = f"{cpuset_variable(record.uid)} is {shown}: {error}"
    else:
        if not value:
            fault = f"{cpuset_variable(record.uid)} is empty; expected the claim's CPUs"
        elif cpus is not None and value != value.strip():
            fault = f"{cpuset_variable(record.uid)} is {shown}; expected a cpulist without spaces"
    if not fault and cpus == record.cpus:
        return held.exact(record)
    return Variable(uid=record.uid, cpus=cpus, shown=shown, fault=fault)


def _read(text: str, length: int, record: Record, held: HeldClaims) -> CpuSet | None:
    """Read a list of CPUs that should be a claim's; None if it is not worth reading, since it cannot be that."""
    own = held.exact(record).shown
    if text == own and length == len(text):
        return record.cpus
    stop = _stop(record.cpus)
    if length > longest_list(len(record.cpus), stop) or len(text) != length:
        return None
    # Nobody writes a claim's CPUs with strides, of which each costs as much as a whole row of words.
    if ":" in text or text.count("-") > 2 * own.count("-") + _MORE_RANGES:
        return None
    return CpuSet.parse(text, limit=held.limit)
