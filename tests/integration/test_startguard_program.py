# SPDX-License-Identifier: Apache-2.0
"""The start guard as a runtime runs it: the real program, bundles on the disk, processes held to CPUs by the kernel."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from driver.guardnotes import Note, parse_note
from driver.startguard import shipped_program
from fastcpu import CpuSet

# The sanitizers bring a program of their own.
PROGRAM = Path(os.environ.get("START_GUARD_PROGRAM") or shipped_program())
UID = "3f6c1d2e-0b1a-4c5d-8e9f-a0b1c2d3e4f5"
OTHER_UID = "0b1a"
CPUS = sorted(os.sched_getaffinity(0))
ONE = str(CPUS[0])
PREFIX = "dracpu start guard: "


@dataclass
class Runtime:
    """Does what runc does: a bundle, the container's first process, the hook with the state on its standard input."""

    program: Path
    bundle: Path
    process: subprocess.Popen[bytes]

    def arguments(self, cpulist: str = ONE, uid: str = UID) -> list[str]:
        return ["dracpu-start-guard", "v1", uid, cpulist]

    def hook(self, cpulist: str = ONE, uid: str = UID, **changes: object) -> dict[str, object]:
        hook = {"path": str(self.program), "args": self.arguments(cpulist, uid), "env": ["LC_ALL=C"], "timeout": 10}
        return {**hook, **changes}

    def config(self, *hooks: object, **more: object) -> dict[str, object]:
        return {"ociVersion": "1.2.0", "hooks": {"createRuntime": list(hooks)}, **more}

    def state(self, **changes: object) -> dict[str, object]:
        state = {"ociVersion": "1.2.0", "id": "c", "status": "creating", "pid": self.process.pid}
        return {**state, "bundle": str(self.bundle), **changes}

    def write(self, config: object) -> None:
        text = config if isinstance(config, str) else json.dumps(config)
        (self.bundle / "config.json").write_text(text)

    def run(self, config: object = None, *, state: object = None, arguments: list[str] | None = None) -> str:
        """Run the hook; return the one line with which it refuses, without what all such lines begin with, or ''."""
        if config is not None:
            self.write(config)
        text = state if isinstance(state, str) else json.dumps(self.state() if state is None else state)
        ended = subprocess.run(
            self.arguments() if arguments is None else arguments,
            executable=self.program,
            env={"LC_ALL": "C"},
            input=text.encode(),
            capture_output=True,
            timeout=20,
            check=False,
        )
        return refusal_of(ended)


def refusal_of(ended: subprocess.CompletedProcess[bytes]) -> str:
    assert ended.stdout == b""
    line = ended.stderr.decode("ascii")
    if ended.returncode == 0:
        assert line == ""
        return ""
    assert ended.returncode == 1
    assert line.startswith(PREFIX)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert line[:-1].isprintable()
    assert len(line) < 700  # the kubelet cuts its events at about 1,000, and the runtime has said something before
    return line[:-1].removeprefix(PREFIX)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process on the first of our CPUs, which does nothing."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    os.sched_setaffinity(process.pid, {CPUS[0]})
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def runtime(tmp_path: Path, process: subprocess.Popen[bytes]) -> Runtime:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    return Runtime(PROGRAM, bundle, process)


def not_pinned_to(cpulist: str) -> str:
    """Return what the guard says of a process on our first CPU."""
    return (
        f"the container would run on CPUs {ONE}, but its claims allow CPUs {cpulist} only: it was not pinned, most "
        "likely since the driver dra.cpu is down, hung or late; check the driver's pod on this node, then let the "
        "container start again"
    )


NOT_OURS = str(CPUS[0] + 1)


def test_the_program_needs_nothing_of_the_host():
    content = shipped_program().read_bytes()
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    segments = {struct.unpack_from("<I", content, offset + size * index)[0] for index in range(count)}
    assert content.startswith(b"\x7fELF\x02")
    assert 1 in segments  # PT_LOAD
    assert not {2, 3} & segments  # PT_DYNAMIC, PT_INTERP
    assert len(content) < 1_000_000


