# SPDX-License-Identifier: Apache-2.0
"""A one-node Kubernetes of the real programs, and the driver in it: as users deploy it, or as a process."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from driver.names import DRIVER_NAME
from driver.sandbox.driverprocess import DriverProcess
from e2e import kernel, programs, scratch, waiting
from e2e.cluster.api import CLAIMS, EVENTS, PODS, SLICES, Api, JsonObject
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.node import KubernetesNode
from e2e.cluster.ports import free_ports
from e2e.command import call
from e2e.endpoints import is_ready

NODE_NAME = "node-1"
RELEASE = "dracpu"
NAMESPACE = "kube-system"

# The kubelet repeats what has failed after a minute or more.
PATIENCE_S = 150.0

_SHOWN_LOG_LINES = 30

_ROOT = Path(__file__).parents[3]
CHART = _ROOT / "deploy" / "helm" / "dracpu"
_MAKE_IMAGE = _ROOT / "deploy" / "image"


class Cluster:
    """A cluster.

    Attributes
    ----------
    folder : Path
        Holds all of it.
    control_plane : ControlPlane
    node : KubernetesNode
    api : Api
    driver : DriverProcess
        The latest one that was started as a process.
    deployed_url, driver_url : str
        Where the driver of the chart, and one that is a process, serve metrics and how they are.
    """

    def __init__(self, folder: Path, control_plane: ControlPlane, node: KubernetesNode, api: Api) -> None:
        self.folder = folder
        self.control_plane = control_plane
        self.node = node
        self.api = api
        self.driver: DriverProcess
        deployed, process = free_ports(2)
        self.deployed_url, self.driver_url = f"http://127.0.0.1:{deployed}", f"http://127.0.0.1:{process}"
        self.kubectl = control_plane.kubectl
        self._starts = itertools.count(1)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, feature_gates: str = "", say: Callable[[str], None] = lambda line: None
    ) -> AsyncIterator[Cluster]:
        """Start a cluster without a driver, and leave nothing behind."""
        kubernetes = await asyncio.to_thread(programs.build, programs.KUBERNETES)
        containerd = await asyncio.to_thread(programs.build, programs.CONTAINERD)
        folder = scratch.new_folder()
        try:
            parts = folder / "control-plane", folder / "node"
            for part in parts:
                part.mkdir()
            async with (
                ControlPlane(kubernetes, folder=parts[0], feature_gates=feature_gates, say=say) as control_plane,
                KubernetesNode(control_plane, containerd, NODE_NAME, folder=parts[1], say=say) as node,
                Api(control_plane.url, control_plane.admin_tls) as api,
            ):
                yield cls(folder, control_plane, node, api)
        finally:
            await asyncio.to_thread(scratch.remove, folder)

    # The driver as users deploy it

    async def helm(self, *arguments: str, input: str | None = None) -> str:
        """Call helm as the admin, and return what it prints.

        Raises
        ------
        RuntimeError
            If it fails; the text has what it says.
        """
        helm = await asyncio.to_thread(programs.build, programs.HELM)
        homes = {f"HELM_{kind}_HOME": str(self.folder / "helm") for kind in ("CACHE", "CONFIG", "DATA")}
        command = (helm / "helm", f"--kubeconfig={self.control_plane.admin}")
        environment = {"HOME": str(self.folder), **homes, **scratch.mark(self.folder)}
        return await call(command, arguments, input=input, environment=environment)

    async def import_image(self, archive: Path) -> None:
        """Make an image known to the node."""
        await self.node.containerd.import_image(archive)

    async def import_driver_image(self) -> None:
        """Build the driver's image, unless it is kept from before, and make it known to the node."""
        process = await asyncio.create_subprocess_exec(_MAKE_IMAGE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"{_MAKE_IMAGE} ended with status {process.returncode}")
        await self.import_image(Path(output.decode().strip()))

    async def install_chart(self, values: Mapping[str, Any], *arguments: str) -> None:
        """Install or upgrade the driver's chart, and wait until its pod is ready.

        Parameters
        ----------
        values : mapping of str to object
            Beside those that say where things are on this node.
        *arguments : str
            Further ones for helm.
        """
        await self.helm(
            *("upgrade", "--install", RELEASE, str(CHART), f"--namespace={NAMESPACE}", "--values=-", *arguments),
            input=yaml.safe_dump({**self.chart_values(), **values}),
        )
        await self.wait_rolled_out()

    def chart_values(self) -> dict[str, Any]:
        """Return the values that say where things are on this node."""
        return {
            "image": {"pullPolicy": "Never"},
            "healthzPort": int(self.deployed_url.rpartition(":")[2]),
            "kubeletRootDir": str(self.node.kubelet_root),
            "cdiDir": str(self.node.cdi_dir),
            "nriSocketDir": str(self.node.nri_socket.parent),
        }

    async def wait_rolled_out(self) -> None:
        """Wait until the DaemonSet's pod is the latest, and ready."""
        timeout = f"--timeout={PATIENCE_S:g}s"
        await self.kubectl("rollout", "status", f"--namespace={NAMESPACE}", f"daemonset/{RELEASE}", timeout)

    async def uninstall_chart(self) -> None:
        """Remove the chart's release, and wait until the driver's pod is gone."""
        await self.helm("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--ignore-not-found")
        label = f"--selector=app.kubernetes.io/instance={RELEASE}"
        await self.kubectl("wait", "--for=delete", "pod", f"--namespace={NAMESPACE}", label, "--timeout=60s")

    async def driver_log(self) -> str:
        """Return what the driver's pod has written."""
        return await self.kubectl("logs", f"--namespace={NAMESPACE}", f"daemonset/{RELEASE}", "--tail=-1")

    # The driver as a process of the tests

    async def start_driver(
        self, settings: Mapping[str, object], *flags: str, kubeconfig: Path | None = None
    ) -> DriverProcess:
        """Start the driver on the node, as the admin or somebody else, and do not wait for anything."""
        config = self.folder / "driver.yaml"
        config.write_text(yaml.safe_dump({"hostnameOverride": self.node.name, **settings}))
        own = (f"--config={config}", f"--bind-address={self.driver_url.removeprefix('http://')}")
        arguments = [*self.driver_flags(kubeconfig or self.control_plane.admin), *own, *flags]
        log = self.folder / f"driver-{next(self._starts)}.log"
        self.driver = DriverProcess(arguments, log, scratch.mark(self.node.folder))
        await self.driver.start()
        return self.driver

    def driver_flags(self, kubeconfig: Path) -> list[str]:
        """Return the flags of a driver that say where things are on this node."""
        return [
            f"--kubeconfig={kubeconfig}",
            f"--kubelet-root-dir={self.node.kubelet_root}",
            f"--cdi-dir={self.node.cdi_dir}",
            f"--nri-socket={self.node.nri_socket}",
        ]

    async def wait_driver_ready(self) -> None:
        """Wait until the driver that is a process of the tests says that it is ready."""

        async def is_ready_or_ended() -> bool:
            return self.driver.returncode is not None or await is_ready(self.driver_url)

        try:
            await self.until(is_ready_or_ended, "the driver is ready")
            assert self.driver.returncode is None, f"the driver ended with status {self.driver.returncode}"
        except AssertionError as error:
            tail = "\n".join(self.driver.log.splitlines()[-_SHOWN_LOG_LINES:])
            raise AssertionError(f"{error}\n{tail}") from None

    # Pods and claims

    async def apply(self, text: str) -> None:
        """Create or change objects that are written as YAML."""
        await self.kubectl("apply", "--filename=-", input=text)

    async def pod(self, name: str) -> JsonObject:
        """Return a pod that is there."""
        pod = await self.api.get(f"{PODS}/{name}")
        assert pod is not None, f"there is no pod {name}"
        return pod

    async def claim(self, name: str) -> JsonObject:
        """Return a claim that is there."""
        claim = await self.api.get(f"{CLAIMS}/{name}")
        assert claim is not None, f"there is no claim {name}"
        return claim

    async def wait_running(self, *names: str) -> None:
        """Wait until all containers of some pods run."""

        async def running() -> bool:
            pods = [await self.pod(name) for name in names]
            return all(
                (statuses := pod["status"].get("containerStatuses")) and all("running" in s["state"] for s in statuses)
                for pod in pods
            )

        await self.until(running, f"pods {', '.join(names)} run")

    async def events(self, name: str) -> str:
        """Return the messages of all events of a pod."""
        selector = {"fieldSelector": f"involvedObject.name={name}"}
        return "\n".join(event["message"] for event in await self.api.list(EVENTS, **selector))

    async def wait_event(self, name: str, text: str) -> None:
        """Wait until an event of a pod contains some text."""

        async def seen() -> bool:
            return text in await self.events(name)

        await self.until(seen, f"an event of pod {name} says {text!r}")

    async def delete_pods(self, *names: str) -> None:
        """Delete pods, and wait until they are gone, which takes the driver."""
        for name in names:
            await self.api.delete(f"{PODS}/{name}")

        async def gone() -> bool:
            return not any([await self.api.get(f"{PODS}/{name}") for name in names])

        await self.until(gone, f"pods {', '.join(names)} are gone")

    async def slices(self) -> list[JsonObject]:
        """Return the slices of the driver."""
        return await self.api.list(SLICES, fieldSelector=f"spec.driver={DRIVER_NAME}")

    async def clear(self) -> None:
        """Delete all pods and claims, and wait until they are gone."""
        for path in (PODS, CLAIMS):
            for item in await self.api.list(path):
                await self.api.delete(f"{path}/{item['metadata']['name']}")

        async def gone() -> bool:
            return not any([await self.api.list(path) for path in (PODS, CLAIMS)])

        await self.until(gone, "all pods and claims are gone")

    # What the kernel says

    async def pids(self, pod: str) -> dict[str, int]:
        """Return the first process of each running container of a pod, by the container's name."""
        statuses = (await self.pod(pod))["status"].get("containerStatuses", ())
        return {
            status["name"]: self.node.pid(status["containerID"]) for status in statuses if "running" in status["state"]
        }

    async def cpus(self, pod: str, container: str = "main") -> str:
        """Return where a container's first process may run; affinity and cgroup must agree."""
        pid = (await self.pids(pod))[container]
        allowed, cpuset = kernel.allowed(pid), kernel.cpuset(pid)
        assert allowed == cpuset
        return str(allowed)

    async def wait_cpus(self, pod: str, cpus: str, container: str = "main") -> None:
        """Wait until a container may run on these CPUs, and no others."""

        async def there() -> bool:
            pid = (await self.pids(pod)).get(container)
            return pid is not None and str(kernel.allowed(pid)) == str(kernel.cpuset(pid)) == cpus

        await self.until(there, f"container {container} of pod {pod} on CPUs {cpus}")

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait for something that nobody tells."""
        await waiting.until(condition, what, timeout_s, pause_s=0.05)
