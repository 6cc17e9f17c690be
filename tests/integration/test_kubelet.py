# SPDX-License-Identifier: Apache-2.0
"""The kubelet's side of the driver, spoken to as the kubelet does: gRPC over the real sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import threading
import time

import grpc
import pytest

from driver.apis import (
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    pluginregistration_pb2,
    pluginregistration_pb2_grpc,
)
from driver.errors import ClaimError, ConfigError
from driver.health import Health
from driver.kubelet import KubeletPlugin
from driver.prepare import PreparedAnswer
from driver.sockets import SocketFile

PREFIX = {
    "v1": "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/",
    "v1beta1": "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/",
}
MESSAGES = {"v1": dra_v1_pb2, "v1beta1": dra_v1beta1_pb2}


class Preparer:
    """Prepares every claim at once, but those whose name says otherwise."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, str]] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self.proceed = asyncio.Event()
        self.answer = PreparedAnswer(
            request_names=("cpus",),
            pool="node-1",
            device="cpudevnuma000",
            cdi_ids=("dra.k8s.io/cpu=claim-1",),
            share_id=None,
        )

    async def prepare(self, reference):
        await self._act("prepare", reference)
        return (self.answer,)

    async def unprepare(self, reference):
        await self._act("unprepare", reference)

    async def _act(self, what, reference):
        self.calls.append((what, reference.namespace, reference.name, reference.uid))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if reference.name == "wait":
                await self.proceed.wait()
            elif reference.name == "refuse":
                raise ClaimError("CPU 7 is\nreserved\x1b[0m")
            elif reference.name == "silent":
                raise ClaimError
            elif reference.name == "endless":
                raise ClaimError("ö" * 1_000_000)
            elif reference.name == "surrogate":
                raise ClaimError("no file \udcff here")
            elif reference.name == "bug":
                raise KeyError("forgotten")
            elif reference.name == "inner-cancel":
                raise asyncio.CancelledError
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class Devices:
    """Devices that are always well."""

    def __init__(self) -> None:
        self.states = ()
        self.changed = asyncio.Event()
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.changed.set()


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
async def preparer() -> Preparer:
    return Preparer()


@pytest.fixture
def dra_socket(short_tmp):
    return short_tmp / "plugins" / "dra.cpu" / "dra.sock"


@pytest.fixture
def registration_socket(short_tmp):
    return short_tmp / "plugins_registry" / "dra.cpu-reg.sock"


@pytest.fixture
async def make_plugin(dra_socket, registration_socket, preparer, health):
    """Make a plugin that is not started yet; the test's end stops it."""
    made = []

    def make(**changed) -> KubeletPlugin:
        settings = {
            "dra_socket": dra_socket,
            "registration_socket": registration_socket,
            "preparer": preparer,
            "devices": Devices(),
            "health": health,
        }
        plugin = KubeletPlugin(**{**settings, **changed})
        made.append(plugin)
        return plugin

    yield make
    for plugin in made:
        await plugin.stop(grace_s=0)


@pytest.fixture
async def plugin(make_plugin):
    plugin = make_plugin()
    await plugin.start()
    return plugin


@pytest.fixture
async def registration(plugin, registration_socket):
    async with grpc.aio.insecure_channel(f"unix:{registration_socket}") as channel:
        yield pluginregistration_pb2_grpc.RegistrationStub(channel)


@pytest.fixture(params=["v1", "v1beta1"])
def version(request) -> str:
    return request.param


@pytest.fixture
async def dra(plugin, version, dra_socket):
    stub = {"v1": dra_v1_pb2_grpc.DRAPluginStub, "v1beta1": dra_v1beta1_pb2_grpc.DRAPluginStub}[version]
    async with grpc.aio.insecure_channel(f"unix:{dra_socket}") as channel:
        yield stub(channel)


@pytest.fixture
def prepare(dra, version):
    """Send NodePrepareResources for claims given as (namespace, name, uid); return the answer's map."""

    async def call(*claims, **options):
        messages = MESSAGES[version]
        request = messages.NodePrepareResourcesRequest(
            claims=[messages.Claim(namespace=namespace, name=name, uid=uid) for namespace, name, uid in claims]
        )
        return dict((await dra.NodePrepareResources(request, **options)).claims)

    return call


