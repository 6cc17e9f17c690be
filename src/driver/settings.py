# SPDX-License-Identifier: Apache-2.0
"""Where the configuration comes from: defaults, overridden by a flat YAML file, overridden by flags.

One table says for every setting what it is called in the file and on the command line and how its value is read. What
the table does not have is refused rather than ignored, with the place and the right spelling. A value that a flag
overrides is not looked at. The environment is not read.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from driver.config import Config
from driver.errors import ConfigError
from driver.flags import Flag, fold, nearest, shown
from driver.given import (
    Entry,
    Given,
    alternatives,
    one_of,
    read_absolute_path,
    read_bind_address,
    read_boolean,
    read_cpus,
    read_path,
    read_text,
    read_verbosity,
    read_vmodule,
)
from driver.parameters import PLACEMENT_CHOICES

CONFIG_VERSION: Final = "v1alpha1"
MAX_CONFIG_BYTES: Final = 1 << 20
"""A ConfigMap holds no more."""
MAX_OVERLAY_BYTES: Final = 8 << 20
"""An overlay may name several files of each of thousands of CPUs."""

GROUPINGS: Final = ("numanode", "socket", "machine", "l3cache")
"""Levels that ``groupBy`` may name."""

# A line has to stay readable.
_MOST_FAULTS = 5


def _placement(given: Given) -> dict[str, str]:
    if not isinstance(given.value, tuple):
        given.refuse(f"a mapping with keys of {', '.join(PLACEMENT_CHOICES)}")
    found = {}
    for entry in _checked(given.value, given.source, tuple(PLACEMENT_CHOICES), {}):
        if entry.value is not None:
            place = f"{given.source}, line {entry.line}, placement.{entry.key}"
            found[entry.key] = one_of(*PLACEMENT_CHOICES[entry.key])(Given(entry.value, place))
    return found


def _overlay(given: Given) -> dict[str, str]:
    """Read a sysfs overlay: a mapping, the text of one, or as dra-driver-cpu takes it, the path of a file with one."""
    from driver.strictyaml import read_file, read_mapping

    source = given.source
    if isinstance(given.value, tuple):
        entries = given.value
    else:
        text = read_text(given)
        if not text:
            return {}
        if "\n" in text or ": " in text or text.startswith("{"):
            source = f"{given.place}, in its text"
        else:
            source = text
            text = read_file(given.locate(text), "sysfs overlay", MAX_OVERLAY_BYTES)
        entries = read_mapping(text, source)
    overlay: dict[str, str] = {}
    for entry in entries:
        place = f"{source}, line {entry.line}"
        path = entry.key
        if not path.startswith("/sys/") or os.path.normpath(path) != path or "\0" in path:
            raise ConfigError(f"{place}: {shown(path)} is not a path of an overlay; expected a clean one below /sys/")
        if path in overlay:
            raise ConfigError(f"{place}: {shown(path)} is given twice")
        overlay[path] = read_text(Given(entry.value, f"{place}, {path}"))
    for path in overlay:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in overlay:
                raise ConfigError(f"{source}: {shown(parent)} is both a file and a folder of {shown(path)}")
            parent = parent.rpartition("/")[0]
    return overlay


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that can be configured.

    Attributes
    ----------
    attribute : str
        Its name in `Config`.
    read : callable
        Checks a given value and returns what `Config` holds.
    key : str
        Its name in the file; empty if it cannot be there.
    flag : Flag or None
        Its flag. With a key as well, all but ``--kubeconfig`` are the deprecated flags of 0.2.
    """

    attribute: str
    read: Callable[[Given], object]
    key: str = ""
    flag: Flag | None = None


def _deprecated(name: str, value: str, key: str) -> Flag:
    return Flag(name=name, value=value, help=f"deprecated: {key} of the configuration file")


