# SPDX-License-Identifier: Apache-2.0
"""Which values are taken, which refused, and that the driver understands the configuration that comes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.conftest import CHART, Helm, Render
from driver import settings
from driver.config import Config
from driver.errors import ConfigError
from driver.parameters import PLACEMENT_CHOICES
from fastcpu import CpuSet

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
CONFIG_SCHEMA = SCHEMA["properties"]["driverConfig"]["properties"]

# What the values.yaml of dra-driver-cpu names.
VALUES_OF_DRA_DRIVER_CPU: dict[str, Any] = {
    "nameOverride": "",
    "fullnameOverride": "",
    "image": {"repository": "registry.example/dracpu", "tag": "", "pullPolicy": "IfNotPresent"},
    "imagePullSecrets": [],
    "rbac": {"create": True},
    "serviceAccount": {"annotations": {}},
    "podAnnotations": {},
    "podLabels": {},
    "extraVolumeMounts": [],
    "extraVolumes": [],
    "resources": {"requests": {"cpu": "100m", "memory": "50Mi"}, "limits": {}},
    "tolerations": [{"operator": "Exists", "effect": "NoSchedule"}],
    "nodeSelector": {},
    "affinity": {},
    "args": {
        "logLevel": 4,
        "cpuDeviceMode": "",
        "groupBy": "",
        "reservedCPUs": "",
        "hostnameOverride": "",
        "exposePCIeRoots": False,
    },
    "healthzPath": "/healthz",
    "healthzPort": 8080,
    "kubeletRootDir": "/var/lib/kubelet",
    "driverConfig": {},
}


def driver_config(text: str, folder: Path) -> Config:
    """Return what the driver makes of a configuration file."""
    path = folder / "config.yaml"
    path.write_text(text)
    return settings.load({"config": str(path)})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"driverConfig": {"apiVersion": "v1alpha1", "groupBy": "l3cache"}}, {"group_by": "l3cache"}),
        (
            {"driverConfig": {"groupBy": "machine", "allocator": "external"}},
            {"group_by": "machine", "allocator": "external"},
        ),
        ({"driverConfig": {"cpuDeviceMode": "individual"}}, {"cpu_device_mode": "individual"}),
        ({"driverConfig": {"reservedCPUs": "0"}}, {"reserved_cpus": CpuSet([0])}),
        ({"driverConfig": {"reservedCPUs": "010"}}, {"reserved_cpus": CpuSet([10])}),
        ({"driverConfig": {"reservedCPUs": "0-31:2/4,64"}}, {"reserved_cpus": CpuSet.parse("0-31:2/4,64")}),
        (
            {"driverConfig": {"placement": {"spread": "cores", "numa": "distribute"}}},
            {"placement": {"spread": "cores", "numa": "distribute"}},
        ),
        ({"driverConfig": {"hostnameOverride": "42"}}, {"hostname_override": "42"}),
        ({"driverConfig": {"hostnameOverride": "no"}}, {"hostname_override": "no"}),
        ({"driverConfig": {"kubeconfig": "/a: b #c/{{ d }}"}}, {"kubeconfig": "/a: b #c/{{ d }}"}),
        (
            {"driverConfig": {"publishNodeAllocatableResourceMapping": True}},
            {"publish_node_allocatable_resource_mapping": True},
        ),
        (
            {"driverConfig": {"sysfsOverlay": {"/sys/a": "0-3\n", "/sys/b": "y"}}},
            {"sysfs_overlay": {"/sys/a": "0-3\n", "/sys/b": "y"}},
        ),
        ({"driverConfig": {"sysfsOverlay": '/sys/a: "1"\n'}}, {"sysfs_overlay": {"/sys/a": "1"}}),
        # The older ones, which win.
        (
            {"args": {"groupBy": "socket", "reservedCPUs": "1"}, "driverConfig": {"groupBy": "numanode"}},
            {"group_by": "socket", "reserved_cpus": CpuSet([1])},
        ),
        (
            {
                "args": {"cpuDeviceMode": "grouped", "hostnameOverride": "a"},
                "driverConfig": {"cpuDeviceMode": "individual", "hostnameOverride": "b"},
            },
            {"cpu_device_mode": "grouped", "hostname_override": "a"},
        ),
        ({"args": {"groupBy": ""}, "driverConfig": {"groupBy": "socket"}}, {"group_by": "socket"}),
        (
            {"args": {"groupBy": "machine"}, "driverConfig": {"allocator": "external"}},
            {"group_by": "machine", "allocator": "external"},
        ),
    ],
    ids=str,
)
def test_the_driver_understands_the_configuration(
    render: Render, tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert driver_config(render(values).config, tmp_path) == Config(**expected)


def test_a_machine_group_needs_an_external_allocator(helm: Helm, render: Render) -> None:
    for values in ({"driverConfig": {"groupBy": "machine"}}, {"args": {"groupBy": "machine"}}):
        assert "groupBy machine needs driverConfig.allocator external" in helm.refusal(values)
    render({"driverConfig": {"groupBy": "machine", "cpuDeviceMode": "individual"}})


def test_pods_are_replaced_when_the_configuration_changes_and_only_then(render: Render) -> None:
    def checksum(values: dict[str, Any]) -> str:
        annotation: str = render(values).pod["metadata"]["annotations"]["checksum/config"]
        return annotation

    first = checksum({"driverConfig": {"groupBy": "socket"}})
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert checksum({"args": {"groupBy": "socket"}}) == first
    assert checksum({"driverConfig": {"groupBy": "socket"}, "podLabels": {"a": "b"}}) == first
    assert checksum({"driverConfig": {"groupBy": "numanode"}}) != first
    assert checksum({"podAnnotations": {"checksum/config": "mine"}}) == checksum({})


def test_values_of_dra_driver_cpu_are_taken(helm: Helm, render: Render, tmp_path: Path) -> None:
    rendered = render(VALUES_OF_DRA_DRIVER_CPU)
    assert driver_config(rendered.config, tmp_path) == Config()
    assert rendered.container["resources"]["requests"] == {"cpu": "100m", "memory": "50Mi"}


def test_the_keys_are_the_drivers(tmp_path: Path) -> None:
    assert set(CONFIG_SCHEMA) == {"apiVersion", *(setting.key for setting in settings.SETTINGS if setting.key)}
    assert CONFIG_SCHEMA["groupBy"]["enum"] == list(settings.GROUPINGS)
    placement = CONFIG_SCHEMA["placement"]["properties"]
    assert {key: tuple(schema["enum"]) for key, schema in placement.items()} == dict(PLACEMENT_CHOICES)
    for key in ("cpuDeviceMode", "allocator"):
        choices = CONFIG_SCHEMA[key]["enum"]
        for choice in choices:
            driver_config(f"{key}: {choice}", tmp_path)
        with pytest.raises(ConfigError, match=f"expected {' or '.join(choices)}$"):
            driver_config(f"{key}: nonsense", tmp_path)
    older = SCHEMA["properties"]["args"]["properties"]
    for key in older.keys() & CONFIG_SCHEMA.keys():
        assert older[key] == (
            {"enum": ["", *CONFIG_SCHEMA[key]["enum"]]} if "enum" in CONFIG_SCHEMA[key] else CONFIG_SCHEMA[key]
        )


def closed_objects(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all objects whose keys are known."""
    schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "properties" in schema:
        yield path
        for name, each in schema["properties"].items():
            yield from closed_objects(each, (*path, name))


