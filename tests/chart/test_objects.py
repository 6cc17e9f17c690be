# SPDX-License-Identifier: Apache-2.0
"""What a release installs: names, rights, the pod and what it sees of its node."""

from __future__ import annotations

import re
import tempfile
import tomllib
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml

from chart.conftest import CHART, Helm, Render, Rendered
from driver.commandline import parse_command_line
from driver.config import Config
from driver.kubeletstate import has_static_cpu_manager
from driver.startguard import FILE_NAME as START_GUARD

PROJECT = tomllib.loads((CHART.parents[2] / "pyproject.toml").read_text())["project"]
SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "external": {"driverConfig": {"allocator": "external", "groupBy": "machine"}},
    "older": {"args": {"cpuDeviceMode": "individual", "reservedCPUs": "0-1", "hostnameOverride": "n1"}},
    "elsewhere": {"kubeletRootDir": "/srv//k8s/.kubelet/", "cdiDir": "/run/c", "nriSocketDir": "/run/n/"},
    "everything": {
        "image": {"repository": "example.org:5000/cpu/dracpu", "tag": f"v1@sha256:{0:064}", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "secret"}],
        "serviceAccount": {"annotations": {"example.org/a": "b"}},
        "podAnnotations": {"example.org/note": 'a: "b"\n{{ c }} # d'},
        "podLabels": {"team": "node"},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": 2, "memory": "2Gi"}},
        "tolerations": [{"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 3}],
        "nodeSelector": {"example.org/cpus": "many"},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "example.org/cpus", "operator": "Exists"}]}]}}},
        "seLinuxOptions": {"type": "spc_t"},
        "extraVolumes": [{"name": "machine", "configMap": {"name": "machine"}}],
        "extraVolumeMounts": [{"name": "machine", "mountPath": "/machine", "readOnly": True}],
        "healthzPath": "/readyz",
        "healthzPort": 9090,
        "driverConfig": {"placement": {"spread": "cores"}, "sysfsOverlay": "/machine/overlay.yaml"},
        "args": {"logLevel": 5, "logFormat": "json", "exposePCIeRoots": True, "startGuard": False},
    },
}  # fmt: skip


@pytest.fixture(params=SETS)
def rendered(request: pytest.FixtureRequest, render: Render) -> Rendered:
    """Each of the sets of values."""
    return render(SETS[request.param])


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_helm_finds_no_fault(helm: Helm, values: dict[str, Any]) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), values=values)


def test_a_release_has_these_objects(render: Render) -> None:
    objects = {(m["kind"], m["metadata"]["name"], m["metadata"].get("namespace")) for m in render().manifests}
    name, namespace = "test-dracpu", "kube-system"
    assert objects == {
        ("ServiceAccount", name, namespace),
        ("ConfigMap", f"{name}-config", namespace),
        ("ClusterRole", name, None),
        ("ClusterRoleBinding", name, None),
        ("DaemonSet", name, namespace),
        ("DeviceClass", "dra.cpu", None),
    }


@pytest.mark.parametrize(
    ("release", "values", "name", "full"),
    [
        ("dracpu", {}, "dracpu", "dracpu"),
        ("my-dracpu", {}, "dracpu", "my-dracpu"),
        ("cpus", {}, "dracpu", "cpus-dracpu"),
        ("dra-driver-cpu", {"nameOverride": "dra-driver-cpu"}, "dra-driver-cpu", "dra-driver-cpu"),
        ("cpus", {"nameOverride": "dra-driver-cpu"}, "dra-driver-cpu", "cpus-dra-driver-cpu"),
        ("cpus", {"fullnameOverride": "here"}, "dracpu", "here"),
        ("r" * 53, {"nameOverride": "n" * 9 + "-" + "x" * 60}, "n" * 9 + "-" + "x" * 53, "r" * 53 + "-" + "n" * 9),
    ],
)
def test_names_and_selectors_are_those_of_dra_driver_cpu(
    render: Render, release: str, values: dict[str, str], name: str, full: str
) -> None:
    """With ``nameOverride: dra-driver-cpu``: the selector of a DaemonSet cannot change."""
    rendered = render(values, release=release)
    daemon_set = rendered.of("DaemonSet")
    selector = {"app.kubernetes.io/name": name, "app.kubernetes.io/instance": release}
    assert daemon_set["spec"]["selector"] == {"matchLabels": selector}
    assert selector.items() <= rendered.pod["metadata"]["labels"].items()
    assert daemon_set["metadata"]["name"] == full
    assert rendered.of("ServiceAccount")["metadata"]["name"] == full
    assert rendered.pod["spec"]["serviceAccountName"] == full
    assert rendered.of("ConfigMap")["metadata"]["name"] == f"{full}-config"
    binding = rendered.of("ClusterRoleBinding")
    assert (
        binding["metadata"]["name"]
        == binding["roleRef"]["name"]
        == rendered.of("ClusterRole")["metadata"]["name"]
        == full
    )
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": full, "namespace": "kube-system"}]


