# SPDX-License-Identifier: Apache-2.0
"""Pods that an observer can tell apart, and that start and end as quickly as pods can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from e2e.cluster.api import CLAIMS, PODS, JsonObject
from e2e.cluster.cluster import Cluster
from e2e.cluster.manifests import claim, cpuset_config, pod

# The claim of a process, empty if it has none, as whoever looks at it from outside reads it in its environment.
CLAIM_VARIABLE = "E2E_CLAIM"

# A first process ends when it is asked to only if it says so.
_UNTIL_TOLD = ("/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait")


def observed_pod(
    name: str,
    of_claim: str = "",
    *,
    containers: Sequence[str] = ("main",),
    command: Sequence[str] = _UNTIL_TOLD,
    restart: str = "Always",
) -> JsonObject:
    """Return a pod whose containers all use one claim, or none."""
    body = pod(name, *([of_claim] if of_claim else []), containers=containers, command=command)
    spec = body["spec"]
    spec["restartPolicy"] = restart
    # Nothing that is tested needs a network or a token, which take a pod longer than all else.
    spec |= {"hostNetwork": True, "automountServiceAccountToken": False, "enableServiceLinks": False}
    for container in spec["containers"]:
        container["env"] = [{"name": CLAIM_VARIABLE, "value": of_claim}]
    return body


async def create_claim(cluster: Cluster, name: str, cpuset: str) -> JsonObject:
    """Create a claim that names the one CPU that it wants, or none if the driver is to choose, and return it."""
    config = {"config": [cpuset_config(cpuset)]} if cpuset else {}
    return await cluster.api.create(CLAIMS, claim(name, **config))


async def create_pod(cluster: Cluster, name: str, of_claim: str = "", **how: Any) -> JsonObject:
    """Create such a pod, and return it."""
    return await cluster.api.create(PODS, observed_pod(name, of_claim, **how))
