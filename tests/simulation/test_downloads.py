"""Downloads on virtual time: one hostile member, or two, give no node a false state and stop none for long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from node.diloco.credit import Credit, table_of
from node.diloco.outer import OuterState
from node.errors import PeerError
from node.status import Channel
from node.swarm.chain.chain import Tip
from node.swarm.chain.fork_choice import Link
from node.swarm.messages import Proof
from node.swarm.state_sync.server import Snapshot, StateServer, verified_tip
from node.swarm.transport.wire import Message, Service
from tests.simulation.adversary import Adversary
from tests.simulation.keys import simulated_identity
from tests.simulation.node import SimulatedNode
from tests.simulation.run import World
from tests.simulation.staged import are_on_one_chain, run, scenario
from tests.unit.swarm_data import committed, leaf_of

FALSE_VALUE = 3.0


class OneState:
    """A StateSource of one state."""

    def __init__(self, tip: Tip) -> None:
        self.tip = tip

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        t = self.tip
        is_asked = not name or t.digest.startswith(name) or t.head.startswith(name)
        root = t.state.credit.root
        return Snapshot(t.round, t.head, t.state.tokens, t.digest, t.leaves, t.proof, root) if is_asked else None

    def leaf(self, digest: str, index: int) -> bytes:
        return leaf_of(self.tip.state, index)

    def oldest_needed_round(self) -> int | None:
        return None


def false_state(world: World, round_: int, proof: Proof) -> Tip:
    """A state that no node has computed, with more tokens than any other, at the head of a proof."""
    parameters = world.nodes[0].genesis.state.anchor.numel()
    credit = table_of({world.nodes[0].peer_id: Credit(2**50, 1, 0, 0, 0)})
    state = OuterState(torch.full((parameters,), FALSE_VALUE), torch.zeros(parameters), round_, 2**50, credit)
    return verified_tip(state, proof.outcome.hash, proof, world.rules, 0.0)


def serve_falsely(node: SimulatedNode, tip: Tip, rounds_after: Sequence[Link | Proof]) -> None:
    """Let a node serve this state, and claim that these rounds came after it."""
    texts = [one.text.encode() if isinstance(one, Link) else one.model_dump_json().encode() for one in rounds_after]

    async def chain(_caller: str, _message: Message) -> Message:
        return Message({"head": tip.head, "age_s": 0.0, "light": True}, texts)

    StateServer(node.wire, OneState(tip))
    node.wire.serve({"chain": Service(chain, Channel.STATE)})


def start_hostile(world: World, node: SimulatedNode) -> None:
    """A hostile node that does nothing yet."""
    node.hostility = "Silence"
    world._start(node)
    world.loop.call_at(5.0, lambda: setattr(node.wire, "adversary", Adversary(node, random.Random(0))))


def invent_a_chain(world: World, hostile: Sequence[SimulatedNode]) -> None:
    """Let these nodes serve a state of a chain that only they have signed. Its next round names the state's digest."""
    signers = sorted((node.identity for node in hostile), key=lambda one: one.peer_id)
    hashes = [bytes(32)] * len(world.rules.layout_at(0).bounds)
    first = committed("cd" * 32, 10**5, signers, hashes=hashes)
    tip = false_state(world, 10**5, first)
    second = committed(tip.head, 10**5 + 1, signers, hashes=hashes, state=tip.digest)
    for node in hostile:
        serve_falsely(node, tip, [second])
        claims = {"head": second.outcome.hash, "round": 10**5 + 1, "swarm_tokens": 2**60}
        node.peer_table.update_own(**claims)


async def gone(_caller: str, _message: Message) -> Message:
    raise PeerError("this node has no state yet", code="gone")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_node_does_not_take_the_invented_chain_of_two_members(is_new: bool, seed: int) -> None:
    """A joiner has no state. The other node was away, and for a while only the two members serve a state."""
    one = scenario(7, (6,), 0.1, 300.0, founders=4, min_peers=2)
    join_at_s = (*(0.0,) * 6, 100.0 if is_new else 0.0)
    one = replace(one, seed=seed, step_s=(0.4,) * 7, joiners_download=is_new, join_at_s=join_at_s)
    late = list[int]()

    def prepare(world: World) -> None:
        honest, hostile, other = world.nodes[:4], world.nodes[4:6], world.nodes[6]
        for node in honest:
            world._start(node)
        for node in hostile:
            start_hostile(world, node)
        world.loop.call_at(60.0, lambda: invent_a_chain(world, hostile))
        if is_new:
            world.loop.call_at(100.0, world._start, other)
            return
        world._start(other)
        world.loop.call_at(20.0, other.crash)
        world.loop.call_at(100.0, world._start, other)

        def serve(serves: bool) -> None:
            for node in honest:
                if serves:
                    StateServer(node.wire, node.disk)
                else:
                    node.wire.serve({"state": Service(gone, Channel.STATE)})

        world.loop.call_at(99.0, serve, False)
        world.loop.call_at(150.0, lambda: late.append(other.downloads))
        world.loop.call_at(151.0, serve, True)

    world = run(one, prepare)
    other = world.nodes[6]
    assert other.downloads == 1 and late == ([] if is_new else [0])
    assert are_on_one_chain([*world.nodes[:4], other]) and 10 < other.chain.tip.round < 10**5