def test_a_container_on_the_cpus_of_its_claim_starts(runtime):
    assert runtime.run(runtime.config(runtime.hook())) == ""


def test_a_container_on_fewer_cpus_than_its_claim_has_starts(runtime):
    assert runtime.run(runtime.config(runtime.hook("0-8191")), arguments=runtime.arguments("0-8191")) == ""


def test_a_container_on_other_cpus_than_its_claim_has_is_refused(runtime):
    config = runtime.config(runtime.hook(NOT_OURS))
    assert runtime.run(config, arguments=runtime.arguments(NOT_OURS)) == not_pinned_to(NOT_OURS)


@pytest.mark.skipif(len(CPUS) < 2, reason="with one CPU nothing can run on more than that")
def test_a_container_on_more_cpus_than_its_claim_has_is_refused(runtime):
    os.sched_setaffinity(runtime.process.pid, CPUS[:2])
    refusal = runtime.run(runtime.config(runtime.hook()))
    both = f"{CPUS[0]}-{CPUS[1]}" if CPUS[1] == CPUS[0] + 1 else f"{CPUS[0]},{CPUS[1]}"
    assert f"would run on CPUs {both}, but its claims allow CPUs {ONE} only" in refusal


@pytest.mark.skipif(len(CPUS) < 2, reason="with one CPU nothing can run on more than that")
def test_a_container_of_two_claims_has_the_cpus_of_both(runtime):
    first, second = map(str, CPUS[:2])
    os.sched_setaffinity(runtime.process.pid, CPUS[:2])
    both = runtime.config({"path": "/usr/bin/other"}, runtime.hook(first), runtime.hook(second, OTHER_UID))
    assert runtime.run(both, arguments=runtime.arguments(first)) == ""
    assert runtime.run(both, arguments=runtime.arguments(second, OTHER_UID)) == ""
    third = runtime.hook("8000-8191", OTHER_UID)
    refusal = runtime.run(runtime.config(runtime.hook(first), third), arguments=runtime.arguments(first))
    assert f"claims allow CPUs {first},8000-8191 only" in refusal


@pytest.mark.parametrize("seed", range(10))
def test_lists_as_the_driver_writes_them(runtime, seed):
    generator = random.Random(seed)
    cpus = CpuSet(generator.sample(range(8192), generator.choice([1, 3, 1000, 8000]))) | CpuSet([CPUS[0]])
    assert runtime.run(runtime.config(runtime.hook(str(cpus))), arguments=runtime.arguments(str(cpus))) == ""
    rest = str(cpus - CpuSet([CPUS[0]])) or NOT_OURS
    refusal = runtime.run(runtime.config(runtime.hook(rest)), arguments=runtime.arguments(rest))
    told = refusal.partition("claims allow CPUs ")[2].partition(" only")[0]
    assert rest.startswith(told.partition(",...")[0])
    assert told in (rest, f"{told.partition(',...')[0]},... ({len(CpuSet.parse(rest))} CPUs)")


def test_nothing_but_guard_hooks_allows_cpus(runtime, tmp_path):
    own = runtime.hook(NOT_OURS)
    others = [
        runtime.hook(ONE, path=f"{runtime.program}-2"),
        runtime.hook(ONE, path=str(runtime.program) + "\0"),
        runtime.hook(ONE, path=["x"]),
        runtime.hook(ONE, path=None),
        runtime.hook(ONE, args=["start-guard", "v1", UID, ONE]),
        runtime.hook(ONE, args=["dracpu-start-guard\0", "v1", UID, ONE]),
        runtime.hook(ONE, args=[["dracpu-start-guard"], "v1", UID, ONE]),
        runtime.hook(ONE, args={"0": "dracpu-start-guard"}),
        runtime.hook(ONE, args=[]),
        {"PATH": str(runtime.program), "args": runtime.arguments()},
        [runtime.hook(ONE)],
        "x",
        7,
        None,
    ]
    config = runtime.config(
        *others,
        own,
        *others,
        process={"args": runtime.arguments(), "env": [f"DRA_CPUSET_{UID}={ONE}"]},
        annotations={"hooks": json.dumps({"createRuntime": [runtime.hook()]}), "x": json.dumps(runtime.hook())},
        createRuntime=[runtime.hook()],
    )
    for point in ("prestart", "createContainer", "startContainer", "poststart", "createruntime"):
        config["hooks"][point] = [runtime.hook()]
    state = runtime.state(annotations={f"DRA_CPUSET_{UID}": ONE, "hooks": runtime.config(runtime.hook())})
    assert runtime.run(config, state=state, arguments=runtime.arguments(NOT_OURS)) == not_pinned_to(NOT_OURS)


