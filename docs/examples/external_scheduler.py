#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A scheduler outside of Kubernetes that gives claims exact CPUs: the shortest one that does all that it has to.

It serves pods with ``schedulerName: cpu-pinner`` and claims of the device class ``dra.cpu``, on nodes whose driver has
``allocator: external``. It needs Python and kubectl, nothing else; ``external-scheduler-rights.yaml`` has the rights.

    external_scheduler.py [--kubeconfig FILE] [--name cpu-pinner]

What it reads
    ResourceSlices of the driver: each device tells its CPUs, as ``dra.cpu/cpuIDs`` or ``dra.cpu/cpuIDsStrided``.
    ResourceClaims: which CPUs are given away is what allocated claims say; nothing else counts.

What it writes for each claim, in this order
    1. The finalizer ``resource.kubernetes.io/delete-protection``: without it the claim could be deleted while it is in
       use, and nobody would take the allocation back once its pod has ended.
    2. ``status.allocation`` and ``status.reservedFor`` in one update, with the resourceVersion that was read: who else
       has changed the claim wins. The driver takes the CPUs from ``devices.config``.
    3. The Binding of the pod, after all of its claims. From then on it is the kubelet's.

It chooses the lowest CPUs that are free, and looks at nothing but CPUs: memory, taints or affinity are left to you.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
import uuid

DRIVER = "dra.cpu"
CAPACITY = f"{DRIVER}/cpu"
MOST_CPUS = 1 << 16
FINALIZER = "resource.kubernetes.io/delete-protection"


class Waits(Exception):
    """A pod cannot be scheduled now; the text says why."""


class Kubectl:
    """The API server. kubectl sends JSON without spaces, which matters: see `allocation`."""

    def __init__(self, kubeconfig):
        self._command = ["kubectl", *([f"--kubeconfig={kubeconfig}"] if kubeconfig else [])]

    def run(self, *arguments, body=None):
        text = None if body is None else json.dumps(body)
        done = subprocess.run([*self._command, *arguments], input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Waits(done.stderr.strip())
        return json.loads(done.stdout or "null")

    def list(self, *what):
        return self.run("get", *what, "--output=json")["items"]

    def replace(self, body, *flags):
        return self.run("replace", *flags, "--filename=-", "--output=json", body=body)

    def create_raw(self, path, body):
        self.run("create", f"--raw={path}", "--filename=-", body=body)


def parse_cpus(text):
    """Return the CPUs of a list such as ``1-15,33-47``, or with strides ``0-110:1/2``: the first 1 of every 2."""
    cpus = set()
    for part in filter(None, text.split(",")):
        first, last, used, group = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+)/(\d+))?)?", part).groups()
        if int(last or first) >= MOST_CPUS:
            raise ValueError(text)
        span = range(int(first), int(last or first) + 1)
        cpus.update(cpu for i, cpu in enumerate(span) if i % int(group or 1) < int(used or 1))
    return cpus


def format_cpus(cpus):
    """Return a list of CPUs with ranges."""
    ranges = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def offers(slices):
    """Return the CPUs of each device, by pool and device. A pool has the name of its node."""
    latest = {}
    for piece in slices:
        pool = piece["spec"]["pool"]
        latest[pool["name"]] = max(pool["generation"], latest.get(pool["name"], 0))
    found = {}
    for piece in slices:
        pool = piece["spec"]["pool"]
        # Of an older generation some slices may be left for a moment.
        if pool["generation"] == latest[pool["name"]]:
            for device in piece["spec"].get("devices") or ():
                values = device["attributes"]
                for name in (f"{DRIVER}/cpuIDs", f"{DRIVER}/cpuIDsStrided"):
                    if name in values:
                        found[pool["name"], device["name"]] = parse_cpus(values[name]["string"])
    return found


def given(claims):
    """Return the CPUs of each pool that allocated claims have."""
    taken = {}
    for claim in claims:
        status = claim.get("status", {})
        devices = status.get("allocation", {}).get("devices", {})
        for result in devices.get("results", ()):
            if result["driver"] == DRIVER:
                cpus = named(result, devices.get("config", ())) or told(result, status.get("devices", ()))
                taken.setdefault(result["pool"], set()).update(cpus)
    return taken


def named(result, configs):
    """Return the CPUs that whoever allocated a claim has named for a result."""
    cpus = set()
    requests = {result["request"], result["request"].partition("/")[0]}
    for config in configs:
        opaque = config.get("opaque", {})
        if opaque.get("driver") == DRIVER and (not config.get("requests") or requests & {*config["requests"]}):
            try:
                cpus |= parse_cpus(opaque["parameters"]["cpuConfig"]["cpuset"])
            except (AttributeError, KeyError, TypeError, ValueError):
                continue  # anybody may have written it; what is no list of CPUs the driver gives to nobody
    return cpus


def told(result, devices):
    """Return the CPUs that the driver has given for a result: it chose them itself, before you came."""
    key = ("driver", "pool", "device", "shareID")
    data = [device.get("data") or {} for device in devices if all(device.get(k) == result.get(k) for k in key)]
    return set().union(*(parse_cpus(each.get("cpuset") or each.get("cpusetStrided", "")) for each in data))


def wanted(claim):
    """Return how many CPUs each request of a claim asks for."""
    counts = {}
    for request in claim["spec"]["devices"]["requests"]:
        exactly = request.get("exactly", {})
        if exactly.get("deviceClassName") != DRIVER or exactly.get("count", 1) != 1:
            raise Waits(f"request {request['name']} is not for one device of the class {DRIVER}")
        try:
            counts[request["name"]] = int(exactly["capacity"]["requests"][CAPACITY])
        except (KeyError, ValueError):
            raise Waits(f"request {request['name']} does not say how many CPUs, as a whole number") from None
    return counts


