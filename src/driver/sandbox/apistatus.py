# SPDX-License-Identifier: Apache-2.0
"""The API server's way of saying no: `Status` objects, and the list of field errors behind a 422."""

from __future__ import annotations

import json
from typing import Any, Final

JsonObject = dict[str, Any]

_REASONS: Final = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}

# A message repeats the wrong value; a claim may carry kilobytes of it.
_SHOWN_VALUE: Final = 200


class StatusError(Exception):
    """A refusal with the HTTP status, reason and details that a client of the Kubernetes API decodes.

    Parameters
    ----------
    code : int
        HTTP status.
    message : str
        One line for a person.
    reason : str, optional
        Machine-readable reason; by default the usual one of `code`.
    details : dict, optional
        The `details` of the Status object.
    """

    def __init__(
        self, code: int, message: str, *, reason: str | None = None, details: JsonObject | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason if reason is not None else _REASONS.get(code, "")
        self.details = details

    def body(self) -> JsonObject:
        """Return the Status object."""
        status: JsonObject = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details is not None:
            status["details"] = self.details
        return status


class FieldErrors:
    """Collects what is wrong with the fields of one object, as a 422 reports it: all of it at once."""

    def __init__(self) -> None:
        self._causes: list[JsonObject] = []

    def __bool__(self) -> bool:
        return bool(self._causes)

    @property
    def causes(self) -> list[JsonObject]:
        """The errors as `details.causes` lists them."""
        return self._causes

    def _add(self, reason: str, field: str, message: str) -> None:
        self._causes.append({"reason": reason, "message": message, "field": field})

    def required(self, field: str, detail: str = "") -> None:
        """Report a missing field."""
        self._add("FieldValueRequired", field, "Required value" + (f": {detail}" if detail else ""))

    def invalid(self, field: str, value: object, detail: str) -> None:
        """Report a value of the wrong form."""
        self._add("FieldValueInvalid", field, f"Invalid value: {_shown(value)}: {detail}")

    def unsupported(self, field: str, value: object, supported: list[str]) -> None:
        """Report a value outside a closed list."""
        choices = ", ".join(f'"{choice}"' for choice in supported)
        self._add("FieldValueNotSupported", field, f"Unsupported value: {_shown(value)}: supported values: {choices}")

    def duplicate(self, field: str, value: object) -> None:
        """Report a value that occurs twice where it must be unique."""
        self._add("FieldValueDuplicate", field, f"Duplicate value: {_shown(value)}")

    def forbidden(self, field: str, detail: str) -> None:
        """Report a field that must not be set here."""
        self._add("FieldValueForbidden", field, f"Forbidden: {detail}")

    def too_long(self, field: str, limit: int) -> None:
        """Report a text with more bytes than allowed."""
        self._add("FieldValueTooLong", field, f"Too long: may not be more than {limit} bytes")

    def too_many(self, field: str, count: int, limit: int) -> None:
        """Report a list with more entries than allowed."""
        self._add("FieldValueTooMany", field, f"Too many: {count}: must have at most {limit} items")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_VALUE else text[:_SHOWN_VALUE] + "…"