@pytest.fixture
def unprepare(dra, version):
    """Send NodeUnprepareResources; return the error of each UID."""

    async def call(*claims, **options):
        messages = MESSAGES[version]
        request = messages.NodeUnprepareResourcesRequest(
            claims=[messages.Claim(namespace=namespace, name=name, uid=uid) for namespace, name, uid in claims]
        )
        answer = await dra.NodeUnprepareResources(request, **options)
        return {uid: entry.error for uid, entry in answer.claims.items()}

    return call


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 -- nobody would set an event
            await asyncio.sleep(0.01)


def tasks_of_the_driver() -> list[asyncio.Task]:
    """The tasks that answer a call; gRPC has others of its own."""
    return [task for task in asyncio.all_tasks() if "_answer_each" in repr(task.get_coro())]


# Registration


async def test_get_info_says_what_the_kubelet_needs(registration, dra_socket):
    info = await registration.GetInfo(pluginregistration_pb2.InfoRequest())
    assert info.type == "DRAPlugin"
    assert info.name == "dra.cpu"
    assert info.endpoint == str(dra_socket)
    assert list(info.supported_versions) == [
        "v1.DRAPlugin",
        "v1beta1.DRAPlugin",
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
    ]


async def test_the_names_on_the_wire(plugin, registration_socket, dra_socket):
    """Raw bytes: what the stubs believe does not count, the kubelet's spelling does."""
    async with grpc.aio.insecure_channel(f"unix:{registration_socket}") as channel:
        info = await channel.unary_unary("/pluginregistration.Registration/GetInfo")(b"")
        assert info.startswith(b"\x0a\x09DRAPlugin\x12\x07dra.cpu\x1a")
        assert (
            await channel.unary_unary("/pluginregistration.Registration/NotifyRegistrationStatus")(b"\x08\x01") == b""
        )
    claims = b"\x0a\x0a" + b"\x0a\x02ns\x12\x01u\x1a\x01c"  # a claim's fields: 1 namespace, 2 uid, 3 name
    device = b"\x0a\x04cpus\x12\x06node-1\x1a\x0dcpudevnuma000\x22\x16dra.k8s.io/cpu=claim-1"
    for prefix in PREFIX.values():
        async with grpc.aio.insecure_channel(f"unix:{dra_socket}") as channel:
            answer = await channel.unary_unary(prefix + "NodePrepareResources")(claims)
            assert answer == b"\x0a\x3c\x0a\x01u\x12\x37\x0a\x35" + device
            assert await channel.unary_unary(prefix + "NodeUnprepareResources")(claims) == b"\x0a\x05\x0a\x01u\x12\x00"


async def test_registered_when_the_kubelet_says_so(registration, health):
    assert health.missing() == {"registered": "waiting for the kubelet to register the driver"}
    await registration.NotifyRegistrationStatus(pluginregistration_pb2.RegistrationStatus(plugin_registered=True))
    assert health.missing() == {}


async def test_a_refused_registration_is_logged_and_answered_with_ok(registration, health, caplog):
    status = pluginregistration_pb2.RegistrationStatus(plugin_registered=False, error="no\nhandler for it")
    await registration.NotifyRegistrationStatus(status)
    assert health.missing() == {"registered": "the kubelet refuses to register the driver: no handler for it"}
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.fields["error"] == "no handler for it"
    await registration.NotifyRegistrationStatus(pluginregistration_pb2.RegistrationStatus())
    assert health.missing()["registered"].endswith("no reason given")
    await registration.NotifyRegistrationStatus(pluginregistration_pb2.RegistrationStatus(plugin_registered=True))
    assert health.missing() == {}


async def test_a_kubelet_that_restarts_registers_again(registration, health):
    for _ in range(3):
        await registration.GetInfo(pluginregistration_pb2.InfoRequest())
        await registration.NotifyRegistrationStatus(pluginregistration_pb2.RegistrationStatus(plugin_registered=True))
    assert health.missing() == {}


# Prepare and unprepare


async def test_each_claim_is_prepared_and_answered(prepare, preparer):
    answers = await prepare(("ns", "a", "uid-a"), ("ns", "b", "uid-b"))
    assert set(answers) == {"uid-a", "uid-b"}
    for answer in answers.values():
        (device,) = answer.devices
        assert answer.error == ""
        assert list(device.request_names) == ["cpus"]
        assert (device.pool_name, device.device_name) == ("node-1", "cpudevnuma000")
        assert list(device.cdi_device_ids) == ["dra.k8s.io/cpu=claim-1"]
    assert sorted(preparer.calls) == [("prepare", "ns", "a", "uid-a"), ("prepare", "ns", "b", "uid-b")]


