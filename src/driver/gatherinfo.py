# SPDX-License-Identifier: Apache-2.0
"""``dracpu gatherinfo``: one YAML document on this node's CPUs and the driver's configuration, for a bug report.

The layout is dra-driver-cpu's, version v1, and everything under its keys means the same. What is added here: the source
of the configuration, the CPU lists of the machine, and notes on everything that could not be read as it should. A
broken machine, a missing driver or an unreadable configuration make a report with notes, never an error.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import yaml

from driver.config import Config
from driver.errors import ConfigError
from driver.flags import HelpRequest, parse_flags
from driver.logs import one_line
from driver.settings import FLAGS, load
from fastcpu.errors import TopologyError
from fastcpu.sysfs import open_tree, read_topology
from fastcpu.topology import CORE_TYPE_NAMES

if TYPE_CHECKING:
    from driver.commandline import ReportOptions
    from fastcpu.sysfs import FileTree
    from fastcpu.topology import Level, Topology

LAYOUT_VERSION: Final = "v1"

# The kernel's "unknown" in 16 bits.
_NO_CLUSTER: Final = 65535
_LONGEST_COMMAND_LINE: Final = 1 << 20


def main(config: Config, options: ReportOptions) -> int:
    """Write the report.

    Parameters
    ----------
    config : Config
        What the flags say.
    options : ReportOptions
        Where the report goes, and whether the flags say anything.

    Returns
    -------
    int
        The exit status: 1 if the report cannot be written.
    """
    report = gather(config, options.configured)
    try:
        if options.to_stdout:
            _write(report, sys.stdout)
            sys.stdout.flush()
        else:
            print(_write_new_file(report, options.output_dir))  # noqa: T201
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"dracpu: cannot write the report: {one_line(str(error))}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def gather(config: Config, configured: bool, processes: Path = Path("/proc")) -> dict[str, object]:
    """Return the report.

    Parameters
    ----------
    config : Config
        What the flags say.
    configured : bool
        Whether they say anything; else the configuration is that of the driver that runs here.
    processes : Path
        Where the kernel lists processes.
    """
    source = "flags"
    notes: list[str] = []
    if not configured:
        source = "defaults"
        running = find_driver(processes)
        if running is None:
            notes.append("no running driver was found; its configuration is taken to be the default one")
        else:
            process, arguments = running
            try:
                config = load(parse_flags(arguments, FLAGS)[0], lambda path: _path_of(process, path))
                source = f"process {process.name}"
            except (ConfigError, HelpRequest) as error:
                notes.append(f"the configuration of process {process.name} cannot be read: {error}")
    details: dict[str, object] = {"topology": {}, "cpus": []}
    try:
        topology = read_topology(config.sysfs_root, config.sysfs_overlay)
    except TopologyError as error:
        notes.append(f"the topology cannot be read: {error}")
    else:
        tree = open_tree(config.sysfs_root, config.sysfs_overlay)
        details = {"topology": _summary(topology), "cpus": _cpus(topology, tree)}
        notes += topology.notes
    return {
        "toolVersion": {"dracpuVersion": version("dracpu"), "pythonVersion": platform.python_version()},
        "layoutVersion": LAYOUT_VERSION,
        "cpuDetails": details,
        "driverConfig": _settings(config),
        "driverConfigSource": source,
        "notes": notes,
    }


def find_driver(processes: Path) -> tuple[Path, Sequence[str]] | None:
    """Find a node plugin that runs here.

    Parameters
    ----------
    processes : Path
        Where the kernel lists processes.

    Returns
    -------
    (Path, sequence of str) or None
        The process's folder and its arguments. Of several the one with the lowest id; never a subcommand such as this
        one.
    """
    try:
        names = os.listdir(processes)
    except OSError:
        return None
    for pid in sorted(int(name) for name in names if name.isascii() and name.isdigit()):
        try:
            with (processes / str(pid) / "cmdline").open("rb") as file:
                raw = file.read(_LONGEST_COMMAND_LINE)
        except OSError:
            continue
        arguments = _driver_arguments(os.fsdecode(raw).removesuffix("\0").split("\0"))
        if arguments is not None and (not arguments or arguments[0].startswith("-")):
            return processes / str(pid), arguments
    return None


def _driver_arguments(words: Sequence[str]) -> Sequence[str] | None:
    """Return the arguments of a dracpu command, started by its name, as a script, or as a module."""
    names = [os.path.basename(word) for word in words[:2]]
    if names[:1] == ["dracpu"]:
        return words[1:]
    if names[:1] and names[0].startswith("python"):
        if names[1:] == ["dracpu"]:
            return words[2:]
        if list(words[1:3]) == ["-m", "driver"]:
            return words[3:]
    return None


def _path_of(process: Path, path: str) -> Path:
    """Return a path by which we can open what a process, perhaps of another container, means by one."""
    if path.startswith("/"):
        return process / "root" / path.lstrip("/")
    return process / "cwd" / path


def _settings(config: Config) -> dict[str, object]:
    defaults = Config().describe()
    settings: dict[str, object] = {
        # YAML cannot hold the bytes of an argument that are no text.
        name: one_line(value) if isinstance(value, str) else value
        for name, value in config.describe().items()
        if value or value != defaults[name]
    }
    if config.placement:
        settings["placement"] = dict(config.placement)
    if config.sysfs_overlay:
        settings["sysfsOverlay"] = yaml.dump(dict(config.sysfs_overlay), Dumper=yaml.CSafeDumper)
    return settings


def _summary(topology: Topology) -> dict[str, object]:
    summary: dict[str, object] = {
        "numCPUs": len(topology.online),
        "numCores": len(topology.cores),
        "numUncoreCache": len(topology.l3_caches),
        "numSockets": len(topology.sockets),
        "numNUMANodes": len(topology.numa_nodes),
        "smtEnabled": topology.smt_enabled,
        "onlineCPUSet": str(topology.online),
        "presentCPUSet": str(topology.present),
    }
    if topology.isolated:
        summary["isolatedCPUSet"] = str(topology.isolated)
    return summary


def _cpus(topology: Topology, tree: FileTree) -> list[Mapping[str, object]]:
    nodes = [str(topology.numa_nodes.cpuset(row)) for row in range(len(topology.numa_nodes))]
    return [
        {
            "cpuID": cpu,
            "coreID": int(topology.core_id[cpu]),
            "socketID": _id(topology.sockets, cpu),
            "clusterID": _cluster(tree, cpu),
            "numaNodeID": _id(topology.numa_nodes, cpu),
            "numaNodeCPUSet": nodes[row] if (row := int(topology.numa_nodes.group_of[cpu])) >= 0 else "",
            "sibling": _sibling(topology, cpu),
            "coreType": CORE_TYPE_NAMES[topology.core_type[cpu]],
            "uncoreCacheID": _id(topology.l3_caches, cpu),
        }
        for cpu in topology.online
    ]


def _id(level: Level, cpu: int) -> int:
    row = int(level.group_of[cpu])
    return level.ids[row] if row >= 0 else -1


def _cluster(tree: FileTree, cpu: int) -> int:
    text = (tree.read(f"/sys/devices/system/cpu/cpu{cpu}/topology/cluster_id") or "").strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        return -1
    return -1 if int(text) == _NO_CLUSTER else int(text)


def _sibling(topology: Topology, cpu: int) -> int:
    """Return the lowest other thread of the core; -1 if there is none."""
    core = topology.cores.cpuset(int(topology.cores.group_of[cpu]))
    return next((other for other in core if other != cpu), -1)


def _write(report: Mapping[str, object], file: IO[str]) -> None:
    # The document's start lets the reports of several nodes be one file.
    yaml.dump(report, file, Dumper=yaml.CSafeDumper, explicit_start=True, sort_keys=False, width=1000)


def _write_new_file(report: Mapping[str, object], directory: Path | None) -> Path:
    if directory is None:
        descriptor, name = tempfile.mkstemp(prefix="dracpu-gatherinfo-", suffix=".yaml")
        path = Path(name)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"dracpu-gatherinfo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.yaml"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            _write(report, file)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path
