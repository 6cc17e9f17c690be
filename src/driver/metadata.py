# SPDX-License-Identifier: Apache-2.0
"""Device metadata for containers (KEP-5304): what a claim's devices are, as a file inside the container.

Each request of a claim has a JSON file on the host and a CDI spec of its own that mounts it. Paths, names and the
file's form are those of Kubernetes' own helper for drivers, so that any reader finds it. The host file's path holds the
claim's name, not its UID: it is only removed when its content says that it belongs to the claim in question.

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
_HOST_FILE: Final = "metadata.json"
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
        # Whose files the folder of a claim's name holds, and of which requests, as far as this process has put them
        # there: to find out from the files is most of what an unprepare would do.
        self._written: dict[str, tuple[ClaimUID, tuple[str, ...]]] = {}

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
            Where its files would be; another claim's are left alone.
        """
        try:
            self._remove(uid, namespace, name)
        except (ClaimError, OSError, ValueError) as error:
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
        claim_folder = self._claim_folder(record.namespace, record.name)
        for request, devices in by_request.items():
            host_file = claim_folder / _label("request", request) / _HOST_FILE
            is_known = all(device.device in attributes for device in devices)
            if is_known or not _is_about(host_file, record.uid):
                _replace(host_file, _encode_metadata(record, devices, attributes))
            device_name = f"{record.uid}_{request}"
            spec = _encode_spec(record.uid, device_name, host_file, _container_path(record, request))
            _replace(self._spec(record.uid, request), spec)
            cdi_ids[request] = f"{_CDI_KIND}={device_name}"
        self._written[claim_folder.name] = (record.uid, tuple(by_request))
        return cdi_ids

    def _remove(self, uid: ClaimUID, namespace: str, name: str) -> None:
        claim_folder = self._claim_folder(namespace, name)
        owner, written = self._written.get(claim_folder.name, (None, ()))
        if owner == uid:
            del self._written[claim_folder.name]
            for request in written:
                _unlink(self._spec(uid, request))
                _unlink(claim_folder / request / _HOST_FILE)
                _remove_if_empty(claim_folder / request)
            _remove_if_empty(claim_folder)
            return
        requests = list(_entries(claim_folder))
        if requests:
            # The CDI folder has a file of each claim on the node, so it is not searched without need.
            for request in requests:
                _unlink(self._spec(uid, request))
        else:
            self._remove_specs(lambda owner: owner == uid)
        _remove_files(claim_folder, lambda owner: owner == uid)

    def _sweep(self, known: Container[ClaimUID]) -> None:
        remove_temporary_files(self._cdi_folder, lambda name: name.startswith(_CDI_PREFIX))
        self._remove_specs(lambda owner: owner not in known)
        for name in _entries(self._folder):
            for request in _entries(self._folder / name):
                remove_temporary_files(self._folder / name / request, lambda final_name: final_name == _HOST_FILE)
            _remove_files(self._folder / name, lambda owner: owner not in known)

    def _remove_specs(self, belongs: Callable[[str | None], bool]) -> None:
        for name in _entries(self._cdi_folder):
            if name.startswith(_CDI_PREFIX) and belongs(name.removeprefix(_CDI_PREFIX).partition("_")[0]):
                _unlink(self._cdi_folder / name)

    def _spec(self, uid: ClaimUID, request: str) -> Path:
        return self._cdi_folder / f"{_CDI_PREFIX}{uid}_{request}.json"

    def _claim_folder(self, namespace: str, name: str) -> Path:
        if not _SUBDOMAIN.fullmatch(name):
            raise ClaimError(f"claim name {quoted(name)} is no DNS subdomain")
        return self._folder / f"{_label('namespace', namespace)}_{name}"


def _label(what: str, text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise ClaimError(f"{what} {quoted(text)} is no DNS label")
    return text


def _container_path(record: Record, request: str) -> str:
    if record.pod_claim_name:
        owner = f"resourceclaimtemplates/{_label('pod claim name', record.pod_claim_name)}"
    else:
        owner = f"resourceclaims/{record.name}"
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


def _remove_files(claim_folder: Path, belongs: Callable[[str | None], bool]) -> None:
    for request in _entries(claim_folder):
        host_file = claim_folder / request / _HOST_FILE
        with suppress(FileNotFoundError):
            if belongs(_owner(host_file)):
                os.unlink(host_file)
        _remove_if_empty(claim_folder / request)
    _remove_if_empty(claim_folder)


def _is_about(host_file: Path, uid: ClaimUID) -> bool:
    with suppress(FileNotFoundError):
        return _owner(host_file) == uid
    return False


def _owner(host_file: Path) -> str | None:
    """Return the UID in a metadata file, None if it says none."""
    try:
        text = read_file(host_file, _LARGEST_FILE).decode()
        document, _ = json.JSONDecoder().raw_decode(text)
        metadata = expect(expect(document, dict, "the file").get("metadata"), dict, "metadata")
        return expect(metadata.get("uid"), str, "metadata.uid")
    except FileNotFoundError:
        raise
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
