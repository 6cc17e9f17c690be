# SPDX-License-Identifier: Apache-2.0
"""A stand-in for dra-driver-cpu: its chart's release, and what it does on the node for pods with claims.

It serves the kubelet, writes the files that dra-driver-cpu writes, publishes as it does, and pins containers by way of
the runtime. So kubelet, runtime, API server and Helm are left as they are when somebody swaps the drivers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import yaml

from driver.apis import dra_v1_pb2 as dra
from driver.apis import dra_v1_pb2_grpc, pluginregistration_pb2_grpc
from driver.apis import pluginregistration_pb2 as registration
from driver.names import CPU_CAPACITY, DRIVER_NAME
from e2e.cluster.api import CLAIMS, NODES, SLICES, JsonObject
from e2e.cluster.cluster import NAMESPACE, Cluster
from e2e.cri import Cri
from e2e.images import IMAGE

RELEASE = "dra-driver-cpu"

_DEVICE = "cpudevnuma000"
_CLAIM_KIND = "dra.k8s.io/cpu"
_METADATA_KIND = f"{DRIVER_NAME}/metadata"
_SHARED_FILE = f"{DRIVER_NAME}.json"


class Upstream:
    """One release of dra-driver-cpu on a cluster's node.

    Parameters
    ----------
    cluster : Cluster
    one_file : bool
        Whether it keeps all claims in one CDI spec and knows no metadata, as the first releases did.
    cpus : str
        What it gives to the one claim that it prepares.
    """

    def __init__(self, cluster: Cluster, *, one_file: bool, cpus: str) -> None:
        self._cluster = cluster
        self._one_file = one_file
        self._cpus = cpus
        self._folder = cluster.node.kubelet_root / "plugins" / DRIVER_NAME
        self._servers: list[grpc.aio.Server] = []
        self._registered = asyncio.Event()

    @property
    def cdi_specs(self) -> list[str]:
        """The names of the CDI specs that there are."""
        return sorted(path.name for path in self._cluster.node.cdi_dir.iterdir())

    async def install(self) -> None:
        """Install the chart's release, serve the kubelet, and publish."""
        chart = _write_chart(self._cluster.folder / "upstream-chart")
        await self._cluster.helm("upgrade", "--install", RELEASE, str(chart), f"--namespace={NAMESPACE}", "--wait")
        self._folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        socket = self._folder / "dra.sock"
        plugin, registrar = grpc.aio.server(), grpc.aio.server()
        dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(self, plugin)
        pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(_Registrar(socket, self._registered), registrar)
        registry = self._cluster.node.kubelet_root / "plugins_registry"
        for server, path in ((plugin, socket), (registrar, registry / f"{DRIVER_NAME}-reg.sock")):
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            self._servers.append(server)
        await self._registered.wait()
        for piece in await self._cluster.slices():
            await self._cluster.api.delete(f"{SLICES}/{piece['metadata']['name']}")
        node = await self._cluster.api.get(f"{NODES}/{self._cluster.node.name}")
        assert node is not None
        await self._cluster.api.create(SLICES, _slice(node["metadata"]))

    async def stop(self) -> None:
        """End the part on the node; what it has left stays."""
        for server in self._servers:
            await server.stop(grace=None)
        self._servers.clear()

    async def pin(self, containers: Sequence[str], cpus: str) -> None:
        """Move containers, known by their id, to some CPUs."""
        containerd = self._cluster.node.containerd
        async with Cri(containerd.socket, containerd.cgroup_parent) as runtime:
            for container in containers:
                await runtime.update(container.removeprefix("containerd://"), cpus=cpus)

    async def NodePrepareResources(self, request: Any, context: object) -> Any:
        """Prepare claims, as the kubelet asks for it."""
        answer = dra.NodePrepareResourcesResponse()
        for claim in request.claims:
            body = await self._cluster.api.get(f"{CLAIMS}/{claim.name}")
            assert body is not None
            assert body["metadata"]["uid"] == claim.uid
            self._write_claim_spec(claim.uid)
            for result in body["status"]["allocation"]["devices"]["results"]:
                ids = [f"{_CLAIM_KIND}=claim-{claim.uid}"]
                if not self._one_file:
                    ids.append(self._write_metadata(body, result["request"]))
                answer.claims[claim.uid].devices.append(
                    dra.Device(
                        request_names=[result["request"]],
                        pool_name=result["pool"],
                        device_name=result["device"],
                        cdi_device_ids=ids,
                        share_id=result["shareID"],
                    )
                )
        return answer

    async def NodeUnprepareResources(self, request: Any, context: object) -> Any:
        """Refuse what no test should ask for."""
        answer = dra.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].error = "this stand-in unprepares nothing"
        return answer

    def _write_claim_spec(self, uid: str) -> None:
        device = {"name": f"claim-{uid}", "containerEdits": {"env": [f"DRA_CPUSET_{uid}={self._cpus}"]}}
        spec = {"cdiVersion": "0.8.0", "kind": _CLAIM_KIND, "devices": [device]}
        self._write_cdi(_SHARED_FILE if self._one_file else f"dra.k8s.io-cpu_claim-{uid}.json", spec)

    def _write_metadata(self, claim: JsonObject, request: str) -> str:
        """Write the metadata of a claim's request as Kubernetes' helper for drivers does, and return its CDI device."""
        name, uid = claim["metadata"]["name"], claim["metadata"]["uid"]
        path = self._folder / "dra-device-metadata" / f"default_{name}" / request / "metadata.json"
        path.parent.mkdir(parents=True)
        entry = {"driver": DRIVER_NAME, "pool": self._cluster.node.name, "name": _DEVICE}
        metadata = {
            "apiVersion": "metadata.resource.k8s.io/v1beta1",
            "kind": "DeviceMetadata",
            "metadata": {"name": name, "namespace": "default", "uid": uid, "generation": 1},
            "requests": [{"name": request, "devices": [entry]}],
        }
        path.write_text(json.dumps(metadata))
        inside = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims"
        mount: JsonObject = {
            "hostPath": str(path),
            "containerPath": f"{inside}/{name}/{request}/{DRIVER_NAME}-metadata.json",
            "options": ["ro", "bind"],
        }
        device = {"name": f"{uid}_{request}", "containerEdits": {"mounts": [mount]}}
        spec = {"cdiVersion": "0.5.0", "kind": _METADATA_KIND, "devices": [device]}
        self._write_cdi(f"{DRIVER_NAME}_metadata_{uid}_{request}.json", spec)
        return f"{_METADATA_KIND}={uid}_{request}"

    def _write_cdi(self, name: str, spec: JsonObject) -> None:
        path = self._cluster.node.cdi_dir / name
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(spec, indent=2))
        temporary.rename(path)


