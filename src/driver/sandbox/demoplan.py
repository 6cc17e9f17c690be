# SPDX-License-Identifier: Apache-2.0
"""Which CPUs the demo asks for on the machine that it finds."""

from __future__ import annotations

from dataclasses import dataclass

from driver.sandbox.offers import Offer, example_cpus
from fastcpu.cpuset import CpuSet
from fastcpu.topology import Topology


class UnexpectedError(Exception):
    """Something did not go as it should have; the text says what differed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which CPUs the demo asks for, chosen to fit the machine.

    Attributes
    ----------
    offer : Offer
        The device that the claims are allocated from.
    example : CpuSet
        For the claim that is prepared.
    overlapping : CpuSet
        As many CPUs, some of them the example's.
    foreign, reserved : CpuSet
        CPUs among which one is of no use: not of the device, or reserved. The latter is empty if none is reserved.
    neighbour : tuple of Offer and CpuSet, or None
        Half of the last device for a second claim, if there is another device.
    """

    offer: Offer
    example: CpuSet
    overlapping: CpuSet
    foreign: CpuSet
    reserved: CpuSet
    neighbour: tuple[Offer, CpuSet] | None

    @classmethod
    def for_offers(cls, offers: list[Offer], topology: Topology, reserved: CpuSet) -> Plan:
        """Choose CPUs of the first device that tells its CPUs.

        Raises
        ------
        UnexpectedError
            If no device tells its CPUs.
        """
        telling = [offer for offer in offers if offer.cpus]
        if not telling:
            raise UnexpectedError("no published device tells its CPUs in dra.cpu/cpuIDs or dra.cpu/cpuIDsStrided")
        offer, last = telling[0], telling[-1]
        example = example_cpus(offer)
        upper_half = list(example)[len(example) // 2 :]
        others = offer.cpus - example
        above = [cpu for cpu in others if cpu > upper_half[-1]]
        useless = max(last.cpus) if last is not offer else max(topology.possible) + 1
        reserved_here = reserved & topology.online
        return cls(
            offer=offer,
            example=example,
            overlapping=CpuSet([*upper_half, *above, *others, *example][: len(example)]),
            foreign=others[:1] | CpuSet((useless,)),
            reserved=reserved_here[:1] | others[:1] if reserved_here else CpuSet(),
            neighbour=(last, last.cpus[: (len(last.cpus) + 1) // 2]) if last is not offer else None,
        )
