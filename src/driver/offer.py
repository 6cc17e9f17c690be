# SPDX-License-Identifier: Apache-2.0
"""What a node offers to the API server, less what the server has shown not to take.

The server refuses slices with list attributes, or drops fields without a word, where a feature is off; mutating
webhooks may do as they please. None of that is worth a node without devices, and none is worth fighting over: it is
said once, and what the server makes of a slice is then as good as what was sent.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, Protocol

from driver.errors import ApiError
from driver.logs import fields
from driver.slices import (
    JsonObject,
    Plan,
    Pool,
    Write,
    content_of,
    differences,
    divide,
    has_list_attributes,
    plan_writes,
)

_log = logging.getLogger(__name__)

_LISTS: Final = "list attributes such as pcieRoot"
_MAPPING: Final = "nodeAllocatableResources"
_MAPPING_FEATURE: Final = "DRANodeAllocatableResources"
_NOTED_DIFFERENCES: Final = 1000


class ApiDevice(Protocol):
    """A device that can be published."""

    def to_api(self) -> dict[str, object]:
        """Return it as an item of ``spec.devices``."""


class Devices(Protocol):
    """The devices to publish: see `driver.devices.DeviceModel`."""

    @property
    def devices(self) -> Sequence[ApiDevice]:
        """In the order of their allocation."""

    def without_list_attributes(self) -> Devices:
        """Return them for a server that refuses attributes with lists of values."""


class Offer:
    """The slices of one node as they should be stored.

    Parameters
    ----------
    node_name : str
        The node.
    model : Devices
        Its devices.
    """

    def __init__(self, node_name: str, model: Devices) -> None:
        self._node_name = node_name
        self._node_uid = ""
        self._model = model
        self._pool: Pool | None = None
        self._left_out: set[str] = set()
        # By position in the pool: how the server stores a slice that it does not store as sent.
        self._accepted: dict[int, JsonObject] = {}
        self._noted: set[str] = set()

    @property
    def node_uid(self) -> str:
        """The UID of the node, which owns the slices; empty while it is not known."""
        return self._node_uid

    @node_uid.setter
    def node_uid(self, uid: str) -> None:
        if uid != self._node_uid:
            self._node_uid = uid
            self._forget_pool()

    @property
    def device_count(self) -> int:
        """How many devices there are."""
        return len(self._model.devices)

    @property
    def is_reduced(self) -> bool:
        """Whether something is left out because the server refused it."""
        return bool(self._left_out)

    def replace(self, model: Devices) -> None:
        """Offer other devices from now on."""
        self._model = model
        self.restore()

    def restore(self) -> None:
        """Offer everything again: an upgrade may have turned a feature on."""
        self._left_out.clear()
        self._forget_pool()

    def plan(self, stored: Iterable[JsonObject]) -> Plan:
        """Find the writes that turn the stored slices into the offered ones."""
        return plan_writes(self._offered(), stored, self._accepted)

    def reduce(self, error: ApiError) -> bool:
        """Leave out what the server has just refused.

        Parameters
        ----------
        error : ApiError
            How it refused a slice.

        Returns
        -------
        bool
            False if there is nothing to leave out that could be the cause.
        """
        devices = [device for chunk in self._offered().chunks for device in chunk]
        if error.status == 422 and has_list_attributes(devices):
            left_out = _LISTS
        # With its feature on, the server refuses the mapping on nodes whose kubelet does not declare the feature.
        elif error.status == 403 and _MAPPING_FEATURE in str(error) and any(_MAPPING in device for device in devices):
            left_out = _MAPPING
        else:
            return False
        if left_out not in self._noted:
            self._noted.add(left_out)
            _log.warning(
                "the API server refuses a slice; publishing without what it seems to refuse",
                extra=fields(left_out=left_out, reason=error),
            )
        self._left_out.add(left_out)
        self._forget_pool()
        return True

    def accept(self, write: Write, stored: JsonObject) -> None:
        """Take note of what the server made of a slice that was written."""
        index, pool, sent = write.index, self._offered(), content_of(write.body)
        if index >= len(pool.chunks) or sent != pool.content(index):
            return  # something else is offered since
        found = content_of(stored)
        paths = list(islice(differences(sent, found), _NOTED_DIFFERENCES))
        if not paths:
            self._accepted.pop(index, None)
            return
        self._accepted[index] = found
        for path in dict.fromkeys(re.sub(r"\[\d+\]", "[]", path) for path in paths):
            if path not in self._noted:
                self._noted.add(path)
                _log.warning(
                    "the API server does not store a field as it was sent",
                    extra=fields(field=path, slice=stored["metadata"]["name"]),
                )

    def _offered(self) -> Pool:
        if self._pool is None:
            model = self._model.without_list_attributes() if _LISTS in self._left_out else self._model
            devices = [device.to_api() for device in model.devices]
            if _MAPPING in self._left_out:
                for device in devices:
                    device.pop(_MAPPING, None)
            self._pool = divide(devices, node_name=self._node_name, node_uid=self._node_uid)
        return self._pool

    def _forget_pool(self) -> None:
        self._pool = None
        self._accepted.clear()
