# SPDX-License-Identifier: Apache-2.0
"""Which CPUs a claim gets. An allocator only chooses: it takes nothing, and nothing that it is given changes.

`ExternalAllocator` is for claims whose CPUs somebody else chose, in the opaque parameters of the allocation. It never
adjusts a choice: what does not fit is refused, with the CPUs at fault, the group and what it holds. Only a claim that
nothing but other claims' CPUs stand in the way of is worth waiting for; whatever else is wrong with it comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from driver.claims import FROM_CLAIM, FROM_CLASS, AllocatedClaim, DeviceResult
from driver.devices import Device, DeviceModel
from driver.errors import ClaimError, ClaimPendingError
from driver.json_values import quoted
from driver.names import DRIVER_NAME, ClaimUID
from driver.parameters import parse_parameters
from fastcpu import CpuSet
from fastcpu.errors import CpuCheckError, CpuListError
from fastcpu.pool import CpuPool

__all__ = ["Allocator", "Choice", "ExternalAllocator", "Holders"]

Holders = Callable[[CpuSet], Mapping[ClaimUID, CpuSet]]
"""Says which claims hold which of some CPUs."""

_Demand = tuple[int, int]  # a group and how many CPUs of it

# The kubelet cuts an event's message at about 1,000 characters. All faults of one cpuset together stay below that.
_SHOWN_CPULIST: Final = 64
_SHOWN_NAMES: Final = 3


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

    def choose(self, claim: AllocatedClaim, holders: Holders) -> Choice:
        """Choose CPUs for a claim, without taking them.

        Parameters
        ----------
        claim : AllocatedClaim
            The claim.
        holders : callable
            Gives the claims that hold some CPUs; called only where CPUs are taken.

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
    """

    def __init__(self, model: DeviceModel, pool: CpuPool, node_name: str) -> None:
        self._model = model
        self._pool = pool
        self._node_name = node_name

    def choose(self, claim: AllocatedClaim, holders: Holders) -> Choice:
        """Check the CPUs that were chosen for a claim.

        CPUs that the claim itself holds already do not count as taken.

        Parameters
        ----------
        claim : AllocatedClaim
            The claim.
        holders : callable
            Gives the claims that hold some CPUs; called only where CPUs are taken.

        Returns
        -------
        Choice

        Raises
        ------
        ClaimPendingError
            If nothing but CPUs held by other claims stands in the way.
        ClaimError
            If the claim's results or parameters are at fault.
        """
        demands: dict[str, list[_Demand]] = {}
        for result in claim.results:
            demands.setdefault(result.request, []).append((self._device(result).group, result.cpus))
        chosen: dict[str, CpuSet] = {}
        conflicts = []
        for request, wanted in demands.items():
            cpus, conflict = self._check(claim, request, tuple(wanted), holders)
            if conflict:
                conflicts.append(conflict)
            for other, others in chosen.items():
                if not cpus.isdisjoint(others):
                    raise ClaimError(
                        f'request "{request}", cpuset {_shown(cpus)}: {_subject(cpus & others)} also in the cpuset '
                        f'of request "{other}"; expected different CPUs for each request of a claim'
                    )
            chosen[request] = cpus
        if conflicts:
            raise ClaimPendingError(conflicts[0])
        return Choice(cpus=CpuSet().union(*chosen.values()), by_request=chosen)

    def _device(self, result: DeviceResult) -> Device:
        place = f'request "{result.request}", device {result.device}'
        if result.pool != self._node_name:
            raise ClaimError(
                f'{place}: its pool is "{result.pool}"; expected "{self._node_name}", the pool of this node'
            )
        device = self._model.by_name.get(result.device)
        if device is None:
            raise ClaimError(
                f"{place}: no such device on this node, where groupBy: {self._model.group_by} "
                f"publishes {_names([device.name for device in self._model.devices])}"
            )
        if result.fault:
            raise ClaimError(f"{place}: {result.fault}")
        return device

    def _check(
        self, claim: AllocatedClaim, request: str, demands: tuple[_Demand, ...], holders: Holders
    ) -> tuple[CpuSet, str]:
        """Return a request's CPUs, and what to say if only other claims stand in the way."""
        count = claim.request_counts.get(request, 1)
        if self._model.group_by == "machine" and count != 1:
            raise ClaimError(
                f'request "{request}" has count {count}, but the machine is one device; '
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
            passing = list(_conflicts({uid: cpus for uid, cpus in held.items() if uid != claim.uid}))
            if not passing and not error.taken <= held.get(claim.uid, CpuSet()):
                passing = [f"{_subject(error.taken)} held already"]
            faults = "; ".join([*lasting, *passing, self._offer(demands)])
            message = f'request "{request}", cpuset {_shown(error.cpus)}: {faults}'
            if lasting:
                raise ClaimError(message) from None
            return error.cpus, message if passing else ""

    def _lasting_faults(self, error: CpuCheckError, demands: tuple[_Demand, ...]) -> Iterator[str]:
        wanted = sum(count for _, count in demands)
        if len(error.cpus) != wanted:
            yield f"it has {_count(error.cpus)}, but the request consumes {wanted}"
        if error.unmanaged:
            yield f"{_subject(error.unmanaged)} not online on this node, which has {_shown(self._pool.online)}"
        if error.reserved:
            yield f"{_subject(error.reserved)} reserved on this node"
        if error.outside:
            owners = [device.name for device in self._model.devices if not device.cpus.isdisjoint(error.outside)]
            where = f"of {_names(owners)}" if owners else "of no device"
            yield f"{_subject(error.outside)} {where}, not of the devices allocated to the request"
        if len(error.cpus) == wanted and not (error.unmanaged or error.reserved or error.outside):
            for group, consumed, chosen in error.miscounted:
                device = self._model.devices[group].name
                yield f"{chosen} of its CPUs are of {device}, of which the request consumes {consumed}"

    def _offer(self, demands: tuple[_Demand, ...]) -> str:
        devices = [self._model.devices[group] for group in dict.fromkeys(group for group, _ in demands)]
        offers = [f"{device.name} has CPUs {_shown(device.cpus)}" for device in devices[:_SHOWN_NAMES]]
        return ", ".join(offers) + (f" and {len(devices) - _SHOWN_NAMES} more" if len(devices) > _SHOWN_NAMES else "")


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


def _conflicts(holders: Mapping[ClaimUID, CpuSet]) -> Iterator[str]:
    shown = sorted(holders.items(), key=lambda holder: holder[1].first)
    for uid, cpus in shown[:_SHOWN_NAMES]:
        yield f"{_subject(cpus)} held by claim {uid}"
    if len(shown) > _SHOWN_NAMES:
        rest = CpuSet().union(*(cpus for _, cpus in shown[_SHOWN_NAMES:]))
        yield f"{_subject(rest)} held by {len(shown) - _SHOWN_NAMES} more claims"


def _shown(cpus: CpuSet) -> str:
    for text in (str(cpus), cpus.strided()):
        if len(text) <= _SHOWN_CPULIST:
            return text
    beginning = str(cpus)[: _SHOWN_CPULIST + 1].rpartition(",")[0]
    return f"{beginning},… ({_count(cpus)})"


def _count(cpus: CpuSet) -> str:
    return "1 CPU" if len(cpus) == 1 else f"{len(cpus)} CPUs"


def _subject(cpus: CpuSet) -> str:
    return f"CPU {cpus.first} is" if len(cpus) == 1 else f"CPUs {_shown(cpus)} are"


def _names(names: Sequence[str]) -> str:
    if len(names) <= _SHOWN_NAMES:
        return ", ".join(names) or "none"
    return f"{names[0]} … {names[-1]} ({len(names)} devices)"
