"""The state of one attempt at one round on one node, whatever roles it has in it. Knows no wire."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from node.errors import NodeError, PeerError, RoundFailed
from node.status import FAILURE_REASONS
from node.swarm.records import Document, Join
from node.swarm.reduce import Bench


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a trainer offers for the round after `parent`; not changed until the round is committed."""

    parent: str
    chunks: Sequence[bytes]
    """The encoded pseudo-gradient, cut on the grid."""
    tokens: int
    step_s: float
    """Seconds per inner step, median."""
    norm: float
    """L2 norm of the whole, as decoded (`Grid.norm`)."""
    evaluation_loss: float | None = None
    """Of the anchor at `parent`."""
    settle_s: float = 0.0
    """Seconds from the commit of `parent` to the first inner step after it."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """An outcome that a member has accepted, with all its chunks, but does not know to be committed."""

    attempt: int
    outcome: Document
    hashes: str
    vote: str = ""
    """The member's; a fresh outcome has none yet."""


@dataclass(slots=True)
class Attempt:
    """One key (parent, number). Fields are set once, by the handlers of `Rounds`."""

    parent: str
    number: int
    joins: dict[str, Document] = field(default_factory=dict)
    proposals: dict[str, Accepted] = field(default_factory=dict)
    """What members have accepted before, by who says so."""
    asked: set[str] = field(default_factory=set)
    """Whom this node has asked to lead; one, unless members came or went meanwhile."""
    holder: str = ""
    """The leader that holds this node's join. The node joins no other leader in this attempt until it is released."""
    closed: bool = False
    """This node leads the attempt, and its group is closed: those that have joined cannot go to another leader."""
    leader: str = ""
    weights: Mapping[str, Join] = field(default_factory=dict)
    bench: Bench | None = None
    planned: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: NodeError | None = None
    leading: asyncio.Future[None] | None = None
    sending: asyncio.Future[None] | None = None
    waiting_reason: str = ""
    waiting_code: str = ""
    """One of `rendezvous.WAITING_CODES`, or empty."""

    def fail(self, error: NodeError) -> None:
        """End this attempt, once; whoever waits on it is woken."""
        if not self.ended.is_set():
            self.failure = error
            self.ended.set()

    def finish(self) -> None:
        """The round is committed."""
        self.ended.set()

    def stop(self) -> None:
        """Drop what still runs for this attempt, and all that has come for it: the next one is given it anew."""
        current = asyncio.current_task()
        for task in (self.leading, self.sending):
            if task is not None and task is not current:
                task.cancel()
        self.joins, self.proposals, self.weights, self.bench = {}, {}, {}, None

    async def bench_ready(self, timeout_s: float) -> Bench:
        """The reducer's bench; contributions may come before the plan does."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.planned.wait()
        except TimeoutError as exc:
            raise PeerError("this node has no plan for that attempt", code="timeout") from exc
        if self.bench is None:
            raise PeerError("this node reduces nothing in that attempt")
        return self.bench


def known_code(code: object) -> str:
    """Why a round failed, in one of our words: what a peer says may be anything, and all codes are counted."""
    return str(code) if code in FAILURE_REASONS else RoundFailed.code


def raise_failure(attempt: Attempt) -> None:
    if attempt.failure is not None:
        raise RoundFailed(str(attempt.failure), code=attempt.failure.code) from attempt.failure


async def first(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Wait for the first of these events, or for the time to pass."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
