# SPDX-License-Identifier: Apache-2.0
"""CPU sets, machine topologies and pools of CPUs; nothing of Kubernetes.

No module here does I/O except by `fastcpu.sysfs`, none logs, and none has state of its own. The Cython modules
validate what they are given and own their memory; values (`CpuSet`, `Topology`) never change and may be shared between
threads.
"""

from fastcpu.cpuset import CpuSet
from fastcpu.sysfs import read_topology
from fastcpu.topology import Topology

__all__ = ["CpuSet", "Topology", "read_topology"]
