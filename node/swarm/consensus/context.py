"""What all parts of one node's consensus share: transport, peer table, rules, chain. No field changes after start."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Protocol

from node.config.amendments import Amendment, Terms, decode_list, schedule_of
from node.config.manifest import RunConfig
from node.diloco.codec import Codec
from node.diloco.feedback import FeedbackRule
from node.diloco.outer import OuterState
from node.errors import NodeError, PeerError, RoundFailed
from node.swarm.allreduce.reducer import ChunkLayout
from node.swarm.allreduce.result_feedback import ResultFeedback
from node.swarm.allreduce.result_store import ResultCache
from node.swarm.allreduce.uplink_estimator import UplinkEstimator
from node.swarm.chain.chain import Chain, OuterRule, Rollback, Tip
from node.swarm.consensus.fault_hooks import FaultHooks
from node.swarm.consensus.group_closing import ClosingRule
from node.swarm.consensus.leader_election import leaders_of, slow_uplinks
from node.swarm.consensus.quorum import Electorate
from node.swarm.governance.amendment_pool import AmendmentPool
from node.swarm.governance.charter import AmendmentRefused, Charter
from node.swarm.membership.peer_table import PeerTable
from node.swarm.messages import MAX_MEMBERS, Bounds, Join, Plan, is_feasible, is_kept, joins_of, read_join
from node.swarm.transport.wire import Wire

logger = logging.getLogger(__name__)

CALL_S = 5.0
"""Timeout of a call whose answer needs no waiting and no bulk data."""
SLOWEST_BYTES_PER_S = 200_000.0
"""The slowest uplink that a run supports: 2 Mbit/s, less headers (`rate_limiter.OVERHEAD_RATIO`) and other traffic."""
JOIN_BYTES = 1000
"""About the length of one member's join in a plan."""
MOST_FOUNDERS = 64
"""So many members count for the time of a plan, even if fewer are in the last record."""
FIXED_S = 15.0
"""The constant part of the timeout of a bulk transfer."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that concern rounds: those of the manifest, or those that amendments have made of them (`at`)."""

    run: str
    layouts: tuple[ChunkLayout, ...]
    """The chunk layout of each fragment. The rounds take the fragments in turn."""
    closing: ClosingRule
    outer: OuterRule
    max_tokens: int
    """Upper limit on the tokens of one contribution, which are its weight."""
    overlapped: bool = False
    """Whether training continues while a round is averaged."""
    result_codec: Codec | None = None
    """The encoding of means; None means that of contributions."""
    feedback: FeedbackRule | None = None
    """The error feedback of members and reducers; None without one."""
    is_paused: bool = False
    """Whether the run is paused. Then rounds only accept amendments, and nobody trains."""
    amended: AmendedRules | None = None
    """How amendments change these rules; None for a run that nobody may change."""

    def at(self, amendments: bytes, round_: int) -> Rules:
        """The rules of a round, by the list of amendments in the state before it."""
        return self.amended.at(amendments, round_) if self.amended is not None and amendments else self

    def bounds_in(self, amendments: bytes) -> Bounds:
        """The bounds of all rounds of a chain with this list of amendments."""
        if self.amended is None or not amendments:
            return self.bounds
        return replace(self.bounds, later=self.amended.bounds(amendments))

    def is_rolled_back(self, tip: Tip) -> bool:
        """Whether a rollback has replaced the parameters at a tip. These are the rules of the manifest."""
        accepted, amended = tip.state.amendments, self.amended
        wanted = amended.charter.rollback_before(accepted, tip.round + 1) if amended is not None else None
        return wanted is not None and decode_list(accepted)[wanted.number - 1].rewound_tokens is not None

    def check_amendments(self, amendments: bytes) -> None:
        """Raise PeerError unless the run could have accepted this list of amendments."""
        if self.amended is not None:
            self.amended.charter.check_list(amendments)
        elif amendments:
            raise PeerError("nobody may amend this run")

    @property
    def bounds(self) -> Bounds:
        if self.is_paused:  # A contribution is empty and has one token, so that all members weigh the same.
            return Bounds(self.run, (0,), self.closing.min_peers, 1)
        chunks = tuple(len(layout.bounds) for layout in self.layouts)
        return Bounds(self.run, chunks, self.closing.min_peers, self.max_tokens)

    def paused(self, is_paused: bool = True) -> Rules:
        """These rules while the run is paused, or while it is not."""
        return replace(self, is_paused=is_paused, outer=replace(self.outer, is_paused=is_paused))

    def layout_at(self, round_: int) -> ChunkLayout:
        layout = self.layouts[round_ % len(self.layouts)]
        return ChunkLayout(layout.codec, (), ()) if self.is_paused else layout

    def result_layout_at(self, round_: int) -> ChunkLayout:
        """The layout of the mean of a round: the same chunks, with `result_codec`."""
        layout = self.layout_at(round_)
        return layout if self.result_codec is None else replace(layout, codec=self.result_codec)

    @property
    def contribution_bytes(self) -> int:
        """Encoded size of the largest contribution."""
        return max(layout.encoded_bytes() for layout in self.layouts)

    @property
    def round_bytes(self) -> int:
        """Encoded size of the largest contribution or mean."""
        rounds = range(len(self.layouts))
        return max(at(i).encoded_bytes() for i in rounds for at in (self.layout_at, self.result_layout_at))

    @property
    def bulk_s(self) -> float:
        """Timeout of a transfer of one whole fragment."""
        return FIXED_S + self.round_bytes / SLOWEST_BYTES_PER_S


