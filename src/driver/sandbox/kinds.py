# SPDX-License-Identifier: Apache-2.0
"""The kinds of object that the box's API server knows, and how each is addressed and selected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from driver.sandbox.apistatus import JsonObject, StatusError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """One kind of object of the API.

    Attributes
    ----------
    group, version : str
        API group (empty for the core group) and version.
    plural, singular, name : str
        Spellings in URLs, on kubectl's command line and in `kind`.
    short_names : tuple of str
        kubectl's abbreviations.
    namespaced : bool
        Whether objects live in a namespace.
    subresources : tuple of str
        What may follow an object's name in a URL.
    selectable : mapping of str to tuple of str
        Field selectors beyond `metadata.name` and `metadata.namespace`, and where the field stands in the object.
    counts_generations : bool
        Whether `metadata.generation` counts the changes of `spec`.
    returns_deleted : bool
        Whether DELETE answers with the last state of the object rather than with a Status.
    """

    group: str
    version: str = "v1"
    plural: str
    singular: str
    name: str
    short_names: tuple[str, ...] = ()
    namespaced: bool
    subresources: tuple[str, ...] = ()
    selectable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counts_generations: bool = False
    returns_deleted: bool = False

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified_plural(self) -> str:
        """The resource as error messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def url_prefix(self) -> str:
        """The path under which the group's version is served."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def details(self, name: str) -> JsonObject:
        """Return the start of a Status object's `details` about the object `name`."""
        group = {"group": self.group} if self.group else {}
        return {"name": name, **group, "kind": self.plural}

    def not_found(self, name: str) -> StatusError:
        """Return the error for an object that does not exist."""
        return StatusError(404, f'{self.qualified_plural} "{name}" not found', details=self.details(name))

    def conflict(self, name: str, why: str) -> StatusError:
        """Return the error for a write that came too late or at the wrong object."""
        text = f'Operation cannot be fulfilled on {self.qualified_plural} "{name}": {why}'
        return StatusError(409, text, details=self.details(name))


NODES: Final = Kind(
    group="", plural="nodes", singular="node", name="Node", short_names=("no",), namespaced=False,
    subresources=("status",),
)  # fmt: skip
PODS: Final = Kind(
    group="",
    plural="pods",
    singular="pod",
    name="Pod",
    short_names=("po",),
    namespaced=True,
    subresources=("status", "binding"),
    selectable={"spec.nodeName": ("spec", "nodeName"), "status.phase": ("status", "phase")},
    counts_generations=True,
    returns_deleted=True,
)
EVENTS: Final = Kind(
    group="",
    plural="events",
    singular="event",
    name="Event",
    short_names=("ev",),
    namespaced=True,
    selectable={
        f"involvedObject.{key}": ("involvedObject", key) for key in ("kind", "namespace", "name", "uid", "apiVersion")
    },
)
RESOURCE_CLAIMS: Final = Kind(
    group="resource.k8s.io",
    plural="resourceclaims",
    singular="resourceclaim",
    name="ResourceClaim",
    namespaced=True,
    subresources=("status",),
    returns_deleted=True,
)
RESOURCE_SLICES: Final = Kind(
    group="resource.k8s.io",
    plural="resourceslices",
    singular="resourceslice",
    name="ResourceSlice",
    namespaced=False,
    selectable={
        "spec.nodeName": ("spec", "nodeName"),
        "spec.driver": ("spec", "driver"),
        "spec.pool.name": ("spec", "pool", "name"),
    },
    counts_generations=True,
    returns_deleted=True,
)
DEVICE_CLASSES: Final = Kind(
    group="resource.k8s.io",
    plural="deviceclasses",
    singular="deviceclass",
    name="DeviceClass",
    namespaced=False,
    counts_generations=True,
    returns_deleted=True,
)

KINDS: Final = (NODES, PODS, EVENTS, RESOURCE_CLAIMS, RESOURCE_SLICES, DEVICE_CLASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSelector:
    """A parsed `fieldSelector`: all terms must hold."""

    terms: tuple[tuple[tuple[str, ...], bool, str], ...]

    @classmethod
    def parse(cls, kind: Kind, text: str) -> FieldSelector:
        """Parse the query parameter.

        Raises
        ------
        StatusError
            400 for a malformed term or a field that the kind cannot be selected by.
        """
        terms = []
        for term in filter(None, text.split(",")):
            label, operator, value = term.partition("!=")
            if not operator:
                label, operator, value = term.partition("==")
            if not operator:
                label, operator, value = term.partition("=")
            if not operator:
                raise StatusError(400, f"invalid field selector {term!r}: expected field=value or field!=value")
            if label == "metadata.name" or (label == "metadata.namespace" and kind.namespaced):
                place: tuple[str, ...] = ("metadata", label.removeprefix("metadata."))
            elif label in kind.selectable:
                place = kind.selectable[label]
            else:
                raise StatusError(400, f"field label not supported for {kind.api_version}, Kind={kind.name}: {label}")
            terms.append((place, operator != "!=", value))
        return cls(terms=tuple(terms))

    def matches(self, obj: JsonObject) -> bool:
        """Whether the object has all the demanded values (a missing field counts as empty)."""
        for place, equal, wanted in self.terms:
            value: object = obj
            for key in place:
                value = value.get(key, "") if isinstance(value, dict) else ""
            if (str(value) == wanted) is not equal:
                return False
        return True
