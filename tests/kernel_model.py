# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of containers, for tests that have no kernel to ask."""

from __future__ import annotations

from fastcpu import CpuSet


class NoCgroups:
    """The host's cgroups as a pod sees them that was not given them: not at all."""

    def cpus(self, cgroups_path: str) -> CpuSet | None:
        return None

    def parent_cpus(self, cgroups_path: str) -> CpuSet | None:
        return None
