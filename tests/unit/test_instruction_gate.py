# SPDX-License-Identifier: Apache-2.0
"""The gate on instruction counts: what it lets through, what it does not, and which revision it takes for its base."""

from __future__ import annotations

import subprocess

import pytest

import instructions
import revisions

BASE = {"check": 676.0, "parse": 1000.0}


def test_equal_counts_pass():
    lines, faults = instructions.judge(BASE, BASE)
    assert faults == []
    assert [line.split()[-1] for line in lines[1:]] == ["+0.0%", "+0.0%"]


def test_up_to_five_per_cent_more_pass():
    assert instructions.judge(BASE, BASE | {"parse": 1050.0})[1] == []


def test_more_than_five_per_cent_fail():
    lines, faults = instructions.judge(BASE, BASE | {"parse": 1051.0})
    assert faults == ["parse: 1000 → 1051 instructions (+5.1%)"]
    assert lines[-1].split() == ["parse", "1000", "1051", "+5.1%"]


def test_fewer_instructions_pass():
    assert instructions.judge(BASE, BASE | {"parse": 10.0})[1] == []


def test_a_new_kernel_is_reported_but_cannot_fail():
    lines, faults = instructions.judge({"check": 676.0, "place": None}, {"check": 676.0, "place": 1e9})
    assert faults == []
    assert lines[-1].split()[-1] == "new"


def test_a_kernel_that_no_longer_runs_fails():
    _, faults = instructions.judge(BASE, {"check": 676.0, "parse": None})
    assert faults == ["parse: cannot be run with this revision"]


def test_without_a_base_all_counts_are_shown():
    lines, faults = instructions.judge({}, BASE)
    assert faults == []
    assert lines[-1].split() == ["parse", "1000"]


@pytest.fixture
def clone(tmp_path):
    """Make a clone with two commits on main, the second one called `second`."""
    folder = tmp_path / "clone"

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", *identity, "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    folder.mkdir()
    git("init", "--quiet", "--initial-branch=main")
    for name in ("first", "second"):
        (folder / "src").write_text(name)
        git("add", "src")
        git("commit", "--quiet", f"--message={name}")
        git("tag", name)
    return folder, git


def subject(commit: str, folder) -> str:
    return revisions.describe(commit, folder).partition(" ")[2]


def test_on_main_the_base_is_the_commit_before(clone):
    folder, _ = clone
    assert subject(revisions.choose_base("", folder), folder) == "first"


def test_with_uncommitted_changes_the_base_is_the_last_commit(clone):
    folder, _ = clone
    (folder / "src").write_text("third")
    assert subject(revisions.choose_base("", folder), folder) == "second"


def test_on_a_branch_the_base_is_where_it_left_main(clone):
    folder, git = clone
    git("checkout", "--quiet", "-b", "branch", "first")
    for number in range(2):
        git("commit", "--quiet", "--allow-empty", f"--message={number}")
    assert subject(revisions.choose_base("", folder), folder) == "first"


def test_the_base_can_be_given(clone):
    folder, _ = clone
    assert subject(revisions.choose_base("second", folder), folder) == "second"
    with pytest.raises(ValueError, match="BASE=third is no commit of this clone"):
        revisions.choose_base("third", folder)


def test_a_shallow_clone_says_that_there_is_no_base(clone, tmp_path):
    folder, _ = clone
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{folder}", shallow], check=True)
    with pytest.raises(revisions.NothingToCompareError, match="is shallow and ends at its first commit"):
        revisions.choose_base("", shallow)


def test_a_clone_of_one_commit_says_that_there_is_no_base(clone, tmp_path):
    folder, _ = clone
    single = tmp_path / "single"
    subprocess.run(["git", "clone", "--quiet", "--branch=first", str(folder), single], check=True, capture_output=True)
    subprocess.run(["git", "-C", single, "update-ref", "-d", "refs/remotes/origin/main"], check=True)
    with pytest.raises(revisions.NothingToCompareError, match="has one commit only"):
        revisions.choose_base("", single)


def test_files_without_a_repository_say_that_there_is_no_base(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(revisions.NothingToCompareError, match="no git clone"):
        revisions.choose_base("", tmp_path)
