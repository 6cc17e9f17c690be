# SPDX-License-Identifier: Apache-2.0
"""The image: that the Dockerfile can be carried out without Docker, and what an archive of it is like."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def image() -> ModuleType:
    """The script as a module."""
    loader = SourceFileLoader("deploy_image", str(DEPLOY / "image"))
    spec = importlib.util.spec_from_loader("deploy_image", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["deploy_image"] = module  # dataclasses look there
    keep, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = keep
    return module


@pytest.fixture
def project(image: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project in place of this one."""
    root = tmp_path / "project"
    (root / "src/driver/__pycache__").mkdir(parents=True)
    for name in ("src/driver/a.py", "src/driver/b.so", "src/driver/__pycache__/a.pyc", "pyproject.toml", "other"):
        (root / name).write_text(name)
    shutil.copytree(DEPLOY, root / "deploy", ignore=shutil.ignore_patterns("helm"))
    shutil.copy(ROOT / ".dockerignore", root)
    monkeypatch.setattr(image, "CACHE", tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(image, "PROJECT", root)
    monkeypatch.setattr(image, "DEPLOY", root / "deploy")
    return root


SMALL = """\
# A comment.
FROM debian:bookworm-slim AS build
COPY pyproject.toml /source/
COPY src /source/src
RUN make it
FROM debian:bookworm-slim
COPY --from=build /source/src /opt/it
ENV PATH=/opt/it:/bin B="c d"
LABEL a=b
CMD ["it", "now"]
"""


@pytest.fixture
def run(image: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str]]:
    """The commands that were run, and in which root; nothing is."""
    done: list[tuple[Path, str]] = []
    monkeypatch.setattr(image, "run", lambda stage, command: done.append((stage.root, command)))

    def debian(root: Path) -> None:
        (root / "etc").mkdir(parents=True)
        (root / "etc/os-release").write_text("VERSION_CODENAME=bookworm\n")

    monkeypatch.setattr(image, "debian", debian)
    return done


def test_the_dockerfile_has_only_what_is_known(image: ModuleType) -> None:
    names = [name for name, _ in image.instructions(DOCKERFILE)]
    assert set(names) == {"FROM", "RUN", "COPY", "ENV", "LABEL", "CMD"}
    assert "\\\n" not in DOCKERFILE
    for name, rest in image.instructions(DOCKERFILE):
        if name == "FROM":
            assert re.fullmatch(r"debian:[a-z]+-slim( AS [a-z]+)?", rest)


def test_charts_of_dra_driver_cpu_find_their_programs(image: ModuleType) -> None:
    """They pass the program as the first argument, so an ENTRYPOINT would be in its way."""
    assert "ln -s /opt/dracpu/bin/dracpu /dracpu &&" in DOCKERFILE
    assert "ln -s /opt/dracpu/bin/dracpu /dracpu-gatherinfo\n" in DOCKERFILE
    assert not re.search("^(ENTRYPOINT|USER)", DOCKERFILE, re.MULTILINE)
    assert 'CMD ["dracpu"]' in DOCKERFILE


def test_what_is_copied_is_not_ignored(image: ModuleType) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name, rest in image.instructions(DOCKERFILE):
        if name == "COPY" and not rest.startswith("--from"):
            for pattern in rest.split()[:-1]:
                assert f"!{pattern.partition('/')[0]}" in ignored
                assert image.sources(pattern)


def test_instructions_are_carried_out_in_order(
    image: ModuleType, project: Path, run: list[tuple[Path, str]], tmp_path: Path
) -> None:
    stage = image.build(SMALL, tmp_path)
    assert [(root.name, command) for root, command in run] == [("stage-0", "make it")]
    assert stage.environment == {"PATH": "/opt/it:/bin", "B": "c d"}
    assert stage.labels == {"a": "b"}
    assert stage.command == ["it", "now"]
    assert files(tmp_path / "stage-0") == {"etc/os-release", "source/pyproject.toml", "source/src/driver/a.py"}
    assert files(stage.root) == {"etc/os-release", "opt/it/driver/a.py"}


