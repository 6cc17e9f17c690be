# SPDX-License-Identifier: Apache-2.0
"""What the API server does with objects, whoever asks and by whatever transport.

Identity, resource versions, generations, optimistic concurrency, finalizers and ownership of fields are the same for
every kind; what is particular to a kind comes from its `Rules`.
"""

from __future__ import annotations

import datetime
import json
import secrets
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from driver.sandbox import ownership
from driver.sandbox.apistatus import FieldErrors, JsonObject, StatusError
from driver.sandbox.kinds import PODS, FieldSelector, Kind
from driver.sandbox.rules import PlainRules, Rules
from driver.sandbox.store import ObjectStore, copy_json
from driver.sandbox.syntax import check_subdomain

_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_LENGTH: Final = 5
_LONGEST_GENERATED_BASE: Final = 63 - _SUFFIX_LENGTH
_SERVER_METADATA: Final = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
)
_MODIFIED: Final = "the object has been modified; please apply your changes to the latest version and try again"


class Registry:
    """Creates, changes and deletes the objects of a store.

    Parameters
    ----------
    store : ObjectStore
    rules : mapping of Kind to Rules
        What is particular to a kind; other kinds keep whatever is written.
    clock : callable, optional
        Returns the time.
    """

    def __init__(
        self,
        store: ObjectStore,
        rules: Mapping[Kind, Rules],
        clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._store = store
        self._rules: dict[Kind, Rules] = {PODS: PlainRules(initial_status={"phase": "Pending"}), **rules}
        self._clock = clock

    def read(self, kind: Kind, namespace: str, name: str) -> JsonObject:
        """Return an object.

        Raises
        ------
        StatusError
            404 if there is none.
        """
        found = self._store.get(kind, namespace, name)
        if found is None:
            raise kind.not_found(name)
        return found

    def create(
        self, kind: Kind, namespace: str, body: JsonObject, manager: str = "", *, keep_uid: bool = False
    ) -> JsonObject:
        """Create an object and return it as stored.

        Parameters
        ----------
        kind : Kind
        namespace : str
            Empty for kinds that have none.
        body : dict
        manager : str
            Owner of its fields.
        keep_uid : bool
            Take over `metadata.uid` instead of making one, for objects that must be known beforehand.
        """
        new = self._checked_body(kind, namespace, body)
        metadata = new["metadata"]
        kept_uid = metadata.get("uid") if keep_uid else None
        for key in (*_SERVER_METADATA, "resourceVersion", "managedFields", "selfLink"):
            metadata.pop(key, None)
        with self._store.lock:
            if not metadata.get("name") and metadata.get("generateName"):
                metadata["name"] = self._generated_name(kind, namespace, str(metadata["generateName"]))
            metadata["uid"] = kept_uid or str(uuid.uuid4())
            metadata["creationTimestamp"] = self._now()
            if kind.counts_generations:
                metadata["generation"] = 1
            self._apply_rules(kind, new, None, "")
            name = metadata["name"]
            if self._store.get(kind, namespace, name) is not None:
                text = f'{kind.qualified_plural} "{name}" already exists'
                raise StatusError(409, text, reason="AlreadyExists", details=kind.details(name))
            written = {key: value for key, value in new.items() if key != "status" or "status" not in kind.subresources}
            ownership.record_update(kind, None, written, manager, "", self._now())
            return self._store.put(kind, namespace, name, new)

    def update(
        self, kind: Kind, namespace: str, name: str, body: JsonObject, subresource: str = "", manager: str = ""
    ) -> JsonObject:
        """Replace an object, or one subresource of it, and return what is stored then."""
        new = self._checked_body(kind, namespace, body)
        if new["metadata"].get("name") != name:
            raise _other_name(new, name)
        with self._store.lock:
            old = self.read(kind, namespace, name)
            uid, wanted = old["metadata"]["uid"], new["metadata"].get("uid")
            if wanted not in (None, "", uid):
                raise kind.conflict(
                    name, f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {uid}"
                )
            return self._write(kind, namespace, old, new, subresource, manager)

    def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: JsonObject, subresource: str = "", manager: str = ""
    ) -> JsonObject:
        """Change an object by a JSON merge patch and return what is stored then."""
        with self._store.lock:
            old = self.read(kind, namespace, name)
            merged = _merge_patched(old, patch)
            new = self._checked_body(kind, namespace, merged)
            if new["metadata"].get("name") != name:
                raise _other_name(new, name)
            return self._write(kind, namespace, old, new, subresource, manager)

    def apply(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        applied: JsonObject,
        subresource: str = "",
        manager: str = "",
        *,
        force: bool = False,
    ) -> tuple[JsonObject, bool]:
        """Apply fields to an object, which is created if it is missing and no subresource is meant.

        Returns
        -------
        tuple of dict and bool
            What is stored then, and whether it was created.
        """
        if not manager:
            text = "fieldManager: Required value: is required for apply patch"
            raise StatusError(422, f'PatchOptions.meta.k8s.io "" is invalid: {text}')
        body = self._checked_body(kind, namespace, applied)
        if body["metadata"].get("managedFields"):
            raise StatusError(400, "metadata.managedFields must be nil")
        if body["metadata"].get("name", name) != name:
            raise _other_name(body, name)
        if subresource:
            # The other parts of the object are reset here and are nobody's by this write.
            body = {key: value for key, value in body.items() if key in ("apiVersion", "kind", "metadata", subresource)}
            identity = {"name", "namespace", "uid", "resourceVersion"}
            body["metadata"] = {key: value for key, value in body["metadata"].items() if key in identity}
        else:
            body.pop("status", None)
        with self._store.lock:
            old = self._store.get(kind, namespace, name)
            if old is None:
                if subresource:
                    raise kind.not_found(name)
                if body["metadata"].get("uid"):
                    text = (
                        f"the provided object specified uid {body['metadata']['uid']}, and no existing object was found"
                    )
                    raise kind.conflict(name, f"uid mismatch: {text}")
                body["metadata"]["name"] = name
                return self.create(kind, namespace, body, manager), True
            self._check_identity(kind, old, body["metadata"])
            new = ownership.apply(kind, old, body, manager, subresource, self._now(), force=force)
            new = self._finish(kind, old, new, subresource)
            return self._put_if_changed(kind, namespace, old, new), False

    def delete(self, kind: Kind, namespace: str, name: str, options: JsonObject) -> JsonObject:
        """Delete an object, or mark it as being deleted while finalizers or a running pod keep it.

        Parameters
        ----------
        kind : Kind
        namespace, name : str
        options : dict
            DeleteOptions: `preconditions` and `gracePeriodSeconds` are honoured.

        Returns
        -------
        dict
            The object's last state, or a Status that reports the success.
        """
        with self._store.lock:
            old = self.read(kind, namespace, name)
            self._check_preconditions(kind, old, options.get("preconditions") or {})
            metadata = old["metadata"]
            grace = self._grace(kind, old, options)
            if metadata.get("finalizers") or grace:
                if "deletionTimestamp" not in metadata or grace < metadata.get("deletionGracePeriodSeconds", 0):
                    until = self._clock() + datetime.timedelta(seconds=grace)
                    metadata["deletionTimestamp"] = _timestamp(until)
                    metadata["deletionGracePeriodSeconds"] = grace
                    if kind.counts_generations:
                        metadata["generation"] += 1
                    return self._store.put(kind, namespace, name, old)
                return old
            self._store.remove(kind, namespace, name)
            if kind.returns_deleted:
                return old
            details = {**kind.details(name), "uid": metadata["uid"]}
            return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def delete_all(
        self, kind: Kind, namespace: str | None, selector: FieldSelector, options: JsonObject
    ) -> list[JsonObject]:
        """Delete every matching object and return their last states."""
        with self._store.lock:
            found, _ = self._store.select(kind, namespace, selector)
            for obj in found:
                metadata = obj["metadata"]
                self.delete(kind, metadata.get("namespace", ""), metadata["name"], options)
            return found

    def bind(self, namespace: str, name: str, binding: JsonObject) -> None:
        """Give a pod the node that a scheduler chose for it."""
        node = (binding.get("target") or {}).get("name")
        if not node or not isinstance(node, str):
            raise StatusError(422, f'Binding "{name}" is invalid: target.name: Required value')
        with self._store.lock:
            pod = self.read(PODS, namespace, name)
            bound_to = pod.get("spec", {}).get("nodeName")
            if bound_to:
                raise _binding_conflict(name, f"pod {name} is already assigned to node {json.dumps(bound_to)}")
            if pod["metadata"].get("deletionTimestamp"):
                raise _binding_conflict(name, f"pod {name} is being deleted, cannot be assigned to a host")
            pod.setdefault("spec", {})["nodeName"] = node
            self._store.put(PODS, namespace, name, pod)

    def _write(
        self, kind: Kind, namespace: str, old: JsonObject, new: JsonObject, subresource: str, manager: str
    ) -> JsonObject:
        self._check_identity(kind, old, new["metadata"])
        new = self._finish(kind, old, new, subresource)
        if _without_bookkeeping(new) == _without_bookkeeping(old):
            return old
        ownership.record_update(kind, old, new, manager, subresource, self._now())
        return self._put_if_changed(kind, namespace, old, new)

    def _finish(self, kind: Kind, old: JsonObject, new: JsonObject, subresource: str) -> JsonObject:
        metadata = new["metadata"]
        for key in (*_SERVER_METADATA, "resourceVersion"):
            metadata.pop(key, None)
            if key in old["metadata"]:
                metadata[key] = old["metadata"][key]
        if not metadata.get("finalizers"):
            metadata.pop("finalizers", None)
        self._apply_rules(kind, new, old, subresource)
        if kind.counts_generations and new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        return new

    def _put_if_changed(self, kind: Kind, namespace: str, old: JsonObject, new: JsonObject) -> JsonObject:
        if new == old:
            return old
        metadata = new["metadata"]
        # The last finalizer of an object that is being deleted was what kept it.
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers") and not self._is_running(kind, new):
            self._store.remove(kind, namespace, metadata["name"])
            return new
        return self._store.put(kind, namespace, metadata["name"], new)

    def _apply_rules(self, kind: Kind, new: JsonObject, old: JsonObject | None, subresource: str) -> None:
        rules = self._rules.get(kind, PlainRules(initial_status=None))
        rules.prepare(new, old, subresource)
        errors = FieldErrors()
        if old is None:
            if not new["metadata"].get("name"):
                errors.required("metadata.name", "name or generateName is required")
            else:
                check_subdomain(new["metadata"]["name"], "metadata.name", errors)
        if not errors:
            rules.check(new, old, subresource, errors)
        if errors:
            raise _invalid(kind, str(new["metadata"].get("name", "")), errors)

    def _checked_body(self, kind: Kind, namespace: str, body: object) -> JsonObject:
        if not isinstance(body, dict):
            raise StatusError(400, f"the body must be a {kind.name} object, not {type(body).__name__}")
        given = (body.get("apiVersion", kind.api_version), body.get("kind", kind.name))
        if given != (kind.api_version, kind.name):
            raise StatusError(
                400,
                f"{given[1]} in version {given[0]!r} cannot be handled as a {kind.name} "
                f"in version {kind.api_version!r}",
            )
        metadata = body.get("metadata")
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict):
            raise StatusError(400, "metadata must be an object")
        new = copy_json({**body, "apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata})
        for part in ("spec", "status"):
            if not isinstance(new.get(part, {}), dict):
                if new[part] is not None:
                    raise StatusError(400, f"{part} must be an object, not {json.dumps(new[part])[:80]}")
                del new[part]
        if kind.namespaced:
            if new["metadata"].setdefault("namespace", namespace) != namespace:
                raise StatusError(
                    400,
                    "the namespace of the provided object does not match the namespace sent on the request",
                )
        else:
            new["metadata"].pop("namespace", None)
        return new

    def _check_identity(self, kind: Kind, old: JsonObject, metadata: JsonObject) -> None:
        if metadata.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            raise kind.conflict(old["metadata"]["name"], _MODIFIED)
        if metadata.get("uid") not in (None, "", old["metadata"]["uid"]):
            errors = FieldErrors()
            errors.invalid("metadata.uid", metadata["uid"], "field is immutable")
            raise _invalid(kind, old["metadata"]["name"], errors)

    def _check_preconditions(self, kind: Kind, old: JsonObject, preconditions: JsonObject) -> None:
        name = old["metadata"]["name"]
        for key, word, happened in (
            ("uid", "UID", "deleted and then recreated"),
            ("resourceVersion", "ResourceVersion", "modified"),
        ):
            wanted, have = preconditions.get(key), old["metadata"][key]
            if wanted is not None and wanted != have:
                # This one conflict names the kind where all others name the resource.
                named = f"{kind.name}.{kind.group}" if kind.group else kind.name
                raise StatusError(
                    409,
                    f'Operation cannot be fulfilled on {named} "{name}": the {word} in the precondition ({wanted}) '
                    f"does not match the {word} in record ({have}). The object might have been {happened}",
                    details={**kind.details(name), "kind": kind.name},
                )

    def _grace(self, kind: Kind, old: JsonObject, options: JsonObject) -> int:
        if not self._is_running(kind, old):
            return 0
        asked = options.get("gracePeriodSeconds")
        if asked is None:
            asked = old.get("spec", {}).get("terminationGracePeriodSeconds", 30)
        if not isinstance(asked, int) or asked < 0:
            raise StatusError(400, f"gracePeriodSeconds {json.dumps(asked)[:40]} is not a whole number of seconds")
        return asked

    def _is_running(self, kind: Kind, obj: JsonObject) -> bool:
        if kind is not PODS or not obj.get("spec", {}).get("nodeName"):
            return False
        return obj.get("status", {}).get("phase") not in ("Succeeded", "Failed")

    def _generated_name(self, kind: Kind, namespace: str, prefix: str) -> str:
        base = prefix[:_LONGEST_GENERATED_BASE]
        while True:
            name = base + "".join(secrets.choice(_SUFFIX_LETTERS) for _ in range(_SUFFIX_LENGTH))
            if self._store.get(kind, namespace, name) is None:
                return name

    def _now(self) -> str:
        return _timestamp(self._clock())


def _other_name(obj: JsonObject, name: str) -> StatusError:
    given = obj["metadata"].get("name", "")
    return StatusError(400, f"the name of the object ({given}) does not match the name on the URL ({name})")


def _binding_conflict(name: str, why: str) -> StatusError:
    text = f'Operation cannot be fulfilled on pods/binding "{name}": {why}'
    return StatusError(409, text, details={"name": name, "kind": "pods/binding"})


def _invalid(kind: Kind, name: str, errors: FieldErrors) -> StatusError:
    kind_name = f"{kind.name}.{kind.group}" if kind.group else kind.name
    shown = [f"{cause['field']}: {cause['message']}" for cause in errors.causes]
    text = shown[0] if len(shown) == 1 else "[" + ", ".join(shown) + "]"
    about = {key: value for key, value in (("name", name), ("group", kind.group)) if value}
    details = {**about, "kind": kind.name, "causes": errors.causes}
    return StatusError(422, f'{kind_name} "{name}" is invalid: {text}', details=details)


def _merge_patched(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge_patched(result.get(key), value)
    return result


def _without_bookkeeping(obj: JsonObject) -> JsonObject:
    metadata = {key: value for key, value in obj["metadata"].items() if key not in ("resourceVersion", "managedFields")}
    return {**obj, "metadata": metadata}


def _timestamp(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