def with_value(path: tuple[str, ...], value: object) -> dict[str, Any]:
    """Return values of which one is as given."""
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("path", list(closed_objects(SCHEMA)), ids=".".join)
def test_an_unknown_value_is_refused_at_every_level(helm: Helm, path: tuple[str, ...]) -> None:
    if path[:1] == ("affinity",) and path[-1].startswith("required"):
        expected = "additional properties 'unknown' not allowed|missing property"
    else:
        expected = "additional properties 'unknown' not allowed"
    assert re.search(expected, helm.refusal(with_value((*path, "unknown"), 1)))


def test_every_key_differs_from_its_other_spellings(helm: Helm) -> None:
    for key in ("kubeletrootdir", "driverconfig", "Args"):
        assert f"additional properties '{key}' not allowed" in helm.refusal({key: {}})


def test_values_of_an_umbrella_chart_are_passed_over(render: Render) -> None:
    assert render({"global": {"anything": {"goes": True}}}).manifests == render().manifests


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the values that are no mappings with keys, and their paths."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    else:
        yield path, value


def test_all_values_are_in_the_schema_and_have_a_default() -> None:
    def named(schema: dict[str, Any], value: object, path: tuple[str, ...]) -> None:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if isinstance(value, dict) and path != ("nodeSelector",):
            assert value.keys() <= schema.get("properties", {}).keys(), path
            for key, each in value.items():
                named(schema["properties"][key], each, (*path, key))

    named(SCHEMA, VALUES, ())
    assert SCHEMA["properties"].keys() - VALUES.keys() == {"global"}
    assert SCHEMA["properties"]["args"]["properties"].keys() == VALUES["args"].keys()


