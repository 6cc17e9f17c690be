# SPDX-License-Identifier: Apache-2.0
"""The box's container runtime, as tests of what connects to it start it."""

from __future__ import annotations

from pathlib import Path

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.sandbox.nriplugin import RuntimeTraits
from driver.sandbox.runtime import ContainerRuntime, RefusedError

__all__ = ["NriRuntime", "RefusedError"]


class NriRuntime(ContainerRuntime):
    """A runtime with some `RuntimeTraits`."""

    def __init__(self, socket_path: Path, **traits: object) -> None:
        super().__init__(socket_path, traits=RuntimeTraits(**traits))

    async def run_pod(self, pod: nri.PodSandbox) -> None:
        """Have a pod of which no plugin is told."""
        self.pods[pod.id] = pod
