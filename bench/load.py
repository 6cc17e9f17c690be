# SPDX-License-Identifier: Apache-2.0
"""Plays a kubelet against a DRA CPU driver and reports how fast and how right its answers are.

It registers the driver, makes claims with an allocation as an external scheduler does, has them prepared and unprepared
through the driver's socket, and holds every answer to what the container runtime would find. Between the calls it
fetches the same claims itself: no driver can prepare a claim in less time than that takes. ``--help`` tells the rest.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from driver.sandbox.offers import read_offers
from loadgenerator.apiserver import Api, sandbox_api_server
from loadgenerator.claims import Checker, ClaimMaker, WrongAnswerError
from loadgenerator.node import DriverEndedError, Node
from loadgenerator.options import Options, parse_options
from loadgenerator.phases import Load
from loadgenerator.report import MachineResult, Report


def main() -> int:
    """Run the load generator."""
    options = parse_options()
    try:
        asyncio.run(_run(options))
    except (WrongAnswerError, DriverEndedError) as error:
        print(f"load.py: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(options: Options) -> None:
    with ExitStack() as stack:
        kubeconfig = options.kubeconfig
        if kubeconfig is None:
            kubeconfig = Path(stack.enter_context(tempfile.TemporaryDirectory()), "kubeconfig")
            stack.enter_context(sandbox_api_server(kubeconfig))
        async with Api.open(kubeconfig) as api:
            report = Report(options, await api.version())
            report.begin()
            for cpus in options.cpus:
                async with Node.open(options, cpus, api, kubeconfig) as node:
                    report.add(await _measure(options, cpus, node, api))
            report.end()


async def _measure(options: Options, cpus: int, node: Node, api: Api) -> MachineResult:
    result = MachineResult(cpus=cpus)
    for attempt in range(options.starts):
        if attempt:
            await node.wipe()
        async with node.driver() as (process, started):
            result.registered_s.append(started.registered_s)
            result.published_s.append(started.published_s)
            # Whatever the start has left to do is done by then.
            await asyncio.sleep(0.5)
            result.idle_mb.append(process.resident_mb)
            if attempt < options.starts - 1:
                continue
            offers = [offer for offer in read_offers(started.slices) if offer.cpus]
            maker = ClaimMaker(api, offers, options.cpus_per_claim)
            load = Load(api, started.plugin, process, maker, Checker(node.cdi_dir))
            try:
                for per_call in options.per_call:
                    if per_call > maker.capacity:
                        result.left_out.append(per_call)
                        continue
                    result.latency.append(await load.latency(per_call, options.calls, options.rate))
                if options.claims:
                    concurrency = min(options.concurrency, maker.capacity)
                    result.throughput = await load.throughput(options.claims, concurrency, options.hold_s)
                result.loaded_mb = process.resident_mb
            finally:
                await maker.delete_all()
    return result


if __name__ == "__main__":
    sys.exit(main())
