# SPDX-License-Identifier: Apache-2.0
"""A private control plane of Kubernetes: etcd, API server, scheduler and controllers on the loopback interface."""

from __future__ import annotations

import asyncio
import base64
import random
import re
import ssl
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import yaml

from e2e import scratch
from e2e.cluster import forwarder
from e2e.cluster.certificates import Authority, private_key
from e2e.cluster.ports import free_ports, is_free
from e2e.command import call
from e2e.program import Program

# The machine as a guest of QEMU with user networking sees it.
_HOST_OF_A_GUEST = "10.0.2.2"
_HTTPS = 443
_ADMINS = "system:masters"


class ControlPlane:
    """One control plane; an asynchronous context manager that starts it and leaves nothing behind.

    Parameters
    ----------
    programs : Path
        The folder with the programs of Kubernetes.
    folder : Path, optional
        A folder of `scratch`, or one below it, that this one may have for itself.
    feature_gates : str
        Gates for all of its programs, as ``Name=true,…``.
    say : callable
        Called with one line for each thing done.

    Attributes
    ----------
    programs, folder : Path
    port : int
        Where the API server listens on 127.0.0.1.
    url : str
        Of the API server.
    service_address : str
        Where it is reached on port 443 by pods, which have it from their environment.
    authority : Authority
    admin : Path
        Kubeconfig of somebody who may do anything.
    admin_tls : ssl.SSLContext
        The same for a client in this process.
    """

    def __init__(
        self,
        programs: Path,
        *,
        folder: Path | None = None,
        feature_gates: str = "",
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.programs = programs
        self.folder = scratch.new_folder() if folder is None else folder
        self.feature_gates = feature_gates
        self.authority = Authority()
        self.port, self._etcd_port, self._peer_port = free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        self.service_address = _free_service_address()
        self._say = say
        self._certificates = self.folder / "certificates"
        self._certificates.mkdir()
        (self.folder / "logs").mkdir()
        (self._certificates / "ca.crt").write_bytes(self.authority.certificate)
        self.admin = self.kubeconfig("admin", [_ADMINS])
        self.admin_tls = ssl.create_default_context(cadata=self.authority.certificate.decode())
        self.admin_tls.load_cert_chain(*self.authority.client("admin", [_ADMINS]).write(self._certificates, "admin"))
        self.etcd = self._program("etcd", self._etcd_command(), self._accepts(self._etcd_port))
        self.api_server = self._program("kube-apiserver", self._api_server_command(), self._is_ready)
        self.scheduler = self._controller("kube-scheduler", _at_once)
        self.controller_manager = self._controller(
            "kube-controller-manager",
            self._takes_pods,
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self._certificates / 'service-accounts.key'}",
            f"--root-ca-file={self._certificates / 'ca.crt'}",
        )
        command = (sys.executable, forwarder.__file__, self.service_address, str(_HTTPS), "127.0.0.1", str(self.port))
        self.service = self._program("service", command, self._accepts(_HTTPS, self.service_address))
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ControlPlane:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._remove)
            self._say("starting the control plane")
            for programs in ((self.etcd,), (self.api_server,), (self.service, self.controller_manager, self.scheduler)):
                await asyncio.gather(*(program.start() for program in programs))
            await self.kubectl("apply", "--filename=-", input=_KUBELET_API_RIGHTS)
            self._say(f"the control plane serves at {self.url}")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def stop_api_server(self) -> None:
        """End the API server; it would wait for a minute for those who watch."""
        await self.api_server.stop(patience_s=2.0)

    async def start_api_server(self) -> None:
        """Start the API server again, at the same address."""
        await self.api_server.start()

    def kubeconfig(self, user: str, groups: Sequence[str], server_url: str | None = None) -> Path:
        """Write a kubeconfig, which holds all that it needs.

        Parameters
        ----------
        user : str
        groups : sequence of str
        server_url : str, optional
            Of the API server, as seen from where the file is used.
        """
        credentials = self.authority.client(user, groups)
        credential = {
            "client-certificate-data": base64.b64encode(credentials.certificate).decode(),
            "client-key-data": base64.b64encode(credentials.key).decode(),
        }
        return self._write_kubeconfig(user, credential, server_url)

    def token_kubeconfig(self, name: str, token: str, server_url: str | None = None) -> Path:
        """Write the kubeconfig of whom a bearer token names."""
        return self._write_kubeconfig(name, {"token": token}, server_url)

    async def kubectl(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> str:
        """Call kubectl as the admin or somebody else, and return what it prints.

        Raises
        ------
        RuntimeError
            If it fails; the text has what it says.
        """
        flags = (f"--kubeconfig={kubeconfig or self.admin}", f"--cache-dir={self.folder / 'kubectl-cache'}")
        environment = {"HOME": str(self.folder), **scratch.mark(self.folder)}
        return await call((self.programs / "kubectl", *flags), arguments, input=input, environment=environment)

    async def _remove(self) -> None:
        for program in (self.scheduler, self.controller_manager, self.service, self.api_server, self.etcd):
            await program.kill9()
        await asyncio.to_thread(scratch.remove, self.folder)

    def _write_kubeconfig(self, name: str, credential: dict[str, str], server_url: str | None) -> Path:
        cluster = {
            "server": server_url or self.url,
            "certificate-authority-data": base64.b64encode(self.authority.certificate).decode(),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "dracpu", "cluster": cluster}],
            "users": [{"name": name, "user": credential}],
            "contexts": [{"name": "dracpu", "context": {"cluster": "dracpu", "user": name}}],
            "current-context": "dracpu",
        }
        file_name = re.sub(r"[^\w.-]", "-", name) + ("" if server_url is None else "-elsewhere")
        path = self.folder / f"{file_name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path

    def _program(self, name: str, command: Sequence[str | Path], serves: Callable[[], Awaitable[bool]]) -> Program:
        return Program(command, self.folder / "logs" / f"{name}.log", serves, scratch.mark(self.folder))

    def _etcd_command(self) -> tuple[str | Path, ...]:
        clients, peers = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        return (
            self.programs / "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )

    def _api_server_command(self) -> tuple[str | Path, ...]:
        folder = self._certificates
        names = ["localhost", "127.0.0.1", self.service_address, _HOST_OF_A_GUEST, "kubernetes.default.svc"]
        server = self.authority.server("kube-apiserver", names).write(folder, "kube-apiserver")
        to_kubelet = self.authority.client("kube-apiserver", []).write(folder, "kube-apiserver-to-kubelet")
        key = folder / "service-accounts.key"
        key.write_bytes(private_key())
        return (
            self.programs / "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--endpoint-reconciler-type=none",
            f"--service-cluster-ip-range={self.service_address.rpartition('.')[0]}.0/24",
            f"--tls-cert-file={server[0]}",
            f"--tls-private-key-file={server[1]}",
            f"--client-ca-file={folder / 'ca.crt'}",
            f"--kubelet-client-certificate={to_kubelet[0]}",
            f"--kubelet-client-key={to_kubelet[1]}",
            f"--kubelet-certificate-authority={folder / 'ca.crt'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--feature-gates={self.feature_gates}",
        )

    def _controller(self, name: str, serves: Callable[[], Awaitable[bool]], *arguments: str) -> Program:
        user = self.kubeconfig(f"system:{name}", [])
        command: tuple[str | Path, ...] = (
            self.programs / name,
            f"--kubeconfig={user}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--feature-gates={self.feature_gates}",
            *arguments,
        )
        return self._program(name, command, serves)

    async def _is_ready(self) -> bool:
        return await self._get("/readyz") == 200

    async def _takes_pods(self) -> bool:
        # What a pod's volumes and identity need is there once the controllers work.
        paths = ("serviceaccounts/default", "configmaps/kube-root-ca.crt")
        return all([await self._get(f"/api/v1/namespaces/default/{path}") == 200 for path in paths])

    async def _get(self, path: str) -> int | None:
        """Return the status with which the API server answers the admin."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.admin_tls)) as session:
            try:
                async with session.get(f"{self.url}{path}") as answer:
                    return answer.status
            except aiohttp.ClientError:
                return None

    def _accepts(self, port: int, address: str = "127.0.0.1") -> Callable[[], Awaitable[bool]]:
        async def accepts() -> bool:
            try:
                _, writer = await asyncio.open_connection(address, port)
            except OSError:
                return False
            writer.close()
            await writer.wait_closed()
            return True

        return accepts


# What a cluster's installer grants the API server: logs and commands of containers.
_KUBELET_API_RIGHTS = """\
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kube-apiserver-to-kubelet}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:kubelet-api-admin"}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: kube-apiserver}]
"""


async def _at_once() -> bool:
    return True


def _free_service_address() -> str:
    while True:
        address = f"127.{random.randrange(1, 255)}.{random.randrange(255)}.1"
        if is_free(address, _HTTPS):
            return address
