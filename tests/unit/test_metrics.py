# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from driver import introspect
from driver.health import Health
from driver.metrics import Metrics
from fastcpu import CpuSet


@dataclass
class Pool:
    taken: CpuSet = field(default_factory=CpuSet)
    available: CpuSet = field(default_factory=CpuSet)
    reserved: CpuSet = field(default_factory=CpuSet)


@dataclass
class Record:
    adopted: bool = False


@dataclass
class Ledger:
    pool: Pool = field(default_factory=Pool)
    records: dict[str, Record] = field(default_factory=dict)


def samples(metrics: Metrics) -> dict[str, float]:
    """Return all samples as Prometheus writes them: name{labels} to value."""
    text, content_type = metrics.render("")
    assert content_type.startswith("text/plain")
    values = {}
    for family in parse_text(text.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_each_metric_of_the_contract_is_there_from_the_start(metrics):
    values = samples(metrics)
    for name in ("allocated_cpus", "available_cpus", "reserved_cpus", "resource_claims_active"):
        assert values[f"dra_cpu_{name}"] == 0
    for name in ("prepare_claims_total", "unprepare_claims_total"):
        for result in ("success", "error", "unknown"):
            assert values[f'dra_cpu_{name}{{result="{result}"}}'] == 0
    for name in ("prepare_claim_duration_seconds", "unprepare_claim_duration_seconds", "claim_allocated_cpus"):
        assert values[f"dra_cpu_{name}_count"] == 0
    assert not any("_created" in name for name in values)


def test_each_metric_of_the_runtime_s_side_is_there_from_the_start(metrics):
    values = samples(metrics)
    for result in ("success", "error", "unknown"):
        assert values[f'dra_cpu_nri_synchronize_duration_seconds_count{{result="{result}"}}'] == 0
        for operation in ("create", "stop", "remove"):
            for mode in ("exclusive", "shared"):
                labels = f'{{cpu_allocation_mode="{mode}",result="{result}"}}'
                assert values[f"dra_cpu_nri_{operation}_container_duration_seconds_count{labels}"] == 0
                for bound in ("0.0001", "0.001", "0.05", "0.1", "1.5", "2.0", "5.0", "+Inf"):
                    name = f"dra_cpu_nri_{operation}_container_duration_seconds_bucket"
                    labels = f'{{cpu_allocation_mode="{mode}",le="{bound}",result="{result}"}}'
                    assert values[name + labels] == 0
    assert values["dra_cpu_nri_connected"] == 0


def test_the_runtime_s_side_is_counted(metrics):
    class Enforced:
        def shared_pool_size(self) -> int:
            return 12

        def container_counts(self) -> dict[str, int]:
            return {"exclusive": 2, "shared": 7}

    metrics.watch_containers(Enforced())
    metrics.set_nri_connected(True)
    metrics.count_nri_reconnect()
    metrics.observe_nri_synchronize("success", 0.02)
    metrics.observe_nri("create_container", "error", "unknown", 0.002)
    metrics.count_refused_container("foreign")
    metrics.count_corrected_containers("shared", 5)
    metrics.count_nri_push("success", 8)
    metrics.count_nri_push("error", 1)
    metrics.set_unmovable_containers(1)
    metrics.count_orphaned_claim()
    metrics.set_kubelet_static_cpu_manager(True)
    values = samples(metrics)
    labels = '{cpu_allocation_mode="unknown",result="error"}'
    assert values[f"dra_cpu_nri_create_container_duration_seconds_sum{labels}"] == 0.002
    assert values['dra_cpu_nri_synchronize_duration_seconds_sum{result="success"}'] == 0.02
    for name, value in {
        "shared_pool_cpus": 12,
        'containers{cpu_allocation_mode="exclusive"}': 2,
        'containers{cpu_allocation_mode="shared"}': 7,
        "nri_connected": 1,
        "nri_reconnects_total": 1,
        'nri_refused_containers_total{reason="foreign"}': 1,
        'nri_corrected_containers_total{cpu_allocation_mode="shared"}': 5,
        'nri_pushes_total{result="success"}': 1,
        'nri_pushes_total{result="error"}': 1,
        "nri_pushed_containers_total": 9,
        "nri_unmovable_containers": 1,
        "orphaned_claims_total": 1,
        "kubelet_static_cpu_manager": 1,
    }.items():
        assert values[f"dra_cpu_{name}"] == value


def test_the_buckets_of_dra_driver_cpu_are_among_ours(metrics):
    values = samples(metrics)
    for name in ("prepare_claim_duration_seconds", "unprepare_claim_duration_seconds"):
        for bound in ("0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "+Inf"):
            assert f'dra_cpu_{name}_bucket{{le="{bound}"}}' in values
    for power in range(11):
        assert f'dra_cpu_claim_allocated_cpus_bucket{{le="{float(2**power)}"}}' in values


def test_prepares_and_unprepares_are_counted_and_timed(metrics):
    metrics.observe_prepare("success", 0.004)
    metrics.observe_prepare("error", 10.0)
    metrics.observe_prepare("success", 0.0001)
    metrics.observe_unprepare("unknown", 0.2)
    metrics.observe_claim_cpus(4)
    metrics.observe_claim_cpus(1000)
    values = samples(metrics)
    assert values['dra_cpu_prepare_claims_total{result="success"}'] == 2
    assert values['dra_cpu_prepare_claims_total{result="error"}'] == 1
    assert values['dra_cpu_unprepare_claims_total{result="unknown"}'] == 1
    assert values['dra_cpu_prepare_claim_duration_seconds_bucket{le="0.005"}'] == 2
    assert values["dra_cpu_prepare_claim_duration_seconds_count"] == 3
    assert values["dra_cpu_prepare_claim_duration_seconds_sum"] == pytest.approx(10.0041)
    assert values["dra_cpu_unprepare_claim_duration_seconds_count"] == 1
    assert values['dra_cpu_claim_allocated_cpus_bucket{le="4.0"}'] == 1
    assert values["dra_cpu_claim_allocated_cpus_sum"] == 1004


def test_what_is_held_is_read_when_prometheus_asks(metrics):
    ledger = Ledger()
    metrics.watch(ledger, Health())
    assert samples(metrics)["dra_cpu_allocated_cpus"] == 0
    ledger.pool = Pool(taken=CpuSet.parse("2-5"), available=CpuSet.parse("6-15"), reserved=CpuSet.parse("0-1"))
    ledger.records = {"a": Record(), "b": Record(adopted=True)}
    values = samples(metrics)
    assert values["dra_cpu_allocated_cpus"] == 4
    assert values["dra_cpu_available_cpus"] == 10
    assert values["dra_cpu_reserved_cpus"] == 2
    assert values["dra_cpu_resource_claims_active"] == 2
    assert values["dra_cpu_adopted_claims"] == 1


def test_readiness_by_condition(metrics):
    health = Health()
    metrics.watch(Ledger(), health)
    health.set_ok("started")
    health.require("slices")
    values = samples(metrics)
    assert values["dra_cpu_ready"] == 0
    assert values['dra_cpu_condition{condition="started"}'] == 1
    assert values['dra_cpu_condition{condition="slices"}'] == 0
    health.set_ok("slices")
    values = samples(metrics)
    assert values["dra_cpu_ready"] == 1
    assert values['dra_cpu_condition{condition="slices"}'] == 1


def test_what_does_not_fit_at_a_start(metrics):
    metrics.count_broken_file("record")
    metrics.count_record_mismatch("overlap")
    metrics.count_record_mismatch("overlap")
    values = samples(metrics)
    assert values['dra_cpu_broken_files_total{kind="record"}'] == 1
    assert values['dra_cpu_broken_files_total{kind="cdi"}'] == 0
    assert values['dra_cpu_record_mismatches_total{reason="overlap"}'] == 2
    assert values['dra_cpu_record_mismatches_total{reason="reserved"}'] == 0


def test_slices_and_what_is_not_in_them(metrics):
    metrics.set_left_out({"dra.cpu/smtLayout": ("cpudevnuma000", "cpudevnuma001")})
    metrics.set_published(2, 130)
    metrics.count_slice_sync("error")
    metrics.count_slice_write("update")
    metrics.count_slice_repair()
    values = samples(metrics)
    assert values['dra_cpu_left_out_attributes{attribute="dra.cpu/smtLayout"}'] == 2
    assert values['dra_cpu_left_out_attributes{attribute="dra.cpu/cpuIDs"}'] == 0
    assert values["dra_cpu_published_slices"] == 2
    assert values["dra_cpu_published_devices"] == 130
    assert values['dra_cpu_slice_syncs_total{result="error"}'] == 1
    assert values['dra_cpu_slice_writes_total{operation="update"}'] == 1
    assert values["dra_cpu_slice_repairs_total"] == 1


def test_the_process_is_measured_under_the_usual_names(metrics):
    metrics.watch(Ledger(), Health())
    values = samples(metrics)
    assert values["process_resident_memory_bytes"] > 1_000_000
    assert values["process_open_fds"] > 2


def test_openmetrics_for_those_who_ask_for_it(metrics):
    text, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(text.decode())}
    assert families["dra_cpu_prepare_claims"].type == "counter"


@pytest.mark.parametrize(
    "accept", ["", "*/*", ";;q=,,", "text/plain;version=\x00", "a" * 8000, ",".join(["x/y"] * 1000)]
)
def test_any_accept_header_gets_an_answer(metrics, accept):
    text, content_type = metrics.render(accept)
    assert b"dra_cpu_allocated_cpus" in text
    assert content_type.isprintable()


def test_there_are_only_two_formats(metrics):
    accepted = ["", "*/*", *(f"application/openmetrics-text; version=1.0.{n}; escaping=e{n}" for n in range(100))]
    types = {metrics.content_type(accept) for accept in accepted}
    assert len(types) == 2
    assert types == {metrics.render(accept)[1] for accept in accepted[-2:] + accepted[:1]}


def test_two_instances_do_not_share_anything():
    one, other = Metrics(), Metrics()
    one.observe_claim_cpus(4)
    assert samples(other)["dra_cpu_claim_allocated_cpus_count"] == 0


def test_a_given_registry_has_the_drivers_own_metrics_only():
    registry = CollectorRegistry()
    Metrics(registry)
    assert {metric.name.startswith("dra_cpu_") for metric in registry.collect()} == {True}


def test_introspection_knows_every_metric_with_its_labels(capsys):
    assert introspect.main() == 0
    described = {metric["name"]: metric for metric in json.loads(capsys.readouterr().out)}
    assert described["dra_cpu_prepare_claims_total"]["labels"] == ["result"]
    assert described["dra_cpu_prepare_claims_total"]["type"] == "counter"
    assert described["dra_cpu_condition"]["labels"] == ["condition"]
    assert described["dra_cpu_claim_allocated_cpus"]["type"] == "histogram"
    assert described["dra_cpu_allocated_cpus"]["labels"] == []
    assert all(metric["help"].endswith(".") for metric in described.values())
