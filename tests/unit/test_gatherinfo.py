# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver import gatherinfo
from driver.commandline import ReportOptions
from driver.config import Config
from fastcpu import CpuSet

CPU = "/sys/devices/system/cpu"
CPU_KEYS = [
    "cpuID",
    "coreID",
    "socketID",
    "clusterID",
    "numaNodeID",
    "numaNodeCPUSet",
    "sibling",
    "coreType",
    "uncoreCacheID",
]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets of two cores of two threads each, CPU 7 offline, one node and one L3 a socket."""
    root = tmp_path / "sys"
    files = {f"{CPU}/online": "0-6\n", f"{CPU}/present": "0-7\n", f"{CPU}/possible": "0-7\n", f"{CPU}/isolated": "3\n"}
    files[f"{CPU}/smt/control"] = "on\n"
    for cpu in range(7):
        core, sibling = cpu % 4, (cpu + 4) % 8
        socket, neighbours = core // 2, "0-1,4-5" if core < 2 else "2-3,6"
        topology = f"{CPU}/cpu{cpu}/topology"
        files[f"{topology}/physical_package_id"] = f"{socket}\n"
        files[f"{topology}/package_cpus_list"] = f"{neighbours}\n"
        files[f"{topology}/core_id"] = f"{core % 2}\n"
        files[f"{topology}/core_cpus_list"] = f"{cpu}\n" if sibling == 7 else f"{core},{core + 4}\n"
        files[f"{topology}/cluster_id"] = "65535\n" if socket else "5\n"
        files[f"{CPU}/cpu{cpu}/cache/index3/level"] = "3\n"
        files[f"{CPU}/cpu{cpu}/cache/index3/id"] = f"{socket}\n"
        files[f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list"] = f"{neighbours}\n"
    files["/sys/devices/system/node/node0/cpulist"] = "0-1,4-5\n"
    files["/sys/devices/system/node/node1/cpulist"] = "2-3,6\n"
    for path, text in files.items():
        place = root / path.removeprefix("/sys/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


def add_process(processes: Path, pid: int, *words: str) -> Path:
    folder = processes / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in words))
    return folder


def gather(config: Config, processes: Path | None = None) -> dict[str, Any]:
    report = gatherinfo.gather(config, processes is None, processes or Path("/nowhere"))
    return dict(yaml.safe_load(yaml.safe_dump(report)))


def test_the_layout_is_the_published_one(machine: Path) -> None:
    report = gather(Config(sysfs_root=machine))
    assert report.keys() == {
        "toolVersion",
        "layoutVersion",
        "cpuDetails",
        "driverConfig",
        "driverConfigSource",
        "notes",
    }
    assert report["layoutVersion"] == "v1"
    assert report["toolVersion"].keys() == {"dracpuVersion", "pythonVersion"}
    topology = report["cpuDetails"]["topology"]
    assert topology == {
        "numCPUs": 7,
        "numCores": 4,
        "numUncoreCache": 2,
        "numSockets": 2,
        "numNUMANodes": 2,
        "smtEnabled": True,
        "onlineCPUSet": "0-6",
        "presentCPUSet": "0-7",
        "isolatedCPUSet": "3",
    }
    cpus = report["cpuDetails"]["cpus"]
    assert [cpu["cpuID"] for cpu in cpus] == list(range(7))
    assert all(set(cpu) == set(CPU_KEYS) for cpu in cpus)
    assert cpus[6] == {
        "cpuID": 6,
        "coreID": 0,
        "socketID": 1,
        "clusterID": -1,
        "numaNodeID": 1,
        "numaNodeCPUSet": "2-3,6",
        "sibling": 2,
        "coreType": "standard",
        "uncoreCacheID": 1,
    }
    assert [cpu["sibling"] for cpu in cpus] == [4, 5, 6, -1, 0, 1, 2]
    assert [cpu["clusterID"] for cpu in cpus] == [5, 5, -1, -1, 5, 5, -1]
    assert report["notes"] == []


def test_the_configuration_is_told_without_what_is_not_set(machine: Path) -> None:
    config = Config(
        sysfs_root=machine,
        reserved_cpus=CpuSet.parse("0-1"),
        placement={"spread": "cores"},
        sysfs_overlay={f"{CPU}/smt/control": "off\n"},
        nri_socket="",
        start_guard=False,
    )
    report = gather(config)
    assert report["driverConfigSource"] == "flags"
    settings = report["driverConfig"]
    assert yaml.safe_load(settings.pop("sysfsOverlay")) == {f"{CPU}/smt/control": "off\n"}
    assert settings == {
        "cpuDeviceMode": "grouped",
        "groupBy": "numanode",
        "allocator": "cpumanager",
        "reservedCPUs": "0-1",
        "placement": {"spread": "cores"},
        "bindAddress": ":8080",
        "kubeletRootDir": "/var/lib/kubelet",
        "sysfsRoot": str(machine),
        "cdiDir": "/var/run/cdi",
        "cgroupRoot": "/sys/fs/cgroup",
        "nriSocket": "",
        "logFormat": "text",
        "startGuard": False,
    }
    assert report["cpuDetails"]["topology"]["smtEnabled"] is False


def test_what_is_reported_can_be_given_as_configuration(machine: Path, tmp_path: Path) -> None:
    from driver.settings import load

    config = Config(reserved_cpus=CpuSet([0]), placement={"numa": "pack"}, sysfs_overlay={"/sys/a": "b\n"})
    settings = gather(config)["driverConfig"]
    paths = ("kubeletRootDir", "sysfsRoot", "cdiDir", "cgroupRoot", "nriSocket")
    for flag_only in ("bindAddress", *paths, "logFormat", "startGuard"):
        del settings[flag_only]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    assert load({"config": str(tmp_path / "c.yaml")}) == config


@pytest.mark.parametrize("online", [None, "", "x", "5-1", "0-99999999999", "\0\xff"])
def test_a_broken_machine_makes_a_report_that_says_so(online: str | None, tmp_path: Path) -> None:
    if online is not None:
        folder = tmp_path / "devices/system/cpu"
        folder.mkdir(parents=True)
        (folder / "online").write_text(online)
    report = gather(Config(sysfs_root=tmp_path))
    assert report["cpuDetails"] == {"topology": {}, "cpus": []}
    assert any("the topology cannot be read: /sys/devices/system/cpu/online" in note for note in report["notes"])


def test_odd_files_are_noted(machine: Path) -> None:
    (machine / "devices/system/cpu/cpu0/topology/physical_package_id").write_text("nonsense")
    (machine / "devices/system/cpu/cpu0/topology/cluster_id").write_text("²")
    report = gather(Config(sysfs_root=machine))
    assert any("nonsense" in note for note in report["notes"])
    assert report["cpuDetails"]["cpus"][0]["clusterID"] == -1


@pytest.mark.parametrize(
    "command",
    [
        ["/dracpu"],
        ["dracpu"],
        ["/usr/bin/python3.12", "/usr/local/bin/dracpu"],
        ["/venv/bin/python", "-m", "driver"],
    ],
)
def test_the_running_drivers_configuration_is_found(command: list[str], machine: Path, tmp_path: Path) -> None:
    processes = tmp_path / "proc"
    add_process(processes, 1, "/pause")
    add_process(processes, 7, "dracpu", "gatherinfo", "--stdout")
    add_process(processes, 8, "vim", "dracpu")
    add_process(processes, 42, *command, f"--sysfs-root={machine}", "--reserved-cpus", "4-5", "--v=4")
    add_process(processes, 43, *command, "--reserved-cpus=6")
    (processes / "self").mkdir()
    report = gather(Config(), processes)
    assert report["driverConfigSource"] == "process 42"
    assert report["driverConfig"]["reservedCPUs"] == "4-5"
    assert report["driverConfig"]["v"] == 4
    assert report["cpuDetails"]["topology"]["numCPUs"] == 7


def test_the_running_drivers_files_are_read_in_its_own_root_and_folder(machine: Path, tmp_path: Path) -> None:
    processes, root = tmp_path / "proc", tmp_path / "container"
    process = add_process(processes, 42, "/dracpu", "--config=/etc/dracpu/config.yaml", f"--sysfs-root={machine}")
    (root / "etc/dracpu").mkdir(parents=True)
    (root / "work").mkdir()
    (process / "root").symlink_to(root)
    (process / "cwd").symlink_to(root / "work")
    (root / "etc/dracpu/config.yaml").write_text("reservedCPUs: 2-3\nsysfsOverlay: ../overlay.yaml\n")
    (root / "overlay.yaml").write_text(f'{CPU}/smt/control: "off"\n')
    report = gather(Config(), processes)
    assert report["driverConfig"]["reservedCPUs"] == "2-3"
    assert report["cpuDetails"]["topology"]["smtEnabled"] is False


@pytest.mark.parametrize(
    "argument", ["--config=/gone.yaml", "--group-by=nonsense", "--unknown", "--help", "--a\udcff\nb"]
)
def test_a_drivers_configuration_that_cannot_be_read_is_noted(argument: str, tmp_path: Path) -> None:
    add_process(tmp_path, 42, "/dracpu", argument)
    report = gather(Config(), tmp_path)
    assert report["driverConfigSource"] == "defaults"
    assert report["notes"][0].startswith("the configuration of process 42 cannot be read")


@pytest.mark.parametrize("exists", [True, False])
def test_no_driver_is_noted(exists: bool, tmp_path: Path) -> None:
    processes = tmp_path if exists else tmp_path / "none"
    report = gather(Config(), processes)
    assert report["driverConfigSource"] == "defaults"
    assert "no running driver was found" in report["notes"][0]


def test_a_report_goes_into_a_file_of_its_own(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "reports" / "of node"
    options = ReportOptions(output_dir=folder, configured=True)
    assert gatherinfo.main(Config(sysfs_root=machine), options) == 0
    [path] = folder.iterdir()
    assert capsys.readouterr().out == f"{path}\n"
    assert path.name.startswith("dracpu-gatherinfo-")
    assert path.suffix == ".yaml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert text.startswith("---\ntoolVersion:\n")
    assert yaml.safe_load(text)["layoutVersion"] == "v1"


def test_without_a_folder_it_goes_where_temporary_files_go(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert gatherinfo.main(Config(sysfs_root=machine), ReportOptions(configured=True)) == 0
    [path] = tmp_path.glob("dracpu-gatherinfo-*.yaml")
    assert capsys.readouterr().out == f"{path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_reports_of_several_nodes_can_be_one_stream(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ReportOptions(to_stdout=True, configured=True)
    for _ in range(2):
        assert gatherinfo.main(Config(sysfs_root=machine), options) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [document["cpuDetails"]["topology"]["numCPUs"] for document in documents] == [7, 7]


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null/x"])
def test_a_report_that_cannot_be_written_is_an_error(
    folder: str, machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ReportOptions(output_dir=Path(folder), configured=True)
    assert gatherinfo.main(Config(sysfs_root=machine), options) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dracpu: cannot write the report: ")


def test_a_full_disk_leaves_no_half_a_report(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gatherinfo, "_write", full)
    options = ReportOptions(output_dir=tmp_path / "reports", configured=True)
    assert gatherinfo.main(Config(sysfs_root=machine), options) == 1
    assert list((tmp_path / "reports").iterdir()) == []


def test_this_machine_can_be_reported() -> None:
    report = gather(Config(), Path("/proc"))
    cpus = {cpu["cpuID"] for cpu in report["cpuDetails"]["cpus"]}
    assert os.sched_getaffinity(0) <= cpus
    assert report["cpuDetails"]["topology"]["numCPUs"] == len(cpus)
