"""Hooks that inject faults at the stages of a round. Without a fault plan, every hook returns its input.

Messages without bulk data are damaged in their fields: `garbage` replaces the signature by random bytes, `shape` omits
a field or cuts a signature short, and `nan` signs a number that is not finite.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from node.swarm.chain.chain import Chain
from node.swarm.consensus.leader_election import role_of
from node.swarm.faults import Faults, StageName, damage_blobs
from node.swarm.identity import Identity
from node.swarm.membership.peer_table import PeerTable
from node.swarm.messages import Document, Join, sign


class FaultHooks:
    """Applies a node's fault plan to its current round."""

    def __init__(self, faults: Faults, chain: Chain, peer_table: PeerTable) -> None:
        self._faults, self._chain, self._peer_table = faults, chain, peer_table

    async def at(self, stage: StageName) -> None:
        await self._faults.at(stage, self._chain.tip.round + 1, self.role)

    def damage(self, stage: StageName, blobs: Sequence[bytes]) -> Sequence[bytes]:
        """Return the blobs to send in place of these."""
        return damage_blobs(self._kind(stage), blobs)

    async def serve(self, blobs: Sequence[bytes]) -> Sequence[bytes]:
        """Return the blobs to serve in place of these, after a planned delay or crash."""
        await self.at("serve")
        return self.damage("serve", blobs)

    def join(self, identity: Identity, join: Join) -> Document:
        """Return the signed join, or the damaged document to send in its place."""
        document, kind = sign(identity, join), self._kind("rendezvous")
        if kind == "garbage":
            return document.model_copy(update={"signature": _random_hex(document.signature)})
        if kind == "shape":
            return _sign_text(identity, re.sub(r'"tokens":\d+,?', "", document.text))
        if kind == "nan":
            return _sign_text(identity, re.sub(r'"step_s":[^,}]+', '"step_s":NaN', document.text))
        return document

    def vote(self, vote: str) -> Any:
        """Return the signature of the vote, or the damaged value to send in its place."""
        kind = self._kind("commit")
        return {"garbage": _random_hex(vote), "shape": vote[:-2], "nan": float("nan")}.get(kind, vote)

    def corrupt_anchor(self, round_: int) -> None:
        """Corrupt the anchor of the new tip if the fault plan says so."""
        if self._faults.corrupts("apply", round_, self.role):
            self._chain.tip.state.anchor[0] += 1.0

    def role(self) -> str:
        """This node's role among the contributors to the last record, or among the live peers before the first."""
        tip = self._chain.tip
        peers = list(tip.last_weights) or self._peer_table.leaders()
        return role_of(self._peer_table.me.peer_id, tip.head, peers, tip.leader)

    def _kind(self, stage: StageName) -> str:
        return self._faults.damage_kind(stage, self._chain.tip.round + 1, self.role)


def _sign_text(identity: Identity, text: str) -> Document:
    return Document(signer=identity.peer_id, text=text, signature=identity.sign("diloco join", text.encode()).hex())


def _random_hex(signature: str) -> str:
    return random.Random(len(signature)).randbytes(len(signature) // 2).hex()  # noqa: S311 - deterministic on purpose
