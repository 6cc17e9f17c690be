# SPDX-License-Identifier: Apache-2.0
"""A client of the Container Runtime Interface: what the kubelet does with pods and containers."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from e2e import programs
from e2e.images import IMAGE

sys.path.insert(0, str(programs.cri_stubs()))

import cri_v1_pb2 as cri
import cri_v1_pb2_grpc as cri_grpc

_CALL_S = 60.0
_READY_S = 60.0
# A new socket under an old path must be tried at once.
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
)


class CriError(Exception):
    """A call failed; the text is the runtime's."""


class CriHangsError(Exception):
    """A call was not answered for a minute: the runtime hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod that has a sandbox.

    Attributes
    ----------
    name, uid : str
        The pod's, as the API server has it.
    sandbox : str
        The sandbox's id.
    """

    name: str
    uid: str
    sandbox: str
    config: Any

    @property
    def reference(self) -> dict[str, str]:
        """The pod as an entry of a claim's `status.reservedFor`."""
        return {"resource": "pods", "name": self.name, "uid": self.uid}


class Cri:
    """A connection to a runtime; an asynchronous context manager.

    Parameters
    ----------
    socket : Path
        Where the runtime listens.
    cgroup_parent : str
        The parent of all pods' cgroups.
    """

    def __init__(self, socket: Path, cgroup_parent: str) -> None:
        self._socket = socket
        self._cgroup_parent = cgroup_parent

    async def __aenter__(self) -> Cri:
        self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", _CHANNEL_OPTIONS)
        self._runtime = cri_grpc.RuntimeServiceStub(self._channel)
        self._images = cri_grpc.ImageServiceStub(self._channel)
        await self.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(grace=None)

    async def wait_ready(self) -> None:
        """Wait until the runtime runs pods: after its start it reads first what there is."""
        status = cri.ImageStatusRequest(image=cri.ImageSpec(image=IMAGE))
        async with asyncio.timeout(_READY_S):
            while True:
                try:
                    answer = await self._images.ImageStatus(status, timeout=_CALL_S, wait_for_ready=True)
                    await self._runtime.ListContainers(cri.ListContainersRequest(), timeout=_CALL_S)
                except grpc.aio.AioRpcError as error:
                    # Its own word for "not yet".
                    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN):
                        raise
                else:
                    if answer.HasField("image"):
                        return
                await asyncio.sleep(0.02)

    async def run_pod(self, name: str, *, uid: str | None = None, annotations: Mapping[str, str] | None = None) -> Pod:
        """Start the sandbox of a pod, in the host's network."""
        uid = str(uuid.uuid4()) if uid is None else uid
        namespaces = cri.NamespaceOption(network=cri.NODE)
        config = cri.PodSandboxConfig(
            metadata=cri.PodSandboxMetadata(name=name, namespace="default", uid=uid),
            annotations=annotations,
            linux=cri.LinuxPodSandboxConfig(
                cgroup_parent=f"{self._cgroup_parent}/pod{uid}",
                security_context=cri.LinuxSandboxSecurityContext(namespace_options=namespaces),
            ),
        )
        answer = await self._call(self._runtime.RunPodSandbox, cri.RunPodSandboxRequest(config=config))
        return Pod(name=name, uid=uid, sandbox=answer.pod_sandbox_id, config=config)

    async def create(
        self,
        pod: Pod,
        name: str,
        *,
        cdi: Collection[str] = (),
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = ("/bin/sleep", "1000000"),
        attempt: int = 0,
    ) -> str:
        """Create a container and return its id."""
        namespaces = cri.NamespaceOption(network=cri.NODE)
        config = cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name=name, attempt=attempt),
            image=cri.ImageSpec(image=IMAGE),
            command=command,
            envs=[cri.KeyValue(key=key, value=value.encode()) for key, value in (env or {}).items()],
            linux=cri.LinuxContainerConfig(
                resources=cri.LinuxContainerResources(cpu_shares=2),
                security_context=cri.LinuxContainerSecurityContext(namespace_options=namespaces),
            ),
            CDI_devices=[cri.CDIDevice(name=device) for device in cdi],
        )
        request = cri.CreateContainerRequest(pod_sandbox_id=pod.sandbox, config=config, sandbox_config=pod.config)
        answer = await self._call(self._runtime.CreateContainer, request)
        return str(answer.container_id)

    async def start(self, container: str) -> None:
        """Start a container."""
        await self._call(self._runtime.StartContainer, cri.StartContainerRequest(container_id=container))

    async def run(self, pod: Pod, name: str, **how: Any) -> str:
        """Create and start a container and return its id."""
        container = await self.create(pod, name, **how)
        await self.start(container)
        return container

    async def update(self, container: str, *, cpus: str = "", shares: int = 0) -> None:
        """Change a container's resources, as a resize of its pod or a static CPU manager does."""
        resources = cri.LinuxContainerResources(cpuset_cpus=cpus, cpu_shares=shares)
        request = cri.UpdateContainerResourcesRequest(container_id=container, linux=resources)
        await self._call(self._runtime.UpdateContainerResources, request)

    async def stop(self, container: str) -> None:
        """Kill a container."""
        await self._call(self._runtime.StopContainer, cri.StopContainerRequest(container_id=container, timeout=0))

    async def remove(self, container: str) -> None:
        """Remove a container, running or not."""
        await self._call(self._runtime.RemoveContainer, cri.RemoveContainerRequest(container_id=container))

    async def stop_pod(self, pod: Pod) -> None:
        """Stop a pod with its containers, and remove nothing: as the kubelet does before it unprepares claims."""
        await self._call(self._runtime.StopPodSandbox, cri.StopPodSandboxRequest(pod_sandbox_id=pod.sandbox))

    async def remove_pod(self, pod: Pod) -> None:
        """Remove a pod that was stopped, after its containers: as the kubelet does.

        A runtime that removes containers with their sandbox may hang, if a plugin registers at that moment.
        """
        request = cri.ListContainersRequest(filter=cri.ContainerFilter(pod_sandbox_id=pod.sandbox))
        for container in (await self._call(self._runtime.ListContainers, request)).containers:
            await self.remove(container.id)
        await self._call(self._runtime.RemovePodSandbox, cri.RemovePodSandboxRequest(pod_sandbox_id=pod.sandbox))

    async def end(self, pod: Pod) -> None:
        """Stop and remove a pod with all its containers."""
        await self.stop_pod(pod)
        await self.remove_pod(pod)

    async def containers(self) -> dict[str, str]:
        """Return the state of all containers, such as ``CONTAINER_RUNNING``, by id."""
        answer = await self._call(self._runtime.ListContainers, cri.ListContainersRequest())
        return {found.id: cri.ContainerState.Name(found.state) for found in answer.containers}

    async def status(self, container: str) -> Any:
        """Return a container's status."""
        request = cri.ContainerStatusRequest(container_id=container)
        return (await self._call(self._runtime.ContainerStatus, request)).status

    async def pid(self, container: str) -> int:
        """Return the process id of a container's first process; 0 if it does not run."""
        request = cri.ContainerStatusRequest(container_id=container, verbose=True)
        answer = await self._call(self._runtime.ContainerStatus, request)
        return int(json.loads(answer.info["info"]).get("pid", 0))

    async def wait_ended(self, container: str) -> int:
        """Wait until a container has ended by itself, and return its exit code."""
        async with asyncio.timeout(_READY_S):
            while (status := await self.status(container)).state != cri.CONTAINER_EXITED:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return int(status.exit_code)

    async def exec(self, container: str, *command: str) -> str:
        """Run a command in a container and return its output."""
        request = cri.ExecSyncRequest(container_id=container, cmd=command, timeout=int(_CALL_S))
        answer = await self._call(self._runtime.ExecSync, request)
        if answer.exit_code != 0:
            raise CriError(f"{' '.join(command)} ended with {answer.exit_code}: {answer.stderr.decode()}")
        return str(answer.stdout.decode())

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise CriHangsError(f"{type(request).__name__} was not answered for {_CALL_S:g} s") from error
            raise CriError(error.details()) from error
