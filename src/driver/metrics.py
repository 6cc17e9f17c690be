# SPDX-License-Identifier: Apache-2.0
"""What the driver counts and measures, for Prometheus.

Names, kinds and labels are those of dra-driver-cpu where it has them, so that its dashboards and alerts go on
working; all are of Kubernetes' stability level ALPHA (`driver.introspect`): a release may change them, and says so. No
label's value comes from a claim: a tenant can neither be seen here nor make series. What can be asked for at any time,
such as how many CPUs are taken, is asked for when Prometheus asks.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from driver.ledger import Ledger

_OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"
_RESULTS: Final = ("success", "error", "unknown")
# Prometheus' usual ones, smaller ones because most claims take about a millisecond, and two beyond the ten seconds
# for which a prepare waits.
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 45.0)
# Most answers to the runtime take less than a millisecond; after two seconds it does not wait any more.
_NRI_SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 5.0),
)
_NRI_OPERATIONS: Final = ("create_container", "stop_container", "remove_container")
_MODES: Final = ("exclusive", "shared", "unknown")
_REFUSALS: Final = (
    *("malformed", "override", "unknown", "unmarked", "mismatch", "barred", "owned", "unverified", "foreign"),
    *("empty_pool", "not_moved"),
)
_CPUS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Conditions(Protocol):
    """What knows whether the driver is ready."""

    @property
    def ready(self) -> bool:
        """Whether it is."""

    def conditions(self) -> Mapping[str, bool]:
        """Return for each condition whether it holds."""


class Enforced(Protocol):
    """What knows of the containers on this node."""

    def shared_pool_size(self) -> int:
        """Return how many CPUs the containers without a claim share."""

    def container_counts(self) -> Mapping[str, int]:
        """Return how many containers are ``exclusive`` and how many ``shared``."""


class Metrics:
    """All metrics of this process.

    Parameters
    ----------
    registry : CollectorRegistry, optional
        Where the driver's own metrics are registered; a private one by default.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # A second series for each counter, with the time of its creation, is of no use here.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry() if registry is None else registry
        self._ledger: Ledger | None = None
        self._health: Conditions | None = None
        self._enforced: Enforced | None = None

        self._allocated_cpus = self._gauge("allocated_cpus", "CPUs that claims hold.")
        self._available_cpus = self._gauge("available_cpus", "CPUs that are online, not reserved and held by no claim.")
        self._reserved_cpus = self._gauge("reserved_cpus", "CPUs that are reserved, so never given to a claim.")
        self._active_claims = self._gauge("resource_claims_active", "Claims that hold CPUs.")
        self._adopted_claims = self._gauge(
            "adopted_claims", "Claims that hold CPUs only because a CDI spec without a record says so."
        )
        self._prepares = self._counter("prepare_claims", "Prepares of a claim.", "result", _RESULTS)
        self._unprepares = self._counter("unprepare_claims", "Unprepares of a claim.", "result", _RESULTS)
        self._prepare_seconds = self._histogram(
            "prepare_claim_duration_seconds", "How long a prepare of a claim took.", _SECONDS
        )
        self._unprepare_seconds = self._histogram(
            "unprepare_claim_duration_seconds", "How long an unprepare of a claim took.", _SECONDS
        )
        self._claim_cpus = self._histogram("claim_allocated_cpus", "CPUs of each claim that was given some.", _CPUS)
        self._broken_files = self._counter(
            "broken_files", "Files with the driver's state that cannot be used.", "kind", ("record", "cdi")
        )
        self._record_mismatches = self._counter(
            "record_mismatches",
            "Claims that held, when the driver started, what they would not get today.",
            "reason",
            ("offline", "reserved", "device", "overlap"),
        )
        self._left_out = self._gauge(
            "left_out_attributes",
            "Devices that lack an attribute because it cannot be published in any form.",
            "attribute",
        )
        self._left_out.labels("dra.cpu/cpuIDs")
        self._published_slices = self._gauge("published_slices", "ResourceSlices of this node that are in place.")
        self._published_devices = self._gauge("published_devices", "Devices in these slices.")
        self._slice_syncs = self._counter(
            "slice_syncs", "Attempts to bring the ResourceSlices in place.", "result", ("success", "error")
        )
        self._slice_writes = self._counter(
            "slice_writes", "ResourceSlices written.", "operation", ("create", "update", "delete")
        )
        self._slice_repairs = self._counter(
            "slice_repairs", "Times that somebody else had deleted or changed the ResourceSlices."
        )
        self._start_guard = self._gauge(
            "start_guard_ok", "Whether this host runs the start guard: 1, or 0 if it does not or the guard is off."
        )
        self._containers_on_fewer_cpus = self._gauge(
            "containers_on_fewer_cpus", "Containers that live and were started on fewer CPUs than their claims hold."
        )
        self._starts_on_fewer_cpus = self._counter(
            "starts_on_fewer_cpus", "Containers that were started on fewer CPUs than their claims hold."
        )
        self._nri_connected = self._gauge(
            "nri_connected", "Whether the runtime is connected and its containers are known: 1 or 0."
        )
        self._shared_pool_cpus = self._gauge("shared_pool_cpus", "CPUs that the containers without a claim share.")
        self._containers = self._gauge(
            "containers", "Containers that live, as the runtime last said.", "cpu_allocation_mode"
        )
        for mode in ("exclusive", "shared"):
            self._containers.labels(mode)
        self._nri_reconnects = self._counter("nri_reconnects", "Times that the lost runtime was connected again.")
        self._nri_synchronize_seconds = self._labelled_histogram(
            "nri_synchronize_duration_seconds", "How long the driver took to answer a synchronisation.", _RESULTS
        )
        self._nri_seconds = {
            operation: self._labelled_histogram(
                f"nri_{operation}_duration_seconds",
                f"How long the driver took to answer a {operation.replace('_', ' ')}.",
                _RESULTS,
                _MODES,
            )
            for operation in _NRI_OPERATIONS
        }
        self._refused_containers = self._counter(
            "nri_refused_containers", "Containers that were not let in.", "reason", _REFUSALS
        )
        self._corrected_containers = self._counter(
            "nri_corrected_containers",
            "Containers that had, when the runtime was connected, other CPUs than they should have.",
            "cpu_allocation_mode",
            ("exclusive", "shared"),
        )
        self._pushes = self._counter(
            "nri_pushes", "Updates of a few containers that the runtime was sent.", "result", ("success", "error")
        )
        self._pushed_containers = self._counter("nri_pushed_containers", "Containers in these updates.")
        self._unmovable_containers = self._gauge(
            "nri_unmovable_containers", "Containers that the runtime cannot give the CPUs that they should have."
        )
        self._unsolicited_updates = self._gauge(
            "nri_unsolicited_updates",
            "Whether containers are moved at any time: 1, or 0 where the runtime could deadlock and they are moved in "
            "answers to its events.",
        )
        self._moves = self._counter(
            "nri_moved_containers", "Containers that an answer to an event has told the runtime to give other CPUs."
        )
        self._unread_moves = self._counter(
            "nri_unread_moves",
            "Containers that count as moved although their cgroups cannot be read, so that nobody has seen it.",
        )
        self._orphaned_claims = self._counter(
            "orphaned_claims", "Claims that were released because the API server does not know them any more."
        )
        self._kubelet_cpu_manager = self._gauge(
            "kubelet_static_cpu_manager",
            "Whether the kubelet's own CPU manager gave containers CPUs at the start: 1 or 0.",
        )
        self._ready = self._gauge("ready", "Whether the driver is ready: 1 or 0.")
        self._conditions = self._gauge("condition", "Whether a condition of being ready holds: 1 or 0.", "condition")
        self._conditions.labels("started")
        build_info = self._gauge("build_info", "Always 1; the label is the driver's version.", "version")
        build_info.labels(version("dracpu")).set(1)

    def watch(self, ledger: Ledger, health: Conditions) -> None:
        """Report from now on also what is held, whether the driver is ready, and the process's use of resources.

        Parameters
        ----------
        ledger : Ledger
            Who holds which CPUs.
        health : Conditions
            Whether the driver is ready.
        """
        self._ledger = ledger
        self._health = health
        ProcessCollector(registry=self._registry)

    def watch_containers(self, enforced: Enforced) -> None:
        """Report from now on also how many containers there are, and what they share."""
        self._enforced = enforced

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in the best format for an ``Accept`` header, and their content type."""
        self._ask()
        encode, content_type = _encoder(accept)
        return encode(self._registry), content_type

    @staticmethod
    def content_type(accept: str) -> str:
        """Return the content type that `render` chooses for an ``Accept`` header: one of two, whatever it says."""
        return _encoder(accept)[1]

    def observe_prepare(self, result: str, seconds: float) -> None:
        """Count a prepare, which ended with ``success``, ``error`` or ``unknown``, and how long it took."""
        self._prepares.labels(result).inc()
        self._prepare_seconds.observe(seconds)

    def observe_unprepare(self, result: str, seconds: float) -> None:
        """Count an unprepare, which ended with ``success``, ``error`` or ``unknown``, and how long it took."""
        self._unprepares.labels(result).inc()
        self._unprepare_seconds.observe(seconds)

    def observe_claim_cpus(self, cpus: int) -> None:
        """Count a claim that was given CPUs, and how many."""
        self._claim_cpus.observe(cpus)

    def count_broken_file(self, kind: str) -> None:
        """Count a file that cannot be used, a ``record`` or a ``cdi`` spec."""
        self._broken_files.labels(kind).inc()

    def count_record_mismatch(self, reason: str) -> None:
        """Count a record that does not fit: ``offline``, ``reserved``, ``device`` or ``overlap``."""
        self._record_mismatches.labels(reason).inc()

    def set_left_out(self, left_out: Mapping[str, Sequence[str]]) -> None:
        """Say which attributes could not be published, and the devices that lack them."""
        for attribute, devices in left_out.items():
            self._left_out.labels(attribute).set(len(devices))

    def count_slice_sync(self, result: str) -> None:
        """Count an attempt to bring the slices in place, ``success`` or ``error``."""
        self._slice_syncs.labels(result).inc()

    def count_slice_write(self, operation: str) -> None:
        """Count a slice that was written: ``create``, ``update`` or ``delete``."""
        self._slice_writes.labels(operation).inc()

    def count_slice_repair(self) -> None:
        """Count that the slices were not as they had been left."""
        self._slice_repairs.inc()

    def set_nri_connected(self, connected: bool) -> None:
        """Say whether the runtime is connected and its containers are known."""
        self._nri_connected.set(connected)

    def count_nri_reconnect(self) -> None:
        """Count that the runtime was connected again after it was lost."""
        self._nri_reconnects.inc()

    def observe_nri_synchronize(self, result: str, seconds: float) -> None:
        """Count a synchronisation, which ended with ``success`` or ``error``, and how long it took."""
        self._nri_synchronize_seconds.labels(result).observe(seconds)

    def observe_nri(self, operation: str, result: str, mode: str, seconds: float) -> None:
        """Count a ``create_container``, ``stop_container`` or ``remove_container``, and how long it took."""
        self._nri_seconds[operation].labels(result, mode).observe(seconds)

    def count_refused_container(self, reason: str) -> None:
        """Count a container that was not let in."""
        self._refused_containers.labels(reason).inc()

    def count_corrected_containers(self, mode: str, containers: int) -> None:
        """Count containers that had not the CPUs that they should have, ``exclusive`` or ``shared``."""
        self._corrected_containers.labels(mode).inc(containers)

    def count_nri_push(self, result: str, containers: int) -> None:
        """Count an update of some containers that ended with ``success`` or ``error``."""
        self._pushes.labels(result).inc()
        self._pushed_containers.inc(containers)

    def set_unmovable_containers(self, containers: int) -> None:
        """Say how many containers could not be given their CPUs."""
        self._unmovable_containers.set(containers)

    def set_unsolicited_updates(self, allowed: bool) -> None:
        """Say whether the runtime can be told to move containers at any time."""
        self._unsolicited_updates.set(allowed)

    def count_moves(self, containers: int) -> None:
        """Count containers that an answer has told the runtime to move."""
        self._moves.inc(containers)

    def count_unread_moves(self, containers: int) -> None:
        """Count containers that were believed to have been moved, since their cgroups cannot be read."""
        self._unread_moves.inc(containers)

    def count_orphaned_claim(self) -> None:
        """Count a claim that was released because the API server does not know it any more."""
        self._orphaned_claims.inc()

    def set_kubelet_static_cpu_manager(self, static: bool) -> None:
        """Say whether the kubelet's CPU manager gives containers CPUs of its own."""
        self._kubelet_cpu_manager.set(static)

    def set_published(self, slices: int, devices: int) -> None:
        """Say how many slices and devices are in place."""
        self._published_slices.set(slices)
        self._published_devices.set(devices)

    def set_start_guard(self, ok: bool) -> None:
        """Say whether this host runs the start guard."""
        self._start_guard.set(ok)

    def set_containers_on_fewer_cpus(self, containers: int) -> None:
        """Say how many containers live that were started on fewer CPUs than their claims hold."""
        self._containers_on_fewer_cpus.set(containers)

    def count_start_on_fewer_cpus(self) -> None:
        """Count a container that was started on fewer CPUs than its claims hold."""
        self._starts_on_fewer_cpus.inc()

    def _ask(self) -> None:
        if self._ledger is not None:
            pool, records = self._ledger.pool, self._ledger.records
            self._allocated_cpus.set(len(pool.taken))
            self._available_cpus.set(len(pool.available))
            self._reserved_cpus.set(len(pool.reserved))
            self._active_claims.set(len(records))
            self._adopted_claims.set(sum(record.adopted for record in records.values()))
        if self._enforced is not None:
            self._shared_pool_cpus.set(self._enforced.shared_pool_size())
            for mode, count in self._enforced.container_counts().items():
                self._containers.labels(mode).set(count)
        if self._health is not None:
            self._ready.set(self._health.ready)
            for condition, holds in self._health.conditions().items():
                self._conditions.labels(condition).set(holds)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"dra_cpu_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, label: str = "", values: tuple[str, ...] = ()) -> Counter:
        counter = Counter(f"dra_cpu_{name}", text, (label,) if label else (), registry=self._registry)
        # All series exist from the start: Prometheus sees no increase in a counter that it first meets at one.
        for value in values:
            counter.labels(value)
        return counter

    def _labelled_histogram(
        self, name: str, text: str, results: tuple[str, ...], modes: tuple[str, ...] = ()
    ) -> Histogram:
        labels = ("result", "cpu_allocation_mode") if modes else ("result",)
        histogram = Histogram(f"dra_cpu_{name}", text, labels, registry=self._registry, buckets=_NRI_SECONDS)
        for result in results:
            for mode in modes or ("",):
                histogram.labels(*((result, mode) if modes else (result,)))
        return histogram

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"dra_cpu_{name}", text, registry=self._registry, buckets=buckets)


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    # The library takes the version and the escaping that a client names into the content type, whatever they are.
    return choose_encoder(_OPENMETRICS if "application/openmetrics-text" in accept else "")