def choose(node, claims, devices, taken):
    """Return device and CPUs on a node for each request of each claim, by the claim's name, or None."""
    free = {device: cpus - taken.get(node, set()) for (pool, device), cpus in sorted(devices.items()) if pool == node}
    chosen = {}
    for claim in claims:
        for request, count in wanted(claim).items():
            device = next((name for name, cpus in free.items() if len(cpus) >= count), None)
            if device is None:
                return None
            cpus = set(sorted(free[device])[:count])
            free = {name: left - cpus for name, left in free.items()}
            chosen.setdefault(claim["metadata"]["name"], {})[request] = (device, cpus)
    return chosen


def allocation(node, choices):
    """Return what goes into a claim's ``status.allocation``, which nobody may change afterwards.

    A client of your own must send it without spaces between the parts of the JSON text. The API server keeps the
    ``parameters`` as they were sent, everybody who updates the claim later sends them without, and that is a change.
    """
    results, configs = [], []
    for request, (device, cpus) in choices.items():
        results.append(
            {
                "request": request,
                "driver": DRIVER,
                "pool": node,
                "device": device,
                # A share of a device that others have shares of too; it must be a UUID.
                "shareID": str(uuid.uuid4()),
                "consumedCapacity": {CAPACITY: str(len(cpus))},
            }
        )
        parameters = {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": format_cpus(cpus)}}
        opaque = {"driver": DRIVER, "parameters": parameters}
        configs.append({"source": "FromClaim", "requests": [request], "opaque": opaque})
    # In exactly this form: a driver may then be allowed no more than to write to claims of its own node.
    is_node = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        # Without it kube-scheduler would add one, if it ever sees the claim, and fail: that is a change too.
        "allocationTimestamp": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "devices": {"results": results, "config": configs},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [is_node]}]},
    }


def claims_of(pod, claims):
    """Return the claims that a pod names, itself or by templates."""
    made = {each["name"]: each.get("resourceClaimName") for each in pod["status"].get("resourceClaimStatuses", ())}
    found = []
    for reference in pod["spec"].get("resourceClaims", ()):
        name = reference.get("resourceClaimName") or made.get(reference["name"])
        by_name = [
            claim
            for claim in claims
            if claim["metadata"]["namespace"] == pod["metadata"]["namespace"] and claim["metadata"]["name"] == name
        ]
        if not by_name or "deletionTimestamp" in by_name[0]["metadata"]:
            raise Waits(f"its claim {name or reference['name']} is not there")
        found += by_name
    return found


def node_of(claim):
    """Return the node on which an allocated claim is usable."""
    return claim["status"]["allocation"]["devices"]["results"][0]["pool"]


def schedule(kubectl, pod):
    """Give a pod's claims their CPUs, and the pod its node."""
    everything = kubectl.list("resourceclaims", "--all-namespaces")
    devices = offers(kubectl.list("resourceslices", f"--field-selector=spec.driver={DRIVER}"))
    claims = claims_of(pod, everything)
    done = [claim for claim in claims if "allocation" in claim.get("status", {})]
    todo = [claim for claim in claims if claim not in done]
    nodes = {node_of(claim) for claim in done} or {pool for pool, _ in devices}
    if not nodes:
        raise Waits("no driver offers CPUs")
    taken = given(everything)
    fits = {node: choose(node, todo, devices, taken) for node in sorted(nodes)}
    node = next((name for name, choices in fits.items() if choices is not None), None)
    if node is None or len({node_of(claim) for claim in done}) > 1:
        raise Waits(f"no node has enough CPUs left; looked at {', '.join(sorted(nodes))}")

    for claim in claims:
        if FINALIZER not in claim["metadata"].get("finalizers", ()):
            claim["metadata"].setdefault("finalizers", []).append(FINALIZER)
            claim = kubectl.replace(claim)
        status = claim.setdefault("status", {})
        status.setdefault("allocation", allocation(node, fits[node].get(claim["metadata"]["name"], {})))
        user = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        if user not in status.setdefault("reservedFor", []):
            status["reservedFor"].append(user)
            kubectl.replace(claim, "--subresource=status")
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
    binding["target"] = {"apiVersion": "v1", "kind": "Node", "name": node}
    kubectl.create_raw(f"/api/v1/namespaces/{namespace}/pods/{name}/binding", binding)
    return node


def main():
    parser = argparse.ArgumentParser(description="Give claims of the driver dra.cpu exact CPUs.")
    parser.add_argument("--kubeconfig", help="as kubectl takes it")
    parser.add_argument("--name", default="cpu-pinner", help="which schedulerName it serves (%(default)s)")
    options = parser.parse_args()
    kubectl = Kubectl(options.kubeconfig)
    mine = f"--field-selector=spec.schedulerName={options.name},spec.nodeName=,status.phase=Pending"
    said = {}
    print(f"serving pods with schedulerName {options.name}", flush=True)
    while True:
        try:
            pods = kubectl.list("pods", "--all-namespaces", mine)
        except Waits as error:
            pods = []
            print(f"cannot list pods: {error}", file=sys.stderr, flush=True)
        for pod in pods:
            key = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            if "deletionTimestamp" in pod["metadata"] or pod["spec"].get("schedulingGates"):
                continue
            try:
                print(f"pod {key} goes to node {schedule(kubectl, pod)}", flush=True)
            except Waits as reason:
                if said.get(key) != str(reason):
                    print(f"pod {key} waits: {reason}", flush=True)
                said[key] = str(reason)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
