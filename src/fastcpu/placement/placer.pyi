from typing import final

from fastcpu.cpuset import CpuSet
from fastcpu.placement.policy import Policy
from fastcpu.topology import Topology

__all__ = ["Placer", "place"]

@final
class Placer:
    def __new__(cls, topology: Topology) -> Placer: ...
    @property
    def topology(self) -> Topology: ...
    def place(self, free: CpuSet, n: int, policy: Policy = ...) -> CpuSet: ...

def place(topology: Topology, free: CpuSet, n: int, policy: Policy = ...) -> CpuSet: ...
