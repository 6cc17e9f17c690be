# SPDX-License-Identifier: Apache-2.0
"""CDI specs: how the container runtime learns which CPUs a claim has.

Each claim has one file with one device in the runtime's CDI folder. The files are derived from the records and can be
made again at any time; the folder is usually in memory and empty after a reboot. Other vendors' files in it are never
touched.

dra-driver-cpu writes the same files; its first releases kept all claims as devices of one file, ``dra.cpu.json``.
Loading finds a claim's device in whatever file it stands, since the runtime does so too.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from driver.cpulists import parse_cpulist
from driver.errors import ClaimError
from driver.files import (
    BrokenFile,
    read_file,
    remove_files,
    remove_groups_of_files,
    remove_temporary_files,
    replace_file,
)
from driver.json_values import expect, member_lines, quoted
from driver.names import (
    CDI_CLASS,
    CDI_KIND,
    CDI_VENDOR,
    CDI_VERSION,
    DRIVER_NAME,
    ClaimUID,
    cdi_device_name,
    cdi_spec_name,
    claim_uid,
    cpuset_variable,
)
from fastcpu import CpuSet
from fastcpu.cpuset import MAX_CPUS
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_SUFFIX: Final = ".json"
_SHARED_FILE: Final = f"{DRIVER_NAME}{_SUFFIX}"
# A file with every claim of a very large node stays below, and so does any vendor's that is worth a look.
_LARGEST_SPEC: Final = 4 << 20
_FOLDER_MODE: Final = 0o755
_FILE_MODE: Final = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSpec:
    """A claim's device as it was found in the folder.

    Attributes
    ----------
    cpus : CpuSet
        Its CPUs; where several devices have its name, all that any of them has.
    elsewhere : tuple of Path
        Files in which it stands besides, or instead of, its own. The runtime resolves no name that stands twice.
    """

    cpus: CpuSet
    elsewhere: tuple[Path, ...]


@dataclass(slots=True, kw_only=True)
class LoadedSpecs:
    """What the folder holds of our kind.

    Attributes
    ----------
    found : dict of ClaimUID to FoundSpec
        The usable devices.
    broken : list of BrokenFile
        Files, and devices in files, that cannot be used; left where they are.
    """

    found: dict[ClaimUID, FoundSpec] = field(default_factory=dict)
    broken: list[BrokenFile] = field(default_factory=list)

    def add(self, uid: ClaimUID, cpus: CpuSet, path: Path) -> None:
        """Add one device that was found in a file."""
        known = self.found.get(uid)
        elsewhere = () if path.name == cdi_spec_name(uid) else (path,)
        if known is not None:
            self.broken.append(BrokenFile(path=path, reason=f"device {cdi_device_name(uid)} stands in several places"))
            cpus |= known.cpus
            elsewhere = (*known.elsewhere, *elsewhere)
        self.found[uid] = FoundSpec(cpus=cpus, elsewhere=tuple(dict.fromkeys(elsewhere)))


class CdiDirectory:
    """The runtime's folder of CDI specs.

    Parameters
    ----------
    folder : Path
        Created when it is first needed.
    hook : Callable, optional
        Makes the hook of each spec from a claim and its CPUs; without it the specs have none.
    """

    def __init__(self, folder: Path, hook: Callable[[ClaimUID, CpuSet], Mapping[str, object]] | None = None) -> None:
        self._folder = folder
        self._hook = hook

    def write_now(self, uid: ClaimUID, cpus: CpuSet) -> bool:
        """Write a claim's spec, in this thread.

        Returns
        -------
        bool
            Whether it had to be written: False if exactly this spec was there.

        Raises
        ------
        OSError
        """
        path = self._folder / cdi_spec_name(uid)
        content = encode_spec(uid, cpus, self._hook)
        # Not durable: what a power failure spoils is made again from the record.
        return replace_file(path, content, mode=_FILE_MODE, folder_mode=_FOLDER_MODE, durable=False)

    async def load(self) -> LoadedSpecs:
        """Find all devices of our kind, clearing away what a crash has left of our own writing.

        Raises
        ------
        OSError
            If the folder cannot be created or listed.
        """
        return await asyncio.to_thread(self._load)

    async def take_over(self, uid: ClaimUID, cpus: CpuSet, elsewhere: tuple[Path, ...]) -> bool:
        """Write a claim's spec after taking its device out of the files of others.

        In between the claim has no spec, so its record must be on the disk by now.

        Parameters
        ----------
        uid, cpus
            As for `write`.
        elsewhere : tuple of Path
            As `load` found them.

        Returns
        -------
        bool
            Whether anything had to be written.

        Raises
        ------
        OSError
        """
        return await asyncio.to_thread(self._take_over, uid, cpus, elsewhere)

    def remove_all_now(self, uids: Sequence[ClaimUID]) -> list[bool | Exception]:
        """Remove the specs of claims durably, in this thread: one that came back would be adopted.

        Returns
        -------
        list of bool or Exception
            For each claim whether there was one, or why it could not be removed.
        """
        return remove_groups_of_files(self._folder, [(cdi_spec_name(uid),) for uid in uids])

    def _take_over(self, uid: ClaimUID, cpus: CpuSet, elsewhere: tuple[Path, ...]) -> bool:
        for path in elsewhere:
            _take_out(path, cdi_device_name(uid))
        return self.write_now(uid, cpus) or bool(elsewhere)

    def _load(self) -> LoadedSpecs:
        self._folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        remove_temporary_files(self._folder, _is_our_name)
        loaded = LoadedSpecs()
        for name in sorted(os.listdir(self._folder)):
            if name.endswith(_SUFFIX):
                _load_file(self._folder / name, loaded)
        return loaded


def encode_spec(
    uid: ClaimUID, cpus: CpuSet, hook: Callable[[ClaimUID, CpuSet], Mapping[str, object]] | None = None
) -> bytes:
    """Write a claim's spec as JSON.

    Parameters
    ----------
    uid : ClaimUID
        The claim.
    cpus : CpuSet
        Its CPUs, not empty.
    hook : Callable, optional
        Makes the hook that the spec shall have.

    Returns
    -------
    bytes
    """
    edits: dict[str, object] = {"env": [f"{cpuset_variable(uid)}={cpus}"]}
    if hook is not None:
        edits["hooks"] = [hook(uid, cpus)]
    spec = {
        "cdiVersion": CDI_VERSION,
        "kind": CDI_KIND,
        "devices": [{"name": cdi_device_name(uid), "containerEdits": edits}],
    }
    # Not ASCII only: an escaped surrogate pair is no YAML, which is what the runtime reads these files as.
    return member_lines(spec, ensure_ascii=False)


def _load_file(path: Path, loaded: LoadedSpecs) -> None:
    is_ours = _is_our_name(path.name)
    try:
        spec = expect(json.loads(read_file(path, _LARGEST_SPEC)), dict, "the spec")
        kind = expect(spec.get("kind"), str, "kind")
        if kind == CDI_KIND:
            is_ours = True
        elif is_ours:
            raise ClaimError(f"kind is {quoted(kind)}; expected {CDI_KIND}")
        else:
            return
        devices = expect(spec.get("devices"), list, "devices")
    except FileNotFoundError:
        return
    except (ClaimError, OSError, ValueError, RecursionError) as error:
        # What others put into this folder, and whether it makes sense, is theirs.
        if is_ours:
            loaded.broken.append(BrokenFile(path=path, reason=str(error)))
        return
    for index, device in enumerate(devices):
        try:
            uid, cpus = _decode_device(device, f"devices[{index}]")
        except ClaimError as error:
            loaded.broken.append(BrokenFile(path=path, reason=str(error)))
        else:
            loaded.add(uid, cpus, path)


def _decode_device(value: object, place: str) -> tuple[ClaimUID, CpuSet]:
    device = expect(value, dict, place)
    name = expect(device.get("name"), str, f"{place}.name")
    uid = claim_uid(name.removeprefix(cdi_device_name(ClaimUID(""))))
    if name != cdi_device_name(uid):
        raise ClaimError(f"{place}.name is {quoted(name)}; expected {cdi_device_name(ClaimUID('<claim UID>'))}")
    edits = expect(device.get("containerEdits"), dict, f"{place}.containerEdits")
    env = expect(edits.get("env"), list, f"{place}.containerEdits.env")
    variable = f"{cpuset_variable(uid)}="
    cpus = CpuSet()
    for entry in env:
        if isinstance(entry, str) and entry.startswith(variable):
            try:
                cpus |= parse_cpulist(entry.removeprefix(variable), MAX_CPUS)
            except CpuListError as error:
                raise ClaimError(f"{place}: {cpuset_variable(uid)}: {error}") from error
    if not cpus:
        raise ClaimError(f"{place} gives {cpuset_variable(uid)} no CPUs")
    return uid, cpus


def _take_out(path: Path, device_name: str) -> None:
    """Take a device out of a file; the file goes when nothing is left in it."""
    try:
        spec = expect(json.loads(read_file(path, _LARGEST_SPEC)), dict, "the spec")
        devices = expect(spec.get("devices"), list, "devices")
        left = [device for device in devices if not (isinstance(device, dict) and device.get("name") == device_name)]
        # Not ASCII only: an escaped surrogate pair is no YAML, which is what the runtime reads these files as.
        content = member_lines({**spec, "devices": left}, ensure_ascii=False)
    except (ClaimError, FileNotFoundError, ValueError, RecursionError):
        # Somebody has changed it since it was loaded, to something that the runtime cannot read.
        return
    if not left:
        remove_files(path.parent, path.name)
    elif len(left) != len(devices):
        replace_file(path, content, mode=_FILE_MODE, folder_mode=_FOLDER_MODE, durable=True)


def _is_our_name(name: str) -> bool:
    return name == _SHARED_FILE or name.startswith(f"{CDI_VENDOR}-{CDI_CLASS}")
