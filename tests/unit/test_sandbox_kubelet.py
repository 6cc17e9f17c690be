# SPDX-License-Identifier: Apache-2.0
"""The box's kubelet against plugins made for the purpose, over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

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
from driver.sandbox.kubelet import ClaimName, Kubelet
from driver.sandbox.plugins import KubeletError, PreparedDevice

NAME = "dra.test"
CLAIM = ClaimName(namespace="default", name="a", uid="uid-a")
OTHER = ClaimName(namespace="default", name="b", uid="uid-b")
BOTH = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
DEVICE = {"pool_name": "n1", "device_name": "d0", "request_names": ["r"], "cdi_device_ids": ["v/c=d0"]}


class FakePlugin:
    """A plugin that says and does what a test tells it."""

    def __init__(self, *, versions=BOTH, plugin_type="DRAPlugin", name=NAME, endpoint=None):
        self.info = {"type": plugin_type, "name": name, "supported_versions": versions}
        self.endpoint = endpoint
        self.statuses = []
        self.calls = []
        self.slow_get_infos = 0
        self.failing_notifies = 0
        self.devices = {}
        self.errors = {}
        self.left_out = set()
        self.invented = set()

    async def GetInfo(self, request, context):
        if self.slow_get_infos:
            self.slow_get_infos -= 1
            await asyncio.Event().wait()
        return pluginregistration_pb2.PluginInfo(**self.info, endpoint=self.endpoint)

    async def NotifyRegistrationStatus(self, request, context):
        self.statuses.append((request.plugin_registered, request.error))
        if self.failing_notifies:
            self.failing_notifies -= 1
            await context.abort(grpc.StatusCode.INTERNAL, "not in the mood")
        return pluginregistration_pb2.RegistrationStatusResponse()

    @asynccontextmanager
    async def serving(self, folder, registration_socket):
        folder.mkdir(exist_ok=True)
        registration_socket.parent.mkdir(exist_ok=True)
        self.endpoint = str(folder / "dra.sock") if self.endpoint is None else self.endpoint
        dra, registration = grpc.aio.server(), grpc.aio.server()
        dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(_Service(self, dra_v1_pb2), dra)
        dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(_Service(self, dra_v1beta1_pb2), dra)
        pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(self, registration)
        dra.add_insecure_port(f"unix:{folder}/dra.sock")
        registration.add_insecure_port(f"unix:{registration_socket}")
        await dra.start()
        await registration.start()
        try:
            yield self
        finally:
            await registration.stop(None)
            await dra.stop(None)


class _Service:
    def __init__(self, plugin, messages):
        self._plugin = plugin
        self._messages = messages

    async def NodePrepareResources(self, request, context):
        return self._answer("prepare", request, self._messages.NodePrepareResourcesResponse)

    async def NodeUnprepareResources(self, request, context):
        return self._answer("unprepare", request, self._messages.NodeUnprepareResourcesResponse)

    def _answer(self, method, request, response_type):
        plugin = self._plugin
        version = self._messages.__name__.rpartition(".")[2]
        plugin.calls.append((method, version, [(claim.namespace, claim.name, claim.uid) for claim in request.claims]))
        response = response_type()
        for uid in {claim.uid for claim in request.claims} - plugin.left_out | plugin.invented:
            entry = response.claims[uid]
            entry.error = plugin.errors.get(uid, "")
            if method == "prepare":
                for device in plugin.devices.get(uid, ()):
                    entry.devices.append(self._messages.Device(**device))
        return response


@pytest.fixture
def place(short_tmp, kubelet):
    """Return the plugin's folder and the path of its registration socket, under a name."""
    return lambda name="p": (short_tmp / name, kubelet.registry_dir / f"{name}-reg.sock")


