# SPDX-License-Identifier: Apache-2.0
"""A node with everything real but the API server and the kubelet: containerd, runc, the kernel, and the driver."""

from __future__ import annotations

import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from driver.names import DRIVER_NAME
from driver.sandbox.apistatus import JsonObject
from driver.sandbox.clusterbox import ClusterBox
from driver.sandbox.driverprocess import DriverProcess
from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.offers import Offer, allocated_claim, read_offers
from e2e import endpoints, kernel, narrowing, scratch, waiting
from e2e.containerd import Containerd
from e2e.cri import Cri, CriError, Pod
from fastcpu import CpuSet

# Waited for is mostly what takes milliseconds; the machine may be busy with more than this.
PATIENCE_S = 30.0
_SHOWN_LOG_LINES = 300

# Two CPUs are enough, one for a claim and one for all others; what else there is the driver reserves.
MANAGED = CpuSet.parse("0-1")
_EXTERNAL = {"allocator": "external", "groupBy": "machine"}
EVERYTHING = CpuSet.parse(Path("/sys/devices/system/cpu/online").read_text().strip())


class Node:
    """A node.

    Attributes
    ----------
    box : ClusterBox
        The API server and the kubelet.
    containerd : Containerd
    cri : Cri
    driver : DriverProcess
        The latest one.
    """

    def __init__(self, box: ClusterBox, containerd: Containerd, cri: Cri) -> None:
        self.box = box
        self.containerd = containerd
        self.cri = cri
        self.driver: DriverProcess
        self._offer: Offer
        self._url = ""
        self._names = itertools.count(1)

    @classmethod
    @asynccontextmanager
    async def open(cls, programs: Path, *, settings: str = "", cpus: str = "") -> AsyncIterator[Node]:
        """Start everything but a driver, and leave nothing behind; see `Containerd` for the settings and CPUs."""
        async with (
            ClusterBox(sysfs_root=Path("/sys")) as box,
            Containerd(programs, box.cdi_dir, settings=settings, cpus=cpus) as containerd,
            Cri(containerd.socket, f"{containerd.cgroup_parent}/kubepods") as cri,
        ):
            node = cls(box, containerd, cri)
            try:
                yield node
            finally:
                await node._end()

    # The driver

    async def start_driver(
        self, *flags: str, managed: CpuSet = MANAGED, of: CpuSet = EVERYTHING, settings: Mapping[str, str] = _EXTERNAL
    ) -> DriverProcess:
        """Start a driver, and wait until it has published what there is, and enforces.

        Parameters
        ----------
        *flags : str
            Further flags.
        managed : CpuSet
            The CPUs that are not reserved.
        of : CpuSet
            All CPUs, where the machine is not the real one.
        settings : mapping of str to str
            Who chooses CPUs, and by what they are grouped.
        """
        address = f"127.0.0.1:{self.box.reserve_port()}"
        self._url = f"http://{address}"
        nri_socket = f"--nri-socket={self.containerd.nri_socket}"
        own = (f"--bind-address={address}", nri_socket, "--cgroup-root=/sys/fs/cgroup", *flags)
        mark = scratch.mark(self.containerd.folder)
        self.driver = await self.box.start_driver({"reservedCPUs": str(of - managed), **settings}, own, mark)
        if managed:
            _, slices = await self.box.wait_ready(self.driver)
            [self._offer] = read_offers(slices)
        await self.wait_ready()
        return self.driver

    async def restart_driver(self, *flags: str, settings: Mapping[str, str] = _EXTERNAL) -> None:
        """Kill the driver as the kernel would, and start another."""
        await self.driver.kill9()
        await self.start_driver(*flags, settings=settings)

    async def wait_ready(self) -> None:
        """Wait until the driver says that it is ready: connected to the runtime too."""
        await self.until(self._is_ready, "the driver is ready")

    async def is_not_ready(self) -> bool:
        """Tell whether the driver says that something is missing."""
        return (await self.readiness())[0] == 503

    async def is_connected_again(self) -> bool:
        """Tell whether the driver is ready, and had lost the runtime before."""
        return await self._is_ready() and (await self.metrics())["nri_reconnects_total"] >= 1

    async def readiness(self) -> tuple[int, str]:
        """Return what the driver says of its readiness."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/readyz") as answer:
            return answer.status, await answer.text()

    async def wait_remarked(self, *texts: str) -> None:
        """Wait until the driver says that it is ready, and these things besides; nothing besides if there are none."""

        async def remarked() -> bool:
            status, body = await self.readiness()
            found, *remarks = body.splitlines()
            return (status, found) == (200, "ok") and bool(remarks) == bool(texts) and all(t in body for t in texts)

        await self.until(remarked, f"the driver is ready and says {texts}")

    async def wait_logged(self, text: str) -> None:
        """Wait until a driver has logged something."""

        async def logged() -> bool:
            return text in self.driver.log

        await self.until(logged, f"{text!r} in the driver's log")

    async def metrics(self) -> dict[str, float]:
        """Return all metrics by name and labels as they are written, without their common prefix."""
        return await endpoints.metrics(self._url)

    # Claims

    def add_claim(self, cpus: str, *pods: Pod) -> ClaimName:
        """Put a claim into the API server that is allocated some CPUs and reserved for some pods."""
        return self._add(self._allocated(cpus, len(CpuSet.parse(cpus)), pods))

    def add_claim_of(self, count: int, *pods: Pod) -> ClaimName:
        """Put a claim into the API server that leaves it to the driver which CPUs it gets, reserved for some pods."""
        body = self._allocated("", count, pods)
        del body["status"]["allocation"]["devices"]["config"]
        return self._add(body)

    def _allocated(self, cpus: str, count: int, pods: Sequence[Pod]) -> JsonObject:
        name = f"claim-{next(self._names)}"
        return allocated_claim(name, self._offer, cpus, count, reserved_for=[pod.reference for pod in pods])

    def _add(self, body: JsonObject) -> ClaimName:
        metadata = self.box.api.put(RESOURCE_CLAIMS, body)["metadata"]
        return ClaimName(namespace="default", name=metadata["name"], uid=metadata["uid"])

    def reserve(self, claim: ClaimName, *pods: Pod) -> None:
        """Reserve a claim for these pods, and no others."""
        body = self.box.api.get(RESOURCE_CLAIMS, claim.name)
        assert body is not None
        body["status"]["reservedFor"] = [pod.reference for pod in pods]
        self.box.api.put(RESOURCE_CLAIMS, body)

    async def prepare(self, claim: ClaimName) -> tuple[str, ...]:
        """Have a claim prepared, and return the CDI devices for its containers."""
        answer = (await self.box.kubelet.prepare(DRIVER_NAME, [claim]))[claim.uid]
        assert not answer.error, answer.error
        return tuple(cdi_id for device in answer.devices for cdi_id in device.cdi_ids)

    async def why_not_prepared(self, claim: ClaimName) -> str:
        """Have a claim prepared, and return the error."""
        return (await self.box.kubelet.prepare(DRIVER_NAME, [claim]))[claim.uid].error

    async def unprepare(self, claim: ClaimName) -> str:
        """Have a claim unprepared, and return the error, empty for success."""
        return (await self.box.kubelet.unprepare(DRIVER_NAME, [claim]))[claim.uid]

    # Pods

    async def pod(self, name: str = "", *, annotations: Mapping[str, str] | None = None) -> Pod:
        """Start a pod without containers."""
        return await self.cri.run_pod(name or f"pod-{next(self._names)}", annotations=annotations)

    async def why_not_created(self, pod: Pod, name: str, **how: object) -> str:
        """Create a container that must be refused, and return why it was."""
        try:
            await self.cri.create(pod, name, **how)
        except CriError as error:
            return str(error)
        raise AssertionError(f"container {name} was created")

    async def why_not_started(self, container: str) -> str:
        """Start a container that must be refused, and return why it was."""
        try:
            await self.cri.start(container)
        except CriError as error:
            return str(error)
        raise AssertionError("the container was started")

    async def create_unnoticed(self, pod: Pod, name: str, **how: object) -> str:
        """Create a container while no driver is there, and return its id."""
        try:
            return await self.cri.create(pod, name, **how)
        except CriError as error:
            # With the first creation the runtime may notice that a validator is gone; then it forgets it.
            if "validator" not in str(error):
                raise
        return await self.cri.create(pod, name, **{**how, "attempt": 1})

    async def run_unnoticed(self, pod: Pod, name: str, **how: object) -> str:
        """Run a container while no driver is there, and return its id."""
        container = await self.create_unnoticed(pod, name, **how)
        await self.cri.start(container)
        return container

    @property
    def pods_cgroup(self) -> Path:
        """The folder of the cgroup of all pods, in the hierarchy that holds them to CPUs; made if it is missing."""
        folder = kernel.cgroups(self.containerd.cgroup_parent) / "kubepods"
        narrowing.make(folder)
        return folder

    # What the kernel says

    async def cpus(self, container: str) -> str:
        """Return where a container's first process may run; affinity and cgroup must agree."""
        pid = await self.cri.pid(container)
        allowed, cpuset = kernel.allowed(pid), kernel.cpuset(pid)
        assert allowed == cpuset
        return str(allowed)

    async def wait_cpus(self, *containers: str, cpus: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until containers may run on these CPUs, and no others."""
        pids = [await self.cri.pid(container) for container in containers]
        wanted = CpuSet.parse(cpus)

        async def there() -> bool:
            return all(kernel.allowed(pid) == kernel.cpuset(pid) == wanted for pid in pids)

        await self.until(there, f"containers {', '.join(containers)} on CPUs {cpus}", timeout_s)

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait for something that nobody tells."""
        await waiting.until(condition, what, timeout_s, pause_s=0.01)

    async def _is_ready(self) -> bool:
        return await endpoints.is_ready(self._url)

    async def _end(self) -> None:
        # A stopped process does not end when it is asked to.
        if hasattr(self, "driver"):
            self.driver.send_signal(signal.SIGCONT)
            if self.driver.log_path.exists():
                # pytest shows it with a test that fails.
                print("\n".join(self.driver.log.splitlines()[-_SHOWN_LOG_LINES:]))
