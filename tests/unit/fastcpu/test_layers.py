# SPDX-License-Identifier: Apache-2.0
"""Imports and cimports inside fastcpu go down only: the contracts of `pyproject.toml`, Cython sources included.

import-linter reads Python files only, and more than half of fastcpu is Cython.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src"
PACKAGES = ("fastcpu", "fastcpu.placement", "fastcpu.sysfs")
SUFFIXES = (".py", ".pyx", ".pxd")
OUTSIDE = {*sys.stdlib_module_names, "numpy", "libc", "cpython", "cython"}

# One statement a line, or one in parentheses or with a backslash: neither Python nor Cython code here writes others.
STATEMENT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+c?import[ \t(]|c?import[ \t]+([\w., ]+))", re.MULTILINE)


def layers(package: str) -> list[list[str]]:
    """Return the modules of each layer of a package's contract, the highest first, without what separates them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [contract] = [each for each in contracts if each.get("containers") == [package]]
    return [re.findall(r"\w+", layer) for layer in contract["layers"]]


def files(package: str) -> Iterator[Path]:
    """Yield the sources of the modules of a package, without those of the packages inside."""
    folder = SOURCE / package.replace(".", "/")
    yield from (path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES)


def imported(source: str) -> list[str]:
    """Return the modules that a source imports or cimports; what only a type checker imports is left out."""
    code = re.sub(r'"""(?:.|\n)*?"""|#.*', "", source)
    code = re.sub(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)+", "", code, flags=re.MULTILINE)
    names = []
    for one, several in STATEMENT.findall(code):
        names += [one] if one else [name.split()[0] for name in several.split(",")]
    assert len(re.findall(r"\bc?import\b(?! from)", code)) == len(STATEMENT.findall(code)), "an import not understood"
    return names


def wrong_imports(package: str, module: str, names: list[str]) -> list[str]:
    """Return those imports of a module, by its name inside the package, that do not go down."""
    level = {name: depth for depth, layer in enumerate(layers(package)) for name in layer}
    wrong = []
    for name in names:
        if not name.startswith("fastcpu"):
            wrong += [name] * (name.partition(".")[0] not in OUTSIDE)
        elif name == package or not f"{name}.".startswith(f"{package}."):
            # The package itself imports all its modules; what lies around it is the business of the contract above.
            wrong += [name] * (name in PACKAGES and f"{package}.".startswith(f"{name}."))
        else:
            other = name.removeprefix(f"{package}.").partition(".")[0]
            wrong += [name] * (other != module and level[other] <= level[module])
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_the_contract_names_every_module(package):
    folder = SOURCE / package.replace(".", "/")
    inside = {path.stem for path in files(package)} | {path.parent.name for path in folder.glob("*/__init__.py")}
    named = [name for layer in layers(package) for name in layer]
    assert sorted(named) == sorted(inside - {"__init__"})


@pytest.mark.parametrize(
    ("package", "path"),
    [
        pytest.param(package, path, id=f"{package}:{path.name}")
        for package in PACKAGES
        for path in files(package)
        if path.stem != "__init__"
    ],
)
def test_imports_go_down(package, path):
    names = imported(path.read_text())
    assert wrong_imports(package, path.stem, names) == []
    # What is imported from another package is not above this one.
    if package != "fastcpu":
        assert wrong_imports("fastcpu", package.removeprefix("fastcpu."), names) == []


@pytest.mark.parametrize(
    ("package", "module", "statement", "name"),
    [
        ("fastcpu", "cpuset", "from fastcpu.pool cimport(\n    CpuPool)", "fastcpu.pool"),
        ("fastcpu", "pool", "from fastcpu.topology cimport Level, \\\n    Topology", "fastcpu.topology"),
        ("fastcpu", "cpulist", "def late():\n    from fastcpu.errors import CpuListError", "fastcpu.errors"),
        ("fastcpu", "topology", "cimport fastcpu.sysfs.reader", "fastcpu.sysfs.reader"),
        ("fastcpu", "pool", "from fastcpu import CpuSet", "fastcpu"),
        ("fastcpu", "pool", "import os, yaml", "yaml"),
        ("fastcpu", "pool", "from driver.errors import ClaimError", "driver.errors"),
        ("fastcpu.placement", "search", "cimport fastcpu.placement.placer", "fastcpu.placement.placer"),
        ("fastcpu.placement", "domains", "from fastcpu.placement import Policy", "fastcpu.placement"),
        ("fastcpu.sysfs", "reader", "from fastcpu.sysfs.pcie import read_pcie_roots", "fastcpu.sysfs.pcie"),
    ],
)
def test_an_import_that_goes_up_is_found(package, module, statement, name):
    source = f'"""from fastcpu.pool import CpuPool"""\nfrom libc.stdint cimport uint64_t\n{statement}\n'
    assert wrong_imports(package, module, imported(source)) == [name]
