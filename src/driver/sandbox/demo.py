# SPDX-License-Identifier: Apache-2.0
"""``dracpu demo``: the real driver in a cluster in a box prepares claims, pins containers, and refuses what it must."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import yaml

from driver.names import DRIVER_NAME, ClaimUID, cdi_device_id, cpuset_variable
from driver.sandbox.apistatus import JsonObject
from driver.sandbox.clusterbox import ClusterBox, held_cpus
from driver.sandbox.demoplan import Plan, UnexpectedError
from driver.sandbox.demopods import DemoPods
from driver.sandbox.driverprocess import DriverProcess
from driver.sandbox.interruption import run_until_interrupted
from driver.sandbox.kinds import RESOURCE_CLAIMS
from driver.sandbox.kubelet import ClaimName
from driver.sandbox.offers import Offer, allocated_claim, default_reserved, example_claim, read_offers
from driver.sandbox.plugins import KubeletError
from driver.sandbox.runtime import RefusedError
from driver.sandbox.view import Story, machine_map
from fastcpu.cpuset import CpuSet
from fastcpu.errors import TopologyError
from fastcpu.sysfs import read_topology

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver.apis import nri_v1alpha1_pb2 as nri
    from driver.commandline import SandboxOptions
    from driver.sandbox.plugins import PreparedClaim
    from fastcpu.topology import Topology

_DIFFERED: Final = 1
_WRONG_USE: Final = 2
_BAR_SECONDS: Final = 1.5
_BAR_MEGABYTES: Final = 90.0
_STATUS_DEADLINE_S: Final = 30.0
# The UID of the specification's example.
_EXAMPLE_UID: Final = "claim-uid-123456"
_SHOWN_LOG_LINES: Final = 15
_SHOWN_DEVICES: Final = 16
_CHOSEN_CPUS: Final = 4


def main(options: SandboxOptions) -> int:
    """Run the demo.

    Parameters
    ----------
    options : SandboxOptions

    Returns
    -------
    int
        0 only if everything went as expected.
    """
    story = Story()
    try:
        return run_until_interrupted(_run(options, story))
    except TopologyError as error:
        story.complain(f"--sysfs-root: {error}")
        return _WRONG_USE


async def _run(options: SandboxOptions, story: Story) -> int:
    box = ClusterBox(sysfs_root=options.sysfs_root)
    process: DriverProcess | None = None
    async with box:
        topology = read_topology(box.sysfs_root)
        reserved = default_reserved(topology) if options.reserved_cpus is None else options.reserved_cpus
        settings = {"groupBy": options.group_by, "reservedCPUs": str(reserved)}
        story.step("A one-node cluster in a box")
        story.tell(f"API server {box.api.url}, kubelet in {box.kubelet.root}, node {box.node_name}")
        story.tell(f"container runtime at {box.runtime.socket_path}; its containers have no processes")
        story.tell(_described(topology, generated=options.sysfs_root is None))
        try:
            process = await box.start_driver(settings)
            await _Demo(box, process, settings, topology, reserved, story).run()
        except (UnexpectedError, KubeletError, RefusedError, TimeoutError) as error:
            story.complain(str(error) or "something took too long")
            if process is not None:
                story.tell("the end of the driver's log:")
                for line in process.log.splitlines()[-_SHOWN_LOG_LINES:]:
                    story.tell(line)
            return _DIFFERED
    story.conclude("Everything went as expected.")
    return 0


class _Demo:
    """One run of the demo: the steps in their order, each telling what it saw."""

    def __init__(
        self,
        box: ClusterBox,
        process: DriverProcess,
        settings: Mapping[str, object],
        topology: Topology,
        reserved: CpuSet,
        story: Story,
    ) -> None:
        self._box = box
        self._process = process
        self._settings = settings
        self._topology = topology
        self._reserved = reserved
        self._story = story
        unreserved = topology.online - reserved
        self._pods = DemoPods(box, unreserved - topology.isolated or unreserved, story)

    async def run(self) -> None:
        offers = await self._meet_driver()
        plan = Plan.for_offers(offers, self._topology, self._reserved)
        await self._share(plan)
        user = self._pods.new("exclusive-cores")
        example = await self._prepare_example(plan, user)
        await self._pin(user, example, plan)
        next_user = self._pods.new("latecomer")
        latecomer = await self._refuse_three(plan, next_user)
        await self._move_on(user, example, latecomer, plan)
        await self._restart(next_user, latecomer, plan, offers)
        self._story.step("Who holds which CPUs now")
        self._story.show(machine_map(self._topology, self._reserved, self._holders()))

    async def _meet_driver(self) -> list[Offer]:
        box, story = self._box, self._story
        story.step(f"The driver starts (process {self._process.pid})")
        plugin, slices = await box.wait_ready(self._process)
        connected_s = time.monotonic() - self._process.started_at
        registered_s = plugin.registered_at - self._process.started_at
        published_s = box.published_at - self._process.started_at
        offers = read_offers(slices)
        story.tell(f"registered with the kubelet after {registered_s:.2f} s, served as {plugin.service}")
        story.tell(f"connected to the container runtime by NRI within {connected_s:.2f} s")
        story.tell(f"{_counted(len(slices), 'ResourceSlice')} accepted after {published_s:.2f} s:")
        for offer in offers[:_SHOWN_DEVICES]:
            story.tell(f"  {offer.device}: {offer.cpus or 'CPUs not told'}")
        if len(offers) > _SHOWN_DEVICES:
            story.tell(f"  and {_counted(len(offers) - _SHOWN_DEVICES, 'more device')}")
        ready_s = max(registered_s, published_s)
        story.measure("from start to registered and published", ready_s, _BAR_SECONDS, "s")
        story.measure("memory of the idle driver", self._process.resident_bytes / 10**6, _BAR_MEGABYTES, "MB")
        if not offers:
            raise UnexpectedError("the driver published no device")
        return offers

    async def _share(self, plan: Plan) -> None:
        self._story.step("Containers without a claim share all CPUs that are not reserved")
        neighbour = plan.neighbour[1] if plan.neighbour is not None else CpuSet()
        if self._pods.free - neighbour <= plan.example or self._pods.free - neighbour <= plan.overlapping:
            self._story.tell("(the claims to come leave no CPU for them on this machine, so they are left out)")
            return
        await self._pods.run_sharing()

    async def _prepare_example(self, plan: Plan, user: nri.PodSandbox) -> ClaimName:
        story = self._story
        story.step("Claims are prepared, the specification's example first")
        claim = yaml.safe_load(example_claim(plan.offer, plan.example))
        claim["metadata"]["uid"] = _EXAMPLE_UID
        claim["status"]["reservedFor"] = [self._pods.consumer(user)]
        name = self._add(claim)
        answer = await self._prepare(name, plan.example)
        if answer.error:
            raise UnexpectedError(f"claim {name.name} was refused: {answer.error}")
        self._pods.expect_moved("before that answer")
        device, cdi_id = answer.devices[0], cdi_device_id(ClaimUID(name.uid))
        story.tell(f"device {device.device} of pool {device.pool}, with the CDI devices")
        for known_id in device.cdi_ids:
            story.tell(f"  {known_id}")
        if cdi_id not in device.cdi_ids:
            raise UnexpectedError(f"the answer has the CDI devices {device.cdi_ids}, expected {cdi_id}")
        self._expect_held(name, plan.example)
        data = await self._box.api.wait_until(lambda: self._reported_data(name), _STATUS_DEADLINE_S)
        story.tell(f"the claim's status.devices says: {data}")
        if plan.neighbour is not None:
            offer, cpus = plan.neighbour
            neighbour = self._add(allocated_claim("neighbour", offer, str(cpus), len(cpus)))
            answer = await self._prepare(neighbour, cpus)
            if answer.error:
                raise UnexpectedError(f"claim {neighbour.name} was refused: {answer.error}")
            self._pods.expect_moved("before that answer")
            self._expect_held(neighbour, cpus)
        return name

    async def _pin(self, user: nri.PodSandbox, example: ClaimName, plan: Plan) -> None:
        story, cdi_id = self._story, cdi_device_id(ClaimUID(example.uid))
        story.step("The claim's pod starts: its container gets exactly these CPUs")
        identity = await self._pods.run_pinned(user, [cdi_id], plan.example)
        await self._pods.resize(identity, plan.example)
        self._pods.expect_moved("")
        variable = f"{cpuset_variable(ClaimUID(example.uid))}={plan.example}"
        await self._pods.expect_refused(
            f"a container that sets {variable} itself",
            self._pods.new("intruder"),
            "the container was not given claim",
            variable=variable,
        )

    async def _refuse_three(self, plan: Plan, next_user: nri.PodSandbox) -> ClaimName:
        story = self._story
        story.step("Three claims that must be refused")
        attempts = {
            "reserved-cpu": (plan.reserved, "reserved"),
            "outside-its-device": (plan.foreign, str(max(plan.foreign))),
            "latecomer": (plan.overlapping, _EXAMPLE_UID),
        }
        if not plan.reserved:
            story.tell("(no CPU is reserved on this machine, so the claim for a reserved one is left out)")
            del attempts["reserved-cpu"]
        names = {}
        for what, (cpus, clue) in attempts.items():
            users = [self._pods.consumer(next_user)]
            names[what] = self._add(allocated_claim(what, plan.offer, str(cpus), len(cpus), reserved_for=users))
            if what == "latecomer":
                story.tell("(for CPUs that are taken the driver waits up to 10 s: they may become free)")
            answer = await self._prepare(names[what], cpus)
            if not answer.error:
                raise UnexpectedError(f"claim {what} was prepared with CPUs {cpus}, but it must be refused")
            story.quote(answer.error)
            if clue not in answer.error:
                raise UnexpectedError(f"the refusal of claim {what} does not mention {clue!r}")
            if names[what].uid in held_cpus(self._box.cdi_dir):
                raise UnexpectedError(f"claim {what} was refused, but it has a CDI spec")
        return names["latecomer"]

    async def _move_on(self, user: nri.PodSandbox, example: ClaimName, latecomer: ClaimName, plan: Plan) -> None:
        story = self._story
        story.step("The first pod ends, and the claim that wanted its CPUs comes again")
        await self._box.runtime.remove_pod(user.id)
        error = (await self._box.kubelet.unprepare(DRIVER_NAME, [example]))[example.uid]
        since = time.perf_counter()
        if error:
            raise UnexpectedError(f"claim {example.name} cannot be unprepared: {error}")
        story.tell(f"{example.name}: unprepared")
        if example.uid in held_cpus(self._box.cdi_dir):
            raise UnexpectedError(f"claim {example.name} is unprepared, but its CDI spec is still there")
        await self._pods.expect_grown(since)
        answer = await self._prepare(latecomer, plan.overlapping)
        if answer.error:
            raise UnexpectedError(f"claim {latecomer.name} was refused although its CPUs are free: {answer.error}")
        self._pods.expect_moved("before that answer")
        self._expect_held(latecomer, plan.overlapping)

    async def _restart(self, next_user: nri.PodSandbox, latecomer: ClaimName, plan: Plan, offers: list[Offer]) -> None:
        story = self._story
        chooses = self._settings["groupBy"] != "machine"
        settings = {**self._settings, "allocator": "cpumanager"} if chooses else self._settings
        story.step(f"The driver is stopped for a moment{', and comes back to choose CPUs itself' if chooses else ''}")
        await self._process.terminate()
        cdi_id = cdi_device_id(ClaimUID(latecomer.uid))
        await self._pods.expect_refused(
            "a container that would start unpinned meanwhile", next_user, "allow CPUs", cdi_devices=[cdi_id]
        )
        story.tell("(so the start guard would end it: the box compares, there is no process to look at)")
        self._process = await self._box.start_driver(settings)
        await self._box.wait_ready(self._process)
        story.tell(f"the driver is back{', with allocator: cpumanager' if chooses else ''}")
        await self._pods.run_pinned(next_user, [cdi_id], plan.overlapping)
        if chooses:
            await self._choose(next_user, offers)

    async def _choose(self, user: nri.PodSandbox, offers: list[Offer]) -> None:
        story = self._story
        device = next((offer for offer in offers if len(offer.cpus & self._pods.free) > 1), None)
        if device is None:
            story.tell("(no device has CPUs left from which the driver could choose)")
            return
        count = min(_CHOSEN_CPUS, len(device.cpus & self._pods.free) - 1)
        claim = allocated_claim("no-cpuset", device, "", count, reserved_for=[self._pods.consumer(user)])
        del claim["status"]["allocation"]["devices"]["config"]
        name = self._add(claim)
        answer = (await self._box.kubelet.prepare(DRIVER_NAME, [name]))[name.uid]
        chosen = held_cpus(self._box.cdi_dir).get(name.uid, CpuSet())
        if answer.error or len(chosen) != count or not chosen <= device.cpus:
            raise UnexpectedError(f"{count} CPUs of {device.device} were asked for: {answer.error or chosen}")
        story.tell(f"{name.name}, {_counted(count, 'CPU')} of {device.device}: prepared with CPUs {chosen}", "prepared")
        self._pods.expect_moved("before that answer")

    def _add(self, claim: JsonObject) -> ClaimName:
        metadata = self._box.api.put(RESOURCE_CLAIMS, claim)["metadata"]
        return ClaimName(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])

    async def _prepare(self, name: ClaimName, cpus: CpuSet) -> PreparedClaim:
        began = time.perf_counter()
        answer = (await self._box.kubelet.prepare(DRIVER_NAME, [name]))[name.uid]
        took = time.perf_counter() - began
        result = "refused" if answer.error else "prepared"
        self._story.tell(f"{name.name}, cpuset {cpus}: {result} in {took * 1000:.1f} ms", emphasis=result)
        return answer

    def _expect_held(self, name: ClaimName, cpus: CpuSet) -> None:
        held = held_cpus(self._box.cdi_dir).get(name.uid)
        if held != cpus:
            raise UnexpectedError(f"the CDI spec of claim {name.name} names CPUs {held}, expected {cpus}")
        self._story.tell(f"its CDI spec gives the container CPUs {held}")

    def _reported_data(self, name: ClaimName) -> JsonObject | None:
        claim = self._box.api.get(RESOURCE_CLAIMS, name.name, name.namespace) or {}
        for device in claim.get("status", {}).get("devices", ()):
            if device["driver"] == DRIVER_NAME:
                data: JsonObject = device.get("data")
                return data
        return None

    def _holders(self) -> dict[str, CpuSet]:
        names = {claim["metadata"]["uid"]: claim["metadata"]["name"] for claim in self._box.api.list(RESOURCE_CLAIMS)}
        held = {names.get(uid, uid): cpus for uid, cpus in held_cpus(self._box.cdi_dir).items()}
        return dict(sorted(held.items()))


def _described(topology: Topology, *, generated: bool) -> str:
    parts = [
        _counted(len(topology.sockets), "socket"),
        _counted(len(topology.numa_nodes), "NUMA node"),
        _counted(len(topology.cores), "core"),
        _counted(len(topology.online), "CPU"),
    ]
    return f"{'a generated' if generated else 'the'} machine: {', '.join(parts)}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
