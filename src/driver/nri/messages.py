# SPDX-License-Identifier: Apache-2.0
"""Between the runtime's messages and the values that decisions are made on.

Whatever a message holds can be read; what makes no sense in it is left for the decision to refuse. Of texts no more is
kept than is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.cpulists import parse_cpulist
from driver.errors import ClaimError
from driver.hostcgroups import MAX_CGROUPS_PATH
from driver.names import CDI_KIND, CPUSET_VARIABLE_PREFIX
from driver.nri.container import Phase, Pod
from driver.nri.decisions import Request
from driver.nri.environment import claim_entries
from driver.nri.evidence import NO_EVIDENCE, Evidence, longest_list, read_evidence
from driver.startguard import FILE_NAME, hook_claims
from fastcpu import CpuSet
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from driver.names import ClaimUID
    from driver.nri.evidence import HeldClaims

_CDI_PREFIX: Final = f"{CDI_KIND}="
_CDI_SIGN: Final = _CDI_PREFIX.encode()
_VARIABLE_SIGN: Final = CPUSET_VARIABLE_PREFIX.encode()
_HOOK_SIGN: Final = FILE_NAME.encode()
_LONGEST_NAME: Final = 253
_MOST_CDI_DEVICES: Final = 1024


def read_pod(pod: nri.PodSandbox) -> Pod:
    """Read a pod."""
    return Pod(
        uid=pod.uid or pod.id,
        sandbox=pod.id,
        namespace=_printable(pod.namespace) or "?",
        name=_printable(pod.name) or _printable(pod.id),
    )


def unknown_pod(sandbox: str) -> Pod:
    """Return what is known of the pod of a container that came without it."""
    return Pod(uid=sandbox, sandbox=sandbox, namespace="?", name=_printable(sandbox) or "?")


def read_request(pod: Pod, container: nri.Container, held: HeldClaims) -> Request:
    """Read what decides about a container."""
    return Request(name=container_name(container), pod=pod, evidence=container_evidence(container, held))


def container_evidence(container: nri.Container, held: HeldClaims) -> Evidence:
    """Read what about a container speaks of claims: its environment, its CDI devices and its hooks."""
    raw = container.SerializeToString()
    # Few containers have either, and a look at all bytes is cheaper than one at each.
    has_devices = bool(container.CDI_devices) and _CDI_SIGN in raw
    has_hooks = bool(container.hooks.create_runtime) and _HOOK_SIGN in raw
    if not (has_devices or has_hooks or _VARIABLE_SIGN in raw):
        return NO_EVIDENCE
    devices: list[str] = []
    hooks: tuple[tuple[ClaimUID, str], ...] = ()
    fault = ""
    try:
        if has_hooks:
            hooks = hook_claims(container.hooks.create_runtime)
        if has_devices:
            devices = _cdi_devices(container)
    except ClaimError as error:
        fault = str(error)
    entries = claim_entries(raw, container.env, held.longest_entry)
    return read_evidence(entries, devices, hooks, held, fault=fault)


def container_name(container: nri.Container) -> str:
    """Return a container's name for people."""
    return _printable(container.name) or _printable(container.id) or "?"


def read_cpus(container: nri.Container, limit: int) -> CpuSet | None:
    """Return the CPUs that the runtime says a container has; None if it has no restriction, or says nonsense."""
    return read_cpulist(container.linux.resources.cpu.cpus, limit)


def read_cpulist(text: str, limit: int) -> CpuSet | None:
    """Return the CPUs of a list as a runtime writes it; None if it is empty or is none.

    Parameters
    ----------
    text : str
        The list.
    limit : int
        One more than the highest CPU that it may have.
    """
    if not text or len(text) > longest_list(limit, limit):
        return None
    try:
        return parse_cpulist(text, limit) or None
    except CpuListError:
        return None


def read_cgroups_path(container: nri.Container) -> str:
    """Return a container's cgroup as the runtime names it; empty if it does not, or if no cgroup has so long a name."""
    path = container.linux.cgroups_path
    return path if len(path) <= MAX_CGROUPS_PATH else ""


def read_phase(container: nri.Container) -> Phase:
    """Return how far a container has come that lives."""
    return Phase.CREATED if container.state == nri.CONTAINER_CREATED else Phase.RUNNING


def adjustment(cpus: CpuSet) -> nri.ContainerAdjustment:
    """Have a container that is being created get CPUs; if there are none, leave it as it is."""
    message = nri.ContainerAdjustment()
    if cpus:
        message.linux.resources.cpu.cpus = str(cpus)
    return message


def update(identity: str, cpulist: str) -> nri.ContainerUpdate:
    """Have a container get CPUs.

    Parameters
    ----------
    identity : str
        Its id.
    cpulist : str
        Not empty: that would mean that nothing changes.
    """
    message = nri.ContainerUpdate(container_id=identity)
    message.linux.resources.cpu.cpus = cpulist
    return message


def _cdi_devices(container: nri.Container) -> list[str]:
    """Return the CDI devices of our kind."""
    if len(container.CDI_devices) > _MOST_CDI_DEVICES:
        raise ClaimError(f"it has {len(container.CDI_devices)} CDI devices; expected at most {_MOST_CDI_DEVICES}")
    return [device.name for device in container.CDI_devices if device.name.startswith(_CDI_PREFIX)]


def _printable(text: str) -> str:
    text = text[:_LONGEST_NAME]
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return "".join(c if c.isprintable() and c != " " else "?" for c in text)
