"""Forks on virtual time: all nodes end on one chain, and one hostile member does not prevent it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from node.errors import PeerError
from node.status import Phase
from node.swarm.chain import fork_choice
from node.swarm.membership.peer_table import PeerRecord, sign_record
from node.swarm.state_sync import server
from node.swarm.transport.wire import Message
from tests.simulation.keys import simulated_identity
from tests.simulation.network import Line
from tests.simulation.run import World
from tests.simulation.scenario import Fault
from tests.simulation.staged import FarAway, are_on_one_chain, run, scenario, start_far_away


@pytest.mark.parametrize("download_s", [(10.0, 18.0), (0.0, 0.0)])
def test_two_members_that_lose_a_fork_do_not_lead_each_other_back(download_s: tuple[float, float]) -> None:
    """Their chain has more tokens, and each offers it to the other while that one catches up with the winners."""
    one = scenario(5, (0, 1), 20.0, 120.0, founders=5)

    def prepare(world: World) -> None:
        for node in world.nodes:
            extra_s = download_s[node.number] if node.number < 2 else 0.0
            tokens = 300 if node.number < 2 else 10
            node.habits = replace(node.habits, tokens_per_step=tokens, checkpoint_rounds=40, download_s=extra_s)
            world._start(node)

    world = run(one, prepare)
    assert [node.downloads for node in world.nodes] == [1, 1, 0, 0, 0]
    assert are_on_one_chain(world.nodes) and world.nodes[0].chain.tip.round > 15


@pytest.mark.parametrize("latency_s", [0.05, 0.2])
def test_a_node_whose_rounds_are_shorter_than_its_questions_to_all_others_gives_up_its_chain(latency_s: float) -> None:
    """It commits a round of its own while it asks. So it took its own round for one that the others had sent."""
    one = scenario(9, (0,), 15.0, 120.0, founders=9)
    lines = (Line(latency_s, 0.0), *(Line(latency_s, latency_s),) * 8)
    one = replace(one, step_s=(0.05, *(0.2,) * 8), lines=lines)

    def prepare(world: World) -> None:
        for node in world.nodes:
            world._start(node)

    world = run(one, prepare)
    assert are_on_one_chain(world.nodes) and world.nodes[0].downloads == 1


def test_a_hostile_member_that_refuses_its_proofs_stops_nobody() -> None:
    """It claims to be far ahead. Its refusal looks like that of an honest member without the result of a round."""
    one = replace(scenario(4, (3,), 0.1, 400.0, founders=3), step_s=(2.0,) * 4)

    async def refuse(_caller: str, _message: Message) -> Message:
        raise PeerError("no peer has all chunks of the result", code="reducer_lost")

    def prepare(world: World) -> None:
        for node in world.nodes[:3]:
            world._start(node)
        start_far_away(world, world.nodes[3], 40.0, refuse)

    world = run(one, prepare)
    assert are_on_one_chain(world.nodes[:3]) and world.nodes[0].chain.tip.round > 10


def test_a_hostile_member_with_empty_answers_hides_neither_a_fork_nor_newer_rounds() -> None:
    """It claims the most tokens, so it is asked first. It answers that it is at the caller's head."""
    one = scenario(5, (0,), 20.0, 120.0, founders=3)

    async def echo(_caller: str, message: Message) -> Message:
        return Message({"head": message.header["heads"][0], "age_s": 0.0, "light": False})

    def prepare(world: World) -> None:
        for node in world.nodes[:3]:
            world._start(node)
        start_far_away(world, world.nodes[4], 5.0, echo)
        world.loop.call_at(70.0, world._start, world.nodes[3])

    world = run(one, prepare)
    assert are_on_one_chain(world.nodes[:4]) and world.nodes[3].chain.tip.round > 15


