# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of the node plugin, runs them in one event loop, and takes them down in order.

The order of the start is the order of what may be asked for: first the probes answer, then the machine is described,
then this process becomes the only one on its folder, then everything that was given out before is held again, and only
then do the sockets open and is anything published.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from threading import Barrier
from typing import TYPE_CHECKING, Any, Final, Self

from driver.allocators import Allocator, ExternalAllocator
from driver.cdi import CdiDirectory
from driver.checkpoint import RecordStore
from driver.cluster import Cluster
from driver.cpumanager import CpuManagerAllocator
from driver.devicehealth import DeviceHealth
from driver.devices import INDIVIDUAL, DeviceModel, build_devices
from driver.errors import ConfigError
from driver.guardnotes import GuardNotes
from driver.health import INSTANCE, RUNTIME, STARTED, Health
from driver.hostcgroups import HostCgroups
from driver.individual import IndividualAllocator, build_individual_devices
from driver.instance import InstanceLock
from driver.kubelet import KubeletPlugin
from driver.kubeletstate import has_static_cpu_manager
from driver.ledger import Ledger
from driver.logs import fields
from driver.metadata import MetadataStore
from driver.metrics import Metrics
from driver.nri.runtimeside import RuntimeSide
from driver.orphans import Orphans
from driver.podlimit import PodLimit
from driver.prepare import Preparer
from driver.publisher import Publisher
from driver.retries import delays
from driver.runtime import NoRuntime
from driver.startguard import StartGuard
from driver.status import StatusWriter
from driver.web import WebServer
from fastcpu import CpuSet, Topology, read_topology
from fastcpu.errors import TopologyError
from fastcpu.pool import CpuPool
from fastcpu.sysfs import open_tree, read_pcie_roots

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from driver.config import Config

_log = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 0.2
_LONGEST_RETRY_S: Final = 5.0
_NONE: Final = CpuSet()
# A few batches of files are written at a time, more only where the disk hangs; a thread that has worked keeps memory.
_MOST_THREADS: Final = 16


def run(config: Config) -> int:
    """Run the node plugin until SIGTERM or SIGINT.

    Parameters
    ----------
    config : Config
        The effective configuration.

    Returns
    -------
    int
        The exit status, 0 after a signal.

    Raises
    ------
    ConfigError
        If the configuration cannot work on this machine, whatever is tried again.
    """
    return asyncio.run(_run_until_signal(config))


async def _run_until_signal(config: Config) -> int:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(_started_threads())
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    plugin = asyncio.create_task(_serve(config))
    stop = asyncio.create_task(signals.get())
    await asyncio.wait((plugin, stop), return_when=asyncio.FIRST_COMPLETED)
    if not plugin.done():
        _log.info("stopping", extra=fields(signal=stop.result().name))
        plugin.cancel()
    stop.cancel()
    with suppress(asyncio.CancelledError):
        await plugin
    _log.info("stopped")
    return 0


def _started_threads() -> ThreadPoolExecutor:
    """Return an executor all of whose threads run: when some pod has taken all of the node's, none can be started."""
    threads = _MOST_THREADS
    while True:
        executor = ThreadPoolExecutor(threads, thread_name_prefix="files")
        started = Barrier(threads + 1)
        try:
            for _ in range(threads):
                executor.submit(started.wait)
            started.wait()
        except RuntimeError:
            started.abort()  # nothing could end before those that run
            executor.shutdown()
            if threads == 1:
                raise
            threads //= 2
        else:
            return executor