@pytest.mark.parametrize("share_id", [None, "", "7c7a1e4e-8a1c-4c5f-9d0b-1f2e3d4c5b6a"])
async def test_the_share_id_is_there_when_there_is_one_and_the_version_knows_it(share_id, prepare, preparer, version):
    preparer.answer = PreparedAnswer(
        request_names=("cpus",), pool="p", device="d", cdi_ids=("x/y=z",), share_id=share_id
    )
    (device,) = (await prepare(("ns", "a", "uid-a")))["uid-a"].devices
    if version == "v1":
        assert device.HasField("share_id") == (share_id is not None)
        assert device.share_id == (share_id or "")
    else:
        assert "share_id" not in device.DESCRIPTOR.fields_by_name
    assert device.device_name == "d"


async def test_unprepare_answers_each_claim(unprepare, preparer):
    assert await unprepare(("ns", "a", "uid-a"), ("ns", "refuse", "uid-b")) == {
        "uid-a": "",
        "uid-b": "CPU 7 is reserved [0m",
    }
    assert sorted(preparer.calls) == [("unprepare", "ns", "a", "uid-a"), ("unprepare", "ns", "refuse", "uid-b")]


async def test_a_call_without_claims_is_answered(prepare, unprepare):
    assert await prepare() == {}
    assert await unprepare() == {}


async def test_one_claims_failure_is_its_own(prepare, caplog):
    answers = await prepare(
        ("ns", "refuse", "uid-refuse"),
        ("ns", "bug", "uid-bug"),
        ("ns", "inner-cancel", "uid-cancel"),
        ("ns", "fine", "uid-fine"),
    )
    assert answers["uid-refuse"].error == "CPU 7 is reserved [0m"
    assert answers["uid-bug"].error == "internal error: KeyError: 'forgotten'"
    assert answers["uid-cancel"].error.startswith("interrupted: ")
    assert answers["uid-fine"].error == ""
    assert len(answers["uid-fine"].devices) == 1
    assert not any(answers[uid].devices for uid in ("uid-refuse", "uid-bug", "uid-cancel"))
    (record,) = [record for record in caplog.records if record.name == "driver.draservice"]
    assert record.exc_info[0] is KeyError
    assert record.fields["uid"] == "uid-bug"


async def test_an_answer_that_cannot_be_encoded_fails_only_its_claim(prepare, preparer):
    preparer.answer = PreparedAnswer(request_names=("cpus",), pool="p", device="\udcff", cdi_ids=(), share_id=None)
    answers = await prepare(("ns", "a", "uid-a"), ("ns", "refuse", "uid-b"))
    assert answers["uid-a"].error.startswith("internal error: ")
    assert answers["uid-b"].error == "CPU 7 is reserved [0m"


@pytest.mark.parametrize("name", ["silent", "endless", "surrogate", "refuse", "bug"])
async def test_an_error_is_one_printable_bounded_line(name, prepare, unprepare):
    prepared = (await prepare(("ns", name, "uid")))["uid"].error
    unprepared = (await unprepare(("ns", name, "uid")))["uid"]
    for error in (prepared, unprepared):
        assert error
        assert error.isprintable()
        assert len(error.encode()) <= 1024


async def test_the_claims_of_a_call_run_at_the_same_time(prepare, preparer):
    call = asyncio.create_task(prepare(*(("ns", "wait", f"uid-{n}") for n in range(20))))
    await until(lambda: preparer.running == 20)
    preparer.proceed.set()
    assert len(await call) == 20


async def test_a_thousand_claims_in_one_call(prepare, unprepare):
    claims = [("ns", f"claim-{n}", f"uid-{n}") for n in range(1000)]
    assert {uid: answer.error for uid, answer in (await prepare(*claims)).items()} == {uid: "" for *_, uid in claims}
    assert await unprepare(*claims) == {uid: "" for *_, uid in claims}


async def test_a_uid_that_comes_twice_is_done_once(prepare, preparer):
    answers = await prepare(*[("ns", "a", "uid-a")] * 3)
    assert set(answers) == {"uid-a"}
    assert answers["uid-a"].error == ""
    assert preparer.calls == [("prepare", "ns", "a", "uid-a")]


