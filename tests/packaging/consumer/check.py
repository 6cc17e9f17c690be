# SPDX-License-Identifier: Apache-2.0
"""Tries the built consumer: what it gets from C is what fastcpu says in Python."""

from consumer import count_common, count_in_text, divide, fits, on_one_core, place, read, roundtrip

from fastcpu import CpuSet, Topology
from fastcpu.placement import Placer
from fastcpu.pool import CpuPool

assert count_common(CpuSet.parse("0-9"), CpuSet.parse("8-2000")) == 2
assert roundtrip(CpuSet.parse("5,700,8191")) == CpuSet.parse("5,700,8191")
assert read("0-3,8", 9) == CpuSet.parse("0-3,8")
assert count_in_text(b"0-3,8,1000") == 6
assert count_in_text(b"3-1") is None

machine = Topology.from_arrays(CpuSet(range(8)), cores=[0, 1, 2, 3] * 2, numa_nodes=[0, 0, 1, 1] * 2)
pool = CpuPool(machine.online, CpuSet([0]), machine.numa_nodes.masks)
assert fits(pool, CpuSet([1, 2]), ((0, 1), (1, 1)))
assert not fits(pool, CpuSet([0, 2]), ((0, 1), (1, 1)))
assert on_one_core(machine, 1, 5)
assert not on_one_core(machine, 1, 2)
assert divide([[5, 9], [4, 12]], 3) == [2, 1]

placer = Placer(machine)
for n in range(1, 8):
    assert place(placer, CpuSet(range(1, 8)), n) == placer.place(CpuSet(range(1, 8)), n)
print("cimport works")
