# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from driver import startguard
from driver.cdi import CdiDirectory
from driver.checkpoint import RecordStore
from driver.errors import ClaimError
from driver.health import STARTED, Health
from driver.ledger import Ledger
from driver.metadata import MetadataStore
from driver.metrics import Metrics
from driver.names import ClaimUID
from driver.restore import restore
from driver.startguard import StartGuard, hook_claims, shipped_program
from fastcpu import CpuSet
from fastcpu.pool import CpuPool

A, B = ClaimUID("a"), ClaimUID("b")
PATH = "/var/lib/kubelet/plugins/dra.cpu/start-guard"


@pytest.fixture
def plugin_dir(tmp_path: Path) -> Path:
    return tmp_path / "plugins" / "dra.cpu"


@pytest.fixture
def health() -> Health:
    health = Health()
    health.set_ok(STARTED)
    return health


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def make_guard(plugin_dir, health, registry):
    metrics = Metrics(registry)
    return lambda program=None: StartGuard(plugin_dir, health, metrics, program=program)


@pytest.fixture
def guard(make_guard) -> StartGuard:
    return make_guard()


@pytest.fixture
def script(tmp_path: Path):
    """Write a program that is none of ours."""

    def write(text: str) -> Path:
        (tmp_path / "script").write_text(f"#!/bin/sh\n{text}\n")
        return tmp_path / "script"

    return write


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# The hook


def test_the_hook_is_the_same_in_all_versions(guard, plugin_dir):
    # Specs outlive the driver that wrote them, and another version reads them: this never changes.
    assert guard.hook(A, CpuSet.parse("2-5,64")) == {
        "hookName": "createRuntime",
        "path": str(plugin_dir / "start-guard"),
        "args": ["dracpu-start-guard", "v1", "a", "2-5,64"],
        "env": ["LC_ALL=C"],
        "timeout": 10,
    }


@dataclass
class Hook:
    path: str = PATH
    args: list[str] = field(default_factory=lambda: ["dracpu-start-guard", "v1", "a", "2-5"])


def test_the_claims_of_a_container_by_its_hooks(guard):
    hooks = [
        Hook("/usr/bin/nvidia-ctk", ["nvidia-ctk", "hook"]),
        Hook(),
        Hook(args=["dracpu-start-guard", "v1", "b", "64"]),
        Hook("/other/kubelet/plugins/dra.cpu/start-guard", ["dracpu-start-guard", "v1", "c", "7"]),
    ]
    assert hook_claims(hooks) == (("a", "2-5"), ("b", "64"), ("c", "7"))
    assert hook_claims([]) == ()
    own = guard.hook(A, CpuSet([1]))
    assert hook_claims([Hook(own["path"], own["args"])]) == ((A, "1"),)


@pytest.mark.parametrize(
    "hook",
    [
        Hook(path="/usr/bin/start-guard"),
        Hook(path="start-guard"),
        Hook(path=""),
        Hook(path=PATH + "x"),
        Hook(path="/var/lib/kubelet/plugins/xdra.cpu/start-guard"),
        Hook(args=[]),
        Hook(args=["start-guard", "v1", "a", "2-5"]),
    ],
    ids=str,
)
def test_hooks_of_others_are_passed_over(hook):
    assert hook_claims([hook]) == ()


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "'dracpu-start-guard' is malformed: expected dracpu-start-guard v1 UID cpulist"),
        (["v1", "a"], "'dracpu-start-guard v1 a' is malformed"),
        (["v1", "a", "1", "2"], "'dracpu-start-guard v1 a 1 2' is malformed"),
        (["v2", "a", "1"], "'dracpu-start-guard v2 a 1' is malformed"),
        (["v1", "../a", "1"], "claim UID '../a' is malformed"),
        (["v3", "x" * 10000], "xxx' is malformed"),
    ],
)
def test_a_hook_of_the_guard_that_is_malformed_is_refused(args, reason):
    with pytest.raises(ClaimError) as caught:
        hook_claims([Hook(), Hook(args=["dracpu-start-guard", *args])])
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 300


# The program in its place


