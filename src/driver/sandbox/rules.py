# SPDX-License-Identifier: Apache-2.0
"""What the rules of a kind of object are, and the rules of kinds that the box does not look into."""

from __future__ import annotations

from typing import Protocol

from driver.sandbox.apistatus import FieldErrors, JsonObject
from driver.sandbox.store import copy_json


class Rules(Protocol):
    """What is particular to one kind of object."""

    def prepare(self, new: JsonObject, old: JsonObject | None, subresource: str) -> None:
        """Put back or drop what this write may not say, in place; `old` is None when the object is created."""

    def check(self, new: JsonObject, old: JsonObject | None, subresource: str, errors: FieldErrors) -> None:
        """Report what is wrong with the object."""


class PlainRules:
    """Rules of a kind whose content is not checked: status and the rest are written apart, that is all.

    Parameters
    ----------
    initial_status : dict, optional
        The status of a new object, whatever its creator says of it; None lets the creator say it.
    """

    def __init__(self, initial_status: JsonObject | None) -> None:
        self._initial_status = initial_status

    def prepare(self, new: JsonObject, old: JsonObject | None, subresource: str) -> None:
        """Keep a write to its part of the object."""
        if old is not None:
            keep_other_part(new, old, subresource)
        elif self._initial_status is not None:
            new["status"] = copy_json(self._initial_status)

    def check(self, new: JsonObject, old: JsonObject | None, subresource: str, errors: FieldErrors) -> None:
        """Accept everything."""


def keep_other_part(new: JsonObject, old: JsonObject, subresource: str) -> None:
    """Let a write to `status` change nothing else, and any other write everything but the status."""
    if subresource == "status":
        status = new.get("status")
        metadata = new["metadata"]
        new.clear()
        new.update(copy_json(old))
        for key in ("resourceVersion", "managedFields"):
            new["metadata"].pop(key, None)
            if key in metadata:
                new["metadata"][key] = metadata[key]
        if status is None:
            new.pop("status", None)
        else:
            new["status"] = status
    elif "status" in old:
        new["status"] = copy_json(old["status"])
    else:
        new.pop("status", None)
