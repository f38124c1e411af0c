"""Faults on purpose, where a node is in its rounds: who it is in them, and what it sends. Knows one `Rounds`.

Messages without bulk are spoilt in their fields: `garbage` is a signature of random bytes, `shape` a field too few or a
signature too short, `nan` a number that is none, under a signature that is right.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from node.swarm.faults import StageName, spoil_blobs
from node.swarm.identity import Identity
from node.swarm.records import Document, Join, sign
from node.swarm.rendezvous import role_of

if TYPE_CHECKING:
    from node.swarm.rounds import Rounds


class Mishaps:
    """What befalls one node in the round that it is in. Nothing, where its plan of faults is empty."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def at(self, stage: StageName) -> None:
        await self._rounds.faults.at(stage, self._rounds.next_round, self.role)

    def spoil(self, stage: StageName, blobs: Sequence[bytes]) -> Sequence[bytes]:
        """What is sent in place of these blobs."""
        return spoil_blobs(self._spoils(stage), blobs)

    async def serve(self, blobs: Sequence[bytes]) -> Sequence[bytes]:
        """What is served in place of these."""
        await self.at("serve")
        return self.spoil("serve", blobs)

    def join(self, identity: Identity, join: Join) -> Document:
        """The signed join, or what is sent in its place."""
        document, kind = sign(identity, join), self._spoils("rendezvous")
        if kind == "garbage":
            return document.model_copy(update={"signature": _rubbish(document.signature)})
        if kind == "shape":
            return _signed(identity, re.sub(r'"tokens":\d+,?', "", document.text))
        if kind == "nan":
            return _signed(identity, re.sub(r'"step_s":[^,}]+', '"step_s":NaN', document.text))
        return document

    def vote(self, vote: str) -> Any:
        """The vote's signature, or what is sent in its place."""
        kind = self._spoils("commit")
        return {"garbage": _rubbish(vote), "shape": vote[:-2], "nan": float("nan")}.get(kind, vote)

    def role(self) -> str:
        """By the last record, which all nodes agree on; before the first, by who is there."""
        tip = self._rounds.chain.tip
        return role_of(self._rounds.me, tip.head, list(tip.last_weights) or self._rounds.directory.leaders())

    def _spoils(self, stage: StageName) -> str:
        return self._rounds.faults.spoils(stage, self._rounds.next_round, self.role)


def _signed(identity: Identity, text: str) -> Document:
    return Document(signer=identity.peer_id, text=text, signature=identity.sign("diloco join", text.encode()).hex())


def _rubbish(signature: str) -> str:
    return random.Random(len(signature)).randbytes(len(signature) // 2).hex()  # noqa: S311 - the same every time