def is_ok(health: Health, registry: CollectorRegistry) -> bool:
    assert registry.get_sample_value("dra_cpu_start_guard_ok") == (not health.missing())
    return health.ready


async def test_until_it_was_tried_the_driver_is_not_ready(guard, health, registry):
    assert health.missing() == {"startguard": "the start guard is not in place yet"}
    assert not is_ok(health, registry)


async def test_it_is_put_in_place_and_tried(guard, plugin_dir, health, registry):
    await guard.put_in_place()
    assert is_ok(health, registry)
    assert names(plugin_dir) == ["start-guard"]
    assert (plugin_dir / "start-guard").read_bytes() == shipped_program().read_bytes()
    assert stat.S_IMODE((plugin_dir / "start-guard").stat().st_mode) == 0o755


async def test_trying_it_leaves_no_note(guard, plugin_dir, health):
    (plugin_dir / "guard-notes").mkdir(parents=True)
    await guard.put_in_place()
    assert health.ready
    assert names(plugin_dir / "guard-notes") == []


async def test_it_is_tried_on_the_largest_machine_too(guard, health, monkeypatch):
    everywhere = set(range(8192))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: everywhere)
    await guard.put_in_place()
    assert health.ready


async def test_the_same_program_is_not_put_in_place_again(guard, plugin_dir, health):
    await guard.put_in_place()
    inode = (plugin_dir / "start-guard").stat().st_ino
    await guard.put_in_place()
    assert (plugin_dir / "start-guard").stat().st_ino == inode
    assert health.ready


@pytest.mark.parametrize("umask", [0o022, 0o077])
async def test_its_mode_is_put_right_whatever_the_umask(guard, plugin_dir, health, umask):
    before = os.umask(umask)
    try:
        await guard.put_in_place()
        (plugin_dir / "start-guard").chmod(0o644)
        await guard.put_in_place()
    finally:
        os.umask(before)
    assert stat.S_IMODE((plugin_dir / "start-guard").stat().st_mode) == 0o755
    assert health.ready


async def test_the_program_of_another_version_is_replaced_also_while_it_runs(guard, make_guard, script, health):
    await make_guard(script("cat > /dev/null")).put_in_place()
    assert not health.ready
    old = guard.hook(A, CpuSet([1]))["path"]
    running = await asyncio.create_subprocess_exec(old, stdin=subprocess.PIPE)
    await guard.put_in_place()
    assert health.ready
    await running.communicate(b"")


async def test_what_a_crash_left_is_cleared_away(guard, plugin_dir, health):
    plugin_dir.mkdir(parents=True)
    (plugin_dir / ".start-guard.0123abcd.tmp").touch()
    (plugin_dir / "start-guard-test").mkdir()
    (plugin_dir / "start-guard-test" / "config.json").touch()
    (plugin_dir / "dra.sock").touch()
    await guard.put_in_place()
    assert health.ready
    assert names(plugin_dir) == ["dra.sock", "start-guard"]


@pytest.mark.parametrize("obstacle", ["link", "fifo", "empty"])
async def test_what_is_no_program_is_replaced(guard, plugin_dir, health, tmp_path, obstacle):
    plugin_dir.mkdir(parents=True)
    path = plugin_dir / "start-guard"
    (tmp_path / "elsewhere").write_bytes(shipped_program().read_bytes())
    if obstacle == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif obstacle == "fifo":
        os.mkfifo(path)
    else:
        path.touch()
    await guard.put_in_place()
    assert health.ready
    assert stat.S_ISREG(path.lstat().st_mode)


def foreign(machine: int) -> bytes:
    content = bytearray(shipped_program().read_bytes())
    struct.pack_into("<H", content, 18, machine)
    return bytes(content)


CONSEQUENCE = (
    "; until this is put right, or the driver runs with --start-guard=false, the runtime refuses every container"
)
PROGRAMS = {
    "exit 0": "does not refuse as it should: exit status 0",
    "exit 1": "refuses what it should let pass: exit status 1",
    "echo 'a b' >&2; echo c >&2; exit 127": "refuses what it should let pass: exit status 127, a b c",
    "kill -9 $$": "refuses what it should let pass: killed by signal 9",
    "[ $3 = 0-8191 ]": "does not refuse as it should: exit status 1",
    "[ $3 = 0-8191 ] || kill -11 $$": "does not refuse as it should: killed by signal 11",
}


