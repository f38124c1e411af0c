"""Identities that cost nothing neither stop the others nor keep them apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest

from node.errors import PeerError
from node.status import Channel, Phase
from node.swarm.consensus.leader_election import leader_order
from node.swarm.membership.gossip import _pack
from node.swarm.membership.peer_table import PeerRecord, sign_record
from node.swarm.messages import Join, sign
from node.swarm.transport.wire import Message, Service
from tests.simulation import node as simulated_node
from tests.simulation.adversary import Adversary
from tests.simulation.keys import simulated_identity
from tests.simulation.network import Life, Line, SimulatedWire
from tests.simulation.node import SimulatedNode
from tests.simulation.run import World, simulate
from tests.simulation.scenario import Scenario
from tests.simulation.staged import SPLIT_AT_S, are_on_one_chain, run, scenario

STRANGERS, NODES = 150, 4
ARRIVE_S, LENGTH_S = 25.0, 60.0


NEXT_RECORD = count(10**9)


class Stranger:
    """Tells all nodes once a second that it is here, and passes on nobody's records. It never answers other calls."""

    def __init__(self, world: World, number: int, **record: Any) -> None:
        """`record` are fields of its record."""
        self._world, self._identity, self.record = world, simulated_identity(number), record
        self._life = Life(self._identity.peer_id)
        world.network.lines[self._identity.peer_id] = Line(0.01, 0.0)
        world.network.names[self._identity.peer_id] = f"s{number}"
        self._wire = SimulatedWire(world.network, self._life)
        silent = Service(self._hang, Channel.REDUCE, max_request_bytes=2**30)
        verbs = dict.fromkeys(("chain", "attend", "contribute", "collect", "average", "fetch"), silent)
        self._wire.serve({"gossip": Service(self._answer, Channel.DHT)} | verbs)

    async def _answer(self, _caller: str, _message: Message) -> Message:
        return Message()

    async def _hang(self, _caller: str, _message: Message) -> Message:
        await asyncio.get_running_loop().create_future()
        return Message()

    def start(self) -> None:
        self.do(self._run)

    def do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin work as this stranger."""
        self._world.loop.call_soon(lambda: asyncio.ensure_future(work()), context=self._life.context)

    async def _run(self) -> None:
        while True:
            await self.say()
            await asyncio.sleep(1.0)

    async def say(self, **changes: Any) -> None:
        """Send a new record, with these fields, to all nodes."""
        run, peer_id = self._world.rules.run, self._identity.peer_id
        fields = {"head": run, "phase": Phase.PAUSED} | self.record | changes
        record = PeerRecord(peer_id=peer_id, number=next(NEXT_RECORD), run=run, **fields)
        message = _pack([sign_record(self._identity, record)], {})
        await asyncio.gather(*(tell(self._wire, node.peer_id, message) for node in self._world.nodes))

    async def attend(self, node: SimulatedNode, number: int) -> None:
        """Join an attempt at the round of a node, and offer to reduce. Go on until the attempt is over."""
        tip, ctx = node.chain.tip, node.participant.ctx
        gossip = asyncio.ensure_future(self._run())
        join = Join(
            run=self._world.rules.run, parent=tip.head, attempt=number, state=tip.digest, tokens=1, step_s=0.3,
            round_s=tip.round_s, norm=1.0, reduces=True,
        )  # fmt: skip
        header = {"attempt": number, "join": sign(self._identity, join).model_dump(), "has": ""}
        while node.chain.tip.head == tip.head and node.participant.ballot.number <= number:
            with suppress(PeerError):
                await self._wire.call(ctx.leader_at(number), "attend", Message(header), timeout_s=20.0)
            await asyncio.sleep(0.5)
        gossip.cancel()


async def tell(wire: SimulatedWire, peer_id: str, message: Message) -> None:
    with suppress(PeerError):  # The node may be busy.
        await wire.call(peer_id, "gossip", message, timeout_s=3.0)


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


@pytest.mark.timeout(120)
def test_strangers_that_never_join_stretch_no_more_than_every_third_round() -> None:
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
    seconds = {round_: at_s - before_s for (_, before_s), (round_, at_s) in pairwise(commits[1:])}
    others = [spent for round_, spent in seconds.items() if round_ % 3]
    assert len(others) > 10
    assert max(others) < 9.0, "without strangers, 6 s"


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
