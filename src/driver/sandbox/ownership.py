# SPDX-License-Identifier: Apache-2.0
"""Who owns which field: server-side apply and the `managedFields` behind it.

A field is a path: a tuple of segments spelled as `fieldsV1` spells them, `f:name` for a member and `k:{…}` for an entry
of a list whose entries have keys. The presence of such an entry, and of a map, is a field of its own with the last
segment `.`. Everything that is not listed here as keyed is owned as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from driver.sandbox.apistatus import JsonObject, StatusError
from driver.sandbox.kinds import Kind
from driver.sandbox.store import copy_json

Path = tuple[str, ...]
Fields = frozenset[Path]

# List entries are addressed by these keys; the place of an entry in its list is not part of the name here.
_KEYED_LISTS: Final[dict[Path, tuple[str, ...]]] = {
    ("metadata", "ownerReferences"): ("uid",),
    ("status", "conditions"): ("type",),
    ("status", "devices"): ("device", "driver", "pool", "shareID"),
    ("status", "devices", "conditions"): ("type",),
    ("status", "reservedFor"): ("uid",),
}
_SETS: Final[frozenset[Path]] = frozenset({("metadata", "finalizers")})
_MAPS: Final[frozenset[Path]] = frozenset(
    {("metadata", "labels"), ("metadata", "annotations"), ("status", "capacity"), ("status", "allocatable")}
)
_ATOMIC: Final[frozenset[Path]] = frozenset({("status", "devices", "data"), ("status", "allocation", "nodeSelector")})

# Members that every object has, so that their presence says nothing.
_ALWAYS_THERE: Final[frozenset[Path]] = frozenset(
    {("metadata",), ("spec",), ("status",), ("spec", "devices"), ("spec", "pool")}
)

# The server itself keeps these; no client owns them.
_UNOWNED: Final = frozenset(
    {
        ("f:apiVersion",),
        ("f:kind",),
        *(
            ("f:metadata", f"f:{key}")
            for key in (
                "name",
                "namespace",
                "uid",
                "resourceVersion",
                "generation",
                "creationTimestamp",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
                "managedFields",
            )
        ),
    }
)


def fields_of(obj: JsonObject, *, containers: bool = False) -> dict[Path, Any]:
    """Return all ownable fields of an object with their values.

    Parameters
    ----------
    obj : dict
    containers : bool
        Whether the presence of every object and keyed list counts as a field; it does where two states are compared.
    """
    return {
        path: value
        for path, value in _walk(obj, (), (), containers)
        if path[:2] not in _UNOWNED and path[:1] not in _UNOWNED
    }


def record_update(
    kind: Kind, old: JsonObject | None, new: JsonObject, manager: str, subresource: str, now: str
) -> None:
    """Give the fields that an ordinary write changed to `manager`, in the `managedFields` of `new`.

    Parameters
    ----------
    kind : Kind
    old, new : dict
        The object before (None: it is being created) and after; `new` is changed in place.
    manager : str
        Who writes.
    subresource : str
        The subresource written to, or empty.
    now : str
        Time of the write.
    """
    before = {} if old is None else fields_of(old, containers=True)
    after = fields_of(new, containers=True)
    touched = {path for path, value in after.items() if path not in before or before[path] != value}
    entries = _entries(old)
    for key in list(entries):
        _set_fields(entries, key, {path for path in entries[key][0] if path in after and path not in touched}, None)
    own = (manager, "Update", subresource)
    owned = set(entries[own][0]) if own in entries else set()
    if touched:
        _set_fields(entries, own, owned | touched, now)
    _store_entries(kind, new, entries)


def apply(
    kind: Kind, live: JsonObject, applied: JsonObject, manager: str, subresource: str, now: str, *, force: bool
) -> JsonObject:
    """Return `live` with the fields of a server-side apply merged in, and its `managedFields` brought up to date.

    What the manager applied before and leaves out now goes, unless somebody else owns it too.

    Raises
    ------
    StatusError
        409 if another manager owns a field with another value and `force` is not given.
    """
    wanted = fields_of(applied)
    current = fields_of(live)
    entries = _entries(live)
    own = (manager, "Apply", subresource)
    previous = set(entries[own][0]) if own in entries else set()

    disputed: dict[tuple[str, str, str], set[Path]] = {}
    for key, (fields, _) in entries.items():
        clash = {p for p in fields if p in wanted and current.get(p) != wanted[p]} if key != own else set()
        if clash:
            disputed[key] = clash
    if disputed and not force:
        raise _apply_conflict(disputed)
    for key, clash in disputed.items():
        _set_fields(entries, key, set(entries[key][0]) - clash, None)

    elsewhere = {path for key, (fields, _) in entries.items() if key != own for path in fields}
    merged = copy_json(live)
    _merge(merged, applied, ())
    doomed = previous - set(wanted) - elsewhere
    # Whole entries go first: with its keys removed one by one an entry could not be found any more. An entry stays as
    # long as anyone else has something in it.
    kept = elsewhere | set(wanted)
    for path in sorted(path for path in doomed if path[-1] == "."):
        if not any(other[: len(path) - 1] == path[:-1] for other in kept):
            _drop(merged, path)
    for path in doomed:
        if path[-1] != "." and not _is_key(path):
            _drop(merged, path)
    changed = merged != live or previous != set(wanted)
    _set_fields(entries, own, set(wanted), now if changed else None)
    _store_entries(kind, merged, entries)
    return merged


def _walk(value: Any, path: Path, place: Path, containers: bool) -> Iterator[tuple[Path, Any]]:
    """Yield the fields below `value`; `path` names it as fieldsV1 does, `place` without the list keys."""
    is_keyed = isinstance(value, list) and place in _KEYED_LISTS
    is_set = isinstance(value, list) and place in _SETS
    is_object = isinstance(value, dict) and value and place not in _ATOMIC
    if not (is_keyed or is_set or is_object):
        # Null says as little as nothing at all, and neither does an empty part that is always there.
        if value is not None and not (value == {} and place in _ALWAYS_THERE):
            yield path, value
        return
    if place in _MAPS or (
        containers and value and place and place not in _ALWAYS_THERE and not path[-1].startswith("k:")
    ):
        yield (*path, "."), None
    if is_object:
        for key, member in value.items():
            yield from _walk(member, (*path, f"f:{key}"), (*place, key), containers)
        return
    for entry in value:
        if is_set:
            yield (*path, "v:" + json.dumps(entry)), entry
            continue
        entry_path = (*path, _entry_key(entry, place))
        yield (*entry_path, "."), None
        for key, member in entry.items():
            yield from _walk(member, (*entry_path, f"f:{key}"), (*place, key), containers)


def _entry_key(entry: Any, place: Path) -> str:
    if not isinstance(entry, dict):
        raise StatusError(400, f"{'.'.join(place)}: entries must be objects, not {json.dumps(entry)[:80]}")
    keys = {key: entry[key] for key in _KEYED_LISTS[place] if key in entry}
    return "k:" + json.dumps(keys, sort_keys=True, separators=(",", ":"))


def _merge(target: JsonObject, source: JsonObject, place: Path) -> None:
    """Merge `source` into `target` by the same rules of ownership as `_walk` follows."""
    for key, value in source.items():
        here = (*place, key)
        mine = target.get(key)
        if isinstance(value, dict) and isinstance(mine, dict) and here not in _ATOMIC:
            _merge(mine, value, here)
        elif isinstance(value, list) and isinstance(mine, list) and here in _KEYED_LISTS:
            by_key = {_entry_key(entry, here): entry for entry in mine}
            for entry in value:
                name = _entry_key(entry, here)
                if name in by_key:
                    _merge(by_key[name], entry, here)
                else:
                    mine.append(copy_json(entry))
        elif isinstance(value, list) and isinstance(mine, list) and here in _SETS:
            mine.extend(entry for entry in value if entry not in mine)
        else:
            target[key] = json.loads(json.dumps(value))


def _is_key(path: Path) -> bool:
    """Whether a path leads to one of the members that name an entry of a list."""
    return len(path) > 1 and path[-2].startswith("k:") and path[-1].removeprefix("f:") in json.loads(path[-2][2:])


def _drop(obj: JsonObject, path: Path) -> None:
    """Remove the field at `path`, and the members that become empty by it."""
    node: Any = obj
    trail: list[tuple[Any, Any]] = []
    place: Path = ()
    for segment in path:
        if segment == ".":
            break
        selector: Any
        if segment.startswith("f:"):
            selector = segment[2:]
            place = (*place, selector)
            if not isinstance(node, dict) or selector not in node:
                return
        elif segment.startswith("k:"):
            found = [i for i, entry in enumerate(node) if _entry_key(entry, place) == segment]
            if not found:
                return
            selector = found[0]
        else:
            entry = json.loads(segment[2:])
            if entry not in node:
                return
            selector = node.index(entry)
        trail.append((node, selector))
        node = node[selector]
    for parent, selector in reversed(trail):
        del parent[selector]
        if parent:
            break


def _entries(obj: JsonObject | None) -> dict[tuple[str, str, str], tuple[Fields, str]]:
    found = {}
    for entry in (obj or {}).get("metadata", {}).get("managedFields", ()):
        key = (entry.get("manager", ""), entry.get("operation", ""), entry.get("subresource", ""))
        found[key] = (frozenset(_flatten(entry.get("fieldsV1", {}), ())), entry.get("time", ""))
    return found


def _set_fields(
    entries: dict[tuple[str, str, str], tuple[Fields, str]],
    key: tuple[str, str, str],
    fields: Iterable[Path],
    now: str | None,
) -> None:
    owned = frozenset(fields)
    if owned:
        entries[key] = (owned, now if now is not None else entries[key][1])
    else:
        entries.pop(key, None)


def _store_entries(kind: Kind, obj: JsonObject, entries: dict[tuple[str, str, str], tuple[Fields, str]]) -> None:
    managed = []
    for (manager, operation, subresource), (fields, time) in entries.items():
        entry: JsonObject = {
            "manager": manager,
            "operation": operation,
            "apiVersion": kind.api_version,
            "time": time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _unflatten(fields),
        }
        if subresource:
            entry["subresource"] = subresource
        managed.append(entry)
    # The server lists applied entries first, then by time.
    managed.sort(key=lambda entry: (entry["operation"] != "Apply", entry["time"], entry["manager"]))
    obj["metadata"]["managedFields"] = managed
    if not managed:
        del obj["metadata"]["managedFields"]


def _flatten(tree: JsonObject, path: Path) -> Iterator[Path]:
    for segment, below in tree.items():
        if below:
            yield from _flatten(below, (*path, segment))
        else:
            yield (*path, segment)


def _unflatten(fields: Iterable[Path]) -> JsonObject:
    tree: JsonObject = {}
    for path in sorted(fields):
        node = tree
        for segment in path:
            node = node.setdefault(segment, {})
    return tree


def _apply_conflict(disputed: dict[tuple[str, str, str], set[Path]]) -> StatusError:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{manager}"' + (f' with subresource "{subresource}"' if subresource else ""),
            "field": "".join(_shown(segment) for segment in path if segment != "."),
        }
        for (manager, _, subresource), paths in disputed.items()
        for path in sorted(paths)
    ]
    plural = "conflicts" if len(causes) > 1 else "conflict"
    lines = ", ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
    return StatusError(409, f"Apply failed with {len(causes)} {plural}: {lines}", details={"causes": causes})


def _shown(segment: str) -> str:
    """Return a path's segment as messages spell it."""
    kind, _, name = segment.partition(":")
    if kind == "k":
        return "[" + ",".join(f"{key}={json.dumps(value)}" for key, value in json.loads(name).items()) + "]"
    return f".{name}" if kind == "f" else f"[={name}]"
