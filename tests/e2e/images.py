# SPDX-License-Identifier: Apache-2.0
"""A container image of one busybox, made without a registry."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
from pathlib import Path

IMAGE = "docker.io/local/busybox:1"

_APPLETS = ("sh", "sleep", "grep", "cat", "env", "true")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_archive(path: Path) -> None:
    """Write the image as an archive for ``ctr images import``; as a sandbox it sleeps."""
    busybox = shutil.which("busybox")
    assert busybox is not None, "programs.missing() was not asked"
    layer = _tar({"bin/busybox": Path(busybox).read_bytes()}, {f"bin/{name}": "busybox" for name in _APPLETS})
    layer_digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Cmd": ["/bin/sleep", "1000000"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
    }
    config_data = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(config_data).hexdigest()}.json"
    layer_name = f"{layer_digest}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": [IMAGE], "Layers": [layer_name]}]
    parts = {config_name: config_data, layer_name: layer, "manifest.json": json.dumps(manifest).encode()}
    path.write_bytes(_tar(parts, {}))


def _tar(files: dict[str, bytes], links: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.mode, member.size = 0o755, len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return buffer.getvalue()
