"""What peers say of themselves by gossip neither stops the others nor keeps them apart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count, pairwise

import pytest

from node.status import Phase
from node.swarm.consensus.leader_election import leader_order
from node.swarm.membership.gossip import _pack
from node.swarm.membership.peer_table import sign_record
from tests.simulation import node as simulated_node
from tests.simulation.network import Line
from tests.simulation.run import World, simulate
from tests.simulation.scenario import Scenario
from tests.simulation.staged import SPLIT_AT_S, are_on_one_chain, run, scenario
from tests.simulation.stranger import Stranger, tell

STRANGERS, NODES = 150, 4
ARRIVE_S, LENGTH_S = 25.0, 60.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_contributors_hear_of_each_other_among_many_silent_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contributor that is not heard of within `dead_s` counts as dead, and then the rest decide without it."""
    monkeypatch.setattr(simulated_node, "DIAL_EVERY_S", 60.0)  # As often as real nodes dial those they have lost.
    calm = Scenario(
        seed=3, step_s=(1.0,) * NODES, lines=(Line(0.01, 0.0),) * NODES, faults=(), length_s=LENGTH_S, min_peers=1,
        quorum_ratio=0.5, policy="time", disk_s=0.001, join_at_s=(0.0, 0.1, 0.2, 0.3), founders=NODES,
    )  # fmt: skip
    present: list[int] = []

    async def watch(world: World) -> None:
        for node, at_s in zip(world.nodes, calm.join_at_s, strict=True):
            world.loop.call_later(at_s, node.start)
        await asyncio.sleep(ARRIVE_S)
        for number in range(STRANGERS):
            Stranger(world, 200 + number).start()
        await asyncio.sleep(10.0)  # Records from before may be as old as `dead_s`.
        while world.loop.time() < LENGTH_S:
            await asyncio.sleep(1.0)
            for node in world.nodes:
                electorate = node.participant.ctx.electorate()
                present.append(len(electorate.present & electorate.contributors))

    report, _ = simulate(calm, run=watch)
    assert report.violations == []
    assert min(present) == NODES


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_healed_split_comes_together_although_strangers_claim_to_be_ahead() -> None:
    """Each of them costs 20 s if it is asked for its chain, and they are asked in turn."""
    one, ahead = scenario(NODES, (NODES - 1,), 30.0, 100.0, NODES), {"round": 10**6, "swarm_tokens": 10**15}

    def prepare(world: World) -> None:
        for node in world.nodes:
            world.loop.call_soon(node.start)
        for number in range(12):
            claims = ahead | {"head": f"{number:064x}", "phase": Phase.TRAINING}
            world.loop.call_later(SPLIT_AT_S - 5.0, Stranger(world, 200 + number, **claims).start)

    assert are_on_one_chain(run(one, prepare).nodes)


@pytest.mark.timeout(120)
def test_a_contributor_that_shows_the_others_different_phases_does_not_stop_its_rounds() -> None:
    """In rounds that it would lead, it takes part for the next leader, and is paused for all others."""
    nodes = NODES + 1
    calm = replace(scenario(nodes, (0,), 1.0, LENGTH_S, nodes), step_s=(0.3,) * nodes, faults=(), min_peers=2)
    commits: list[float] = []
    attacked: set[str] = set()

    async def show(world: World) -> None:
        *honest, hostile = world.nodes
        for number in count(10**14, 10):
            await asyncio.sleep(0.1)
            tip, attempt = honest[0].chain.tip, honest[0].participant.ballot.number
            order = sorted(leader_order(tip.head, list(tip.last_weights)), key=lambda peer: peer == tip.leader)
            if not order or order[0] != hostile.peer_id:
                continue
            attacked.add(tip.head)
            next_leader = order[1:][attempt % (len(order) - 1)]
            tellings = []
            for node in honest:
                is_next = node.peer_id == next_leader
                phase = {"phase": Phase.TRAINING if is_next else Phase.PAUSED, "number": number + is_next}
                record = hostile.peer_table.me.model_copy(update=phase)
                tellings.append(tell(hostile.wire, node.peer_id, _pack([sign_record(hostile.identity, record)], {})))
            await asyncio.gather(*tellings)

    async def watch(world: World) -> None:
        for node in world.nodes:
            world.loop.call_soon(node.start)
        await asyncio.sleep(15.0)
        attack = asyncio.ensure_future
        world.loop.call_soon(lambda: attack(show(world)), context=world.nodes[-1].life.context)
        head = ""
        while world.loop.time() < LENGTH_S + 60.0:
            await asyncio.sleep(0.1)
            if world.nodes[0].chain.tip.head != head:
                head = world.nodes[0].chain.tip.head
                commits.append(world.loop.time())

    report, _ = simulate(calm, run=watch)
    assert report.violations == []
    longest_s = max(later - earlier for earlier, later in pairwise([*commits, LENGTH_S + 60.0]))
    assert longest_s < 15.0, "without the attack, 3 s"
    assert len(attacked) > 3
