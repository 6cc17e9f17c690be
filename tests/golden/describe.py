# SPDX-License-Identifier: Apache-2.0
"""Write ``kubelet-packed-all.json.xz`` and ``kubelet-packed.json`` beside this file from a collection of choices.

    python tests/golden/describe.py FOLDER/kubelet-packed.json

The second has a selection: all cases in which the best sockets, NUMA nodes, L3 caches and split cores are fewer than
the kubelet's, and of each machine every eighth of the others.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

from fastcpu import CpuSet, Topology
from fastcpu.placement import Placer

sys.path.insert(0, str(Path(__file__).parents[1]))
from placement_reference import Machine

LEVELS = ("cores", "sockets", "numa_nodes", "l3_caches")


def main(source: Path) -> None:
    full = json.loads(source.read_text())
    machines, placers, cases = [], [], []
    for described in full["topologies"]:
        rows = sorted(described["cpus"])
        columns = dict(zip(("cpus", *LEVELS), zip(*rows, strict=True), strict=True))
        topology = Topology.from_arrays(CpuSet(columns["cpus"]), **{level: columns[level] for level in LEVELS})
        machines.append(
            {"name": described["name"]}
            | {level: [_text(getattr(topology, level), row) for row in range(len(getattr(topology, level)))]
               for level in LEVELS}
        )  # fmt: skip
        placers.append((Placer(topology), Machine(topology)))
    skipped = [0] * len(machines)
    for case in full["cases"]:
        placer, machine = placers[case["topology"]]
        best = machine.counts(placer.place(CpuSet.parse(case["available"]), case["count"]))
        if best == machine.counts(CpuSet.parse(case["kubelet"])):
            skipped[case["topology"]] += 1
            if skipped[case["topology"]] % 8:
                continue
        cases.append(case)
    folder = Path(__file__).parent
    (folder / "kubelet-packed.json").write_text(_document(machines, cases))
    everything = lzma.compress(_document(machines, full["cases"]).encode(), preset=9)
    (folder / "kubelet-packed-all.json.xz").write_bytes(everything)


def _document(machines: list, cases: list) -> str:
    lines = [",\n".join(map(json.dumps, entries)) for entries in (machines, cases)]
    return f'{{"machines": [\n{lines[0]}\n], "cases": [\n{lines[1]}\n]}}\n'


def _text(level, row: int) -> str:
    return level.cpuset(row).strided()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
