# SPDX-License-Identifier: Apache-2.0
"""Containers as somebody hostile writes them: a pod's author, or that of another CDI spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from driver.apis import nri_v1alpha1_pb2 as nri

PREFIX = "DRA_CPUSET_"
CDI = "dra.k8s.io/cpu=claim-"
STRIDES = "0-1048575:1/3,"
GUARD = "/var/lib/kubelet/plugins/dra.cpu/start-guard"
# What the names of variables and devices of others begin with, as long as our own.
PLAIN = {PREFIX: "XRA_CPUSET_", CDI: "xra.k8s.io/cpu=claim-", GUARD: GUARD.replace("start-guard", "start-guild")}
MOST_BYTES = (4 << 20) - (64 << 10)
"""What fits into a message with all that is around it."""

MANY_BYTES = 1 << 20
"""What a pod's author can give to a process in many small pieces."""


@dataclass
class Attack:
    """What a container is made of."""

    name: str
    env: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    hooks: list[list[str]] = field(default_factory=list)

    def container(self, identity: str, sandbox: str) -> nri.Container:
        made = nri.Container(id=identity, name="c", pod_sandbox_id=sandbox, env=self.env)
        made.CDI_devices.extend(nri.CDIDevice(name=name) for name in self.devices)
        for path, *args in self.hooks:
            made.hooks.create_runtime.add(path=path, args=args)
        return made

    def plain(self) -> Attack:
        """The same, with as many bytes, and nothing of it about claims."""

        def innocent(text: str) -> str:
            for ours, theirs in PLAIN.items():
                text = text.replace(ours, theirs)
            return text

        return Attack(
            name=self.name,
            env=[innocent(entry) for entry in self.env],
            devices=[innocent(name) for name in self.devices],
            hooks=[[innocent(part) for part in hook] for hook in self.hooks],
        )


def long_environments(uid: str, cpus: str, n_bytes: int) -> Iterator[Attack]:
    """Yield environments of a few variables of about so many bytes, against a claim that has these CPUs."""
    strides, digits = STRIDES * (n_bytes // len(STRIDES)), "1," * (n_bytes // 2)
    for name, env in {
        "strides of an unknown claim": [f"{PREFIX}a={strides}"],
        "strides of a claim": [f"{PREFIX}{uid}={strides}"],
        "digits of a claim": [f"{PREFIX}{uid}={digits}1"],
        "a long name": [f"{PREFIX}{'u' * n_bytes}=1"],
        "a long name without a value": [PREFIX + "u" * n_bytes],
        "mentions in a value": [f"A={PREFIX * (n_bytes // 11)}"],
        "what looks like entries": ["A=" + f"B\x0b{PREFIX}" * (n_bytes // 13)],
        "a NUL": [f"{PREFIX}{uid}={cpus}\0{'x' * n_bytes}"],
        "no ASCII": [f"{PREFIX}{uid}={'é' * (n_bytes // 2)}", f"{PREFIX}{'é' * 40}=1"],
        "lines": [f"{PREFIX}{uid}={cpus}\n{PREFIX}{uid}={cpus}\n" * (n_bytes // 110)],
    }.items():
        yield Attack(name, env=env)


def many_variables(uid: str, cpus: str, n_bytes: int) -> Iterator[Attack]:
    """Yield environments of as many variables as about so many bytes can have, against the same."""
    for name, env in {
        "thousands of variables": [f"{PREFIX}{number:x}=0-1" for number in range(n_bytes // 22)],
        "thousands of one variable": [f"{PREFIX}{uid}={cpus}"] * (n_bytes // 52),
        "strides in pieces": [f"{PREFIX}{number}={STRIDES * 8}0" for number in range(n_bytes // 140)],
        "tiny variables": ["a=b"] * (n_bytes // 5) + [f"{PREFIX}{uid}={cpus}"],
        "tiny variables and mentions": ["a=b"] * (n_bytes // 10) + [f"A={PREFIX * (n_bytes // 22)}"],
    }.items():
        yield Attack(name, env=env)


def forgeries(uid: str, cpus: str) -> Iterator[Attack]:
    """Yield small containers that claim to have a claim."""
    for name, env in {
        "the exact variable": [f"{PREFIX}{uid}={cpus}"],
        "the exact variable twice": [f"{PREFIX}{uid}={cpus}"] * 2,
        "other CPUs": [f"{PREFIX}{uid}=0-63"],
        "no CPUs": [f"{PREFIX}{uid}="],
        "spaces": [f"{PREFIX}{uid}= {cpus} "],
        "an unknown claim": [f"{PREFIX}none={cpus}"],
        "an unknown claim beside": [f"{PREFIX}{uid}={cpus}", f"{PREFIX}none={cpus}"],
    }.items():
        yield Attack(name, env=env)


def marks(uid: str, cpus: str, n_bytes: int) -> Iterator[Attack]:
    """Yield what the author of another CDI spec, or another plugin, may put into a container."""
    own = f"{PREFIX}{uid}={cpus}"
    strides = STRIDES * (n_bytes // len(STRIDES))
    for name, hooks in {
        "a hook with strides": [[GUARD, "dracpu-start-guard", "v1", uid, strides]],
        "a hook with strides of an unknown claim": [[GUARD, "dracpu-start-guard", "v1", "none", strides]],
        "a hook with a long claim": [[GUARD, "dracpu-start-guard", "v1", "u" * n_bytes, cpus]],
        "a hook with a long name": [["x" * n_bytes + GUARD, "dracpu-start-guard", "v1", uid, cpus]],
        "a hook with long arguments": [[GUARD, "dracpu-start-guard", *["v" * (n_bytes // 64)] * 64]],
        "a hook with many arguments": [[GUARD, "dracpu-start-guard", *["v"] * (n_bytes // 3)]],
        "many hooks": [[GUARD, "dracpu-start-guard", "v1", "none", "1"]] * (n_bytes // 80),
    }.items():
        yield Attack(name, env=[own], hooks=hooks)
    yield Attack("a long device", env=[own], devices=[CDI + "u" * n_bytes])
    yield Attack("many devices", env=[own], devices=[f"{CDI}{number:x}" for number in range(n_bytes // 32)])
