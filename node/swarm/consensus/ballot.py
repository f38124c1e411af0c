"""One node's state of the current round: its attempts, its vote, its contribution. `Participant` owns the ballot.

Handlers and the leader change the ballot through its methods. All of them run on one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from node.errors import NodeError, PeerError, RoundFailed
from node.status import FAILURE_REASONS
from node.swarm.allreduce.reducer import Reducer
from node.swarm.chain.chain import Chain
from node.swarm.consensus.group_closing import LATELY
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.messages import AcceptedOutcome, Document, Join, Plan, Proof, RoundOutcome, SavedBallot

MAX_RAISES = 64
"""Limit on the attempts of one round that one peer may begin."""
MAX_NEEDLESS_RAISES = 2
"""The same limit for a peer without which the others can commit the round."""
BEHIND_GRACE_S = 3.0
"""Time to wait for a member whose record names an older round, because a newer record may be on its way."""
MAX_AHEAD = 1000
"""Limit on how many attempts a node goes on at a time, so that no peer can use up the attempt numbers."""


@dataclass(frozen=True, slots=True)
class LocalContribution:
    """What this node's trainer contributes to the round after `parent`. It stays the same until the round is over."""

    parent: str
    chunks: Sequence[bytes]
    """The encoded pseudo-gradient, cut by the chunk layout."""
    tokens: int
    step_s: float
    """Median seconds per inner step."""
    norm: float
    """L2 norm of the whole vector, as decoded (`ChunkLayout.norm`)."""
    evaluation_loss: float | None = None
    """Loss of the anchor at `parent` on the held-out text, nats per token; None if not evaluated."""
    settle_s: float = 0.0
    """Seconds from the commit of `parent` to the first inner step after it."""
    training_loss: float | None = None
    """Mean loss of the inner steps since the last contribution, nats per token; None if unknown."""


@dataclass(slots=True)
class Attempt:
    """One attempt, keyed (parent, number), with the state of all roles that this node has in it."""

    parent: str
    number: int
    joins: dict[str, Document] = field(default_factory=dict)
    proposals: dict[str, AcceptedOutcome] = field(default_factory=dict)
    """The outcome that each member has accepted in an earlier attempt."""
    attended_at_s: dict[str, float] = field(default_factory=dict)
    """When each member that has joined at this node last attended."""
    plan: Document | None = None
    """As the leader: the plan, for its members. Other joined members wait for the proposal."""
    members: frozenset[str] = frozenset()
    """As the leader: the members of the plan."""
    proposal: AcceptedOutcome | None = None
    """As the leader: the outcome that is proposed to all joined members."""
    support: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Attempt and vote of each member that has accepted the proposed outcome earlier."""
    votes: dict[str, str] = field(default_factory=dict)
    """As the leader: the vote for `proposal` of each member that has answered; empty if it refuses."""
    has_vote: asyncio.Event = field(default_factory=asyncio.Event)
    """As the leader: set when a member has answered the proposal."""
    has_join: asyncio.Event = field(default_factory=asyncio.Event)
    """As the leader: set when a member has joined."""
    proof: Proof | None = None
    """As the leader: the commit certificate; None until the outcome is ratified."""
    committed_at_s: float = 0.0
    """As the leader: when the next round began."""
    has_more: asyncio.Event = field(default_factory=asyncio.Event)
    """As the leader: set, and replaced, when there is more to tell the members."""
    asked: set[str] = field(default_factory=set)
    """Peers that this node has asked to lead: more than one only if members came or went meanwhile."""
    holder: str = ""
    """The leader that holds this node's join. Until it is released, the node joins no other leader in this attempt."""
    closed: bool = False
    """As the leader: whether the group is closed. Then joined members cannot go to another leader."""
    leader: str = ""
    given: Plan | None = None
    """As a member: the plan that the leader has sent."""
    has: Literal["", "plan", "proposal"] = ""
    """As a member: what the leader has told this node so far."""
    patient_until_s: float = math.inf
    """As a member: until when to wait for the leader to close the group."""
    deadline_s: float = math.inf
    """As a member: when to give up; infinite until the plan arrives."""
    vote: Any = None
    """As a member: this node's vote for the leader's outcome; empty if it refuses, None while it checks."""
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    """As a member: set when there is a vote that the leader does not know yet."""
    has_broken: bool = False
    """As a member: whether the connection to the leader broke in the last call."""
    weights: Mapping[str, Join] = field(default_factory=dict)
    reducer: Reducer | None = None
    planned: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: NodeError | None = None
    suspect: str = ""
    """As the leader: the reducer whose missing answer ended the attempt; empty if there is none."""
    leading: asyncio.Future[None] | None = None
    sending: asyncio.Future[None] | None = None
    voting: asyncio.Future[None] | None = None
    waiting_reason: str = ""
    waiting_code: str = ""
    """One of `group_closing.WAITING_CODES`, or empty."""

    @property
    def key(self) -> dict[str, str | int]:
        """The header fields that name the attempt in a message."""
        return {"parent": self.parent, "attempt": self.number}

    def fail(self, error: NodeError) -> None:
        """End this attempt. Only the first failure counts."""
        if not self.ended.is_set():
            self.failure = error
            self.finish()

    def finish(self) -> None:
        """Mark the attempt as over. If there is no failure, the round is committed."""
        self.ended.set()
        self.tell()

    def tell(self) -> None:
        """Wake the calls of waiting members, because there is more to tell them."""
        self.has_more.set()
        self.has_more = asyncio.Event()

    def stop(self) -> None:
        """Cancel the attempt's tasks and drop its data. The members send the data again in the next attempt."""
        current = asyncio.current_task()
        for task in (self.leading, self.sending, self.voting):
            if task is not None and task is not current:
                task.cancel()
        self.joins, self.proposals, self.weights, self.reducer = {}, {}, {}, None

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise RoundFailed(str(self.failure), code=self.failure.code) from self.failure

    async def reducer_ready(self, timeout_s: float) -> Reducer:
        """Wait for the plan, because contributions may arrive before it, and return the reducer. Raises PeerError."""
        await first((self.planned, self.ended), timeout_s)
        if not self.planned.is_set():
            raise PeerError("this node has no plan for that attempt", code="timeout")
        if self.reducer is None:
            raise PeerError("this node reduces nothing in that attempt")
        return self.reducer


