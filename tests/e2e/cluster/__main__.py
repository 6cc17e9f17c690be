# SPDX-License-Identifier: Apache-2.0
"""Starts a one-node Kubernetes and a shell in which kubectl, helm and ctr are about it; it ends with the shell.

python -m e2e.cluster [COMMAND ...]        runs a command in place of the shell
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence

import yaml

from e2e import programs, scratch
from e2e.cluster.cluster import CHART, NAMESPACE, Cluster

_INTERRUPTED = 130
_DEPLOYING = """\
    deploy/image /tmp/dracpu.tar && ctr images import /tmp/dracpu.tar
    helm upgrade --install dracpu {chart} --namespace {namespace} --values $DRACPU_VALUES --wait"""


async def run(command: Sequence[str]) -> int:
    """Start a cluster, run a command in it, and return the command's exit status."""
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {line}", file=sys.stderr, flush=True)

    helm, containerd = programs.build(programs.HELM), programs.build(programs.CONTAINERD)
    async with Cluster.open(say=say) as cluster:
        node = cluster.node
        values = cluster.folder / "values.yaml"
        values.write_text(yaml.safe_dump(cluster.chart_values(), sort_keys=False))
        flags = " ".join([*cluster.driver_flags(cluster.control_plane.admin), f"--node-name={node.name}"])
        say(f"everything is in {cluster.folder}; kubectl, helm and ctr are about this cluster")
        say(f"the driver as its users run it:\n{_DEPLOYING.format(chart=CHART, namespace=NAMESPACE)}")
        say(f"or as a process:\n    {sys.prefix}/bin/dracpu {flags}")
        say(f"the cluster ends with this {'command' if command else 'shell'}")
        folders = (cluster.control_plane.programs, helm, containerd)
        environment = {
            "KUBECONFIG": str(cluster.control_plane.admin),
            "PATH": ":".join([*map(str, folders), os.environ.get("PATH", os.defpath)]),
            "CONTAINERD_ADDRESS": str(node.containerd.socket),
            "CONTAINERD_NAMESPACE": "k8s.io",
            "DRACPU_VALUES": str(values),
        }
        process = await asyncio.create_subprocess_exec(
            *(command or [os.environ.get("SHELL", "/bin/sh")]), env={**os.environ, **environment}
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
            say("taking the cluster down")


def main() -> int:
    """Run the command line."""
    if lacks := programs.missing():
        print("the cluster cannot run here; missing:\n  " + "\n  ".join(lacks), file=sys.stderr)
        return 1
    scratch.remove_leftovers()
    # A shell ignores it for what it starts in the background, and with it the cluster would.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(_INTERRUPTED))
    try:
        return asyncio.run(run(sys.argv[1:]))
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
