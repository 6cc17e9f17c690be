# SPDX-License-Identifier: Apache-2.0
"""The real command as a process: exit statuses, one line for what is wrong, and what it does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from driver import cli

DRACPU = Path(sys.executable).with_name("dracpu")


def dracpu(*arguments: str | bytes, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DRACPU, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        errors="surrogateescape",
    )


def test_help_is_for_stdout_and_no_error() -> None:
    result = dracpu("--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--kubelet-root-dir=DIR" in result.stdout
    assert result.stdout.endswith("\n")
    assert not result.stdout.endswith("\n\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], "dracpu: unknown flag '--nope'; see dracpu --help\n"),
        (["nope"], "dracpu: unexpected argument 'nope'; see dracpu --help\n"),
        (
            ["--group-by=x\n\x1b[2Jtime=now"],
            "dracpu: flag --group-by: 'x\\n\\x1b[2Jtime=now' is not accepted; "
            "expected numanode, socket, machine or l3cache\n",
        ),
        ([b"--v=\xff"], "dracpu: flag --v: '\\udcff' is not accepted; expected a whole number\n"),
        (
            ["--config=/no/such\nfile"],
            "dracpu: cannot read the configuration file '/no/such\\nfile': No such file or directory\n",
        ),
        (
            ["gatherinfo", "--stdout", "--output-dir=/tmp"],
            "dracpu: --stdout and --output-dir cannot be given together\n",
        ),
        (["introspect"], "dracpu: introspect needs an object; expected: dracpu introspect metrics\n"),
        (["demo", "--x"], "dracpu: unknown flag '--x'; see dracpu --help\n"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(arguments: list[str | bytes], message: str) -> None:
    result = dracpu(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


def test_a_machine_that_is_not_there_is_one_line_and_status_2(tmp_path: Path) -> None:
    result = dracpu("--sysfs-root=/nowhere", "--nri-socket=", "--hostname-override=n", f"--kubelet-root-dir={tmp_path}")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "dracpu: cannot read the machine, with /nowhere for /sys: /sys/devices/system/cpu/online is missing; expected "
        "a list of at least one CPU"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"groupby: socket\n", "{path}, line 1: 'groupby' is spelled groupBy"),
        (b"a: &a [*a, *a]\n", "{path}, line 1: anchors and aliases are not supported; write the value out"),
        (b"\x00\xff", "{path}, line 1: byte 0xff is not UTF-8; expected a YAML file in UTF-8"),
    ],
)
def test_a_wrong_file_is_one_line_and_status_2(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    result = dracpu(f"--config={path}")
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("dracpu: " + message.format(path=path))


def test_a_socket_path_that_is_too_long_is_refused_with_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("allocator: external\nhostnameOverride: node\n")
    root = "/" + "r" * 90
    result = dracpu(f"--config={tmp_path}/c.yaml", "--nri-socket=", f"--kubelet-root-dir={root}")
    assert result.returncode == 2
    assert result.stderr == (
        f"dracpu: the socket path '{root}/plugins/dra.cpu/dra.sock' has 116 bytes, 9 too many: "
        "the kernel takes at most 107; choose a shorter folder\n"
    )


def test_a_path_of_the_runtimes_socket_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = "/" + "n" * 107
    result = dracpu("--hostname-override=node", f"--nri-socket={path}")
    assert result.returncode == 2
    assert result.stderr.endswith(
        f"dracpu: the socket path '{path}' has 108 bytes, 1 too many: "
        "the kernel takes at most 107; choose a shorter folder\n"
    )


def test_a_name_that_no_node_can_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("allocator: external\nhostnameOverride: my_node\n")
    result = dracpu(f"--config={tmp_path}/c.yaml", "--nri-socket=")
    assert result.returncode == 2
    assert result.stderr.startswith("dracpu: hostnameOverride 'my_node' cannot be a node's name")


@pytest.mark.parametrize("arguments", [["--help"], ["--group-by=x"], ["--config=/nope"], ["gatherinfo", "--nope"]])
def test_nothing_heavy_is_loaded_for_help_and_errors(arguments: list[str]) -> None:
    program = (
        "import sys; from driver.cli import main; main(sys.argv[1:]); "
        "print([m for m in ('numpy', 'fastcpu', 'yaml', 'grpc', 'kubernetes', 'aiohttp', 'asyncio', 'rich', "
        "'prometheus_client') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    loaded = result.stdout.splitlines()[-1]
    assert loaded == ("['yaml']" if "--config=/nope" in arguments else "[]")


def test_gatherinfo_is_not_held_up_by_what_is_not_there_yet() -> None:
    result = dracpu("gatherinfo", "--stdout")
    assert (result.returncode, result.stderr) == (0, "")
    assert yaml.safe_load(result.stdout)["layoutVersion"] == "v1"


def test_gatherinfo_has_an_executable_name_of_its_own(tmp_path: Path) -> None:
    alias = tmp_path / "dracpu-gatherinfo"
    alias.symlink_to(DRACPU)
    result = subprocess.run([alias, "--stdout"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("---\n")


def test_the_package_can_be_run_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "driver", "--nope"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (2, "dracpu: unknown flag '--nope'; see dracpu --help\n")


def test_metrics_are_listed_as_json() -> None:
    result = dracpu("introspect", "metrics")
    assert (result.returncode, result.stderr) == (0, "")
    assert "dra_cpu_allocated_cpus" in {metric["name"] for metric in json.loads(result.stdout)}


@pytest.mark.parametrize("command", [["gatherinfo", "--stdout"], ["introspect", "metrics"]])
def test_a_reader_that_goes_away_is_no_traceback(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([DRACPU, *command], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def test_the_plugin_starts_with_its_configuration_and_its_warnings(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("allocator: external\nhostnameOverride: Node-1\nreservedCPUs: 0-1\n")
    program = (
        "import sys; from driver import app, cli; app.run = lambda config: len(config.reserved_cpus); "
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    flags = [f"--config={tmp_path}/c.yaml", "--nri-socket=", "--group-by=machine", "--log-format=json"]
    result = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    configuration, deprecated, less_preferred = map(json.loads, result.stderr.splitlines())
    assert configuration["level"] == "INFO"
    assert configuration["node"] == "node-1"
    assert configuration["groupBy"] == "machine"
    assert configuration["reservedCPUs"] == "0-1"
    assert configuration["nriSocket"] == ""
    assert deprecated["level"] == less_preferred["level"] == "WARNING"
    assert "--group-by is deprecated" in deprecated["msg"]
    assert "less preferred" in less_preferred["msg"]


def test_demo_and_box_get_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from driver.sandbox import box, demo

    monkeypatch.setattr(demo, "main", lambda options: 3 if options.group_by == "socket" else 1)
    monkeypatch.setattr(box, "main", lambda options: 4 if str(options.sysfs_root) == "/tree" else 1)
    assert cli.main(["demo", "--group-by=socket"]) == 3
    assert cli.main(["box", "--sysfs-root=/tree"]) == 4


def test_an_interrupted_tool_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    from driver.sandbox import box

    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(box, "main", interrupted)
    assert cli.main(["box"]) == 130
