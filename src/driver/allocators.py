# SPDX-License-Identifier: Apache-2.0
"""Which CPUs a claim gets. An allocator only chooses: it takes nothing, and nothing that it is given changes.

`ExternalAllocator` is for claims whose CPUs somebody else chose, in the opaque parameters of the allocation. It never
adjusts a choice: what does not fit is refused, with the CPUs at fault, the group and what it holds. Only a claim that
nothing but other claims' CPUs stand in the way of is worth waiting for; whatever else is wrong with it comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from driver.claims import FROM_CLAIM, FROM_CLASS, AllocatedClaim, DeviceResult
from driver.devices import INDIVIDUAL, Device, DeviceModel
from driver.errors import ClaimError, ClaimPendingError
from driver.json_values import quoted
from driver.names import DRIVER_NAME, ClaimUID
from driver.parameters import parse_parameters
from driver.podlimit import PodLimit
from driver.wording import SHOWN_NAMES, count, held_by, names, shown, subject
from fastcpu import CpuSet
from fastcpu.errors import CpuCheckError, CpuListError
from fastcpu.pool import CpuPool

__all__ = ["Allocator", "Choice", "ExternalAllocator", "Holders", "find_device"]

Holders = Callable[[CpuSet], Mapping[ClaimUID, CpuSet]]
"""Says which claims hold which of some CPUs."""

_Demand = tuple[int, int]  # a group and how many CPUs of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The CPUs that a claim is to get.

    Attributes
    ----------
    cpus : CpuSet
        All of them.
    by_request : mapping of str to CpuSet
        The CPUs of each request, as `DeviceResult.request` names it; no two share one.
    """

    cpus: CpuSet
    by_request: Mapping[str, CpuSet]


class Allocator(Protocol):
    """What chooses the CPUs of a claim."""

    def choose(self, claim: AllocatedClaim, holders: Holders, held: CpuSet | None = None) -> Choice:
        """Choose CPUs for a claim, without taking them.

        Parameters
        ----------
        claim : AllocatedClaim
            The claim.
        holders : callable
            Gives the claims that hold some CPUs; called only where CPUs are taken.
        held : CpuSet, optional
            The CPUs that the claim holds already. Who is free to choose chooses these, if they are what the claim asks
            for; the caller checks that they are what was chosen.

        Returns
        -------
        Choice

        Raises
        ------
        ClaimPendingError
            If nothing but CPUs held by other claims stands in the way.
        ClaimError
            If the claim cannot get CPUs as it is.
        """
        ...


def find_device(model: DeviceModel, node_name: str, result: DeviceResult) -> Device:
    """Return the device that an allocation result names.

    Parameters
    ----------
    model : DeviceModel
        The node's devices.
    node_name : str
        Name of the node, which is the name of its resource pool.
    result : DeviceResult
        The result.

    Raises
    ------
    ClaimError
        If it names another node's pool, or no device of this node.
    """
    place = f'request "{result.request}", device {result.device}'
    if result.pool != node_name:
        raise ClaimError(f'{place}: its pool is "{result.pool}"; expected "{node_name}", the pool of this node')
    device = model.by_name.get(result.device)
    if device is None:
        how = "cpuDeviceMode: individual" if model.group_by == INDIVIDUAL else f"groupBy: {model.group_by}"
        raise ClaimError(
            f"{place}: no such device on this node, where {how} "
            f"publishes {names([device.name for device in model.devices])}"
        )
    return device


