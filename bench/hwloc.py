# SPDX-License-Identifier: Apache-2.0
"""hwloc's bitmaps through its C library: called by ctypes, and by loops in C (`hwloc_loops.c`)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_long, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path

_LIBRARY = "libhwloc.so.15"
_LOOPS = Path(__file__).with_name("hwloc_loops.c")
_BITMAP = c_void_p
_SIGNATURES = {
    "alloc": (c_void_p, []),
    "free": (None, [_BITMAP]),
    "zero": (None, [_BITMAP]),
    "set": (c_int, [_BITMAP, c_uint]),
    "or": (c_int, [_BITMAP] * 3),
    "and": (c_int, [_BITMAP] * 3),
    "andnot": (c_int, [_BITMAP] * 3),
    "isincluded": (c_int, [_BITMAP] * 2),
    "intersects": (c_int, [_BITMAP] * 2),
    "isequal": (c_int, [_BITMAP] * 2),
    "weight": (c_int, [_BITMAP]),
    "isset": (c_int, [_BITMAP, c_uint]),
    "next": (c_int, [_BITMAP, c_int]),
    "list_sscanf": (c_int, [_BITMAP, c_char_p]),
    "list_snprintf": (c_int, [c_char_p, c_size_t, _BITMAP]),
}


class _Pool(Structure):
    _fields_ = [("online", _BITMAP), ("reserved", _BITMAP), ("taken", _BITMAP), ("groups", POINTER(_BITMAP))]


class _Demand(Structure):
    _fields_ = [("group", c_int), ("count", c_int)]


class _Inputs(Structure):
    _fields_ = [
        ("a", _BITMAP),
        ("b", _BITMAP),
        ("result", _BITMAP),
        ("cpu", c_uint),
        ("numbers", POINTER(c_uint)),
        ("n_numbers", c_size_t),
        ("listed", POINTER(c_uint)),
        ("text", c_char_p),
        ("buffer", c_char_p),
        ("buffer_size", c_size_t),
        ("pool", _Pool),
        ("demands", POINTER(_Demand)),
        ("n_demands", c_size_t),
    ]


@cache
def functions() -> dict[str, Callable[..., int]] | str:
    """Return hwloc's functions by their names without ``hwloc_bitmap_``, or why there are none."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return f"{_LIBRARY} is not there: apt-get install libhwloc15"
    found = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = found[name] = getattr(library, f"hwloc_bitmap_{name}")
        function.restype, function.argtypes = result, arguments
    return found


@cache
def loops() -> Callable[..., float] | str:
    """Return the compiled loops, or why there are none."""
    if shutil.which("cc") is None:
        return "there is no C compiler: apt-get install gcc"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "loops.so")
        # As Debian compiles hwloc itself, whose functions do the work.
        command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, _LOOPS, "-lhwloc"]
        compiled = subprocess.run(command, capture_output=True, text=True)
        if "hwloc.h: No such file" in compiled.stderr:
            return "hwloc.h is not there: apt-get install libhwloc-dev"
        if compiled.returncode:
            raise RuntimeError(compiled.stderr)
        run = ctypes.CDLL(str(library)).run
    run.restype, run.argtypes = c_double, [c_char_p, POINTER(_Inputs), c_long, POINTER(c_long)]
    return run


class Bitmap:
    """Own one bitmap; ``_as_parameter_`` is what ctypes passes on."""

    def __init__(self, cpus: Iterable[int] = ()) -> None:
        self._functions = functions()
        self._as_parameter_ = c_void_p(self._functions["alloc"]())
        for cpu in cpus:
            self._functions["set"](self, cpu)

    def __del__(self) -> None:
        self._functions["free"](self)

    def cpus(self) -> list[int]:
        following = self._functions["next"]
        cpu, found = following(self, -1), []
        while cpu >= 0:
            found.append(cpu)
            cpu = following(self, cpu)
        return found


def fill(bitmap: Bitmap, numbers: Sequence[int]) -> None:
    """Give a bitmap these CPUs, one call for each."""
    setter = functions()["set"]
    functions()["zero"](bitmap)
    for cpu in numbers:
        setter(bitmap, cpu)


def write(bitmap: Bitmap, buffer: ctypes.Array[ctypes.c_char]) -> str:
    """Write a bitmap in the kernel's list syntax."""
    length = functions()["list_snprintf"](buffer, len(buffer), bitmap)
    return ctypes.string_at(buffer, length).decode()


class HwlocPool:
    """Masks as bitmaps of hwloc, called from Python."""

    def __init__(self, online: set[int], reserved: set[int], groups: Sequence[set[int]]) -> None:
        self.functions = functions()
        self.online = Bitmap(online)
        self.reserved = Bitmap(reserved)
        self.groups = [Bitmap(group) for group in groups]
        self.taken = Bitmap()

    def check(self, text: str, demands: Sequence[tuple[int, int]]) -> Bitmap:
        call = self.functions
        cpus, allowed, common = Bitmap(), Bitmap(), Bitmap()
        if call["list_sscanf"](cpus, text.encode()):
            raise ValueError(text)
        for group, count in demands:
            call["and"](common, cpus, self.groups[group])
            if call["weight"](common) != count:
                raise ValueError(group)
            call["or"](allowed, allowed, self.groups[group])
        if not call["isincluded"](cpus, self.online) or call["intersects"](cpus, self.reserved):
            raise ValueError(text)
        if not call["isincluded"](cpus, allowed) or call["intersects"](cpus, self.taken):
            raise ValueError(text)
        return cpus


class Loop:
    """One job in C: calling it with a number of calls tells how many seconds they took."""

    def __init__(self, task) -> None:
        self._job = task.job.encode()
        self._result = Bitmap()
        self._buffer = ctypes.create_string_buffer(len(task.text) + 1)
        pool = HwlocPool(task.online, task.reserved, task.groups)
        a, b = Bitmap(task.a), Bitmap(task.b)
        self._listed = (c_uint * len(task.a))()
        numbers = (c_uint * len(task.numbers))(*task.numbers)
        demands = (_Demand * len(task.demands))(*task.demands)
        groups = (_BITMAP * len(pool.groups))(*(group._as_parameter_.value for group in pool.groups))
        self._inputs = _Inputs(
            *(bitmap._as_parameter_ for bitmap in (a, b, self._result)),
            task.cpu,
            numbers,
            len(numbers),
            self._listed,
            task.text.encode(),
            ctypes.addressof(self._buffer),
            len(self._buffer),
            _Pool(pool.online._as_parameter_, pool.reserved._as_parameter_, pool.taken._as_parameter_, groups),
            demands,
            len(demands),
        )
        self._alive = (a, b, pool, numbers, demands, groups)
        self._answer = c_long()

    def __call__(self, calls: int) -> float:
        seconds = loops()(self._job, ctypes.byref(self._inputs), calls, ctypes.byref(self._answer))
        if seconds < 0:
            raise ValueError(f"hwloc_loops.c has no job {self._job.decode()!r}")
        return seconds

    def answer(self, kind: type) -> object:
        """Return the result of the last call: of type frozenset, list, str, bool or int."""
        if kind is list:
            return self._listed[: self._answer.value]
        if kind is frozenset:
            return frozenset(self._result.cpus())
        return self._buffer.value.decode() if kind is str else kind(self._answer.value)
