"""Nodes that join with the founder's invite train with the founder, agree with it, and continue without it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from node.diloco.schedule import learning_rate, swarm_tokens_at
from tests.swarm.conftest import Figures
from tests.swarm.harness import PATIENCE, START_S, TINY, Node, Swarm, common_rounds, tiny, wait_for

INNER_STEPS = 15
WARMUP_TOKENS = 100_000_000
"""The learning rate rises steeply during the whole test, so a wrong position in the schedule is noticed."""


NAMES = {"steps": ("second",), "time": ("second", "third")}


class Together:
    """A founder and the nodes that joined it, all training, and the seconds that joining took."""

    def __init__(self, swarm: Swarm, policy: str) -> None:
        self.policy = policy
        founder = swarm.found()
        founder.until_training()
        began_s = time.monotonic()
        self.nodes: list[Node] = [founder, *swarm.join(*NAMES[policy])]
        for node in self.nodes:
            node.until_training(30 * PATIENCE)
        self.joined_s = time.monotonic() - began_s
        together = founder.until(lambda s: s["peers"]["training"] == len(self.nodes), START_S)
        self.joined_at_round: int = together["run"]["round"]


@pytest.fixture(scope="module", params=["steps", "time"])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    run = tiny(
        inner={"warmup_tokens": WARMUP_TOKENS},
        round={"policy": request.param, "inner_steps": INNER_STEPS},
    )
    with Swarm(tmp_path_factory.mktemp("together"), run) as swarm:
        yield Together(swarm, request.param)


def test_joining_nodes_start_training_within_the_promised_time(together: Together, figures: Figures) -> None:
    who = f"{len(together.nodes) - 1} at once, {together.policy}"
    figures.hold(f"from joining to training, {who}", together.joined_s, 30)


def test_each_node_uses_the_learning_rate_scheduled_for_the_tokens_of_the_swarm(together: Together) -> None:
    """The learning-rate schedule depends on the number of tokens that the whole swarm has trained on."""
    seen: dict[str, set[tuple[int, int]]] = {node.name: set() for node in together.nodes}

    def look() -> bool:
        for node in together.nodes:
            status = node.status()
            last, training = status["sync"]["last"], status["training"]
            place = (status["run"]["round"], training["inner_step"])
            if last is not None and last["state_digest"] == status["run"]["state_digest"] and training["inner_step"]:
                seen[node.name].add(place)
                low, high = expected_rates(status, together.policy)
                assert low <= training["learning_rate"] <= high, (node.name, status)
        return all(len(places) >= 3 for places in seen.values())

    wait_for(look, START_S, f"each was seen training only so often: {seen}")


def expected_rates(status: dict[str, Any], policy: str) -> tuple[float, float]:
    """The lowest and highest possible learning rate of the newest inner step, which `progress_ratio` includes."""
    done = status["sync"]["progress_ratio"]
    # Under the policy `time` the progress of a step depends on the speed of this machine.
    before = done - 1 / INNER_STEPS if policy == "steps" else done - 0.5
    tokens = sum(m["weight"] for m in status["sync"]["last"]["members"] if m["included"])
    at = [swarm_tokens_at(status["run"]["swarm_tokens"], ratio, tokens) for ratio in (before, done)]
    if policy == "steps" and done < 1:
        at[1] = at[0]
    inner: dict[str, Any] = TINY["inner"]
    low, high = (
        learning_rate(
            place, peak=inner["lr"], warmup_tokens=WARMUP_TOKENS, total_tokens=TINY["total_tokens"], min_ratio=0.1
        )
        for place in at
    )
    return low * (1 - 1e-4), high * (1 + 1e-4)


def test_all_nodes_have_the_same_state_digest_after_each_of_ten_rounds(together: Together) -> None:
    last = together.joined_at_round + 11
    for node in together.nodes:
        node.until_round(last, 2 * START_S)
    rounds = common_rounds(together.nodes)
    wanted = range(last - 9, last + 1)
    assert set(wanted) <= set(rounds)
    assert {number: len(rounds[number]) for number in wanted} == dict.fromkeys(wanted, 1)
    records = {record["round"]: record for record in together.nodes[0].rounds()}
    assert all(len(records[number]["members"]) == len(together.nodes) for number in wanted), records


def test_restarted_node_finds_the_swarm_after_the_founder_has_left(together: Together, figures: Figures) -> None:
    """The founder was the only bootstrap peer."""
    if len(together.nodes) < 3:
        pytest.skip("needs two that stay")
    founder, second, third = together.nodes
    assert founder.act("leave").status_code == 202
    assert founder.wait_end(10 * PATIENCE) == 0
    agree_on([second, third], rounds=2)

    peer_id = second.status()["node"]["peer_id"]
    assert second.act("leave").status_code == 202
    assert second.wait_end(10 * PATIENCE) == 0
    began_s = time.monotonic()
    second.start()
    back = second.until(lambda s: s["phase"] == "training" and s["peers"]["training"] == 2, 30 * PATIENCE)
    figures.hold(f"back in the swarm without a bootstrap peer, {together.policy}", time.monotonic() - began_s, 30)
    assert back["node"]["peer_id"] == peer_id
    agree_on([second, third], rounds=2)


def agree_on(nodes: Sequence[Node], rounds: int) -> None:
    """Wait for `rounds` more rounds that include all of these nodes. Asserts that their digests are equal."""

    def agreed() -> bool:
        shared = common_rounds(nodes)
        assert all(len(digests) == 1 for digests in shared.values()), shared
        together = [r for r in nodes[0].rounds() if r["round"] in shared and len(r["members"]) == len(nodes)]
        return len([r for r in together if r["round"] > first]) >= rounds

    first = max(node.status()["run"]["round"] for node in nodes)
    wait_for(agreed, START_S, f"{rounds} rounds of {', '.join(node.name for node in nodes)} together")


def test_founder_that_waits_for_other_members_offers_an_invite(tmp_path: Path) -> None:
    """The founder may learn its addresses only after it has begun to wait."""
    with Swarm(tmp_path, tiny(round={"min_peers": 2, "inner_steps": 1})) as swarm:
        node = swarm.found()
        node.until(lambda s: s["code"] == "waiting_for_peers", START_S)
        assert node.until(lambda s: s["run"]["invite"], 10 * PATIENCE)["phase"] == "syncing"