SETTINGS: Final = (
    Setting(
        attribute="cpu_device_mode",
        key="cpuDeviceMode",
        flag=_deprecated("cpu-device-mode", "MODE", "cpuDeviceMode"),
        read=one_of("grouped", "individual"),
    ),
    Setting(attribute="group_by", key="groupBy", flag=_deprecated("group-by", "LEVEL", "groupBy"), read=read_text),
    Setting(attribute="allocator", key="allocator", read=one_of("cpumanager", "external")),
    Setting(
        attribute="reserved_cpus",
        key="reservedCPUs",
        flag=_deprecated("reserved-cpus", "CPUS", "reservedCPUs"),
        read=read_cpus,
    ),
    Setting(attribute="placement", key="placement", read=_placement),
    # One file may serve all nodes, which each have a name of their own.
    Setting(
        attribute="hostname_override",
        flag=Flag(name="node-name", value="NAME", help="this node's name (hostnameOverride, else the host name)"),
        read=read_text,
    ),
    Setting(
        attribute="hostname_override",
        key="hostnameOverride",
        flag=_deprecated("hostname-override", "NAME", "hostnameOverride"),
        read=read_text,
    ),
    Setting(
        attribute="kubeconfig",
        key="kubeconfig",
        flag=Flag(name="kubeconfig", value="FILE", help="how to reach the API server from outside the cluster"),
        read=read_text,
    ),
    Setting(
        attribute="sysfs_overlay",
        key="sysfsOverlay",
        flag=_deprecated("sysfs-overlay", "FILE", "sysfsOverlay"),
        read=_overlay,
    ),
    Setting(
        attribute="publish_node_allocatable_resource_mapping",
        key="publishNodeAllocatableResourceMapping",
        read=read_boolean,
    ),
    Setting(
        attribute="bind_address",
        flag=Flag(name="bind-address", value="ADDRESS", help="where /healthz, /readyz and /metrics are served (:8080)"),
        read=read_bind_address,
    ),
    Setting(
        attribute="kubelet_root_dir",
        flag=Flag(name="kubelet-root-dir", value="DIR", help="the kubelet's root (/var/lib/kubelet)"),
        read=read_absolute_path,
    ),
    Setting(
        attribute="expose_pcie_roots",
        flag=Flag(name="expose-pcie-roots", help="publish the PCIe roots close to each device"),
        read=read_boolean,
    ),
    Setting(
        attribute="sysfs_root",
        flag=Flag(name="sysfs-root", value="DIR", help="the machine's sysfs, or a copy of one (/sys)"),
        read=read_path,
    ),
    Setting(
        attribute="cdi_dir",
        flag=Flag(name="cdi-dir", value="DIR", help="where the runtime looks for CDI specs (/var/run/cdi)"),
        read=read_path,
    ),
    Setting(
        attribute="cgroup_root",
        flag=Flag(name="cgroup-root", value="DIR", help="where the host's cgroups are seen (/sys/fs/cgroup)"),
        read=read_absolute_path,
    ),
    Setting(
        attribute="nri_socket",
        flag=Flag(
            name="nri-socket",
            value="SOCKET",
            help="the runtime's NRI socket (/var/run/nri/nri.sock); empty: containers are not held to their CPUs",
        ),
        read=read_text,
    ),
    Setting(
        attribute="start_guard",
        flag=Flag(name="start-guard", help="let a hook stop a container that starts on the wrong CPUs (true)"),
        read=read_boolean,
    ),
    Setting(
        attribute="log_format",
        flag=Flag(name="log-format", value="FORMAT", help="text or json (text)"),
        read=one_of("text", "json"),
    ),
    Setting(
        attribute="verbosity",
        flag=Flag(
            name="v", value="N", help="verbosity of the log: 0 to 3 tell decisions, 4 and more how they were made"
        ),
        read=read_verbosity,
    ),
    Setting(
        attribute="vmodule",
        flag=Flag(name="vmodule", value="PATTERN=N,...", help="the same for single modules"),
        read=read_vmodule,
    ),
)
"""Every setting, in the order of the help."""

CONFIG_FLAG: Final = Flag(name="config", value="FILE", help="the configuration file, YAML")
FLAGS: Final = (CONFIG_FLAG, *(setting.flag for setting in SETTINGS if setting.flag))
"""The flags that configure the driver."""

_KEYS = {setting.key: setting for setting in SETTINGS if setting.key}
_FLAG_ONLY = {fold(setting.flag.name): setting.flag for setting in SETTINGS if setting.flag and not setting.key}