class _Registrar:
    def __init__(self, socket: Path, registered: asyncio.Event) -> None:
        self._socket = socket
        self._registered = registered

    async def GetInfo(self, request: object, context: object) -> Any:
        return registration.PluginInfo(
            type="DRAPlugin", name=DRIVER_NAME, endpoint=str(self._socket), supported_versions=["v1.DRAPlugin"]
        )

    async def NotifyRegistrationStatus(self, request: Any, context: object) -> Any:
        assert request.plugin_registered, request.error
        self._registered.set()
        return registration.RegistrationStatusResponse()


def _slice(node: JsonObject) -> JsonObject:
    attributes = {
        "resource.kubernetes.io/numaNode": {"int": 0},
        "dra.cpu/numaNodeID": {"int": 0},
        "dra.net/numaNode": {"int": 0},
        "dra.cpu/numCPUs": {"int": 2},
        "dra.cpu/smtEnabled": {"bool": False},
    }
    device = {
        "name": _DEVICE,
        "attributes": attributes,
        "capacity": {CPU_CAPACITY: {"value": "2"}},
        "allowMultipleAllocations": True,
    }
    owner = {"apiVersion": "v1", "kind": "Node", "name": node["name"], "uid": node["uid"], "controller": True}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"generateName": f"{node['name']}-{DRIVER_NAME}-", "ownerReferences": [owner]},
        "spec": {
            "driver": DRIVER_NAME,
            "nodeName": node["name"],
            "pool": {"name": node["name"], "generation": 1, "resourceSliceCount": 1},
            "devices": [device],
        },
    }


def _write_chart(folder: Path) -> Path:
    """Write a chart with the objects of dra-driver-cpu's; what its container would do this module does."""
    labels = {"app.kubernetes.io/name": RELEASE, "app.kubernetes.io/instance": RELEASE}
    more = {**labels, "tier": "node", "k8s-app": RELEASE}
    named = {"name": RELEASE, "namespace": NAMESPACE}
    container = {
        "name": "dracpu",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": ["/bin/sleep", "1000000"],
        "securityContext": {"capabilities": {"add": ["NET_ADMIN", "SYS_ADMIN"]}},
    }
    pod = {
        "hostNetwork": True,
        "priorityClassName": "system-node-critical",
        "terminationGracePeriodSeconds": 1,
        "serviceAccountName": RELEASE,
        "containers": [container],
    }
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": RELEASE}
    objects = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": RELEASE},
            "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": RELEASE},
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", **named}],
        },
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": DRIVER_NAME},
            "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER_NAME}"'}}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {**named, "labels": more},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": more}, "spec": pod},
            },
        },
    ]
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    (folder / "Chart.yaml").write_text(yaml.safe_dump({"apiVersion": "v2", "name": RELEASE, "version": "0.2.0"}))
    (folder / "templates" / "all.yaml").write_text(yaml.safe_dump_all(objects))
    return folder
