"""What a wire remembers of the peers of its run."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from tests.event_loop import in_loop

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.swarm.transport import libp2p


@in_loop
async def test_a_wire_forgets_the_addresses_of_the_peers_that_it_has_heard_of_least_recently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libp2p, "MOST_ADDRESSES", 3)
    unused: Any = None
    p2p: Any = SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: "me"))
    wire = libp2p.Libp2pWire(unused, unused, p2p, unused, unused, unused)
    for number in range(3):
        wire.learn(f"peer {number}", ["/ip4/203.0.113.5/tcp/1"], inbound=number > 0)
    wire.relayed_at_s["peer 0"] = wire.relayed_at_s["peer 1"] = 5.0
    wire.learn("peer 0", ["/ip4/203.0.113.5/tcp/2"], inbound=False)
    wire.learn("peer 3", ["/ip4/203.0.113.5/tcp/1"], inbound=False)
    assert list(wire._addresses) == ["peer 2", "peer 0", "peer 3"]
    assert wire._closed_to_dials == {"peer 0", "peer 3"} and list(wire.relayed_at_s) == ["peer 0"]