async def _serve(config: Config) -> None:
    started = time.monotonic()
    health = Health()
    health.require(STARTED, "starting")
    health.require(INSTANCE, "not looked yet whether another instance runs")
    if not config.nri_socket:
        _log.warning("enforcement is off: without a runtime connection no container is held to its CPUs")
        health.set_ok(RUNTIME)
    metrics = Metrics()
    guard = _start_guard(config, health, metrics)
    topology = _read_machine(config)
    roots = read_pcie_roots(config.sysfs_root, config.sysfs_overlay) if config.expose_pcie_roots else None
    model = _build_model(config, topology, roots)
    _tell_model(model, topology.online - config.reserved_cpus)
    pool = CpuPool(topology.online, config.reserved_cpus, model.groups)
    ledger = Ledger(pool)
    metrics.watch(ledger, health)
    metrics.set_left_out(model.left_out)
    _look_at_kubelet(config, metrics)
    async with AsyncExitStack() as stack:
        web = WebServer(config.bind_address, health, metrics, lambda: _status(config, model, ledger, guard))
        await web.start()
        stack.push_async_callback(web.stop)
        cluster = await Cluster.connect(config.kubeconfig)
        stack.push_async_callback(cluster.close)
        status = StatusWriter(cluster)
        stack.push_async_callback(status.close)
        cgroups, limit = HostCgroups(config.cgroup_root), PodLimit()
        runtime_side = _runtime_side(config, topology, ledger, cgroups, limit, cluster, health, metrics)
        runtime = runtime_side.enforcement if runtime_side is not None else NoRuntime()
        if runtime_side is not None:
            metrics.watch_containers(runtime_side.enforcement)
        preparer = Preparer(
            claims=cluster,
            allocator=_build_allocator(config, topology, model, pool, limit),
            model=model,
            ledger=ledger,
            records=RecordStore(config.plugin_dir / "claims"),
            cdi=CdiDirectory(config.cdi_dir, None if guard is None else guard.hook),
            metadata=MetadataStore(config.plugin_dir / "dra-device-metadata", config.cdi_dir),
            status=status,
            runtime=runtime,
            metrics=metrics,
        )
        orphans = Orphans(
            claims=cluster,
            preparer=preparer,
            ledger=ledger,
            runtime=runtime,
            pool_name=config.node_name,
            metrics=metrics,
        )
        publisher = Publisher(cluster, config.node_name, model, health, metrics)
        devices = DeviceHealth(
            model,
            config.node_name,
            open_tree(config.sysfs_root, config.sysfs_overlay),
            health,
            ledger,
            tell_pool=(lambda: None) if runtime_side is None else runtime_side.cpus_changed,
            withdraw=lambda cpus: publisher.publish(_build_model(config, topology, roots, cpus)),
            limit=limit,
            read_limit=cgroups.pods_limit,
        )
        kubelet = KubeletPlugin(
            dra_socket=config.dra_socket,
            registration_socket=config.registration_socket,
            preparer=preparer,
            devices=devices,
            health=health,
        )
        instance = InstanceLock(config.plugin_dir, health)
        await instance.acquire()
        stack.callback(instance.release)
        if guard is not None:
            # Before any spec names it.
            await guard.put_in_place()
        await _restore_patiently(preparer, health)
        devices.look()  # what of the claims is offline, before the runtime tells of their containers
        tasks = await stack.enter_async_context(_Tasks())
        if guard is not None:
            tasks.start(guard.keep_in_place())
        if runtime_side is not None:
            tasks.start(runtime_side.run())
            tasks.start(orphans.run())
            if guard is not None:
                tasks.start(GuardNotes(config.plugin_dir, runtime_side.enforcement, metrics).run())
        stack.push_async_callback(kubelet.stop)
        stack.callback(preparer.stop)
        if runtime_side is not None:
            stack.callback(runtime_side.close)
        await kubelet.start()
        # What lives by now lives for ever, and need not be looked at by every collection, for tens of milliseconds.
        gc.freeze()
        health.set_ok(STARTED)
        _log.info("started", extra=fields(seconds=round(time.monotonic() - started, 3), pid=os.getpid()))
        tasks.start(devices.run())
        tasks.start(publisher.run())
        await tasks.failure()