@pytest.mark.parametrize("text", PROGRAMS)
async def test_a_program_that_judges_wrongly_is_found_out(make_guard, script, health, registry, text):
    await make_guard(script(text)).put_in_place()
    assert not is_ok(health, registry)
    (reason,) = health.missing().values()
    assert PROGRAMS[text] in reason
    assert CONSEQUENCE in reason
    assert reason.isprintable()


async def test_a_program_that_never_ends_is_found_out(make_guard, script, health, monkeypatch):
    monkeypatch.setattr(startguard, "_TIMEOUT_S", 0.1)
    await make_guard(script("exec sleep 60")).put_in_place()
    assert "start-guard did not end within 0.1 s" in health.missing()["startguard"]


async def test_a_program_of_another_architecture_is_found_out(make_guard, tmp_path, health, registry):
    (tmp_path / "foreign").write_bytes(foreign(243))  # RISC-V
    await make_guard(tmp_path / "foreign").put_in_place()
    assert not is_ok(health, registry)
    reason = health.missing()["startguard"]
    assert f"Exec format error; it is of another architecture than this machine, {os.uname().machine}" in reason


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (os.ST_NOEXEC | os.ST_NOSUID, "Permission denied; the file system there is mounted noexec"),
        (0, "Permission denied; SELinux, AppArmor or another security module forbids it"),
    ],
)
async def test_a_host_that_does_not_let_it_run_is_told_what_stands_in_the_way(
    guard, health, registry, monkeypatch, flags, reason
):
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    @dataclass
    class FileSystem:
        f_flag: int = flags

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(os, "statvfs", lambda path: FileSystem())
    await guard.put_in_place()
    assert not is_ok(health, registry)
    assert reason in health.missing()["startguard"]
    monkeypatch.undo()
    await guard.put_in_place()
    assert is_ok(health, registry)


def test_a_file_system_without_execution(tmp_path):
    """The real thing, in a mount namespace of its own, where that may be made."""
    code = f"""
import asyncio, pathlib
from driver.health import Health
from driver.metrics import Metrics
from driver.startguard import StartGuard
health = Health()
asyncio.run(StartGuard(pathlib.Path({str(tmp_path)!r}) / "mounted" / "plugins", health, Metrics()).put_in_place())
print(health.missing()["startguard"])
"""
    (tmp_path / "mounted").mkdir()
    (tmp_path / "code.py").write_text(code)
    mount = f"mount -t tmpfs -o noexec none {tmp_path}/mounted && exec {sys.executable} {tmp_path}/code.py"
    ended = subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if "permitted" in ended.stderr or "denied" in ended.stderr:
        pytest.skip("a mount namespace needs root")
    assert "Permission denied; the file system there is mounted noexec" in ended.stdout, ended.stderr


async def test_a_folder_that_cannot_be_written_to_is_reported(guard, plugin_dir, health, registry):
    plugin_dir.parent.mkdir()
    plugin_dir.touch()
    await guard.put_in_place()
    assert not is_ok(health, registry)
    assert "cannot install the start guard: " in health.missing()["startguard"]
    plugin_dir.unlink()
    plugin_dir.mkdir()
    (plugin_dir / "start-guard").mkdir()
    await guard.put_in_place()
    assert "cannot install the start guard: " in health.missing()["startguard"]
    (plugin_dir / "start-guard").rmdir()
    (plugin_dir / "start-guard-test").touch()
    await guard.put_in_place()
    assert not is_ok(health, registry)
    assert "start-guard-test" in health.missing()["startguard"]


