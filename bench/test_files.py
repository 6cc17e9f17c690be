# SPDX-License-Identifier: Apache-2.0
"""Records and CDI specs: making their JSON, and putting them on the disk, beside the least that could do.

The least is ``json.dumps``, and for files a temporary one that is renamed; where the driver's is safe against a power
failure it is synced, and so is its folder.
"""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial

import pytest

import cases
from driver.cdi import CdiDirectory, encode_spec
from driver.checkpoint import RecordStore, encode_record
from driver.ledger import Record
from driver.names import ClaimUID, cdi_spec_name
from records import make_record

UID = ClaimUID("8a6f0d4e-6d0b-4c53-9f3c-0f6a1f1f2b11")
CONTENDERS = ["dracpu", "json and rename"]
KINDS = ("one range", "every second CPU")


def record_of(kind: str, n_cpus: int) -> Record:
    return make_record(UID, cases.choice(kind, n_cpus)[0])


def plain_write(path: os.PathLike[str], document: object, *, durable: bool) -> None:
    temporary = f"{path}.tmp"
    with open(temporary, "w") as file:
        file.write(json.dumps(document))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.rename(temporary, path)
    if durable:
        sync_folder(path)


def plain_remove(path: os.PathLike[str]) -> None:
    os.unlink(path)
    sync_folder(path)


def sync_folder(path: os.PathLike[str]) -> None:
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contender", ["dracpu", "json.dumps"])
@pytest.mark.parametrize("what", ["record", "CDI spec"])
def test_encode(entry, what, contender, kind, n_cpus):
    made = record_of(kind, n_cpus)
    encode = (lambda: encode_record(made)) if what == "record" else (lambda: encode_spec(UID, made.cpus))
    content = encode()
    document = json.loads(content)
    if contender != "dracpu":
        encode = lambda: json.dumps(document).encode()  # noqa: E731
    benchmark = entry("Files", f"{what} of {kind} as JSON", contender, n=n_cpus)
    assert json.loads(benchmark(encode)) == document


@pytest.mark.parametrize("n_cpus", cases.SIZES)
@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("what", ["record", "CDI spec"])
def test_write_and_remove(entry, tmp_path, what, contender, n_cpus):
    made = record_of("one range", n_cpus)
    if what == "record":
        store = files = RecordStore(tmp_path)
        path, content, durable = tmp_path / f"{UID}.json", encode_record(made), True
        write = partial(store.write, made)
    else:
        folder = files = CdiDirectory(tmp_path)
        path, content, durable = tmp_path / cdi_spec_name(UID), encode_spec(UID, made.cpus), False
        write = partial(asyncio.to_thread, folder.write_now, UID, made.cpus)
    document = json.loads(content)

    async def by_driver() -> None:
        await write()
        await asyncio.to_thread(files.remove_all_now, [UID])

    def by_hand() -> None:
        plain_write(path, document, durable=durable)
        plain_remove(path)

    benchmark = entry("Files", f"write and remove a {what}", contender, n=n_cpus)
    with asyncio.Runner() as runner:
        runner.run(write())
        assert json.loads(path.read_bytes()) == document
        plain_write(path, document, durable=durable)
        assert json.loads(path.read_bytes()) == document
        benchmark(by_hand if contender != "dracpu" else lambda: runner.run(by_driver()))
    assert not path.exists()
