"""Gossip: about once a second, every node signs a record of itself and asks a few random peers for newer records.

The sequence numbers of records are the heartbeats of the failure detector (van Renesse et al., "A Gossip-Style Failure
Detection Service", 1998).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from itertools import count

from node.errors import PeerError
from node.status import Channel
from node.swarm.identity import SIGNATURE_BYTES
from node.swarm.membership.peer_table import GOSSIP_AGE_S, PeerTable, Signed
from node.swarm.transport.wire import Message, Service, Wire

logger = logging.getLogger(__name__)

CALL_S, ANNOUNCE_S = 3.0, 1.5  # Timeouts
LARGE = 256  # With more peers than this, each node signs a new record half as often
MAX_REQUEST_BYTES = 64 * 2**10
"""Limit on a request, which carries only the caller's own record. The reply carries the records of all live peers."""
CALL_DEAD_RATIO = 0.3  # Share of the heartbeats in which a dead peer is called as well


class Gossip:
    """Keeps a peer table up to date over a wire."""

    def __init__(self, wire: Wire, peer_table: PeerTable, rng: random.Random) -> None:
        self._wire, self._peer_table, self._rng = wire, peer_table, rng
        wire.serve({"gossip": Service(self._answer, Channel.DHT, MAX_REQUEST_BYTES)})

    async def run(self) -> None:
        """At each heartbeat, exchange records with a few peers. Runs for ever."""
        for beat in count():
            others = [r.peer_id for r in self._peer_table.gossip_partners()]
            if beat % 2 == 0 or len(others) <= LARGE:
                self._peer_table.pulse()
            chosen = self._choose(others)
            dead = [r.peer_id for r in self._peer_table.dead() if self._peer_table.can_call(r)]
            dead = [peer_id for peer_id in dead if peer_id not in chosen]
            if dead and self._rng.random() < CALL_DEAD_RATIO:
                chosen.append(self._rng.choice(dead))
            calls = [asyncio.create_task(self.exchange(peer_id)) for peer_id in chosen]
            await asyncio.sleep(self._peer_table.timings.gossip_s)
            if not all(call.done() for call in calls):
                logger.debug("A gossip call takes longer than the time between two heartbeats.")

    def _choose(self, others: Sequence[str]) -> list[str]:
        """Draw peers from the last contributors, and as many from the others.

        Quorums are of the last contributors, so they must hear of each other in time, however many strangers there are.
        """
        last = set(self._peer_table.contributors())
        groups = [peer for peer in others if peer in last], [peer for peer in others if peer not in last]
        return [peer for group in groups for peer in self._rng.sample(group, min(fanout(len(group)), len(group)))]

    async def exchange(self, peer_id: str) -> bool:
        """Send one peer this node's record, and merge the peer's newer records. Returns False if the call fails."""
        request = _pack([self._peer_table.own()], {"wanted": self._peer_table.wanted_numbers()})
        try:
            reply = await self._wire.call(peer_id, "gossip", request, timeout_s=CALL_S)
        except PeerError as exc:
            logger.debug("Gossip with peer %s failed: %s", peer_id[-6:], exc)
            if exc.code == "unreachable" and not self._peer_table.is_gone(peer_id):
                self._peer_table.suspect(peer_id)
            return False
        try:
            self._peer_table.merge(_unpack(reply, self._peer_table.timings.dead_s))
        except PeerError as exc:
            self._wire.traffic.reject(exc)
            logger.debug("Peer %s sent an invalid gossip reply: %s", peer_id[-6:], exc)
            return False
        return True

    async def announce(self) -> None:
        """Send this node's record to every live peer at once, after a phase change such as a goodbye."""
        message = _pack([self._peer_table.pulse()], {})
        others = [record.peer_id for record in self._peer_table.others()]
        calls = [self._wire.call(peer_id, "gossip", message, timeout_s=ANNOUNCE_S) for peer_id in others]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _answer(self, caller: str, request: Message) -> Message:
        records = _unpack(request, self._peer_table.timings.dead_s)
        if len(records) > 1:
            raise PeerError("a gossip message has the wrong form")
        self._peer_table.merge(records)
        wanted = request.header.get("wanted")
        if wanted is None:
            return Message()
        if not isinstance(wanted, dict) or not all(isinstance(number, int) for number in wanted.values()):
            raise PeerError("a gossip message has the wrong form")
        return _pack(self._peer_table.records_for(wanted, caller), {})


def fanout(others: int) -> int:
    """The number of peers to call at each heartbeat. In simulations of up to 1,000 peers, records reach all of them in
    much less than GOSSIP_AGE_S.
    """
    return 2 + (others > 16) + (others > LARGE)


def _pack(records: Sequence[Signed], header: dict[str, object]) -> Message:
    signatures, ages_ds = [s.signature for s in records], [round(10 * s.age_s) for s in records]
    return Message(header | {"signatures": signatures, "ages_ds": ages_ds}, [s.body for s in records])


def _unpack(message: Message, dead_s: float) -> list[Signed]:
    signatures, ages_ds = message.header.get("signatures"), message.header.get("ages_ds")
    if (
        not isinstance(signatures, list)
        or not isinstance(ages_ds, list)
        or not len(signatures) == len(ages_ds) == len(message.blobs)
        or not all(isinstance(signature, bytes) and len(signature) == SIGNATURE_BYTES for signature in signatures)
        or not all(isinstance(age_ds, int) and 0 <= age_ds <= 10 * dead_s for age_ds in ages_ds)
    ):
        raise PeerError("a gossip message has the wrong form")
    # Honest peers pass on no older record, so a false age cannot make a peer dead that has a newer record.
    ages_s = [min(age_ds / 10, GOSSIP_AGE_S) for age_ds in ages_ds]
    return [Signed(body, sig, age_s) for body, sig, age_s in zip(message.blobs, signatures, ages_s, strict=True)]
