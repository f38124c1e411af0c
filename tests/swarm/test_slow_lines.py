"""Real nodes with one slow member: the slow member takes part in rounds, and the others hardly wait for it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.homes.home import Home
from tests.homes.world import World
from tests.swarm.conftest import Figures
from tests.swarm.harness import START_S, Node, Swarm, tiny, wait_for

REST = {"DILOCO_FAULTS": "inner@*=rest:0.25"}
"""Each inner step sleeps for 0.25 s. All nodes share this machine, and only the lines should be slow."""
MODEL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
"""A model of 0.92 million parameters. In int8 they are 0.92 MB, which take 3.9 s at 2 Mbit/s."""
MBIT_S = 2.0
UPLOAD_S = 3.9
ROUND_S = 11.0
LEARNT = 5
"""Number of rounds until the fast nodes have measured and announced their uplinks."""
JUDGED = 4


def included(node: Node, after: int) -> dict[int, set[str]]:
    """The names of the included members for each round after `after`, from this node's records."""
    told = [one for one in node.rounds() if one["round"] > after and one["outcome"] != "failed"]
    return {one["round"]: {m["name"] for m in one["members"] if m["included"]} for one in told}


def transfer_s(node: Node, after: int) -> list[float]:
    """The seconds from the closed group to the commit, for each round after `after`."""
    told = [one for one in node.rounds() if one["round"] > after and one["outcome"] != "failed"]
    return [one["seconds"]["reduce"] + one["seconds"]["commit"] for one in told]


def describe(nodes: Sequence[Node]) -> str:
    rows = [
        {"name": node.name, **{key: one[key] for key in ("round", "outcome", "seconds", "reason")}}
        for node in nodes
        for one in node.rounds()
    ]
    return "\n".join(json.dumps(row) for row in rows)


@pytest.mark.timeout(600)
def test_member_on_a_slow_line_takes_part_in_at_least_every_second_round(
    network: World, tmp_path: Path, figures: Figures
) -> None:
    lines = [None, None, None, (MBIT_S, MBIT_S)]
    hosts = [network.attach(Home("public", lines=line)) for line in lines]
    run: dict[str, Any] = {
        "model": MODEL,
        "round": {"policy": "time", "inner_steps": round(4 * ROUND_S), "min_peers": 2},
        "sync": {"codec": "int8"},
    }
    with Swarm(tmp_path, tiny(**run)) as swarm:
        founder = swarm.node("founder").live_in(hosts[0]).start(env=REST)
        invite = founder.invite()
        joined = [
            swarm.node(name, join=invite).live_in(host)
            for name, host in zip(("b", "c", "slow"), hosts[1:], strict=True)
        ]
        for node in joined:
            node.start(env=REST)
        for node in joined:
            node.until_training(2 * START_S)
        first = founder.status()["run"]["round"] + LEARNT
        founder.until_round(first + JUDGED, (LEARNT + JUDGED + 2) * 3 * ROUND_S)
        rounds = wait_for(lambda: len(r := included(founder, first)) >= JUDGED and r, START_S, describe(swarm.nodes))
        missed = [number for number in sorted(rounds) if "slow" not in rounds[number]]
        assert not any(number + 1 in missed for number in missed), describe(swarm.nodes)
        waited_s = statistics.median(transfer_s(founder, first))
        figures.tell(f"fast members wait for the transfer of one at {MBIT_S:g} Mbit/s", waited_s)
        assert waited_s < 1.5 * UPLOAD_S, describe(swarm.nodes)
        given = [node.status()["contribution"] for node in swarm.nodes]
        assert sum(one["bytes_forwarded"] for one in given) > 0 and given[-1]["bytes_forwarded"] == 0
        assert given[-1]["tokens_merged"] >= 0.8 * given[-1]["tokens_total"], given[-1]


SPEEDS = {"founder": 1.0, "second": 1.0, "quarter": 1 / 4, "sixteenth": 1 / 16}
STEP_S, STEPS = 0.1, 80
SPEED_ROUNDS = 6


@pytest.mark.timeout(400)
def test_work_of_members_with_different_speeds_is_merged(tmp_path: Path) -> None:
    """The slowest node does five inner steps in a round. A sixth would end too late."""
    run = tiny(round={"policy": "time", "inner_steps": STEPS, "min_peers": 2})
    with Swarm(tmp_path, run) as swarm:
        for name, speed in SPEEDS.items():
            founder = swarm.nodes[0] if swarm.nodes else None
            node = swarm.node(name, join=founder.invite() if founder is not None else None)
            node.start(env={"DILOCO_FAULTS": f"inner@*=rest:{STEP_S / speed}"})
            if founder is None:
                node.until_training(2 * START_S)
        for node in swarm.nodes:
            node.until_training(2 * START_S)
        founder = swarm.nodes[0]
        first = max(node.status()["run"]["round"] for node in swarm.nodes) + 2
        founder.until_round(first + SPEED_ROUNDS, (SPEED_ROUNDS + 3) * 5 * STEPS * STEP_S)
        rounds = wait_for(lambda: len(r := included(founder, first)) >= SPEED_ROUNDS and r, START_S, "rounds")
        missed = sum(name not in members for members in rounds.values() for name in SPEEDS)
        assert missed <= len(rounds) // 2, describe(swarm.nodes)
        given = [node.status()["contribution"] for node in swarm.nodes]
        merged, discarded = (sum(one[key] for one in given) for key in ("tokens_merged", "tokens_discarded"))
        assert merged >= 0.9 * (merged + discarded), given
