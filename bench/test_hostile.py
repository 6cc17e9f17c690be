# SPDX-License-Identifier: Apache-2.0
"""What a container costs that is written to be expensive, beside a plain one of as many bytes.

From the bytes of the request to those of the answer, or to the refusal. The runtime does nothing else meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest

import cases
import hostile
from driver.apis import nri_v1alpha1_pb2 as nri
from driver.ledger import Ledger
from driver.metrics import Metrics
from driver.nri.enforcement import Enforcement
from driver.nri.errors import Refusal
from driver.nri.plugin import RuntimePlugin
from driver.nri.reservations import Reservations
from driver.nri.sharedpool import SharedPool
from fastcpu import CpuSet
from kernel_model import NoCgroups
from records import make_record

CHAPTER = "A hostile container, request to answer"
N_CPUS = 1024
UID = "0c5a1cb4-6c6e-4c0e-9f0c-5d1c7f3f9a11"
CPUS = "2-1001:1/3"
SIZES = (3_000, 120_000, 1_000_000)
POD = nri.PodSandbox(id="s", uid="u", name="p", namespace="n")


class NoClaims:
    async def get_claim(self, namespace: str, name: str) -> dict[str, object]:
        raise AssertionError("nobody is asked about a container that is refused")


@pytest.fixture
def plugin() -> Iterator[RuntimePlugin]:
    # Each refusal is a line in the log, whatever was refused.
    logging.disable(logging.ERROR)
    ledger = Ledger(cases.pool(N_CPUS))
    ledger.hold(make_record(UID, CPUS))
    enforcement = Enforcement(ledger, SharedPool(ledger, CpuSet()), Reservations(NoClaims()))
    plugin = RuntimePlugin(enforcement, Metrics(), cgroups=NoCgroups(), start_guard=True)
    plugin.connected("containerd", "v2.4.2", "v0.12.3", 2.0)
    yield plugin
    logging.disable(logging.NOTSET)


def attacks(n_bytes: int) -> list[hostile.Attack]:
    return [*hostile.long_environments(UID, CPUS, n_bytes), *hostile.many_variables(UID, CPUS, n_bytes)]


@pytest.mark.parametrize("n_bytes", SIZES)
@pytest.mark.parametrize("number", range(len(attacks(1000))))
@pytest.mark.parametrize("contender", ["dracpu", "plain"])
def test_create_container(entry, plugin, loop, contender, number, n_bytes):
    attack = attacks(n_bytes)[number]
    made = (attack if contender == "dracpu" else attack.plain()).container("1", "s")
    request = nri.CreateContainerRequest(pod=POD, container=made).SerializeToString()
    benchmark = entry(CHAPTER, f"CreateContainer, {attack.name}", contender, n=n_bytes, unit="bytes")

    async def create() -> bytes:
        message = nri.CreateContainerRequest.FromString(request)
        with suppress(Refusal):
            adjust, _ = await plugin.create_container(message.pod, message.container)
            return adjust.linux.resources.cpu.cpus
        return ""

    assert benchmark(lambda: loop.run_until_complete(create())) in ("", str(plugin._enforcement.pool.cpus))