@pytest.mark.parametrize("path", [path for path, _ in leaves(VALUES)], ids=".".join)
def test_a_value_of_another_type_is_refused(helm: Helm, path: tuple[str, ...]) -> None:
    default: Any = VALUES
    for key in path:
        default = default[key]
    for wrong in (True, 7, "text", ["x"], {"x": "y"}):
        if isinstance(wrong, type(default)) or (path[-1], wrong) in (("cpu", 7), ("memory", 7)):
            continue
        assert "don't meet the specifications of the schema" in helm.refusal(with_value(path, wrong)), wrong


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("nameOverride", "a\nb: c"),
        ("nameOverride", "Upper"),
        ("nameOverride", "{{ .Release.Name }}"),
        ("fullnameOverride", "a b"),
        ("image.repository", ""),
        ("image.repository", "a b"),
        ("image.repository", 'a"'),
        ("image.tag", "a\nb"),
        ("image.tag", "-x"),
        ("image.pullPolicy", "Sometimes"),
        ("imagePullSecrets", [{"name": "a b"}]),
        ("imagePullSecrets", ["a"]),
        ("serviceAccount.annotations", {"a": 1}),
        ("podAnnotations", {"a b": "c"}),
        ("podAnnotations", {"a": True}),
        ("podLabels", {"a": "b c"}),
        ("podLabels", {"a": "x" * 64}),
        ("nodeSelector", {"": "a"}),
        ("resources.requests", {"cpu": "many"}),
        ("resources.requests", {"cpu": -1}),
        ("resources.limits", {"memory": "1 Gi"}),
        ("tolerations", [{"operator": "exists"}]),
        ("tolerations", [{"effect": "no"}]),
        ("healthzPath", "healthz"),
        ("healthzPath", "/a b"),
        ("healthzPath", '/"\n'),
        ("healthzPort", 0),
        ("healthzPort", 65536),
        ("healthzPort", 80.5),
        ("healthzPort", "8080"),
        *(
            (folder, path)
            for folder in ("kubeletRootDir", "cdiDir", "nriSocketDir")
            for path in (
                "relative",
                "/",
                "/a/../b",
                "/..",
                "/a/$(NODE_NAME)",
                "/$$",
                "/a b",
                "/a:b",
                "/a\n",
                "/a\\b",
                "/a'",
            )
        ),
        ("args.logLevel", -1),
        ("args.logLevel", 1.5),
        ("args.logLevel", "4"),
        ("args.logFormat", "xml"),
        ("args.groupBy", "core"),
        ("args.reservedCPUs", "0-1; reboot"),
        ("args.reservedCPUs", 0),
        ("args.hostnameOverride", "a\nb"),
        ("args.hostnameOverride", "$(HOSTNAME)"),
        ("driverConfig.groupBy", "NumaNode"),
        ("driverConfig.apiVersion", "v1"),
        ("driverConfig.allocator", "kubelet"),
        ("driverConfig.reservedCPUs", "zero"),
        ("driverConfig.reservedCPUs", "0, 1"),
        ("driverConfig.placement", {"numa": "far"}),
        ("driverConfig.placement", "packed"),
        ("driverConfig.kubeconfig", "relative"),
        ("driverConfig.sysfsOverlay", {"/proc/cpuinfo": "x"}),
        ("driverConfig.sysfsOverlay", {"/sys/a": 1}),
        ("driverConfig.publishNodeAllocatableResourceMapping", "yes"),
        ("extraVolumes", [{"name": "a"}]),
        ("extraVolumes", [{"name": "a", "emptyDir": {}, "hostPath": {}}]),
        ("extraVolumeMounts", [{"name": "a", "mountPath": "relative"}]),
        ("extraVolumeMounts", [{"name": "a", "mountPath": "/a", "readonly": True}]),
    ],
    ids=repr,
)
def test_a_value_that_cannot_be_meant_is_refused(helm: Helm, path: str, value: object) -> None:
    refusal = helm.refusal(with_value(tuple(path.split(".")), value))
    assert "don't meet the specifications of the schema" in refusal
    # Helm names a wrong place for a wrong name.
    assert f"at '/{path.replace('.', '/')}" in refusal or "invalid propertyName" in refusal


