# SPDX-License-Identifier: Apache-2.0
"""What each runtime can do, and which events it is asked for."""

from __future__ import annotations

import pytest

from driver.nri.runtimes import Runtime, allows_unsolicited_updates, has_validators
from driver.nri.subscription import CONTAINER_EVENTS, STARTS, VALIDATION, Subscription


def runtime(name="containerd", version="v2.4.2", nri_version="v0.12.3"):
    return Runtime(name=name, version=version, nri_version=nri_version)


def test_the_masks_are_those_that_runtimes_know():
    # Create, PostCreate, PostStart, Update, PostUpdate, Stop and Remove: within 0x07FF, all that NRI 0.9 has.
    assert CONTAINER_EVENTS == 0x07DA
    assert STARTS == 0x0020
    assert VALIDATION == 0x2000


@pytest.mark.parametrize(
    ("name", "version", "nri_version", "expected"),
    [
        ("containerd", "v2.4.2", "v0.12.3", True),
        ("containerd", "2.4.2+unknown", "v0.12.3", True),
        ("something", "1", "(devel)", True),
        ("containerd", "v2.2.0", "", True),
        ("containerd", "2.2.0-rc.1", "", True),
        ("containerd", "v2.10.0", "", True),
        ("containerd", "v3.0.0", "", True),
        ("containerd", "v2.1.5", "", False),
        ("containerd", "1.7.30~ds1", "", False),
        ("cri-o", "1.34.0", "", True),
        ("cri-o", "1.33.9", "", False),
        ("cri-o", "1.9", "", False),
        ("containerd", "", "", None),
        ("containerd", "unknown", "", None),
        ("containerd", "2", "", None),
        ("containerd", "٢.٤", "", None),
        ("containerd", "9" * 5000 + ".1", "", None),
        ("crio", "1.30.0", "", None),
        ("", "", "", None),
    ],
)
def test_who_has_validators(name, version, nri_version, expected):
    each = runtime(name, version, nri_version)
    assert has_validators(each) is expected
    chosen = Subscription().choose(each)
    assert bool(chosen & VALIDATION) is (expected is not False)
    assert bool(chosen & STARTS) is not allows_unsolicited_updates(each)
    assert chosen & ~VALIDATION & ~STARTS == CONTAINER_EVENTS


@pytest.mark.parametrize(
    ("name", "version", "nri_version", "expected"),
    [
        ("containerd", "v2.4.2", "v0.12.3", True),
        ("containerd", "v2.4.0", "v0.12.1", True),
        ("containerd", "v2.3.7", "v0.12.1+mended", True),
        ("something", "1", "0.13.0", True),
        ("something", "1", "v1.0.0-rc.1", True),
        ("containerd", "v2.3.7", "v0.12.0", False),
        ("containerd", "v2.4.2", "v0.12.1-0.20260301120000-0123456789ab", False),
        ("containerd", "v2.4.2", "v0.12.1-rc.1", False),
        ("containerd", "v2.4.0", "v0.0.0-unknown", True),
        ("containerd", "2.4.2+unknown", "0.0.0-unknown", True),
        ("containerd", "v2.4.0-rc.1", "v0.0.0-unknown", False),
        ("containerd", "v2.3.9", "v0.0.0-unknown", False),
        ("cri-o", "2.4.2", "v0.0.0-unknown", False),
        ("containerd", "v2.4.2", "(devel)", False),
        ("containerd", "v2.4.2", "", False),
        ("containerd", "v2.1.9", "", False),
        ("cri-o", "1.36.1", "", False),
        ("containerd", "v2.4.2", "v0.13", False),
        ("containerd", "v2.4.2", "v0.٢.3", False),
        ("containerd", "v2.4.2", "9" * 5000 + ".1.1", False),
        ("", "", "", False),
    ],
)
def test_who_may_be_sent_updates_outside_of_events(name, version, nri_version, expected):
    assert allows_unsolicited_updates(runtime(name, version, nri_version)) is expected


def test_a_runtime_that_refused_is_asked_for_less_until_it_is_forgotten():
    subscription = Subscription()
    subscription.refused(runtime())
    assert subscription.choose(runtime()) == CONTAINER_EVENTS
    assert subscription.choose(runtime(version="v2.4.3")) == CONTAINER_EVENTS | VALIDATION
    subscription.forget()
    assert subscription.choose(runtime()) == CONTAINER_EVENTS | VALIDATION
