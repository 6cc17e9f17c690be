# SPDX-License-Identifier: Apache-2.0
"""Between the runtime's messages and the values that decisions are made on.

Whatever a message holds can be read; what makes no sense in it is left for the decision to refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.apis import nri_v1alpha1_pb2 as nri
from driver.errors import ClaimError
from driver.hostcgroups import MAX_CGROUPS_PATH
from driver.names import CDI_KIND, CPUSET_VARIABLE_PREFIX
from driver.nri.containers import Phase, Pod
from driver.nri.decisions import Request
from driver.startguard import FILE_NAME, hook_claims
from fastcpu import CpuSet
from fastcpu.cpuset import MAX_CPUS
from fastcpu.errors import CpuListError

if TYPE_CHECKING:
    from driver.names import ClaimUID

_CDI_PREFIX = f"{CDI_KIND}="
# Whoever has a claim, or pretends to, has one of these in an environment variable, a CDI device or a hook.
_SIGNS = (CPUSET_VARIABLE_PREFIX.encode(), _CDI_PREFIX.encode(), FILE_NAME.encode())
_LONGEST_NAME = 253


def read_pod(pod: nri.PodSandbox) -> Pod:
    """Read a pod."""
    return Pod(
        uid=pod.uid or pod.id,
        sandbox=pod.id,
        namespace=_printable(pod.namespace) or "?",
        name=_printable(pod.name) or _printable(pod.id),
    )


def unknown_pod(container: nri.Container) -> Pod:
    """Return what is known of the pod of a container that came without it."""
    sandbox = container.pod_sandbox_id
    return Pod(uid=sandbox, sandbox=sandbox, namespace="?", name=_printable(sandbox) or "?")


def read_request(pod: Pod, container: nri.Container) -> Request:
    """Read what decides about a container."""
    name = container_name(container)
    # Most containers have a long environment and no claim: a look at all bytes is cheaper than one at each string.
    raw = container.SerializeToString()
    if not any(sign in raw for sign in _SIGNS):
        return Request(name=name, pod=pod, guards={})
    guards: dict[ClaimUID, CpuSet] = {}
    fault = ""
    try:
        guards = hook_claims(container.hooks.create_runtime)
    except ClaimError as error:
        fault = str(error)
    return Request(
        name=name,
        pod=pod,
        variables=tuple([entry for entry in container.env if entry.startswith(CPUSET_VARIABLE_PREFIX)]),
        cdi_devices=tuple(device.name for device in container.CDI_devices if device.name.startswith(_CDI_PREFIX)),
        guards=guards,
        guard_fault=fault,
    )


def container_name(container: nri.Container) -> str:
    """Return a container's name for people."""
    return _printable(container.name) or _printable(container.id) or "?"


def read_cpus(container: nri.Container) -> CpuSet | None:
    """Return the CPUs that the runtime says a container has; None if it has no restriction, or says nonsense."""
    return read_cpulist(container.linux.resources.cpu.cpus)


def read_cpulist(text: str) -> CpuSet | None:
    """Return the CPUs of a list as a runtime writes it; None if it is empty or is none."""
    try:
        return CpuSet.parse(text, limit=MAX_CPUS) or None
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


def _printable(text: str) -> str:
    text = text[:_LONGEST_NAME]
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return "".join(c if c.isprintable() and c != " " else "?" for c in text)
