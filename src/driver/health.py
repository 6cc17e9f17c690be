# SPDX-License-Identifier: Apache-2.0
"""Whether the driver works, and if not, what is missing.

A part of the driver that others rely on declares a *condition* with a name, and says what is missing whenever that
changes. Nothing here checks anything by itself, and nothing here is a reason to stop: a driver that is not ready
stays up and retries. The usual conditions are ``started`` (the device model is built and the sockets are open),
``registered`` (the kubelet has accepted the driver), ``slices`` (the API server holds this node's ResourceSlices),
``instance`` (no other driver process works on the same folder), ``runtime`` (the container runtime is connected) and
``startguard`` (the host runs the start guard).

What is not as it should be and yet keeps the driver from nothing is a *remark*.
"""

from __future__ import annotations

import logging
from typing import Final

from driver.logs import fields

_log = logging.getLogger(__name__)

STARTED: Final = "started"
REGISTERED: Final = "registered"
SLICES: Final = "slices"
INSTANCE: Final = "instance"
RUNTIME: Final = "runtime"
START_GUARD: Final = "startguard"

PODS_CGROUP: Final = "kubepods"
POD_CGROUPS: Final = "cgroups"
PUSHES: Final = "updates"


class Health:
    """The conditions that must hold for the driver to be ready.

    Conditions that were never declared do not count. All methods are cheap and must be called from the event loop's
    thread.
    """

    def __init__(self) -> None:
        self._missing: dict[str, str | None] = {}
        self._remarks: dict[str, str] = {}

    def require(self, name: str, reason: str = "not reported yet") -> None:
        """Declare a condition as missing, unless it was declared before.

        Parameters
        ----------
        name : str
            The condition's name, one word.
        reason : str
            What is missing as long as nobody has reported on the condition.
        """
        self._missing.setdefault(name, _one_line(reason))

    def set_missing(self, name: str, reason: str) -> None:
        """Report that a condition does not hold, declaring it if need be.

        Parameters
        ----------
        name : str
            The condition's name.
        reason : str
            What is missing, for the person who reads ``/readyz``; shown to everyone who can reach that address.
        """
        self._report(name, _one_line(reason))

    def set_ok(self, name: str) -> None:
        """Report that a condition holds, declaring it if need be."""
        self._report(name, None)

    @property
    def started(self) -> bool:
        """Whether the driver has started: the condition of that name was declared and holds."""
        return self._missing.get(STARTED, "never declared") is None

    @property
    def ready(self) -> bool:
        """Whether the driver has started and every declared condition holds."""
        return self.started and not any(reason is not None for reason in self._missing.values())

    def missing(self) -> dict[str, str]:
        """Return what is missing: for each condition that does not hold, in order of declaration, the reason."""
        return {name: reason for name, reason in self._missing.items() if reason is not None}

    def conditions(self) -> dict[str, bool]:
        """Return for each declared condition, in order of declaration, whether it holds."""
        return {name: reason is None for name, reason in self._missing.items()}

    def remark(self, name: str, text: str) -> None:
        """Say what is not as it should be, though the driver is ready all the same.

        Parameters
        ----------
        name : str
            What it is about, one word.
        text : str
            What is wrong, for the person who reads ``/readyz``, shown to everyone like the reason of a condition; empty
            if nothing is, or nothing any more.
        """
        text = " ".join(text.split())
        if text == self._remarks.get(name, ""):
            return
        if text:
            self._remarks[name] = text
            _log.warning("not as it should be", extra=fields(about=name, reason=text))
        else:
            del self._remarks[name]
            _log.info("as it should be again", extra=fields(about=name))

    def remarks(self) -> dict[str, str]:
        """Return what is not as it should be, by what it is about."""
        return dict(self._remarks)

    def _report(self, name: str, reason: str | None) -> None:
        held_before = self._missing.get(name, "") is None
        if name in self._missing and self._missing[name] == reason:
            return
        was_ready = self.ready
        self._missing[name] = reason
        if reason is None:
            _log.info("condition holds", extra=fields(condition=name))
        elif held_before:
            _log.warning("condition does not hold any more", extra=fields(condition=name, reason=reason))
        else:
            _log.info("condition does not hold yet", extra=fields(condition=name, reason=reason))
        if self.ready and not was_ready:
            _log.info("ready")
        elif was_ready and not self.ready:
            _log.warning("not ready any more", extra=fields(missing=",".join(self.missing())))


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "no reason given"
