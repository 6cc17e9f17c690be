# SPDX-License-Identifier: Apache-2.0
"""Prepared claims, for what is measured with them."""

from __future__ import annotations

from datetime import UTC, datetime

from driver.ledger import PreparedDevice, Record
from driver.names import ClaimUID
from fastcpu import CpuSet


def record(uid: ClaimUID, cpus: CpuSet, name: str = "claim") -> Record:
    """Return the record of a claim with one request, which has these CPUs."""
    device = PreparedDevice(request="r", pool="node", device="cpudevsocket000", share_id=None, cpus=len(cpus))
    return Record(
        uid=uid,
        namespace="default",
        name=name,
        pod_claim_name=None,
        generation=1,
        cpus=cpus,
        by_request={"r": cpus},
        devices=(device,),
        fingerprint="0" * 64,
        adopted=False,
        prepared_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