async def test_a_full_disk_leaves_the_old_program(guard, make_guard, script, plugin_dir, health, disk):
    await make_guard(script("exit 0")).put_in_place()
    before = (plugin_dir / "start-guard").read_bytes()
    disk.fail("write", "start-guard", errno.ENOSPC)
    await guard.put_in_place()
    assert "cannot install the start guard: [Errno 28] No space left on device" in health.missing()["startguard"]
    assert names(plugin_dir) == ["start-guard"]
    assert (plugin_dir / "start-guard").read_bytes() == before


async def test_an_installation_without_the_program_says_so(make_guard, tmp_path, plugin_dir, health):
    await make_guard(tmp_path / "nothing").put_in_place()
    assert "the start guard is missing from this installation of the driver: " in health.missing()["startguard"]
    assert not plugin_dir.exists()


async def test_a_program_that_somebody_removed_is_put_back(guard, plugin_dir, health, monkeypatch, until):
    monkeypatch.setattr(startguard, "_CHECK_AGAIN_S", 0.0)
    await guard.put_in_place()
    keeping = asyncio.create_task(guard.keep_in_place())
    try:
        (plugin_dir / "start-guard").unlink()
        await until((plugin_dir / "start-guard").exists)
        (plugin_dir / "start-guard").unlink()
        (plugin_dir / "start-guard").mkdir()
        await until(lambda: not health.ready)
        (plugin_dir / "start-guard").rmdir()
        await until(lambda: health.ready)
    finally:
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping


# The specs


def specs(folder: Path) -> dict[str, object]:
    found = {}
    for path in folder.glob("dra.k8s.io-cpu_*.json"):
        (device,) = json.loads(path.read_bytes())["devices"]
        found[device["name"].removeprefix("claim-")] = device["containerEdits"].get("hooks")
    return found


async def test_each_spec_has_the_hook_of_its_claim(guard, tmp_path):
    cdi = CdiDirectory(tmp_path / "cdi", guard.hook)
    assert cdi.write_now(A, CpuSet.parse("2-5"))
    assert cdi.write_now(B, CpuSet([6]))
    assert not cdi.write_now(B, CpuSet([6]))
    assert specs(tmp_path / "cdi") == {
        "a": [guard.hook(A, CpuSet.parse("2-5"))],
        "b": [guard.hook(B, CpuSet([6]))],
    }
    loaded = await cdi.load()
    assert {uid: str(found.cpus) for uid, found in loaded.found.items()} == {"a": "2-5", "b": "6"}


async def test_a_folder_outside_ascii_stays_readable_as_yaml(tmp_path, health):
    plugin_dir = tmp_path / "küche😀"
    guard = StartGuard(plugin_dir, health, Metrics())
    await guard.put_in_place()
    assert health.ready
    cdi = CdiDirectory(tmp_path / "cdi", guard.hook)
    cdi.write_now(A, CpuSet([1]))
    (path,) = (tmp_path / "cdi").iterdir()
    assert str(plugin_dir) in path.read_text(encoding="utf-8")


async def test_at_the_start_all_specs_are_brought_up_to_date(guard, node, make_record):
    async def start(hook: object) -> None:
        pool = CpuPool(node.topology.online, CpuSet(), node.model.groups)
        await restore(
            ledger=Ledger(pool),
            records=RecordStore(node.records_folder),
            cdi=CdiDirectory(node.cdi_folder, hook),
            metadata=MetadataStore(node.metadata_folder, node.cdi_folder),
            model=node.model,
            metrics=Metrics(),
        )

    await node.prepare(node.claims.add("a", "2-5"))
    node.cdi_folder.joinpath("dra.cpu.json").write_text(
        json.dumps(
            {
                "cdiVersion": "0.8.0",
                "kind": "dra.k8s.io/cpu",
                "devices": [{"name": "claim-b", "containerEdits": {"env": ["DRA_CPUSET_b=6"]}}],
            }
        )
    )
    assert specs(node.cdi_folder) == {"a": None}
    await start(guard.hook)
    assert specs(node.cdi_folder) == {
        "a": [guard.hook(A, CpuSet.parse("2-5"))],
        "b": [guard.hook(B, CpuSet([6]))],
    }
    await start(None)
    assert specs(node.cdi_folder) == {"a": None, "b": None}
