# SPDX-License-Identifier: Apache-2.0
"""The driver's own choice: a claim says how many CPUs of which devices, `fastcpu.placement` says which ones.

A container that uses a claim gets all of its CPUs. So requests of one claim that take CPUs of the same device by the
same policy are placed as one block, which is then divided among them: nothing that is placed one after another can lie
closer together. Blocks of different policies follow one another, those that can use the fewest CPUs first. Where that
leaves one without what it needs, the requests are placed one by one: up to four in every order, more of them in a few,
because nothing else can happen while this is tried.

The same claim on the same free CPUs gets the same CPUs, whatever the order of its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from typing import Any, Final

from driver.allocators import Choice, Holders, find_device
from driver.claims import AllocatedClaim
from driver.devices import Device, DeviceModel
from driver.errors import ClaimError, ClaimPendingError
from driver.podlimit import PodLimit
from driver.policies import placements
from driver.wording import count, held_by, names, shown, subject
from fastcpu import CpuSet
from fastcpu.errors import PlacementError
from fastcpu.placement import Placer, Policy
from fastcpu.pool import CpuPool
from fastcpu.topology import Topology

__all__ = ["CpuManagerAllocator"]

_Divided = dict[str, CpuSet]  # CPUs by request

_MOST_PERMUTED: Final = 4
_POLICY_FIELDS: Final = {"spread": "spread", "fullCores": "full_cores", "numa": "numa", "coreType": "core_type"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """What a request consumes of a device."""

    request: str
    cpus: int
    policy: Policy


class _MisfitError(Exception):
    """A request cannot get its CPUs by its policy, though there are enough."""

    def __init__(self, request: str, reason: PlacementError) -> None:
        super().__init__(request, reason)
        self._request = request
        self._reason = reason

    def told(self, device: Device, there_are: str) -> str:
        """Say what is wrong, and which numbers of CPUs would fit."""
        reason = self._reason
        cores = "cores" if reason.core_type == "any" else f"{reason.core_type}s"
        kind = f"whole {cores}" if reason.whole_cores else cores
        if reason.available < reason.requested:
            fault = f"{count(reason.requested)} of {kind} wanted, but {there_are.format(reason.available)}"
        else:
            fault = f"{count(reason.requested)} wanted, but no {kind} have that many threads together"
        if reason.fitting:
            fault += f"; {' or '.join(map(str, reason.fitting))} CPUs would fit"
        return f'request "{self._request}", device {device.name}: {fault}'


class CpuManagerAllocator:
    """Chooses CPUs for claims that leave the choice to the driver.

    Parameters
    ----------
    model : DeviceModel
        The node's devices.
    pool : CpuPool
        The node's CPUs.
    node_name : str
        Name of the node, which is the name of its resource pool.
    topology : Topology
        The machine.
    placement : mapping of str to str
        The node's default for ``cpuConfig.placement``.
    limit : PodLimit, optional
        The CPUs that no pod can use.
    """

    def __init__(
        self,
        model: DeviceModel,
        pool: CpuPool,
        node_name: str,
        topology: Topology,
        placement: Mapping[str, str],
        limit: PodLimit | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._node_name = node_name
        self._placer = Placer(topology)
        self._placement = dict(placement)
        self._limit = PodLimit() if limit is None else limit

    def choose(self, claim: AllocatedClaim, holders: Holders, held: CpuSet | None = None) -> Choice:
        """Choose a claim's CPUs among those that are free; see `driver.allocators.Allocator.choose`.

        CPUs that the claim holds already are its CPUs if each device has as many of them as it asks for, wherever a
        policy would place them.
        """
        policies = {request: _policy(found) for request, found in placements(claim, self._placement).items()}
        consumed: dict[int, dict[str, int]] = {}
        for result in claim.results:
            device = find_device(self._model, self._node_name, result)
            if result.fault:
                raise ClaimError(f'request "{result.request}", device {result.device}: {result.fault}')
            of_device = consumed.setdefault(device.group, {})
            of_device[result.request] = of_device.get(result.request, 0) + result.cpus
        if held is not None:
            others = {uid: cpus for uid, cpus in holders(held).items() if uid != claim.uid}
            if others:
                raise ClaimPendingError(f"of the CPUs that the claim holds already, {'; '.join(held_by(others))} too")
            return self._recognised(consumed, held)
        by_request: _Divided = {}
        conflicts = []
        for group, requests in sorted(consumed.items()):
            demands = [
                _Demand(request=name, cpus=cpus, policy=policies[name]) for name, cpus in sorted(requests.items())
            ]
            try:
                _add(by_request, self._place(self._model.devices[group], demands, holders))
            except ClaimPendingError as conflict:
                conflicts.append(conflict)
        if conflicts:
            raise conflicts[0]
        return Choice(cpus=CpuSet().union(*by_request.values()), by_request=by_request)

    def _place(self, device: Device, demands: Sequence[_Demand], holders: Holders) -> _Divided:
        """Choose CPUs of one device for all requests of a claim that consume some of it."""
        usable = device.cpus - self._pool.offline
        taken = usable & self._pool.taken
        free = usable - taken
        wanted = sum(demand.cpus for demand in demands)
        place = f"{_requests(demands)}, device {device.name}"
        outside = device.cpus & self._limit.outside
        lost = [self._limit.refusal(outside)] if outside else []
        if wanted > len(usable):
            fault = f"{place}: {count(wanted)} wanted, but it has only {len(usable)}, {shown(usable)}"
            raise ClaimError("; ".join([fault, *lost]))
        if wanted > len(free):
            fault = f"{place}: {count(wanted)} wanted, but only {len(free)} of its {len(usable)} are free"
        else:
            try:
                return self._arrange(demands, free)
            except _MisfitError as misfit:
                fault = misfit.told(device, "only {} free")
        try:
            self._arrange(demands, usable)
        except _MisfitError as lasting:
            raise ClaimError("; ".join([lasting.told(device, "it has only {}"), *lost])) from None
        raise ClaimPendingError("; ".join([fault, *held_by(holders(taken)), *lost]))

    def _arrange(self, demands: Sequence[_Demand], free: CpuSet) -> _Divided:
        """Place a device's demands by the first way that gives each what it needs."""
        ordered = sorted(demands, key=_full_cores_first)
        ways = [[list(block) for _, block in groupby(ordered, key=lambda demand: demand.policy)]]
        if len(demands) > 1:
            # Whole cores of a block need not be whole cores of its parts; and what one demand takes may be the only
            # type of core that another can use, or the only core of one thread.
            orders = [ordered, sorted(demands, key=_core_types_first), ordered[::-1]]
            if len(ordered) <= _MOST_PERMUTED:
                orders = [list(order) for order in permutations(ordered)]
            ways += [[[demand] for demand in order] for order in orders]
        misfits = []
        for blocks in ways:
            try:
                return self._place_blocks(blocks, free)
            except _MisfitError as misfit:
                misfits.append(misfit)
        # Rather blame a request that would fit nowhere than one that came too late.
        for demand in ordered:
            self._place_one(demand, demand.cpus, free)
        raise misfits[-1]

    def _place_blocks(self, blocks: Iterable[Sequence[_Demand]], free: CpuSet) -> _Divided:
        divided: _Divided = {}
        for block in blocks:
            rest = self._place_one(block[0], sum(demand.cpus for demand in block), free)
            free -= rest
            for demand in block[:-1]:
                divided[demand.request] = self._place_one(demand, demand.cpus, rest)
                rest -= divided[demand.request]
            divided[block[-1].request] = rest
        return divided

    def _place_one(self, demand: _Demand, cpus: int, free: CpuSet) -> CpuSet:
        try:
            return self._placer.place(free, cpus, demand.policy)
        except PlacementError as error:
            raise _MisfitError(demand.request, error) from None

    def _recognised(self, consumed: Mapping[int, Mapping[str, int]], held: CpuSet) -> Choice:
        """Divide CPUs that a claim holds already among its requests."""
        by_request: _Divided = {}
        rest = held
        for group, requests in sorted(consumed.items()):
            # Whatever is reserved by now was not when it was given out.
            own = held & CpuSet.from_array(self._model.groups[group])
            wanted = sum(requests.values())
            if len(own) != wanted:
                raise ClaimError(
                    f"device {self._model.devices[group].name}: {count(wanted)} wanted, but of the CPUs that the claim "
                    f"holds already, {shown(held)}, it has {len(own)}; expected the same, or that the claim is "
                    "unprepared first"
                )
            demands = [_Demand(request=name, cpus=cpus, policy=Policy()) for name, cpus in requests.items()]
            _add(by_request, self._place_blocks([sorted(demands, key=_full_cores_first)], own))
            rest -= own
        if rest:
            devices = [self._model.devices[group].name for group in consumed]
            raise ClaimError(
                f"{subject(rest)} held by the claim already, but of none of its devices, {names(devices)}; "
                "expected CPUs of these only, or that the claim is unprepared first"
            )
        return Choice(cpus=held, by_request=by_request)


def _policy(placement: Mapping[str, str]) -> Policy:
    chosen: dict[str, Any] = {_POLICY_FIELDS[key]: choice for key, choice in placement.items()}
    return Policy(**chosen)


def _full_cores_first(demand: _Demand) -> tuple[object, ...]:
    return (demand.policy.full_cores != "require", demand.policy.core_type == "any", *_identity(demand))


def _core_types_first(demand: _Demand) -> tuple[object, ...]:
    return (demand.policy.core_type == "any", demand.policy.full_cores != "require", *_identity(demand))


def _identity(demand: _Demand) -> tuple[object, ...]:
    """Return a key that puts equal policies side by side, larger demands first, and leaves no two equal."""
    policy = demand.policy
    return (policy.core_type, policy.numa, policy.spread, -demand.cpus, demand.request)


def _add(by_request: _Divided, more: Mapping[str, CpuSet]) -> None:
    for request, cpus in more.items():
        by_request[request] = by_request.get(request, CpuSet()) | cpus


def _requests(demands: Sequence[_Demand]) -> str:
    quoted = [f'"{demand.request}"' for demand in demands]
    return f"request {quoted[0]}" if len(quoted) == 1 else f"requests {names(quoted, 'requests')}"
