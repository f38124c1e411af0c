"""Outer state for joiners and for those behind, served from checkpoints.

Knows no checkpoint format: a `StateSource` reads slices. What a state stands for is checked with the proof beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from node.diloco.outer import OuterState
from node.errors import PeerError
from node.status import Channel, Phase
from node.swarm.base import Message, Service, Wire
from node.swarm.chain import Tip, tip_at
from node.swarm.line import Link, read_line
from node.swarm.records import Join, Proof, check_proof, included_joins
from node.swarm.rounds import Rules

MIN_NAME = 16
"""Characters of a head or digest by which a state may be asked for."""
LEAVES_AT_ONCE = 8
"""To one caller, until they are sent; they are held in memory meanwhile."""
VOUCHES_AT_ONCE = 64
"""By one caller, who asks for each state that it is offered; an answer is two digests."""
YIELD_S = 10.0
"""A leaf waits at most so long for a round that needs the uplink."""
LOOK_S = 0.1
SERVING_PHASES = frozenset({Phase.TRAINING, Phase.SYNCING, Phase.DRAINING, Phase.PAUSED})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint of the outer state, as it is served."""

    round: int
    head: str
    tokens: int
    digest: str
    leaves: Sequence[bytes]
    proof: Proof | None
    """What led to `head`; None for the initial state."""


class StateSource(Protocol):
    """Immutable checkpoints of this node. Read in a thread."""

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        """The newest one, or that with this head, or with this beginning of its digest. `hold`: keep it for a while."""

    def leaf(self, digest: str, index: int) -> bytes:
        """One slice of the digest tree, and hold the rest. LookupError if it is not kept any more."""

    def wanted_since(self) -> int | None:
        """The round of the oldest one that is held."""


def included_at(head: str, round: int, proof: Proof | None, rules: Rules) -> Mapping[str, Join]:
    """The joins that the record at `head` counts. Raises PeerError where the proof does not lead to it."""
    if proof is None:
        if head != rules.run or round != -1:
            raise PeerError("a state comes without proof of its round")
        return {}
    outcome, joins = check_proof(proof, rules.bounds)
    if proof.outcome.hash != head or outcome.round != round:
        raise PeerError("a state's proof is for another round")
    return included_joins(outcome, joins)


def tip_of(
    state: OuterState, head: str, proof: Proof | None, rules: Rules, now_s: float, line: tuple[Link, ...] = ()
) -> Tip:
    """The tip that a checkpoint stands for. Raises PeerError where its proof does not lead to its head. Heavy.

    `line`: the rounds that led there, where they are known.
    """
    included = included_at(head, state.round, proof, rules)
    if not line and proof is not None:
        line = read_line([proof.model_dump_json()], rules.bounds)
    return tip_at(state, head, proof, rules.outer, included, now_s, line)


Mishap = Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]]
"""A fault on purpose: what is sent in place of these blobs."""


class StateServer:
    """Answers joiners. Needs no model, so it serves while the node is paused, too.

    `digest_at`: the digest at a head of this node's line of rounds, None where it is not on it. `busy`: whether the
    uplink is needed for a round just now; joiners wait a moment, then.
    """

    def __init__(
        self,
        wire: Wire,
        source: StateSource,
        digest_at: Callable[[str], str | None] = lambda _: None,
        busy: Callable[[], bool] = lambda: False,
        mishap: Mishap | None = None,
    ) -> None:
        self._source, self._digest_at, self._busy, self._mishap = source, digest_at, busy, mishap
        wire.serve(
            {
                "state": Service(self._on_state, Channel.STATE, per_caller=LEAVES_AT_ONCE),
                "leaf": Service(self._on_leaf, Channel.STATE, per_caller=LEAVES_AT_ONCE),
                "vouch": Service(self._on_vouch, Channel.STATE, per_caller=VOUCHES_AT_ONCE),
            }
        )

    async def _on_state(self, caller: str, message: Message) -> Message:
        """The newest state, or the one whose `digest` begins so."""
        name = message.header.get("digest", "")
        if not isinstance(name, str) or 0 < len(name) < MIN_NAME:
            raise PeerError("a request for a state has the wrong form")
        snapshot = await asyncio.to_thread(self._source.find, name, hold=True)
        if snapshot is None:
            raise PeerError("this node does not have that state" if name else "this node has no state yet", code="gone")
        header = {"round": snapshot.round, "head": snapshot.head, "tokens": snapshot.tokens, "digest": snapshot.digest}
        proof = snapshot.proof.model_dump_json().encode() if snapshot.proof else b""
        return Message(header, [b"".join(snapshot.leaves), proof])

    async def _on_leaf(self, caller: str, message: Message) -> Message:
        digest, index = message.header.get("digest"), message.header.get("index")
        if not isinstance(digest, str) or not isinstance(index, int) or index < 0:
            raise PeerError("a request for a leaf has the wrong form")
        for _ in range(int(YIELD_S / LOOK_S)):
            if not self._busy():
                break
            await asyncio.sleep(LOOK_S)
        try:
            blobs: Sequence[bytes] = [await asyncio.to_thread(self._source.leaf, digest, index)]
        except (LookupError, OSError) as exc:
            raise PeerError("this node does not have that state any more", code="gone") from exc
        return Message(blobs=await self._mishap(blobs) if self._mishap else blobs)

    async def _on_vouch(self, caller: str, message: Message) -> Message:
        """What this node's digest was at a head, and whether it serves that state."""
        head = message.header.get("head")
        if not isinstance(head, str) or len(head) < MIN_NAME:
            raise PeerError("a question for a head has the wrong form")
        served = await asyncio.to_thread(self._source.find, head)
        digest = self._digest_at(head) or (served.digest if served else "")
        return Message({"digest": digest, "serves": served.digest if served else ""})
