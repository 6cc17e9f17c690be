# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from driver.kubeletstate import has_static_cpu_manager

STATE = {"policyName": "static", "defaultCpuSet": "0-7", "entries": {"uid": {"main": "2-3"}}, "checksum": 1}


@pytest.mark.parametrize(
    ("content", "static"),
    [
        (json.dumps(STATE), True),
        (json.dumps(STATE | {"policyName": "none"}), False),
        (json.dumps([]), False),
        ('{"policyName": "sta', False),
        ("[" * 100_000, False),
        (None, False),
    ],
)
def test_the_static_policy_is_found_in_the_kubelets_state(tmp_path, content, static):
    if content is not None:
        (tmp_path / "cpu_manager_state").write_text(content)
    assert has_static_cpu_manager(tmp_path) is static
