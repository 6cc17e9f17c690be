# SPDX-License-Identifier: Apache-2.0
"""The driver's errors: one class for each way in which a failure is handled.

A message is one line for the person who sees it in a pod's events, a log or a terminal: it names the value, the place
and what would be right.
"""

from __future__ import annotations


class DriverError(Exception):
    """Base of all errors of the driver."""


class ConfigError(DriverError):
    """A wrong flag, configuration file or installation: the command prints it and exits with status 2."""


class ClaimError(DriverError):
    """A claim cannot be prepared or unprepared; the text is the kubelet's answer for that claim alone."""


class ClaimPendingError(ClaimError):
    """Like `ClaimError`, but the cause may pass by itself within seconds, so it is worth waiting for.

    The kubelet repeats a failed prepare only with the pod's next regular sync, 60 to 90 seconds later.
    """


class RuntimePendingError(ClaimPendingError):
    """Like `ClaimPendingError`, where the runtime or its containers stand in the way."""


class ApiError(DriverError):
    """A call to the API server failed.

    Attributes
    ----------
    status : int
        HTTP status; 0 if the server could not be reached, did not answer in time, or answered with something that is
        not its own.
    missing : str
        Which object the server says is not there, as ``<plural kind>/<name>``; empty if it says it of none. Something
        on the way to the server may answer 404 too.
    """

    def __init__(self, status: int, message: str, *, missing: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.missing = missing
