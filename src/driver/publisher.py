# SPDX-License-Identifier: Apache-2.0
"""Keeps this node's ResourceSlices at the API server as the device model says.

One worker lists the slices, watches them, and writes whenever what is stored differs from what should be; it never
writes in parallel. The kubelet deletes all slices of its node at every start and thirty seconds after a driver went
away, so a slice that is missing is an ordinary event and is back within seconds. Whatever goes wrong ends in the same
way: wait, list again, compare again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from driver.answers import JsonObject
from driver.cluster import Cluster
from driver.errors import ApiError
from driver.health import SLICES
from driver.logs import fields, operation
from driver.names import DRIVER_NAME
from driver.offer import Devices, Offer
from driver.retries import delays
from driver.slices import Plan, Write

_log = logging.getLogger(__name__)

_CONTESTED: Final = "somebody else keeps deleting or changing them"
_GENERATED_NAME: Final = re.compile(r'"[0-9a-f]{5,}-[^"]*"')
_GONE: Final = frozenset({404, 409})


class Conditions(Protocol):
    """Where it is said whether the slices are in place: see `driver.health.Health`."""

    def require(self, name: str, reason: str = ...) -> None:
        """Declare a condition."""

    def set_missing(self, name: str, reason: str) -> None:
        """Say that a condition does not hold."""

    def set_ok(self, name: str) -> None:
        """Say that a condition holds."""


class SliceMetrics(Protocol):
    """What is counted here."""

    def count_slice_sync(self, result: str) -> None:
        """Count an attempt to bring the slices in place, ``success`` or ``error``."""

    def count_slice_write(self, operation: str) -> None:
        """Count a slice that was written: ``create``, ``update`` or ``delete``."""

    def count_slice_repair(self) -> None:
        """Count that the slices were not as they had been left."""

    def set_published(self, slices: int, devices: int) -> None:
        """Say how many slices and devices are in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the publisher goes, in seconds.

    Attributes
    ----------
    repair_s : float
        From the first sign that something is not as it was left until it is repaired, so that a storm of events makes
        one repair.
    contested_s : float
        The same, once `patience` repairs in a row did not last `calm_s` each: against another writer there is nothing
        to be won by being fast.
    patience : int
        See there.
    calm_s : float
        See there.
    retry_s, unreachable_s, refused_s : float
        The first pause after a failure; the longest while the server cannot be reached or the node does not exist;
        the longest after any other failure.
    steady_s : float
        A watch that lasts so long ends a row of failures.
    offer_s : float
        What the server refuses is left out for so long at least.
    """

    repair_s: float = 1.0
    contested_s: float = 4.0
    patience: int = 5
    calm_s: float = 60.0
    retry_s: float = 0.25
    unreachable_s: float = 5.0
    refused_s: float = 30.0
    steady_s: float = 10.0
    offer_s: float = 3600.0


class _OutdatedError(Exception):
    """What is known of the stored slices is not true any more."""


class Publisher:
    """Publishes the devices of one node.

    Parameters
    ----------
    cluster : Cluster
    node_name : str
        The node; also the pool's name.
    model : Devices
        What to publish until `publish` says otherwise.
    health : Conditions
        Is told about the condition ``slices``.
    metrics : SliceMetrics
    pace : Pace, optional
    """

    def __init__(
        self,
        cluster: Cluster,
        node_name: str,
        model: Devices,
        health: Conditions,
        metrics: SliceMetrics,
        pace: Pace = Pace(),
    ) -> None:
        self._cluster = cluster
        self._node_name = node_name
        self._health = health
        self._metrics = metrics
        self._pace = pace
        self._offer = Offer(node_name, model)
        self._offer_again_at = 0.0
        self._stored: dict[str, JsonObject] = {}
        self._busy = False
        self._due: float | None = None
        self._wake = asyncio.Event()
        self._repairs = 0
        self._calm_at = 0.0
        self._holds = False
        self._failure = "not published yet"
        health.require(SLICES, "not published yet")

    def publish(self, model: Devices) -> None:
        """Publish these devices from now on instead of those before."""
        self._offer.replace(model)
        self._sync_at(0.0)

    async def run(self) -> NoReturn:
        """Publish until cancelled; the slices stay."""
        loop = asyncio.get_running_loop()
        unreachable, refused = self._retries()
        while True:
            started = loop.time()
            retries: Iterator[float] = refused
            try:
                await self._follow()
            except _OutdatedError as error:
                _log.debug("slices changed in the meantime", extra=fields(reason=error))
            except ApiError as error:
                self._failed(error)
                if error.status == 0 or not self._offer.node_uid:
                    retries = unreachable
            except Exception as error:
                # Whatever is wrong with slices, containers must be held to their CPUs meanwhile.
                _log.exception("a bug")
                self._failed(ApiError(0, f"internal error: {type(error).__name__}: {error}"))
                retries = unreachable
            if loop.time() - started >= self._pace.steady_s:
                unreachable, refused = self._retries()
                retries = refused
            await asyncio.sleep(next(retries))

    def _retries(self) -> tuple[Iterator[float], Iterator[float]]:
        pace = self._pace
        return delays(pace.retry_s, pace.unreachable_s), delays(pace.retry_s, pace.refused_s)

    async def _follow(self) -> None:
        """List, then write what is needed as long as the watch lasts."""
        items, resource_version = await self._cluster.list_slices(self._node_name)
        self._stored = {item["metadata"]["name"]: item for item in items}
        loop = asyncio.get_running_loop()
        if self._offer.is_reduced and loop.time() >= self._offer_again_at:
            self._offer.restore()
        watch = asyncio.create_task(self._watch(resource_version), name="watch of slices")
        watch.add_done_callback(lambda _: self._wake.set())
        self._sync_at(0.0)
        try:
            while not watch.done():
                now = loop.time()
                if self._due is not None and self._due <= now:
                    self._due = None
                    await self._sync()
                elif self._contested and self._due is None and now >= self._calm_at:
                    self._repairs = 0
                    self._in_place()
                else:
                    await self._sleep(now)
            watch.result()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _sleep(self, now: float) -> None:
        until = self._due if self._due is not None else self._calm_at if self._contested else None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), None if until is None else max(0.0, until - now))
        self._wake.clear()

    async def _watch(self, resource_version: str) -> None:
        try:
            async with aclosing(self._cluster.watch_slices(self._node_name, resource_version)) as events:
                async for kind, slice_ in events:
                    self._note(kind, slice_)
        except ApiError as error:
            if error.status == 410:
                raise _OutdatedError(str(error)) from error
            raise

    def _note(self, kind: str, slice_: JsonObject) -> None:
        if kind == "DELETED":
            self._stored.pop(slice_["metadata"]["name"], None)
        elif not self._remember(slice_):
            return
        # A plan costs little, but not nothing; while something is to be done anyhow it would say nothing new.
        if not self._busy and self._due is None and self._offer.node_uid and self._offer.plan(self._stored.values()):
            self._disturbed(slice_)

    def _remember(self, slice_: JsonObject) -> bool:
        """Take note of a version of a slice, unless a newer one is known."""
        name = slice_["metadata"]["name"]
        known = self._stored.get(name)
        if known is not None and _version(slice_) < _version(known):
            return False
        self._stored[name] = slice_
        return True

    async def _sync(self) -> None:
        with operation("publish"):
            self._busy = True
            try:
                plan = await self._bring_in_place()
            finally:
                self._busy = False
            if self._due is None:
                if self._offer.plan(self._stored.values()):
                    self._disturbed(None)
                else:
                    self._published(plan)

    async def _bring_in_place(self) -> Plan:
        if not self._offer.node_uid:
            await self._find_node()
        plan = self._offer.plan(self._stored.values())
        if plan:
            # A node that was deleted and registered again is another owner, and what it does not own is deleted.
            await self._find_node()
            plan = self._offer.plan(self._stored.values())
            if self._holds:
                self._not_in_place("the devices changed; the slices are being written")
        try:
            await self._write(plan)
        except ApiError as error:
            if not self._offer.reduce(error):
                raise
            self._offer_again_at = asyncio.get_running_loop().time() + self._pace.offer_s
            self._sync_at(0.0)
        return plan

    async def _find_node(self) -> None:
        try:
            node = await self._cluster.get_node(self._node_name)
        except ApiError as error:
            if error.status != 404:
                raise
            self._offer.node_uid = ""
            raise ApiError(
                404, f"node {self._node_name!r} does not exist yet; if it has another name, set hostnameOverride"
            ) from error
        self._offer.node_uid = str(node["metadata"]["uid"])

    async def _write(self, plan: Plan) -> None:
        for slice_ in plan.delete:
            await self._delete(slice_["metadata"])
        for write in plan.replace:
            try:
                stored = await self._cluster.replace_slice(write.body)
            except ApiError as error:
                if error.status in _GONE:
                    raise _OutdatedError(str(error)) from error
                raise
            self._wrote("update", write, stored)
        for write in plan.create:
            self._wrote("create", write, await self._cluster.create_slice(write.body))

    async def _delete(self, metadata: Mapping[str, Any]) -> None:
        try:
            await self._cluster.delete_slice(metadata["name"], metadata["uid"], metadata["resourceVersion"])
        except ApiError as error:
            if error.status == 409:
                raise _OutdatedError(str(error)) from error
            if error.status != 404:
                raise
        self._stored.pop(metadata["name"], None)
        self._metrics.count_slice_write("delete")

    def _wrote(self, what: str, write: Write, stored: JsonObject) -> None:
        self._metrics.count_slice_write(what)
        self._remember(stored)
        self._offer.accept(write, stored)

    def _published(self, plan: Plan) -> None:
        self._metrics.count_slice_sync("success")
        self._calm_at = asyncio.get_running_loop().time() + self._pace.calm_s
        if plan or self._failure:
            _log.log(
                logging.DEBUG if self._contested else logging.INFO,
                "slices published",
                extra=fields(
                    node=self._node_name,
                    slices=len(self._stored),
                    devices=self._offer.device_count,
                    generation=plan.generation,
                    deleted=len(plan.delete),
                    updated=len(plan.replace),
                    created=len(plan.create),
                ),
            )
        self._failure = ""
        if self._contested:
            self._not_in_place(_CONTESTED)
        else:
            self._in_place()

    def _in_place(self) -> None:
        self._holds = True
        self._metrics.set_published(len(self._stored), self._offer.device_count)
        self._health.set_ok(SLICES)

    def _not_in_place(self, reason: str) -> None:
        self._holds = False
        self._health.set_missing(SLICES, reason)

    @property
    def _contested(self) -> bool:
        return self._repairs > self._pace.patience

    def _disturbed(self, slice_: JsonObject | None) -> None:
        """Repair what somebody else did, the more slowly the more often it happens."""
        now = asyncio.get_running_loop().time()
        if now >= self._calm_at:
            self._repairs = 0
        self._repairs += 1
        self._metrics.count_slice_repair()
        if not self._contested:
            self._not_in_place("somebody else deleted or changed them; they are being repaired")
            self._sync_at(self._pace.repair_s * random.uniform(0.5, 1.0))
            return
        if self._repairs == self._pace.patience + 1:
            _log.warning(
                "somebody else keeps deleting or changing this node's slices",
                extra=fields(repairs=self._pace.patience, writer=_writer(slice_)),
            )
        self._not_in_place(_CONTESTED)
        self._sync_at(self._pace.contested_s)

    def _failed(self, error: ApiError) -> None:
        self._metrics.count_slice_sync("error")
        # An outage of hours is one line, not one for each attempt with another generated name.
        reason = _GENERATED_NAME.sub('"…"', str(error))
        self._not_in_place(reason)
        level = logging.DEBUG if self._failure == reason else logging.WARNING
        self._failure = reason
        _log.log(level, "slices cannot be published now; trying again", extra=fields(reason=reason))

    def _sync_at(self, delay_s: float) -> None:
        self._due = asyncio.get_running_loop().time() + delay_s
        self._wake.set()


def _version(slice_: Mapping[str, Any]) -> int:
    """Return a resource version as the number that it is with every API server since 1.35."""
    text: str = slice_["metadata"]["resourceVersion"]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _writer(slice_: Mapping[str, Any] | None) -> str | None:
    """Name who wrote a slice last, where that is known and not us."""
    entries = (slice_ or {"metadata": {}})["metadata"].get("managedFields") or []
    writers = [(str(entry.get("time", "")), str(entry.get("manager", ""))) for entry in entries]
    others = [writer for writer in writers if writer[1] != DRIVER_NAME]
    return max(others)[1] if others else None
