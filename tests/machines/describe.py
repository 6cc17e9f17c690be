# SPDX-License-Identifier: Apache-2.0
"""Compact descriptions of machines: made once from a recorded ``/sys`` tree, and turned back into a tree by the tests.

    python tests/machines/describe.py FOLDER

reads ``expected.json`` and the ``.tar.bz2`` files of a folder. For each machine it writes one JSON file beside this
script, and the part of the recording that a description looks at into ``recordings``. README.md has the format.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastcpu import CpuSet

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings"

CPU_FOLDER = "devices/system/cpu"
NODE_FOLDER = "devices/system/node"

SYSTEM_FILES = (
    *(f"{CPU_FOLDER}/{name}" for name in ("online", "present", "possible", "offline", "isolated", "kernel_max")),
    f"{CPU_FOLDER}/smt/control",
    *(f"{NODE_FOLDER}/{name}" for name in ("online", "possible", "has_cpu")),
    *(f"devices/{name}/cpus" for name in ("cpu_core", "cpu_atom", "cpu_lowpower")),
)
TOPOLOGY_FILES = ("physical_package_id", "die_id", "cluster_id", "core_id")
TOPOLOGY_LISTS = {
    "core_cpus_list": "core_cpus",
    "thread_siblings_list": "thread_siblings",
    "package_cpus_list": "package_cpus",
    "core_siblings_list": "core_siblings",
    "die_cpus_list": "die_cpus",
}
CACHE_FILES = ("level", "type")
L3_FILES = ("id",)
L3_LISTS = {"shared_cpu_list": "shared_cpu_map"}
NODE_LISTS = {"cpulist": "cpumap"}


def _any(*groups: Iterable[str]) -> str:
    return "|".join(re.escape(name) for group in groups for name in group)


_READ = re.compile(
    f"{_any(SYSTEM_FILES)}"
    rf"|{CPU_FOLDER}/cpu[0-9]+/(online|cpu_capacity"
    rf"|topology/({_any(TOPOLOGY_FILES, TOPOLOGY_LISTS, TOPOLOGY_LISTS.values())})"
    rf"|cache/index[0-9]+/({_any(CACHE_FILES, L3_FILES, L3_LISTS, L3_LISTS.values())}))"
    rf"|{NODE_FOLDER}/node[0-9]+/({_any(NODE_LISTS, NODE_LISTS.values())})"
    r"|devices/pci[^/]+/pci_bus/[^/]+/cpu(list)?affinity"
)


def is_read(path: str) -> bool:
    """Tell whether a description looks at a file, or at the existence of a folder, by its path below ``sys``."""
    return bool(_READ.fullmatch(path) or re.fullmatch(f"{CPU_FOLDER}/cpu[0-9]+|{NODE_FOLDER}/node[0-9]+", path))


def members(recording: Path) -> Iterator[tuple[str, str, bytes | None]]:
    """Yield what descriptions look at: machine, path below ``sys``, and content; None for a folder.

    Recordings come from elsewhere and hold links to anywhere: only plain files and folders are taken.
    """
    with tarfile.open(recording) as archive:
        for member in archive:
            machine, _, path = member.name.removeprefix("./").partition("/sys/")
            if not is_read(path) or not (member.isfile() or member.isdir()):
                continue
            if ".." in Path(member.name).parts or "/" in machine:
                raise ValueError(f"{recording}: {member.name} lies outside the machine's folder")
            source = archive.extractfile(member)
            yield machine, path, None if source is None else source.read()


def unpack(recording: Path, folder: Path) -> Path:
    """Unpack what descriptions look at, and return the folder that stands for ``/sys``."""
    sys_folder = None
    for machine, path, content in members(recording):
        sys_folder = folder / machine / "sys"
        target = sys_folder / path
        if content is None:
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    if sys_folder is None:
        raise ValueError(f"{recording}: no sys folder in it")
    return sys_folder


def pack(recording: Path, target: Path) -> None:
    """Write the part of a recording that descriptions look at, files of one name together, which is a fifth of it."""
    found = sorted(members(recording), key=lambda member: (Path(member[1]).name, member[2] or b"", member[1]))
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for machine, path, content in found:
            member = tarfile.TarInfo(f"{machine}/sys/{path}")
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))


def describe(sys_folder: Path) -> dict[str, Any]:
    """Return the description of a tree."""
    by_cpu: dict[str, dict[str, list[int]]] = {}
    masks_by_cpu: dict[str, dict[str, list[int]]] = {}
    masks: list[str] = []
    for cpu in sorted(int(p.name[3:]) for p in (sys_folder / CPU_FOLDER).glob("cpu[0-9]*")):
        folder = sys_folder / CPU_FOLDER / f"cpu{cpu}"
        texts, cpu_masks = _describe_cpu(folder)
        # A folder without any file that is looked at still says that the CPU exists.
        for name, text in (texts or {"": ""}).items():
            by_cpu.setdefault(name, {}).setdefault(text, []).append(cpu)
        for name, text in cpu_masks.items():
            masks_by_cpu.setdefault(name, {}).setdefault(_list_of_mask(text), []).append(cpu)
            masks.append(text)
    nodes: dict[str, str] = {}
    node_masks: dict[str, str] = {}
    for folder in sorted((sys_folder / NODE_FOLDER).glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        texts, others = _lists_or_masks(folder, NODE_LISTS)
        nodes.update({f"{folder.name}/{name}": text for name, text in texts.items()})
        node_masks.update({f"{folder.name}/{name}": _list_of_mask(text) for name, text in others.items()})
        masks += others.values()
    pci = {
        str(path.relative_to(sys_folder / "devices")): _read(path)
        for path in sorted((sys_folder / "devices").glob("pci*/pci_bus/*/cpu*affinity"))
    }
    widths = {len(mask.strip("\0\n").replace(",", "")) for mask in masks}
    if len(widths) > 1:
        raise ValueError(f"{sys_folder}: masks of different widths, {widths}")
    return {
        "system": {name: _read(sys_folder / name) for name in SYSTEM_FILES if (sys_folder / name).is_file()},
        "cpu": {name: _compact(texts) for name, texts in sorted(by_cpu.items())},
        "mask_digits": widths.pop() if widths else 0,
        "cpu_mask": {name: _compact(texts) for name, texts in sorted(masks_by_cpu.items())},
        "node": nodes,
        "node_mask": node_masks,
        "pci": pci,
    }


def _describe_cpu(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    names = [f"topology/{name}" for name in TOPOLOGY_FILES] + ["online", "cpu_capacity"]
    texts = {name: _read(folder / name) for name in names if (folder / name).is_file()}
    lists, masks = _lists_or_masks(folder, {f"topology/{k}": f"topology/{v}" for k, v in TOPOLOGY_LISTS.items()})
    texts |= lists
    for cache in sorted(folder.glob("cache/index[0-9]*")):
        prefix = f"cache/{cache.name}"
        is_l3 = (cache / "level").is_file() and _read(cache / "level").strip() == "3"
        for name in CACHE_FILES + (L3_FILES if is_l3 else ()):
            if (cache / name).is_file():
                texts[f"{prefix}/{name}"] = _read(cache / name)
        if is_l3:
            lists, others = _lists_or_masks(folder, {f"{prefix}/{k}": f"{prefix}/{v}" for k, v in L3_LISTS.items()})
            texts |= lists
            masks |= others
    return texts, masks


def _lists_or_masks(folder: Path, pairs: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the lists, and the masks that say something else or have no list beside them."""
    lists = {name: _read(folder / name) for name in pairs if (folder / name).is_file()}
    masks = {mask: _read(folder / mask) for mask in pairs.values() if (folder / mask).is_file()}
    for name, mask in pairs.items():
        if name in lists and mask in masks and lists[name].strip("\0\n") == _list_of_mask(masks[mask]):
            del masks[mask]
    return lists, masks


