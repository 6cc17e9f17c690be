# SPDX-License-Identifier: Apache-2.0
"""Every key and every flag, good and bad, through the same function that the command uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from driver.config import Config
from driver.errors import ConfigError
from driver.flags import parse_flags
from driver.settings import FLAGS, MAX_CONFIG_BYTES, SETTINGS, load, warnings
from fastcpu import CpuSet

Load = Callable[..., Config]


@pytest.fixture
def file(short_tmp: Path) -> Path:
    # A long path would be cut in messages.
    return short_tmp / "config.yaml"


@pytest.fixture
def loaded(file: Path) -> Load:
    """Load a configuration as from a command line, with a file of this content."""

    def load_it(content: str | None = None, *arguments: str) -> Config:
        if content is not None:
            file.write_text(content)
            arguments = (f"--config={file}", *arguments)
        return load(parse_flags(arguments, FLAGS)[0])

    return load_it


@pytest.fixture
def refused(loaded: Load, file: Path) -> Callable[..., str]:
    """Return the one line that refuses a configuration, with FILE for the file's path."""

    def refuse(content: str | None = None, *arguments: str) -> str:
        with pytest.raises(ConfigError) as caught:
            loaded(content, *arguments)
        message = str(caught.value)
        assert message.isprintable()
        return message.replace(str(file), "FILE")

    return refuse


DEFAULTS = {
    "cpu_device_mode": "grouped",
    "group_by": "numanode",
    "allocator": "cpumanager",
    "reserved_cpus": CpuSet(),
    "placement": {},
    "hostname_override": "",
    "kubeconfig": "",
    "sysfs_overlay": {},
    "publish_node_allocatable_resource_mapping": False,
    "bind_address": ":8080",
    "kubelet_root_dir": Path("/var/lib/kubelet"),
    "expose_pcie_roots": False,
    "verbosity": 0,
    "vmodule": "",
    "sysfs_root": Path("/sys"),
    "cdi_dir": Path("/var/run/cdi"),
    "cgroup_root": Path("/sys/fs/cgroup"),
    "nri_socket": "/var/run/nri/nri.sock",
    "log_format": "text",
    "start_guard": True,
}


@pytest.mark.parametrize("content", [None, "", "{}\n", "apiVersion: v1alpha1\n", "apiVersion: 'v1alpha1'"])
def test_defaults(content: str | None, loaded: Load) -> None:
    config = loaded(content)
    assert {field.name: getattr(config, field.name) for field in fields(config)} == DEFAULTS


def test_an_empty_config_flag_is_no_file(loaded: Load) -> None:
    assert loaded(None, "--config=") == Config()


def test_the_environment_is_not_read(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "NODE_NAME", "HOST_ROOT", "DRACPU_GROUP_BY", "GROUP_BY"):
        monkeypatch.setenv(name, "/x")
    assert loaded() == Config()