class AmendedRules:
    """The rules of each round of a run that has a charter. Any thread may use it."""

    def __init__(self, charter: Charter, make: Callable[[RunConfig], Rules]) -> None:
        """`make` makes the rules of settings."""
        self.charter = charter
        self._of_terms = lru_cache(maxsize=8)(partial(self._make, make))
        self.at = lru_cache(maxsize=16)(self._at)
        """The rules of a round, as `Rules.at`. Each step of a round needs them."""
        self.bounds = lru_cache(maxsize=8)(self._bounds)
        """The bounds from each round on at which the rules may change, by list of amendments."""

    def starts(self, amendments: bytes) -> tuple[int, ...]:
        """The rounds at which the rules may change."""
        return schedule_of(self.charter.settings, amendments).starts

    def _at(self, amendments: bytes, round_: int) -> Rules:
        return self._of_terms(self.charter.terms_at(amendments, round_))

    def _bounds(self, amendments: bytes) -> tuple[tuple[int, Bounds], ...]:
        return tuple((start, self.at(amendments, start).bounds) for start in self.starts(amendments))

    def _make(self, make: Callable[[RunConfig], Rules], terms: Terms) -> Rules:
        rules = replace(make(terms.run), run=self.charter.run, amended=self)
        return rules.paused() if terms.is_paused else rules


class BackgroundTasks:
    """A set of background tasks, which its owner ends with `close`."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    def spawn(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        """Run work in a background task. An unexpected error is logged with its traceback."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.INFO if isinstance(error, NodeError) else logging.ERROR
            logger.log(level, "A task of the round failed: %s", error, exc_info=level == logging.ERROR and error)

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


class StateMissing(RoundFailed):
    """A round cannot be adopted, because this node does not have the state to which the run goes back."""


class KeptStates(Protocol):
    """The earlier outer states on this node's disk."""

    def hold(self, round_: int, digest: str) -> bool:
        """Keep the state after this round, with this digest, for some minutes. Returns whether it is here."""

    def load(self, round_: int, digest: str) -> OuterState | None:
        """Read that state; None if it is not here. Slow."""


class NoStates:
    """No earlier state is kept."""

    def hold(self, round_: int, digest: str) -> bool:
        return False

    def load(self, round_: int, digest: str) -> OuterState | None:
        return None


