"""One node's state of the current round: attempts, vote, contribution. `Participant` owns the ballot.

Handlers and leader change it through its methods. All run on one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from node.errors import NodeError, PeerError, RoundFailed
from node.status import FAILURE_REASONS
from node.swarm.allreduce.reducer import Reducer
from node.swarm.chain.chain import Chain
from node.swarm.consensus.group_closing import LATELY
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.messages import AcceptedOutcome, Document, Join, Proof, SavedBallot

MAX_RAISES = 64
"""Attempts of one round that one peer may begin."""
MAX_AHEAD = 1000
"""Attempts that a peer may be ahead, so that no peer can exhaust the numbers."""


@dataclass(frozen=True, slots=True)
class LocalContribution:
    """What this node's trainer contributes to the round after `parent`. It stays the same until that is committed."""

    parent: str
    chunks: Sequence[bytes]
    """The encoded pseudo-gradient, cut by the chunk layout."""
    tokens: int
    step_s: float
    """Median seconds per inner step."""
    norm: float
    """L2 norm of the whole vector, as decoded (`ChunkLayout.norm`)."""
    evaluation_loss: float | None = None
    """Of the anchor at `parent`."""
    settle_s: float = 0.0
    """Seconds from the commit of `parent` to the first inner step after it."""


@dataclass(slots=True)
class Attempt:
    """One attempt, keyed (parent, number), with the state of all roles that this node has in it."""

    parent: str
    number: int
    joins: dict[str, Document] = field(default_factory=dict)
    proposals: dict[str, AcceptedOutcome] = field(default_factory=dict)
    """Outcomes that members accepted in earlier attempts, by member."""
    attended_at_s: dict[str, float] = field(default_factory=dict)
    """When each member that joined this node has last attended."""
    plan: Document | None = None
    """As the leader: the plan, for its members."""
    proposal: AcceptedOutcome | None = None
    """As the leader: the outcome, for all that have joined."""
    votes: dict[str, str] = field(default_factory=dict)
    """As the leader: the vote for `proposal` of each member that has answered; empty if it refuses."""
    has_vote: asyncio.Event = field(default_factory=asyncio.Event)
    """As the leader: a member has answered the proposal."""
    proof: Proof | None = None
    """As the leader: the certificate, once the outcome is ratified."""
    committed_at_s: float = 0.0
    """As the leader: when the next round began."""
    has_more: asyncio.Event = field(default_factory=asyncio.Event)
    """As the leader: set, and replaced, when there is more to tell the members."""
    asked: set[str] = field(default_factory=set)
    """Peers that this node asked to lead. One, unless members came or went meanwhile."""
    holder: str = ""
    """The leader that holds this node's join. The node joins no other leader in this attempt until it is released."""
    closed: bool = False
    """This node leads the attempt and has closed its group, so joined members cannot go to another leader."""
    leader: str = ""
    has: Literal["", "plan", "proposal"] = ""
    """As a member: what the leader has told this node so far."""
    deadline_s: float = math.inf
    """As a member: when to give up, once there is a plan."""
    vote: Any = None
    """As a member: this node's vote for the leader's outcome; empty if it refuses, None while it checks."""
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    """As a member: the vote is new, and the leader does not know it."""
    has_broken: bool = False
    """As a member: the connection to the leader broke in the last call."""
    weights: Mapping[str, Join] = field(default_factory=dict)
    reducer: Reducer | None = None
    planned: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: NodeError | None = None
    suspect: str = ""
    """As the leader: the reducer that did not answer, which ended the attempt."""
    leading: asyncio.Future[None] | None = None
    sending: asyncio.Future[None] | None = None
    voting: asyncio.Future[None] | None = None
    waiting_reason: str = ""
    waiting_code: str = ""
    """One of `rules.WAITING_CODES`, or empty."""

    @property
    def key(self) -> dict[str, str | int]:
        """Names the attempt in a message."""
        return {"parent": self.parent, "attempt": self.number}

    def fail(self, error: NodeError) -> None:
        """End this attempt. Only the first failure counts."""
        if not self.ended.is_set():
            self.failure = error
            self.finish()

    def finish(self) -> None:
        """The attempt is over. Without a failure, the round is committed."""
        self.ended.set()
        self.tell()

    def tell(self) -> None:
        """Answer the members that wait, because there is more to tell them."""
        self.has_more.set()
        self.has_more = asyncio.Event()

    def stop(self) -> None:
        """Cancel the attempt's tasks and drop received data. The next attempt receives it again."""
        current = asyncio.current_task()
        for task in (self.leading, self.sending, self.voting):
            if task is not None and task is not current:
                task.cancel()
        self.joins, self.proposals, self.weights, self.reducer = {}, {}, {}, None

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise RoundFailed(str(self.failure), code=self.failure.code) from self.failure

    async def reducer_ready(self, timeout_s: float) -> Reducer:
        """The reducer. Contributions may arrive before the plan does."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.planned.wait()
        except TimeoutError as exc:
            raise PeerError("this node has no plan for that attempt", code="timeout") from exc
        if self.reducer is None:
            raise PeerError("this node reduces nothing in that attempt")
        return self.reducer


class Ballot:
    """One node's attempts at the next round. `clear` starts the following round."""

    def __init__(self, chain: Chain, peer_table: PeerTable) -> None:
        self._chain, self._peer_table = chain, peer_table
        self._attempts: dict[int, Attempt] = {}
        self._raised: Counter[str] = Counter()
        self.number = 0
        """The highest attempt seen. Lower attempts are ignored."""
        self.mine: LocalContribution | None = None
        self.offered_at_s = 0.0
        self.accepted: AcceptedOutcome | None = None
        self.suspensions_at_vote: int | None = None
        """How often this process had been suspended when it voted first; None before."""
        self.led = -1
        """The last attempt in which this node signed an outcome as the leader."""
        self.omitted: set[str] = set()
        """Members that failed an attempt that this node led. Its next plans for this round omit them."""
        self.distrusts_reducers = False
        """A result of this round was refused, so each leader reduces alone."""
        self._false_claims: dict[str, str] = {}
        """Peer id to a head that the peer claimed to be ahead with and could not show. Kept over rounds."""
        self._accusers: dict[str, dict[str, int]] = {}
        """Reducer to the leaders that accused it, with the round. Kept for LATELY rounds."""
        self.joined_at: dict[str, int] = {}
        """Peer id to the round in which the peer last sent a join. Kept for LATELY rounds."""

    def has_false_claim(self, record: PeerRecord) -> bool:
        """Whether the peer could not show the head that it claims."""
        return self._false_claims.get(record.peer_id) == record.head

    def add_false_claim(self, record: PeerRecord) -> None:
        self._false_claims[record.peer_id] = record.head

    def attempt(self, number: int) -> Attempt:
        if number not in self._attempts:
            self._attempts[number] = Attempt(self._chain.tip.head, number)
        return self._attempts[number]

    @property
    def current(self) -> Attempt:
        return self.attempt(self.number)

    def check_number(self, number: object) -> int:
        """An attempt number from a peer. Raises PeerError."""
        if not isinstance(number, int) or not 0 <= number <= self.number + MAX_AHEAD:
            raise PeerError("a message names no attempt")
        return number

    def to_save(self, attempt: Attempt) -> SavedBallot:
        """What this node must not forget in a crash before it goes on in this attempt."""
        return SavedBallot(parent=attempt.parent, number=attempt.number, led=self.led, accepted=self.accepted)

    def restore(self, saved: SavedBallot) -> None:
        """Continue after a crash. The node goes past an attempt that it led: its outcome may have votes."""
        self.number = max(self.number, saved.number, saved.led + 1)
        self.accepted = self.accepted or saved.accepted

    def enter(self, parent: str, number: int, caller: str) -> Attempt:
        """The attempt that a peer names, if the peer may enter it. A higher number ends all lower attempts."""
        if parent != self._chain.tip.head:
            raise PeerError("that is not the round this node is in", code="round_failed")
        if number < self.number:
            raise PeerError("a later attempt is under way", code="round_failed")
        if number > self.number:
            self._raised[caller] += 1
            if self._raised[caller] > MAX_RAISES or not self._peer_table.is_member(caller):
                raise PeerError("this peer may not begin another attempt", code="round_failed")
            self.number = number
            for old in self._attempts.values():
                if old.number < number:
                    old.fail(RoundFailed("a later attempt is under way"))
                    old.stop()
        return self.attempt(number)

    def look_up(self) -> None:
        """Enter a later attempt that the record of a live member in the same state names."""
        tip = self._chain.tip
        for record in self._peer_table.members():
            if record.head == tip.head and record.state_digest == tip.digest and record.attempt > self.number:
                with suppress(PeerError):
                    self.enter(tip.head, self.check_number(record.attempt), record.peer_id)

    def follow(self, attempt: Attempt, later: object, code: object) -> NoReturn:
        """Go to the later attempt that a leader names, at most MAX_AHEAD further. Always raises RoundFailed."""
        if not isinstance(later, int) or later <= attempt.number:
            raise RoundFailed("the leader names no later attempt", code="leader_lost")
        self.number = max(self.number, min(later, attempt.number + MAX_AHEAD))
        reason = attempt.waiting_reason or "a later attempt is under way"
        raise RoundFailed(reason, code=known_code(code))

    def release(self, number: int, peer: str) -> bool:
        """Let a member that joined this node's attempt join another leader; False once the group is closed.

        A member joins one leader in an attempt, so only one leader has the majority that a proposal needs.
        """
        attempt = self._attempts.get(number)
        if attempt is None or peer not in attempt.joins:
            return True
        if not attempt.closed:
            del attempt.joins[peer]
            attempt.proposals.pop(peer, None)
        return not attempt.closed

    def give_up(self, attempt: Attempt, error: NodeError) -> None:
        """End an attempt without a result. The next attempt has another leader."""
        attempt.fail(error)
        attempt.stop()
        if attempt.parent == self._chain.tip.head:
            self.number = max(self.number, attempt.number + 1)

    def failure_of(self, number: int) -> dict[str, str]:
        """Why this node gave up an attempt, for a peer that still asks for it; empty if unknown."""
        attempt = self._attempts.get(number)
        if attempt is None or attempt.failure is None:
            return {}
        return {"reason": str(attempt.failure), "code": attempt.failure.code, "suspect": attempt.suspect}

    def accuse(self, accuser: str, suspect: object) -> None:
        """A leader says that this reducer did not answer. One accusation for each attempt is heard."""
        if isinstance(suspect, str) and self._peer_table.is_member(suspect):
            self._accusers.setdefault(suspect, {})[accuser] = self._chain.tip.round

    def is_accused(self, peer: str) -> bool:
        """Whether a leader of this round, or two leaders lately, said that this reducer did not answer."""
        accusers = self._accusers.get(peer, {})
        return len(accusers) > 1 or self._chain.tip.round in accusers.values()

    def offers(self, parent: str) -> bool:
        """Whether this node has a contribution to the round after `parent`."""
        return self.mine is not None and self.mine.parent == parent

    def clear(self) -> list[Attempt]:
        """Start the next round. Returns the attempts of the last one; the caller ends them."""
        attempts = list(self._attempts.values())
        self._attempts, self.number, self.led = {}, 0, -1
        self.mine, self.accepted, self.suspensions_at_vote = None, None, None
        self.omitted, self.distrusts_reducers = set(), False
        self._raised.clear()
        oldest = self._chain.tip.round - LATELY
        self.joined_at = {peer: round_ for peer, round_ in self.joined_at.items() if round_ >= oldest}
        lately = {s: {a: r for a, r in accusers.items() if r >= oldest} for s, accusers in self._accusers.items()}
        self._accusers = {suspect: accusers for suspect, accusers in lately.items() if accusers}
        return attempts


class StageTimer:
    """The stage of the round that this node is in, and the seconds that each stage took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.stage, self._since_s = "idle", clock()
        self._spent_s: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds in the current stage."""
        return self._clock() - self._since_s

    def enter(self, stage: str) -> None:
        if self.stage != "idle":
            self._spent_s[self.stage] = self._spent_s.get(self.stage, 0.0) + self.seconds
        self.stage, self._since_s = stage, self._clock()

    def finish(self) -> dict[str, float]:
        """Go idle. Returns the seconds by stage since the last call."""
        self.enter("idle")
        spent_s, self._spent_s = self._spent_s, {}
        return spent_s


def known_code(code: object) -> str:
    """A reason from a peer as one of the counted codes; `round_failed` for anything else."""
    return str(code) if code in FAILURE_REASONS else RoundFailed.code


async def first(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Wait for the first of these events, or for the timeout."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