@pytest.mark.parametrize(("min_peers", "is_newer", "seed"), [(1, False, 1), (2, False, 1), (2, True, 1), (2, True, 5)])
def test_a_node_that_was_away_does_not_take_a_false_state_at_a_genuine_head(
    min_peers: int, is_newer: bool, seed: int
) -> None:
    """For a while, a hostile member is the only one that serves a state. It also invents the round after the state.

    A node that may commit rounds alone loses a fork. The other one is only behind. With seed 5, it hears from the liar
    first.
    """
    one = replace(scenario(5, (0,), 60.0, 300.0, founders=4, min_peers=min_peers), seed=seed)
    taken = list[float]()

    def prepare(world: World) -> None:
        for node in world.nodes[:4]:
            world._start(node)
        start_hostile(world, world.nodes[4])
        away, hostile = world.nodes[0], world.nodes[4]

        def attack() -> None:
            for node in world.nodes[1:4]:
                node.wire.serve({"state": Service(gone, Channel.STATE)})
            saved = {tip.round for tip in away.disk.checkpoints}
            links = world.nodes[1].chain.tip.links
            link = links[-2] if is_newer else next(one for one in links if one.round in saved)
            proof = world.nodes[1].chain.proof_after(link.parent)
            proof = proof or next(tip.proof for tip in away.disk.checkpoints if tip.head == link.head)
            assert proof is not None
            tip = false_state(world, link.round, proof)
            signers = [hostile.identity, simulated_identity(20)][:min_peers]  # Identities cost nothing.
            signers.sort(key=lambda one: one.peer_id)
            hashes = [bytes(32)] * len(world.rules.layout_at(0).bounds)
            after = committed(tip.head, tip.round + 1, signers, hashes=hashes, state=tip.digest)
            serve_falsely(hostile, tip, [after])
            taken.append(float(away.chain.tip.state.anchor[0]))

        def end() -> None:
            taken.append(float(away.chain.tip.state.anchor[0]))
            for node in world.nodes[1:4]:
                StateServer(node.wire, node.disk)

        world.loop.call_at(79.0, attack)
        world.loop.call_at(130.0, end)

    world = run(one, prepare)
    assert len(taken) == 2 and FALSE_VALUE not in taken
    assert world.nodes[0].downloads == 1 and are_on_one_chain(world.nodes[:4])


class FalseDigest(Adversary):
    """Says that its state has the smallest digest."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        if self.node.network.loop.time() > 50:
            self.node.peer_table.update_own(state_digest="0" * 64)
        return message


@pytest.mark.parametrize("third_step_s", [0.4, 40.0])
def test_a_lie_about_a_digest_ends_with_the_liar(third_step_s: float) -> None:
    """The liar is one of two contributors, and then dies. The third member is slow, or starts later."""
    one = replace(scenario(3, (2,), 0.1, 400.0, founders=2, min_peers=2), step_s=(0.4, third_step_s, 0.4))
    rounds = list[int]()

    def prepare(world: World) -> None:
        honest, third, liar = world.nodes
        world._start(honest)
        start_hostile(world, liar)
        world.loop.call_at(6.0, lambda: setattr(liar.wire, "adversary", FalseDigest(liar, random.Random(0))))
        world.loop.call_at(60.0, liar.crash)
        world.loop.call_at(10.0 if third_step_s > 1 else 80.0, world._start, third)
        for at_s in (50.0, 79.0, 100.0):
            world.loop.call_at(at_s, lambda: rounds.append(honest.chain.tip.round))

    world = run(one, prepare)
    honest, third, _ = world.nodes
    assert are_on_one_chain([honest, third]) and honest.chain.tip.round > rounds[-1]
    assert rounds == sorted(rounds), "no committed round is lost"
