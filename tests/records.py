# SPDX-License-Identifier: Apache-2.0
"""Prepared claims, for tests and for what is measured with them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from driver.ledger import PreparedDevice, Record
from driver.names import ClaimUID
from fastcpu import CpuSet


def make_record(uid: str, cpulist: str = "2-5", **changes: object) -> Record:
    """Return the record of a claim with one request, which has these CPUs."""
    cpus = CpuSet.parse(cpulist)
    device = PreparedDevice(request="cpus", pool="node-1", device="cpudevnuma000", share_id=None, cpus=len(cpus))
    record = Record(
        uid=ClaimUID(uid),
        namespace="default",
        name=f"claim-{uid}",
        pod_claim_name=None,
        generation=1,
        cpus=cpus,
        by_request={"cpus": cpus},
        devices=(device,),
        fingerprint="0" * 64,
        adopted=False,
        prepared_at=datetime(2026, 11, 29, 12, 30, tzinfo=UTC),
    )
    return replace(record, **changes)
