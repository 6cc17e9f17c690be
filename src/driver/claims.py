# SPDX-License-Identifier: Apache-2.0
"""A ResourceClaim as the API server sent it, read into a typed request. Pure: no I/O, no machine, no state.

The claim is untrusted. Whatever is in it, decoding gives an `AllocatedClaim` or a `ClaimError`; what belongs to other
drivers is passed over. Only what every later step needs is checked here (the identity, the allocation's form, no
administrator's access); whether the consumed capacity is a number of CPUs, and what the opaque parameters say, is
the allocator's business, after it is known whether the claim is prepared already.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from driver.errors import ClaimError
from driver.json_values import expect, quoted
from driver.names import CPU_CAPACITY, DRIVER_NAME, ClaimUID
from driver.parameters import LARGEST_PARAMETERS, json_size_exceeds, parse_parameters
from driver.quantity import cpu_count
from fastcpu import CpuSet
from fastcpu.errors import CpuListError

__all__ = ["FROM_CLAIM", "FROM_CLASS", "AllocatedClaim", "DeviceResult", "OpaqueConfig", "decode_claim"]

_T = TypeVar("_T", dict[str, object], list[object], str, int, bool)

FROM_CLAIM: Final = "FromClaim"
FROM_CLASS: Final = "FromClass"

_POD_CLAIM_NAME: Final = "resource.kubernetes.io/pod-claim-name"
_RESULTS: Final = "status.allocation.devices.results"
_CONFIGS: Final = "status.allocation.devices.config"

# Names end up in file names, messages, logs and gRPC answers. The API's own rules are stricter in parts. Only requests
# and pools have parts with a slash between, and no part is `..`.
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
_NAME_PATTERN = re.compile(_NAME, re.ASCII)
_PATH_PATTERN = re.compile(rf"{_NAME}(?:/{_NAME}){{0,8}}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResult:
    """One device of ours that was allocated to the claim.

    Attributes
    ----------
    request : str
        ``request`` or ``request/subrequest`` of the claim's spec.
    pool, device : str
        Which device.
    share_id : str or None
        Which share of a device that several claims may use.
    cpus : int
        CPUs consumed of it; 0 if ``fault`` says why the result does not tell.
    fault : str
        What is wrong with the consumed capacity; empty if nothing is.
    """

    request: str
    pool: str
    device: str
    share_id: str | None = None
    cpus: int
    fault: str = ""

    @property
    def base_request(self) -> str:
        """Name of the request without the sub-request, as containers refer to it."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueConfig:
    """One entry of the allocation's configuration that is for us.

    Attributes
    ----------
    source : str
        `FROM_CLAIM` or `FROM_CLASS`.
    requests : tuple of str
        The requests and sub-requests it is for; empty for all.
    parameters : object
        Its decoded JSON, unchecked; None if it has none.
    """

    source: str
    requests: tuple[str, ...]
    parameters: object

    def applies_to(self, request: str) -> bool:
        """Say whether the entry is for a result's ``request``."""
        return not self.requests or request in self.requests or request.partition("/")[0] in self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedClaim:
    """A claim with an allocation, as far as it concerns this driver.

    Attributes
    ----------
    uid, namespace, name : str
        Which claim.
    generation : int
        Generation of its spec; 0 if the object carries none.
    pod_claim_name : str or None
        What the pod calls it, if it was made from a template.
    results : tuple of DeviceResult
        Our devices, in the allocation's order.
    configs : tuple of OpaqueConfig
        Our configuration, in the allocation's order.
    request_counts : mapping of str to int
        The spec's ``count`` of each request (``request``) and each sub-request (``request/subrequest``).
    fingerprint : str
        SHA-256, in hexadecimal, of the results and configs by meaning: the same for two spellings of one
        allocation, different for two allocations.
    """

    uid: ClaimUID
    namespace: str
    name: str
    generation: int
    pod_claim_name: str | None
    results: tuple[DeviceResult, ...]
    configs: tuple[OpaqueConfig, ...]
    request_counts: Mapping[str, int]
    fingerprint: str


def decode_claim(raw: Mapping[str, object], uid: ClaimUID) -> AllocatedClaim:
    """Read a ResourceClaim of ``resource.k8s.io/v1``.

    Parameters
    ----------
    raw : mapping of str to object
        The decoded JSON of the object.
    uid : ClaimUID
        UID of the claim that was asked for.

    Returns
    -------
    AllocatedClaim

    Raises
    ------
    ClaimError
        If it is another claim, has no allocation, gives us a device for administrator's access, or is not of the
        API's form.
    """
    claim = expect(raw, dict, "the claim")
    metadata = expect(claim.get("metadata"), dict, "metadata")
    namespace = _name(metadata, "namespace", "metadata")
    name = _name(metadata, "name", "metadata")
    found = expect(metadata.get("uid"), str, "metadata.uid")
    if found != uid:
        raise ClaimError(
            f"claim {namespace}/{name} has UID {quoted(found)}, not {uid}: it was deleted and created again"
        )
    allocation = _optional(_optional(claim, "status", dict, "status"), "allocation", dict, "status.allocation")
    if allocation is None:
        raise ClaimError(f"claim {namespace}/{name} has no allocation yet; expected status.allocation")
    devices = _optional(allocation, "devices", dict, "status.allocation.devices")
    annotations = _optional(metadata, "annotations", dict, "metadata.annotations")
    results = tuple(_results(devices))
    configs = tuple(_configs(devices))
    return AllocatedClaim(
        uid=uid,
        namespace=namespace,
        name=name,
        generation=_optional(metadata, "generation", int, "metadata.generation") or 0,
        pod_claim_name=_optional_name(annotations, _POD_CLAIM_NAME, "metadata.annotations"),
        results=results,
        configs=configs,
        request_counts=dict(_request_counts(_optional(claim, "spec", dict, "spec"))),
        fingerprint=_fingerprint(results, configs),
    )