@pytest.mark.parametrize(
    ("value", "room", "named"),
    [
        ("kubeletRootDir", 107 - len("/plugins_registry/dra.cpu-reg.sock"), "dra.cpu-reg.sock"),
        ("nriSocketDir", 107 - len("/nri.sock"), "nri.sock"),
    ],
)
def test_a_path_too_long_for_a_socket_is_refused(helm: Helm, render: Render, value: str, room: int, named: str) -> None:
    longest = "/" + "a" * (room - 1)
    render({value: longest})
    render({value: f"/{longest}/"})
    refusal = helm.refusal({value: longest + "b"})
    assert f"{value} is too long" in refusal
    assert f"{named} has 108 bytes" in refusal


@pytest.mark.parametrize("value", [value for value in VALUES if value not in SCHEMA["required"]])
def test_a_default_can_be_taken_back(render: Render, tmp_path: Path, value: str) -> None:
    rendered = render({value: None})
    assert driver_config(rendered.config, tmp_path) == Config()
    assert rendered.container["args"] == render().container["args"]


@pytest.mark.parametrize("value", SCHEMA["required"])
def test_what_cannot_be_missing_is_named(helm: Helm, value: str) -> None:
    assert f"missing property '{value}'" in helm.refusal({value: None})


def test_the_table_of_values_is_complete() -> None:
    """Each value has a row, with its default, in README.md."""
    told = {}
    for line in (CHART / "README.md").read_text().splitlines():
        if match := re.fullmatch(r"\| `([\w.]+)` \| (?:`(.*)`|–) \| .+ \|", line):
            told[match[1]] = "" if match[2] is None else yaml.safe_load(match[2])
    defaults = {}
    for path, value in leaves(VALUES):
        if path[0] == "nodeSelector":
            path, value = path[:1], VALUES["nodeSelector"]
        defaults[".".join(path)] = value
    assert told == {key: value if value not in ({}, []) else "" for key, value in defaults.items()}


def test_every_value_is_explained_in_the_file_itself() -> None:
    explained = re.findall(r"^ *# .+\n(?: *# .+\n)* *(\w+):", (CHART / "values.yaml").read_text(), re.MULTILINE)
    assert {"nameOverride", "fullnameOverride", "tolerations", "kubeletRootDir", "cdiDir", "nriSocketDir"} <= set(
        explained
    )
