"""A founder and two that know only its invite: they train together, agree after every round, and outlive the founder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from node.diloco.schedule import learning_rate, swarm_tokens_at
from tests.swarm.conftest import Figures
from tests.swarm.harness import PATIENCE, START_S, TINY, Node, Swarm, common_rounds, tiny, wait_for

INNER_STEPS = 100
WARMUP_TOKENS = 100_000_000
"""So many that the learning rate rises steeply all the time: a wrong place in the schedule shows at once."""


class Trio:
    """Founder, second and third, all training; with what joining took."""

    def __init__(self, swarm: Swarm, policy: str) -> None:
        self.policy = policy
        founder = swarm.found()
        founder.until_training()
        began_s = time.monotonic()
        self.nodes: list[Node] = [founder, *swarm.join("second", "third")]
        for node in self.nodes:
            node.until_training(30 * PATIENCE)
        self.joined_s = time.monotonic() - began_s
        self.joined_at_round: int = founder.until(lambda s: s["peers"]["training"] == 3, START_S)["run"]["round"]


@pytest.fixture(scope="module", params=["steps", "time"])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    run = tiny(
        inner={"warmup_tokens": WARMUP_TOKENS},
        round={"policy": request.param, "inner_steps": INNER_STEPS},
    )
    with Swarm(tmp_path_factory.mktemp("trio"), run) as swarm:
        yield Trio(swarm, request.param)


def test_joiners_train_soon(trio: Trio, figures: Figures) -> None:
    figures.hold(f"two joiners at once until both train, {trio.policy}", trio.joined_s, 30)


def test_learning_rate_is_the_swarms(trio: Trio) -> None:
    """Of every node at every moment: what the schedule says of the tokens of the whole swarm."""
    for node in trio.nodes:
        seen: set[tuple[int, int]] = set()
        deadline_s = time.monotonic() + START_S
        while len(seen) < 3:
            assert time.monotonic() < deadline_s, f"{node.name} was seen training only {len(seen)} times"
            status = node.status()
            last, training = status["sync"]["last"], status["training"]
            place = (status["run"]["round"], training["inner_step"])
            if last is None or last["round"] != place[0] or not training["inner_step"] or place in seen:
                continue
            seen.add(place)
            low, high = expected_rates(status, trio.policy)
            assert low <= training["learning_rate"] <= high, (node.name, status)
            time.sleep(0.3)


def expected_rates(status: dict[str, Any], policy: str) -> tuple[float, float]:
    """Least and greatest rate of the newest inner step. `progress_ratio` is that after the step."""
    done = status["sync"]["progress_ratio"]
    # Under `time` a step takes as long as this machine lets it.
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


def test_all_agree_after_each_of_ten_rounds(trio: Trio) -> None:
    last = trio.joined_at_round + 11
    for node in trio.nodes:
        node.until_round(last, 2 * START_S)
    rounds = common_rounds(trio.nodes)
    wanted = range(last - 9, last + 1)
    assert set(wanted) <= set(rounds)
    assert {number: len(rounds[number]) for number in wanted} == dict.fromkeys(wanted, 1)
    records = {record["round"]: record for record in trio.nodes[0].rounds()}
    assert all(len(records[number]["members"]) == 3 for number in wanted), records
    assert not any(node.http.get("/api/v1/status").json()["run"]["round"] < last for node in trio.nodes)


def test_founder_leaves_and_a_later_start_finds_the_rest(trio: Trio, figures: Figures) -> None:
    """The founder is the only bootstrap peer there ever was."""
    founder, second, third = trio.nodes
    assert founder.act("leave").status_code == 202
    assert founder.wait_end(10 * PATIENCE) == 0
    agree_on([second, third], rounds=2)

    peer_id = second.status()["node"]["peer_id"]
    assert second.act("leave").status_code == 202
    assert second.wait_end(10 * PATIENCE) == 0
    began_s = time.monotonic()
    second.start()
    back = second.until(lambda s: s["phase"] == "training" and s["peers"]["training"] == 2, 30 * PATIENCE)
    figures.hold(f"back in the swarm without a bootstrap peer, {trio.policy}", time.monotonic() - began_s, 30)
    assert back["node"]["peer_id"] == peer_id
    agree_on([second, third], rounds=2)


def agree_on(nodes: Sequence[Node], rounds: int) -> None:
    """The next rounds, with all of these nodes in them, end in one digest."""

    def agreed() -> bool:
        shared = common_rounds(nodes)
        assert all(len(digests) == 1 for digests in shared.values()), shared
        together = [r for r in nodes[0].rounds() if r["round"] in shared and len(r["members"]) == len(nodes)]
        return len([r for r in together if r["round"] > first]) >= rounds

    first = max(node.status()["run"]["round"] for node in nodes)
    wait_for(agreed, START_S, f"{rounds} rounds of {', '.join(node.name for node in nodes)} together")