@pytest.mark.parametrize(
    ("versions", "service"),
    [
        (BOTH, "v1.DRAPlugin"),
        (BOTH[::-1], "v1beta1.DRAPlugin"),
        (("v2.DRAPlugin", "v1.DRAResourceHealth", "v1beta1.DRAPlugin"), "v1beta1.DRAPlugin"),
    ],
)
async def test_takes_the_first_service_that_it_knows(kubelet, place, versions, service):
    async with FakePlugin(versions=versions).serving(*place()) as plugin:
        registered = await kubelet.wait_registered(NAME)
        assert (registered.service, registered.endpoint) == (service, plugin.endpoint)
        assert plugin.statuses == [(True, "")]
        await kubelet.prepare(NAME, [CLAIM])
        assert plugin.calls[0][1] == ("dra_v1_pb2" if service.startswith("v1.") else "dra_v1beta1_pb2")


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (FakePlugin(versions=()), r"none of the plugin's services \[\] is supported"),
        (FakePlugin(versions=("v2.DRAPlugin",)), "is supported"),
        (FakePlugin(plugin_type="CSIPlugin"), "no handler registered for plugin type: CSIPlugin"),
        (FakePlugin(name=""), "has no name"),
    ],
)
async def test_tells_the_plugin_why_it_is_refused(kubelet, place, plugin, reason):
    async with plugin.serving(*place()):
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(await kubelet.wait_failed())
        assert not kubelet.plugins
        registered, error = plugin.statuses[0]
        assert not registered
        assert error


async def test_tries_again_after_a_late_answer(kubelet, place):
    plugin = FakePlugin()
    plugin.slow_get_infos = 1
    async with plugin.serving(*place()):
        assert "GetInfo: DEADLINE_EXCEEDED" in await kubelet.wait_failed()
        await kubelet.wait_registered(NAME)
        assert not kubelet.errors


async def test_unregisters_a_plugin_that_does_not_take_the_news(kubelet, place):
    plugin = FakePlugin()
    plugin.failing_notifies = 1
    async with plugin.serving(*place()):
        assert "NotifyRegistrationStatus: INTERNAL: not in the mood" in await kubelet.wait_failed()
        await kubelet.wait_registered(NAME)
        assert plugin.statuses == [(True, ""), (True, "")]


async def test_looks_into_folders_but_at_nothing_hidden(kubelet, place, short_tmp):
    (kubelet.registry_dir / "no-socket-reg.sock").write_text("")
    hidden = FakePlugin(name="hidden.test").serving(short_tmp / "h", kubelet.registry_dir / ".h" / "reg.sock")
    async with hidden, FakePlugin().serving(short_tmp / "p", kubelet.registry_dir / "sub" / "reg.sock"):
        await kubelet.wait_registered(NAME)
        assert list(kubelet.plugins) == [NAME]
        assert not kubelet.errors


async def test_follows_a_plugin_that_goes_and_comes_back(kubelet, place):
    async with FakePlugin().serving(*place()):
        first = await kubelet.wait_registered(NAME)
    await kubelet.wait_gone(NAME)
    async with FakePlugin().serving(*place()) as plugin:
        second = await kubelet.wait_registered(NAME, since=first.registered_at + 1e-9)
        assert second is not first
        assert plugin.statuses == [(True, "")]


async def test_registers_a_socket_again_that_was_made_anew(kubelet, place, short_tmp):
    folder, socket = place()
    async with FakePlugin().serving(folder, socket) as first:
        registered = await kubelet.wait_registered(NAME)
        later = short_tmp / "later.sock"
        async with FakePlugin(endpoint=first.endpoint).serving(short_tmp / "q", later) as second:
            later.rename(socket)
            await kubelet.wait_registered(NAME, since=registered.registered_at + 1e-9)
            assert second.statuses == [(True, "")]
            assert first.statuses == [(True, "")]


async def test_one_endpoint_is_registered_once(kubelet, place):
    async with FakePlugin().serving(*place()) as first:
        await kubelet.wait_registered(NAME)
        async with FakePlugin(endpoint=first.endpoint).serving(*place("q")) as second:
            assert "already registered" in await kubelet.wait_failed()
            assert not second.statuses[0][0]
        assert kubelet.plugins[NAME].endpoint == first.endpoint


async def test_the_latest_instance_is_called(kubelet, place):
    async with FakePlugin().serving(*place()) as first:
        registered = await kubelet.wait_registered(NAME)
        async with FakePlugin().serving(*place("q")) as second:
            await kubelet.wait_registered(NAME, since=registered.registered_at + 1e-9)
            await kubelet.prepare(NAME, [CLAIM])
        await kubelet._wait(lambda: len(kubelet._plugins) == 1, 5, "the end of the second")
        await kubelet.prepare(NAME, [CLAIM])
    assert (len(first.calls), len(second.calls)) == (1, 1)


