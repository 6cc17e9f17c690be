# SPDX-License-Identifier: Apache-2.0
"""The chart's ClusterRole is enough for all that the driver does, upstream's is too, and none of it is too much.

The driver is a process here, with a token of the chart's ServiceAccount as a pod of it would have, so that one is tried
in seconds.
"""

from __future__ import annotations

import copy
import re

import pytest
import pytest_asyncio
import yaml

from driver.names import DRIVER_NAME
from e2e.cluster.api import SLICES
from e2e.cluster.cluster import CHART, NAMESPACE, NODE_NAME, RELEASE
from e2e.cluster.manifests import as_text, claim, cpuset_config, pod
from e2e.endpoints import is_ready

ROLES = "/apis/rbac.authorization.k8s.io/v1/clusterroles"

# Of dra-driver-cpu, as published.
UPSTREAM = [
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
    {
        "apiGroups": ["resource.k8s.io"],
        "resources": ["resourceslices"],
        "verbs": ["list", "watch", "create", "update", "delete"],
    },
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]},
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims/status"], "verbs": ["patch", "update"]},
    {
        "apiGroups": ["resource.k8s.io"],
        "resources": ["resourceclaims/driver"],
        "resourceNames": [DRIVER_NAME],
        "verbs": ["associated-node:patch", "associated-node:update"],
    },
]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def account(undeployed):
    """What the chart installs, without its DaemonSet; the kubeconfig of its ServiceAccount."""
    text = await undeployed.helm("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}")
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "DeviceClass")
    objects = [each for each in yaml.safe_load_all(text) if each and each["kind"] in kinds]
    await undeployed.apply(as_text(*objects))
    bound_to = ("--bound-object-kind=Node", f"--bound-object-name={NODE_NAME}")
    token = await undeployed.kubectl("create", "token", RELEASE, f"--namespace={NAMESPACE}", *bound_to)
    yield undeployed.control_plane.token_kubeconfig("driver", token.strip())
    await undeployed.kubectl("delete", "--filename=-", input=as_text(*objects))


@pytest_asyncio.fixture(loop_scope="session")
async def driver(cluster, account):
    """Start the driver as the ServiceAccount: `await driver()`. Its slices go when it does."""

    async def start():
        await cluster.start_driver({"allocator": "external", "groupBy": "machine"}, "--v=4", kubeconfig=account)

    yield start
    await cluster.clear()
    await cluster.driver.terminate()
    for piece in await cluster.slices():
        await cluster.api.delete(f"{SLICES}/{piece['metadata']['name']}")


@pytest_asyncio.fixture(loop_scope="session")
async def role(cluster, account, driver):
    """Give the ServiceAccount other rights: `await role(rules)`. Its own ones come back in the end."""
    path = f"{ROLES}/{RELEASE}"
    own = (await cluster.api.get(path))["rules"]

    async def replace(rules):
        await cluster.api.replace(path, {**await cluster.api.get(path), "rules": rules})

    replace.own = own
    yield replace
    await replace(own)


# What is done, and how it is seen that the driver has done its part.


async def nothing(cluster):
    pass


async def published(cluster):
    return bool(await cluster.slices())


async def ready(cluster):
    return await is_ready(cluster.driver_url)


async def spoil_slice(cluster):
    await cluster.until(lambda: published(cluster), "slices are published")
    [piece] = await cluster.slices()
    del piece["spec"]["devices"]
    await cluster.api.replace(f"{SLICES}/{piece['metadata']['name']}", piece)


async def repaired(cluster):
    return all("devices" in piece["spec"] for piece in await cluster.slices())


async def add_slice(cluster):
    await cluster.until(lambda: published(cluster), "slices are published")
    [piece] = await cluster.slices()
    await cluster.api.create(SLICES, {**piece, "metadata": {"name": "stray"}})


async def tidied(cluster):
    return len(await cluster.slices()) == 1


async def use_claim(cluster):
    await cluster.until(lambda: published(cluster), "slices are published")
    await cluster.apply(as_text(claim("cpus", config=[cpuset_config("1")]), pod("user", "cpus")))


async def prepared(cluster):
    return "main" in await cluster.pids("user") and await cluster.cpus("user") == "1"


async def told(cluster):
    devices = (await cluster.claim("cpus")).get("status", {}).get("devices", ())
    return [device["data"] for device in devices] == [{"cpuset": "1"}]


RIGHTS = {
    ("nodes", "get"): (nothing, published),
    ("resourceslices", "list"): (nothing, published),
    ("resourceslices", "watch"): (nothing, ready),
    ("resourceslices", "create"): (nothing, published),
    ("resourceslices", "update"): (spoil_slice, repaired),
    ("resourceslices", "delete"): (add_slice, tidied),
    ("resourceclaims", "get"): (use_claim, prepared),
    ("resourceclaims/status", "patch"): (use_claim, told),
    ("resourceclaims/driver", "associated-node:patch"): (use_claim, told),
}


def single(rules):
    """Return each right of some rules by itself."""
    return {(each, verb) for rule in rules for each in rule["resources"] for verb in rule["verbs"]}


def without(rules, resource, verb):
    """Return rules that lack one right."""
    fewer = copy.deepcopy(rules)
    for rule in fewer:
        if resource in rule["resources"]:
            assert rule["resources"] == [resource]
            rule["verbs"].remove(verb)
    return [rule for rule in fewer if rule["verbs"]]


@pytest.mark.parametrize("rules", [None, UPSTREAM], ids=["chart", "upstream"])
async def test_enough(cluster, driver, role, rules):
    await role(rules or role.own)
    await driver()
    done = set()
    for act, works in RIGHTS.values():
        if act not in done:
            done.add(act)
            await act(cluster)
        await cluster.until(lambda works=works: works(cluster), works.__name__)
    assert not refused(cluster.driver.log)


async def test_each_right_is_tried(role):
    assert single(role.own) == set(RIGHTS)


@pytest.mark.parametrize(("resource", "verb"), RIGHTS)
async def test_one_right_fewer(cluster, driver, role, resource, verb):
    act, works = RIGHTS[resource, verb]
    await role(without(role.own, resource, verb))
    await driver()
    await act(cluster)

    async def is_refused():
        return bool(refused(cluster.driver.log))

    await cluster.until(is_refused, "the driver is refused something")
    assert refused(cluster.driver.log) == {(resource, verb)}
    assert not await works(cluster)


def refused(log):
    """Return the rights for whose lack the API server has refused something."""
    return {(resource, verb) for verb, resource in re.findall(r'cannot (\S+) resource \\?"([^"\\]+)', log)}
