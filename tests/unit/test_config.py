# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from driver import config as config_module
from driver.config import Config, check_socket_path
from driver.errors import ConfigError
from driver.settings import SETTINGS
from fastcpu import CpuSet


def test_paths_follow_the_kubelets_root() -> None:
    config = Config(kubelet_root_dir=Path("/mnt/kubelet"))
    assert config.plugin_dir == Path("/mnt/kubelet/plugins/dra.cpu")
    assert config.registry_dir == Path("/mnt/kubelet/plugins_registry")
    assert config.dra_socket == Path("/mnt/kubelet/plugins/dra.cpu/dra.sock")
    assert config.registration_socket == Path("/mnt/kubelet/plugins_registry/dra.cpu-reg.sock")


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("node-1", "node-1"),
        ("  Node-1.Example.COM\n", "node-1.example.com"),
        ("1", "1"),
        ("a" * 253, "a" * 253),
    ],
)
def test_the_node_name_is_the_override_trimmed_in_lower_case(override: str, name: str) -> None:
    assert Config(hostname_override=override).node_name == name


def test_the_node_name_is_the_host_name_and_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config_module._host_name.cache_clear()
    monkeypatch.setattr(socket, "gethostname", lambda: "Host-7.example.com ")
    assert Config().node_name == "host-7.example.com"
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    assert Config().node_name == "host-7.example.com"
    config_module._host_name.cache_clear()


@pytest.mark.parametrize(
    "override", [" ", "a_b", "-a", "a-", "a..b", ".a", "a.", "a/b", "../x", "a b", "é", "a\nb", "a" * 254, "ſ"]
)
def test_a_name_that_no_node_can_have_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a node's name: expected at most 253 letters") as caught:
        _ = Config(hostname_override=override).node_name
    assert str(caught.value).startswith("hostnameOverride ")
    assert str(caught.value).isprintable()


def test_a_host_name_that_no_node_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config_module._host_name.cache_clear()
    monkeypatch.setattr(socket, "gethostname", lambda: "my_host")
    with pytest.raises(ConfigError, match=r"^the host name 'my_host' cannot be .* set hostnameOverride"):
        _ = Config().node_name
    config_module._host_name.cache_clear()


@pytest.mark.parametrize("name", ["x", "é"])
def test_a_socket_path_may_have_107_bytes(name: str, tmp_path: Path) -> None:
    folder = Path("/tmp")
    fits = folder / (name * ((107 - len("/tmp/")) // len(name.encode())))
    check_socket_path(fits)
    too_long = fits.with_name(fits.name + "yyy")
    length = len(str(too_long).encode())
    with pytest.raises(ConfigError) as caught:
        check_socket_path(too_long)
    assert str(caught.value) == (
        f"the socket path {str(too_long)!r} has {length} bytes, {length - 107} too many: "
        "the kernel takes at most 107; choose a shorter folder"
    )


def test_the_kernel_agrees_on_the_longest_socket_path(tmp_path: Path) -> None:
    folder = Path("/tmp")
    longest = folder / f"s{tmp_path.name}".ljust(107 - len("/tmp/"), "x")[: 107 - len("/tmp/")]
    check_socket_path(longest)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(longest))
    longest.unlink()
    with socket.socket(socket.AF_UNIX) as server, pytest.raises(OSError, match="too long"):
        server.bind(str(longest) + "x")


def test_the_description_has_every_setting() -> None:
    described = Config(
        reserved_cpus=CpuSet.parse("0-1"),
        placement={"spread": "cores", "numa": "pack"},
        sysfs_overlay={"/sys/a": "b"},
    ).describe()
    assert len(described) == len(dataclasses.fields(Config))
    assert {setting.key for setting in SETTINGS if setting.key} <= described.keys()
    assert described["reservedCPUs"] == "0-1"
    assert described["placement"] == "spread=cores,numa=pack"
    assert described["sysfsOverlay"] == "1 files"
    assert all(type(value) in (str, int, bool) for value in described.values())
