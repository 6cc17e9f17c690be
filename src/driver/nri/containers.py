# SPDX-License-Identifier: Apache-2.0
"""The containers that live on this node, and which of them may have some CPUs.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.nri.container import nobody
from driver.nri.occupancy import Occupancy
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from driver.names import ClaimUID
    from driver.nri.container import Container


class Containers:
    """The containers that live, by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Container] = {}
        self._users: dict[ClaimUID, dict[str, Container]] = {}
        self._beside: dict[str, Container] = {}
        self._shared: int = 0
        self._may_have: dict[str, CpuSet] = {}
        self._occupancy = Occupancy()
        self._doubted: dict[str, Container] = {}
        self._offline = CpuSet()
        self._stranded: dict[str, Container] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Container]:
        return iter(self._by_id.values())

    @property
    def shared(self) -> int:
        """How many are on the shared pool."""
        return self._shared

    def get(self, identity: str) -> Container | None:
        """Return a container, None if it does not live or is not known."""
        return self._by_id.get(identity)

    def add(self, container: Container) -> None:
        """Add a container, in the place of one with its id if there is one."""
        self.remove(container.id)
        self._by_id[container.id] = container
        for uid in container.claims:
            self._users.setdefault(uid, {})[container.id] = container
        if container.beside:
            self._beside[container.id] = container
        self._shared += not container.claims
        self._note(container)
        container.watch = self._note

    def assign(self, container: Container, claims: frozenset[ClaimUID], exclusive: CpuSet) -> None:
        """Add a container, or let one that is known have other claims than before."""
        self.remove(container.id)
        container.claims = claims
        container.exclusive = exclusive
        self.add(container)

    def remove(self, identity: str) -> Container | None:
        """Forget a container, and return it; what is not known any more is no error."""
        container = self._by_id.pop(identity, None)
        if container is not None:
            self._drop(container)
            self._beside.pop(identity, None)
            self._shared -= not container.claims
            for uid in container.claims:
                users = self._users[uid]
                del users[identity]
                if not users:
                    del self._users[uid]
        return container

    def replace_all(self, containers: Iterable[Container]) -> None:
        """Forget all, and take these instead."""
        for container in list(self._by_id.values()):
            self.remove(container.id)
        for container in containers:
            self.add(container)

    def of_sandbox(self, sandbox: str) -> tuple[Container, ...]:
        """Return the containers of a pod's sandbox."""
        return tuple(container for container in self._by_id.values() if container.pod.sandbox == sandbox)

    def users(self, uid: ClaimUID) -> tuple[Container, ...]:
        """Return the containers that have a claim's CPUs for themselves: those of one pod, its owner."""
        return tuple(self._users.get(uid, {}).values())

    def beside(self, uid: ClaimUID) -> Iterator[Container]:
        """Yield the containers that the driver has found on a claim's CPUs, and that do not use the claim."""
        for container in self._beside.values():
            if uid in container.beside and uid not in container.claims:
                yield container

    @property
    def doubted(self) -> tuple[Container, ...]:
        """The containers that may have other CPUs than they were given last."""
        return tuple(self._doubted.values())

    def others(self, uid: ClaimUID, cpus: CpuSet, offline: CpuSet) -> list[Container]:
        """Return the containers without a claim that may run on some of its CPUs.

        Where there is none, which is the rule, that is found out without looking at each.

        Parameters
        ----------
        uid : ClaimUID
            The claim.
        cpus : CpuSet
            The CPUs.
        offline : CpuSet
            The CPUs that are offline: a container all of whose CPUs are may run on any.
        """
        if not self._reached(uid, cpus, offline):
            return []
        return [
            container
            for container in self._by_id.values()
            if uid not in container.claims
            and (
                self._has_nowhere(container)
                or not container.may_have.isdisjoint(cpus)
                or not container.astray.isdisjoint(cpus)
            )
        ]

    def _reached(self, uid: ClaimUID, cpus: CpuSet, offline: CpuSet) -> bool:
        if offline != self._offline:
            self._offline = offline
            self._stranded = {one.id: one for one in self._by_id.values() if self._is_stranded(one)}
        users = self._users.get(uid, {})
        if any(identity not in users for identity in self._stranded):
            return True
        return self._occupancy.reaches(cpus, besides=[user.may_have for user in users.values()])

    def _note(self, container: Container) -> None:
        """Take note of what a container may have now."""
        before, after = self._may_have.get(container.id), container.may_have
        if before != after:
            self._occupancy.add(after)
            if before is not None:
                self._occupancy.remove(before)
            self._may_have[container.id] = after
        _put(self._doubted, container, container.is_doubted)
        _put(self._stranded, container, self._is_stranded(container))

    def _is_stranded(self, container: Container) -> bool:
        """Tell whether the kernel may let a container run on CPUs that it was not given."""
        return self._has_nowhere(container) or bool(container.astray)

    def _has_nowhere(self, container: Container) -> bool:
        """Tell whether all CPUs of a container are offline: it may run on any."""
        return bool(self._offline) and container.given <= self._offline

    def _drop(self, container: Container) -> None:
        container.watch = nobody
        self._occupancy.remove(self._may_have.pop(container.id))
        _put(self._doubted, container, False)
        _put(self._stranded, container, False)


def _put(among: dict[str, Container], container: Container, there: bool) -> None:
    if there:
        among[container.id] = container
    else:
        among.pop(container.id, None)