def test_the_environment_changes_nothing(runtime):
    runtime.write(runtime.config(runtime.hook()))
    environment = {
        f"DRA_CPUSET_{UID}": NOT_OURS,
        "LD_PRELOAD": "/nonexistent.so",
        "GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.perturb=1",
        "LC_ALL": "tr_TR.UTF-8",
        "MALLOC_ARENA_MAX": "x",
    }
    ended = subprocess.run(
        runtime.arguments(),
        executable=runtime.program,
        env=environment,
        input=json.dumps(runtime.state()).encode(),
        capture_output=True,
        check=False,
    )
    assert refusal_of(ended) == ""


def test_a_path_by_way_of_a_symbolic_link_is_the_hooks_own(runtime, tmp_path):
    # /var/lib/kubelet often is one.
    (tmp_path / "link").symlink_to(runtime.program.parent)
    linked = Runtime(tmp_path / "link" / runtime.program.name, runtime.bundle, runtime.process)
    assert linked.run(linked.config(linked.hook())) == ""
    assert "has no createRuntime hook with the path" in runtime.run(linked.config(linked.hook()))


def test_escapes_and_numbers_beyond_any_type_are_understood(runtime):
    path = "".join(f"\\u{ord(character):04X}" for character in str(runtime.program))
    uid = UID.replace("-", "\\u002d")
    runtime.write(
        f'\n {{"x": [1e999, -0.0, 18446744073709551616, "\\ud83d\\ude00 \\u0000", true], "hooks": {{"createRuntime": '
        f'[{{"path": "{path}", "args": ["dracpu\\u002dstart-guard", "v1", "{uid}", "{ONE}"]}}]}}}}\n '
    )
    assert runtime.run() == ""


def test_what_a_pod_can_make_of_a_configuration_passes_up_to_its_limit(runtime):
    # 6 MiB of environment is all that the kernel starts a program with.
    environment = ["A=" + '"\\' * 1000] * (6 << 10)
    config = json.dumps(runtime.config(runtime.hook(), process={"env": environment}))
    assert len(config) > 12 << 20
    assert runtime.run(config + " " * ((24 << 20) - len(config))) == ""
    assert runtime.run(config + " " * ((24 << 20) - len(config) + 1)) == "config.json has more than 25165824 bytes"