async def test_prepare_and_unprepare_name_the_claims(kubelet, place):
    async with FakePlugin().serving(*place()) as plugin:
        await kubelet.wait_registered(NAME)
        plugin.devices = {"uid-a": [DEVICE, {**DEVICE, "device_name": "d1", "share_id": ""}]}
        plugin.errors = {"uid-b": "no CPUs left"}
        answers = await kubelet.prepare(NAME, [CLAIM, OTHER])
        common = {"request_names": ("r",), "pool": "n1", "cdi_ids": ("v/c=d0",)}
        assert answers["uid-a"].devices == (
            PreparedDevice(device="d0", share_id=None, **common),
            PreparedDevice(device="d1", share_id="", **common),
        )
        assert (answers["uid-b"].devices, answers["uid-b"].error) == ((), "no CPUs left")
        assert await kubelet.unprepare(NAME, [CLAIM, OTHER]) == {"uid-a": "", "uid-b": "no CPUs left"}
        names = [("default", "a", "uid-a"), ("default", "b", "uid-b")]
        assert [call[2] for call in plugin.calls] == [names, names]


@pytest.mark.parametrize("method", ["prepare", "unprepare"])
async def test_incomplete_answers_are_errors(kubelet, place, method):
    async with FakePlugin().serving(*place()) as plugin:
        await kubelet.wait_registered(NAME)
        plugin.left_out = {"uid-a"}
        with pytest.raises(KubeletError, match=r"skipped 1 claims: \['uid-a'\]"):
            await getattr(kubelet, method)(NAME, [CLAIM, OTHER])
        plugin.left_out, plugin.invented = set(), {"uid-x"}
        with pytest.raises(KubeletError, match=r"not asked for: \['uid-x'\]"):
            await getattr(kubelet, method)(NAME, [CLAIM])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pool_name": ""}, "without pool or name"),
        ({"device_name": ""}, "without pool or name"),
        ({"request_names": ["r/sub"]}, "can match no container"),
    ],
)
async def test_useless_devices_are_errors(kubelet, place, change, reason):
    async with FakePlugin().serving(*place()) as plugin:
        await kubelet.wait_registered(NAME)
        plugin.devices = {"uid-a": [{**DEVICE, **change}]}
        with pytest.raises(KubeletError, match=reason):
            await kubelet.prepare(NAME, [CLAIM])


async def test_calls_need_a_registered_driver(kubelet):
    with pytest.raises(KubeletError, match=r"DRA driver dra\.test is not registered"):
        await kubelet.prepare(NAME, [CLAIM])
    with pytest.raises(KubeletError, match="in vain for driver"):
        await kubelet.wait_registered(NAME, timeout_s=0.01)


async def test_slices_are_wiped_at_the_start_and_of_a_driver_that_stays_away(short_tmp):
    wiped = asyncio.Queue()
    async with Kubelet(short_tmp / "k", wipe_slices=wiped.put_nowait, wipe_after_s=0.05) as kubelet:
        assert wiped.get_nowait() is None
        async with FakePlugin().serving(short_tmp / "p", kubelet.registry_dir / "p-reg.sock"):
            await kubelet.wait_registered(NAME)
            assert wiped.empty()
        assert await asyncio.wait_for(wiped.get(), 5) == NAME


async def test_slices_stay_of_a_driver_that_is_back_in_time(short_tmp):
    wiped = []
    async with Kubelet(short_tmp / "k", wipe_slices=wiped.append, wipe_after_s=60) as kubelet:
        place = short_tmp / "p", kubelet.registry_dir / "p-reg.sock"
        async with FakePlugin().serving(*place):
            first = await kubelet.wait_registered(NAME)
        await kubelet.wait_gone(NAME)
        assert NAME in kubelet._wipes
        async with FakePlugin().serving(*place):
            await kubelet.wait_registered(NAME, since=first.registered_at + 1e-9)
            assert NAME not in kubelet._wipes
    assert wiped == [None]