async def test_a_uid_under_two_names_is_refused(prepare, preparer):
    answers = await prepare(("ns", "a", "uid-a"), ("ns", "b", "uid-a"), ("ns", "c", "uid-c"))
    assert answers["uid-a"].error == "claim UID uid-a is asked for under 2 different names in one call, expected one"
    assert answers["uid-c"].error == ""
    assert preparer.calls == [("prepare", "ns", "c", "uid-c")]


@pytest.mark.parametrize(
    "uid", ["", ".", "..", "../../etc/passwd", "-a", "a b", "a\x00b", "a\nb", "é", "a" * 64, "a" * 1_000_000, "a/b"]
)
async def test_a_malformed_uid_is_answered_under_itself(uid, prepare, unprepare, preparer, caplog):
    answers = await prepare(("ns", "a", uid), ("ns", "fine", "uid-fine"))
    assert set(answers) == {uid, "uid-fine"}
    assert "is malformed: expected 1 to 63 ASCII letters" in answers[uid].error
    assert answers["uid-fine"].error == ""
    # The kubelet repeats a failed unprepare for ever and its pod never ends; nothing is held under such a UID.
    assert await unprepare(("ns", "a", uid), ("ns", "fine", "uid-fine")) == {uid: "", "uid-fine": ""}
    assert {call[3] for call in preparer.calls} == {"uid-fine"}
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "malformed reference to a claim"),
        ("WARNING", "malformed reference to a claim"),
    ]


@pytest.mark.parametrize(
    ("namespace", "name", "expected"),
    [
        ("", "a", "claim namespace '' is malformed: expected a DNS label of 1 to 63 characters"),
        ("../kube-system", "a", "claim namespace '../kube-system' is malformed"),
        ("n" * 64, "a", "claim namespace 'nnn"),
        ("a.b", "a", "claim namespace 'a.b' is malformed"),
        ("ns", "", "claim name '' is malformed: expected a DNS subdomain of 1 to 253 characters"),
        ("ns", "../secrets/token", "claim name '../secrets/token' is malformed"),
        ("ns", "a?x=y", "claim name 'a?x=y' is malformed"),
        ("ns", "a%2fb", "claim name 'a%2fb' is malformed"),
        ("ns", "A", "claim name 'A' is malformed"),
        ("ns", "a\n", "claim name 'a\\n' is malformed"),
        ("ns", "a" * 1_000_000, "claim name 'aaa"),
    ],
)
async def test_names_that_no_claim_can_have_are_refused(namespace, name, expected, prepare, unprepare, preparer):
    error = (await prepare((namespace, name, "uid")))["uid"].error
    assert error.startswith(expected)
    assert len(error) < 300
    assert preparer.calls == []
    # What is held under the UID is let go all the same.
    assert await unprepare((namespace, name, "uid")) == {"uid": ""}
    assert [call[3] for call in preparer.calls] == ["uid"]


@pytest.mark.parametrize("junk", [b"\xff" * 100, b"\x0a\x05abc", os.urandom(1000) + b"\x0a\xff\xff\xff\xff\x0f"])
async def test_bytes_that_are_no_message_harm_nobody(junk, prepare, version, dra_socket):
    async with grpc.aio.insecure_channel(f"unix:{dra_socket}") as channel:
        for method in ("NodePrepareResources", "NodeUnprepareResources"):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(PREFIX[version] + method)(junk)
    assert (await prepare(("ns", "a", "uid-a")))["uid-a"].error == ""


async def test_bytes_that_are_no_grpc_harm_nobody(prepare, dra_socket):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(dra_socket))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"\x00" * 10_000)
    assert (await prepare(("ns", "a", "uid-a")))["uid-a"].error == ""


async def test_fields_of_newer_kubelets_are_ignored(dra_socket, plugin, version):
    claim = b"\x0a\x02ns\x12\x01u\x1a\x01c" + b"\xa2\x06\x03new"
    async with grpc.aio.insecure_channel(f"unix:{dra_socket}") as channel:
        raw = channel.unary_unary(PREFIX[version] + "NodeUnprepareResources")
        assert await raw(b"\x0a" + bytes([len(claim)]) + claim + b"\xa2\x06\x03new") == b"\x0a\x05\x0a\x01u\x12\x00"