def load(flags: Mapping[str, str | bool], locate: Callable[[str], Path] = Path) -> Config:
    """Return the effective configuration.

    Parameters
    ----------
    flags : mapping of str to str or bool
        The flags that were given, by name.
    locate : callable
        Turns the path of a file that the configuration names into one that can be opened here.

    Returns
    -------
    Config

    Raises
    ------
    ConfigError
        One line for whoever wrote the file or the flags.
    """
    given: dict[str, Given] = {}
    path = flags.get("config")
    if path:
        given = _read_file(str(path), locate)
    for setting in SETTINGS:
        if setting.flag and setting.flag.name in flags:
            given[setting.attribute] = Given(flags[setting.flag.name], f"flag --{setting.flag.name}", locate=locate)
    values: dict[str, Any] = {
        setting.attribute: setting.read(given[setting.attribute]) for setting in SETTINGS if setting.attribute in given
    }
    _check_grouping(values, given)
    return Config(**values)


def warnings(config: Config, flags: Mapping[str, str | bool]) -> list[str]:
    """Return what someone who starts the driver like this should know, a sentence each."""
    found = [
        f"flag --{setting.flag.name} is deprecated; set {setting.key} in the configuration file"
        for setting in SETTINGS
        if setting.flag and setting.key and setting.flag.name in flags and setting.flag.name != "kubeconfig"
    ]
    if config.cpu_device_mode == "individual":
        found.append(
            "cpuDeviceMode individual is deprecated; use grouped with allocator external, where a claim's cpuset "
            "names the exact CPUs"
        )
    elif config.group_by == "machine":
        found.append(
            "groupBy machine is less preferred than the other levels: one device for the whole machine gives the "
            "scheduler no topology boundary"
        )
    return found


def _check_grouping(values: Mapping[str, Any], given: Mapping[str, Given]) -> None:
    if "group_by" not in values or values.get("cpu_device_mode") == "individual":
        return
    group_by = given["group_by"]
    if values["group_by"] not in GROUPINGS:
        group_by.refuse(alternatives(GROUPINGS))
    if values["group_by"] == "machine" and values.get("allocator") != "external":
        raise ConfigError(
            f"{group_by.place}: machine needs allocator: external in the configuration file, because nothing but a "
            "claim's cpuset says where its CPUs are"
        )


def _read_file(path: str, locate: Callable[[str], Path]) -> dict[str, Given]:
    from driver.strictyaml import read_file, read_mapping

    text = read_file(locate(path), "configuration file", MAX_CONFIG_BYTES)
    entries = _checked(read_mapping(text, path), path, ("apiVersion", *_KEYS), _FLAG_ONLY)
    given = {}
    for entry in entries:
        found = Given(entry.value, f"{path}, line {entry.line}, {entry.key}", path, locate)
        if entry.key == "apiVersion":
            one_of(CONFIG_VERSION)(found)
        elif entry.value is not None:  # a key without a value says nothing
            given[_KEYS[entry.key].attribute] = found
    return given


def _checked(
    entries: tuple[Entry, ...], source: str, keys: tuple[str, ...], flag_only: Mapping[str, Flag]
) -> tuple[Entry, ...]:
    """Return the entries if each has a key of its own that is known; else say all that is wrong with them at once."""
    first: dict[str, int] = {}
    faulty = []
    for entry in entries:
        if entry.key in first or entry.key not in keys:
            faulty.append(entry)
        first.setdefault(entry.key, entry.line)
    if faulty:
        told = [
            f"{entry.key} is given twice, first in line {first[entry.key]}"
            if entry.key in keys
            else _unknown(entry.key, keys, flag_only)
            for entry in faulty[:_MOST_FAULTS]
        ]
        more = f"; and {len(faulty) - len(told)} more" if len(faulty) > len(told) else ""
        known = f"; known keys are {', '.join(keys)}" if any(text.startswith("unknown") for text in told) else ""
        lines = "; ".join(f"line {entry.line}: {text}" for entry, text in zip(faulty, told, strict=False))
        raise ConfigError(f"{source}, {lines}{more}{known}")
    return entries


def _unknown(key: str, keys: tuple[str, ...], flag_only: Mapping[str, Flag]) -> str:
    if flag := flag_only.get(fold(key)):
        return f"{shown(key)} cannot be set in the file; give the flag --{flag.name}"
    meant = nearest(key, keys)
    if meant and meant.casefold() == key.casefold():
        return f"{shown(key)} is spelled {meant}"
    return f"{shown(key)} is no key; did you mean {meant}?" if meant else f"unknown key {shown(key)}"
