# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of fastcpu, compiled modules included, print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import fastcpu

MODULES = ["fastcpu", *(module.name for module in pkgutil.walk_packages(fastcpu.__path__, "fastcpu."))]


def docstrings(name: str) -> Iterator[tuple[str, object]]:
    """Yield the name and the docstring of a module, its functions and classes, and their methods and properties.

    doctest's own finder leaves out the properties of compiled classes.
    """
    module = importlib.import_module(name)
    yield name, module.__doc__
    for own, value in vars(module).items():
        if getattr(value, "__module__", None) == name:
            yield f"{name}.{own}", value.__doc__
            if isinstance(value, type):
                yield from ((f"{name}.{own}.{member}", each.__doc__) for member, each in vars(value).items())


def examples() -> Iterator[doctest.DocTest]:
    for module in MODULES:
        for name, docstring in docstrings(module):
            if isinstance(docstring, str) and ">>>" in docstring:
                globs = dict(vars(importlib.import_module(module)))
                yield doctest.DocTestParser().get_doctest(docstring, globs, name, None, None)


EXAMPLES = {test.name: test for test in examples()}


@pytest.mark.parametrize("test", EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_prints_what_it_says(test):
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_what_a_caller_begins_with_has_an_example():
    assert set(EXAMPLES) >= {
        "fastcpu",
        "fastcpu.cpuset.CpuSet",
        "fastcpu.cpuset.CpuSet.from_array",
        "fastcpu.cpuset.CpuSet.parse",
        "fastcpu.cpuset.CpuSet.strided",
        "fastcpu.cpuset.CpuSet.words",
        "fastcpu.placement",
        "fastcpu.placement.placer.Placer",
        "fastcpu.placement.placer.Placer.place",
        "fastcpu.placement.placer.place",
        "fastcpu.placement.policy.Policy",
        "fastcpu.pool.CpuPool",
        "fastcpu.pool.CpuPool.check",
        "fastcpu.sysfs",
        "fastcpu.sysfs.filetree.OverlaidTree",
        "fastcpu.sysfs.pcie.read_pcie_roots",
        "fastcpu.sysfs.topology.read_topology",
        "fastcpu.topology.Level",
        "fastcpu.topology.Topology.from_arrays",
    }
