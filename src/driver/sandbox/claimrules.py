# SPDX-License-Identifier: Apache-2.0
"""The API's rules for ResourceClaims."""

from __future__ import annotations

from driver.sandbox.apistatus import FieldErrors, JsonObject
from driver.sandbox.registry import keep_other_part


class ClaimRules:
    """Checks claims as Kubernetes 1.37 does."""

    def prepare(self, new: JsonObject, old: JsonObject | None, subresource: str) -> None:
        """Keep a write to its part of the claim."""
        if old is None:
            new.pop("status", None)
        else:
            keep_other_part(new, old, subresource)

    def check(self, new: JsonObject, old: JsonObject | None, subresource: str, errors: FieldErrors) -> None:
        """Report what is wrong."""
