"""Newcomers and free identities neither stop nor stretch the rounds of those that contribute."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest

from node.status import Phase
from node.swarm.transport.wire import Message
from tests.simulation.adversary import Adversary
from tests.simulation.network import Line
from tests.simulation.node import SimulatedNode
from tests.simulation.run import World, simulate
from tests.simulation.staged import are_on_one_chain, scenario
from tests.simulation.stranger import Stranger

ARRIVE_S, LENGTH_S = 25.0, 60.0


@pytest.mark.timeout(120)
def test_strangers_that_never_join_stretch_rounds_by_the_grace_only() -> None:
    """They claim to train at the newest head, and there are more of them than contributors."""
    calm = replace(scenario(3, (0,), 1.0, LENGTH_S, 3), step_s=(0.3,) * 3, faults=())
    commits: list[tuple[int, float]] = []

    async def watch(world: World) -> None:
        first = world.nodes[0]
        for node in world.nodes:
            world.loop.call_soon(node.start)
        strangers = [Stranger(world, 200 + number) for number in range(4)]
        await asyncio.sleep(ARRIVE_S)
        for stranger in strangers:
            stranger.start()
        while world.loop.time() < ARRIVE_S + 10 * LENGTH_S:
            await asyncio.sleep(0.05)
            tip = first.chain.tip
            for stranger in strangers:
                stranger.record = {"head": tip.head, "round": tip.round, "phase": Phase.TRAINING}
            if world.loop.time() > ARRIVE_S + 10.0 and (not commits or commits[-1][0] != tip.round):
                commits.append((tip.round, world.loop.time()))

    report, _ = simulate(calm, run=watch)
    assert report.violations == []
    seconds = [later_s - earlier_s for (_, earlier_s), (_, later_s) in pairwise(commits[1:])]
    assert len(seconds) > 20
    assert max(seconds) < 9.0, "without strangers, 4 s, or 6 s in every third round"


class Mute(Adversary):
    """Joins each attempt, and neither contributes nor votes. It holds the attempts that it leads open."""

    def request(self, receiver: str, verb: str, message: Message) -> Message | None:
        return None if verb in ("contribute", "deposit") or "vote" in message.header else message

    def reply(self, receiver: str, verb: str, message: Message) -> Message | None:
        return Message({"status": "wait"}) if verb == "attend" else message


@pytest.mark.timeout(120)
def test_newcomers_that_join_and_never_vote_do_not_stop_rounds() -> None:
    """There are more of them than contributors. Each round waits for their contributions, and not for their votes."""
    calm = replace(scenario(9, (0,), 1.0, 300.0, 4), step_s=(0.3,) * 9, faults=())
    rounds: list[int] = []

    async def watch(world: World) -> None:
        for node in world.nodes[:4]:
            world.loop.call_soon(node.start)
        await asyncio.sleep(ARRIVE_S)
        for node in world.nodes[4:]:
            node.hostility = "Silence"
            world._start(node)
        await asyncio.sleep(1.0)
        for node in world.nodes[4:]:
            node.wire.adversary = Mute(node, random.Random(0))
        await asyncio.sleep(30.0)
        for _ in range(2):
            rounds.append(world.nodes[0].chain.tip.round)
            await asyncio.sleep(240.0)

    report, world = simulate(calm, run=watch)
    assert report.violations == []
    assert rounds[1] - rounds[0] >= 2
    assert are_on_one_chain(world.nodes[:4])


def commits_under(attack: Callable[[World, SimulatedNode, Iterator[int]], Awaitable[None]]) -> int:
    """The rounds that five nodes commit in 200 s, of which each takes 3 s without an attack.

    The attack is called once a second, with numbers of keys.
    """
    calm = replace(scenario(5, (0,), 1.0, 300.0, 5), step_s=(0.3,) * 5, faults=())
    rounds: list[int] = []

    async def watch(world: World) -> None:
        keys, numbers, on_request = count(1000), world._numbers, world.network.on_request
        world.network.on_request = lambda sender, message: on_request(sender, message) if sender in numbers else None
        for node in world.nodes:
            world.loop.call_soon(node.start)
        await asyncio.sleep(ARRIVE_S)
        for _ in range(200):
            rounds.append(world.nodes[0].chain.tip.round)
            await attack(world, world.nodes[0], keys)
            await asyncio.sleep(1.0)

    report, world = simulate(calm, run=watch)
    assert report.violations == []
    assert are_on_one_chain(world.nodes)
    return rounds[-1] - rounds[0]


def at_tip(node: SimulatedNode) -> dict[str, Any]:
    """The fields of a record that claims to be where this node is."""
    tip = node.chain.tip
    return {"head": tip.head, "round": tip.round, "state_digest": tip.digest, "phase": Phase.TRAINING}


@pytest.mark.timeout(120)
def test_strangers_that_claim_later_attempts_do_not_end_those_of_the_contributors() -> None:
    """Each second, three new ones claim the next attempt, so that no identity does it twice."""
    present: list[Stranger] = []

    async def attack(world: World, node: SimulatedNode, keys: Iterator[int]) -> None:
        for stranger in present:
            stranger.do(partial(stranger.say, phase=Phase.STOPPED))
        attempt = max(one.participant.ballot.number for one in world.nodes) + 1
        present[:] = [Stranger(world, next(keys), **at_tip(node), attempt=attempt) for _ in range(3)]
        for stranger in present:
            stranger.do(stranger.say)

    assert commits_under(attack) > 50


@pytest.mark.timeout(120)
def test_strangers_that_offer_to_reduce_and_never_answer_cost_a_round_one_attempt() -> None:
    """A new one joins each attempt, so that no leader knows it."""
    joined: set[tuple[str, int]] = set()

    async def attack(world: World, node: SimulatedNode, keys: Iterator[int]) -> None:
        ctx, number = node.participant.ctx, node.participant.ballot.number
        first = ctx.next_led(number)
        for attempt in {first, ctx.next_led(first + 1)}:
            if (key := (node.chain.tip.head, attempt)) not in joined:
                joined.add(key)
                stranger = Stranger(world, next(keys), **at_tip(node))
                stranger.do(partial(stranger.attend, node, attempt))

    assert commits_under(attack) >= 5
    assert len(joined) > 10


@pytest.mark.timeout(120)
def test_a_lone_founder_commits_no_round_with_newcomers_before_one_of_them_holds_it() -> None:
    """If it failed right after the commit, nobody else would have the round. Its own vote is a quorum."""
    slow, fast = Line(0.02, 0.01, up_bytes_s=250e3, down_bytes_s=500e3), Line(0.02, 0.01, 2.5e6, 2.5e6)
    nodes = 4
    one = replace(
        scenario(nodes, (0,), 1.0, 400.0, 1),
        step_s=(2.0,) * nodes, faults=(), chunk_bytes=512 * 1024, lines=(fast,) + (slow,) * (nodes - 1),
    )  # fmt: skip
    votes: dict[int, int] = {}

    async def watch(world: World) -> None:
        founder, *newcomers = world.nodes
        world.loop.call_soon(founder.start)
        await asyncio.sleep(70.0)
        founder.peer_table.update_own(addresses=("/ip4/1.2.3.4/tcp/7000",))  # Nobody else can be called over IPv4.
        for node in newcomers:
            world.loop.call_soon(node.start)
        while world.loop.time() < one.length_s:
            await asyncio.sleep(0.1)
            tip = founder.chain.tip
            if tip.proof is not None and len(tip.last_weights) > 1:
                votes[tip.round] = len(tip.proof.accepts)

    report, _ = simulate(one, run=watch)
    assert report.violations == []
    assert votes and min(votes.values()) > 1
