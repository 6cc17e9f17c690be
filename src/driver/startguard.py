# SPDX-License-Identifier: Apache-2.0
"""The start guard: what stops a container that would run on CPUs its claims do not have.

A runtime whose plugin is dead, hung or late starts the container all the same, without its CPUs. So each claim's CDI
spec has a hook by which the runtime itself runs a small program on the host (``src/startguard``) before anything of the
image runs; it compares what the kernel says of the container's first process with what the hooks allow, and refuses.

The program lies in the plugin folder, whose path is the same on the host and in the driver's container. Its path and
arguments are the same in all versions of the driver, since specs outlive the driver that wrote them. Here it is put
there and tried, again and again: where the host does not run it, every container with a claim is refused.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import stat
import subprocess
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from driver.errors import ClaimError
from driver.files import read_file, remove_temporary_files, replace_file
from driver.health import START_GUARD
from driver.logs import fields
from driver.names import DRIVER_NAME, ClaimUID, claim_uid
from fastcpu import CpuSet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from driver.health import Health

_log = logging.getLogger(__name__)

FILE_NAME: Final = "start-guard"
# The first two arguments of every guard hook; the program knows them too.
_ARGUMENT_0: Final = "dracpu-start-guard"
_FORMAT: Final = "v1"
# A hook without an environment is given the runtime's own.
_ENVIRONMENT: Final = {"LC_ALL": "C"}
# Longer than the program gives itself, so that the container's error says more than that something was killed.
_TIMEOUT_S: Final = 10

_FOLDER_MODE: Final = 0o750
_PROGRAM_MODE: Final = 0o755
_LARGEST_PROGRAM: Final = 16 << 20
_TEST_FOLDER: Final = "start-guard-test"
# As many as any kernel knows: in a test only the one direction may depend on where this process is allowed to run.
_MOST_CPUS: Final = 8192
_TEST_CLAIM: Final = ClaimUID("self-test")
_CHECK_AGAIN_S: Final = 60.0
_LONGEST_REASON: Final = 300
# As many as nobody has.
_MOST_HOOKS: Final = 1024
_SHOWN: Final = 120
_SHOWN_ARGUMENTS: Final = 6


class Hook(Protocol):
    """A hook of a container, as the runtime describes it."""

    @property
    def path(self) -> str:
        """The program."""

    @property
    def args(self) -> Sequence[str]:
        """Its arguments, beginning with its name."""


class GuardMetrics(Protocol):
    """Told whether the guard works."""

    def set_start_guard(self, ok: bool, /) -> None:
        """Say whether this host runs the guard."""


class StartGuardError(Exception):
    """The host does not run the guard as it should; the text says why, for the person who has to put it right."""


def hook_claims(hooks: Sequence[Hook]) -> tuple[tuple[ClaimUID, str], ...]:
    """Find the claims of which a container has the start guard's hook.

    Nobody but the runtime can put a hook into a container, by a CDI spec or for one of its plugins, so unlike the
    environment the hook proves that the container was given the claim's CDI device. What else is in it may have been
    written by the author of any spec.

    Parameters
    ----------
    hooks : sequence of Hook
        The container's createRuntime hooks. Those of others are passed over.

    Returns
    -------
    tuple of (ClaimUID, str)
        For each hook its claim and the list of CPUs that it allows, as it is.

    Raises
    ------
    ClaimError
        If a hook of the guard is malformed, or of a version that is not known here, or there are too many.
    """
    if len(hooks) > _MOST_HOOKS:
        raise ClaimError(f"it has {len(hooks)} createRuntime hooks; expected at most {_MOST_HOOKS}")
    claims = []
    for hook in hooks:
        args = hook.args
        # Any plugin folder: another kubelet folder may have been configured since the container was made.
        if not args or args[0] != _ARGUMENT_0 or not hook.path.endswith(f"/{DRIVER_NAME}/{FILE_NAME}"):
            continue
        if len(args) != 4 or args[1] != _FORMAT:
            shown = " ".join(argument[:_SHOWN] for argument in args[:_SHOWN_ARGUMENTS])[:_SHOWN]
            raise ClaimError(f"start guard hook {shown!r} is malformed: expected {_ARGUMENT_0} {_FORMAT} UID cpulist")
        claims.append((claim_uid(args[2]), args[3]))
    return tuple(claims)


def shipped_program() -> Path:
    """Return where the program lies in the installed distribution."""
    return Path(str(distribution("dracpu").locate_file("driver/bin/dracpu-start-guard")))


class StartGuard:
    """The guard program on this host.

    Parameters
    ----------
    plugin_dir : Path
        The plugin folder. No other process works on it.
    health : Health
        Told, as the condition ``startguard``, why the guard does not work.
    metrics : GuardMetrics
        Told whether it does.
    program : Path, optional
        The program to install; by default the one that was built with this driver.
    """

    def __init__(self, plugin_dir: Path, health: Health, metrics: GuardMetrics, *, program: Path | None = None) -> None:
        self._path = plugin_dir / FILE_NAME
        self._health = health
        self._metrics = metrics
        self._program = shipped_program() if program is None else program
        health.require(START_GUARD, "the start guard is not in place yet")
        metrics.set_start_guard(False)

    def hook(self, uid: ClaimUID, cpus: CpuSet) -> Mapping[str, object]:
        """Return the hook for a claim's CDI spec.

        Parameters
        ----------
        uid : ClaimUID
            The claim.
        cpus : CpuSet
            Its CPUs.

        Returns
        -------
        dict
        """
        return {
            "hookName": "createRuntime",
            "path": str(self._path),
            "args": _arguments(uid, cpus),
            "env": [f"{name}={value}" for name, value in _ENVIRONMENT.items()],
            "timeout": _TIMEOUT_S,
        }

    async def put_in_place(self) -> None:
        """Install the program if it is not there, try it, and report how that went."""
        try:
            await asyncio.to_thread(self._install_and_test)
        except (OSError, StartGuardError) as error:
            reason = (
                f"{error}; until this is put right, or the driver runs with --start-guard=false, "
                "the runtime refuses every container that has a claim"
            )
            self._health.set_missing(START_GUARD, reason)
            self._metrics.set_start_guard(False)
        else:
            self._health.set_ok(START_GUARD)
            self._metrics.set_start_guard(True)

    async def keep_in_place(self) -> None:
        """Look after the program for ever: somebody may remove it, or make or mend what stands in its way."""
        while True:
            await asyncio.sleep(_CHECK_AGAIN_S)
            await self.put_in_place()

    def _install_and_test(self) -> None:
        try:
            content = read_file(self._program, _LARGEST_PROGRAM)
        except OSError as error:
            raise StartGuardError(
                f"the start guard is missing from this installation of the driver: {error}"
            ) from error
        try:
            self._install(content)
        except OSError as error:
            raise StartGuardError(f"cannot install the start guard: {error}") from error
        folder = self._path.with_name(_TEST_FOLDER)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._test(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _install(self, content: bytes) -> None:
        self._path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        remove_temporary_files(self._path.parent, FILE_NAME.__eq__)
        # By rename: the file of a program that runs just now cannot be written to.
        if replace_file(self._path, content, mode=_PROGRAM_MODE, durable=True):
            _log.info("installed the start guard", extra=fields(path=self._path, bytes=len(content)))
        elif stat.S_IMODE(os.lstat(self._path).st_mode) != _PROGRAM_MODE:
            os.chmod(self._path, _PROGRAM_MODE)

    def _test(self, folder: Path) -> None:
        """Let the program judge this process, in a bundle of its own: once as a good container, once as a bad one."""
        used = os.sched_getaffinity(os.getpid())
        good = CpuSet(range(_MOST_CPUS))
        bad = CpuSet([1 if used == {0} else 0])
        status, line = self._judge(folder, good)
        if status != 0:
            raise StartGuardError(f"{self._path} refuses what it should let pass: {_how_it_ended(status, line)}")
        status, line = self._judge(folder, bad)
        if status != 1 or "allow CPUs" not in line:
            raise StartGuardError(f"{self._path} does not refuse as it should: {_how_it_ended(status, line)}")

    def _judge(self, folder: Path, cpus: CpuSet) -> tuple[int, str]:
        hook = {name: value for name, value in self.hook(_TEST_CLAIM, cpus).items() if name != "hookName"}
        (folder / "config.json").write_text(json.dumps({"hooks": {"createRuntime": [hook]}}))
        # Without the id that a container has, so that no note is left of it.
        state = {"ociVersion": "1.2.0", "status": "creating", "pid": os.getpid(), "bundle": str(folder)}
        try:
            ended = subprocess.run(
                _arguments(_TEST_CLAIM, cpus),
                executable=self._path,
                env=_ENVIRONMENT,
                cwd=folder,
                input=json.dumps(state).encode(),
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StartGuardError(f"{self._path} did not end within {_TIMEOUT_S} s") from error
        except OSError as error:
            raise StartGuardError(f"this host does not run {self._path}: {self._why_not(error)}") from error
        return ended.returncode, ended.stderr.decode("ascii", "replace")

    def _why_not(self, error: OSError) -> str:
        if error.errno == errno.ENOEXEC:
            return f"{error.strerror}; it is of another architecture than this machine, {os.uname().machine}"
        if error.errno in (errno.EACCES, errno.EPERM):
            if os.statvfs(self._path).f_flag & os.ST_NOEXEC:
                return f"{error.strerror}; the file system there is mounted noexec"
            return f"{error.strerror}; SELinux, AppArmor or another security module forbids it"
        return str(error.strerror or error)


def _arguments(uid: ClaimUID, cpus: CpuSet) -> list[str]:
    return [_ARGUMENT_0, _FORMAT, uid, str(cpus)]


def _how_it_ended(status: int, line: str) -> str:
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    said = " ".join(line.split())[:_LONGEST_REASON]
    return f"{how}, {said}" if said else how