def test_the_rights_are_the_least_and_among_those_of_dra_driver_cpu(render: Render) -> None:
    rights = {
        (group, resource, name, verb)
        for rule in render().of("ClusterRole")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }
    own = "resource.k8s.io"
    assert rights == {
        ("", "nodes", "", "get"),
        *((own, "resourceslices", "", verb) for verb in ("list", "watch", "create", "update", "delete")),
        (own, "resourceclaims", "", "get"),
        (own, "resourceclaims/status", "", "patch"),
        (own, "resourceclaims/driver", "dra.cpu", "associated-node:patch"),
    }


def test_without_rbac_there_are_no_rights_but_still_an_account(render: Render) -> None:
    kinds = {manifest["kind"] for manifest in render({"rbac": {"create": False}}).manifests}
    assert kinds == {"ServiceAccount", "ConfigMap", "DaemonSet", "DeviceClass"}


def test_the_class_selects_the_driver(render: Render) -> None:
    assert render().of("DeviceClass")["spec"] == {"selectors": [{"cel": {"expression": 'device.driver == "dra.cpu"'}}]}


def test_one_pod_is_replaced_at_a_time_and_never_two_run(rendered: Rendered) -> None:
    assert rendered.of("DaemonSet")["spec"]["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0},
    }


def test_the_pod_may_do_no_more_than_it_must(rendered: Rendered) -> None:
    pod, container = rendered.pod["spec"], rendered.container
    assert pod["hostNetwork"] is True
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
    assert container["name"] == "dracpu"
    assert container["command"] == ["dracpu"]


