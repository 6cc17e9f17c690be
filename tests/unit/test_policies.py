# SPDX-License-Identifier: Apache-2.0
"""Which placement counts: the node's, a DeviceClass's or the claim's, and what is refused in any of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.claims import FROM_CLAIM, FROM_CLASS, AllocatedClaim, DeviceResult, OpaqueConfig
from driver.errors import ClaimError
from driver.names import claim_uid
from driver.parameters import PLACEMENT_CHOICES
from driver.policies import placements


def config(
    placement: object, *requests: str, source: str = FROM_CLAIM, cpuset: str | None = None, version: str = "v1alpha1"
) -> OpaqueConfig:
    cpu_config = {"placement": placement} if cpuset is None else {"placement": placement, "cpuset": cpuset}
    return OpaqueConfig(source=source, requests=requests, parameters={"apiVersion": version, "cpuConfig": cpu_config})


def claim(*configs: OpaqueConfig, requests: tuple[str, ...] = ("cpus",)) -> AllocatedClaim:
    return AllocatedClaim(
        uid=claim_uid("11111111-aaaa"),
        namespace="default",
        name="claim",
        generation=1,
        pod_claim_name=None,
        results=tuple(
            DeviceResult(request=request, pool="node-a", device="cpudevnuma000", cpus=1) for request in requests
        ),
        configs=configs,
        request_counts={},
        fingerprint="",
    )


def test_without_a_word_of_anybody_the_nodes_placement_counts() -> None:
    assert placements(claim(), {}) == {"cpus": {}}
    assert placements(claim(), {"spread": "cores"}) == {"cpus": {"spread": "cores"}}


def test_the_claim_beats_the_class_beats_the_node_key_by_key() -> None:
    node = {"spread": "cores", "numa": "distribute", "coreType": "e-core"}
    of_class = config({"fullCores": "require", "numa": "pack", "coreType": "any"}, source=FROM_CLASS)
    own = config({"coreType": "p-core"})
    expected = {"spread": "cores", "fullCores": "require", "numa": "pack", "coreType": "p-core"}
    # The source counts, not the place in the list.
    assert placements(claim(of_class, own), node) == placements(claim(own, of_class), node) == {"cpus": expected}
    assert node == {"spread": "cores", "numa": "distribute", "coreType": "e-core"}


def test_of_two_of_one_source_the_later_wins() -> None:
    one, two = config({"spread": "cores", "numa": "distribute"}), config({"spread": "none"})
    assert placements(claim(one, two), {}) == {"cpus": {"spread": "none", "numa": "distribute"}}
    assert placements(claim(two, one), {}) == {"cpus": {"spread": "cores", "numa": "distribute"}}


def test_a_config_is_for_the_requests_it_names() -> None:
    configs = (
        config({"spread": "cores"}, "a"),
        config({"numa": "distribute"}, "b/x"),
        config({"coreType": "p-core"}, "b"),
        config({"fullCores": "require"}),
        config({"spread": "cores"}, "b/y"),
    )
    assert placements(claim(*configs, requests=("a", "b/x", "c", "a")), {}) == {
        "a": {"spread": "cores", "fullCores": "require"},
        "b/x": {"numa": "distribute", "coreType": "p-core", "fullCores": "require"},
        "c": {"fullCores": "require"},
    }


@pytest.mark.parametrize(("source", "whose"), [(FROM_CLAIM, "the claim"), (FROM_CLASS, "a DeviceClass")])
def test_a_cpuset_is_refused_with_where_it_would_be_right(source: str, whose: str) -> None:
    with pytest.raises(ClaimError) as refusal:
        placements(claim(config({}, "cpus", source=source, cpuset="2-5")), {})
    assert type(refusal.value) is ClaimError
    assert str(refusal.value) == (
        f"request \"cpus\": {whose} gives it the cpuset '2-5', but on this node the driver itself chooses the CPUs; "
        "expected no cpuset, or allocator: external in the driver's configuration"
    )


def test_a_cpuset_beside_a_good_placement_is_refused_too() -> None:
    with pytest.raises(ClaimError, match="gives it the cpuset"):
        placements(claim(config({"spread": "cores"}), config({}, cpuset="0-4294967295")), {})


def test_what_is_wrong_in_a_config_for_others_does_not_matter() -> None:
    wrong = (config({}, "other", cpuset="2"), config({"bad": "x"}, "cpus/sub"), config(7, "a", source=FROM_CLASS))
    assert placements(claim(*wrong), {}) == {"cpus": {}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            config({"spread": "threads"}, source=FROM_CLASS),
            'request "cpus", configured by a DeviceClass: '
            "cpuConfig.placement.spread 'threads' is unknown; expected none or cores",
        ),
        (
            config({"colour": "red"}),
            "request \"cpus\", configured by the claim: cpuConfig.placement has no key 'colour'; "
            "expected one of spread, fullCores, numa, coreType",
        ),
        (
            config({}, version="v2"),
            "request \"cpus\", configured by the claim: apiVersion 'v2' of the opaque parameters is not supported; "
            'expected "v1alpha1"',
        ),
        (
            OpaqueConfig(source=FROM_CLAIM, requests=("cpus",), parameters=None),
            'request "cpus", configured by the claim: the opaque parameters are missing; '
            "expected an object with apiVersion and cpuConfig",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(wrong: OpaqueConfig, message: str) -> None:
    with pytest.raises(ClaimError) as refusal:
        placements(claim(wrong), {})
    assert str(refusal.value) == message


def test_a_config_without_placement_changes_nothing() -> None:
    bare = OpaqueConfig(source=FROM_CLAIM, requests=(), parameters={"apiVersion": "v1alpha1"})
    assert placements(claim(bare, config(None)), {"numa": "distribute"}) == {"cpus": {"numa": "distribute"}}


PLACEMENT = st.fixed_dictionaries(
    {}, optional={key: st.sampled_from(PLACEMENT_CHOICES[key]) for key in PLACEMENT_CHOICES}
)


@given(PLACEMENT, st.lists(st.tuples(st.sampled_from([FROM_CLASS, FROM_CLAIM]), PLACEMENT), max_size=6))
def test_each_key_has_the_last_word_of_the_strongest(
    default: Mapping[str, str], said: list[tuple[str, Mapping[str, str]]]
) -> None:
    found = placements(claim(*(config(placement, source=source) for source, placement in said)), default)["cpus"]
    ordered = [default, *(p for s, p in said if s == FROM_CLASS), *(p for s, p in said if s == FROM_CLAIM)]
    for key in PLACEMENT_CHOICES:
        words = [placement[key] for placement in ordered if key in placement]
        assert found.get(key) == (words[-1] if words else None)
