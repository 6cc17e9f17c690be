# SPDX-License-Identifier: Apache-2.0
"""The driver's effective configuration: the values, what follows from them, and nothing of where they came from.

Keys, flags and defaults are those of dra-driver-cpu, so that its charts, values and manifests work unchanged.
`driver.settings` reads them from the file and the flags.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from driver.errors import ConfigError
from driver.flags import shown
from driver.names import DRIVER_NAME

if TYPE_CHECKING:
    from fastcpu import CpuSet

MAX_SOCKET_PATH_BYTES: Final = 107
"""``sun_path`` has 108 bytes with the closing NUL."""

_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)


def _no_cpus() -> CpuSet:
    # NumPy takes longer to import than everything else a wrong flag needs.
    from fastcpu import CpuSet

    return CpuSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The effective configuration; one attribute for each key or flag of the same name.

    Attributes
    ----------
    placement : mapping of str to str
        The keys that were set; what is missing has the default of the claim parameters' ``placement``.
    sysfs_overlay : mapping of str to str
        Absolute ``/sys/...`` path to the text that a read of it gives.
    nri_socket : str
        Empty: no runtime, containers are not held to their CPUs.
    """

    cpu_device_mode: str = "grouped"
    group_by: str = "numanode"
    allocator: str = "cpumanager"
    reserved_cpus: CpuSet = field(default_factory=_no_cpus)
    placement: Mapping[str, str] = field(default_factory=dict)
    hostname_override: str = ""
    kubeconfig: str = ""
    sysfs_overlay: Mapping[str, str] = field(default_factory=dict)
    publish_node_allocatable_resource_mapping: bool = False
    bind_address: str = ":8080"
    kubelet_root_dir: Path = Path("/var/lib/kubelet")
    expose_pcie_roots: bool = False
    verbosity: int = 0
    vmodule: str = ""
    sysfs_root: Path = Path("/sys")
    cdi_dir: Path = Path("/var/run/cdi")
    cgroup_root: Path = Path("/sys/fs/cgroup")
    nri_socket: str = "/var/run/nri/nri.sock"
    log_format: str = "text"
    start_guard: bool = True

    @property
    def node_name(self) -> str:
        """The node's name: the override, else the host name, trimmed and in lower case.

        Raises
        ------
        ConfigError
            If no node can have that name.
        """
        name = (self.hostname_override or _host_name()).strip().lower()
        if len(name) > 253 or not _DNS_SUBDOMAIN.fullmatch(name):
            source = "hostnameOverride" if self.hostname_override else "the host name"
            raise ConfigError(
                f"{source} {shown(name)} cannot be a node's name: expected at most 253 letters, digits, dashes and "
                "dots, each part beginning and ending with a letter or digit; set hostnameOverride to the node's name"
            )
        return name

    @property
    def plugin_dir(self) -> Path:
        """The driver's own folder under the kubelet's root."""
        return self.kubelet_root_dir / "plugins" / DRIVER_NAME

    @property
    def registry_dir(self) -> Path:
        """The folder in which the kubelet looks for plugins."""
        return self.kubelet_root_dir / "plugins_registry"

    @property
    def dra_socket(self) -> Path:
        """The socket on which the kubelet prepares and unprepares claims."""
        return self.plugin_dir / "dra.sock"

    @property
    def registration_socket(self) -> Path:
        """The socket by which the kubelet finds the driver."""
        return self.registry_dir / f"{DRIVER_NAME}-reg.sock"

    def describe(self) -> dict[str, str | int | bool]:
        """Return every setting under its name in the file, a flag's in the same style, for a log line."""
        return {
            "cpuDeviceMode": self.cpu_device_mode,
            "groupBy": self.group_by,
            "allocator": self.allocator,
            "reservedCPUs": str(self.reserved_cpus),
            "placement": ",".join(f"{key}={value}" for key, value in self.placement.items()),
            "hostnameOverride": self.hostname_override,
            "kubeconfig": self.kubeconfig,
            "sysfsOverlay": f"{len(self.sysfs_overlay)} files" if self.sysfs_overlay else "",
            "publishNodeAllocatableResourceMapping": self.publish_node_allocatable_resource_mapping,
            "bindAddress": self.bind_address,
            "kubeletRootDir": str(self.kubelet_root_dir),
            "exposePCIeRoots": self.expose_pcie_roots,
            "v": self.verbosity,
            "vmodule": self.vmodule,
            "sysfsRoot": str(self.sysfs_root),
            "cdiDir": str(self.cdi_dir),
            "cgroupRoot": str(self.cgroup_root),
            "nriSocket": self.nri_socket,
            "logFormat": self.log_format,
            "startGuard": self.start_guard,
        }


@functools.cache
def _host_name() -> str:
    # A node's name is for life: it must not change with the host name under a running driver.
    return socket.gethostname()


def check_socket_path(path: Path) -> None:
    """Refuse a path that is too long for a unix socket.

    Parameters
    ----------
    path : Path
        Where the socket is to be.

    Raises
    ------
    ConfigError
        With the number of bytes, and the most that there may be.
    """
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {str(path)!r} has {length} bytes, {length - MAX_SOCKET_PATH_BYTES} too many: "
            f"the kernel takes at most {MAX_SOCKET_PATH_BYTES}; choose a shorter folder"
        )
