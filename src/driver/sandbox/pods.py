# SPDX-License-Identifier: Apache-2.0
"""What a kubelet does for pods with claims, and the little of the controllers around it that a node alone needs.

A pod that is bound to the node has its claims prepared and then its containers created; a pod that is being deleted has
its containers removed and its claims unprepared, and then goes. As on a real cluster, a claim that is allocated but not
reserved is reserved for a pod that was bound by hand, and given back when its last pod has gone.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from driver.sandbox.apiserver import ApiServer
from driver.sandbox.apistatus import JsonObject, StatusError
from driver.sandbox.kinds import EVENTS, PODS, RESOURCE_CLAIMS
from driver.sandbox.kubelet import ClaimName, Kubelet
from driver.sandbox.plugins import KubeletError, PreparedDevice
from driver.sandbox.podcontainers import PodContainers
from driver.sandbox.runtime import ContainerRuntime, RefusedError

_FINALIZER: Final = "resource.kubernetes.io/delete-protection"


class PodWorkers:
    """Works on each pod of one node until it has gone.

    Parameters
    ----------
    api : ApiServer
    kubelet : Kubelet
    runtime : ContainerRuntime
    node_name : str
    retry_s : float
        How long after a failure the next try comes. A real kubelet takes 60 to 90 seconds after a failed prepare and
        10 to 15 after a failed unprepare.
    say : callable
        Called with one line for each thing that happens.
    """

    def __init__(
        self,
        api: ApiServer,
        kubelet: Kubelet,
        runtime: ContainerRuntime,
        node_name: str,
        *,
        retry_s: float = 10.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._api = api
        self._kubelet = kubelet
        self._runtime = runtime
        self._node_name = node_name
        self._retry_s = retry_s
        self._say = say
        self._workers: dict[str, asyncio.Task[None]] = {}
        # Which pods use a claim on this node, and which drivers have been asked to prepare it.
        self._users: defaultdict[str, set[str]] = defaultdict(set)
        self._drivers: dict[str, set[str]] = {}
        self._event_numbers = itertools.count(1)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for pod in await self._api.wait_until(self._new_pods, timeout_s=None):
                    self._workers[pod["metadata"]["uid"]] = group.create_task(self._work(pod))

    def _new_pods(self) -> list[JsonObject]:
        pods = self._api.list(PODS, f"spec.nodeName={self._node_name}")
        return [pod for pod in pods if pod["metadata"]["uid"] not in self._workers]

    async def _work(self, pod: JsonObject) -> None:
        metadata = pod["metadata"]
        place = f"pod {metadata['namespace']}/{metadata['name']}"
        claims: dict[str, ClaimName] = {}
        containers = PodContainers(self._runtime, pod)
        while not self._is_ending(metadata):
            try:
                await containers.start(await self._prepare(pod, claims))
            except (KubeletError, StatusError, RefusedError) as error:
                self._say(f"{place}: {error}")
                refused = isinstance(error, RefusedError)
                self._record_event(pod, "Failed" if refused else "FailedPrepareDynamicResources", str(error))
                await self._wait_for_end(metadata, self._retry_s)
            else:
                self._set_phase(metadata, "Running")
                self._say(f"{place}: running, {len(claims)} claim{'s' if len(claims) != 1 else ''} prepared")
                await self._wait_for_end(metadata, None)
        await containers.remove()
        while failures := [failure for claim in claims.values() if (failure := await self._unprepare(metadata, claim))]:
            self._say(f"{place}: cannot end: {'; '.join(failures)}")
            self._record_event(pod, "FailedUnprepareDynamicResources", "; ".join(failures))
            await asyncio.sleep(self._retry_s)
        if self._current(metadata) is not None:
            self._api.delete(PODS, metadata["name"], metadata["namespace"])
        for claim in claims.values():
            self._end_reservation(claim, metadata["uid"])
        del self._workers[metadata["uid"]]
        self._say(f"{place}: gone, its claims are unprepared")

    async def _prepare(self, pod: JsonObject, claims: dict[str, ClaimName]) -> Mapping[str, Sequence[PreparedDevice]]:
        """Have all claims of a pod prepared, and return their devices by the names that the pod has for the claims.

        `claims` takes those of which a driver may know.
        """
        by_driver: defaultdict[str, list[ClaimName]] = defaultdict(list)
        references = pod["spec"].get("resourceClaims") or ()
        found = [self._usable_claim(pod, reference) for reference in references]
        devices: dict[str, list[PreparedDevice]] = {claim["metadata"]["uid"]: [] for claim in found}
        for claim in found:
            metadata = claim["metadata"]
            name = ClaimName(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
            results = (claim["status"]["allocation"].get("devices") or {}).get("results") or ()
            self._drivers[name.uid] = {result["driver"] for result in results}
            for driver in self._drivers[name.uid]:
                by_driver[driver].append(name)
            claims[name.uid] = name
            self._users[name.uid].add(pod["metadata"]["uid"])
        for driver, names in by_driver.items():
            answers = await self._kubelet.prepare(driver, names)
            for name in names:
                if answers[name.uid].error:
                    raise KubeletError(f"prepare claim {name.name}: {answers[name.uid].error}")
                devices[name.uid] += answers[name.uid].devices
        uids = [claim["metadata"]["uid"] for claim in found]
        return {reference["name"]: devices[uid] for reference, uid in zip(references, uids, strict=True)}

    def _usable_claim(self, pod: JsonObject, reference: JsonObject) -> JsonObject:
        namespace, uid = pod["metadata"]["namespace"], pod["metadata"]["uid"]
        name = reference.get("resourceClaimName")
        if not name:
            raise KubeletError(
                f"{reference.get('name')}: only resourceClaimName works here, there are no claim templates"
            )
        claim = self._api.registry.read(RESOURCE_CLAIMS, namespace, name)
        status = claim.get("status") or {}
        if not status.get("allocation"):
            raise KubeletError(f"claim {name} is not allocated")
        if all(user["uid"] != uid for user in status.get("reservedFor", ())):
            user = {"resource": "pods", "name": pod["metadata"]["name"], "uid": uid}
            status["reservedFor"] = [*status.get("reservedFor", ()), user]
            claim = self._api.put(RESOURCE_CLAIMS, claim, "status")
        return claim

    async def _unprepare(self, pod: JsonObject, claim: ClaimName) -> str:
        self._users[claim.uid].discard(pod["uid"])
        if self._users[claim.uid]:
            return ""
        for driver in sorted(self._drivers.get(claim.uid, ())):
            try:
                error = (await self._kubelet.unprepare(driver, [claim]))[claim.uid]
            except KubeletError as failure:
                error = str(failure)
            if error:
                return f"unprepare claim {claim.name}: {error}"
            self._drivers[claim.uid].discard(driver)
        return ""

    def _end_reservation(self, claim: ClaimName, pod_uid: str) -> None:
        current = self._api.get(RESOURCE_CLAIMS, claim.name, claim.namespace)
        if current is None or current["metadata"]["uid"] != claim.uid:
            return
        status = current.get("status") or {}
        status["reservedFor"] = [user for user in status.get("reservedFor", ()) if user["uid"] != pod_uid]
        protected = _FINALIZER in current["metadata"].get("finalizers", ())
        if protected and not status["reservedFor"]:
            status.pop("allocation", None)
        current = self._api.put(RESOURCE_CLAIMS, {**current, "status": status}, "status")
        if protected and "allocation" not in current.get("status", {}):
            current["metadata"]["finalizers"].remove(_FINALIZER)
            self._api.registry.update(RESOURCE_CLAIMS, claim.namespace, claim.name, current)

    def _current(self, metadata: JsonObject) -> JsonObject | None:
        pod = self._api.get(PODS, metadata["name"], metadata["namespace"])
        return pod if pod is not None and pod["metadata"]["uid"] == metadata["uid"] else None

    def _is_ending(self, metadata: JsonObject) -> bool:
        pod = self._current(metadata)
        return pod is None or "deletionTimestamp" in pod["metadata"]

    async def _wait_for_end(self, metadata: JsonObject, timeout_s: float | None) -> None:
        try:
            await self._api.wait_until(lambda: self._is_ending(metadata), timeout_s)
        except TimeoutError:
            return

    def _set_phase(self, metadata: JsonObject, phase: str) -> None:
        pod = self._current(metadata)
        if pod is not None:
            self._api.put(PODS, {**pod, "status": {**pod.get("status", {}), "phase": phase}}, "status")

    def _record_event(self, pod: JsonObject, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        kinds = {"apiVersion": "v1", "kind": "Pod"}
        about = {key: metadata[key] for key in ("namespace", "name", "uid", "resourceVersion")}
        self._api.create(
            EVENTS,
            {
                "metadata": {
                    "namespace": metadata["namespace"],
                    "name": f"{metadata['name']}.{next(self._event_numbers)}",
                },
                "involvedObject": {**kinds, **about},
                "reason": reason,
                "message": message,
                "type": "Warning",
                "source": {"component": "kubelet", "host": self._node_name},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            },
        )
