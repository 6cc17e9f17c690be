# SPDX-License-Identifier: Apache-2.0
"""What this node's ResourceSlices should be, and the writes that get there from whatever is stored.

Pure: objects in, objects out. The rules are those of the Go controller that kubelet plugins share, because schedulers
rely on them: one pool named like the node, slices whose names sort in the order of their devices, one owner, and a pool
generation that tells a complete pool from one in the middle of a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from driver.names import DRIVER_NAME
from driver.quantity import parse_quantity

DEVICES_PER_SLICE: Final = 128
DEVICES_PER_SLICE_WITH_LISTS: Final = 64
_LISTS: Final = frozenset({"bools", "ints", "strings", "versions"})
_MAX_GENERATION: Final = (1 << 63) - 1
# The server cuts a generateName here and appends five characters. Cutting it first keeps a long node name from being
# refused for its length, which is checked before the cut.
_NAME_PREFIX_LIMIT: Final = 58
_QUANTITIES: Final = frozenset({"capacity", "nodeAllocatableResources"})

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The slices that a node should have.

    Attributes
    ----------
    node_name, node_uid : str
        The Node, which gives the pool its name and owns the slices.
    chunks : tuple of tuple of dict
        The devices of each slice, in order of their allocation; at least one slice, perhaps without devices, which
        says that the driver is up.
    """

    node_name: str
    node_uid: str
    chunks: tuple[tuple[JsonObject, ...], ...]

    @property
    def index_width(self) -> int:
        """How many hex digits a slice's name begins with."""
        return max(5, len(f"{len(self.chunks) - 1:x}"))

    def content(self, index: int) -> JsonObject:
        """Return all that is ours to decide in a slice, but for the generation."""
        return {
            "metadata": {
                "ownerReferences": [
                    {
                        "apiVersion": "v1",
                        "kind": "Node",
                        "name": self.node_name,
                        "uid": self.node_uid,
                        "controller": True,
                    }
                ]
            },
            "spec": {
                "driver": DRIVER_NAME,
                "nodeName": self.node_name,
                "pool": {"name": self.node_name, "resourceSliceCount": len(self.chunks)},
                "devices": list(self.chunks[index]),
            },
        }

    def new_slice(self, index: int, generation: int) -> JsonObject:
        """Return the body that creates a slice."""
        prefix = f"{index:0{self.index_width}x}-{DRIVER_NAME}-{self.node_name}-"
        if len(prefix) > _NAME_PREFIX_LIMIT:
            prefix = prefix[: _NAME_PREFIX_LIMIT - 1].rstrip("-.") + "-"
        return self._body(index, generation, {"generateName": prefix})

    def next_version(self, index: int, generation: int, stored: Mapping[str, Any]) -> JsonObject:
        """Return the body that replaces a stored slice; labels and annotations that others gave it stay."""
        metadata = {key: value for key, value in stored["metadata"].items() if key != "managedFields"}
        return self._body(index, generation, metadata)

    def _body(self, index: int, generation: int, metadata: Mapping[str, Any]) -> JsonObject:
        content = self.content(index)
        content["spec"]["pool"]["generation"] = generation
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {**metadata, **content["metadata"]},
            "spec": content["spec"],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A slice to send: its position in the pool and its body."""

    index: int
    body: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The writes that make a pool what it should be, to be done in this order: delete, replace, create."""

    generation: int
    delete: tuple[JsonObject, ...]
    replace: tuple[Write, ...]
    create: tuple[Write, ...]

    def __bool__(self) -> bool:
        """Tell whether there is anything to do."""
        return bool(self.delete or self.replace or self.create)