def _results(devices: dict[str, object] | None) -> Iterator[DeviceResult]:
    for index, item in enumerate(_optional(devices, "results", list, _RESULTS) or []):
        place = f"{_RESULTS}[{index}]"
        result = expect(item, dict, place)
        if expect(result.get("driver"), str, f"{place}.driver") != DRIVER_NAME:
            continue
        request = _name(result, "request", place, _PATH_PATTERN)
        if _optional(result, "adminAccess", bool, f"{place}.adminAccess"):
            raise ClaimError(
                f"request {request}: {DRIVER_NAME} offers no administrator's access; "
                "ask for the device without adminAccess"
            )
        cpus, fault = _consumed_cpus(_optional(result, "consumedCapacity", dict, f"{place}.consumedCapacity"))
        yield DeviceResult(
            request=request,
            pool=_name(result, "pool", place, _PATH_PATTERN),
            device=_name(result, "device", place),
            share_id=_optional_name(result, "shareID", place),
            cpus=cpus,
            fault=fault,
        )


def _consumed_cpus(consumed: dict[str, object] | None) -> tuple[int, str]:
    value = None if consumed is None else consumed.get(CPU_CAPACITY)
    if value is None:
        return 0, f'consumedCapacity["{CPU_CAPACITY}"] is missing; expected the number of CPUs'
    try:
        return cpu_count(value), ""
    except ValueError as error:
        return 0, f'consumedCapacity["{CPU_CAPACITY}"]: {error}'


def _configs(devices: dict[str, object] | None) -> Iterator[OpaqueConfig]:
    for index, item in enumerate(_optional(devices, "config", list, _CONFIGS) or []):
        place = f"{_CONFIGS}[{index}]"
        config = expect(item, dict, place)
        opaque = _optional(config, "opaque", dict, f"{place}.opaque")
        if opaque is None or expect(opaque.get("driver"), str, f"{place}.opaque.driver") != DRIVER_NAME:
            continue
        source = expect(config.get("source"), str, f"{place}.source")
        if source not in (FROM_CLAIM, FROM_CLASS):
            raise ClaimError(f"{place}.source {quoted(source)} is unknown; expected {FROM_CLASS} or {FROM_CLAIM}")
        requests = _optional(config, "requests", list, f"{place}.requests") or []
        yield OpaqueConfig(
            source=source,
            requests=tuple(expect(request, str, f"{place}.requests") for request in requests),
            parameters=opaque.get("parameters"),
        )


def _request_counts(spec: dict[str, object] | None) -> Iterator[tuple[str, int]]:
    """Yield the counts that the spec names; a request of a form that is not known here has none."""
    devices = _optional(spec, "devices", dict, "spec.devices")
    for index, item in enumerate(_optional(devices, "requests", list, "spec.devices.requests") or []):
        place = f"spec.devices.requests[{index}]"
        request = expect(item, dict, place)
        name = _name(request, "name", place)
        exactly = _optional(request, "exactly", dict, f"{place}.exactly")
        count = _optional(exactly, "count", int, f"{place}.exactly.count")
        if count is not None:
            yield name, count
        for alternative in _optional(request, "firstAvailable", list, f"{place}.firstAvailable") or []:
            subrequest = expect(alternative, dict, f"{place}.firstAvailable")
            count = _optional(subrequest, "count", int, f"{place}.firstAvailable.count")
            if count is not None:
                yield f"{name}/{_name(subrequest, 'name', f'{place}.firstAvailable')}", count


def _optional(owner: dict[str, object] | None, key: str, kind: type[_T], place: str) -> _T | None:
    value = None if owner is None else owner.get(key)
    return None if value is None else expect(value, kind, place)


def _name(owner: dict[str, object], key: str, place: str, pattern: re.Pattern[str] = _NAME_PATTERN) -> str:
    text = expect(owner.get(key), str, f"{place}.{key}")
    if not pattern.fullmatch(text):
        raise ClaimError(f"{place}.{key} {quoted(text)} is malformed; expected a name of the Kubernetes API")
    return text


def _optional_name(owner: dict[str, object] | None, key: str, place: str) -> str | None:
    # Go writes and reads an absent optional text as an empty one.
    return None if owner is None or owner.get(key) in (None, "") else _name(owner, key, place)


def _fingerprint(results: tuple[DeviceResult, ...], configs: tuple[OpaqueConfig, ...]) -> str:
    # Which result stands first says nothing. Of two configs it may say which one wins. The wording of a fault is left
    # out: another version of the driver may word it otherwise.
    meaning = {
        "results": sorted(
            [result.request, result.pool, result.device, result.share_id or "", result.cpus] for result in results
        ),
        "configs": [[config.source, sorted(set(config.requests)), _meaning(config.parameters)] for config in configs],
    }
    try:
        text = json.dumps(meaning, sort_keys=True)
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
        raise ClaimError("opaque parameters are nested too deeply, or hold a number that is too long") from error
    return hashlib.sha256(text.encode()).hexdigest()


def _meaning(raw: object) -> object:
    """Reduce opaque parameters to what they mean; what has no meaning here stands for itself."""
    try:
        parameters = parse_parameters(raw)
    except ClaimError:
        return "too large" if json_size_exceeds(raw, LARGEST_PARAMETERS) else {"unread": raw}
    return {"cpuset": _cpus(parameters.cpuset), "placement": parameters.placement}


def _cpus(cpuset: str | None) -> str | None:
    if cpuset is None:
        return None
    try:
        return str(CpuSet.parse(cpuset))
    except CpuListError:
        return f"unread {cpuset}"
