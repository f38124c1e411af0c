"""When discovery uses the DHT, and what it does with a libp2p daemon that hangs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from node.errors import SwarmError
from node.swarm.membership import discovery
from node.swarm.membership.discovery import DHT_USERS, SILENT_TRIES, Discovery


def discovery_among(live: Sequence[object]) -> Any:
    made: Any = Discovery.__new__(Discovery)
    made._rng, made._wire, made.is_reached, made._offers_relay = random.Random(1), SimpleNamespace(), True, False
    made._peer_table = SimpleNamespace(
        live=lambda: live, live_relays=list, silent=list, me=SimpleNamespace(via=()), update_own=lambda **_fields: None
    )
    return made


@pytest.mark.parametrize("count", [1, DHT_USERS, 100])
def test_a_few_peers_of_a_run_use_the_dht_at_a_time(count: int) -> None:
    node = discovery_among(range(count))
    turns = sum(node._has_dht_turn() for _ in range(1000))
    assert turns * count / 1000 == pytest.approx(min(count, DHT_USERS), rel=0.2)


def test_a_daemon_that_does_not_list_its_peers_many_times_in_a_row_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    node = discovery_among(["me"])
    answers: list[set[str] | None] = [*[None] * (SILENT_TRIES - 1), set(), *[None] * SILENT_TRIES]

    async def keep_connected(_peers: object) -> set[str] | None:
        return answers.pop(0)

    node._wire.keep_connected = keep_connected
    monkeypatch.setattr(discovery, "HOLD_S", 0.0)
    with pytest.raises(SwarmError, match="does not answer"):
        asyncio.run(node.keep_connections())
    assert answers == []
