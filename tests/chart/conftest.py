# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by the real helm."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from e2e import programs

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "dracpu"

Manifest = dict[str, Any]


class HelmError(Exception):
    """Helm has refused something; the text is what it says."""


class Helm:
    """Helm, for charts only: it knows no cluster.

    Parameters
    ----------
    program : Path
        Helm.
    home : Path
        A folder for what it keeps.
    """

    def __init__(self, program: Path, home: Path) -> None:
        self._program = program
        self._home = home

    def __call__(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Return what helm prints, or raise `HelmError`."""
        homes = {f"HELM_{kind}_HOME": str(self._home) for kind in ("CACHE", "CONFIG", "DATA")}
        given = [] if values is None else ["--values=-"]
        done = subprocess.run(
            [self._program, *arguments, *given],
            env={"HOME": str(self._home), **homes},
            input=json.dumps(values or {}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise HelmError(done.stderr)
        return done.stdout

    def template(self, values: Mapping[str, Any] | None = None, *flags: str, release: str = "test") -> Rendered:
        """Return what a release would install."""
        flags = ("--namespace=kube-system", *flags)
        text = self("template", release, str(CHART), *flags, values=values or {})
        return Rendered([manifest for manifest in yaml.safe_load_all(text) if manifest])

    def refusal(self, values: Mapping[str, Any], *flags: str) -> str:
        """Return why values are refused."""
        with pytest.raises(HelmError) as refused:
            self.template(values, *flags)
        return str(refused.value)


class Rendered:
    """The objects of a release.

    Attributes
    ----------
    manifests : list of dict
    """

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests

    def of(self, kind: str) -> Manifest:
        """Return the one object of a kind."""
        [found] = [manifest for manifest in self.manifests if manifest["kind"] == kind]
        return found

    @property
    def pod(self) -> Manifest:
        """The template of the DaemonSet's pods."""
        template: Manifest = self.of("DaemonSet")["spec"]["template"]
        return template

    @property
    def container(self) -> Manifest:
        """The driver's container."""
        [container] = self.pod["spec"]["containers"]
        found: Manifest = container
        return found

    @property
    def config(self) -> str:
        """The driver's configuration file."""
        data: dict[str, str] = self.of("ConfigMap")["data"]
        [(name, text)] = data.items()
        assert name == "config.yaml"
        return text


class Render(Protocol):
    """Renders the chart."""

    def __call__(self, values: Mapping[str, Any] | None = None, *flags: str, release: str = "test") -> Rendered: ...


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm, built from its pinned Go module when it was not before."""
    return Helm(programs.build(programs.HELM) / "helm", tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """Render the chart; the same values are rendered once."""

    @functools.cache
    def rendered(values: str, flags: tuple[str, ...], release: str) -> Rendered:
        return helm.template(json.loads(values), *flags, release=release)

    def render(values: Mapping[str, Any] | None = None, *flags: str, release: str = "test") -> Rendered:
        return rendered(json.dumps(values), flags, release)

    return render