def test_what_has_nothing_of_the_project_is_kept_for_a_week(
    image: ModuleType, project: Path, run: list[tuple[Path, str]], tmp_path: Path
) -> None:
    text = "FROM debian:bookworm-slim AS a\nRUN 1\nRUN 2\nCOPY src /src\nRUN 3\nFROM debian:bookworm-slim\nRUN 1\n"

    def commands() -> list[str]:
        run.clear()
        work = Path(tempfile.mkdtemp(dir=tmp_path))
        stage = image.build(text, work)
        assert files(work / "stage-0") == {"etc/os-release", "src/driver/a.py"}
        assert files(stage.root) == {"etc/os-release"}
        return [command for _, command in run]

    assert commands() == ["1", "2", "3"]
    assert commands() == ["3"]
    kept = list((tmp_path / "cache").glob("*.root"))
    assert len(kept) == 3
    image.tidy()
    assert commands() == ["3"]
    for root in kept:
        os.utime(root, (0, 0))
    image.tidy()
    assert commands() == ["1", "2", "3"]


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM debian:bookworm-slim\nUSER nobody\n", "has USER, which is not known"),
        ("RUN x\n", "before the first FROM"),
        ("# nothing\n", "has no FROM"),
        ("FROM debian:bookworm-slim\nCOPY absent /\n", "there is no such file"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(
    image: ModuleType, project: Path, run: list[tuple[Path, str]], tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(image.BuildError, match=said):
        image.build(text, tmp_path)


def test_another_release_is_told(
    image: ModuleType, project: Path, run: list[tuple[Path, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image.build(SMALL.replace("bookworm", "trixie"), tmp_path)
    assert "this machine's packages are of bookworm" in capsys.readouterr().err


def test_an_image_is_kept_by_what_goes_into_it(image: ModuleType, project: Path) -> None:
    first = image.key(SMALL)
    for name in ("src/driver/a.py", "pyproject.toml", "deploy/image", "deploy/Dockerfile"):
        path = project / name
        before = path.read_bytes()
        path.write_bytes(before + b"#")
        assert image.key(SMALL) != first, name
        path.write_bytes(before)
    (project / "src/driver/new.py").touch()
    assert image.key(SMALL) != first
    (project / "src/driver/new.py").unlink()
    for name in ("src/driver/b.so", "src/driver/__pycache__/a.pyc", "other"):
        (project / name).write_text("changed")
    assert image.key(SMALL) == first


def test_an_archive_is_what_docker_save_writes_and_the_same_each_time(image: ModuleType, tmp_path: Path) -> None:
    digests = set()
    for attempt in range(2):
        root = tmp_path / f"root-{attempt}"
        for name in ("bin/it", "dev/null", "tmp/x", "etc/apt/sources.list", "var/lib/apt/lists/x", "etc/passwd"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(name)
            os.utime(root / name, (2000 + attempt, 2000 + attempt))
        os.utime(root / "etc/passwd", (1000, 1000.5))
        (root / "bin/it").chmod(0o755)
        (root / "it").symlink_to("/bin/it")
        stage = image.Stage(root, {"PATH": "/bin"}, {"a": "b"}, ["it"])
        image.write_archive(stage, "it:1", path := tmp_path / f"{attempt}.tar", since=2000.0)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1
    with tarfile.open(path) as archive:
        [manifest] = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        assert manifest["RepoTags"] == ["it:1"]
        config = archive.extractfile(manifest["Config"]).read()  # type: ignore[union-attr]
        [name] = manifest["Layers"]
        layer = archive.extractfile(name)
        assert layer is not None
        assert manifest["Config"] == f"{hashlib.sha256(config).hexdigest()}.json"
        described = json.loads(config)
        assert described["config"] == {"Env": ["PATH=/bin"], "Cmd": ["it"], "Labels": {"a": "b"}}
        assert described["rootfs"]["diff_ids"] == [f"sha256:{hashlib.file_digest(layer, 'sha256').hexdigest()}"]  # type: ignore[arg-type]
        layer.seek(0)
        with tarfile.open(fileobj=layer) as members:
            found = {member.name: member for member in members}
    assert {name for name, member in found.items() if not member.isdir()} == {"bin/it", "etc/passwd", "it"}
    assert {"dev", "tmp", "var/lib/apt"} <= found.keys()
    assert found["bin/it"].mode == 0o755
    assert {name for name, member in found.items() if member.mtime} == {"etc/passwd"}
    assert found["etc/passwd"].mtime == 1000
    assert not any(member.uname or member.gname for member in found.values())


def test_nothing_is_built_twice(image: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "CACHE", tmp_path / "cache")
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_text("it")

    (tmp_path / "cache/tmpleft/by-one-that-was-killed").mkdir(parents=True)
    for _ in range(2):
        assert image.kept("x.tar", make).read_text() == "it"
    assert len(made) == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["lock", "x.tar"]


def test_settings_of_pip_are_passed_and_files_they_name_are_lent(
    image: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    bundle = tmp_path / "bundle.pem"
    bundle.touch()
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\ncert = {bundle}\nindex-url = https://example.org/simple\ntarget = /here\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", f"https://example.org/x {tmp_path} /absent")
    monkeypatch.setenv("https_proxy", "http://proxy.example:1")
    lent, settings = image.access()
    assert settings["PIP_CERT"] == f"/mnt{bundle}"
    assert settings["PIP_INDEX_URL"] == "https://example.org/simple"
    assert settings["PIP_FIND_LINKS"] == f"https://example.org/x /mnt{tmp_path} /absent"
    assert settings["https_proxy"] == "http://proxy.example:1"
    assert not {"PIP_TARGET", "PIP_CONFIG_FILE"} & settings.keys()
    assert {bundle, tmp_path} <= set(lent)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_command_runs_in_the_stage_and_changes_nothing_else(image: ModuleType, tmp_path: Path) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is missing: apt-get install busybox-static")
    root = tmp_path / "root"
    for name in ("bin", "mnt", "proc", "dev", "etc"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for name in ("sh", "cat", "rm", "ls"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc/hosts").touch()
    stage = image.Stage(root, {"OWN": "value"})
    image.run(stage, 'cat /etc/hosts > /hosts; echo "$OWN" > /own; echo > /dev/null; rm -f /etc/hosts; ls /mnt > /lent')
    assert (root / "own").read_text() == "value\n"
    assert (root / "hosts").read_bytes() == Path("/etc/hosts").read_bytes()
    assert "apt.conf" in (root / "lent").read_text()
    assert not list((root / "mnt").iterdir())
    assert not list((root / "dev").iterdir())
    assert (root / "etc/hosts").read_bytes() == b""
    assert str(root) not in Path("/proc/self/mounts").read_text()
    with pytest.raises(image.BuildError, match=r"(?s)exit status 3 of: echo why; exit 3.*why"):
        image.run(stage, "echo why; exit 3")


def test_pinned_versions_are_those_that_the_project_takes() -> None:
    pins = [Requirement(line) for line in (DEPLOY / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    pinned = {pin.name: pin for pin in pins}
    assert len(pinned) == len(pins)
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        [specifier] = pinned[wanted.name].specifier
        assert specifier.operator == "=="
        assert wanted.specifier.contains(specifier.version), text


def test_scripts_are_sound() -> None:
    subprocess.run(["sh", "-n", DEPLOY / "assemble"], check=True)
    for name in ("assemble", "image"):
        assert os.access(DEPLOY / name, os.X_OK)
