"""How news of peers goes round: everybody tells a few others, all the time. Knows the directory and a wire.

Every node signs a record of itself about once a second, with a number that only grows, and asks a few random peers for
what is newer than what it knows (gossip heartbeats, van Renesse et al. 1998).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from itertools import count

from node.errors import PeerError
from node.status import Channel
from node.swarm.base import Message, Service, Wire
from node.swarm.directory import DEAD_S, Directory, Signed
from node.swarm.identity import SIGNATURE_BYTES

logger = logging.getLogger(__name__)

PULSE_S = 1.0
LARGE = 256
"""Other peers from which on each tells its news half as often."""
MAX_RECORD_BYTES = 64 * 2**10
"""Body of a question: who asks tells of nobody but itself. The answer holds the records of all live peers."""


class Gossip:
    """Keeps a directory alive over a wire."""

    def __init__(self, wire: Wire, directory: Directory, rng: random.Random) -> None:
        self._wire, self._directory, self._rng = wire, directory, rng
        wire.serve({"gossip": Service(self._answer, Channel.DHT, MAX_RECORD_BYTES)})

    async def run(self) -> None:
        """Pulse for ever; in a large swarm every other time, since the news of all would be much."""
        for beat in count():
            others = [r.peer_id for r in self._directory.others()]
            if beat % 2 == 0 or len(others) <= LARGE:
                self._directory.pulse()
            chosen = self._rng.sample(others, min(fanout(len(others)), len(others)))
            lost = [r.peer_id for r in self._directory.forgotten() if self._directory.can_call(r)]
            if lost and self._rng.random() < 0.3:
                chosen.append(self._rng.choice(lost))
            calls = [asyncio.create_task(self.exchange(peer_id)) for peer_id in chosen]
            await asyncio.sleep(PULSE_S)
            for call in calls:
                if not call.done():
                    logger.debug("a gossip call takes longer than a pulse")

    async def exchange(self, peer_id: str) -> bool:
        """Tell one peer of this node, and hear what it knows that is newer. False if it is not there."""
        question = _pack([self._directory.own()], {"wanted": self._directory.wanted()})
        try:
            reply = await self._wire.call(peer_id, "gossip", question, timeout_s=3.0)
        except PeerError as exc:
            logger.debug("gossip with %s failed: %s", peer_id[-6:], exc)
            if exc.code == "unreachable":
                self._directory.suspect(peer_id)
            return False
        try:
            self._directory.merge(_unpack(reply))
        except PeerError as exc:
            self._wire.traffic.reject(exc)
            logger.debug("%s answers gossip with rubbish: %s", peer_id[-6:], exc)
            return False
        return True

    async def announce(self, timeout_s: float = 1.5) -> None:
        """Tell every live peer at once; for a new phase that cannot wait for the gossip, such as a goodbye."""
        message = _pack([self._directory.pulse()], {})
        calls = [
            self._wire.call(record.peer_id, "gossip", message, timeout_s=timeout_s)
            for record in self._directory.others()
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _answer(self, caller: str, request: Message) -> Message:
        self._directory.merge(_unpack(request))
        wanted = request.header.get("wanted")
        if wanted is None:
            return Message()
        if not isinstance(wanted, dict) or not all(isinstance(number, int) for number in wanted.values()):
            raise PeerError("a gossip message has the wrong form")
        return _pack(self._directory.fresh(wanted, caller), {})


def fanout(others: int) -> int:
    """Peers to ask in a pulse, so that news is everywhere well before it is too old (simulated up to 1,000 peers)."""
    return 2 + (others > 16) + (others > LARGE)


def _pack(records: Sequence[Signed], header: dict[str, object]) -> Message:
    signatures, ages = [s.signature for s in records], [round(10 * s.age_s) for s in records]
    return Message(header | {"signatures": signatures, "ages_ds": ages}, [s.body for s in records])


def _unpack(message: Message) -> Sequence[Signed]:
    signatures, ages = message.header.get("signatures"), message.header.get("ages_ds")
    if not isinstance(signatures, list) or not isinstance(ages, list):
        raise PeerError("a gossip message has the wrong form")
    if not len(signatures) == len(ages) == len(message.blobs):
        raise PeerError("a gossip message has the wrong form")
    if not all(map(_is_signature, signatures)) or not all(map(_is_age, ages)):
        raise PeerError("a gossip message has the wrong form")
    return [Signed(body, sig, age / 10) for body, sig, age in zip(message.blobs, signatures, ages, strict=True)]


def _is_signature(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == SIGNATURE_BYTES


def _is_age(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= 10 * DEAD_S
