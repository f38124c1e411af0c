"""Which relays a node keeps a connection to."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.swarm.discovery import Discovery

RELAYS = [f"relay{number}" for number in range(10)]


def choose(via: tuple[str, ...], seed: int) -> list[str]:
    directory: Any = SimpleNamespace(live_relays=lambda: RELAYS, me=SimpleNamespace(via=via))
    discovery = Discovery.__new__(Discovery)
    discovery._directory, discovery._rng = directory, random.Random(seed)
    return discovery._choose_relays()


def test_relays_that_work_are_kept_and_the_missing_ones_are_drawn() -> None:
    chosen = choose(("relay7", "gone"), seed=1)
    assert chosen[0] == "relay7" and len(set(chosen)) == 3 and "gone" not in chosen
    assert choose(("relay1", "relay2", "relay3"), seed=1) == ["relay1", "relay2", "relay3"]


def test_a_node_that_reaches_one_relay_of_ten_comes_to_try_it() -> None:
    assert any("relay4" in choose((), seed) for seed in range(20))
    assert len({tuple(choose((), seed)) for seed in range(20)}) > 1
