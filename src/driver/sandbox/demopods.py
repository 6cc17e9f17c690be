# SPDX-License-Identifier: Apache-2.0
"""The demo's pods: those without a claim, which share what is left, and those with one, which are pinned."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.sandbox.clusterbox import held_cpus
from driver.sandbox.demoplan import UnexpectedError
from driver.sandbox.runtime import RefusedError
from fastcpu.cpuset import CpuSet

if TYPE_CHECKING:
    from driver.sandbox.apistatus import JsonObject
    from driver.sandbox.clusterbox import ClusterBox
    from driver.sandbox.view import Story

_SHARING: Final = ("web", "batch")
_GROW_BAR_S: Final = 1.0
_GROW_DEADLINE_S: Final = 15.0


class DemoPods:
    """What runs on the demo's node.

    Parameters
    ----------
    box : ClusterBox
    unreserved : CpuSet
        The CPUs that containers may have.
    story : Story
    """

    def __init__(self, box: ClusterBox, unreserved: CpuSet, story: Story) -> None:
        self._box = box
        self._unreserved = unreserved
        self._story = story
        self._numbers = itertools.count(1)
        self._sharing: list[str] = []

    @property
    def free(self) -> CpuSet:
        """The CPUs that no claim holds."""
        return self._unreserved - CpuSet().union(*held_cpus(self._box.cdi_dir).values())

    def new(self, name: str) -> nri.PodSandbox:
        """Return a pod that does not run yet."""
        uid = f"pod-uid-{next(self._numbers)}"
        return nri.PodSandbox(id=f"sandbox-{uid}", name=name, uid=uid, namespace="default")

    @staticmethod
    def consumer(pod: nri.PodSandbox) -> JsonObject:
        """Return the entry in `status.reservedFor` of a claim that a pod uses."""
        return {"resource": "pods", "name": pod.name, "uid": pod.uid}

    async def run_sharing(self) -> None:
        """Run pods without a claim."""
        for name in _SHARING:
            pod = self.new(name)
            await self._box.runtime.run_pod(pod)
            self._sharing.append(await self._box.runtime.run_container(pod.id, name))
            self._story.tell(f"container {name} of pod {name} runs on CPUs {self._effective(self._sharing[-1])}")
        self.expect_moved("")

    def expect_moved(self, when: str) -> None:
        """Make sure that the containers without a claim have exactly what no claim holds, and tell it.

        Parameters
        ----------
        when : str
            What is told before it; nothing is told without.
        """
        for identity in self._sharing:
            if self._effective(identity) != self.free:
                raise UnexpectedError(
                    f"a container without a claim runs on CPUs {self._effective(identity)}, expected {self.free}"
                )
        if self._sharing and when:
            self._story.tell(f"{when} {' and '.join(_SHARING)} were moved to CPUs {self.free}")

    async def expect_grown(self, since: float) -> None:
        """Wait until the containers without a claim have what no claim holds again.

        Parameters
        ----------
        since : float
            `time.perf_counter()` of when the claim was unprepared.
        """
        if not self._sharing:
            return
        free = self.free
        try:
            await self._box.runtime.wait_until(
                lambda: all(self._effective(identity) == free for identity in self._sharing), _GROW_DEADLINE_S
            )
        except TimeoutError:
            raise UnexpectedError(
                f"{_GROW_DEADLINE_S:g} s after the unprepare the containers without a claim were not given CPUs {free}"
            ) from None
        self._story.tell(f"{' and '.join(_SHARING)} were given CPUs {free}")
        self._story.measure("from the unprepare until then", time.perf_counter() - since, _GROW_BAR_S, "s")

    async def run_pinned(self, pod: nri.PodSandbox, cdi_devices: Sequence[str], cpus: CpuSet) -> str:
        """Run a container with a claim, and return its id."""
        runtime = self._box.runtime
        if pod.id not in runtime.pods:
            await runtime.run_pod(pod)
        began = time.perf_counter()
        identity = await runtime.run_container(pod.id, "work", cdi_devices=cdi_devices)
        took = time.perf_counter() - began
        self._expect_pinned(identity, cpus)
        self._story.tell(f"container work of pod {pod.name}: pinned to CPUs {cpus} in {took * 1000:.1f} ms", "pinned")
        return identity

    async def resize(self, identity: str, cpus: CpuSet) -> None:
        """Have the kubelet widen a pinned container, which changes nothing."""
        resources = nri.LinuxResources(cpu=nri.LinuxCPU(cpus=str(self._unreserved)))
        await self._box.runtime.update_container(identity, resources)
        self._expect_pinned(identity, cpus)
        self._story.tell(f"the kubelet resizes it to CPUs {self._unreserved}: it stays on {cpus}")

    async def expect_refused(
        self, what: str, pod: nri.PodSandbox, clue: str, *, variable: str = "", cdi_devices: Sequence[str] = ()
    ) -> None:
        """Have the runtime create and start a container that must be refused.

        Parameters
        ----------
        what : str
            What it is, for the story.
        pod : PodSandbox
            Its pod.
        clue : str
            What the refusal must mention.
        variable : str
            A variable of its environment, as ``NAME=value``.
        cdi_devices : sequence of str
            Its CDI devices.
        """
        runtime = self._box.runtime
        if pod.id not in runtime.pods:
            await runtime.run_pod(pod)
        env = dict([variable.split("=", 1)]) if variable else {}
        try:
            identity = await runtime.run_container(pod.id, "bad", env=env, cdi_devices=cdi_devices)
        except RefusedError as error:
            self._story.tell(f"{what}: refused", "refused")
            self._story.quote(str(error))
            if clue not in str(error):
                raise UnexpectedError(f"the refusal does not mention {clue!r}") from error
        else:
            raise UnexpectedError(f"{what} runs on CPUs {self._effective(identity)}, but it must be refused")

    def _expect_pinned(self, identity: str, cpus: CpuSet) -> None:
        if self._effective(identity) != cpus:
            raise UnexpectedError(f"the container runs on CPUs {self._effective(identity)}, expected {cpus}")

    def _effective(self, identity: str) -> CpuSet:
        return self._box.runtime.effective(identity)