@pytest.mark.parametrize(
    ("content", "attribute", "value"),
    [
        ("cpuDeviceMode: grouped", "cpu_device_mode", "grouped"),
        ("cpuDeviceMode: individual", "cpu_device_mode", "individual"),
        ("groupBy: numanode", "group_by", "numanode"),
        ("groupBy: socket", "group_by", "socket"),
        ("groupBy: l3cache", "group_by", "l3cache"),
        ("groupBy: machine\nallocator: external", "group_by", "machine"),
        ("allocator: external", "allocator", "external"),
        ("allocator: cpumanager", "allocator", "cpumanager"),
        ('reservedCPUs: "0-1,64"', "reserved_cpus", CpuSet.parse("0-1,64")),
        ("reservedCPUs: 0-1", "reserved_cpus", CpuSet.parse("0-1")),
        ("reservedCPUs: 0", "reserved_cpus", CpuSet([0])),
        ("reservedCPUs: 12", "reserved_cpus", CpuSet([12])),
        ('reservedCPUs: "010"', "reserved_cpus", CpuSet([10])),
        ("reservedCPUs: 0-6:2/4", "reserved_cpus", CpuSet([0, 1, 4, 5])),
        ('reservedCPUs: ""', "reserved_cpus", CpuSet()),
        ("reservedCPUs:", "reserved_cpus", CpuSet()),
        ("reservedCPUs: ~", "reserved_cpus", CpuSet()),
        ("reservedCPUs: 9000", "reserved_cpus", CpuSet([9000])),
        ("placement:", "placement", {}),
        ("placement: {}", "placement", {}),
        ("placement: {spread: cores}", "placement", {"spread": "cores"}),
        ("placement: {spread: none, numa: }", "placement", {"spread": "none"}),
        (
            "placement:\n  fullCores: require\n  numa: distribute\n  coreType: p-core",
            "placement",
            {"fullCores": "require", "numa": "distribute", "coreType": "p-core"},
        ),
        ("hostnameOverride: node-1", "hostname_override", "node-1"),
        ('hostnameOverride: "42"', "hostname_override", "42"),
        ("kubeconfig: /etc/kube/config", "kubeconfig", "/etc/kube/config"),
        ("publishNodeAllocatableResourceMapping: true", "publish_node_allocatable_resource_mapping", True),
        ("publishNodeAllocatableResourceMapping: on", "publish_node_allocatable_resource_mapping", True),
        ("publishNodeAllocatableResourceMapping: false", "publish_node_allocatable_resource_mapping", False),
        ("sysfsOverlay: ''", "sysfs_overlay", {}),
        ("sysfsOverlay: '{}'", "sysfs_overlay", {}),
        ("sysfsOverlay: \"/sys/a: '1'\"", "sysfs_overlay", {"/sys/a": "1"}),
        ("sysfsOverlay:\n  /sys/a: b\n", "sysfs_overlay", {"/sys/a": "b"}),
        (
            'sysfsOverlay: |\n  /sys/devices/system/cpu/online: "0-3\\n"\n  /sys/b: text\n',
            "sysfs_overlay",
            {"/sys/devices/system/cpu/online": "0-3\n", "/sys/b": "text"},
        ),
    ],
)
def test_a_key_of_the_file(content: str, attribute: str, value: object, loaded: Load) -> None:
    assert getattr(loaded(content), attribute) == value


@pytest.mark.parametrize(
    ("arguments", "attribute", "value"),
    [
        (["--cpu-device-mode=individual"], "cpu_device_mode", "individual"),
        (["-group-by", "socket"], "group_by", "socket"),
        (["--reserved-cpus=0-3,8"], "reserved_cpus", CpuSet.parse("0-3,8")),
        (["--reserved-cpus", "0"], "reserved_cpus", CpuSet([0])),
        (["--reserved-cpus="], "reserved_cpus", CpuSet()),
        (["--hostname-override=node-1"], "hostname_override", "node-1"),
        (["--sysfs-overlay=/sys/a: b"], "sysfs_overlay", {"/sys/a": "b"}),
        (["--kubeconfig=/k"], "kubeconfig", "/k"),
        (["--bind-address=:0"], "bind_address", ":0"),
        (["--bind-address=127.0.0.1:9090"], "bind_address", "127.0.0.1:9090"),
        (["--bind-address=[::1]:9090"], "bind_address", "[::1]:9090"),
        (["--bind-address=localhost:65535"], "bind_address", "localhost:65535"),
        (["--kubelet-root-dir=/mnt/kubelet"], "kubelet_root_dir", Path("/mnt/kubelet")),
        (["--kubelet-root-dir=//mnt//a/../kubelet/"], "kubelet_root_dir", Path("/mnt/kubelet")),
        (["--expose-pcie-roots"], "expose_pcie_roots", True),
        (["-expose-pcie-roots=F"], "expose_pcie_roots", False),
        (["--v=4"], "verbosity", 4),
        (["-v", "+2"], "verbosity", 2),
        (["-v=-1"], "verbosity", -1),
        (["--vmodule=prepare=4,kube*=2"], "vmodule", "prepare=4,kube*=2"),
        (["--vmodule="], "vmodule", ""),
        (["--sysfs-root=tree/sys"], "sysfs_root", Path("tree/sys")),
        (["--cdi-dir=/etc/cdi"], "cdi_dir", Path("/etc/cdi")),
        (["--cgroup-root=/run/dracpu//cgroup/"], "cgroup_root", Path("/run/dracpu/cgroup")),
        (["--nri-socket="], "nri_socket", ""),
        (["--nri-socket=/run/nri.sock"], "nri_socket", "/run/nri.sock"),
        (["--log-format=json"], "log_format", "json"),
        (["--start-guard=false"], "start_guard", False),
        (["--start-guard"], "start_guard", True),
    ],
)
def test_a_flag(arguments: list[str], attribute: str, value: object, loaded: Load) -> None:
    assert getattr(loaded(None, *arguments), attribute) == value


