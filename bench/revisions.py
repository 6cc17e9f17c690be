# SPDX-License-Identifier: Apache-2.0
"""Two revisions of the project side by side: which one to compare with, and both built alike for one interpreter."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_COMPILED = ("src", "CMakeLists.txt", "pyproject.toml")
_MAIN = ("origin/main", "main")


class NothingToCompareError(Exception):
    """The clone does not have the revision that one would compare with; the text says so in one line."""


def choose_base(given: str, root: Path = ROOT) -> str:
    """Return the commit to compare with.

    Parameters
    ----------
    given : str
        What the user asks for, or nothing: then what this branch left main at; on main the last commit if something is
        not committed yet, else the one before it.
    root : Path
        The clone.

    Raises
    ------
    NothingToCompareError
        If nothing is given and there is nothing to choose.
    ValueError
        If what is given is no commit of this clone.
    """
    if given:
        commit = _commit(root, given)
        if commit is None:
            raise ValueError(f"BASE={given} is no commit of this clone")
        return commit
    head = _commit(root, "HEAD")
    if head is None:
        raise NothingToCompareError("this is no git clone with a commit, so there is no revision to compare with")
    for main in _MAIN:
        fork = _git(root, "merge-base", "HEAD", main)
        if fork is not None and fork != head:
            return fork
    if _git(root, "status", "--porcelain", "--", *_COMPILED):
        return head
    parent = _commit(root, "HEAD~1")
    if parent is None:
        shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
        why = "is shallow and ends at its first commit" if shallow else "has one commit only"
        raise NothingToCompareError(
            f"this clone {why}, so there is no revision to compare with; fetch more, or say BASE=…"
        )
    return parent


def describe(commit: str, root: Path = ROOT) -> str:
    """Return a commit's short name and subject."""
    return _git(root, "log", "-1", "--format=%h %s", commit) or commit


def unpack(commit: str, folder: Path, root: Path = ROOT) -> Path:
    """Put the files of a commit into a folder. Unlike a work tree this leaves nothing in the clone if it is killed."""
    archive = subprocess.run(["git", "archive", commit], cwd=root, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def build(source: Path, folder: Path) -> Path:
    """Build and install one revision the way a user's wheel is built, for this interpreter.

    Parameters
    ----------
    source : Path
        Its files.
    folder : Path
        Where to build.

    Returns
    -------
    Path
        The folder to import it from.

    Raises
    ------
    RuntimeError
        With what pip said, if it cannot be built.
    """
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
    command += ["--no-deps", f"--target={site}", f"-Cbuild-dir={folder / 'build'}", source]
    # What a user's own build may be told to do, such as to take warnings for errors, is not for an old revision.
    environment = {name: value for name, value in os.environ.items() if name != "CMAKE_ARGS"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    installed = subprocess.run(command, capture_output=True, text=True, env=environment)
    if installed.returncode:
        raise RuntimeError(f"{source} cannot be built:\n{installed.stdout}{installed.stderr}")
    return site


def python(site: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run the benchmarks' programs with a revision that was built."""
    # -S: the editable install of this revision comes in by a path file.
    paths = [site, Path(__file__).parent, ROOT / "tests", sysconfig.get_path("purelib")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONHASHSEED": "0"}
    return [sys.executable, "-S"], environment


def _commit(root: Path, name: str) -> str | None:
    return _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
