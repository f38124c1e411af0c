"""The leader's side of one attempt: gather, plan, collect, average, ratify, commit.

`Leader.lead` is the whole protocol in order. A leader holds no state that the others need. If it dies, the next leader
starts over, and proposes again an accepted outcome that may have a majority of votes (`claims.by_precedence`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from node.errors import PeerError, RoundFailed, SwarmError
from node.swarm.allreduce.chunk_assignment import believed, capacities, chunk_owners
from node.swarm.allreduce.reducer import is_norm_misdeclared
from node.swarm.consensus.ballot import BEHIND_GRACE_S, Attempt, Ballot, first
from node.swarm.consensus.claims import Claims, gather
from node.swarm.consensus.commit import Committer
from node.swarm.consensus.context import Context
from node.swarm.consensus.group_closing import Gathering, admitted, judge, left_out
from node.swarm.membership.peer_table import while_live
from node.swarm.messages import (
    HASH_BYTES,
    MAX_MEMBERS,
    AcceptedOutcome,
    Plan,
    Proof,
    RoundOutcome,
    included_joins,
    is_feasible,
    joins_of,
    least_included,
    parse,
    read_join,
    results_root,
    sign,
    split_hashes,
)
from node.swarm.transport.wire import Message

logger = logging.getLogger(__name__)

V = TypeVar("V")
LOT_PURPOSE = "diloco lot"
"""Purpose of the signature by which a leader draws newcomers. Nobody else can compute it beforehand."""
LOOK_S = 0.1
GATHER_S = 0.25
"""Longest time between two looks at a group that is being gathered. A new member is seen at once."""
MORE_VOTES_S = 0.5
"""Time to wait for further votes after a result is ratified. More votes convince more members that did not vote."""
AHEAD_GRACE_S = 5.0
"""Time to fetch the rounds of a member that claims to be ahead. After this time, the claim counts as false."""


class Leader:
    """Leads those attempts whose leader is this node. Holds no state of its own."""

    def __init__(self, ctx: Context, ballot: Ballot, committer: Committer) -> None:
        self._ctx, self._ballot, self._committer = ctx, ballot, committer

    async def lead(self, attempt: Attempt) -> None:
        """Lead the attempt to a commit, or end it with the reason of its failure."""
        try:
            await self._gather(attempt)
            doubted: set[str] = set()
            accepted = await self._claimed(attempt, doubted)
            if accepted is not None:
                await self._save_promise(attempt)
            else:
                plan = await self._plan(attempt)
                included = await self._collect(attempt, plan)
                fresh = await self._average(attempt, plan, included)
                # A member that joined meanwhile may have accepted an outcome. That outcome takes precedence.
                accepted = await self._claimed(attempt, doubted) or fresh
            proof = await self._ratify(attempt, accepted)
        except SwarmError as exc:
            self._ballot.give_up(attempt, exc)
            return
        except Exception as exc:  # This is the root of the task. Without it, the others would wait for ever.
            logger.exception("This node failed to lead attempt %d of a round.", attempt.number)
            self._ballot.give_up(attempt, RoundFailed(f"the leader failed ({type(exc).__name__})"))
            return
        await self._commit(attempt, proof)

    async def _gather(self, attempt: Attempt) -> None:
        """Wait until `group_closing.judge` closes the group. Without a quorum, wait until the attempt ends."""
        opened_at_s, quorum_at_s = self._ctx.clock(), None
        tip = self._ctx.chain.tip
        missing = left_out(self._ctx.next_round, [link.members for link in tip.links], self._ballot.joined_at)
        while True:
            self._ballot.follow_members()
            attempt.raise_failure()
            now_s = self._ctx.clock()
            seen = Gathering(
                ready=self._tokens(attempt),
                live=self._waitable(attempt, now_s),
                last_weights=tip.last_weights,
                joined=attempt.joins.keys() - self._gone_on(attempt),
                electorate=self._ctx.electorate(),
                opened_at_s=opened_at_s,
                quorum_at_s=quorum_at_s,
                round_s=tip.round_s,
                left_out=missing,
                known=tip.known,
            )
            verdict = judge(self._ctx.rules.closing, seen, now_s)
            attempt.waiting_reason, attempt.waiting_code = verdict.reason, verdict.code
            overtaken = self._ballot.is_overtaken() and now_s - opened_at_s < AHEAD_GRACE_S
            if overtaken:
                self._ctx.behind.set()
                attempt.waiting_reason = "Another member is ahead, so the leader is fetching its rounds."
                attempt.waiting_code = "behind"
            if verdict.close and not overtaken:
                attempt.closed = True
                attempt.waiting_reason = attempt.waiting_code = ""
                return
            if quorum_at_s is None and verdict.has_quorum:
                quorum_at_s = now_s
            if verdict.code == "waiting_for_peers" and set(seen.live) <= set(attempt.joins) | self._ballot.omitted:
                self._ballot.omitted.clear()  # Without the omitted members, the group is too small.
            attempt.has_join.clear()
            await first((attempt.has_join,), GATHER_S)

    def _tokens(self, attempt: Attempt) -> dict[str, int]:
        absent = self._gone_on(attempt) | self._ballot.omitted
        here = self._ctx.live_members() - absent  # A stranger may join as well.
        return {peer: read_join(join).tokens for peer, join in attempt.joins.items() if peer in here}

    def _gone_on(self, attempt: Attempt) -> set[str]:
        """Members of this round that have gone to a later attempt, and take no part in this one."""
        head = self._ctx.chain.tip.head
        members = self._ctx.peer_table.members()
        return {record.peer_id for record in members if record.head == head and record.attempt > attempt.number}

    def _waitable(self, attempt: Attempt, now_s: float) -> list[str]:
        """Live members that may join, and those that have joined and are not omitted from this leader's plans."""
        tip = self._ctx.chain.tip
        # After a suspend, this node's records of the others are old.
        settled = now_s - tip.anchor_at_s > BEHIND_GRACE_S and not self._ctx.peer_table.just_resumed()
        members, gone_on = self._ctx.peer_table.members(), self._gone_on(attempt)
        here = [r.peer_id for r in members if r.head == tip.head or (r.round < tip.round and not settled)]
        here = [peer for peer in here if peer not in gone_on]
        return [peer for peer in here if peer not in self._ballot.omitted or peer not in attempt.joins]

    async def _claimed(self, attempt: Attempt, doubted: set[str]) -> AcceptedOutcome | None:
        """Return the outcome, of those that members have accepted, that may be committed (`claims.by_precedence`).

        A member that accepted an outcome holds its chunks and has checked the bound of their mean. An outcome that
        exceeds the bound is skipped, because every proposal of it would fail. So is one whose chunks cannot be fetched,
        if it cannot have the votes of a majority. Raises RoundFailed if it can.

        Args:
            doubted: hashes of the skipped outcomes; this method adds to it.
        """
        electorate = self._ctx.electorate()
        # Other identities cost nothing.
        said = {peer: claim for peer, claim in attempt.proposals.items() if peer in electorate.deciding}
        claims = Claims(gather(said), attempt.joins.keys(), electorate.voters)
        by_outcome = {claim.outcome.hash: claim for claim in said.values()}
        for one in claims.by_precedence():
            claim = by_outcome[one.outcome]
            outcome = parse(RoundOutcome, claim.outcome.text)
            contradicts = self._ballot.contradicts_plan(outcome)
            supporters = one.claimants if contradicts else one.supporters
            if one.outcome in doubted or not electorate.suffice(supporters):
                continue
            try:
                included = included_joins(outcome, joins_of(claim.outcome))
                await self._committer.mean_of(outcome, included, split_hashes(claim.hashes))
            except SwarmError as exc:
                logger.warning("An outcome that a member claims to have accepted cannot be adopted: %s", exc)
                for peer in one.claimants:
                    self._ballot.accuse(self._ctx.me, peer)  # It should have the chunks.
                is_wrong = exc.code in ("bad_norm", "bad_size")
                if not is_wrong and claims.may_have_majority(one) and not self._ctx.is_overdue:
                    raise RoundFailed("a result that may be committed cannot be fetched", code="timeout") from exc
                doubted.add(one.outcome)
            else:
                attempt.support = {peer: (said[peer].attempt, said[peer].vote) for peer in sorted(one.claimants)}
                return claim
        return None

    async def _plan(self, attempt: Attempt) -> Plan:
        """Fix the group and make its plan. Each member gets the plan as the answer to its pending `attend` call."""
        tip = self._ctx.chain.tip
        joins = [attempt.joins[peer] for peer in self._at_most(self._drawn(attempt))]
        declared = {join.signer: read_join(join) for join in joins}
        alone = list(declared) == [self._ctx.me]
        reducers = tuple(peer for peer, join in declared.items() if join.reduces or alone)
        reducers = tuple(peer for peer in reducers if not self._ballot.is_accused(peer)) or reducers
        if attempt.number:  # A newcomer that offered to reduce, and did not, may have ended the first attempt.
            reducers = tuple(peer for peer in reducers if peer in tip.known) or reducers
        if self._ballot.distrusts_reducers and self._ctx.me in self._ctx.peer_table.callable_members():
            reducers = (self._ctx.me,)  # Any reducer may have been wrong, so this leader only trusts itself.
        if not reducers:  # All callable members are on slow lines.
            reducers = tuple(peer for peer in self._ctx.peer_table.callable_members() if peer in declared)
        if not reducers:
            why = "no member can be reached from outside: one of them must open a port, or a relay must join"
            raise RoundFailed(why, code="reducer_lost")
        uplinks = {peer: declared[peer].upload_bytes_s for peer in reducers}
        rates = believed(uplinks, tip.last_weights)
        owners = chunk_owners(len(self._ctx.layout.bounds), capacities(rates))
        if owners:  # A reducer without a chunk would only be one more that may fail.
            kept = sorted(set(owners))
            reducers, owners = tuple(reducers[i] for i in kept), tuple(kept.index(owner) for owner in owners)
        amendment = self._ctx.pool.next()
        if amendment is not None and not is_feasible(amendment.amendment, list(declared.values())):
            amendment = None
        plan = Plan(
            run=self._ctx.rules.run,
            parent=attempt.parent,
            attempt=attempt.number,
            leader=self._ctx.me,
            joins=tuple(joins),
            reducers=reducers,
            owners=owners,
            amendment=amendment,
        )
        # After a crash, the next process of this node makes another plan. Members that know this one must not mix them.
        await self._save_promise(attempt)
        attempt.plan, attempt.members = sign(self._ctx.peer_table.identity, plan), frozenset(declared)
        attempt.tell()
        return plan

    def _drawn(self, attempt: Attempt) -> set[str]:
        """The members of the plan (`admitted`), and this leader if it has joined."""
        here, known = self._here(attempt) - self._ballot.omitted, self._ctx.chain.tip.known
        lot = self._ctx.peer_table.identity.sign(LOT_PURPOSE, f"{attempt.parent} {attempt.number}".encode())
        drawn = admitted(here, known, attempt.number, self._ctx.rules.closing.min_peers, lot)
        return drawn | here.intersection({self._ctx.me})

    async def _collect(self, attempt: Attempt, plan: Plan) -> list[str]:
        """Return the members whose contribution arrived whole at every reducer: every chunk has the same contributors.

        If the reducers contradict each other about a live sender, nobody is excluded, because the sender or a reducer
        may be at fault. The attempt ends as `rejected`, and the next leader reduces alone. A dead sender is left out.
        """
        timeout_s = self._ctx.rules.bulk_s + self._ctx.answer_s
        replies = await self._ask_all(attempt, plan.reducers, "collect", Message(attempt.key), timeout_s)
        included, somewhere = set(plan.members), set[str]()
        for peer, reply in replies.items():
            arrived = reply.header.get("arrived")
            if not isinstance(arrived, list) or not all(isinstance(sender, str) for sender in arrived):
                self._ballot.omitted.add(peer)
                raise RoundFailed(f"{peer[-6:]} does not say what arrived", code="reducer_lost")
            included &= set(arrived)
            somewhere |= set(plan.members).intersection(arrived)
        disputed = await self._attending(attempt, sorted(somewhere - included))
        if disputed:
            names = ", ".join(peer[-6:] for peer in disputed)
            raise RoundFailed(f"the reducers contradict each other about what {names} sent", code="rejected")
        self._check_enough(plan, included)
        return sorted(included)

    async def _attending(self, attempt: Attempt, peers: Sequence[str]) -> list[str]:
        """Wait until these peers call `attend` again, and return those that do. The others count as dead."""
        asked_at_s = self._ctx.clock()
        until_s = asked_at_s + self._ctx.peer_table.timings.hold_s + self._ctx.answer_s

        def silent() -> list[str]:
            here = [peer for peer in peers if self._ctx.peer_table.is_member(peer)]
            return [peer for peer in here if attempt.attended_at_s.get(peer, -math.inf) <= asked_at_s]

        while silent() and self._ctx.clock() < until_s:
            await first((attempt.ended,), LOOK_S)
        return [peer for peer in peers if attempt.attended_at_s.get(peer, -math.inf) > asked_at_s]

    def _check_enough(self, plan: Plan, included: Collection[str]) -> None:
        """Raise RoundFailed if members would refuse an outcome with so few contributions.

        This leader then omits the missing members from its next plans.
        """
        if len(included) >= max(self._ctx.rules.closing.min_peers, least_included(plan)):
            return
        self._ballot.omitted.update(set(plan.members).difference(included, {self._ctx.me}))
        raise RoundFailed("too few contributions arrived whole at every reducer", code="left_out")

    async def _average(self, attempt: Attempt, plan: Plan, included: list[str]) -> AcceptedOutcome:
        """Make every reducer average its chunks. Returns the signed outcome, which names the hashes of all means.

        If the sums of squares do not match the norm that a sender signed, the sender or a reducer is at fault. With
        several reducers, the attempt ends. A single reducer is believed, and averages again without the sender.
        """
        hashes, liars = await self._averages(attempt, plan, included)
        while liars:
            if len(plan.reducers) > 1 or 2 * len(liars) >= len(included):
                raise RoundFailed("the reducers' sums do not match the norms that members signed", code="rejected")
            for peer in liars if plan.reducers == (self._ctx.me,) else ():
                self._ballot.omitted.add(peer)
                self._ctx.wire.traffic.reject(PeerError("a wrong norm", code="bad_norm"))
                logger.warning("Peer %s is left out because its vector does not have the norm it signed.", peer[-6:])
            included = [peer for peer in included if peer not in liars]
            self._check_enough(plan, included)
            hashes, liars = await self._averages(attempt, plan, included)
        ordered = [hashes[chunk] for chunk in range(len(plan.owners))]
        outcome = RoundOutcome(
            round=self._ctx.next_round, plan=plan, included=tuple(included), results=results_root(ordered)
        )
        document = sign(self._ctx.peer_table.identity, outcome)
        return AcceptedOutcome(attempt=attempt.number, outcome=document, hashes=b"".join(ordered).hex())

    async def _save_promise(self, attempt: Attempt) -> None:
        """Write to the disk that this node plans or proposes in this attempt. After a crash, it leads a later one."""
        await self._ballot.save(attempt.parent, attempt.number + 1)

    async def _averages(self, attempt: Attempt, plan: Plan, included: list[str]) -> tuple[dict[int, bytes], list[str]]:
        """Return the hash of each chunk's mean, and the members whose sums of squares contradict their signed norm."""
        message = Message(attempt.key | {"included": included})
        hashes: dict[int, bytes] = {}
        squares: list[list[float]] = []
        if not plan.owners:  # The run is paused, so there is nothing to average.
            return hashes, []
        replies = await self._ask_all(attempt, plan.reducers, "average", message, self._ctx.rules.bulk_s)
        for peer, reply in replies.items():
            chunks = plan.chunks_of(peer)
            given = _values(bytes, reply.header.get("hashes"), len(chunks))
            sums = _values(float, reply.header.get("squares"), len(included))
            if given is None or sums is None or any(len(digest) != HASH_BYTES for digest in given):
                self._ballot.omitted.add(peer)
                raise RoundFailed(f"{peer[-6:]} does not say what it averaged", code="reducer_lost")
            hashes.update(zip(chunks, given, strict=True))
            squares.append(sums)
        norms = {join.signer: read_join(join).norm for join in plan.joins}
        by_sender = zip(included, zip(*squares, strict=True), strict=True)
        return hashes, [peer for peer, parts in by_sender if is_norm_misdeclared(norms[peer], parts)]

    async def _ratify(self, attempt: Attempt, accepted: AcceptedOutcome) -> Proof:
        """Propose the outcome to all joined members until a quorum accepts it. Returns the commit certificate.

        A newcomer, or a member that joins after the group was closed, belongs to the group only if it accepts: its vote
        counts, and its silence does not. Otherwise, free identities that join and never vote would stop all rounds.
        """
        joined = set(attempt.joins) & self._ctx.live_members()
        if len(joined) < self._ctx.rules.closing.min_peers:
            raise RoundFailed("too few members are left to accept the result", code="too_few_peers")
        group = set(self._at_most(joined & self._ctx.electorate().deciding))
        attempt.proposal = accepted
        attempt.tell()
        until_s = self._ctx.clock() + self._ctx.rules.bulk_s
        accepts: dict[str, str] = {}
        while self._ctx.clock() < until_s:
            attempt.has_vote.clear()
            await first((attempt.has_vote,), LOOK_S)
            eligible = self._ctx.live_members() | self._ctx.electorate().contributors
            late = self._at_most(eligible & attempt.votes.keys() - group)[: MAX_MEMBERS - len(group)]
            counted = eligible & group | set(late)
            accepts = {peer: vote for peer, vote in attempt.votes.items() if vote and peer in counted}
            awaited = self._here(attempt) - attempt.votes.keys()
            if self._is_ratified(group, accepts):
                if awaited and len(accepts) < 2:  # If a lone contributor failed now, the round would be lost.
                    continue
                until_s = min(until_s, self._ctx.clock() + MORE_VOTES_S)
            else:
                awaited &= self._ctx.electorate().deciding
                if _is_majority(accepts, group):  # Further contributors may join.
                    continue
            if not awaited:
                break
        if not _is_majority(accepts, group):
            raise RoundFailed(f"only {len(accepts)} of {len(group)} members accepted the result", code="rejected")
        if not self._is_ratified(group, accepts):
            raise RoundFailed("too few of the last round's members have accepted the result so far", code="timeout")
        group |= accepts.keys()
        return Proof(
            outcome=accepted.outcome,
            attempt=attempt.number,
            group=tuple(sorted(group)),
            accepts=accepts,
            hashes=accepted.hashes,
        )

    def proposal_of(self, attempt: Attempt, accepted: AcceptedOutcome) -> Message:
        """The answer to members that have not seen this outcome."""
        blobs = self._ctx.hooks.damage("commit", [accepted.outcome.model_dump_json().encode()])
        support = [[peer, *vote] for peer, vote in attempt.support.items()]
        return Message({"status": "proposal", "hashes": accepted.hashes, "support": support}, blobs)

    def _here(self, attempt: Attempt) -> set[str]:
        """The live members that have joined, still attend, and have not gone on."""
        since_s = self._ctx.clock() - self._ctx.peer_table.timings.hold_s - self._ctx.answer_s
        attending = {peer for peer in attempt.joins if attempt.attended_at_s.get(peer, -math.inf) >= since_s}
        return attending & self._ctx.live_members() - self._gone_on(attempt)

    def _at_most(self, peers: Iterable[str]) -> list[str]:
        """At most MAX_MEMBERS of these peers in the order of their ids. The last contributors come before others."""
        first = sorted(peers, key=lambda peer: (peer not in self._ctx.chain.tip.last_weights, peer))
        return sorted(first[:MAX_MEMBERS])

    def _is_ratified(self, group: Collection[str], accepts: Collection[str]) -> bool:
        """Whether a majority of the group and a quorum of the last contributors, in the group or not, have voted.

        With these votes, the group must have `min_peers` members.
        """
        is_enough = len({*group, *accepts}) >= self._ctx.rules.closing.min_peers
        return is_enough and _is_majority(accepts, group) and self._ctx.electorate().is_quorum(accepts)

    async def _commit(self, attempt: Attempt, proof: Proof) -> None:
        """Send all attending members the certificate, then take the outer step. Other members learn of it by gossip."""
        attempt.committed_at_s = self._committer.anchor_at_s(attempt.parent, self._ctx.clock(), is_included=True)
        attempt.proof = proof
        attempt.tell()
        await self._committer.adopt(proof)

    async def _ask_all(
        self, attempt: Attempt, peers: Sequence[str], verb: str, message: Message, timeout_s: float
    ) -> dict[str, Message]:
        """Ask all reducers the same question. If one does not answer, the attempt ends and later plans omit it.

        The other calls are cancelled then. Their reducers know that the attempt is over, so they are not to blame.
        """

        async def ask(peer: str) -> Message:
            try:
                call = self._ctx.wire.call(peer, verb, message, timeout_s=timeout_s)
                return await while_live(self._ctx.peer_table, peer, call)
            except PeerError as exc:
                if exc.code in ("unreachable", "timeout"):
                    self._ctx.peer_table.suspect(peer)
                self._ballot.omitted.add(peer)
                attempt.suspect = attempt.suspect or peer
                raise RoundFailed(f"{peer[-6:]} did not answer {verb!r}: {exc}", code="reducer_lost") from exc

        calls = [asyncio.create_task(ask(peer)) for peer in peers]
        try:
            replies = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return dict(zip(peers, replies, strict=True))


def _values(kind: type[V], said: object, count: int) -> list[V] | None:
    """Return a value from a peer if it is a list of `count` items of this type, else None."""
    if isinstance(said, list) and len(said) == count and all(isinstance(value, kind) for value in said):
        return said
    return None


def _is_majority(accepts: Collection[str], group: Collection[str]) -> bool:
    """Whether more than half of the group has accepted. A late member belongs to the group only if it has accepted."""
    return 2 * len(accepts) > len(set(group).union(accepts))
