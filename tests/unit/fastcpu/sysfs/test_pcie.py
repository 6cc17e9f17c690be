# SPDX-License-Identifier: Apache-2.0
"""PCIe roots and the CPUs near them."""

from __future__ import annotations

import re
from pathlib import Path

from fastcpu.sysfs import read_pcie_roots
from machines.shapes import TextTree

DEVICES = "/sys/devices"


def test_roots_by_cpu():
    tree = TextTree(
        {
            f"{DEVICES}/pci0000:40/pci_bus/0000:40/cpulistaffinity": "2-3\n",
            f"{DEVICES}/pci0000:00/pci_bus/0000:00/cpulistaffinity": "0-2\n",
            f"{DEVICES}/pci10000:e1/pci_bus/10000:e1/cpulistaffinity": "3\n",
            f"{DEVICES}/pci0000:80/pci_bus/0000:80/cpulistaffinity": "\n",
        }
    )
    assert read_pcie_roots(tree) == {
        0: ("pci0000:00",),
        1: ("pci0000:00",),
        2: ("pci0000:00", "pci0000:40"),
        3: ("pci0000:40", "pci10000:e1"),
    }


def test_fallbacks():
    tree = TextTree(
        {
            # a mask instead of a list, devices instead of a bus, a bus that says nothing, and nothing at all
            f"{DEVICES}/pci0000:00/pci_bus/0000:00/cpuaffinity": "00000000,00000003\n",
            f"{DEVICES}/pci0000:01/0000:01:00.0/local_cpulist": "4\n",
            f"{DEVICES}/pci0000:01/0000:01:1f.3/local_cpus": "20\n",
            f"{DEVICES}/pci0000:01/0000:01:02.0/vendor": "0x8086\n",
            f"{DEVICES}/pci0000:01/power/local_cpulist": "9\n",
            f"{DEVICES}/pci0000:02/pci_bus/0000:02/cpulistaffinity": "junk",
            f"{DEVICES}/pci0000:03/uevent": "",
        }
    )
    assert read_pcie_roots(tree) == {
        0: ("pci0000:00",),
        1: ("pci0000:00",),
        4: ("pci0000:01",),
        5: ("pci0000:01",),
    }


def test_what_is_no_root():
    names = ("pci0000:0", "pci000:00", "pci0000:00:1f.2", "pci0000:0G", "pci0000:AB", "PCI0000:00", "platform", "pci")
    tree = TextTree({f"{DEVICES}/{name}/pci_bus/{name[3:]}/cpulistaffinity": "0\n" for name in names})
    assert read_pcie_roots(tree) == {}
    assert read_pcie_roots("/nowhere") == {}


def test_an_overlay_adds_roots():
    path = f"{DEVICES}/pci0000:7f/pci_bus/0000:7f/cpulistaffinity"
    assert read_pcie_roots(TextTree({}), {path: "1-2"}) == dict.fromkeys((1, 2), ("pci0000:7f",))


def test_this_machine():
    there = {path.name for path in Path(DEVICES).glob("pci*") if re.fullmatch("pci[0-9a-f]{4}:[0-9a-f]{2}", path.name)}
    assert {name for names in read_pcie_roots().values() for name in names} == there
