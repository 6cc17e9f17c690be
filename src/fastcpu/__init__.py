# SPDX-License-Identifier: Apache-2.0
"""CPU sets, machine topologies, pools of CPUs, and the choice of the best ones; nothing of Kubernetes.

`CpuSet` is the value that everything here takes and returns. `fastcpu.topology` describes a machine, `fastcpu.sysfs`
reads the description from ``/sys``, `fastcpu.pool` checks a choice of CPUs against what is free, `fastcpu.placement`
makes the choice. `fastcpu.errors` has what each of them raises.

>>> from fastcpu import CpuSet, Topology
>>> from fastcpu.pool import CpuPool
>>> machine = Topology.from_arrays(CpuSet(range(8)), numa_nodes=[0, 0, 0, 0, 1, 1, 1, 1])
>>> pool = CpuPool(machine.online, reserved=CpuSet([0]), groups=machine.numa_nodes.masks)
>>> pool.take(pool.check("2-3", [(0, 2)]))  # two CPUs of NUMA node 0
>>> pool.available
CpuSet.parse('1,4-7')

Notes
-----
The rules between the compiled modules and their callers, in Python or in another Cython package (by the ``.pxd`` files,
which are installed):

Words and bits
    A mask is an array of native ``uint64``. CPU n is bit ``n % 64`` of word ``n // 64``; bit 0 is the least significant
    one. The words of a `CpuSet` end with its highest non-zero word. The rows of a topology level and of a pool are
    C-contiguous and equally long: ``n_words`` of the machine.
Ownership
    Each object owns its words and frees them. Arrays that come in are copied. Arrays that go out are read-only views,
    and each keeps its object alive. A C pointer of a ``.pxd`` file is valid as long as the object it was taken from.
Immutability
    `CpuSet`, `Topology`, `Level`, `Policy` and `Placer` never change. C code may read their words and must not write.
Who may change a pool
    `CpuPool` is the one object that changes: by ``take``, ``release`` and ``set_offline``. It has no lock. One owner
    calls these three and ``check``, and no other take may come between a check and its take.
Threads
    Immutable objects may be shared between threads, with the GIL and in a free-threaded interpreter, where no module
    here turns the GIL on. ``nogil`` in a ``.pxd`` file says that a function uses no Python object. No function of this
    package releases the GIL.
Limits
    CPU numbers are below 1,048,576 (`fastcpu.cpuset.MAX_CPUS`), so a mask has at most 128 KiB. A cpulist names CPUs
    below 8,192 unless its reader asks for more. The time to read a text is proportional to its length.
Outside
    Only `fastcpu.sysfs` does I/O, and it only reads. No module logs or keeps anything from call to call.
"""

from fastcpu.cpuset import CpuSet
from fastcpu.sysfs import read_topology
from fastcpu.topology import Topology

__all__ = ["CpuSet", "Topology", "read_topology"]
