# SPDX-License-Identifier: Apache-2.0
"""The objects of the box's API server and the history of their changes, with etcd's rules for resource versions.

One counter numbers every change of every object. Watches read the history; what has fallen out of it is gone and a
watch that asks for it is told so. Objects go in and come out as copies, so nobody can change a stored one by accident.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from driver.sandbox.apistatus import JsonObject
from driver.sandbox.kinds import FieldSelector, Kind


def copy_json(obj: JsonObject) -> JsonObject:
    """Return a deep copy; anything that JSON cannot say raises `TypeError` or `ValueError`."""
    copied: JsonObject = json.loads(json.dumps(obj, allow_nan=False))
    return copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step in the history: the object before (None: created) and after (None: deleted)."""

    resource_version: int
    kind: Kind
    namespace: str
    before: JsonObject | None
    after: JsonObject | None

    def event(self, selector: FieldSelector) -> tuple[str, JsonObject] | None:
        """Return what a watch with this selector sees: an object may enter or leave the selection by a change."""
        was = self.before is not None and selector.matches(self.before)
        if self.after is not None and selector.matches(self.after):
            return ("MODIFIED" if was else "ADDED"), self.after
        if was and self.before is not None:
            gone = copy_json(self.after if self.after is not None else self.before)
            gone["metadata"]["resourceVersion"] = str(self.resource_version)
            return "DELETED", gone
        return None


class ObjectStore:
    """Keeps objects by kind, namespace and name. Safe to use from several threads.

    Parameters
    ----------
    history : int
        How many changes watches can look back.
    """

    def __init__(self, history: int = 10_000) -> None:
        self.lock = threading.RLock()
        self._objects: dict[Kind, dict[tuple[str, str], JsonObject]] = {}
        self._history: deque[Change] = deque(maxlen=history)
        self._listeners: list[Callable[[], None]] = []
        # Not zero: to clients "0" means "any version will do".
        self._resource_version = 1
        self._compacted = 1

    @property
    def resource_version(self) -> int:
        """The number of the latest change."""
        return self._resource_version

    @property
    def oldest_version(self) -> int:
        """The oldest version from which the history is complete."""
        return self._compacted

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every change, in the thread that made it; returns the function that ends this."""
        with self.lock:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def wake_on_change(self, event: asyncio.Event) -> Callable[[], None]:
        """Set `event` of the running loop after every change, whichever thread makes it; returns what ends this."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(event.set)

        return self.subscribe(wake)

    def get(self, kind: Kind, namespace: str, name: str) -> JsonObject | None:
        """Return a copy of an object, or None."""
        with self.lock:
            found = self._objects.get(kind, {}).get((namespace, name))
            return None if found is None else copy_json(found)

    def select(self, kind: Kind, namespace: str | None, selector: FieldSelector) -> tuple[list[JsonObject], int]:
        """Return copies of the matching objects in order of namespace and name, and the version of this state.

        Parameters
        ----------
        kind : Kind
        namespace : str or None
            None selects across all namespaces.
        selector : FieldSelector
        """
        with self.lock:
            objects = self._objects.get(kind, {})
            found = [
                copy_json(obj)
                for (place, _), obj in sorted(objects.items())
                if namespace in (None, place) and selector.matches(obj)
            ]
            return found, self._resource_version

    def put(self, kind: Kind, namespace: str, name: str, obj: JsonObject) -> JsonObject:
        """Store an object, give it the next resource version, and return a copy of what was stored."""
        with self.lock:
            stored = copy_json(obj)
            objects = self._objects.setdefault(kind, {})
            before = objects.get((namespace, name))
            self._resource_version += 1
            stored["metadata"]["resourceVersion"] = str(self._resource_version)
            objects[namespace, name] = stored
            self._record(kind, namespace, before, stored)
            return copy_json(stored)

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        """Remove an object that exists."""
        with self.lock:
            before = self._objects[kind].pop((namespace, name))
            self._resource_version += 1
            self._record(kind, namespace, before, None)

    def changes_after(self, version: int, kind: Kind, namespace: str | None) -> tuple[list[Change], int]:
        """Return the changes of a kind since a version, and the version up to which that is complete."""
        with self.lock:
            found = []
            for change in self._newest_first():
                if change.resource_version <= version:
                    break
                if change.kind is kind and namespace in (None, change.namespace):
                    found.append(change)
            return found[::-1], self._resource_version

    def compact(self) -> None:
        """Forget the history: every watch that has not seen the latest change must list again."""
        with self.lock:
            # Like any other write, a compaction moves the version on, so that no client is up to date by luck.
            self._resource_version += 1
            self._history.clear()
            self._compacted = self._resource_version

    def _newest_first(self) -> Iterator[Change]:
        return reversed(self._history)

    def _record(self, kind: Kind, namespace: str, before: JsonObject | None, after: JsonObject | None) -> None:
        if len(self._history) == self._history.maxlen:
            self._compacted = self._history[0].resource_version
        self._history.append(
            Change(resource_version=self._resource_version, kind=kind, namespace=namespace, before=before, after=after)
        )
        for listener in tuple(self._listeners):
            listener()
