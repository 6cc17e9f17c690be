# SPDX-License-Identifier: Apache-2.0
"""How the box's container runtime finds CDI devices, and what they bring into a container."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.sandbox.runtime import RefusedError


class CdiDevices:
    """The CDI devices in a folder; read anew for each container, so that no change is missed.

    Parameters
    ----------
    folder : Path
        The folder of CDI specs. What cannot be read in it is passed over, as a runtime does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def inject(self, container: nri.Container) -> None:
        """Add the variables and the createRuntime hooks of a container's CDI devices to it.

        Raises
        ------
        RefusedError
            If one of the devices does not exist, or stands in several places.
        """
        wanted = list(dict.fromkeys(device.name for device in container.CDI_devices))
        if not wanted:
            return
        devices = self._read()
        missing = [name for name in wanted if name not in devices]
        if missing:
            raise RefusedError(f"CDI device injection failed: unresolvable CDI devices {', '.join(missing)}")
        for name in wanted:
            edits = devices[name]
            for variable in edits.get("env", ()):
                _set_variable(container, variable)
            for hook in edits.get("hooks", ()):
                if hook["hookName"] == "createRuntime":
                    container.hooks.create_runtime.add(
                        path=hook["path"], args=hook.get("args", ()), env=hook.get("env", ())
                    )

    def _read(self) -> dict[str, Any]:
        """Return the edits of each device by its full name, without those that stand in several places."""
        edits: dict[str, Any] = {}
        places: Counter[str] = Counter()
        for path in sorted(self._folder.glob("*.json")):
            try:
                spec = json.loads(path.read_bytes())
                found = {f"{spec['kind']}={device['name']}": device["containerEdits"] for device in spec["devices"]}
            except (OSError, ValueError, LookupError, TypeError):
                continue
            edits |= found
            places.update(found.keys())
        return {name: edit for name, edit in edits.items() if places[name] == 1}


def _set_variable(container: nri.Container, variable: str) -> None:
    """Put a variable in the place of one of its name, else behind all others."""
    name = variable.partition("=")[0]
    for index, entry in enumerate(container.env):
        if entry.partition("=")[0] == name:
            container.env[index] = variable
            return
    container.env.append(variable)