async def test_a_client_that_goes_away_leaves_no_task(prepare, preparer):
    call = asyncio.create_task(prepare(*(("ns", "wait", f"uid-{n}") for n in range(5))))
    await until(lambda: preparer.running == 5)
    assert len(tasks_of_the_driver()) == 5
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: preparer.cancelled == 5)
    await until(lambda: not tasks_of_the_driver())
    assert preparer.running == 0


async def test_a_call_past_its_deadline_leaves_no_task(prepare, preparer):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prepare(("ns", "wait", "uid"), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: preparer.cancelled == 1)
    await until(lambda: not tasks_of_the_driver())


async def test_every_line_of_a_call_has_its_operation_id(prepare, capfd, preparer):
    # The formatter adds the id, so look at what it writes.
    from driver import logs

    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.getLogger("driver").level
    logs.configure("text", 0, "")
    try:
        await prepare(("ns", "bug", "uid-1"), ("ns", "bug", "uid-2"))
        await prepare(("ns", "bug", "uid-3"))
    finally:
        root.handlers[:], level, driver_level = before
        root.setLevel(level)
        logging.getLogger("driver").setLevel(driver_level)
    lines = [line for line in capfd.readouterr().err.splitlines() if "internal error" in line]
    ids = [dict(pair.partition("=")[::2] for pair in line.split() if pair.startswith("op="))["op"] for line in lines]
    assert len(ids) == 3
    assert ids[0] == ids[1] != ids[2]


# Being busy


def ask_for_info(registration_socket, times: int) -> list[float]:
    """Ask as the kubelet does, from outside the event loop; return how long each answer took."""
    took = []
    with grpc.insecure_channel(f"unix:{registration_socket}") as channel:
        stub = pluginregistration_pb2_grpc.RegistrationStub(channel)
        for _ in range(times):
            began = time.perf_counter()
            stub.GetInfo(pluginregistration_pb2.InfoRequest(), timeout=60)
            took.append(time.perf_counter() - began)
    return took


@pytest.mark.parametrize("version", ["v1"], indirect=True)
async def test_get_info_keeps_its_second_while_everything_else_is_busy(prepare, preparer, registration_socket):
    """200 prepares that each use the loop for milliseconds, and threads that fight for the interpreter."""
    stop = threading.Event()

    async def busy_prepare(reference):
        while not stop.is_set():
            until_ns = time.perf_counter_ns() + 3_000_000
            while time.perf_counter_ns() < until_ns:
                pass
            await asyncio.sleep(0)
        return ()

    def burn() -> None:
        while not stop.is_set():
            sum(range(10_000))

    preparer.prepare = busy_prepare
    burners = [threading.Thread(target=burn) for _ in range(2)]
    calls = [
        asyncio.create_task(prepare(*(("ns", f"c{n}", f"uid-{call}-{n}") for n in range(25)))) for call in range(8)
    ]
    try:
        for burner in burners:
            burner.start()
        took = await asyncio.to_thread(ask_for_info, registration_socket, 5)
    finally:
        stop.set()
        for burner in burners:
            burner.join()
    assert not any(answer.error for answers in await asyncio.gather(*calls) for answer in answers.values())
    # The kubelet's deadline; where the whole machine is busy one of them may take longer.
    assert len(took) == 5
    assert min(took) < 1


async def test_get_info_is_answered_even_while_the_event_loop_stands_still(plugin, registration_socket):
    took = []
    asking = threading.Thread(target=lambda: took.extend(ask_for_info(registration_socket, 3)))
    asking.start()
    asking.join()
    assert len(took) == 3


# The socket files


async def test_only_the_owner_may_use_the_sockets_and_folders(plugin, dra_socket, registration_socket):
    for path in (dra_socket, registration_socket):
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) & ~0o750 == 0
        assert os.listdir(path.parent) == [path.name]


async def test_nobody_else_can_connect_at_any_moment(make_plugin, monkeypatch, dra_socket, registration_socket):
    """With the laxest umask: the sockets are bound where others cannot reach them, and public with their mode."""
    where_bound = []
    real_publish = SocketFile.publish

    def look_and_publish(file):
        assert file.staged.is_socket()
        assert not file.path.exists()
        where_bound.append(stat.S_IMODE(file.staged.parent.stat().st_mode))
        real_publish(file)

    monkeypatch.setattr(SocketFile, "publish", look_and_publish)
    before = os.umask(0)
    try:
        await make_plugin().start()
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert where_bound == [0o700, 0o700]
    for path in (dra_socket, registration_socket):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
        assert stat.S_IMODE(path.parent.parent.stat().st_mode) in (0o750, 0o700)


