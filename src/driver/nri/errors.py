# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between the runtime and the driver, with the status codes that both know."""

from __future__ import annotations

from enum import IntEnum

from driver.errors import DriverError


class Code(IntEnum):
    """Status codes of gRPC, which ttrpc uses too."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class NriError(DriverError):
    """A call between the runtime and the driver failed.

    Attributes
    ----------
    code : int
        Why, as one of `Code` where it has it. With ``UNAVAILABLE`` and ``DEADLINE_EXCEEDED`` the call may have been
        carried out, or may yet be.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Refusal(NriError):
    """The driver does not let a container be created or updated; the text is for the pod's owner to act on."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.FAILED_PRECONDITION, message)