def rules_after(rules: Rules, tip: Tip) -> Rules:
    """The rules of the round after a tip. `rules` are those of the manifest."""
    return rules.at(tip.state.amendments, tip.round + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What participant, leader, handlers, committer and sender of one node share. Lives on one event loop."""

    wire: Wire
    peer_table: PeerTable
    manifest_rules: Rules
    """The rules of the manifest, which amendments change."""
    chain: Chain
    hooks: FaultHooks
    results: ResultCache
    feedback: ResultFeedback
    pool: AmendmentPool
    states: KeptStates
    clock: Callable[[], float]
    """Returns monotonic seconds."""
    uplink: UplinkEstimator = field(default_factory=UplinkEstimator)
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    behind: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a peer is ahead of this node. `state_sync.catch_up` waits for it."""

    @property
    def me(self) -> str:
        return self.wire.peer_id

    @property
    def next_round(self) -> int:
        return self.chain.tip.round + 1

    @property
    def rules(self) -> Rules:
        """The rules of the current round."""
        return rules_after(self.manifest_rules, self.chain.tip)

    @property
    def bounds(self) -> Bounds:
        """The bounds of all rounds of this node's chain."""
        return self.manifest_rules.bounds_in(self.chain.tip.state.amendments)

    def amendments_after(self, plan: Plan) -> bytes:
        """The list of amendments after a round with this plan. Raises PeerError for an amendment that is not valid."""
        accepted, amended = self.chain.tip.state.amendments, self.manifest_rules.amended
        if plan.amendment is None:
            return accepted
        if amended is None:
            raise PeerError("nobody may amend this run")
        try:
            after = amended.charter.accept(accepted, plan.amendment, self.next_round)
            if not is_feasible(plan.amendment.amendment, [read_join(join) for join in plan.joins]):
                raise AmendmentRefused("the round has too few members for it", "invalid")
            return after
        except AmendmentRefused as exc:
            self.pool.count(exc)
            raise

    def _rollback_after(self, amendments: bytes) -> Amendment | None:
        """The rollback after the current round, by the list after it."""
        amended = self.manifest_rules.amended
        return amended.charter.rollback_before(amendments, self.next_round + 1) if amended and amendments else None

    async def rollback_after(self, amendments: bytes, plan: Plan) -> Rollback | None:
        """The rollback after the current round, with the state to which it goes back.

        There is none if too few of the plan's members have that state. Raises StateMissing if it is not here.
        """
        wanted = self._rollback_after(amendments)
        if wanted is None or wanted.to_round is None:
            return None
        if not is_kept(wanted, [read_join(join) for join in plan.joins]):
            logger.warning("The run does not go back to round %d: too few members have its state.", wanted.to_round)
            return None
        state = await asyncio.to_thread(self.states.load, wanted.to_round, wanted.state)
        if state is None:
            raise StateMissing(
                f"this node does not have the state after round {wanted.to_round}, to which the run goes"
            )
        return Rollback(wanted.number, state)

    async def kept_state(self) -> str:
        """What a join of this node says of the rollback after this round, or of the pending one (`Join.keeps`)."""
        wanted = self._rollback_after(self.chain.tip.state.amendments)
        if wanted is None and (signed := self.pool.next()) is not None:
            wanted = signed.amendment
        if wanted is None or wanted.to_round is None:
            return ""
        holds = await asyncio.to_thread(self.states.hold, wanted.to_round, wanted.state)
        return wanted.state[:16] if holds else ""

    @property
    def layout(self) -> ChunkLayout:
        """The chunk layout of the current round."""
        return self.rules.layout_at(self.next_round)

    @property
    def age_s(self) -> float:
        """Seconds since the current round began."""
        return float(self.clock() - self.chain.tip.anchor_at_s)

    @property
    def is_overdue(self) -> bool:
        return self.rules.closing.is_overdue(self.age_s, self.chain.tip.round_s)

    @property
    def upload_bytes_s(self) -> float:
        """This node's uplink rate: as measured, but at most the volunteer's limit; 0 while neither is known."""
        return min((rate for rate in (self.uplink.bytes_s, self.wire.upload_limiter.bytes_s) if rate > 0), default=0.0)

    def live_members(self) -> set[str]:
        return {record.peer_id for record in self.peer_table.members()}

    def electorate(self) -> Electorate:
        """The peers that decide about the current round, as this node sees them."""
        contributors = frozenset(self.chain.tip.last_weights)
        return Electorate(
            contributors=contributors,
            present=frozenset(self.peer_table.present(contributors)),
            members=frozenset(self.live_members()),
            is_overdue=self.is_overdue,
        )

    @property
    def answer_s(self) -> float:
        """Timeout of a call that waits for a leader's plan: the plan has all joins, and is sent to all members.

        Peers that are not in the last record cost nothing, so only as many of them count as there are in it.
        """
        most = min(MAX_MEMBERS, max(MOST_FOUNDERS, 2 * len(self.chain.tip.last_weights)))
        members = min(len(self.peer_table.members()), most)
        return CALL_S + min(JOIN_BYTES * members**2 / SLOWEST_BYTES_PER_S, self.rules.bulk_s)

    def can_commit(self, members: Collection[str], others: Collection[str]) -> bool:
        """Whether these members are enough for a round in which the others take part as well, who have no vote."""
        is_group = len({*members, *others}) >= self.rules.closing.min_peers
        return is_group and self.electorate().is_quorum(members)

    def leader_at(self, number: int) -> str:
        """The leader of this attempt at the next round, who may be dead; empty without members."""
        return next(self._leaders([number]))

    def _leaders(self, attempts: Iterable[int]) -> Iterator[str]:
        """The leader of each of these attempts.

        The order of the contributors follows from the last record alone. Otherwise a member that shows the others
        different phases could make them disagree about all leaders. Those that others wait for lead last: on slow
        uplinks, and those that others cannot call. Among equals, the leader of the last record leads last, because it
        made the head, and with some tries it finds one whose order begins with itself.
        """
        tip, leaders = self.chain.tip, self.peer_table.leaders()
        joins = joins_of(tip.proof.outcome) if tip.proof is not None else {}
        # A leader may add any number of joins to its plan, but each contributor has sent its work to all reducers.
        last = {peer: joins[peer] for peer in tip.last_weights}
        slow = slow_uplinks({peer: join.upload_bytes_s for peer, join in last.items()})
        waited_for = slow.union(peer for peer, join in last.items() if not join.reduces)
        others = [peer for peer in leaders if peer not in last]
        waited_for |= set(others) - set(self.peer_table.callable_members(with_evicted=True))
        return leaders_of(tip.head, list(last), others, attempts, waited_for, [tip.leader])

    def next_led(self, number: int) -> int:
        """The first attempt from this one on whose leader is a live member that may lead; `number` if there is none."""
        leaders = set(self.peer_table.leaders())
        attempts = range(number, number + len(self.chain.tip.last_weights) + 1)
        led = zip(attempts, self._leaders(attempts), strict=True)
        return next((attempt for attempt, leader in led if leader in leaders), number)

    def check_join_fits(self, join: Join) -> None:
        """Raise PeerError unless a join at this node's head names the node's outer state and length of the round.

        The length of the next round is computed from the joins.
        """
        tip = self.chain.tip
        if join.state != tip.digest:
            raise PeerError("a join names another outer state at the same head")
        if join.round_s != tip.round_s:
            raise PeerError("a join names another length of the round")

    def stated_age_s(self, header: Mapping[str, Any]) -> float:
        """Seconds since the round of a message began, according to its sender; 0.0 if the message does not say.

        The result exceeds the length of a round by at most `patience_s`, so a false age cannot make a round overdue.
        """
        age_s, round_s = header.get("age_s"), self.chain.tip.round_s
        if not isinstance(age_s, float) or not 0 <= age_s < math.inf:
            return 0.0
        return age_s if round_s is None else min(age_s, round_s + self.rules.closing.patience_s)