def has_list_attributes(devices: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether any device has an attribute whose value is a list."""
    return any(
        not _LISTS.isdisjoint(attribute)
        for device in devices
        for attribute in (device.get("attributes") or {}).values()
    )


def divide(devices: Sequence[JsonObject], *, node_name: str, node_uid: str) -> Pool:
    """Divide a node's devices into slices.

    Parameters
    ----------
    devices : Sequence[dict]
        In the order in which they should be allocated.
    node_name, node_uid : str
        The Node.
    """
    limit = DEVICES_PER_SLICE_WITH_LISTS if has_list_attributes(devices) else DEVICES_PER_SLICE
    chunks = tuple(tuple(devices[start : start + limit]) for start in range(0, len(devices), limit))
    return Pool(node_name=node_name, node_uid=node_uid, chunks=chunks or ((),))


def content_of(stored: Mapping[str, Any]) -> JsonObject:
    """Return of a stored slice what `Pool.content` says of a wanted one."""
    spec = dict(stored.get("spec") or {})
    spec["pool"] = {key: value for key, value in (spec.get("pool") or {}).items() if key != "generation"}
    return {"metadata": {"ownerReferences": stored["metadata"].get("ownerReferences")}, "spec": spec}


def plan_writes(pool: Pool, stored: Iterable[JsonObject], accepted: Mapping[int, JsonObject]) -> Plan:
    """Find the writes that turn the stored slices into the wanted pool.

    Parameters
    ----------
    pool : Pool
        What should be there.
    stored : Iterable[dict]
        The slices of this driver and node, whoever made them. Slices of others are left alone.
    accepted : Mapping[int, dict]
        By position, the `content_of` a slice that the server stores otherwise than it is sent: that is then as good
        as what was sent.

    Returns
    -------
    Plan
        Empty if everything is in place.

    Notes
    -----
    The generation stays if no slice has to be created and at most one changes, so that a change of one slice is seen at
    once. Otherwise it grows and every slice is rewritten: until the last one is there, schedulers skip the pool.
    """
    ours = [slice_ for slice_ in stored if _is_of(pool.node_name, slice_)]
    of_pool = [slice_ for slice_ in ours if _pool_of(slice_).get("name") == pool.node_name]
    # Nothing can outdo the last generation. A slice that has it is deleted, and plays no part if it cannot be.
    generation = max((n for n in map(_generation, of_pool) if n < _MAX_GENERATION), default=0)

    current: dict[int, JsonObject] = {}
    delete: list[JsonObject] = []
    outdone = False
    for slice_ in sorted(ours, key=lambda item: str(item["metadata"]["name"])):
        newest = _pool_of(slice_).get("name") == pool.node_name and _generation(slice_) == generation
        if slice_["metadata"].get("deletionTimestamp"):
            # Somebody's finalizer keeps it. It cannot be changed or deleted again, only be made older than the others.
            outdone = outdone or newest
            continue
        index = _index(pool, slice_)
        if not newest or index is None or index in current:
            delete.append(slice_)
        else:
            current[index] = slice_

    changed = [
        index
        for index, slice_ in sorted(current.items())
        if not same(accepted.get(index) or pool.content(index), content_of(slice_))
    ]
    missing = [index for index in range(len(pool.chunks)) if index not in current]
    if missing or outdone or len(changed) > 1:
        generation += 1
        changed = sorted(current)
    return Plan(
        generation=generation,
        delete=tuple(delete),
        replace=tuple(
            Write(index=index, body=pool.next_version(index, generation, current[index])) for index in changed
        ),
        create=tuple(Write(index=index, body=pool.new_slice(index, generation)) for index in missing),
    )


def same(wanted: object, found: object) -> bool:
    """Tell whether two objects mean the same: see `differences`."""
    return next(differences(wanted, found), None) is None


def differences(wanted: object, found: object, path: str = "", quantities: bool = False) -> Iterator[str]:
    """Find where an object means something else than another.

    Null, an empty list, an empty mapping and a missing key are the same; quantities are compared by value; the order of
    lists counts.

    Parameters
    ----------
    wanted, found : object
        JSON values.
    path : str
        Where they are.
    quantities : bool
        Whether text and numbers there may be quantities.

    Yields
    ------
    str
        Paths such as ``spec.devices[0].capacity``, each the outermost that has no counterpart or another value.
    """
    if wanted == found or (_is_empty(wanted) and _is_empty(found)):
        return
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key in {**wanted, **found}:
            step = f"[{key}]" if "." in key or "/" in key else f".{key}" if path else key
            yield from differences(wanted.get(key), found.get(key), path + step, quantities or key in _QUANTITIES)
    elif isinstance(wanted, list) and isinstance(found, list):
        for index in range(max(len(wanted), len(found))):
            yield from differences(
                wanted[index] if index < len(wanted) else None,
                found[index] if index < len(found) else None,
                f"{path}[{index}]",
                quantities,
            )
    elif not (quantities and _same_quantity(wanted, found)):
        yield path


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, Mapping | list) and not value)


def _same_quantity(wanted: object, found: object) -> bool:
    try:
        return parse_quantity(wanted) == parse_quantity(found)
    except ValueError:
        return False


def _is_of(node_name: str, slice_: Mapping[str, Any]) -> bool:
    # The server has been asked for these only. But what this module returns is deleted, so it does not rely on that.
    spec = slice_.get("spec") or {}
    return spec.get("driver") == DRIVER_NAME and spec.get("nodeName") == node_name


def _pool_of(slice_: Mapping[str, Any]) -> Mapping[str, Any]:
    pool: Mapping[str, Any] = slice_["spec"].get("pool") or {}
    return pool


def _generation(slice_: Mapping[str, Any]) -> int:
    generation = _pool_of(slice_).get("generation")
    return generation if isinstance(generation, int) else 0


def _index(pool: Pool, slice_: Mapping[str, Any]) -> int | None:
    """Return the position that a slice's name claims, if the pool has such a position."""
    match = re.match(rf"([0-9a-f]{{{pool.index_width}}})-", slice_["metadata"]["name"], re.ASCII)
    index = int(match[1], 16) if match else len(pool.chunks)
    return index if index < len(pool.chunks) else None
