# SPDX-License-Identifier: Apache-2.0
"""Feed mutated texts to the parser in a process with AddressSanitizer, and see that no byte leaks.

python tests/sanitizers/fuzz_cpulist.py INPUTS
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

from fastcpu import CpuSet
from fastcpu.errors import CpuListError

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/fastcpu"))
from test_cpulist import mutated_cpulists

# What the interpreter itself may keep for good in a long run, such as grown free lists; a leak of the smallest set in
# one of a thousand inputs would be many times as much.
_KEPT_BYTES = 64 * 1024


def _run(inputs: int, seed: int) -> tuple[int, int]:
    accepted = refused = 0
    for text in mutated_cpulists(inputs, seed):
        try:
            cpuset = CpuSet.parse(text)
        except CpuListError:
            refused += 1
        else:
            accepted += 1
            if CpuSet.parse(cpuset.strided()) != cpuset:
                raise AssertionError(f"{text!r} does not survive its strided form")
    gc.collect()
    return accepted, refused


def main(inputs: int) -> int:
    allocated = ctypes.CDLL(None).__sanitizer_get_current_allocated_bytes
    allocated.restype = ctypes.c_size_t
    _run(min(inputs, 20_000), seed=1)
    before = allocated()
    accepted, refused = _run(inputs, seed=2)
    grown = allocated() - before
    print(f"{accepted} texts accepted, {refused} refused, {grown} bytes more allocated than before")
    if grown > _KEPT_BYTES:
        print("the parser leaks")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