def test_every_setting_is_a_key_or_a_flag_and_has_a_test_above() -> None:
    assert {setting.attribute for setting in SETTINGS} == set(DEFAULTS)
    assert all(setting.key or setting.flag for setting in SETTINGS)


@pytest.mark.parametrize(
    ("content", "argument", "attribute", "value"),
    [
        ("cpuDeviceMode: individual", "--cpu-device-mode=grouped", "cpu_device_mode", "grouped"),
        ("groupBy: socket", "--group-by=numanode", "group_by", "numanode"),
        ("reservedCPUs: 0-3", "--reserved-cpus=4-7", "reserved_cpus", CpuSet.parse("4-7")),
        ("reservedCPUs: 0-3", "--reserved-cpus=", "reserved_cpus", CpuSet()),
        ("hostnameOverride: a", "--hostname-override=b", "hostname_override", "b"),
        ("hostnameOverride: a", "--node-name=b", "hostname_override", "b"),
        ("kubeconfig: a", "--kubeconfig=b", "kubeconfig", "b"),
        ("sysfsOverlay: '/sys/a: b'", "--sysfs-overlay=", "sysfs_overlay", {}),
        # A value that is overridden does not count, however wrong it is.
        ("groupBy: nonsense", "--group-by=socket", "group_by", "socket"),
        ("hostnameOverride: [1]", "--hostname-override=b", "hostname_override", "b"),
    ],
)
def test_a_flag_wins_over_the_file(content: str, argument: str, attribute: str, value: object, loaded: Load) -> None:
    assert getattr(loaded(content, argument), attribute) == value


def test_flag_file_and_default_come_together(loaded: Load) -> None:
    config = loaded("groupBy: socket\nallocator: external\nreservedCPUs: 0-1\n", "--reserved-cpus=7", "--v=4")
    assert config == replace(Config(), group_by="socket", allocator="external", reserved_cpus=CpuSet([7]), verbosity=4)


