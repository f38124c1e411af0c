"""Scenarios that a test writes down, in place of those that a seed draws."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from node.status import Channel
from node.swarm.chain.fork_choice import heads_of
from node.swarm.transport.wire import Handler, Message, Service
from tests.simulation.adversary import Adversary
from tests.simulation.network import Line
from tests.simulation.node import SimulatedNode
from tests.simulation.run import World, simulate
from tests.simulation.scenario import Fault, Scenario

SPLIT_AT_S = 20.0


def scenario(
    nodes: int, side: tuple[int, ...], split_s: float, length_s: float, founders: int, min_peers: int = 1
) -> Scenario:
    """Nodes with equal speeds and lines. A split separates `side` from the others."""
    return Scenario(
        seed=1,
        step_s=(0.2,) * nodes,
        lines=(Line(),) * nodes,
        faults=(Fault(SPLIT_AT_S, "split", side[0], split_s, side=side),),
        length_s=length_s,
        min_peers=min_peers,
        quorum_ratio=0.5,
        policy="time",
        disk_s=0.001,
        join_at_s=(0.0,) * nodes,
        founders=founders,
    )


def run(one: Scenario, prepare: Callable[[World], None]) -> World:
    """Let `prepare` start the nodes, and run to the end."""

    async def whole(world: World) -> None:
        prepare(world)
        world.loop.call_at(SPLIT_AT_S, world._cause, one.faults[0])
        await asyncio.sleep(one.length_s)

    report, world = simulate(one, run=whole)
    assert report.violations == [], report.violations
    return world


def are_on_one_chain(nodes: list[SimulatedNode]) -> bool:
    """Whether the nodes have one head, or some are one round behind the others."""
    tips = [node.chain.tip for node in nodes]
    newest = max(tips, key=lambda tip: tip.round)
    return all(tip.head in heads_of(newest.links, newest.head)[:2] for tip in tips)


class FarAway(Adversary):
    """Claims many tokens at an unknown head."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        self.node.peer_table.update_own(head="f" * 64, round=10**6, swarm_tokens=2**60)
        return message


def start_far_away(
    world: World, node: SimulatedNode, at_s: float, chain: Handler, kind: type[FarAway] = FarAway
) -> None:
    """Start a hostile node. From `at_s` on, it claims to be far away and answers `chain` with this handler."""
    node.hostility = "Silence"
    world._start(node)

    def attack() -> None:
        node.wire.adversary = kind(node, random.Random(0))
        node.wire.serve({"chain": Service(chain, Channel.STATE)})

    world.loop.call_at(at_s, attack)