class PausedFarAway(FarAway):
    """Claims to be paused, so it is a member of no round, but others ask it for newer rounds."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        self.node.peer_table.update_own(phase=Phase.PAUSED)
        return super().request(receiver, verb, message)


def test_a_node_that_restarts_does_not_wait_for_strangers_that_never_answer() -> None:
    """They claim more than the members, so they were asked first, one after the other, for 20 s each."""
    one = scenario(7, (0,), 0.1, 100.0, founders=4)
    is_training: list[bool] = []

    async def hang(_caller: str, _message: Message) -> Message:
        await asyncio.sleep(1000.0)
        return Message()

    def prepare(world: World) -> None:
        for node in world.nodes[:4]:
            world._start(node)
        for node in world.nodes[4:]:
            start_far_away(world, node, 5.0, hang, PausedFarAway)
        world.loop.call_at(40.0, world.nodes[1].crash)
        world.loop.call_at(50.0, world._start, world.nodes[1])
        world.loop.call_at(60.0, lambda: is_training.append(world.nodes[1].is_training))

    run(one, prepare)
    assert is_training == [True]


@pytest.mark.slow
@pytest.mark.parametrize("vanish", [False, True])
def test_two_sides_that_both_give_up_their_chains_go_on(vanish: bool) -> None:
    """A hostile live member tells each side that it stands on the other side's chain, and so breaks the tie for both.

    The members of one side may also lose power while the others download its state.
    """
    one = scenario(4, (0, 1), 40.0, 240.0, founders=4)
    hostile, lying = simulated_identity(9), list[asyncio.Future[None]]()

    async def lie(world: World) -> None:
        await asyncio.sleep(59.0)
        for number in range(40):
            tips = [world.nodes[2].chain.tip, world.nodes[0].chain.tip]
            for node in world.nodes:
                tip = tips[node.number // 2]
                claim = PeerRecord(
                    peer_id=hostile.peer_id,
                    number=10**9 + number,
                    run=world.rules.run,
                    head=tip.head,
                    round=tip.round,
                    state_digest=tip.digest,
                    phase=Phase.TRAINING,
                    inbound=False,
                )
                node.peer_table.merge([sign_record(hostile, claim)])
            await asyncio.sleep(0.1)
        if vanish:
            for node in world.nodes[:2]:
                node.crash()

    def prepare(world: World) -> None:
        world.network.lines[hostile.peer_id] = Line()
        for node in world.nodes:
            tokens = 20 if node.number < 2 else 10
            node.habits = replace(node.habits, tokens_per_step=tokens, download_s=5.0 + node.number)
            world._start(node)
        lying.append(asyncio.ensure_future(lie(world)))

    world = run(one, prepare)
    live = [node for node in world.nodes if node.is_alive]
    assert len(live) == (2 if vanish else 4)
    assert are_on_one_chain(live) and live[0].chain.tip.round > 20


@pytest.mark.slow
@pytest.mark.parametrize("links", [4, 16])
def test_a_member_that_is_too_few_for_a_round_follows_the_only_other_member(
    links: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off. The other contributor went on with a new member, and left."""
    monkeypatch.setattr(fork_choice, "MAX_LINKS", links)
    monkeypatch.setattr(server, "MAX_LINKS", links)
    one = scenario(3, (0,), 120.0, 300.0, founders=2, min_peers=2)

    def prepare(world: World) -> None:
        for node in world.nodes[:2]:
            world._start(node)
        world.loop.call_at(31.0, world._start, world.nodes[2])
        world.loop.call_at(130.0, world.nodes[1].crash)

    world = run(one, prepare)
    alone, _, other = world.nodes
    assert are_on_one_chain([alone, other])
    assert set(alone.chain.tip.last_weights) == {alone.peer_id, other.peer_id}


@pytest.mark.parametrize("min_peers", [1, 2])
def test_members_that_are_far_behind_and_go_on_alone_follow_the_others(
    min_peers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start before the network is there, commit a round alone, and share no known round with the others."""
    monkeypatch.setattr(fork_choice, "MAX_LINKS", 8)
    monkeypatch.setattr(server, "MAX_LINKS", 8)
    home = tuple(range(min_peers))
    one = scenario(2 * min_peers + 1, home, 0.1, 150.0, founders=2 * min_peers + 1, min_peers=min_peers)

    def prepare(world: World) -> None:
        for node in world.nodes:
            world._start(node)
        for number in home:
            world.loop.call_at(15.0, world._cause, Fault(15.0, "crash", number, 64.0))
        world.loop.call_at(78.0, world._cause, Fault(78.0, "split", home[0], 22.0, side=home))

    world = run(one, prepare)
    assert are_on_one_chain(world.nodes)
    assert all(world.nodes[number].peer_id in world.nodes[-1].chain.tip.last_weights for number in home)