def _read(path: Path) -> str:
    return path.read_bytes().decode("latin-1")


def _compact(texts: Mapping[str, Iterable[int]]) -> dict[str, str]:
    return {text: str(CpuSet(cpus)) for text, cpus in texts.items()}


def _list_of_mask(text: str) -> str:
    bits = int(text.strip("\0\n").replace(",", ""), 16)
    return str(CpuSet(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1))


def _mask_of_list(text: str, digits: int) -> str:
    mask = f"{sum(1 << cpu for cpu in CpuSet.parse(text)):0{digits}x}"
    first = len(mask) % 8
    groups = [mask[:first]] * bool(first) + [mask[i : i + 8] for i in range(first, len(mask), 8)]
    return ",".join(groups) + "\n"


def files(description: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the path below ``sys`` and the text of every file of a description."""
    digits = description["mask_digits"]
    yield from description["system"].items()
    for name, by_text in description["cpu"].items():
        for text, cpus in by_text.items():
            for cpu in CpuSet.parse(cpus):
                yield f"{CPU_FOLDER}/cpu{cpu}/{name}", text
    for name, by_text in description["cpu_mask"].items():
        for members, cpus in by_text.items():
            text = _mask_of_list(members, digits)
            for cpu in CpuSet.parse(cpus):
                yield f"{CPU_FOLDER}/cpu{cpu}/{name}", text
    for name, text in description["node"].items():
        yield f"{NODE_FOLDER}/{name}", text
    for name, members in description["node_mask"].items():
        yield f"{NODE_FOLDER}/{name}", _mask_of_list(members, digits)
    for name, text in description["pci"].items():
        yield f"devices/{name}", text


def write_tree(description: Mapping[str, Any], sys_folder: Path) -> None:
    """Write the tree of a description."""
    for path, text in files(description):
        target = sys_folder / path
        if path.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode("latin-1"))


def load(name: str) -> dict[str, Any]:
    """Return a description by the name of its machine."""
    description: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return description


def _expected(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "online": str(CpuSet(facts["pus"])),
        "sockets": {key: str(CpuSet(cpus)) for key, cpus in facts["packages"].items() if key != "null"},
        "numa_nodes": {key: str(CpuSet(cpus)) for key, cpus in facts["numa"].items() if key != "null"},
        "l3_caches": [str(CpuSet(cpus)) for cpus in facts["l3"] if cpus is not None],
        "cores": [str(CpuSet(cpus)) for cpus in facts["cores"] if cpus is not None],
    }


def main(source: Path) -> None:
    """Describe every machine of a folder of recordings."""
    for name, facts in json.loads((source / "expected.json").read_text()).items():
        recording = RECORDINGS / f"{name}.tar.xz"
        pack(source / f"{name}.tar.bz2", recording)
        with tempfile.TemporaryDirectory() as folder:
            description = describe(unpack(recording, Path(folder)))
        description = {"machine": name, "expected": _expected(facts), **description}
        (HERE / f"{name}.json").write_text(json.dumps(description, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