class _Tasks:
    """What runs for as long as the driver does. That one of them ends is a bug, and ends the driver."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start one."""
        self._tasks.append(asyncio.create_task(work))

    async def failure(self) -> None:
        """Wait until one of them ends, and raise what ended it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.cancelled():
                raise RuntimeError("a part of the driver was cancelled by something that it waited for")
            task.result()


def _look_at_kubelet(config: Config, metrics: Metrics) -> None:
    static = has_static_cpu_manager(config.kubelet_root_dir)
    metrics.set_kubelet_static_cpu_manager(static)
    if static:
        _log.warning(
            "the kubelet's CPU manager policy is static: containers to which it gives CPUs of their own share those "
            "that no claim holds, as all others without a claim; expected cpuManagerPolicy none on this node"
        )


def _read_machine(config: Config) -> Topology:
    try:
        topology = read_topology(config.sysfs_root, config.sysfs_overlay)
    except (TopologyError, OSError) as error:
        # The file's path begins with /sys, whichever root stands for it.
        raise ConfigError(f"cannot read the machine, with {config.sysfs_root} for /sys: {error}") from error
    _log.info(
        "machine",
        extra=fields(
            online=topology.online,
            sockets=len(topology.sockets),
            numa_nodes=len(topology.numa_nodes),
            l3_caches=len(topology.l3_caches),
            cores=len(topology.cores),
            smt=topology.smt_enabled,
            isolated=topology.isolated,
        ),
    )
    for note in topology.notes:
        _log.warning("machine is not described as it should be", extra=fields(reason=note))
    if strangers := config.reserved_cpus - topology.possible:
        _log.warning("reservedCPUs has CPUs that this machine does not have", extra=fields(cpus=strangers))
    return topology


def _build_model(
    config: Config, topology: Topology, roots: Mapping[int, Sequence[str]] | None, withdrawn: CpuSet = _NONE
) -> DeviceModel:
    """Describe the devices, without the CPUs that are not to be published now."""
    if config.cpu_device_mode == INDIVIDUAL:
        model = build_individual_devices(
            topology,
            reserved=config.reserved_cpus,
            pcie_roots=roots,
            node_allocatable_mapping=config.publish_node_allocatable_resource_mapping,
        )
        # Devices are counted through, so that one left out before would give the others other names.
        return model.without(withdrawn)
    return build_devices(
        topology,
        reserved=config.reserved_cpus | withdrawn,
        group_by=config.group_by,
        allocator=config.allocator,
        pcie_roots=roots,
        node_allocatable_mapping=config.publish_node_allocatable_resource_mapping,
    )


def _tell_model(model: DeviceModel, cpus: CpuSet) -> None:
    for warning in model.warnings:
        _log.warning("a device is not published as it should be", extra=fields(reason=warning))
    if model.group_by == INDIVIDUAL:
        _log.info("devices", extra=fields(count=len(model.devices), cpus=cpus))
    else:
        for device in model.devices:
            _log.info("device", extra=fields(device=device.name, cpus=device.cpus, count=len(device.cpus)))


def _runtime_side(
    config: Config,
    topology: Topology,
    ledger: Ledger,
    cgroups: HostCgroups,
    limit: PodLimit,
    cluster: Cluster,
    health: Health,
    metrics: Metrics,
) -> RuntimeSide | None:
    if not config.nri_socket:
        return None
    return RuntimeSide(
        config.nri_socket,
        ledger=ledger,
        isolated=topology.isolated,
        claims=cluster,
        health=health,
        metrics=metrics,
        start_guard=config.start_guard,
        cgroups=cgroups,
        limit=limit,
    )


def _build_allocator(
    config: Config, topology: Topology, model: DeviceModel, pool: CpuPool, limit: PodLimit
) -> Allocator:
    if config.cpu_device_mode == INDIVIDUAL:
        return IndividualAllocator(model, pool, config.node_name, limit)
    if config.allocator == "external":
        return ExternalAllocator(model, pool, config.node_name, limit)
    return CpuManagerAllocator(model, pool, config.node_name, topology, config.placement, limit)


def _start_guard(config: Config, health: Health, metrics: Metrics) -> StartGuard | None:
    if not config.nri_socket:
        return None  # nothing pins containers, and the guard would let none of them start
    if not config.start_guard:
        _log.warning("the start guard is off: a container that starts while this driver is away runs on all CPUs")
        return None
    return StartGuard(config.plugin_dir, health, metrics)


async def _restore_patiently(preparer: Preparer, health: Health) -> None:
    # Without the records nobody knows which CPUs are free, so nothing may be given out; but whoever repairs the disk
    # need not restart the driver.
    for delay in delays(_FIRST_RETRY_S, _LONGEST_RETRY_S):
        try:
            return await preparer.restore()
        except OSError as error:
            _log.error("cannot read what was prepared before", extra=fields(reason=error, retry_s=round(delay, 2)))
            health.set_missing(STARTED, f"cannot read what was prepared before: {error}")
        await asyncio.sleep(delay)
    raise AssertionError("delays never end")


def _status(config: Config, model: DeviceModel, ledger: Ledger, guard: StartGuard | None) -> dict[str, object]:
    devices = CpuSet().union(*(device.cpus for device in model.devices))
    return {
        "node": config.node_name,
        "grouped by": model.group_by,
        "allocator": config.allocator,
        "enforcement": "on" if config.nri_socket else "off",
        "start guard": "off" if guard is None else "on",
        "devices": len(model.devices),
        "CPUs in devices": len(devices),
        "CPUs reserved": len(config.reserved_cpus),
        "claims": len(ledger.records),
        "CPUs taken": len(ledger.pool.taken),
    }
