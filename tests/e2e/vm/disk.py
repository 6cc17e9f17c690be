# SPDX-License-Identifier: Apache-2.0
"""The virtual machine's kernel and disk: Debian's, with the real programs and what the driver needs in it.

All that is kept, as in `e2e.programs`. What changes from run to run comes on a second disk, see `e2e.vm.changes`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from e2e import images, programs

PROJECT = Path(__file__).parents[3]

# Debian 12, and the Python that it has.
_SUITE = "bookworm"
PYTHON = (3, 11)
_PACKAGES = ("python3", "runc", "ca-certificates")
_KERNEL = "linux-image-cloud-amd64"
_SIZE = "3G"

# In the order in which they can be loaded.
_FIRST_MODULES = (
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci",
    "drivers/block/virtio_blk",
)
_MODULES = ("net/core/failover", "drivers/net/net_failover", "drivers/net/virtio_net", "fs/overlayfs/overlay")

# Where the packages lie that the driver depends on.
DEPENDENCIES = "opt/dependencies"

_FIRST_NAMES = " ".join(Path(module).name for module in _FIRST_MODULES)
_INIT = f"""\
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in {_FIRST_NAMES}; do /bin/busybox insmod /modules/$module.ko; done
while ! [ -b /dev/vda ] || ! [ -b /dev/vdb ]; do /bin/busybox sleep 0.1; done
/bin/busybox mount -t ext4 /dev/vda /new
/bin/busybox tar -x -f /dev/vdb -C /new
exec /bin/busybox switch_root /new /guest/init.sh
"""


def missing() -> list[str]:
    """Return what this machine lacks for building and running the virtual machine, one line each."""
    needed = {
        "qemu-system-x86_64": "qemu-system-x86",
        "mmdebstrap": "mmdebstrap",
        "mke2fs": "e2fsprogs",
        "cpio": "cpio",
        "busybox": "busybox-static",
    }
    return [
        f"{program}: apt-get install {package}" for program, package in needed.items() if shutil.which(program) is None
    ]


def base(*folders: Path) -> Path:
    """Build what does not change from run to run.

    Parameters
    ----------
    *folders : Path
        Folders of the programs that the guest runs.

    Returns
    -------
    Path
        A folder with ``vmlinuz``, ``initrd.gz`` and ``root.img``.
    """
    dependencies = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]

    def make(folder: Path) -> None:
        say("building the virtual machine's disk (about two minutes the first time)")
        root = folder / "root"
        _debian(root)
        modules = _kernel(root, folder / "vmlinuz")
        _initrd(modules, folder / "initrd.gz")
        _python(root, dependencies)
        for source in folders:
            shutil.copytree(source, root / "usr/local/bin", symlinks=True, dirs_exist_ok=True)
        (root / "images").mkdir()
        images.write_archive(root / "images/busybox.tar")
        (root / "etc/hosts").write_text("127.0.0.1 localhost vm\n")
        (root / "etc/resolv.conf").write_text("")
        run("mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-d", root, folder / "root.img", _SIZE)
        shutil.rmtree(root)

    names = [str(folder.resolve()).encode() for folder in folders]
    recipe = [Path(file).read_bytes() for file in (__file__, images.__file__)]
    return programs.kept(make, *recipe, *names, *map(str.encode, dependencies))


def _debian(root: Path) -> None:
    # The kernel's package is unpacked without being installed: its installation would build an initrd of its own.
    fetch = (
        f"cd /var/tmp && apt-get -qq download $(apt-cache depends {_KERNEL} | grep -o 'linux-image-[0-9].*' | head -1)"
    )
    run(
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--architectures=amd64",
        f"--include={','.join(_PACKAGES)}",
        f"--customize-hook=chroot $1 sh -c '{fetch}'",
        _SUITE,
        root,
    )


def _kernel(root: Path, image: Path) -> Path:
    """Take the kernel out of its package, and return the folder of its modules."""
    [package] = (root / "var/tmp").glob("linux-image-*.deb")
    unpacked = root.parent / "kernel"
    run("dpkg-deb", "--extract", package, unpacked)
    package.unlink()
    [kernel] = (unpacked / "boot").glob("vmlinuz-*")
    kernel.rename(image)
    [modules] = (unpacked / "lib/modules").glob("*/kernel")
    (root / "modules").mkdir()
    for module in _MODULES:
        shutil.copy(modules / f"{module}.ko", root / "modules")
    return modules


def _initrd(modules: Path, path: Path) -> None:
    root = path.parent / "first"
    for folder in ("bin", "proc", "sys", "dev", "new", "modules"):
        (root / folder).mkdir(parents=True)
    for module in _FIRST_MODULES:
        shutil.copy(modules / f"{module}.ko", root / "modules")
    busybox = shutil.which("busybox")
    assert busybox is not None, "missing() was not asked"
    shutil.copy(busybox, root / "bin/busybox")
    shutil.copy(busybox, path.parent / "root/bin/busybox")
    (root / "init").write_text(_INIT)
    (root / "init").chmod(0o755)
    names = "\n".join(str(part.relative_to(root)) for part in sorted(root.rglob("*")))
    packed = subprocess.run(
        ["cpio", "--create", "--quiet", "--format=newc"],
        cwd=root,
        input=names.encode(),
        capture_output=True,
        check=True,
    )
    with path.open("wb") as archive:
        subprocess.run(["gzip", "-1"], input=packed.stdout, stdout=archive, check=True)
    shutil.rmtree(root)
    shutil.rmtree(modules.parents[3])


def _python(root: Path, dependencies: list[str]) -> None:
    wanted = ".".join(map(str, PYTHON))
    target = root / DEPENDENCIES
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", f"--target={target}"]
    options = [f"--python-version={wanted}", "--implementation=cp", "--only-binary=:all:"]
    run(*command, *options, *dependencies)
    # Importing them without takes the guest half a minute more.
    run("chroot", root, f"python{wanted}", "-m", "compileall", "-q", f"/{DEPENDENCIES}")


def run(*command: str | Path, **variables: str) -> None:
    """Run a program to its end, with variables added to the environment; raise `RuntimeError` if it fails."""
    environment = os.environ | variables
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment
    )
    if ended.returncode != 0:
        raise RuntimeError(
            f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        )


def say(text: str) -> None:
    """Say what takes long."""
    print(f"e2e-vm: {text}", file=sys.stderr, flush=True)
