# SPDX-License-Identifier: Apache-2.0
"""The driver of the chart's release, seen from outside: its pod and process, its figures, and its files on the node."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from driver.names import CDI_KIND, DRIVER_NAME
from e2e import endpoints, kernel
from e2e.cluster.api import JsonObject
from e2e.cluster.cluster import NAMESPACE, Cluster

# The chart gives it to the driver, and nothing else here has it.
VARIABLE = b"NODE_NAME="

_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class Deployment:
    """The driver of a chart's release in a cluster.

    Parameters
    ----------
    cluster : Cluster
    release : str
        The release's name.
    """

    def __init__(self, cluster: Cluster, release: str = "dracpu") -> None:
        self._cluster = cluster
        self._release = release
        self._cgroups = kernel.cgroups(cluster.node.containerd.cgroup_parent)

    def processes(self) -> dict[str, int]:
        """Return the first process of each container that runs the driver, as the kernel knows them."""
        found: dict[str, int] = {}
        for pid, cgroup in kernel.processes(self._cgroups):
            # It may end while it is looked at.
            with suppress(OSError):
                if VARIABLE in Path(f"/proc/{pid}/environ").read_bytes():
                    found.setdefault(cgroup.name, pid)
        return found

    @property
    def pid(self) -> int:
        """The driver's one process."""
        [pid] = self.processes().values()
        return pid

    def kill9(self) -> None:
        """Kill the driver without a warning, if it runs."""
        for pid in self.processes().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def waits(self) -> bool:
        """Tell whether the kubelet lets some time pass before it starts the driver again."""
        selector = f"app.kubernetes.io/instance={self._release}"
        pods = await self._cluster.api.list(_PODS, labelSelector=selector)
        statuses = [status for pod in pods for status in pod["status"].get("containerStatuses", ())]
        return any(status["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff" for status in statuses)

    def resident_bytes(self) -> tuple[int, int]:
        """Return the driver's one process, and the memory that it occupies now."""
        pid = self.pid
        return pid, kernel.resident_bytes(pid)

    async def wait_ready(self) -> None:
        """Wait until the driver says that it is ready."""
        await self._cluster.until(self._is_ready, "the driver is ready")

    async def wait_not_ready(self) -> None:
        """Wait until the driver says that something is missing, or says nothing."""

        async def missing() -> bool:
            return not await self._is_ready()

        await self._cluster.until(missing, "the driver is not ready")

    async def metrics(self) -> dict[str, float]:
        """Return all metrics by name and labels as they are written, without their common prefix."""
        return await endpoints.metrics(self._cluster.deployed_url)

    async def _is_ready(self) -> bool:
        return await endpoints.is_ready(self._cluster.deployed_url)

    # What it has on the node

    @property
    def folder(self) -> Path:
        """Its folder below the kubelet's."""
        return self._cluster.node.kubelet_root / "plugins" / DRIVER_NAME

    def records(self) -> dict[str, JsonObject]:
        """Return the records of prepared claims, by UID."""
        return {path.stem: json.loads(path.read_bytes()) for path in (self.folder / "claims").glob("*.json")}

    def specs(self) -> dict[str, JsonObject]:
        """Return the CDI specs of claims, by file name."""
        found = {path.name: json.loads(path.read_bytes()) for path in self._cluster.node.cdi_dir.glob("*.json")}
        return {name: spec for name, spec in found.items() if spec["kind"] == CDI_KIND}

    def claim_files(self) -> list[str]:
        """Return all files that are there because of claims: records, CDI specs, metadata."""
        cdi_dir = self._cluster.node.cdi_dir
        folders = (self.folder / "claims", self.folder / "dra-device-metadata", cdi_dir)
        return sorted(str(path) for folder in folders for path in folder.rglob("*") if path.is_file())
