# SPDX-License-Identifier: Apache-2.0
"""``dracpu introspect metrics``: the driver's own metrics as JSON, without starting it.

A list of objects with dra-driver-cpu's keys ``name``, ``type``, ``stability``, ``help`` and ``labels``. The
interpreter's and the process's metrics are not in it.
"""

from __future__ import annotations

import json
import sys
from typing import Final, TypedDict

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from driver.metrics import Metrics

STABILITY: Final = "ALPHA"
"""Kubernetes' word for metrics whose names and meanings may still change."""

# The buckets of a histogram are its type, not a label that somebody chose.
_BUCKET_LABEL: Final = "le"


class Description(TypedDict):
    """One metric."""

    name: str
    type: str
    stability: str
    help: str
    labels: list[str]


def main() -> int:
    """Print the list."""
    json.dump(describe_metrics(), sys.stdout, indent=2)
    print(flush=True)  # noqa: T201
    return 0


def describe_metrics() -> list[Description]:
    """Return the driver's own metrics in the order of their names."""
    registry = CollectorRegistry()
    Metrics(registry)
    return sorted(map(_describe, registry.collect()), key=lambda description: description["name"])


def _describe(metric: Metric) -> Description:
    return {
        "name": f"{metric.name}_total" if metric.type == "counter" else metric.name,
        "type": metric.type,
        "stability": STABILITY,
        "help": metric.documentation,
        # All series exist from the start, so that any of them tells the labels.
        "labels": [label for label in metric.samples[0].labels if label != _BUCKET_LABEL] if metric.samples else [],
    }
