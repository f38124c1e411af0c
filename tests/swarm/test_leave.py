"""A node leaves cleanly at any moment, and the others lose little time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.swarm.conftest import Figures
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, assert_agreed, command, tiny, wait_for

WAYS = ("sigterm", "sigint", "leave")
HELD = {"DILOCO_FAULTS": "reduce@*=stall:5"}
"""A fault that delays each round of this node while it sends its contribution."""


class Party:
    """Two nodes that stay, and one node for each way of leaving."""

    def __init__(self, swarm: Swarm, moment: str) -> None:
        self.moment = moment
        self.stay = swarm.nodes[:2]
        if len(swarm.nodes) == 2:
            swarm.join(*WAYS)
        self.go: dict[str, Node] = {node.name: node for node in swarm.nodes[2:]}
        for node in self.go.values():
            if moment == "round":
                node.start(env=HELD)
        for node in self.go.values():
            node.until_training()


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with Swarm(tmp_path_factory.mktemp("party"), tiny(round={"inner_steps": 15})) as swarm:
        swarm.found().until_training()
        swarm.join("second")[0].until_training()
        yield swarm


@pytest.fixture(scope="module", params=["inner", "round"])
def party(request: pytest.FixtureRequest, swarm: Swarm) -> Party:
    return Party(swarm, request.param)


@pytest.mark.parametrize("way", WAYS)
def test_node_leaves_promptly_and_the_others_continue_training(party: Party, way: str, figures: Figures) -> None:
    node = party.go[way]
    if party.moment == "inner":
        status = node.until_training()
    else:
        status = node.until(lambda s: s["sync"]["stage"] == "reduce", START_S)
    peer_id = status["node"]["peer_id"]
    supervisor = node.find("supervisor")
    assert {node.find(what).pid for what in ("worker", "p2pd")}
    with node.events():
        began_s = time.monotonic()
        if way == "leave":
            code, out, err = command("leave", "--data-dir", str(node.folder))
            assert (code, err) == (0, "") and "leave: accepted" in out
        else:
            supervisor.send_signal(signal.SIGTERM if way == "sigterm" else signal.SIGINT)
        code = node.wait_end(10 * PATIENCE)
        figures.hold(f"{way} in {party.moment} to exit", time.monotonic() - began_s, 10)
    assert code == 0, node.said()[-3000:]
    node.assert_ended()
    assert not (node.folder / "api.json").exists()
    for other in party.stay:
        wait_for(partial(gone, other, peer_id), 5 * PATIENCE, f"{other.name} still counts {way}")
    figures.hold(f"{way} in {party.moment} to the others' knowing", time.monotonic() - began_s, 5)
    rounds_go_on(party.stay)


def gone(other: Node, peer_id: str) -> bool:
    rows = [row for row in other.peers() if row["phase"] in ("training", "syncing", "draining")]
    return peer_id not in {row["peer_id"] for row in rows} and other.status()["peers"]["training"] == len(rows)


def rounds_go_on(nodes: list[Node]) -> None:
    first = max(node.status()["run"]["round"] for node in nodes)
    for node in nodes:
        node.until_round(first + 2)
    assert_agreed(nodes, first)
