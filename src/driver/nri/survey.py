# SPDX-License-Identifier: Apache-2.0
"""What a runtime tells of all that lives when the driver connects, in parts: of each no more than is needed.

A node's environments may be hundreds of megabytes. They are looked at as they come, and only what speaks of claims here
is kept. What is kept is bounded all the same, and so are parts that tell nothing new: a runtime with NRI 0.12 whose
pods are too few to be halved sends empty ones without end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.nri import messages
from driver.nri.decisions import Request
from driver.nri.errors import Code, NriError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from driver.nri.container import Phase, Pod
    from driver.nri.evidence import Evidence, HeldClaims
    from fastcpu import CpuSet

MOST_KEPT_BYTES: Final = 64 << 20
"""So much is kept of all pods and containers, some 50,000 of them."""
MOST_IDLE_PARTS: Final = 64
"""So many parts may tell nothing new."""

# What the objects themselves take, and each claim of one.
_POD_BYTES: Final = 400
_CONTAINER_BYTES: Final = 1000
_CLAIM_BYTES: Final = 200
_MOST_LISTS: Final = 64


@dataclass(slots=True, kw_only=True)
class Found:
    """A container that lives, as the runtime tells it.

    Attributes
    ----------
    id, name, sandbox : str
        Its id, its name for people, and the id of its pod's sandbox.
    phase : Phase
        How far it has come.
    cpus : CpuSet or None
        The CPUs that the runtime says it has; None if it has no restriction.
    created_at : int
        When it was created, where the runtime tells it; else 0.
    cgroups_path : str
        Where its cgroup is, as the runtime tells it; empty if it does not, or says nonsense.
    evidence : Evidence
        What about it speaks of claims.
    """

    id: str
    name: str
    sandbox: str
    phase: Phase
    cpus: CpuSet | None
    created_at: int
    cgroups_path: str
    evidence: Evidence

    def request(self, pod: Pod) -> Request:
        """Return what decides about it."""
        return Request(name=self.name, pod=pod, evidence=self.evidence)


class Survey:
    """All pods and containers of one synchronisation.

    Parameters
    ----------
    held : HeldClaims
        The claims.
    started_at : float
        When its first part came, in seconds of the enforcement's clock.

    Attributes
    ----------
    held, started_at
        As above.
    containers : list of Found
        The containers that live.
    """

    def __init__(self, held: HeldClaims, started_at: float) -> None:
        self.held = held
        self.started_at = started_at
        self._pods: dict[str, Pod] = {}
        self._found: dict[str, Found] = {}
        self._lists: dict[str, CpuSet | None] = {}
        self._kept_bytes = 0
        self._idle_parts = 0

    @property
    def containers(self) -> list[Found]:
        """The containers that live, each once."""
        return list(self._found.values())

    def pod(self, found: Found) -> Pod:
        """Return a container's pod; it may have come in another part."""
        return self._pods.get(found.sandbox) or messages.unknown_pod(found.sandbox)

    def add(self, pods: Iterable[nri.PodSandbox], containers: Iterable[nri.Container]) -> None:
        """Take what a part tells.

        Raises
        ------
        NriError
            If it is too much, or too often nothing.
        """
        before = len(self._pods) + len(self._found)
        for sandbox in pods:
            pod = messages.read_pod(sandbox)
            self._pods[pod.sandbox] = pod
            self._keep(_POD_BYTES + len(pod.sandbox) + len(pod.uid) + len(pod.namespace) + len(pod.name))
        for container in containers:
            if container.state != nri.CONTAINER_STOPPED:
                found = self.read(container)
                self._found[found.id] = found
                claims = len(found.evidence.variables) + len(found.evidence.marked)
                self._keep(
                    _CONTAINER_BYTES
                    + len(found.id)
                    + len(found.sandbox)
                    + len(found.cgroups_path)
                    + _CLAIM_BYTES * claims
                )
        if len(self._pods) + len(self._found) == before:
            self._idle_parts += 1
            if self._idle_parts > MOST_IDLE_PARTS:
                raise NriError(
                    Code.RESOURCE_EXHAUSTED,
                    f"{self._idle_parts} parts of the synchronisation have told of no new pod or container; expected "
                    f"at most {MOST_IDLE_PARTS}",
                )

    def read(self, container: nri.Container) -> Found:
        """Read what is needed of a container."""
        return Found(
            id=container.id,
            name=messages.container_name(container),
            sandbox=container.pod_sandbox_id,
            phase=messages.read_phase(container),
            cpus=self._read_cpus(container),
            created_at=container.created_at,
            cgroups_path=messages.read_cgroups_path(container),
            evidence=messages.container_evidence(container, self.held),
        )

    def _read_cpus(self, container: nri.Container) -> CpuSet | None:
        text = container.linux.resources.cpu.cpus
        if text in self._lists:
            return self._lists[text]
        cpus = messages.read_cpulist(text, self.held.limit)
        # Most containers have the same list, and others may be long.
        if len(self._lists) < _MOST_LISTS:
            self._lists[text[: self.held.longest_list + 1]] = cpus
        return cpus

    def _keep(self, n_bytes: int) -> None:
        self._kept_bytes += n_bytes
        if self._kept_bytes > MOST_KEPT_BYTES:
            raise NriError(
                Code.RESOURCE_EXHAUSTED,
                f"the runtime tells of {len(self._pods)} pods and {len(self._found)} containers; expected at most as "
                f"many as can be kept in {MOST_KEPT_BYTES >> 20} MiB",
            )
