# SPDX-License-Identifier: Apache-2.0
"""Device metadata for containers (KEP-5304): what a claim's devices are, as a file inside the container.

Each request of a claim has a JSON file on the host and a CDI spec of its own that mounts it. What containers and the
runtime see of that (the path in the container, the file's form, the spec's name, kind and device) is as Kubernetes' own
helper for drivers has it. The host file is the driver's own affair. The helper gives each a path of two folders with
the claim's name, and to make and remove these costs more than all else that a prepare puts on the disk; here it is one
file, named after the claim's UID, so that nobody has to find out whose it is. The helper's files of a claim that came
from another driver go when their claim does.

Metadata is a courtesy: no failure here stops a claim from being prepared or unprepared.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from driver.errors import ClaimError
from driver.files import read_file, remove_temporary_files, replace_file
from driver.json_values import expect, member_lines, quoted
from driver.logs import fields
from driver.names import DRIVER_NAME, ClaimUID

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping
    from pathlib import Path

    from driver.ledger import PreparedDevice, Record

_log = logging.getLogger(__name__)

_VERSIONS: Final = ("v1beta1", "v1alpha1")
_GROUP: Final = "metadata.resource.k8s.io"
_CONTAINER_FOLDER: Final = "/var/run/kubernetes.io/dra-device-attributes"
_SUFFIX: Final = ".json"
_HELPERS_FILE: Final = "metadata.json"
_CDI_KIND: Final = f"{DRIVER_NAME}/metadata"
_CDI_PREFIX: Final = f"{DRIVER_NAME}_metadata_"
_ALLOCATED_CPUS: Final = "dra.cpu/allocatedNumCPUs"
_MOST_ATTRIBUTES: Final = 32
_LARGEST_FILE: Final = 1 << 20
_FOLDER_MODE: Final = 0o755
_FILE_MODE: Final = 0o644
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)


class MetadataStore:
    """The metadata files of all claims, and the CDI specs that mount them.

    Parameters
    ----------
    folder : Path
        Where the files are on the host, ``<plugin dir>/dra-device-metadata``; created when it is first needed.
    cdi_folder : Path
        The runtime's CDI folder.
    """

    def __init__(self, folder: Path, cdi_folder: Path) -> None:
        self._folder = folder
        self._cdi_folder = cdi_folder
        # The requests of the claims whose files this process has written: to look for them in the folders costs more.
        self._written: dict[ClaimUID, tuple[str, ...]] = {}

    async def write(self, record: Record, attributes: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
        """Write the metadata of a claim; what is there already and right stays as it is.

        Parameters
        ----------
        record : Record
            The claim, not an adopted one.
        attributes : mapping of str to mapping
            The published attributes of each of its devices that is known here. What was written earlier about a device
            that is not known any more stays.

        Returns
        -------
        dict of str to str
            The CDI id that mounts the file of each request, by the name that containers use for it. Empty if any of it
            could not be written; the log says why.
        """
        return await asyncio.to_thread(self.write_now, record, attributes)

    def write_now(self, record: Record, attributes: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
        """Do what `write` does, in this thread."""
        try:
            return self._write(record, attributes)
        except (ClaimError, OSError, ValueError) as error:
            _log.warning("the claim gets no device metadata", extra=fields(uid=record.uid, reason=error))
            return {}

    def remove_now(self, uid: ClaimUID, namespace: str, name: str) -> None:
        """Remove the metadata of a claim, as far as it is there and can be removed, in this thread.

        Parameters
        ----------
        uid : ClaimUID
            The claim.
        namespace, name : str
            Where Kubernetes' helper for drivers would have put its files; another claim's are left alone.
        """
        try:
            self._remove(uid, namespace, name)
        except (OSError, ValueError) as error:
            _log.warning("device metadata of a claim is left behind", extra=fields(uid=uid, reason=error))

    async def sweep(self, known: Container[ClaimUID]) -> None:
        """Remove everything that belongs to no known claim, as a crash may leave it.

        Parameters
        ----------
        known : container of ClaimUID
            The claims whose metadata stays.
        """
        try:
            await asyncio.to_thread(self._sweep, known)
        except OSError as error:
            _log.warning("old device metadata is left behind", extra=fields(reason=error))

    def _write(self, record: Record, attributes: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
        by_request: dict[str, list[PreparedDevice]] = {}
        for device in record.devices:
            by_request.setdefault(device.base_request, []).append(device)
        cdi_ids = {}
        for request, devices in by_request.items():
            host_file = self._host_file(record.uid, _label("request", request))
            is_known = all(device.device in attributes for device in devices)
            if is_known or _owner(host_file) != record.uid:
                _replace(host_file, _encode_metadata(record, devices, attributes))
            device_name = f"{record.uid}_{request}"
            spec = _encode_spec(record.uid, device_name, host_file, _container_path(record, request))
            _replace(self._spec(record.uid, request), spec)
            cdi_ids[request] = f"{_CDI_KIND}={device_name}"
        self._written[record.uid] = tuple(by_request)
        return cdi_ids

    def _remove(self, uid: ClaimUID, namespace: str, name: str) -> None:
        requests = self._written.pop(uid, None)
        if requests is None:
            self._remove_owned(lambda owner: owner == uid)
        else:
            for request in requests:
                _unlink(self._spec(uid, request))
                _unlink(self._host_file(uid, request))
        if _LABEL.fullmatch(namespace) and _SUBDOMAIN.fullmatch(name):
            claim_folder = self._folder / f"{namespace}_{name}"
            if os.path.isdir(claim_folder):
                _remove_helpers_files(claim_folder, lambda owner: owner == uid)

    def _sweep(self, known: Container[ClaimUID]) -> None:
        remove_temporary_files(self._cdi_folder, lambda name: name.startswith(_CDI_PREFIX))
        remove_temporary_files(self._folder, lambda name: name.endswith(_SUFFIX))
        self._remove_owned(lambda owner: owner not in known)
        for name in _entries(self._folder):
            for request in _entries(self._folder / name):
                remove_temporary_files(self._folder / name / request, lambda final_name: final_name == _HELPERS_FILE)
            _remove_helpers_files(self._folder / name, lambda owner: owner not in known)

    def _remove_owned(self, belongs: Callable[[str], bool]) -> None:
        """Look through both folders for the files of some claims, which say in their names whose they are."""
        for folder, prefix in ((self._cdi_folder, _CDI_PREFIX), (self._folder, "")):
            for name in _entries(folder):
                uid, underscore, _ = name.removeprefix(prefix).partition("_")
                is_named_so = name.startswith(prefix) and name.endswith(_SUFFIX) and underscore
                # The helper's folder of a claim may be named so as well.
                if is_named_so and belongs(uid) and not os.path.isdir(folder / name):
                    _unlink(folder / name)

    def _host_file(self, uid: ClaimUID, request: str) -> Path:
        return self._folder / f"{uid}_{request}{_SUFFIX}"

    def _spec(self, uid: ClaimUID, request: str) -> Path:
        return self._cdi_folder / f"{_CDI_PREFIX}{uid}_{request}{_SUFFIX}"


def _label(what: str, text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise ClaimError(f"{what} {quoted(text)} is no DNS label")
    return text


def _container_path(record: Record, request: str) -> str:
    if record.pod_claim_name:
        owner = f"resourceclaimtemplates/{_label('pod claim name', record.pod_claim_name)}"
    elif _SUBDOMAIN.fullmatch(record.name):
        owner = f"resourceclaims/{record.name}"
    else:
        raise ClaimError(f"claim name {quoted(record.name)} is no DNS subdomain")
    return f"{_CONTAINER_FOLDER}/{owner}/{request}/{DRIVER_NAME}-metadata.json"


def _encode_metadata(
    record: Record, devices: list[PreparedDevice], attributes: Mapping[str, Mapping[str, object]]
) -> bytes:
    """Write the metadata of one request, once in each version, the newest first."""
    requests: dict[str, list[dict[str, object]]] = {}
    for device in devices:
        entry: dict[str, object] = {"driver": DRIVER_NAME, "pool": device.pool, "name": device.device}
        values = dict(attributes.get(device.device, {}))
        if device.cpus and len(values) < _MOST_ATTRIBUTES:
            values[_ALLOCATED_CPUS] = {"int": device.cpus}
        if values:
            entry["attributes"] = values
        requests.setdefault(device.request, []).append(entry)
    body: dict[str, object] = {
        "metadata": {"name": record.name, "namespace": record.namespace, "uid": record.uid, "generation": 1}
    }
    if record.pod_claim_name:
        body["podClaimName"] = record.pod_claim_name
    body["requests"] = [{"name": request, "devices": entries} for request, entries in requests.items()]
    # The attributes are many, and indenting them would be the most expensive part of a prepare.
    rest = json.dumps(body)[1:]
    kinds = (json.dumps({"apiVersion": f"{_GROUP}/{version}", "kind": "DeviceMetadata"})[:-1] for version in _VERSIONS)
    return "".join(f"{kind}, {rest}\n" for kind in kinds).encode()


def _encode_spec(uid: ClaimUID, device_name: str, host_file: Path, container_path: str) -> bytes:
    # The runtime refuses a spec of a lower version than its contents need, and need not know a higher one.
    version = "0.5.0" if uid[0].isdigit() else "0.3.0"
    mount = {"hostPath": str(host_file), "containerPath": container_path, "options": ["ro", "bind"]}
    device = {"name": device_name, "containerEdits": {"mounts": [mount]}}
    spec = {"cdiVersion": version, "kind": _CDI_KIND, "devices": [device]}
    # Not ASCII only: an escaped surrogate pair is no YAML, which is what the runtime reads these files as.
    return member_lines(spec, ensure_ascii=False)


def _replace(path: Path, content: bytes) -> None:
    # Not durable: after a power failure no container runs, and the next prepare makes it again.
    replace_file(path, content, mode=_FILE_MODE, folder_mode=_FOLDER_MODE, durable=False)


def _remove_helpers_files(claim_folder: Path, belongs: Callable[[str | None], bool]) -> None:
    """Remove the files that Kubernetes' helper for drivers has put into its folder of a claim's name."""
    for request in _entries(claim_folder):
        host_file = claim_folder / request / _HELPERS_FILE
        if os.path.lexists(host_file) and belongs(_owner(host_file)):
            _unlink(host_file)
        _remove_if_empty(claim_folder / request)
    _remove_if_empty(claim_folder)


def _owner(host_file: Path) -> str | None:
    """Return the UID in a metadata file, None if it says none or is not there."""
    try:
        text = read_file(host_file, _LARGEST_FILE).decode()
        document, _ = json.JSONDecoder().raw_decode(text)
        metadata = expect(expect(document, dict, "the file").get("metadata"), dict, "metadata")
        return expect(metadata.get("uid"), str, "metadata.uid")
    except (ClaimError, OSError, ValueError, RecursionError):
        return None


def _entries(folder: Path) -> Iterator[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from sorted(os.listdir(folder))


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        os.rmdir(folder)
