# SPDX-License-Identifier: Apache-2.0
"""The wanted slices, the comparison, and the plan: executed on a model of the server from any starting state."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.slices import (
    Plan,
    Pool,
    content_of,
    differences,
    divide,
    has_list_attributes,
    plan_writes,
    same,
)

NODE, UID = "node-7", "6c6f9e9c-0000-4000-8000-000000000007"
Object = dict[str, Any]


def device(name: str, cpus: int = 4, **more: object) -> Object:
    return {
        "name": name,
        "allowMultipleAllocations": True,
        "attributes": {"dra.cpu/numCPUs": {"int": cpus}, "dra.cpu/smtEnabled": {"bool": False}},
        "capacity": {
            "dra.cpu/cpu": {
                "value": str(cpus),
                "requestPolicy": {"default": str(cpus), "validRange": {"min": "1", "step": "1"}},
            }
        },
        **more,
    }


def devices(count: int) -> list[Object]:
    return [device(f"cpudev{number:03}") for number in range(count)]


def pool_of(count: int, *, node: str = NODE) -> Pool:
    return divide(devices(count), node_name=node, node_uid=UID)


class Server:
    """As much of the API server as a plan can meet: preconditions, immutable fields, generated names."""

    def __init__(self, stored: Iterable[Object] = ()) -> None:
        self.slices: dict[str, Object] = {}
        self.version = 0
        self.operations: list[str] = []
        for item in stored:
            item = copy.deepcopy(item)
            self.slices[item["metadata"]["name"]] = self._versioned(item)

    def _versioned(self, item: Object) -> Object:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        item["metadata"].setdefault("uid", f"uid-{self.version}")
        return item

    def execute(self, plan: Plan) -> None:
        for item in plan.delete:
            self.operations.append("delete")
            known = self.slices.pop(item["metadata"]["name"])
            assert known["metadata"]["uid"] == item["metadata"]["uid"]
            assert known["metadata"]["resourceVersion"] == item["metadata"]["resourceVersion"]
        for write in plan.replace:
            self.operations.append("replace")
            body = copy.deepcopy(write.body)
            known = self.slices[body["metadata"]["name"]]
            assert body["metadata"]["resourceVersion"] == known["metadata"]["resourceVersion"]
            for immutable in ("driver", "nodeName"):
                assert body["spec"][immutable] == known["spec"][immutable]
            assert body["spec"]["pool"]["name"] == known["spec"]["pool"]["name"]
            self.slices[body["metadata"]["name"]] = self._versioned(body)
        for write in plan.create:
            self.operations.append("create")
            body = copy.deepcopy(write.body)
            body["metadata"]["name"] = f"{body['metadata']['generateName'][:58]}{self.version:05}"
            self.slices[body["metadata"]["name"]] = self._versioned(body)
            assert len(body["metadata"]["name"]) <= 63

    def plan(self, pool: Pool) -> Plan:
        return plan_writes(pool, self.slices.values(), {})


def published(pool: Pool) -> Server:
    server = Server()
    server.execute(server.plan(pool))
    server.operations.clear()
    return server


# --- what the slices should be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "sizes"), [(0, [0]), (1, [1]), (128, [128]), (129, [128, 1]), (300, [128, 128, 44])])
def test_devices_are_divided_in_their_order(count: int, sizes: list[int]) -> None:
    pool = pool_of(count)

    assert [len(chunk) for chunk in pool.chunks] == sizes
    assert [item for chunk in pool.chunks for item in chunk] == devices(count)


@pytest.mark.parametrize("kind", ["ints", "bools", "strings", "versions"])
def test_one_list_attribute_makes_all_slices_smaller(kind: str) -> None:
    many = devices(129)
    many[100]["attributes"]["resource.kubernetes.io/pcieRoot"] = {kind: ["x"]}

    assert has_list_attributes(many)
    assert [len(chunk) for chunk in divide(many, node_name=NODE, node_uid=UID).chunks] == [64, 64, 1]


def test_devices_without_attributes_have_no_lists() -> None:
    assert not has_list_attributes([{"name": "a"}, {"name": "b", "attributes": None}, device("c")])


def test_a_new_slice_has_the_name_owner_and_pool_that_others_expect() -> None:
    body = pool_of(129).new_slice(1, 5)

    assert (body["apiVersion"], body["kind"]) == ("resource.k8s.io/v1", "ResourceSlice")
    assert body["metadata"] == {
        "generateName": f"00001-dra.cpu-{NODE}-",
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": UID, "controller": True}],
    }
    assert body["spec"] == {
        "driver": "dra.cpu",
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 5, "resourceSliceCount": 2},
        "devices": [device("cpudev128")],
    }


def test_names_get_longer_numbers_when_five_digits_do_not_suffice() -> None:
    few = Pool(node_name="n", node_uid=UID, chunks=((),) * 0x100000)
    many = Pool(node_name="n", node_uid=UID, chunks=((),) * 0x100001)

    assert few.new_slice(0xFFFFF, 1)["metadata"]["generateName"] == "fffff-dra.cpu-n-"
    assert many.new_slice(0, 1)["metadata"]["generateName"] == "000000-dra.cpu-n-"


@pytest.mark.parametrize("node", ["n" * 253, "n" * 43 + "." + "m" * 100, "a.b-" * 60 + "c"])
def test_a_long_node_name_does_not_make_an_invalid_slice_name(node: str) -> None:
    prefix = pool_of(1, node=node).new_slice(0, 1)["metadata"]["generateName"]

    assert prefix.startswith("00000-dra.cpu-")
    assert len(prefix) <= 58
    assert prefix.endswith("-")
    assert prefix[-2] not in "-."


def test_a_replacement_keeps_what_others_added_and_drops_their_owner() -> None:
    stored = {
        "metadata": {
            "name": "00000-dra.cpu-x",
            "uid": "u",
            "resourceVersion": "7",
            "labels": {"team": "hpc"},
            "annotations": {"note": "x"},
            "finalizers": ["example.com/keep"],
            "managedFields": [{"manager": "dra-driver-cpu"}],
            "ownerReferences": [{"kind": "Pod"}],
        },
        "spec": {},
    }

    metadata = pool_of(1).next_version(0, 3, stored)["metadata"]

    assert metadata.pop("ownerReferences")[0]["kind"] == "Node"
    assert metadata == {
        key: value for key, value in stored["metadata"].items() if key not in ("managedFields", "ownerReferences")
    }


# --- the comparison --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"a": None}, {}),
        ({"a": []}, {"a": None}),
        ({"a": {}}, {"b": []}),
        ({"capacity": {"x": {"value": "1000"}}}, {"capacity": {"x": {"value": "1k"}}}),
        ({"capacity": {"x": {"value": 4}}}, {"capacity": {"x": {"value": "4000m"}}}),
        (
            {"capacity": {"x": {"requestPolicy": {"validValues": ["1", "2048"]}}}},
            {"capacity": {"x": {"requestPolicy": {"validValues": ["1", "2Ki"], "validRange": None}}}},
        ),
        (
            {"nodeAllocatableResources": {"cpu": {"mapping": {"capacityKey": "k", "capacityMultiplier": "1"}}}},
            {"nodeAllocatableResources": {"cpu": {"mapping": {"capacityKey": "k", "capacityMultiplier": "1000m"}}}},
        ),
    ],
)
def test_other_spellings_are_the_same(wanted: Object, found: Object) -> None:
    assert same(wanted, found)
    assert same(found, wanted)


@pytest.mark.parametrize(
    ("wanted", "found", "paths"),
    [
        ({"a": False}, {}, ["a"]),
        ({"a": 0}, {}, ["a"]),
        ({"attributes": {"x": {"string": "1000"}}}, {"attributes": {"x": {"string": "1k"}}}, ["attributes.x.string"]),
        ({"capacity": {"x": {"value": "1"}}}, {"capacity": {"x": {"value": "2"}}}, ["capacity.x.value"]),
        ({"capacity": {"x": {"value": "1"}}}, {"capacity": {"x": {"value": "junk"}}}, ["capacity.x.value"]),
        ({"capacity": {"dra.cpu/cpu": {"value": "1"}}}, {"capacity": {}}, ["capacity[dra.cpu/cpu]"]),
        ({"capacity": {"dra.cpu/cpu": {"value": "1"}}}, {}, ["capacity"]),
        (
            {"capacity": {"dra.cpu/cpu": {"value": "1"}, "a": {}}},
            {"capacity": {"a": {"value": "1"}}},
            ["capacity[dra.cpu/cpu]", "capacity.a.value"],
        ),
        ({"l": [1, 2]}, {"l": [2, 1]}, ["l[0]", "l[1]"]),
        ({"l": [1]}, {"l": [1, 2]}, ["l[1]"]),
        ({"l": [1]}, {"l": {"0": 1}}, ["l"]),
        ({"l": [{"a": 1, "b": {"c": 1}}]}, {"l": [{"a": 1}]}, ["l[0].b"]),
        ({}, {"new": {"deep": [[1]]}}, ["new"]),
    ],
)
def test_differences_are_named_where_they_begin(wanted: Object, found: Object, paths: list[str]) -> None:
    assert list(differences(wanted, found)) == paths
    assert sorted(differences(found, wanted)) == sorted(paths)


def test_a_deeply_nested_answer_is_compared_without_descending_into_it() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]

    assert list(differences({"a": 1}, {"a": deep})) == ["a"]


# --- the plan, case by case ------------------------------------------------------------------------------------------


def generations(server: Server) -> set[int]:
    return {item["spec"]["pool"]["generation"] for item in server.slices.values()}


def test_a_new_pool_begins_at_generation_one() -> None:
    server = published(pool_of(300))

    assert generations(server) == {1}
    assert [content_of(item) for item in server.slices.values()] == [pool_of(300).content(i) for i in range(3)]
    assert not server.plan(pool_of(300))


def test_a_pool_without_devices_is_one_slice_that_says_the_driver_is_up() -> None:
    (only,) = published(pool_of(0)).slices.values()

    assert only["spec"]["devices"] == []
    assert only["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}


def test_one_changed_slice_is_replaced_within_its_generation() -> None:
    server = published(pool_of(300))
    many = devices(300)
    many[200] = device("cpudev200", cpus=5)
    pool = divide(many, node_name=NODE, node_uid=UID)

    server.execute(server.plan(pool))

    assert server.operations == ["replace"]
    assert generations(server) == {1}
    assert not server.plan(pool)


def test_two_changed_slices_begin_a_generation_of_all() -> None:
    server = published(pool_of(300))
    many = devices(300)
    many[0], many[200] = device("cpudev000", cpus=5), device("cpudev200", cpus=5)

    server.execute(server.plan(divide(many, node_name=NODE, node_uid=UID)))

    assert server.operations == ["replace"] * 3
    assert generations(server) == {2}


def test_a_missing_slice_begins_a_generation_of_all() -> None:
    server = published(pool_of(300))
    del server.slices[sorted(server.slices)[1]]

    server.execute(server.plan(pool_of(300)))

    assert server.operations == ["replace", "replace", "create"]
    assert generations(server) == {2}


def test_fewer_slices_delete_before_they_replace() -> None:
    server = published(pool_of(129))

    server.execute(server.plan(pool_of(5)))

    assert server.operations == ["delete", "replace"]
    assert generations(server) == {1}


def test_the_order_of_devices_counts() -> None:
    server = published(pool_of(2))

    assert server.plan(divide(devices(2)[::-1], node_name=NODE, node_uid=UID)).replace


def test_other_spellings_are_not_written_again() -> None:
    server = published(divide([device("a", 1000)], node_name=NODE, node_uid=UID))
    (stored,) = server.slices.values()
    capacity = stored["spec"]["devices"][0]["capacity"]["dra.cpu/cpu"]
    capacity["value"] = capacity["requestPolicy"]["default"] = "1k"
    stored["spec"]["sharedCounters"] = None

    assert not server.plan(divide([device("a", 1000)], node_name=NODE, node_uid=UID))


def test_what_the_server_made_of_a_slice_is_accepted_until_that_changes_too() -> None:
    pool = divide([device("a", nodeAllocatableResources={"cpu": {}})], node_name=NODE, node_uid=UID)
    server = published(pool)
    (stored,) = server.slices.values()
    del stored["spec"]["devices"][0]["nodeAllocatableResources"]
    accepted = {0: copy.deepcopy(content_of(stored))}

    assert plan_writes(pool, [stored], {}).replace
    assert not plan_writes(pool, [stored], accepted)
    stored["spec"]["devices"][0]["name"] = "b"
    assert plan_writes(pool, [stored], accepted).replace[0].body["spec"]["devices"] == list(pool.chunks[0])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("metadata", "ownerReferences"), None),
        (("metadata", "ownerReferences"), [{"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "an older one"}]),
        (("spec", "pool", "resourceSliceCount"), 2),
        (("spec", "devices"), None),
        (("spec", "sharedCounters"), [{"name": "x"}]),
        (("spec", "skipNodeOperations"), ["*"]),
    ],
)
def test_whatever_others_change_is_changed_back(place: tuple[str, ...], value: object) -> None:
    pool = pool_of(3)
    server = published(pool)
    (stored,) = server.slices.values()
    *path, last = place
    for key in path:
        stored = stored[key]
    stored[last] = value

    server.execute(server.plan(pool))

    assert server.operations == ["replace"]
    assert content_of(next(iter(server.slices.values()))) == pool.content(0)


@pytest.mark.parametrize(
    "name",
    ["node-7-dra.cpu-x2v9f", "000000-dra.cpu-node-7-abcde", "0000-dra.cpu-node-7-abcde", "00001-dra.cpu-node-7-abcde",
     "0000A-dra.cpu-node-7-abcde", "0000٣-dra.cpu-node-7-abcde"],
)  # fmt: skip
def test_slices_with_names_that_are_not_of_the_pool_are_made_anew(name: str) -> None:
    pool = pool_of(3)
    server = published(pool)
    (stored,) = server.slices.values()
    stored["metadata"]["name"] = name
    server = Server([stored])

    server.execute(server.plan(pool))

    assert server.operations == ["delete", "create"]
    assert generations(server) == {2}


def test_a_slice_of_another_pool_of_ours_is_deleted_and_does_not_count() -> None:
    pool = pool_of(3)
    server = published(pool)
    (stored,) = server.slices.values()
    other = copy.deepcopy(stored)
    other["metadata"].update(name="00000-other", uid="other")
    other["spec"]["pool"] = {"name": "elsewhere", "generation": 9, "resourceSliceCount": 1}

    plan = plan_writes(pool, [stored, other], {})

    assert [item["metadata"]["name"] for item in plan.delete] == ["00000-other"]
    assert (plan.generation, plan.replace, plan.create) == (1, (), ())


@pytest.mark.parametrize(("key", "value"), [("driver", "gpu.example.com"), ("nodeName", "node-8"), ("nodeName", None)])
def test_slices_of_others_are_never_touched_even_if_the_server_sends_them(key: str, value: object) -> None:
    (stored,) = published(pool_of(3)).slices.values()
    stored["spec"][key] = value

    plan = plan_writes(pool_of(3), [stored, {"metadata": {"name": "x"}, "spec": None}], {})

    assert not plan.delete
    assert not plan.replace
    assert len(plan.create) == 1


def test_a_slice_that_somebody_keeps_from_being_deleted_is_outdone() -> None:
    pool = pool_of(3)
    server = published(pool)
    (ours,) = server.slices.values()
    theirs = copy.deepcopy(ours)
    theirs["metadata"].update(name="00000-theirs", uid="theirs", deletionTimestamp="2026-11-29T00:00:00Z")
    server = Server([ours, theirs])

    server.execute(server.plan(pool))

    assert server.operations == ["replace"]
    assert server.slices[ours["metadata"]["name"]]["spec"]["pool"]["generation"] == 2
    assert not server.plan(pool)


def test_an_exhausted_generation_starts_over() -> None:
    pool = pool_of(3)
    server = published(pool)
    (stored,) = server.slices.values()
    stored["spec"]["pool"]["generation"] = (1 << 63) - 1

    server.execute(server.plan(pool))

    assert server.operations == ["delete", "create"]
    assert generations(server) == {1}


# --- from any starting state -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leftover:
    """A slice as other drivers, older versions, crashes in the middle of a sync and people leave them."""

    name: str
    pool: str
    driver: str
    generation: int
    slice_count: int
    device_count: int
    reversed: bool
    owner: str
    deleting: bool

    def build(self, number: int) -> Object:
        source = pool_of(self.device_count)
        content = source.content(0)
        metadata = {"name": self.name, "uid": f"uid-{number}", "managedFields": [{"manager": "somebody"}]}
        if self.deleting:
            metadata["deletionTimestamp"] = "2026-11-29T00:00:00Z"
        if self.owner:
            metadata["ownerReferences"] = [*content["metadata"]["ownerReferences"], {"uid": "x"}][self.owner == "other"]
        spec = content["spec"]
        spec["driver"] = self.driver
        spec["pool"] = {"name": self.pool, "generation": self.generation, "resourceSliceCount": self.slice_count}
        if self.reversed:
            spec["devices"].reverse()
        return {"metadata": metadata, "spec": spec}


def leftovers() -> st.SearchStrategy[list[Leftover]]:
    numbered = st.tuples(st.integers(0, 4), st.integers(0, 9)).map(lambda at: f"{at[0]:05x}-dra.cpu-{NODE}-{at[1]}")
    odd = st.integers(0, 9).flatmap(lambda n: st.sampled_from([f"{NODE}-dra.cpu-{n}", f"zzzzz-{n}", f"000001-{n}"]))
    return st.lists(
        st.builds(
            Leftover,
            name=st.one_of(numbered, odd),
            pool=st.sampled_from([NODE, NODE, NODE, "elsewhere"]),
            driver=st.sampled_from(["dra.cpu", "dra.cpu", "dra.cpu", "other.example.com"]),
            generation=st.one_of(st.integers(0, 4), st.sampled_from([1 << 40, (1 << 63) - 1])),
            slice_count=st.sampled_from([1, 2, 3, 7]),
            device_count=st.sampled_from([0, 1, 2, 128]),
            reversed=st.booleans(),
            owner=st.sampled_from(["", "ours", "other"]),
            deleting=st.booleans(),
        ),
        max_size=6,
        unique_by=lambda leftover: leftover.name,
    )


@given(left=leftovers(), count=st.sampled_from([0, 1, 2, 128, 129, 300]))
def test_one_plan_leads_from_anything_to_the_wanted_pool(left: list[Leftover], count: int) -> None:
    pool = pool_of(count)
    server = Server(leftover.build(number) for number, leftover in enumerate(left))
    before = copy.deepcopy(server.slices)
    last = (1 << 63) - 1
    in_pool = [item for item in left if (item.driver, item.pool) == ("dra.cpu", NODE) and item.generation < last]
    newest = max((item.generation for item in in_pool), default=0)

    plan = server.plan(pool)
    server.execute(plan)

    untouchable = {leftover.name for leftover in left if leftover.driver != "dra.cpu" or leftover.deleting}
    assert {name: server.slices[name] for name in untouchable} == {name: before[name] for name in untouchable}
    ours = {name: item for name, item in server.slices.items() if name not in untouchable}
    assert [content_of(ours[name]) for name in sorted(ours)] == [pool.content(i) for i in range(len(pool.chunks))]
    assert {item["spec"]["pool"]["generation"] for item in ours.values()} == {plan.generation}
    assert not server.plan(pool)

    if plan.generation == newest:
        assert not plan.create
        assert len(plan.replace) <= 1
    else:
        assert plan.generation == newest + 1
        assert len(plan.replace) + len(plan.create) == len(pool.chunks)
    # Schedulers must not take a slice that is on its way out for part of the pool.
    assert all(leftover.generation < plan.generation for leftover in in_pool if leftover.deleting)
