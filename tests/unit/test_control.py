"""What hivemind's clients of p2pd do with requests that fail or are cancelled."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
from hivemind.p2p import PeerID

from node.swarm.identity import load_identity, new_identity
from node.swarm.transport.control import DAEMON_ERRORS, ControlClient, attach
from node.swarm.transport.p2pd import Daemon, DaemonOptions, start_daemon
from tests.event_loop import in_loop


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
