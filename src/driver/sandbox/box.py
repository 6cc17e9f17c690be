# SPDX-License-Identifier: Apache-2.0
"""``dracpu box``: a one-node cluster in a box with the driver in it, for claims and schedulers of your own."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

from driver.names import DRIVER_NAME
from driver.sandbox.clusterbox import ClusterBox
from driver.sandbox.interruption import run_until_interrupted
from driver.sandbox.offers import default_reserved, example_claim, example_cpus, read_offers
from driver.sandbox.plugins import KubeletError
from driver.sandbox.pods import PodWorkers
from driver.sandbox.view import Story
from fastcpu.errors import TopologyError
from fastcpu.sysfs import read_topology

if TYPE_CHECKING:
    from driver.commandline import SandboxOptions
    from driver.sandbox.apistatus import JsonObject

_FAILED: Final = 1
_WRONG_USE: Final = 2
_RETRY_S: Final = 10.0

_HOW_TO: Final = """\
kubectl and every client of the Kubernetes API can use the kubeconfig:

  export KUBECONFIG={kubeconfig}

A claim of your own: create it, write its allocation as an external scheduler
would, and let a pod on node {node} use it: the box's kubelet then has it
prepared, and the box's container runtime creates the pod's containers. It tells
here which CPUs each would run on: those of its claims, or, without a claim, all
that no claim has. Deleting the pod unprepares its claims. An example:

  kubectl create -f {folder}/claim.yaml
  kubectl replace --subresource=status -f {folder}/claim.yaml
  kubectl create -f {folder}/pod.yaml
  kubectl get resourceclaim exclusive-cores-claim -o yaml  # status.devices: CPUs
  kubectl describe pod exclusive-cores   # its events tell what the driver said
  kubectl delete pod exclusive-cores

What failed is tried again every {retry:g} s. Containers have no processes, and there are
no scheduler and no claim templates: bind pods by spec.nodeName or pods/binding.
The sockets of the driver and of the runtime, which speaks NRI, are real; the
driver's log and its CDI specs are files:

  {dra_socket}
  {registration_socket}
  {nri_socket}
  {log}
  {cdi}

Ctrl-C ends everything and removes the folder.
"""


def main(options: SandboxOptions) -> int:
    """Run the box until it is interrupted.

    Parameters
    ----------
    options : SandboxOptions

    Returns
    -------
    int
        130 after an interruption; 1 if the driver ended by itself.
    """
    story = Story()
    try:
        return run_until_interrupted(_run(options, story))
    except TopologyError as error:
        story.complain(f"--sysfs-root: {error}")
        return _WRONG_USE


async def _run(options: SandboxOptions, story: Story) -> int:
    async with ClusterBox(sysfs_root=options.sysfs_root, say=story.tell) as box:
        topology = read_topology(box.sysfs_root)
        reserved = default_reserved(topology) if options.reserved_cpus is None else options.reserved_cpus
        process = await box.start_driver({"groupBy": options.group_by, "reservedCPUs": str(reserved)})
        try:
            plugin, slices = await box.wait_ready(process)
        except KubeletError as error:
            story.complain(str(error))
            return _FAILED
        story.tell(f"{len(topology.online)} CPUs, reserved: {reserved or 'none'}, groupBy: {options.group_by}")
        _write_examples(box, slices)
        story.text(
            _HOW_TO.format(
                kubeconfig=box.kubeconfig,
                node=box.node_name,
                folder=box.folder,
                retry=_RETRY_S,
                dra_socket=plugin.endpoint,
                registration_socket=box.kubelet.registry_dir / f"{DRIVER_NAME}-reg.sock",
                nri_socket=box.runtime.socket_path,
                log=process.log_path,
                cdi=box.cdi_dir,
            )
        )
        async with asyncio.TaskGroup() as group:
            workers = PodWorkers(box.api, box.kubelet, box.runtime, box.node_name, retry_s=_RETRY_S, say=story.tell)
            working = group.create_task(workers.run())
            status = await process.wait(timeout_s=None)
            working.cancel()
        story.complain(f"the driver ended with status {status}; see the end of its log:\n{process.log[-2000:]}")
        return _FAILED


def _write_examples(box: ClusterBox, slices: list[JsonObject]) -> None:
    offer = next(offer for offer in read_offers(slices) if offer.cpus)
    (box.folder / "claim.yaml").write_text(example_claim(offer, example_cpus(offer)))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "exclusive-cores"},
        "spec": {
            "nodeName": box.node_name,
            "resourceClaims": [{"name": "cpus", "resourceClaimName": "exclusive-cores-claim"}],
            "containers": [{"name": "work", "image": "none", "resources": {"claims": [{"name": "cpus"}]}}],
        },
    }
    (box.folder / "pod.yaml").write_text(json.dumps(pod, indent=2))
