"""Amendments on virtual time: nodes that crash, join, split and replay use the same settings in each round."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from node.config.amendments import Amendment, SignedAmendment, decode_list
from node.swarm.chain.chain import Tip
from node.swarm.governance.amendment_pool import AmendmentPool
from node.swarm.governance.charter import AmendmentRefused, sign_amendment
from tests.simulation.keys import simulated_identity
from tests.simulation.node import SimulatedNode
from tests.simulation.run import World, simulate
from tests.simulation.scenario import QUIET_S, Scenario, draw

SEEDS = range(40)
MOST_RESUME_S = 200.0
"""Without faults, a steered run makes some rounds within this time, even if it must be resumed first."""
# A world may end between the creation of a call and its first step.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*SimulatedWire.call.* was never awaited:RuntimeWarning")


class Founder:
    """Steers a simulated run from node 0, with changes that are drawn from the seed."""

    def __init__(self, world: World) -> None:
        self.world, self.node = world, world.nodes[0]
        self.rng = random.Random(f"founder {world.scenario.seed}")
        self.used: dict[tuple[str, int], set[tuple[int, int]]] = {}
        """For each head, what the nodes that contributed to the next round used: the chunks and the inner steps."""
        self.is_resumed = True
        self.refusals: list[str] = []
        for node in world.nodes:
            node.on_offered = self._offered

    def _offered(self, node: SimulatedNode, tip: Tip) -> None:
        if not node.hostility:
            used = len(node.rules_now.layout_at(tip.round + 1).bounds), tip.inner_steps
            self.used.setdefault((tip.head, tip.round + 1), set()).add(used)

    def _draw(self, at_end: bool) -> tuple[str, dict[str, Any]]:
        if at_end or (not self.is_resumed and self.rng.random() < 0.7):
            return "resume", {}
        if self.rng.random() < 0.25:
            return "pause", {}
        if self.rng.random() < 0.3 and len(self.node.disk.checkpoints) > 1:
            to = self.rng.choice(self.node.disk.checkpoints[:-1])
            return "rollback", {"to_round": to.round, "state": to.digest}
        choices: list[dict[str, Any]] = [
            {"round.inner_steps": self.rng.randint(4, 20)},
            {"sync.codec": self.rng.choice(("fp16", "fp32"))},
            {"round.min_peers": 1, "outer.lr": self.rng.choice((0.1, 0.5))},
            {"total_tokens": self.rng.randint(10**9, 10**10), "round.quorum_ratio": 0.5},
        ]
        return "amend", {"changes": self.rng.choice(choices)}

    def submit(self, *, at_end: bool = False) -> None:
        """Submit the next amendment, if node 0 is there."""
        node = self.node
        if not node.is_training or node.participant.pool.pending:
            return
        tip = node.chain.tip
        action, content = self._draw(at_end)
        amendment = Amendment(
            run=node.rules.run,
            number=len(decode_list(tip.state.amendments)) + 1,
            from_round=tip.round + 2 + self.rng.randint(0, 3),
            action=action,  # type: ignore[arg-type]
            **content,
        )
        try:
            node.participant.pool.add(sign_amendment(node.identity, amendment))
        except AmendmentRefused as exc:
            self.refusals.append(exc.refusal)
            return
        self.is_resumed = action != "pause" and (self.is_resumed or action == "resume")


async def steered(world: World) -> None:
    """Run a scenario while the founder submits amendments at random moments, and resumes the run at the end.

    If the founder is there, the run must go on, on all nodes.
    """
    founder, loop = Founder(world), world.loop
    world.founder = founder  # type: ignore[attr-defined]
    stormy_s = world.scenario.length_s - QUIET_S
    for _ in range(8):
        loop.call_later(founder.rng.uniform(2.0, stormy_s + 20.0), founder.submit)
    for after_s in (25.0, 40.0, 55.0, 70.0):
        loop.call_later(stormy_s + after_s, lambda: founder.submit(at_end=True))
    await world.run()
    if not founder.node.is_training:
        return
    live = [node for node in world.nodes if node.is_training]
    goal = max(node.tip.round for node in live) + 5
    until_s = loop.time() + MOST_RESUME_S
    while min(node.tip.round for node in live) < goal and len(live) >= world.scenario.min_peers:
        if loop.time() > until_s:
            rounds = [(node.number, node.tip.round, node.rules_now.is_paused) for node in live]
            world.report.violations.append(f"the run does not go on to round {goal}: {rounds}")
            return
        if founder.node.rules_now.is_paused:
            founder.submit(at_end=True)
        await asyncio.sleep(2.0)


def steered_scenario(seed: int) -> Scenario:
    drawn = draw(seed)
    return replace(drawn, is_steered=True, hostile="", joiners_download=bool(seed % 2))


@pytest.mark.parametrize("first", [0, 10, *(pytest.param(first, marks=pytest.mark.nightly) for first in (20, 30))])
def test_all_nodes_use_the_same_settings_in_each_round(first: int) -> None:
    accepted = joined = rewound = 0
    for seed in SEEDS[first : first + 10]:
        report, world = simulate(steered_scenario(seed), run=steered)
        assert report.violations == [], seed
        founder, rules = world.founder, world.rules  # type: ignore[attr-defined]
        assert founder.refusals == []
        newest = max(world.nodes, key=lambda node: node.tip.round).tip
        amendments = decode_list(newest.state.amendments)
        accepted += len(amendments)
        rewound += sum(one.rewound_tokens is not None for one in amendments)
        joined += sum(node.downloads for node in world.nodes)
        on_chain = {link.parent for link in newest.links}
        for (head, round_), used in founder.used.items():
            assert len(used) == 1, (seed, round_, used)
            if head in on_chain:
                now = rules.at(newest.state.amendments, round_)
                assert not now.is_paused, (seed, round_)
                assert used == {(len(now.layout_at(round_).bounds), now.outer.inner_steps)}, (seed, round_)
        for one in amendments:
            assert one.round < one.signed.amendment.from_round
            assert json.loads(one.signed.text)["run"] == rules.run
    assert accepted >= 10
    assert joined > 0 and rewound > 0


def test_a_paused_run_makes_no_rounds_for_a_change_that_none_can_accept_and_can_be_resumed() -> None:
    calm = replace(draw(1), faults=(), hostile="", is_steered=True, min_peers=1)
    rounds: list[int] = []

    async def run(world: World) -> None:
        node = world.nodes[0]

        async def submit(action: str, ahead: int, **content: Any) -> None:
            tip = node.chain.tip
            number = len(decode_list(tip.state.amendments)) + 1
            fields = {"run": node.rules.run, "number": number, "from_round": tip.round + ahead, "action": action}
            node.participant.pool.add(sign_amendment(node.identity, Amendment.model_validate(fields | content)))
            await asyncio.sleep(60.0)
            rounds.append(node.tip.round)

        await world.run()
        await submit("pause", 5)
        assert node.rules_now.is_paused
        await submit("amend", 1000, changes={"round.min_peers": calm.nodes + 5})
        assert node.participant.pool.pending
        await submit("resume", 2)
        assert not node.rules_now.is_paused

    report, _ = simulate(calm, run=run)
    assert report.violations == []
    paused, waiting, resumed = rounds
    assert waiting == paused and resumed > paused + 3


@pytest.mark.parametrize("seed", range(6))
def test_rounds_go_on_beside_a_leader_that_proposes_forged_amendments(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others refuse the attempts that the hostile node leads, and count its amendments."""
    next_ = AmendmentPool.next
    calm = replace(draw(seed), faults=(), hostile="", is_steered=True, min_peers=2)
    founder, hostile = simulated_identity(0).peer_id, simulated_identity(calm.nodes - 1)

    def forge(pool: AmendmentPool) -> SignedAmendment | None:
        accepted, round_ = pool._state()
        if pool._wire.peer_id != hostile.peer_id:
            return next_(pool)
        number = len(decode_list(accepted)) + 1
        forged = Amendment(run="ab" * 32, number=number, from_round=round_ + 1, action="stop")
        signature = sign_amendment(hostile, forged).signatures[hostile.peer_id]
        return SignedAmendment(text=forged.canonical(), signatures={founder: signature})

    monkeypatch.setattr(AmendmentPool, "next", forge)

    async def run(world: World) -> None:
        world.nodes[-1].hostility = ""
        await world.run()
        await asyncio.sleep(60.0)

    report, world = simulate(calm, run=run)
    honest = world.nodes[:-1]
    assert all(node.tip.state.amendments == b"" for node in world.nodes)
    assert report.rounds > 3
    assert sum(node.participant.pool.refused["forged"] for node in honest) > 0