async def test_a_registration_socket_works_from_the_moment_it_can_be_seen(make_plugin, registration_socket, preparer):
    """The kubelet dials as soon as the file appears; then both sockets must answer already."""

    def watch_and_ask() -> str:
        while not registration_socket.exists():
            pass
        with grpc.insecure_channel(f"unix:{registration_socket}") as channel:
            stub = pluginregistration_pb2_grpc.RegistrationStub(channel)
            info = stub.GetInfo(pluginregistration_pb2.InfoRequest(), timeout=1)
        with grpc.insecure_channel(f"unix:{info.endpoint}") as channel:
            request = dra_v1_pb2.NodePrepareResourcesRequest()
            dra_v1_pb2_grpc.DRAPluginStub(channel).NodePrepareResources(request, timeout=1)
        return info.name

    asking = asyncio.create_task(asyncio.to_thread(watch_and_ask))
    await make_plugin().start()
    assert await asking == "dra.cpu"


async def test_stale_sockets_are_replaced(make_plugin, dra_socket, registration_socket, health):
    for path in (dra_socket, registration_socket):
        path.parent.mkdir(parents=True)
        # A process that was killed leaves its socket, and, killed while starting, its folder for binding.
        (path.parent / f".{path.stem}").mkdir()
        for stale in (path, path.parent / f".{path.stem}" / "s"):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(stale))
    await make_plugin().start()
    async with grpc.aio.insecure_channel(f"unix:{registration_socket}") as channel:
        stub = pluginregistration_pb2_grpc.RegistrationStub(channel)
        assert (await stub.GetInfo(pluginregistration_pb2.InfoRequest())).name == "dra.cpu"
    assert os.listdir(dra_socket.parent) == ["dra.sock"]


@pytest.mark.parametrize("which", ["dra_socket", "registration_socket"])
@pytest.mark.parametrize(
    "make", [lambda p: p.write_text("precious"), lambda p: p.mkdir(), os.mkfifo, lambda p: p.symlink_to("/dev/null")]
)
async def test_what_is_no_socket_is_never_replaced(which, make, make_plugin, request):
    path = request.getfixturevalue(which)
    path.parent.mkdir(parents=True)
    make(path)
    before = path.lstat()
    with pytest.raises(ConfigError, match=f"{path} is not a socket but stands where the driver's socket belongs"):
        await make_plugin().start()
    assert path.lstat().st_ino == before.st_ino


async def test_a_path_that_is_too_long_is_refused_with_its_length(make_plugin, short_tmp):
    for which in ("dra_socket", "registration_socket"):
        longest = short_tmp / ("é" * 5)
        longest = longest / ("x" * (107 - len(os.fsencode(longest)) - 1 - len("/s.sock"))) / "s.sock"
        assert len(os.fsencode(longest)) == 107
        make_plugin(**{which: longest})
        with pytest.raises(ConfigError, match=r"has 108 bytes, 1 too many.* 107"):
            make_plugin(**{which: longest.parent / "sx.sock"})


async def test_the_longest_path_works(make_plugin, short_tmp):
    folder = short_tmp / ("x" * (107 - len(os.fsencode(short_tmp)) - len("//dra.sock")))
    longest = folder / "dra.sock"
    assert len(os.fsencode(longest)) == 107
    await make_plugin(dra_socket=longest).start()
    async with grpc.aio.insecure_channel(f"unix:{longest}") as channel:
        await dra_v1_pb2_grpc.DRAPluginStub(channel).NodePrepareResources(dra_v1_pb2.NodePrepareResourcesRequest())


async def test_a_path_that_is_not_utf_8_is_refused(make_plugin, short_tmp):
    with pytest.raises(ConfigError, match="is not valid UTF-8"):
        make_plugin(dra_socket=short_tmp / "\udcff" / "dra.sock")