EXPECTED_GROUPINGS = "expected numanode, socket, machine or l3cache"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("apiVersion: v1", "FILE, line 1, apiVersion: 'v1' is not accepted; expected v1alpha1"),
        ("apiVersion:", "FILE, line 1, apiVersion: nothing is not accepted; expected v1alpha1"),
        ("apiVersion: 1", "FILE, line 1, apiVersion: the number 1 is not accepted; expected v1alpha1"),
        (
            "\ncpuDeviceMode: Grouped",
            "FILE, line 2, cpuDeviceMode: 'Grouped' is not accepted; expected grouped or individual",
        ),
        ("cpuDeviceMode: ''", "FILE, line 1, cpuDeviceMode: '' is not accepted; expected grouped or individual"),
        (
            "cpuDeviceMode: yes",
            "FILE, line 1, cpuDeviceMode: the boolean true is not accepted; expected grouped or individual",
        ),
        ("groupBy: node", f"FILE, line 1, groupBy: 'node' is not accepted; {EXPECTED_GROUPINGS}"),
        ("groupBy: ''", f"FILE, line 1, groupBy: '' is not accepted; {EXPECTED_GROUPINGS}"),
        ("groupBy: 3", "FILE, line 1, groupBy: the number 3 is not accepted; expected text; put it in quotes"),
        (
            "groupBy: machine",
            "FILE, line 1, groupBy: machine needs allocator: external in the configuration file, because nothing but "
            "a claim's cpuset says where its CPUs are",
        ),
        ("allocator: extern", "FILE, line 1, allocator: 'extern' is not accepted; expected cpumanager or external"),
        (
            "reservedCPUs: 010",
            'FILE, line 1, reservedCPUs: the number 010 is not accepted; expected CPUs in quotes, such as "0-1,64"',
        ),
        (
            "reservedCPUs: -1",
            'FILE, line 1, reservedCPUs: the number -1 is not accepted; expected CPUs in quotes, such as "0-1,64"',
        ),
        (
            "reservedCPUs: [0, 1]",
            'FILE, line 1, reservedCPUs: a list is not accepted; expected CPUs in quotes, such as "0-1,64"',
        ),
        (
            "reservedCPUs: 3-1",
            "FILE, line 1, reservedCPUs: cpulist '3-1', character 1: the range is reversed; write the lower CPU first",
        ),
        (
            "reservedCPUs: 0-4294967295",
            "FILE, line 1, reservedCPUs: cpulist '0-4294967295', character 3: the number is too large; "
            "the highest CPU number is 1048575",
        ),
        (
            "placement: packed",
            "FILE, line 1, placement: 'packed' is not accepted; "
            "expected a mapping with keys of spread, fullCores, numa, coreType",
        ),
        (
            "placement:\n  spread: wide",
            "FILE, line 2, placement.spread: 'wide' is not accepted; expected none or cores",
        ),
        (
            "placement:\n  fullCores: true",
            "FILE, line 2, placement.fullCores: the boolean true is not accepted; expected prefer or require",
        ),
        ("placement:\n  fullcores: prefer", "FILE, line 2: 'fullcores' is spelled fullCores"),
        (
            "placement:\n  colour: red",
            "FILE, line 2: unknown key 'colour'; known keys are spread, fullCores, numa, coreType",
        ),
        ("placement:\n  numa: pack\n  numa: pack", "FILE, line 3: numa is given twice, first in line 2"),
        (
            "hostnameOverride: 7",
            "FILE, line 1, hostnameOverride: the number 7 is not accepted; expected text; put it in quotes",
        ),
        (
            "hostnameOverride: no",
            "FILE, line 1, hostnameOverride: the boolean false is not accepted; expected text; put it in quotes",
        ),
        ("kubeconfig: {a: b}", "FILE, line 1, kubeconfig: a mapping is not accepted; expected text"),
        ("kubeconfig: [a]", "FILE, line 1, kubeconfig: a list is not accepted; expected text"),
        (
            'publishNodeAllocatableResourceMapping: "true"',
            "FILE, line 1, publishNodeAllocatableResourceMapping: 'true' is not accepted; expected true or false",
        ),
        (
            "publishNodeAllocatableResourceMapping: 1",
            "FILE, line 1, publishNodeAllocatableResourceMapping: the number 1 is not accepted; expected true or false",
        ),
        # Keys.
        ("reservedcpus: 0-1", "FILE, line 1: 'reservedcpus' is spelled reservedCPUs"),
        ("ReservedCPUs: 0-1", "FILE, line 1: 'ReservedCPUs' is spelled reservedCPUs"),
        ("ApiVersion: v1alpha1", "FILE, line 1: 'ApiVersion' is spelled apiVersion"),
        ("group-by: socket", "FILE, line 1: 'group-by' is no key; did you mean groupBy?"),
        ("reservedCPU: 0-1", "FILE, line 1: 'reservedCPU' is no key; did you mean reservedCPUs?"),
        ("reservedCPUs: 0\n\nreservedCPUs: 1", "FILE, line 3: reservedCPUs is given twice, first in line 1"),
        ("reservedCPUs: 0\nreservedCPUs: 0", "FILE, line 2: reservedCPUs is given twice, first in line 1"),
        ("bindAddress: ':9'", "FILE, line 1: 'bindAddress' cannot be set in the file; give the flag --bind-address"),
        (
            "exposePCIeRoots: true",
            "FILE, line 1: 'exposePCIeRoots' cannot be set in the file; give the flag --expose-pcie-roots",
        ),
        (
            "kubeletRootDir: /x",
            "FILE, line 1: 'kubeletRootDir' cannot be set in the file; give the flag --kubelet-root-dir",
        ),
        (
            "kubeletrootdir: /x",
            "FILE, line 1: 'kubeletrootdir' cannot be set in the file; give the flag --kubelet-root-dir",
        ),
        ("logFormat: json", "FILE, line 1: 'logFormat' cannot be set in the file; give the flag --log-format"),
        (
            "showMetrics: true",
            "FILE, line 1: unknown key 'showMetrics'; known keys are apiVersion, cpuDeviceMode, groupBy, allocator, "
            "reservedCPUs, placement, hostnameOverride, kubeconfig, sysfsOverlay, "
            "publishNodeAllocatableResourceMapping",
        ),
        (
            "reservedcpus: 0\ngroupBy: socket\ngroupby: socket\nbindAddress: x",
            "FILE, line 1: 'reservedcpus' is spelled reservedCPUs; line 3: 'groupby' is spelled groupBy; "
            "line 4: 'bindAddress' cannot be set in the file; give the flag --bind-address",
        ),
        # The overlay.
        (
            "sysfsOverlay:\n  /sys/a: b\n  sys/b: c",
            "FILE, line 3: 'sys/b' is not a path of an overlay; expected a clean one below /sys/",
        ),
        ("sysfsOverlay: [a]", "FILE, line 1, sysfsOverlay: a list is not accepted; expected text"),
        (
            "sysfsOverlay: /no/such/file",
            "cannot read the sysfs overlay '/no/such/file': No such file or directory",
        ),
        (
            "sysfsOverlay: |\n  /sys/a: 'x'\n  /proc/b: 'y'\n",
            "FILE, line 1, sysfsOverlay, in its text, line 2: '/proc/b' is not a path of an overlay; "
            "expected a clean one below /sys/",
        ),
        (
            "sysfsOverlay: |\n  /sys/../etc/passwd: 'x'\n",
            "FILE, line 1, sysfsOverlay, in its text, line 1: '/sys/../etc/passwd' is not a path of an overlay; "
            "expected a clean one below /sys/",
        ),
        (
            "sysfsOverlay: |\n  /sys/a: 7\n",
            "FILE, line 1, sysfsOverlay, in its text, line 1, /sys/a: the number 7 is not accepted; "
            "expected text; put it in quotes",
        ),
        (
            "sysfsOverlay: |\n  /sys/a:\n    b: c\n",
            "FILE, line 1, sysfsOverlay, in its text, line 1, /sys/a: a mapping is not accepted; expected text",
        ),
        (
            "sysfsOverlay: |\n  /sys/a: b\n  /sys/a: c\n",
            "FILE, line 1, sysfsOverlay, in its text, line 2: '/sys/a' is given twice",
        ),
        (
            "sysfsOverlay: |\n  /sys/a/b/c: x\n  /sys/a: c\n",
            "FILE, line 1, sysfsOverlay, in its text: '/sys/a' is both a file and a folder of '/sys/a/b/c'",
        ),
        (
            "sysfsOverlay: |\n  - /sys/a\n",
            "FILE, line 1, sysfsOverlay, in its text, line 1: found a list; expected a mapping of keys to values",
        ),
    ],
)
def test_a_wrong_file(content: str, message: str, refused: Callable[..., str]) -> None:
    assert refused(content) == message