def test_the_driver_reads_what_the_chart_passes(rendered: Rendered, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(re.sub("sysfsOverlay: .*", "", rendered.config))
    first, *arguments = [argument.replace("$(NODE_NAME)", "node-7") for argument in rendered.container["args"]]
    assert first == "--config=/etc/dracpu/config.yaml"
    assert mounts(rendered)["/etc/dracpu"] == ("configMap", "test-dracpu-config", True)
    config = parse_command_line([f"--config={file}", *arguments]).config
    [port] = rendered.container["ports"]
    assert (port["name"], config.bind_address) == ("healthz", f":{port['containerPort']}")
    assert config.node_name in ("node-7", "n1")
    written = yaml.safe_load(rendered.config) or {}
    assert (config.node_name == "n1") == ("hostnameOverride" in written)


@pytest.mark.parametrize(
    ("args", "attribute", "value"),
    [
        ({}, "start_guard", True),
        ({"startGuard": False}, "start_guard", False),
        ({"exposePCIeRoots": True}, "expose_pcie_roots", True),
        ({"exposePCIeRoots": False}, "expose_pcie_roots", False),
        ({"logFormat": "json"}, "log_format", "json"),
        ({"logLevel": 7}, "verbosity", 7),
    ],
)
def test_arguments(render: Render, args: dict[str, Any], attribute: str, value: object) -> None:
    _, *arguments = render({"args": args}).container["args"]
    assert getattr(parse_command_line(arguments).config, attribute) == value


def test_the_node_name_comes_from_kubernetes(rendered: Rendered) -> None:
    assert rendered.container["env"] == [
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    ]


def mounts(rendered: Rendered) -> dict[str, tuple[str, str, bool]]:
    """Return for each path in the container what kind of volume is there, from where, and whether it is read-only."""
    volumes = {volume["name"]: volume for volume in rendered.pod["spec"]["volumes"]}
    found = {}
    for mount in rendered.container["volumeMounts"]:
        [(kind, source)] = [item for item in volumes[mount["name"]].items() if item[0] != "name"]
        found[mount["mountPath"]] = (kind, source.get("path") or source.get("name", ""), mount.get("readOnly", False))
    assert len(found) == len(rendered.container["volumeMounts"])
    return found


def test_every_path_the_driver_uses_is_there_under_the_same_name(rendered: Rendered) -> None:
    config = driver_config(rendered)
    written = [
        config.dra_socket,
        config.registration_socket,
        config.plugin_dir / "claims",
        config.plugin_dir / "instance.lock",
        config.plugin_dir / START_GUARD,
        config.plugin_dir / "dra-device-metadata",
        config.cdi_dir / "dra.k8s.io-cpu_claim-x.json",
    ]
    seen = mounts(rendered)
    for path in written:
        [place] = [place for place in seen if PurePath(place) in path.parents]
        assert seen[place] == ("hostPath", place, False), path
    assert seen[str(config.cgroup_root)] == ("hostPath", "/sys/fs/cgroup", True)
    for path in (Path(config.nri_socket).parent, config.kubelet_root_dir / "cpu_manager_state"):
        assert seen[str(path)] == ("hostPath", str(path), True)
    # Of the kubelet's folder nothing else: the volumes of all pods are in there.
    below = {place for place in seen if config.kubelet_root_dir in PurePath(place).parents}
    assert below == {
        str(config.plugin_dir),
        str(config.registry_dir),
        str(config.kubelet_root_dir / "cpu_manager_state"),
    }


def driver_config(rendered: Rendered) -> Config:
    """Return what the driver makes of its flags."""
    return parse_command_line(rendered.container["args"][1:]).config


def test_reports_have_a_place(rendered: Rendered) -> None:
    assert mounts(rendered)[tempfile.gettempdir()] == ("emptyDir", "", False)


def test_the_kubelet_state_that_is_mounted_is_the_one_the_driver_looks_at(tmp_path: Path) -> None:
    (tmp_path / "cpu_manager_state").write_text('{"policyName": "static"}')
    assert has_static_cpu_manager(tmp_path)


def test_what_others_make_is_not_made_in_a_wrong_place(rendered: Rendered) -> None:
    config = driver_config(rendered)
    types = {
        volume["hostPath"]["path"]: volume["hostPath"]["type"]
        for volume in rendered.pod["spec"]["volumes"]
        if "hostPath" in volume
    }
    assert types == {
        str(config.plugin_dir): "DirectoryOrCreate",
        str(config.cdi_dir): "DirectoryOrCreate",
        str(config.registry_dir): "Directory",
        str(config.kubelet_root_dir / "cpu_manager_state"): "File",
        str(Path(config.nri_socket).parent): "Directory",
        "/sys/fs/cgroup": "Directory",
    }


def test_the_host_s_cgroups_can_only_be_read(rendered: Rendered) -> None:
    """In cgroup v1 they are several mounts, of which a read-only mount of the folder is only the first."""
    [mount] = [mount for mount in rendered.container["volumeMounts"] if mount["name"] == "host-cgroups"]
    assert (mount["readOnly"], mount["recursiveReadOnly"]) == (True, "IfPossible")
    assert "mountPropagation" not in mount


def test_probes(render: Render) -> None:
    for values, path, port in (({}, "/healthz", 8080), (SETS["everything"], "/readyz", 9090)):
        container = render(values).container
        asked = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert asked == {
            "startupProbe": {"path": path, "port": "healthz"},
            "livenessProbe": {"path": path, "port": "healthz"},
            "readinessProbe": {"path": "/readyz", "port": "healthz"},
        }
        assert container["ports"] == [{"name": "healthz", "containerPort": port}]
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 300


def test_values_arrive_unchanged(render: Render) -> None:
    values = SETS["everything"]
    rendered = render(values)
    pod, container = rendered.pod, rendered.container
    spec = pod["spec"]
    assert container["image"] == f"{values['image']['repository']}:{values['image']['tag']}"
    assert container["imagePullPolicy"] == "Always"
    assert spec["imagePullSecrets"] == values["imagePullSecrets"]
    assert rendered.of("ServiceAccount")["metadata"]["annotations"] == values["serviceAccount"]["annotations"]
    assert values["podAnnotations"].items() <= pod["metadata"]["annotations"].items()
    assert values["podLabels"].items() <= pod["metadata"]["labels"].items()
    assert container["resources"] == values["resources"]
    assert spec["tolerations"] == values["tolerations"]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", **values["nodeSelector"]}
    assert spec["affinity"] == values["affinity"]
    assert spec["securityContext"]["seLinuxOptions"] == values["seLinuxOptions"]
    assert values["extraVolumes"][0] in spec["volumes"]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]


def test_labels_of_a_pod_cannot_take_it_from_its_daemon_set(render: Render) -> None:
    rendered = render({"podLabels": {"app.kubernetes.io/instance": "other", "a": "b"}})
    labels = rendered.pod["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == "test"
    assert labels["a"] == "b"


def test_the_driver_may_start_where_the_runtime_insists_on_it(render: Render) -> None:
    key = "tolerate-missing-plugins.noderesource.dev"
    assert render().pod["metadata"]["annotations"][key] == "true"
    assert render({"podAnnotations": {key: "false"}}).pod["metadata"]["annotations"][key] == "false"


def test_versions_are_the_projects(render: Render) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]
    assert chart["name"] == PROJECT["name"]
    assert render().container["image"] == f"dracpu:{PROJECT['version']}"


def test_it_needs_the_api_that_it_speaks(helm: Helm) -> None:
    for version in ("v1.34.0", "v1.35.2-gke.100", "1.37.2"):
        helm.template({}, f"--kube-version={version}")
    assert "kubeVersion" in helm.refusal({}, "--kube-version=v1.33.9")


def test_the_notes_name_what_was_installed(helm: Helm) -> None:
    text = helm("install", "cpus", str(CHART), "--dry-run=client", "--namespace=here", "--set=healthzPort=81")
    assert "kubectl -n here rollout status daemonset/cpus-dracpu" in text
    assert "port 81" in text
