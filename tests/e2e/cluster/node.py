# SPDX-License-Identifier: Apache-2.0
"""A node of Kubernetes: a private containerd and a kubelet, all in one folder, on this machine's kernel."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import yaml

from e2e import endpoints, scratch
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.ports import free_ports
from e2e.containerd import Containerd
from e2e.images import write_archive
from e2e.program import Program

_READY_S = 120.0

# A network that does nothing: what is tested uses the host's, the kubelet only wants one to exist.
_NETWORK = {"cniVersion": "1.0.0", "name": "no-network", "plugins": [{"type": "none"}]}
_NETWORK_PLUGIN = """\
#!/bin/sh
if [ "$CNI_COMMAND" = VERSION ]; then
  echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}'
else
  echo '{"cniVersion": "1.0.0", "ips": [{"address": "127.0.0.1/32"}]}'
fi
"""


class KubernetesNode:
    """One node; an asynchronous context manager that starts it and leaves nothing behind.

    Parameters
    ----------
    control_plane : ControlPlane
        The one it joins.
    programs : Path
        The folder with containerd, its shim and ctr.
    name : str
        Of the node.
    folder : Path, optional
        A folder of `scratch`, or one below it, that this one may have for itself.
    say : callable
        Called with one line for each thing done.

    Attributes
    ----------
    name : str
    folder : Path
        Holds all of it.
    containerd : Containerd
    kubelet : Program
    kubelet_root, cdi_dir, nri_socket, pod_logs : Path
    """

    def __init__(
        self,
        control_plane: ControlPlane,
        programs: Path,
        name: str,
        *,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name = name
        self.folder = scratch.new_folder() if folder is None else folder
        self.kubelet_root = self.folder / "kubelet"
        self.cdi_dir = self.folder / "cdi"
        self.pod_logs = self.folder / "pod-logs"
        self.containerd = Containerd(programs, self.cdi_dir, folder=self.folder)
        self.nri_socket = self.containerd.nri_socket
        self._control_plane = control_plane
        self._say = say
        self._port, self._health_port = free_ports(2)
        self._config = self.folder / "kubelet.yaml"
        self.kubelet = Program(
            (
                control_plane.programs / "kubelet",
                f"--config={self._config}",
                f"--kubeconfig={control_plane.kubeconfig(f'system:node:{name}', ['system:nodes'])}",
                f"--root-dir={self.kubelet_root}",
                f"--cert-dir={self.folder / 'certificates'}",
                f"--hostname-override={name}",
                # It keeps the address that it is given, like one of a cloud.
                "--cloud-provider=external",
                "--v=2",
            ),
            self.folder / "kubelet.log",
            self._is_healthy,
            scratch.mark(self.folder),
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> KubernetesNode:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._remove)
            self._write_files()
            self._say("starting containerd and the kubelet")
            await self.containerd.start()
            await self.containerd.import_image(write_archive)
            await self._control_plane.kubectl("create", "--filename=-", input=json.dumps(self._node_object()))
            await self._start_kubelet()
            self._say(f"node {self.name} is ready")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def wait_ready(self) -> None:
        """Wait until the node is ready, as the control plane sees it.

        Raises
        ------
        RuntimeError
            If that does not happen; the text has the end of the kubelet's log.
        """
        timeout = f"--timeout={_READY_S:g}s"
        try:
            await self._control_plane.kubectl("wait", "--for=condition=Ready", f"node/{self.name}", timeout)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.kubelet.log_tail}") from None

    def pid(self, container_id: str) -> int:
        """Return the first process of a container that the API server knows by this id.

        Raises
        ------
        OSError
            If it does not run any more.
        """
        bundle = f"state/io.containerd.runtime.v2.task/k8s.io/{container_id.removeprefix('containerd://')}"
        return int((self.folder / bundle / "init.pid").read_text())

    async def crash(self) -> None:
        """Kill all of it, its containers too, as a power cut would."""
        await self.kubelet.kill9()
        await self.containerd.kill9()
        await asyncio.to_thread(scratch.clear, self.folder)

    async def boot(self) -> None:
        """Start all of it after `crash`, with empty run directories, as after a boot of the machine."""
        for path in (self.folder / "state", self.folder / "runc", self.cdi_dir, self.nri_socket.parent):
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        self.cdi_dir.mkdir()
        await self.containerd.start()
        await self._start_kubelet()

    async def _start_kubelet(self) -> None:
        self._make_cgroups()
        await self.kubelet.start()
        await self.wait_ready()

    async def _remove(self) -> None:
        await self.kubelet.kill9()
        await self.containerd.destroy()

    def _make_cgroups(self) -> None:
        """Make the cgroup below which the kubelet makes all others; it wants to find it."""
        parent = Path(scratch.cgroup_parent(self.folder).lstrip("/"))
        for root in scratch.cgroup_hierarchies():
            for part in (*reversed(parent.parents), parent):
                (root / part).mkdir(exist_ok=True)
                if (root / "cgroup.controllers").exists() and part != parent:
                    names = (root / part / "cgroup.controllers").read_text().split()
                    (root / part / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))

    def _write_files(self) -> None:
        for folder in (self.kubelet_root, self.cdi_dir, self.pod_logs, self.folder / "certificates"):
            folder.mkdir()
        network = self.folder / "cni"
        network.mkdir()
        (network / "10-none.conflist").write_text(json.dumps(_NETWORK))
        for name in ("none", "loopback"):
            (network / name).write_text(_NETWORK_PLUGIN)
            (network / name).chmod(0o755)
        authority = self._control_plane.authority
        (self.folder / "certificates" / "ca.crt").write_bytes(authority.certificate)
        server = authority.server(self.name, ["127.0.0.1", self.name]).write(self.folder / "certificates", "kubelet")
        self._config.write_text(yaml.safe_dump(self._kubelet_configuration(*server)))

    def _kubelet_configuration(self, certificate: Path, key: Path) -> dict[str, object]:
        gates = [gate.partition("=") for gate in self._control_plane.feature_gates.split(",") if gate]
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": self._port,
            "healthzPort": self._health_port,
            "tlsCertFile": str(certificate),
            "tlsPrivateKeyFile": str(key),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.folder / "certificates" / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{self.containerd.socket}",
            "podLogsDir": str(self.pod_logs),
            "volumePluginDir": str(self.folder / "volume-plugins"),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.containerd.cgroup_parent,
            "failCgroupV1": False,
            "failSwapOn": False,
            "cpuManagerPolicy": "none",
            # How often it tries again what is no error of a container, such as to prepare a claim; by default a minute.
            "syncFrequency": "10s",
            # How long a container that ends again and again waits at most; by default five minutes.
            "crashLoopBackOff": {"maxContainerRestartPeriod": "5s"},
            # What follows keeps it from what concerns the machine, or takes rights that not even root has everywhere.
            "featureGates": {"KubeletInUserNamespace": True, **{name: value == "true" for name, _, value in gates}},
            "enforceNodeAllocatable": [],
            "makeIPTablesUtilChains": False,
            "resolvConf": "",
            "evictionHard": {"memory.available": "10Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
        }

    def _node_object(self) -> dict[str, object]:
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": self.name}]
        metadata = {"name": self.name, "labels": {"kubernetes.io/hostname": self.name}}
        # Of a node that is there before it, the kubelet only changes this condition.
        conditions = [{"type": "Ready", "status": "False", "reason": "NotStarted"}]
        status = {"addresses": addresses, "conditions": conditions}
        return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}

    async def _is_healthy(self) -> bool:
        return await endpoints.is_ok(f"http://127.0.0.1:{self._health_port}/healthz")