class Ballot:
    """One node's attempts at the next round. `clear` starts the following round."""

    def __init__(
        self,
        chain: Chain,
        peer_table: PeerTable,
        clock: Callable[[], float],
        can_commit: Callable[[Collection[str], Collection[str]], bool],
    ) -> None:
        """`can_commit` says whether the first members are enough for a round, if the second ones take part as well."""
        self._chain, self._peer_table, self._clock, self._can_commit = chain, peer_table, clock, can_commit
        self._attempts: dict[int, Attempt] = {}
        self._raised: Counter[str] = Counter()
        self.number = chain.store.lowest_attempt(chain.tip.head)
        """The attempt that this node is in. Lower attempts are over for it. After a crash or a lost fork, this node may
        have voted in this round before."""
        self.mine: LocalContribution | None = None
        self.offered_at_s = 0.0
        self.accepted: AcceptedOutcome | None = None
        self.suspensions_at_vote: int | None = None
        """The count of this process's suspensions at its first vote in this round; None before that vote."""
        self.omitted: set[str] = set()
        """Members because of which an attempt led by this node failed. Its next plans for this round omit them."""
        self.distrusts_reducers = False
        """Whether a result of this round was refused. Then this node reduces alone when it leads."""
        self._false_claims: dict[str, tuple[str, float]] = {}
        """Peer id to a head with which the peer claimed to be ahead, without proof, and the end of the doubt. The head
        is empty if no claim of the peer is believed. Kept over rounds."""
        self._accusers: dict[str, dict[str, int]] = {}
        """For each reducer, the leaders that accused it and the round in which they did. Kept for LATELY rounds."""
        self.checked_claims: dict[tuple[Document, str], RoundOutcome] = {}
        """Valid outcomes of this round that members have claimed, by document and chunk hashes. The hash of a document
        does not cover its signature, so it is no key."""
        self.claims_of = Counter[str]()
        """How many outcomes of this round each member was the first to claim."""
        self.refused_claims: dict[str, list[PeerError]] = {}
        """Why claims of each member to have accepted an outcome were refused in this round."""
        self.joined_at: dict[str, int] = {}
        """Peer id to the round in which the peer last sent a join. Kept for LATELY rounds."""

    def has_false_claim(self, record: PeerRecord) -> bool:
        """Whether the peer has failed to prove the head that it claims, and is still doubted for it."""
        head, until_s = self._false_claims.get(record.peer_id, ("", 0.0))
        return head in ("", record.head) and self._clock() < until_s

    def add_false_claim(self, record: PeerRecord, doubt_s: float = math.inf) -> None:
        self._false_claims[record.peer_id] = record.head, self._clock() + doubt_s

    def doubt(self, peer_id: str, doubt_s: float) -> None:
        """For this time, do not believe the peer, whatever head it claims."""
        self._false_claims[peer_id] = "", self._clock() + doubt_s

    def is_overtaken(self) -> bool:
        """Whether a member is in a later round. If so, this round is over; closing it again would fork the chain."""
        tip = self._chain.tip
        return any(
            r.round > tip.round and r.swarm_tokens >= tip.state.tokens and not self.has_false_claim(r)
            for r in self._peer_table.members()
        )

    def attempt(self, number: int) -> Attempt:
        if number not in self._attempts:
            self._attempts[number] = Attempt(self._chain.tip.head, number)
        return self._attempts[number]

    @property
    def current(self) -> Attempt:
        return self.attempt(self.number)

    def check_number(self, number: object) -> int:
        """Return an attempt number from a peer if it is valid. Raises PeerError."""
        if not isinstance(number, int) or not 0 <= number <= self.number + MAX_AHEAD:
            raise PeerError("a message has no valid attempt number")
        return number

    def contradicts_plan(self, outcome: RoundOutcome) -> bool:
        """Whether an outcome of an earlier attempt is not of the plan that this node has got in that attempt.

        Any member could make a plan of its own with the joins of a true one.
        """
        attempt = self._attempts.get(outcome.plan.attempt)
        return attempt is not None and attempt.given is not None and attempt.given != outcome.plan

    async def save(self, parent: str, lowest_attempt: int, chunks: Sequence[bytes] | None = None) -> None:
        """Write to the disk in which attempts this node may still act, and its vote, so that a crash loses neither.

        Args:
            chunks: those of a new vote; None without one.
        """
        saved = SavedBallot(parent=parent, lowest_attempt=lowest_attempt, accepted=self.accepted)
        await asyncio.to_thread(self._chain.store.save_ballot, saved, chunks)

    def _begin(self, number: int, peer: str) -> None:
        """Go to a later attempt because of this peer, and end all lower attempts."""
        self._raised[peer] += 1
        self.skip_to(number)

    def skip_to(self, number: int) -> None:
        """Go to this attempt, and end all lower attempts."""
        self.number = number
        for old in self._attempts.values():
            if old.number < number:
                old.fail(RoundFailed("a later attempt is under way"))
                old.stop()

    def attended(self, number: int, caller: str) -> Attempt:
        """Return the attempt that a caller attends at this node. Raises PeerError.

        A later attempt waits until this node goes there. Only members may wait, each in one attempt.
        """
        if number > self.number:
            if not self._peer_table.is_member(caller):
                raise PeerError("only members attend a later attempt", code="round_failed")
            for other in self._attempts.values():
                if other.number > self.number and other.number != number:
                    other.joins.pop(caller, None)
                    other.proposals.pop(caller, None)
        return self.attempt(number)

    def joined(self, parent: str, number: int) -> Attempt:
        """Return the attempt that a call names which only its members make. Raises PeerError if this node is not in it.

        A member of a plan has attended that attempt, so the call never leads it to a later one.
        """
        if parent != self._chain.tip.head or number != self.number:
            raise PeerError("this node is in another attempt", code="round_failed")
        return self.attempt(number)

    def follow_members(self) -> None:
        """Go to a later attempt that other members have reached, by their records or by attending it at this node."""
        tip, me, members = self._chain.tip, self._peer_table.me.peer_id, self._peer_table.members()
        here = [r for r in members if r.head == tip.head and r.state_digest == tip.digest]
        reached = {record.peer_id: record.attempt for record in here}
        if self._clock() - tip.anchor_at_s < BEHIND_GRACE_S:
            reached |= {record.peer_id: 0 for record in members if record.round < tip.round}
        live = {record.peer_id for record in members}
        for attempt in [one for one in self._attempts.values() if one.number > self.number]:
            for peer in live & attempt.joins.keys():
                reached[peer] = max(attempt.number, reached.get(peer, 0))
        reached[me] = self.number
        known = tip.known | {me}  # Those of the last record alone would be whom its leader has chosen.
        newcomers: set[str] = set()
        if self._can_commit(known.intersection(reached), ()):  # Any number of newcomers costs nothing.
            newcomers = reached.keys() - known  # They do not lead this node on, but count for `min_peers`.
            reached = {peer: number for peer, number in reached.items() if peer in known}
            live &= known
        wrong = most_wrong(len(live))
        chosen = later_attempt(
            self.number, reached, self._raised, wrong, lambda members: self._can_commit(members, newcomers)
        )
        if chosen is not None:
            self._begin(*chosen)

    def follow(self, attempt: Attempt, later: object, code: object) -> NoReturn:
        """Leave an attempt, because its leader says that it is over. Always raises RoundFailed; see `give_up`.

        A leader cannot name the next attempt. A hostile one would name the next one that it leads.
        """
        if not isinstance(later, int) or later <= attempt.number:
            raise RoundFailed("the leader names no later attempt", code="leader_lost")
        reason = attempt.waiting_reason or "a later attempt is under way"
        raise RoundFailed(reason, code=known_code(code))

    def release(self, number: int, peer: str) -> bool:
        """Let a member that joined this node's attempt join another leader. Returns False if the group is closed.

        In one attempt a member joins one leader, so only one leader has the majority that a proposal needs.
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
        """Why this node gave up an attempt, as header fields for a peer that still asks for it; empty if unknown."""
        attempt = self._attempts.get(number)
        if attempt is None or attempt.failure is None:
            return {}
        return {"reason": str(attempt.failure), "code": attempt.failure.code, "suspect": attempt.suspect}

    def accuse(self, accuser: str, suspect: object) -> None:
        """Record that a leader says that this reducer did not answer."""
        if isinstance(suspect, str) and self._peer_table.is_member(suspect):
            self._accusers.setdefault(suspect, {})[accuser] = self._chain.tip.round

    def is_accused(self, peer: str) -> bool:
        """Whether a leader of this round, or two leaders of the last LATELY rounds, accused this reducer."""
        accusers = self._accusers.get(peer, {})
        return len(accusers) > 1 or self._chain.tip.round in accusers.values()

    def offers(self, parent: str) -> bool:
        """Whether this node has a contribution to the round after `parent`."""
        return self.mine is not None and self.mine.parent == parent

    def is_mine(self, join: Join) -> bool:
        """Whether a join of this node is for the contribution that it offers now."""
        return self.mine is not None and (join.tokens, join.norm) == (self.mine.tokens, self.mine.norm)

    def clear(self) -> list[Attempt]:
        """Start the next round. Returns the attempts of the last round, which the caller must end."""
        attempts = list(self._attempts.values())
        self._attempts, self.number = {}, self._chain.store.lowest_attempt(self._chain.tip.head)
        self.mine, self.accepted, self.suspensions_at_vote = None, None, None
        self.omitted, self.distrusts_reducers = set(), False
        self.refused_claims.clear()
        self.checked_claims.clear()
        self.claims_of.clear()
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
        """Go to the stage `idle`. Returns the seconds spent in each stage since the last call."""
        self.enter("idle")
        spent_s, self._spent_s = self._spent_s, {}
        return spent_s


def later_attempt(
    own: int,
    reached: Mapping[str, int],
    raised: Mapping[str, int],
    wrong: int,
    can_commit: Callable[[Collection[str]], bool],
) -> tuple[int, str] | None:
    """The later attempt to which a node in attempt `own` goes, and the member that leads it on; None to stay.

    If the members that are not ahead can commit a round, more than `wrong` others must have reached that attempt, and
    none leads the node on more than MAX_NEEDLESS_RAISES times. So a single member that is ahead, by mistake or on
    purpose, ends no attempt of four or more, and two of three. If those members cannot commit a round, the node goes to
    the first attempt in which they can, together with all that have reached no later one.

    Args:
        reached: the attempt of each member of this round, this node included.
        raised: how often each member has led this node on in this round.
        wrong: how many members may be wrong (`most_wrong`).
        can_commit: whether these members can commit a round.
    """
    reached = {peer: min(number, own + MAX_AHEAD) for peer, number in reached.items()}
    ahead = sorted((number, peer) for peer, number in reached.items() if number > own)

    def suffices(number: int) -> bool:
        return can_commit([peer for peer, other in reached.items() if other <= number])

    is_needless = suffices(own)
    limit = MAX_NEEDLESS_RAISES if is_needless else MAX_RAISES
    ahead = [(number, peer) for number, peer in ahead if raised.get(peer, 0) < limit]
    if is_needless:
        return ahead[-1 - wrong] if len(ahead) > wrong else None
    last = ahead[-1] if ahead else None
    return next((entry for entry in ahead if suffices(entry[0])), last)


def most_wrong(members: int) -> int:
    """How many of these members may be wrong, by mistake or on purpose: fewer than a third (Lamport et al. 1982).

    There may be no members. A node that downloads a state does not count as one.
    """
    return max(0, members - 1) // 3


def known_code(code: object) -> str:
    """Return a peer's reason if it is one of FAILURE_REASONS, else `round_failed`."""
    return str(code) if code in FAILURE_REASONS else RoundFailed.code


async def first(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Wait for the first of these events, or for the timeout."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
