# SPDX-License-Identifier: Apache-2.0
"""The containers of one pod in the box's runtime, as a kubelet has them created."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.sandbox.apistatus import JsonObject
from driver.sandbox.plugins import PreparedDevice
from driver.sandbox.runtime import ContainerRuntime


class PodContainers:
    """One pod's sandbox and containers.

    Parameters
    ----------
    runtime : ContainerRuntime
    pod : dict
        The pod, as the API server has it.
    """

    def __init__(self, runtime: ContainerRuntime, pod: JsonObject) -> None:
        self._runtime = runtime
        self._pod = pod
        self._sandbox = ""
        self._begun: set[str] = set()

    async def start(self, devices: Mapping[str, Sequence[PreparedDevice]]) -> None:
        """Start all containers that have not been started yet; an init container ends as soon as it runs.

        Parameters
        ----------
        devices : mapping of str to sequence of PreparedDevice
            The prepared devices of each of the pod's claims, by the pod's own name for the claim.

        Raises
        ------
        RefusedError
            If the runtime does not start one. Those before it run.
        """
        metadata, spec = self._pod["metadata"], self._pod["spec"]
        if not self._sandbox:
            sandbox = nri.PodSandbox(
                id=secrets.token_hex(32),
                name=metadata["name"],
                namespace=metadata["namespace"],
                uid=metadata["uid"],
                labels=metadata.get("labels"),
                annotations=metadata.get("annotations"),
            )
            await self._runtime.run_pod(sandbox)
            self._sandbox = sandbox.id
        for container in spec.get("initContainers") or ():
            identity = await self._start(container, devices)
            if identity and container.get("restartPolicy") != "Always":
                await self._runtime.remove_container(identity)
        for container in spec.get("containers") or ():
            await self._start(container, devices)

    async def remove(self) -> None:
        """Remove all of it."""
        if self._sandbox:
            await self._runtime.remove_pod(self._sandbox)

    async def _start(self, container: JsonObject, devices: Mapping[str, Sequence[PreparedDevice]]) -> str:
        """Start a container and return its id, which is empty if it was started before."""
        name = container["name"]
        if name in self._begun:
            return ""
        identity = await self._runtime.run_container(
            self._sandbox,
            name,
            env={variable["name"]: variable.get("value", "") for variable in container.get("env") or ()},
            cdi_devices=_cdi_devices(container, devices),
        )
        self._begun.add(name)
        return identity


def _cdi_devices(container: JsonObject, devices: Mapping[str, Sequence[PreparedDevice]]) -> list[str]:
    """Return the CDI devices of what a container refers to in ``resources.claims``, each once."""
    found: dict[str, None] = {}
    for reference in (container.get("resources") or {}).get("claims") or ():
        request = reference.get("request")
        for device in devices.get(reference["name"], ()):
            if not request or request in device.request_names:
                found |= dict.fromkeys(device.cdi_ids)
    return list(found)