class ExternalAllocator:
    """Reads each request's CPUs from the claim's opaque parameters and checks them.

    Parameters
    ----------
    model : DeviceModel
        The node's devices.
    pool : CpuPool
        The node's CPUs; its groups are those of the model.
    node_name : str
        Name of the node, which is the name of its resource pool.
    limit : PodLimit, optional
        The CPUs that no pod can use.
    """

    def __init__(self, model: DeviceModel, pool: CpuPool, node_name: str, limit: PodLimit | None = None) -> None:
        self._model = model
        self._pool = pool
        self._node_name = node_name
        self._limit = PodLimit() if limit is None else limit

    def choose(self, claim: AllocatedClaim, holders: Holders, held: CpuSet | None = None) -> Choice:
        """Check the CPUs that were chosen for a claim; see `Allocator.choose`.

        CPUs that the claim itself holds already do not count as taken, and change nothing in what was chosen for it.
        """
        demands: dict[str, list[_Demand]] = {}
        for result in claim.results:
            device = find_device(self._model, self._node_name, result)
            if result.fault:
                raise ClaimError(f'request "{result.request}", device {result.device}: {result.fault}')
            demands.setdefault(result.request, []).append((device.group, result.cpus))
        chosen: dict[str, CpuSet] = {}
        conflicts = []
        for request, wanted in demands.items():
            cpus, conflict = self._check(claim, request, tuple(wanted), holders)
            if conflict:
                conflicts.append(conflict)
            for other, others in chosen.items():
                if not cpus.isdisjoint(others):
                    raise ClaimError(
                        f'request "{request}", cpuset {shown(cpus)}: {subject(cpus & others)} also in the cpuset '
                        f'of request "{other}"; expected different CPUs for each request of a claim'
                    )
            chosen[request] = cpus
        if conflicts:
            raise ClaimPendingError(conflicts[0])
        return Choice(cpus=CpuSet().union(*chosen.values()), by_request=chosen)

    def _check(
        self, claim: AllocatedClaim, request: str, demands: tuple[_Demand, ...], holders: Holders
    ) -> tuple[CpuSet, str]:
        """Return a request's CPUs, and what to say if only other claims stand in the way."""
        devices = claim.request_counts.get(request, 1)
        if self._model.group_by == "machine" and devices != 1:
            raise ClaimError(
                f'request "{request}" has count {devices}, but the machine is one device; '
                "expected count 1, and a request of its own for each further cpuset"
            )
        cpulist = _cpulist(claim, request)
        try:
            return self._pool.check(cpulist, demands), ""
        except CpuListError as error:
            raise ClaimError(
                f'request "{request}": cpuConfig.cpuset {quoted(error.text)} cannot be read, '
                f"character {error.position + 1}: {error.reason}"
            ) from None
        except CpuCheckError as error:
            lasting = list(self._lasting_faults(error, demands))
            # A claim may hold its CPUs before this check: an adopted one is checked when it is prepared again.
            held = holders(error.taken)
            passing = list(held_by({uid: cpus for uid, cpus in held.items() if uid != claim.uid}))
            if not passing and not error.taken <= held.get(claim.uid, CpuSet()):
                passing = [f"{subject(error.taken)} held already"]
            faults = "; ".join([*lasting, *passing, self._offer(demands)])
            message = f'request "{request}", cpuset {shown(error.cpus)}: {faults}'
            if lasting:
                raise ClaimError(message) from None
            return error.cpus, message if passing else ""

    def _lasting_faults(self, error: CpuCheckError, demands: tuple[_Demand, ...]) -> Iterator[str]:
        wanted = sum(cpus for _, cpus in demands)
        if len(error.cpus) != wanted:
            yield f"it has {count(len(error.cpus))}, but the request consumes {wanted}"
        if error.unmanaged:
            yield from self._limit.faults(error.unmanaged, self._pool)
        if error.reserved:
            yield f"{subject(error.reserved)} reserved on this node"
        if error.outside:
            owners = [device.name for device in self._model.devices if not device.cpus.isdisjoint(error.outside)]
            where = f"of {names(owners)}" if owners else "of no device"
            yield f"{subject(error.outside)} {where}, not of the devices allocated to the request"
        if len(error.cpus) == wanted and not (error.unmanaged or error.reserved or error.outside):
            for group, consumed, chosen in error.miscounted:
                device = self._model.devices[group].name
                yield f"{chosen} of its CPUs are of {device}, of which the request consumes {consumed}"

    def _offer(self, demands: tuple[_Demand, ...]) -> str:
        devices = [self._model.devices[group] for group in dict.fromkeys(group for group, _ in demands)]
        offers = [f"{device.name} has CPUs {shown(device.cpus)}" for device in devices[:SHOWN_NAMES]]
        return ", ".join(offers) + (f" and {len(devices) - SHOWN_NAMES} more" if len(devices) > SHOWN_NAMES else "")


def _cpulist(claim: AllocatedClaim, request: str) -> str:
    configs = [config for config in claim.configs if config.applies_to(request)]
    if any(config.source == FROM_CLASS for config in configs):
        raise ClaimError(
            f'request "{request}": a DeviceClass configures it, which would give the same CPUs to every claim; '
            f"expected a cpuset only in the claim itself ({FROM_CLAIM})"
        )
    if len(configs) != 1:
        raise ClaimError(
            f'request "{request}": {len(configs)} configurations for {DRIVER_NAME} apply to it; '
            "expected exactly one, with its cpuset, in status.allocation.devices.config"
        )
    try:
        cpuset = parse_parameters(configs[0].parameters).cpuset
    except ClaimError as error:
        raise ClaimError(f'request "{request}": {error}') from None
    if cpuset is None:
        raise ClaimError(
            f'request "{request}": cpuConfig.cpuset is missing; expected CPUs such as "2-5", '
            "since with allocator: external the driver chooses none"
        )
    return cpuset