def test_a_container_of_many_claims(runtime):
    hooks = [runtime.hook(str(cpu), f"claim-{cpu}") for cpu in range(8192)]
    assert runtime.run(runtime.config(*hooks, runtime.hook())) == ""


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"x":', "}")])
def test_depth_costs_nothing(runtime, opening, closing):
    depth = 500_000
    deep = opening * depth + "7" + closing * depth
    config = json.dumps(runtime.config(runtime.hook(), x="DEEP")).replace('"DEEP"', deep)
    assert runtime.run(config) == ""
    assert "no JSON" in runtime.run(config[: len(config) // 2])


def test_long_lists_are_cut_and_say_how_many_there_are(runtime):
    odd = ",".join(str(cpu) for cpu in range(1, 8192, 2) if cpu != CPUS[0])
    refusal = runtime.run(runtime.config(runtime.hook(odd)), arguments=runtime.arguments(odd))
    assert f"would run on CPUs {ONE}, but its claims allow CPUs " in refusal
    assert ",... (409" in refusal


CONFIGS = {
    "": "config.json is empty",
    "{": "config.json is no JSON: unexpected end of data at byte 1",
    "[]": "config.json has no createRuntime hook with the path",
    "7": "config.json has no createRuntime hook with the path",
    "{}": "config.json has no createRuntime hook with the path",
    '{"hooks": null}': "config.json has no createRuntime hook with the path",
    '{"hooks": []}': "config.json has no createRuntime hook with the path",
    '{"hooks": {}}': "config.json has no createRuntime hook with the path",
    '{"hooks": {"createRuntime": {}}}': "config.json has no createRuntime hook with the path",
    '{"hooks": {"createRuntime": []}}': "config.json has no createRuntime hook with the path",
    '{"hooks": {"createRuntime": [OWN]}} {}': "config.json is no JSON: unexpected content after document",
    '{"hooks": {"createRuntime": [OWN,]}}': "config.json is no JSON: trailing comma is not allowed",
    '{"hooks": {"createRuntime": [OWN]}, "x": "\x01"}': "config.json is no JSON: ",
    '{"hooks": {"createRuntime": [OWN]}, "x": "\\ud800"}': "config.json is no JSON: ",
    '{"hooks": {"createRuntime": [OWN]}, "x": NaN}': "config.json is no JSON: ",
    '{"hooks": {"createRuntime": [OWN]}, "hooks": {}}': 'config.json has "hooks" twice',
    '{"hooks": {"createRuntime": [OWN], "createRuntime": []}}': '"hooks" in config.json has "createRuntime" twice',
    '{"hooks": {"createRuntime": [OWN, {"path": "/x", "path": "/y"}]}}': 'hook in config.json has "path" twice',
    '{"hooks": {"createRuntime": [OWN, {"args": [], "\\u0061rgs": []}]}}': 'hook in config.json has "args" twice',
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_that_makes_no_sense_refuses(runtime, config):
    assert CONFIGS[config] in runtime.run(config.replace("OWN", json.dumps(runtime.hook())))


ARGUMENTS = [
    (["dracpu-start-guard"], "a hook in config.json has 1 arguments; expected 4"),
    (["dracpu-start-guard", "v1", UID, ONE, ""], "a hook in config.json has 5 arguments; expected 4"),
    (["dracpu-start-guard", "v2", UID, ONE], 'the hook\'s arguments have the format "v2", this program knows v1'),
    (["dracpu-start-guard", 1, UID, ONE], "argument 1 of a hook in config.json is no usable string"),
    (["dracpu-start-guard", "v1\0", UID, ONE], "argument 1 of a hook in config.json is no usable string"),
    (["dracpu-start-guard", "v1", UID, None], "argument 3 of a hook in config.json is no usable string"),
    (["dracpu-start-guard", "v1", UID, "0-3\0"], "argument 3 of a hook in config.json is no usable string"),
    (["dracpu-start-guard", "v1", "", ONE], 'the hook\'s claim UID "" is malformed'),
    (["dracpu-start-guard", "v1", "a" * 64, ONE], f'the hook\'s claim UID "{"a" * 64}" is malformed'),
    (["dracpu-start-guard", "v1", "-a", ONE], 'the hook\'s claim UID "-a" is malformed'),
    (["dracpu-start-guard", "v1", "a/\n", ONE], 'the hook\'s claim UID "a/?" is malformed'),
    (["dracpu-start-guard", "v1", "@", ONE], 'the hook\'s claim UID "@" is malformed'),
    *(
        (["dracpu-start-guard", "v1", UID, wrong], "the hook's cpulist")
        for wrong in (
            *(
                "",
                ",",
                "0,",
                ",0",
                "0-",
                "-0",
                "3-2",
                "0--3",
                "0-1-2",
                " 0",
                "0 ",
                "0\n",
                "+0",
                "0x1",
                "a",
                "0;1",
                "0:1",
            ),
            *("65536", "0-65536", "4294967296", "0-4294967295", "18446744073709551616", "0" * 300 + "65536", "٣"),
        )
    ),
]


@pytest.mark.parametrize(
    ("arguments", "reason"), ARGUMENTS, ids=[str(arguments[2:])[:60] for arguments, _ in ARGUMENTS]
)
def test_a_guard_hook_that_is_malformed_refuses_also_beside_a_good_one(runtime, arguments, reason):
    assert reason in runtime.run(runtime.config(runtime.hook("0-8191", args=arguments), runtime.hook()))
    assert reason in runtime.run(runtime.config(runtime.hook(), runtime.hook("0-8191", args=arguments)))


OWN_ARGUMENTS = [
    ["dracpu-start-guard"],
    ["dracpu-start-guard", "v1", UID],
    ["dracpu-start-guard", "v1", UID, ONE, ONE],
    ["start-guard", "v1", UID, ONE],
    ["", "v1", UID, ONE],
    ["dracpu-start-guard", "v2", UID, ONE],
    ["dracpu-start-guard", "v1", "a b", ONE],
    ["dracpu-start-guard", "v1", UID, "x"],
    ["dracpu-start-guard", "--help"],
]


@pytest.mark.parametrize("arguments", OWN_ARGUMENTS, ids=str)
def test_arguments_that_no_driver_wrote_refuse(runtime, arguments):
    assert runtime.run(runtime.config(runtime.hook()), arguments=arguments) != ""


def test_a_hook_that_is_not_in_the_configuration_refuses(runtime):
    config = runtime.config(runtime.hook())
    for arguments in (runtime.arguments("0-8191"), runtime.arguments(ONE, OTHER_UID)):
        assert "has no createRuntime hook with the path" in runtime.run(config, arguments=arguments)


STATES = {
    "": "the container's state is empty",
    "{": "the container's state is no JSON",
    "null": 'the container\'s state has no "pid" that is a process id',
    "[]": 'the container\'s state has no "pid" that is a process id',
    "{}": 'the container\'s state has no "pid" that is a process id',
    '{"pid": PID}': 'the container\'s state has no "bundle" that is an absolute path',
    '{"pid": PID, "bundle": null}': 'no "bundle" that is an absolute path',
    '{"pid": PID, "bundle": ""}': 'no "bundle" that is an absolute path',
    '{"pid": PID, "bundle": "."}': 'no "bundle" that is an absolute path',
    '{"pid": PID, "bundle": "BUNDLE\\u0000"}': 'no "bundle" that is an absolute path',
    '{"pid": PID, "bundle": "BUNDLE/x\\n\\u007fx"}': "x??x/config.json: No such file or directory",
    '{"pid": PID, "bundle": "/' + "x" * 4095 + '"}': 'has a "bundle" of 4096 bytes; expected a path',
    '{"pid": PID, "bundle": "/' + "x" * 4094 + '"}': "File name too long",
    '{"pid": PID, "pid": PID, "bundle": "BUNDLE"}': 'the container\'s state has "pid" twice',
    '{"pid": PID, "bundle": "BUNDLE", "bundle": "/"}': 'the container\'s state has "bundle" twice',
    '{"pid": "PID", "bundle": "BUNDLE"}': 'no "pid" that is a process id',
    '{"pid": PID.0, "bundle": "BUNDLE"}': 'no "pid" that is a process id',
    '{"pid": 0, "bundle": "BUNDLE"}': 'no "pid" that is a process id',
    '{"pid": -PID, "bundle": "BUNDLE"}': 'no "pid" that is a process id',
    '{"pid": 2147483648, "bundle": "BUNDLE"}': 'no "pid" that is a process id',
    '{"pid": 4294967297, "bundle": "BUNDLE"}': 'no "pid" that is a process id',
    '{"pid": 1' + "0" * 400 + ', "bundle": "BUNDLE"}': 'no "pid" that is a process id',
    '{"pid": 2147483647, "bundle": "BUNDLE"}': "CPU affinity of the container's process 2147483647: No such process",
    '{"PID": PID, "bundle": "BUNDLE"}': 'no "pid" that is a process id',
    '{"pid": PID, "bundle": "BUNDLE"} x': "the container's state is no JSON",
    '{"pid": PID, "bundle": "BUNDLE", "x": "' + "y" * (4 << 20) + '"}': "the container's state has more than 4194304",
}


@pytest.mark.parametrize("state", STATES, ids=[state[:50] for state in STATES])
def test_a_state_that_makes_no_sense_refuses(runtime, state):
    text = state.replace("PID", str(runtime.process.pid)).replace("BUNDLE", str(runtime.bundle))
    assert STATES[state] in runtime.run(runtime.config(runtime.hook()), state=text)


def test_a_process_that_is_gone_refuses(runtime):
    runtime.process.kill()
    runtime.process.wait()
    assert "No such process" in runtime.run(runtime.config(runtime.hook()))


def test_a_configuration_that_cannot_be_read_refuses(runtime):
    config = runtime.bundle / "config.json"
    assert "config.json: No such file or directory" in runtime.run()
    os.mkfifo(config)
    assert "config.json is no regular file" in runtime.run()
    config.unlink()
    config.mkdir()
    assert "config.json is no regular file" in runtime.run()
    config.rmdir()
    config.symlink_to("/dev/zero")
    assert "config.json is no regular file" in runtime.run()
    config.unlink()
    config.symlink_to("config.json")
    assert "Too many levels of symbolic links" in runtime.run()


def command(runtime: Runtime, change: str, cpulist: str = ONE) -> list[str]:
    """Return a command that changes its own process first, and then becomes the guard."""
    program = f"import os, signal, sys; {change}; os.execv(sys.argv[1], sys.argv[2:])"
    return [sys.executable, "-IS", "-c", program, str(runtime.program), *runtime.arguments(cpulist)]


def start(runtime: Runtime, change: str = "", **options: object) -> subprocess.CompletedProcess[bytes]:
    runtime.write(runtime.config(runtime.hook()))
    arguments = command(runtime, change) if change else runtime.arguments()
    program = sys.executable if change else runtime.program
    return subprocess.run(arguments, executable=program, env={}, timeout=20, check=False, **options)


def test_no_standard_input_refuses(runtime):
    ended = start(runtime, "os.close(0)", capture_output=True)
    assert refusal_of(ended) == "cannot read the container's state: Bad file descriptor"
    ended = start(runtime, stdin=subprocess.DEVNULL, capture_output=True)
    assert refusal_of(ended) == "the container's state is empty"
    with open(os.devnull, "wb") as writable:
        ended = start(runtime, stdin=writable, capture_output=True)
    assert refusal_of(ended) == "cannot read the container's state: Bad file descriptor"


def test_it_refuses_also_if_nobody_can_be_told(runtime):
    ended = start(runtime, "os.close(1); os.close(2)", stdin=subprocess.DEVNULL)
    assert ended.returncode == 1


def test_a_state_that_comes_in_pieces_and_without_blocking(runtime):
    runtime.write(runtime.config(runtime.hook()))
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    guard = subprocess.Popen(runtime.arguments(), executable=runtime.program, stdin=reader, env={})
    os.close(reader)
    for byte in json.dumps(runtime.state()).encode():
        os.write(writer, bytes([byte]))
    os.close(writer)
    assert guard.wait(20) == 0


def test_a_runtime_that_never_ends_the_state_is_refused_in_time(runtime):
    runtime.write(runtime.config(runtime.hook()))
    # Whoever starts it may have switched its alarm off.
    change = "signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])"
    guard = subprocess.Popen(
        command(runtime, change),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
    )
    guard.stdin.write(json.dumps(runtime.state()).encode())
    guard.stdin.flush()
    status = guard.wait(20)
    ended = subprocess.CompletedProcess([], status, guard.stdout.read(), guard.stderr.read())
    for stream in (guard.stdin, guard.stdout, guard.stderr):
        stream.close()
    assert "did not give the container's state within 5 s" in refusal_of(ended)


# Notes


@pytest.fixture
def notes(runtime: Runtime, tmp_path: Path) -> Path:
    """The folder for notes, beside a copy of the program that is run from now on."""
    (tmp_path / "plugin").mkdir()
    runtime.program = Path(shutil.copy(runtime.program, tmp_path / "plugin" / "start-guard"))
    folder = tmp_path / "plugin" / "guard-notes"
    folder.mkdir(mode=0o700)
    return folder


def start_on_fewer(runtime: Runtime, identity: object = "c", cpulist: str = "0-8191") -> None:
    """Let a container start on our first CPU although its claim has more."""
    config = runtime.config(runtime.hook(cpulist))
    assert runtime.run(config, state=runtime.state(id=identity), arguments=runtime.arguments(cpulist)) == ""


def test_a_container_on_fewer_cpus_than_its_claim_has_is_noted(runtime, notes):
    start_on_fewer(runtime, "9f86d081884c7d65" * 4)
    (note,) = notes.iterdir()
    assert note.name == "9f86d081884c7d65" * 4
    assert note.read_bytes() == f"v1\t{ONE}\t0-8191\n".encode()
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    assert parse_note(note.read_bytes()) == Note(ONE, "0-8191")


def test_other_containers_are_not_noted(runtime, notes):
    assert runtime.run(runtime.config(runtime.hook())) == ""
    assert runtime.run(runtime.config(runtime.hook(NOT_OURS)), arguments=runtime.arguments(NOT_OURS)) != ""
    assert list(notes.iterdir()) == []


def test_the_hooks_of_several_claims_leave_one_note(runtime, notes):
    config = runtime.config(runtime.hook(ONE), runtime.hook("8000-8191", OTHER_UID))
    assert runtime.run(config, arguments=runtime.arguments(ONE)) == ""
    (note,) = notes.iterdir()
    inode = note.stat().st_ino
    assert runtime.run(config, arguments=runtime.arguments("8000-8191", OTHER_UID)) == ""
    assert [(each.name, each.stat().st_ino) for each in notes.iterdir()] == [("c", inode)]
    assert note.read_bytes() == f"v1\t{ONE}\t{ONE},8000-8191\n".encode()


@pytest.mark.parametrize("count", [1, 20, 100, 4000])
def test_notes_stay_short_and_the_driver_reads_them(runtime, notes, count):
    cpus = CpuSet(range(CPUS[0] + 1, 8192, 8192 // count)) | CpuSet([CPUS[0]])
    start_on_fewer(runtime, cpulist=str(cpus))
    content = (notes / "c").read_bytes()
    assert len(content) < 400
    note = parse_note(content)
    assert note.used == ONE
    assert str(cpus).startswith(note.claimed.partition(",...")[0])
    assert note.claimed in (str(cpus), f"{note.claimed.partition(',...')[0]},... ({len(cpus)} CPUs)")


@pytest.mark.parametrize("identity", ["a", "0", "A.b_c-1", "x" * 128, "a.."])
def test_what_runtimes_may_call_containers_names_a_note(runtime, notes, identity):
    start_on_fewer(runtime, identity)
    assert [each.name for each in notes.iterdir()] == [identity]


HOSTILE = [
    *("", ".", "..", "../c", "a/b", "/c", ".c", "-c", "_c", "a b", "a\n", "a\0", "a\0b", "ä", "a:b", "%s%n"),
    *("x" * 129, "x" * 100_000, 7, -1, 1.5, True, None, ["c"], {"c": "c"}),
]


@pytest.mark.parametrize("identity", HOSTILE, ids=lambda identity: repr(identity)[:20])
def test_what_is_no_file_name_starts_without_a_note(runtime, notes, tmp_path, identity):
    before = sorted(tmp_path.rglob("*"))
    start_on_fewer(runtime, identity)
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [runtime.bundle / "config.json"]


@pytest.mark.parametrize("members", ["", '"id": "c", "id": "d",', '"ID": "c",'])
def test_a_state_without_one_id_starts_without_a_note(runtime, notes, members):
    state = f'{{{members} "pid": {runtime.process.pid}, "bundle": {json.dumps(str(runtime.bundle))}}}'
    config = runtime.config(runtime.hook("0-8191"))
    assert runtime.run(config, state=state, arguments=runtime.arguments("0-8191")) == ""
    assert list(notes.iterdir()) == []


@pytest.mark.parametrize("obstacle", ["nothing", "a file", "a link", "a dangling link", "a fifo"])
def test_without_its_folder_it_leaves_no_note(runtime, notes, tmp_path, obstacle):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    notes.rmdir()
    if obstacle == "a file":
        notes.touch()
    elif obstacle == "a fifo":
        os.mkfifo(notes)
    elif obstacle != "nothing":
        notes.symlink_to(elsewhere if obstacle == "a link" else tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    start_on_fewer(runtime)
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [runtime.bundle / "config.json"]


@pytest.mark.parametrize("name", ["c", ".c"])
@pytest.mark.parametrize("obstacle", ["file", "folder", "link", "fifo"])
def test_what_stands_in_a_note_s_place_stays(runtime, notes, tmp_path, name, obstacle):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("x")
    path = notes / name
    make = {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to(elsewhere)}
    make.get(obstacle, lambda: os.mkfifo(path))()
    before = path.lstat()
    start_on_fewer(runtime)
    assert [each.name for each in notes.iterdir()] == [name]
    assert path.lstat() == before
    assert elsewhere.read_text() == "x"


def test_a_full_folder_keeps_the_first_notes(runtime, notes):
    for number in range(999):
        (notes / f"old-{number}").touch()
    start_on_fewer(runtime, "last")
    assert (notes / "last").exists()
    start_on_fewer(runtime, "late")
    assert len(list(notes.iterdir())) == 1000
    assert not (notes / "late").exists()


def test_a_disk_that_takes_nothing_stops_no_container(runtime, notes):
    runtime.write(runtime.config(runtime.hook("0-8191")))
    # Python ignores the signal, and so would the guard.
    change = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)"
    )
    ended = subprocess.run(
        command(runtime, change, "0-8191"),
        input=json.dumps(runtime.state()).encode(),
        capture_output=True,
        env={},
        timeout=20,
        check=False,
    )
    assert refusal_of(ended) == ""
    assert list(notes.iterdir()) == []


def test_a_read_only_file_system_stops_no_container(runtime, notes):
    """The real thing, in a mount namespace of its own, where that may be made."""
    runtime.write(runtime.config(runtime.hook("0-8191")))
    mount = 'mount -t tmpfs -o ro none "$1" || exit 77; shift; exec -a dracpu-start-guard "$@"'
    arguments = ["unshare", "--mount", "bash", "-c", mount, "bash", str(notes), str(runtime.program)]
    ended = subprocess.run(
        [*arguments, *runtime.arguments("0-8191")[1:]],
        input=json.dumps(runtime.state()).encode(),
        capture_output=True,
        timeout=20,
        check=False,
    )
    if ended.returncode == 77 or b"unshare" in ended.stderr:
        pytest.skip("a mount namespace needs root")
    assert refusal_of(ended) == ""


# What debuggers ask of the kernel, to stop a program at each system call.
TRACE_ME, NEXT_SYSCALL = 0, 24


def test_time_that_is_up_while_it_notes_stops_no_container(runtime, notes):
    """Its own alarm comes just when it has opened the folder."""
    runtime.write(runtime.config(runtime.hook("0-8191")))
    ptrace = ctypes.CDLL(None).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    change = f"import ctypes; ctypes.CDLL(None).ptrace({TRACE_ME}, 0, None, None)"
    guard = subprocess.Popen(command(runtime, change, "0-8191"), stdin=subprocess.PIPE, env={})
    guard.stdin.write(json.dumps(runtime.state()).encode())
    guard.stdin.close()
    number = 0
    _, status = os.waitpid(guard.pid, 0)
    while os.WIFSTOPPED(status):
        stopped_by = os.WSTOPSIG(status)
        if number == 0 and stopped_by == signal.SIGTRAP and opened(guard.pid, notes):
            number = signal.SIGALRM
            os.kill(guard.pid, number)
        deliver = stopped_by if stopped_by != signal.SIGTRAP else 0
        assert ptrace(NEXT_SYSCALL, guard.pid, None, deliver) == 0
        _, status = os.waitpid(guard.pid, 0)
    guard.returncode = os.waitstatus_to_exitcode(status)
    assert number == signal.SIGALRM
    assert guard.returncode == 0
    assert not (notes / "c").exists()


def opened(pid: int, path: Path) -> bool:
    """Tell whether a process has a file open."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            if os.path.samefile(f"/proc/{pid}/fd/{descriptor}", path):
                return True
    return False
