# SPDX-License-Identifier: Apache-2.0
"""The node in the virtual machine: containerd, a kubelet that has joined a control plane outside, and the driver."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from driver.names import DRIVER_NAME
from driver.sandbox.offers import Offer, allocated_claim, read_offers
from e2e import endpoints
from e2e.cluster import manifests
from e2e.cluster.api import CLAIMS, NODES, PODS, SLICES, Api, JsonObject
from e2e.cluster.controlplane import ControlPlane
from e2e.images import IMAGE
from e2e.vm import changes
from e2e.vm.machine import HOST, VirtualMachine
from fastcpu import CpuSet

NAME = "vm"

# One core keeps free of what nobody has pinned, by the command line of the kernel.
ISOLATED = CpuSet.parse("2-3")
# Emulation makes everything ten to twenty times as slow, and two CPUs of the host do the work of sixteen.
PATIENCE_S = 600.0

# A thread of a Go program that looks for work costs the host as much as one that does some.
_FEW_THREADS = {"GOMAXPROCS": "2"}
_METRICS = "http://127.0.0.1:8080"
_SHOWN_LOG_LINES = 400
_RIGHTS = Path(__file__).parent / "rights.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Where the kernel lets a container run.

    Attributes
    ----------
    allowed : CpuSet
        The affinity of its processes, which is the same for all.
    cpuset, effective : CpuSet
        What its cgroup asks for, and what is left of that.
    pids : tuple of int
    """

    allowed: CpuSet
    cpuset: CpuSet
    effective: CpuSet
    pids: tuple[int, ...]


