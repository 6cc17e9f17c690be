# SPDX-License-Identifier: Apache-2.0
"""The API's rules for ResourceSlices."""

from __future__ import annotations

from typing import Final

from driver.sandbox.apistatus import FieldErrors, JsonObject

LIST_ATTRIBUTES: Final = "DRAListTypeAttributes"
NODE_ALLOCATABLE: Final = "DRANodeAllocatableResources"


class SliceRules:
    """Checks slices as Kubernetes 1.37 does with the given feature gates."""

    GATES: Final = frozenset({LIST_ATTRIBUTES, NODE_ALLOCATABLE})

    def __init__(self, gates: frozenset[str]) -> None:
        self._gates = gates

    def prepare(self, new: JsonObject, old: JsonObject | None, subresource: str) -> None:
        """Drop what a closed gate hides."""

    def check(self, new: JsonObject, old: JsonObject | None, subresource: str, errors: FieldErrors) -> None:
        """Report what is wrong."""
