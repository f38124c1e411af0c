"""What hivemind's clients of p2pd do with requests that fail or are cancelled."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2

from node.swarm.identity import load_identity, new_identity
from node.swarm.transport.control import ControlClient
from node.swarm.transport.dht import DAEMON_ERRORS, attach
from node.swarm.transport.p2pd import Daemon, DaemonOptions, start_daemon
from tests.event_loop import in_loop, until


def open_sockets() -> int:
    return len(psutil.Process().net_connections("unix"))


async def start(folder: Path) -> tuple[Daemon, Any]:
    """A p2pd, and hivemind's client of it."""
    load_identity(folder / "identity.key")
    daemon = await start_daemon(DaemonOptions(folder / "identity.key", ["/ip4/127.0.0.1/tcp/0"]))
    return daemon, await attach(daemon)


@pytest.mark.timeout(60)
@in_loop
async def test_failed_and_cancelled_requests_close_their_connection_to_p2pd(tmp_path: Path) -> None:
    daemon, p2p = await start(tmp_path)
    client = await ControlClient.open(daemon)
    stranger = new_identity().peer_id
    gc.collect()
    gc.disable()  # The collector would close what hivemind has left open.
    try:
        before = open_sockets()
        for _ in range(5):
            with pytest.raises(DAEMON_ERRORS):
                await p2p.call_binary_stream_handler(PeerID.from_base58(stranger), "/nothing")
            with pytest.raises(DAEMON_ERRORS):
                await client.connect(stranger, [])
            asking = asyncio.create_task(client.peers())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.2)
        assert open_sockets() == before
    finally:
        gc.enable()
        client.close()
        await p2p.shutdown()
        await daemon.stop()


@pytest.mark.timeout(60)
@in_loop
async def test_an_answer_to_a_call_that_was_just_cancelled_does_not_make_the_node_deaf(tmp_path: Path) -> None:
    daemon, p2p = await start(tmp_path)
    control, stranger = p2p._client.control, PeerID.from_base58(new_identity().peer_id)
    try:
        # The caller has cancelled the call, and its task has not run since then.
        call_id = uuid4()
        control._pending_calls[call_id] = asyncio.Future()
        control._pending_calls[call_id].cancel()
        call = p2pd_pb2.CallUnaryRequest(peer=stranger.to_bytes(), proto="/nothing", data=b"")
        await control._pending_messages.put(p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, callUnary=call))
        for _ in range(5):  # p2pd answers in any order.
            with pytest.raises(P2PDaemonError):
                await asyncio.wait_for(control.call_unary_handler(stranger, "/nothing", b""), 5)
    finally:
        await p2p.shutdown()
        await daemon.stop()


@pytest.mark.timeout(60)
@in_loop
async def test_a_handler_that_its_caller_cancels_is_forgotten(tmp_path_factory: pytest.TempPathFactory) -> None:
    served, one = await start(tmp_path_factory.mktemp("served"))
    calling, other = await start(tmp_path_factory.mktemp("calling"))
    begun = asyncio.Event()

    async def hang(_request: bytes, _caller: PeerID) -> bytes:
        begun.set()
        await asyncio.Future()
        return b""

    try:
        await one._client.add_unary_handler("/hang", hang)
        await other._client.connect(*await one._client.identify())
        call = asyncio.create_task(other._client.call_unary_handler(one.peer_id, "/hang", b""))
        await asyncio.wait_for(begun.wait(), 10)
        handlers = one._client.control._handler_tasks
        assert len(handlers) == 1
        call.cancel()
        await until(lambda: not handlers, 10)
    finally:
        await one.shutdown()
        await other.shutdown()
        await served.stop()
        await calling.stop()