@pytest.mark.parametrize("folder", ["a b", "50%41", "x#y?z", "é", "a+b&c"])
async def test_paths_with_characters_that_are_special_in_a_uri(folder, make_plugin, short_tmp):
    path = short_tmp / folder / "dra.sock"
    await make_plugin(dra_socket=path).start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert os.listdir(short_tmp / folder) == ["dra.sock"]


async def test_stopping_removes_the_sockets(plugin, dra_socket, registration_socket):
    await plugin.stop()
    assert os.listdir(dra_socket.parent) == []
    assert os.listdir(registration_socket.parent) == []
    await plugin.stop()


async def test_stopping_leaves_a_successors_sockets(plugin, dra_socket, registration_socket):
    successors = []
    for path in (dra_socket, registration_socket):
        path.unlink()
        successor = socket.socket(socket.AF_UNIX)
        successor.bind(str(path))
        successors.append(successor)
    await plugin.stop()
    assert dra_socket.is_socket()
    assert registration_socket.is_socket()
    for successor in successors:
        successor.close()


async def test_stopping_lets_a_running_call_finish(plugin, prepare, preparer, dra_socket):
    call = asyncio.create_task(prepare(("ns", "wait", "uid")))
    await until(lambda: preparer.running)
    stopping = asyncio.create_task(plugin.stop(grace_s=10))
    await until(lambda: not dra_socket.exists())
    preparer.proceed.set()
    assert (await call)["uid"].error == ""
    await stopping


async def test_stopping_does_not_wait_for_ever(plugin, prepare, preparer):
    call = asyncio.create_task(prepare(("ns", "wait", "uid")))
    await until(lambda: preparer.running)
    async with asyncio.timeout(60):
        await plugin.stop(grace_s=0.1)
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    assert preparer.running == 0


async def test_a_folder_that_cannot_be_made_is_tried_again(make_plugin, registration_socket, short_tmp, caplog):
    (short_tmp / "plugins_registry").write_text("in the way")
    starting = asyncio.create_task(make_plugin().start())
    await until(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
    assert not starting.done()
    (short_tmp / "plugins_registry").unlink()
    async with asyncio.timeout(60):
        await starting
    assert registration_socket.is_socket()
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


async def test_deleted_sockets_come_back(make_plugin, dra_socket, registration_socket, preparer, health):
    await make_plugin(check_interval_s=0.02).start()
    health.set_ok("registered")
    async with grpc.aio.insecure_channel(f"unix:{dra_socket}") as channel:
        stub = dra_v1_pb2_grpc.DRAPluginStub(channel)
        waiting = dra_v1_pb2.Claim(namespace="ns", name="wait", uid="uid-1")
        call = asyncio.create_task(_prepare_raw(stub, waiting))
        await until(lambda: preparer.running)

        dra_socket.unlink()
        await until(dra_socket.exists)
        # A call that was running is answered, and the same channel then works with the new socket.
        preparer.proceed.set()
        assert (await call).claims["uid-1"].error == ""
        again = dra_v1_pb2.Claim(namespace="ns", name="a", uid="uid-2")
        assert (await _prepare_raw(stub, again)).claims["uid-2"].error == ""
    assert health.missing() == {}

    registration_socket.unlink()
    await until(registration_socket.exists)
    await until(health.missing)
    assert health.missing() == {"registered": "waiting for the kubelet to register the driver again"}
    async with grpc.aio.insecure_channel(f"unix:{registration_socket}") as channel:
        stub = pluginregistration_pb2_grpc.RegistrationStub(channel)
        assert (await stub.GetInfo(pluginregistration_pb2.InfoRequest())).endpoint == str(dra_socket)


async def test_a_socket_that_another_process_replaced_is_not_fought_over(make_plugin, dra_socket, caplog):
    await make_plugin(check_interval_s=0.02).start()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(dra_socket.with_name("other.sock")))
        other.listen()
        dra_socket.with_name("other.sock").rename(dra_socket)
        theirs = dra_socket.stat().st_ino
        await until(lambda: any("another process" in record.getMessage() for record in caplog.records))
        await asyncio.sleep(0.1)
        assert dra_socket.stat().st_ino == theirs
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    # Nobody listens there any more.
    await until(lambda: dra_socket.stat().st_ino != theirs)


async def _prepare_raw(stub, claim):
    return await stub.NodePrepareResources(dra_v1_pb2.NodePrepareResourcesRequest(claims=[claim]))
