# SPDX-License-Identifier: Apache-2.0
"""The pages that tell how to install the driver and how to schedule for it: their commands are run, in their order.

What they print is what the pages show, but for numbers, names that Kubernetes makes up, and what the pages leave out.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from e2e import programs, scratch
from e2e.cluster.cluster import CHART
from e2e.cluster.deployment import Deployment
from e2e.images import IMAGE

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
# What the fixture `driver_image` does.
PREPARED = ("deploy/image ", "ctr ")
# What says how it is now, and may not yet be as it will.
ASKS = ("kubectl get", "kubectl exec", "kubectl -n kube-system exec", "kubectl -n kube-system logs", "curl")


def sessions(page):
    """Yield for each block of a page its commands, each with the output that is shown."""
    for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        yield [
            (command, output.splitlines())
            for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
        ]


def snippet(page, mark):
    """Return the YAML of a page that begins with this comment."""
    [text] = [each for each in re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL) if mark in each]
    return yaml.safe_load(text)


def unspecific(line):
    """Return a line without what differs from run to run."""
    line = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}", "#", line)
    line = re.sub(r"\w{3} \w{3} +\d+ [\d:]+ \d{4}", "#", line)
    return " ".join(re.sub(r"\d[\d,.:-]*", "#", line).split())


def lacks(shown, printed):
    """Return the lines that are shown, but were not printed."""
    printed = [unspecific(line) for line in printed.splitlines()]

    def found(line):
        pattern = ".*".join(re.escape(part.strip()) for part in unspecific(line).split("…"))
        return any(re.fullmatch(pattern, each) for each in printed)

    return [line for line in shown if not found(line)]


class Reader:
    """Somebody who types what a page says, in a folder that looks like the project's."""

    def __init__(self, cluster, folder):
        self._cluster = cluster
        self._started = []
        self._folder = folder
        for name in ("deploy", "docs"):
            (folder / name).symlink_to(ROOT / name)
        found = [programs.build(each) for each in (programs.KUBERNETES, programs.HELM, programs.CONTAINERD)]
        self._environment = {
            **os.environ,
            **scratch.mark(cluster.folder),
            "PATH": ":".join([*map(str, found), os.environ["PATH"]]),
            "KUBECONFIG": str(cluster.control_plane.admin),
            "HOME": str(folder),
        }

    def write(self, name, value):
        """Write a file that the page shows, as JSON, which is YAML as well."""
        (self._folder / name).write_text(json.dumps(value, separators=(",", ":"), default=str))

    async def follow(self, session):
        """Run the commands of one block."""
        for command, shown in session:
            if not command.startswith(PREPARED):
                await self._run(command, shown)

    async def _run(self, command, shown):
        here = command.replace("/var/lib/kubelet", str(self._cluster.node.kubelet_root))
        here = here.replace("http://127.0.0.1:8080", self._cluster.deployed_url)
        if here.endswith("&"):
            self._started.append(await self._start(here.removesuffix("&")))
            return
        status, output = None, ""

        async def seen():
            nonlocal status, output
            process = await self._start(here)
            output = (await process.communicate())[0].decode()
            status = process.returncode
            return (status == 0 and not lacks(shown, output)) or not command.startswith(ASKS)

        with suppress(AssertionError):
            await self._cluster.until(seen, command, timeout_s=90)
        assert (status, lacks(shown, output)) == (0, []), f"$ {command}\n{output}"

    async def _start(self, command):
        return await asyncio.create_subprocess_exec(
            *("bash", "-c", f"set -o pipefail; {command}"),
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )

    async def stop(self):
        """End what runs in the background."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            await process.communicate()
        self._started.clear()


@pytest_asyncio.fixture(loop_scope="session")
async def reader(cluster, driver_image, tmp_path):
    name = "docker.io/library/busybox:1"
    await cluster.node.containerd.ctr("-n", "k8s.io", "images", "tag", "--force", IMAGE, name)
    reader = Reader(cluster, tmp_path)
    yield reader
    await reader.stop()


async def test_installation(cluster, undeployed, reader):
    page = "installation.md"
    reader.write("values.yaml", {**cluster.chart_values(), **snippet(page, "# values.yaml")})
    for session in sessions(page):
        await reader.follow(session)
    await cluster.until(lambda: no_slices(cluster), "the kubelet deletes the slices")
    assert Deployment(cluster).claim_files() == []


async def no_slices(cluster):
    return not await cluster.slices()


async def test_external_scheduler(cluster, reader):
    page = "external-scheduler.md"
    await cluster.install_chart(snippet("installation.md", "# values.yaml"))
    trying, by_hand, releasing = sessions(page)
    await reader.follow(trying)
    await reader.stop()
    await cluster.clear()

    await cluster.kubectl("apply", "--filename", str(DOCS / "examples" / "scheduled-outside.yaml"))
    pod = await cluster.pod("served-outside")
    allocation = snippet(page, "# allocation.json")
    allocation["status"]["reservedFor"][0]["uid"] = pod["metadata"]["uid"]
    reader.write("allocation.json", allocation)
    reader.write("binding.json", snippet(page, "# binding.json"))
    await reader.follow(by_hand)
    await cluster.wait_running("served-outside")
    assert await cluster.cpus("served-outside") == "1"
    await reader.follow(releasing)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.name)
async def test_the_api_server_takes_what_is_shown(cluster, path):
    for text in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
        document = yaml.safe_load(text)
        if document.get("kind") in ("ResourceClaim", "DeviceClass"):
            flags = ("--dry-run=server", "--validate=strict", "--filename=-")
            await cluster.kubectl("apply", *flags, input=text)


async def test_helm_takes_the_values_that_are_shown(cluster):
    assert shutil.which("helm", path=str(await asyncio.to_thread(programs.build, programs.HELM)))
    for page in (DOCS / "installation.md", CHART / "README.md"):
        values = snippet(page, "# values.yaml")
        await cluster.helm("template", "dracpu", str(CHART), "--values=-", input=yaml.safe_dump(values))
