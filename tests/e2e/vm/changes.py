# SPDX-License-Identifier: Apache-2.0
"""The virtual machine's second disk: the driver of this work tree, and the tests' own programs in the guest.

It is a plain tar archive, which is unpacked over the first disk before anything starts.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from e2e import programs
from e2e.vm.disk import DEPENDENCIES, PROJECT, PYTHON, run, say

_GUEST = Path(__file__).parent / "guest"

# Where the programs look for their files.
_PLACES = {
    "containerd.toml": "etc/containerd/config.toml",
    "kubelet.yaml": "etc/kubelet.yaml",
    # All pods use the host's network; the kubelet only wants one to exist.
    "network.conflist": "etc/cni/net.d/10-none.conflist",
}

_DRIVER = "opt/dracpu"
# What is made from the sources, beside them.
_DERIVED = (".pyc", ".so")
# What a compiler reads, or tells it what to do.
_COMPILED = (".pyx", ".pxd", ".c", ".h", ".txt", ".toml")

# Where Python finds the driver in the guest.
PYTHONPATH = f"/{_DRIVER}:/{DEPENDENCIES}"


def write_disk(path: Path) -> None:
    """Write the second disk: this work tree's driver, and the tests' programs in the guest."""
    with tarfile.open(path, "w") as archive:
        for part in sorted(_GUEST.glob("*.[ps][yh]")):
            archive.add(part, f"guest/{part.name}", filter=_executable)
        archive.add(_driver(), _DRIVER)
        for name, target in _PLACES.items():
            archive.add(_GUEST / name, target)


def _executable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode = 0o755
    return member


def _driver() -> Path:
    """Build the driver from this work tree, and return the folder to import it from."""
    files = [path for path in (PROJECT / "src").rglob("*") if path.is_file() and path.suffix not in _DERIVED]
    files += [PROJECT / name for name in ("CMakeLists.txt", "pyproject.toml")]
    native = [path for path in files if path.suffix in _COMPILED]
    python = [path for path in files if path.suffix == ".py"]

    def compile_native(folder: Path) -> None:
        say("compiling the driver for the virtual machine")
        if sys.version_info[:2] != PYTHON:
            raise RuntimeError(f"the guest has Python {PYTHON}, so that the driver must be built with that")
        work = folder / "work"
        options = ["--no-deps", "--no-build-isolation", "--no-compile", f"--config-settings=build-dir={work}"]
        # The build's own programs lie beside this interpreter.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        run(sys.executable, "-m", "pip", "install", "--quiet", *options, f"--target={folder}", PROJECT, PATH=path)
        shutil.rmtree(work)

    def make(folder: Path) -> None:
        # Most changes are to Python files alone, which need no compiler.
        compiled = programs.kept(compile_native, sys.version.encode(), *_contents(native))
        shutil.copytree(compiled, folder, dirs_exist_ok=True)
        for path in python:
            target = folder / path.relative_to(PROJECT / "src")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        run(sys.executable, "-m", "compileall", "-q", "--invalidation-mode=unchecked-hash", folder)

    return programs.kept(make, sys.version.encode(), *_contents(files))


def _contents(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in sorted(paths):
        yield str(path.relative_to(PROJECT)).encode()
        yield path.read_bytes()