def test_more_faults_than_a_line_can_hold_are_counted(refused: Callable[..., str]) -> None:
    message = refused("".join(f"groupby: {n}\n" for n in range(5000)))
    assert message.startswith("FILE, line 1: 'groupby' is spelled groupBy; line 2: ")
    assert message.endswith("; line 5: 'groupby' is spelled groupBy; and 4995 more")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--cpu-device-mode=", "flag --cpu-device-mode: '' is not accepted; expected grouped or individual"),
        ("--group-by=node", f"flag --group-by: 'node' is not accepted; {EXPECTED_GROUPINGS}"),
        (
            "--group-by=machine",
            "flag --group-by: machine needs allocator: external in the configuration file, because nothing but a "
            "claim's cpuset says where its CPUs are",
        ),
        (
            "--reserved-cpus=a",
            "flag --reserved-cpus: cpulist 'a', character 1: 'a' is not a digit; "
            "expected a CPU number as in '0-3,8' or '0-31:2/4'",
        ),
        (
            "--sysfs-overlay=/no/such/file",
            "cannot read the sysfs overlay '/no/such/file': No such file or directory",
        ),
        ("--config=/no/such/file", "cannot read the configuration file '/no/such/file': No such file or directory"),
        (
            "--bind-address=8080",
            "flag --bind-address: '8080' is not accepted; expected host:port or :port, a port from 0 to 65535",
        ),
        ("--kubelet-root-dir=", "flag --kubelet-root-dir: '' is not accepted; expected an absolute path"),
        ("--kubelet-root-dir=a/b", "flag --kubelet-root-dir: 'a/b' is not accepted; expected an absolute path"),
        ("--sysfs-root=", "flag --sysfs-root: '' is not accepted; expected a path"),
        ("--cdi-dir=", "flag --cdi-dir: '' is not accepted; expected a path"),
        ("--cgroup-root=cgroup", "flag --cgroup-root: 'cgroup' is not accepted; expected an absolute path"),
        ("--log-format=xml", "flag --log-format: 'xml' is not accepted; expected text or json"),
        ("--v=four", "flag --v: 'four' is not accepted; expected a whole number"),
        ("--v=", "flag --v: '' is not accepted; expected a whole number"),
        ("--v=4.0", "flag --v: '4.0' is not accepted; expected a whole number"),
        ("--v=٤", "flag --v: '٤' is not accepted; expected a whole number"),
        ("--v=9999999999", "flag --v: '9999999999' is not accepted; expected a whole number"),
        (
            "--vmodule=prepare",
            "flag --vmodule: 'prepare' is not accepted; expected pattern=N, several of them separated by commas",
        ),
        ("--start-guard=maybe", "flag --start-guard: 'maybe' is not a boolean; expected true or false"),
    ],
)
def test_a_wrong_flag(argument: str, message: str, refused: Callable[..., str]) -> None:
    assert refused(None, argument) == message


