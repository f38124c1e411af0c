"""The choice of the relays to which a node keeps a connection."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from node.swarm.membership.discovery import GIVEN_UP_S, Discovery

RELAYS = [f"relay{number}" for number in range(10)]


class Carriers:
    """A wire that knows which relays carry a call to this node."""

    def __init__(self, *bad: str) -> None:
        self.bad, self.asked = set(bad), list[str]()

    async def is_carried_by(self, relay: str, verb: str, timeout_s: float) -> bool:
        self.asked.append(relay)
        return relay not in self.bad


def discovery(via: tuple[str, ...], seed: int, *bad: str, relays: list[str] = RELAYS, inbound: bool = False) -> Any:
    made: Any = Discovery.__new__(Discovery)
    made._peer_table = SimpleNamespace(live_relays=lambda: relays, me=SimpleNamespace(via=via, inbound=inbound))
    made._rng, made._wire = random.Random(seed), Carriers(*bad)
    made._given_up_until_s, made._failing = {}, frozenset()
    return made


def choose(via: tuple[str, ...], seed: int) -> list[str]:
    chosen: list[str] = discovery(via, seed)._choose_relays()
    return chosen


async def check(discovery: Any, times: int) -> list[str]:
    """Check the relays `times` times, and return the relays that are chosen afterwards."""
    for _ in range(times):
        await discovery._check_relays()
    chosen: list[str] = discovery._choose_relays()
    return chosen


def test_node_keeps_its_working_relays_and_draws_the_missing_ones() -> None:
    chosen = choose(("relay7", "gone"), seed=1)
    assert chosen[0] == "relay7" and len(set(chosen)) == 3 and "gone" not in chosen
    assert choose(("relay1", "relay2", "relay3"), seed=1) == ["relay1", "relay2", "relay3"]


def test_nodes_choose_different_relays_at_random() -> None:
    assert any("relay4" in choose((), seed) for seed in range(20))
    assert len({tuple(choose((), seed)) for seed in range(20)}) > 1


def test_relay_that_fails_twice_in_a_row_is_replaced() -> None:
    async def run() -> None:
        via = ("relay1", "relay2", "relay3")
        node = discovery(via, 1, "relay2")
        assert await check(node, 1) == list(via), "once may be by chance"
        node._wire.bad.clear()
        await check(node, 1)
        node._wire.bad.add("relay2")
        assert await check(node, 1) == list(via), "not in a row"
        chosen = await check(node, 1)
        assert chosen[:2] == ["relay1", "relay3"] and len(chosen) == 3 and "relay2" not in chosen
        assert all("relay2" not in node._choose_relays() for _ in range(50))
        node._wire.bad.clear()
        node._given_up_until_s["relay2"] -= GIVEN_UP_S
        assert await check(node, 1) == list(via), "not for ever"

    asyncio.run(run())


def test_failing_relay_is_kept_if_it_is_the_only_relay() -> None:
    node = discovery(("relay1",), 1, "relay1", relays=["relay1"])
    assert asyncio.run(check(node, 3)) == ["relay1"]


def test_node_with_an_inbound_port_does_not_check_its_relays() -> None:
    node = discovery(("relay1",), 1, "relay1", inbound=True)
    assert asyncio.run(check(node, 3))[0] == "relay1" and not node._wire.asked
