"""A free identity, which is no member of a run and may say and ask what it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any

from node.errors import PeerError
from node.status import Channel, Phase
from node.swarm.membership.gossip import _pack
from node.swarm.membership.peer_table import PeerRecord, sign_record
from node.swarm.messages import Join, sign
from node.swarm.transport.wire import Message, Service
from tests.simulation.keys import simulated_identity
from tests.simulation.network import Life, Line, SimulatedWire
from tests.simulation.node import SimulatedNode
from tests.simulation.run import World

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