@pytest.mark.parametrize(
    "address",
    ["", ":", "8080:", "a b:1", ":65536", ":-1", "::1:80", "[::1]", "[x]:1", ":http", ":８０", "a:b:1", "/a:1"],
)
def test_a_wrong_bind_address(address: str, refused: Callable[..., str]) -> None:
    assert refused(None, f"--bind-address={address}").startswith("flag --bind-address: ")


def test_group_by_is_checked_in_grouped_mode_only(loaded: Load) -> None:
    assert loaded("cpuDeviceMode: individual\ngroupBy: nonsense").group_by == "nonsense"
    assert loaded("cpuDeviceMode: individual\ngroupBy: machine").group_by == "machine"


def test_an_overlay_can_be_a_file_of_its_own(loaded: Load, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(yaml.dump({"/sys/devices/system/cpu/online": "0-3\n"}))
    expected = {"/sys/devices/system/cpu/online": "0-3\n"}
    assert loaded(f"sysfsOverlay: {overlay}").sysfs_overlay == expected
    assert loaded(None, f"--sysfs-overlay={overlay}").sysfs_overlay == expected


def test_an_overlay_file_is_named_where_it_is_wrong(refused: Callable[..., str], tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("/sys/a: b\n/sys/c: on\n")
    assert refused(f"sysfsOverlay: {overlay}") == (
        f"{overlay}, line 2, /sys/c: the boolean true is not accepted; expected text; put it in quotes"
    )


def test_files_are_found_where_the_caller_says(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/config.yaml").write_text("sysfsOverlay: /etc/overlay.yaml\n")
    (tmp_path / "etc/overlay.yaml").write_text("/sys/a: b\n")
    config = load({"config": "/etc/config.yaml"}, lambda path: tmp_path / path.lstrip("/"))
    assert config.sysfs_overlay == {"/sys/a": "b"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"groupBy: \xff", "FILE, line 1: byte 0xff is not UTF-8; expected a YAML file in UTF-8"),
        (
            b"x" * (MAX_CONFIG_BYTES + 1),
            "the configuration file 'FILE' is larger than 1048576 bytes, the most that is read",
        ),
        (b"a: &a [*a]", "FILE, line 1: anchors and aliases are not supported; write the value out"),
        (b"- groupBy", "FILE, line 1: found a list; expected a mapping of keys to values"),
    ],
)
def test_a_hostile_file(content: bytes, message: str, file: Path, refused: Callable[..., str]) -> None:
    file.write_bytes(content)
    assert refused(None, f"--config={file}") == message


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("cpu-device-mode=grouped", "cpuDeviceMode"),
        ("group-by=socket", "groupBy"),
        ("reserved-cpus=", "reservedCPUs"),
        ("hostname-override=a", "hostnameOverride"),
        ("sysfs-overlay=", "sysfsOverlay"),
    ],
)
def test_the_flags_of_0_2_warn(flag: str, key: str) -> None:
    flags = parse_flags([f"--{flag}"], FLAGS)[0]
    assert warnings(load(flags), flags) == [
        f"flag --{flag.partition('=')[0]} is deprecated; set {key} in the configuration file"
    ]


def test_no_other_flag_warns() -> None:
    flags: dict[str, str | bool] = {
        "node-name": "a",
        "kubeconfig": "/k",
        "bind-address": ":1",
        "v": "4",
        "expose-pcie-roots": True,
    }
    assert warnings(load(flags), flags) == []


def test_individual_mode_warns_and_points_to_what_replaces_it() -> None:
    [warning] = warnings(Config(cpu_device_mode="individual", group_by="machine"), {})
    assert "deprecated" in warning
    assert "grouped with allocator external" in warning


def test_the_machine_as_a_group_is_told_to_be_less_preferred() -> None:
    [warning] = warnings(Config(group_by="machine", allocator="external"), {})
    assert "less preferred" in warning
    assert "no topology boundary" in warning
