# SPDX-License-Identifier: Apache-2.0
"""A ResourceClaim with an allocation, as the API server sends it."""

from __future__ import annotations

from driver.names import ClaimUID

UID = ClaimUID("8a6f0d4e-6d0b-4c53-9f3c-0f6a1f1f2b11")


def raw_claim(parameters: object) -> dict[str, object]:
    return {
        "metadata": {"name": "claim", "namespace": "default", "uid": UID, "generation": 1},
        "spec": {"devices": {"requests": [{"name": "cpus", "exactly": {"deviceClassName": "dra.cpu"}}]}},
        "status": {
            "allocation": {
                "devices": {
                    "results": [
                        {
                            "request": "cpus",
                            "driver": "dra.cpu",
                            "pool": "node",
                            "device": "cpudevsocket000",
                            "consumedCapacity": {"dra.cpu/cpu": "4"},
                        }
                    ],
                    "config": [
                        {
                            "source": "FromClaim",
                            "requests": ["cpus"],
                            "opaque": {"driver": "dra.cpu", "parameters": parameters},
                        }
                    ],
                }
            }
        },
    }


def with_cpuset(cpuset: str) -> dict[str, object]:
    return {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": cpuset}}
