# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from prometheus_client import CollectorRegistry

from driver import introspect
from driver.metrics import Metrics

# Of dra-driver-cpu's metrics those that need no runtime.
EXPECTED = {
    "dra_cpu_allocated_cpus": ("gauge", []),
    "dra_cpu_available_cpus": ("gauge", []),
    "dra_cpu_reserved_cpus": ("gauge", []),
    "dra_cpu_resource_claims_active": ("gauge", []),
    "dra_cpu_prepare_claims_total": ("counter", ["result"]),
    "dra_cpu_unprepare_claims_total": ("counter", ["result"]),
    "dra_cpu_prepare_claim_duration_seconds": ("histogram", []),
    "dra_cpu_unprepare_claim_duration_seconds": ("histogram", []),
    "dra_cpu_claim_allocated_cpus": ("histogram", []),
}


def test_the_list_has_the_published_metrics_with_type_and_labels() -> None:
    found = {d["name"]: (d["type"], d["labels"]) for d in introspect.describe_metrics()}
    assert EXPECTED.items() <= found.items()


def test_every_description_is_complete_and_of_the_driver() -> None:
    for description in introspect.describe_metrics():
        assert description["name"].startswith("dra_cpu_")
        assert description["help"]
        assert description["stability"] == "ALPHA"
        assert list(description) == ["name", "type", "stability", "help", "labels"]


def test_names_and_labels_are_those_that_are_scraped() -> None:
    """A metric without any series would be listed without its labels: none is."""
    registry = CollectorRegistry()
    Metrics(registry)
    text = Metrics(CollectorRegistry()).render("text/plain")[0].decode()
    for metric in registry.collect():
        assert metric.samples, metric.name
    for description in introspect.describe_metrics():
        assert f"# TYPE {description['name']} {description['type']}\n" in text
        for label in description["labels"]:
            assert f"{{{label}=" in text


def test_the_output_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert introspect.main() == 0
    output = capsys.readouterr().out
    assert json.loads(output) == introspect.describe_metrics()
    assert output.endswith("]\n")