class Node:
    """The node.

    Attributes
    ----------
    vm : VirtualMachine
    control_plane : ControlPlane
    api : Api
    settings : dict of str to str
        The configuration of the driver that runs; empty if none does.
    """

    def __init__(self, vm: VirtualMachine, control_plane: ControlPlane, api: Api) -> None:
        self.vm = vm
        self.control_plane = control_plane
        self.api = api
        self.settings: dict[str, str] = {}
        self._names = itertools.count(1)

    @classmethod
    @asynccontextmanager
    async def open(cls, vm: VirtualMachine, control_plane: ControlPlane) -> AsyncIterator[Node]:
        """Start all but the driver; it ends with the virtual machine."""
        async with Api(control_plane.url, control_plane.admin_tls) as client:
            node = cls(vm, control_plane, client)
            await node._start()
            yield node

    async def _start(self) -> None:
        address = f"https://{HOST}:{self.control_plane.port}"
        users = {"kubelet": (f"system:node:{NAME}", ["system:nodes"]), "driver": ("dracpu", [])}
        for program, (user, groups) in users.items():
            kubeconfig = self.control_plane.kubeconfig(user, groups, address)
            await self.vm.call("write_file", path=f"/etc/{program}.kubeconfig", text=kubeconfig.read_text())
        await self.vm.call("start", name="containerd", argv=["containerd"], environment=_FEW_THREADS)
        await self.control_plane.kubectl("apply", "--filename=-", input=_RIGHTS.read_text())
        await self.vm.call("wait_serving", path="/run/containerd/containerd.sock")
        kubelet = ["kubelet", "--config=/etc/kubelet.yaml", "--kubeconfig=/etc/kubelet.kubeconfig"]
        await self.vm.call(
            "start", name="kubelet", argv=[*kubelet, f"--hostname-override={NAME}"], environment=_FEW_THREADS
        )
        await self.vm.run("ctr", "--namespace=k8s.io", "images", "import", "/images/busybox.tar")
        await self.api.until(NODES, _any_ready, "the node is ready", PATIENCE_S)

    # The driver

    async def use_driver(self, **settings: str) -> None:
        """Have a driver with this configuration, whatever ran before."""
        if settings == self.settings:
            return
        if self.settings:
            await self.stop_driver()
        await self.start_driver(**settings)

    async def start_driver(self, **settings: str) -> None:
        """Start the driver, and wait until it says that it is ready."""
        config = yaml.safe_dump({"hostnameOverride": NAME, **settings})
        await self.vm.call("write_file", path="/etc/dracpu/config.yaml", text=config)
        command = ["python3", "-m", "driver", "--config=/etc/dracpu/config.yaml", "--kubeconfig=/etc/driver.kubeconfig"]
        environment = {"PYTHONPATH": changes.PYTHONPATH}
        await self.vm.call("start", name="driver", argv=command, environment=environment)
        self.settings = settings
        await self.vm.call("wait_ready", url=f"{_METRICS}/readyz", timeout_s=PATIENCE_S)

    async def stop_driver(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the driver by a signal."""
        self.settings = {}
        await self.vm.call("end", name="driver", number=number)

    async def driver_log(self) -> str:
        """Return all that drivers have written."""
        return str(await self.vm.call("log", name="driver"))

    async def metrics(self) -> dict[str, float]:
        """Return all metrics of the driver by name and labels, without their common prefix."""
        return endpoints.read_metrics(await self.vm.call("fetch", url=f"{_METRICS}/metrics"))

    async def readiness(self) -> str:
        """Return what a driver that is ready says of that."""
        return str(await self.vm.call("fetch", url=f"{_METRICS}/readyz"))

    async def show_logs(self) -> None:
        """Print the ends of all logs, which pytest shows with a test that fails."""
        for name in ("driver", "kubelet", "containerd"):
            text = await self.vm.call("log", name=name)
            print(f"--- {name}", *text.splitlines()[-_SHOWN_LOG_LINES:], sep="\n")

    # What is offered

    async def slices(self) -> list[JsonObject]:
        """Return the driver's slices."""
        return [item for item in await self.api.list(SLICES) if item["spec"]["driver"] == DRIVER_NAME]

    async def offers(self) -> dict[str, Offer]:
        """Return what an external scheduler reads in the slices, by the devices' names."""
        return {offer.device: offer for offer in read_offers(await self.slices())}

    # Claims and pods

    def name(self, what: str) -> str:
        """Return a name that nothing else has."""
        return f"{what}-{next(self._names)}"

    async def claim(self, *requests: JsonObject, **devices: Sequence[JsonObject]) -> str:
        """Create a claim for the cluster's scheduler, and return its name.

        Parameters
        ----------
        *requests : mapping
            As `e2e.cluster.manifests.request` makes them.
        **devices : sequence of mapping
            More of `spec.devices`: its ``constraints`` and ``config``.
        """
        name = self.name("claim")
        await self.api.create(CLAIMS, manifests.claim(name, *requests, **devices))
        return name

    async def run(self, *claims: Sequence[str], bound: bool = True) -> str:
        """Create a pod and return its name.

        Parameters
        ----------
        *claims : sequence of str
            The claims of each of its containers; a container may have none.
        bound : bool
            Whether the cluster's scheduler looks for its node.
        """
        name = self.name("pod")
        of_all = sorted({claim for of_one in claims for claim in of_one})
        containers = [
            {
                "name": f"c{number}",
                "image": IMAGE,
                "imagePullPolicy": "Never",
                "command": ["/bin/sleep", "1000000"],
                "resources": {"claims": [{"name": claim} for claim in of_one]},
            }
            for number, of_one in enumerate(claims)
        ]
        spec = {
            "hostNetwork": True,
            # With none at all the pod is gone before its containers have ended.
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "resourceClaims": [{"name": claim, "resourceClaimName": claim} for claim in of_all],
            "containers": containers,
        }
        if not bound:
            spec["schedulerName"] = "external"
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        await self.api.create(PODS, body)
        return name

    async def place(self, *places: tuple[Offer, CpuSet]) -> tuple[str, list[str]]:
        """Do what an external scheduler does for a pod; return its name, and that of each container's claim.

        Parameters
        ----------
        *places : tuple of Offer and CpuSet
            The device and the CPUs for each container.
        """
        claims, statuses = [], []
        for offer, cpus in places:
            body = allocated_claim(self.name("claim"), offer, str(cpus), len(cpus))
            statuses.append(body.pop("status"))
            body["metadata"]["finalizers"] = ["resource.kubernetes.io/delete-protection"]
            claims.append(await self.api.create(CLAIMS, body))
        names = [claim["metadata"]["name"] for claim in claims]
        pod = await self.run(*([name] for name in names), bound=False)
        uid = (await self.api.request("GET", f"{PODS}/{pod}"))["metadata"]["uid"]
        reserved_for = [{"resource": "pods", "name": pod, "uid": uid}]
        for name, claim, status in zip(names, claims, statuses, strict=True):
            claim["status"] = {**status, "reservedFor": reserved_for}
            await self.api.replace(f"{CLAIMS}/{name}/status", claim)
        target = {"apiVersion": "v1", "kind": "Node", "name": NAME}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        await self.api.create(f"{PODS}/{pod}/binding", binding)
        return pod, names

    async def running(self, *pods: str) -> dict[str, list[str]]:
        """Wait until all containers of pods run, and return the ids of each pod's.

        Pods that start side by side slow each other down in here, until the kubelet loses patience.
        """

        def ids(items: list[JsonObject]) -> dict[str, list[str]]:
            found = {item["metadata"]["name"]: _running(item) for item in items if item["metadata"]["name"] in pods}
            return found if len(found) == len(pods) and all(found.values()) else {}

        result: dict[str, list[str]] = await self.api.until(PODS, ids, f"{pods} run", PATIENCE_S)
        return result

    async def end(self, pods: Collection[str], claims: Collection[str] = ()) -> None:
        """Delete pods and claims, and wait until they are gone."""
        for collection, names in ((PODS, pods), (CLAIMS, claims)):
            await asyncio.gather(*(self.api.delete(f"{collection}/{name}") for name in names))
        for collection, names in ((PODS, pods), (CLAIMS, claims)):
            await self.api.until(
                collection,
                lambda items, names=names: {item["metadata"]["name"] for item in items}.isdisjoint(names),
                f"{names} are gone",
                PATIENCE_S,
            )

    async def end_all(self) -> None:
        """Delete all pods and claims."""
        names = [
            [item["metadata"]["name"] for item in await self.api.list(collection)] for collection in (PODS, CLAIMS)
        ]
        await self.end(*names)

    async def granted(self, claim: str) -> CpuSet:
        """Return the CPUs that the driver has written into a claim's status."""

        def told(items: list[JsonObject]) -> list[str]:
            [found] = [item for item in items if item["metadata"]["name"] == claim]
            return [device["data"]["cpuset"] for device in found["status"].get("devices", ())]

        cpusets = await self.api.until(CLAIMS, told, f"the driver tells the CPUs of {claim}", PATIENCE_S)
        return CpuSet().union(*map(CpuSet.parse, cpusets))

    async def confine_pods(self, cpus: str) -> None:
        """Hold the cgroup of all pods to some CPUs."""
        await self.vm.call("write_file", path="/sys/fs/cgroup/kubepods/cpuset.cpus", text=cpus)

    # What the kernel says

    async def seen(self) -> dict[str, Seen]:
        """Return where the kernel lets each container run, by its id."""
        found = {}
        for container, what in (await self.vm.call("containers")).items():
            [allowed] = {process["allowed"] for process in what["processes"].values()} or {""}
            found[container] = Seen(
                allowed=CpuSet.parse(allowed),
                cpuset=CpuSet.parse(what["cpuset"]),
                effective=CpuSet.parse(what["effective"]),
                pids=tuple(map(int, what["processes"])),
            )
        return found

    async def seen_allowed(self, containers: Collection[str]) -> dict[str, CpuSet]:
        """Return the CPUs on which the kernel lets some containers run, by their ids."""
        seen = await self.seen()
        return {container: seen[container].allowed for container in containers}

    async def until_seen(self, *containers: str, cpus: CpuSet) -> None:
        """Wait until the kernel lets containers run on these CPUs, and on no others."""
        for container in containers:
            await self.vm.call("wait_allowed", container=container, cpus=str(cpus), timeout_s=PATIENCE_S)


def _any_ready(nodes: list[JsonObject]) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for node in nodes
        for condition in node.get("status", {}).get("conditions", ())
    )


def _running(pod: JsonObject) -> list[str]:
    """Return the ids of a pod's containers; none if not all of them run."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    ids = [status["containerID"].partition("://")[2] for status in statuses if "running" in status["state"]]
    return ids if len(ids) == len(pod["spec"]["containers"]) else []
