"""The leader's side of one attempt: gather, plan, collect, average, ratify, commit. Knows what `Rounds` knows.

Read `lead` from top to bottom: it is the whole protocol. A leader holds no state that the others need; when it dies the
next one starts over, and must propose again whatever a member has accepted already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from node.errors import PeerError, RoundFailed, SwarmError
from node.swarm.attempt import Accepted, Attempt
from node.swarm.base import Message
from node.swarm.calls import while_live
from node.swarm.records import (
    HASH_BYTES,
    Join,
    Outcome,
    Plan,
    Proof,
    accepted_by,
    included_joins,
    least_included,
    parse,
    results_root,
    sign,
    split_hashes,
)
from node.swarm.reduce import misdeclared
from node.swarm.rendezvous import Gathering, capacities, chunk_owners, is_quorum, judge, left_out, overdue

if TYPE_CHECKING:
    from node.swarm.rounds import Rounds

logger = logging.getLogger(__name__)

V = TypeVar("V")
LOOK_S = 0.1
ASK_AGAIN_S = 1.0
"""A member whose answer to a proposal was lost is asked again after this time."""
TELL_S = 1.0
CALL_S = 5.0
MORE_VOTES_S = 0.5
"""Once a result is ratified, so long for the votes of the rest: the more of them, the less doubt anywhere."""
BEHIND_GRACE_S = 3.0
"""A member whose record still names an older round is waited for only so long: it may just not have told yet."""
AHEAD_GRACE_S = 5.0
"""Time for fetching the rounds of a member that claims to be further; after it, the claim is taken for a false one."""


async def lead(rounds: Rounds, attempt: Attempt) -> None:
    """Bring the attempt to commit, or tell everybody why not."""
    try:
        await _gather(rounds, attempt)
        doubted: set[str] = set()
        accepted = await _claimed(rounds, attempt, doubted)
        if accepted is None:
            plan = await _plan(rounds, attempt)
            included = await _collect(rounds, attempt, plan)
            fresh = await _average(rounds, attempt, plan, included)
            # Who joined since may bring an outcome that it has accepted: that one goes first.
            accepted = await _claimed(rounds, attempt, doubted) or fresh
        proof = await _ratify(rounds, attempt, accepted)
    except SwarmError as exc:
        _give_up(rounds, attempt, exc)
        return
    except Exception as exc:  # the root of a leader's task: an attempt that nobody ends keeps all others waiting
        logger.exception("Leading an attempt failed.")
        _give_up(rounds, attempt, RoundFailed(f"the leader failed ({type(exc).__name__})"))
        return
    await _commit(rounds, attempt, proof)


async def _gather(rounds: Rounds, attempt: Attempt) -> None:
    """Wait until the rule closes the group; without a quorum there is no round, and this ends with the attempt."""
    opened_at_s, quorum_at_s = rounds.clock(), None
    told_at_s = opened_at_s - TELL_S
    tip = rounds.chain.tip
    missing = left_out(rounds.next_round, [link.members for link in tip.line], rounds.joined_at)
    while True:
        now_s = rounds.clock()
        seen = Gathering(
            ready=_tokens(rounds, attempt),
            live=_waitable(rounds, attempt, now_s),
            last_weights=tip.last_weights,
            joined=attempt.joins.keys(),
            living=_living(rounds),
            is_overdue=_is_overdue(rounds),
            opened_at_s=opened_at_s,
            quorum_at_s=quorum_at_s,
            round_s=tip.round_s,
            left_out=missing,
        )
        verdict = judge(rounds.rules.quorum, seen, now_s)
        attempt.waiting_reason, attempt.waiting_code = verdict.reason, verdict.code
        overtaken = _overtaken(rounds) and now_s - opened_at_s < AHEAD_GRACE_S
        if overtaken:
            rounds.behind.set()
            attempt.waiting_reason, attempt.waiting_code = "Another member is further: fetching its rounds.", "behind"
        if verdict.close and not overtaken:
            attempt.closed = True
            return
        if quorum_at_s is None and verdict.has_quorum:
            quorum_at_s = now_s
        if verdict.code == "waiting_for_peers" and set(seen.live) <= set(attempt.joins) | rounds.shunned:
            rounds.shunned.clear()  # Without them there are too few: they get another chance.
        if now_s - told_at_s >= TELL_S:
            told_at_s = now_s
            _tell_attempt(rounds, attempt, [peer for peer in seen.live if peer not in seen.ready])
        await asyncio.sleep(LOOK_S)


def _tell_attempt(rounds: Rounds, attempt: Attempt, missing: Sequence[str]) -> None:
    """Tell those that are waited for of a later attempt: each may be waiting, in an earlier one, for all the others."""

    async def tell(peer: str) -> None:
        with suppress(PeerError):
            await rounds.wire.call(peer, "attempt", Message(_key(attempt)), timeout_s=CALL_S)

    for peer in missing:
        if attempt.number > 0 and peer != rounds.me:
            rounds.spawn(tell(peer))


def _tokens(rounds: Rounds, attempt: Attempt) -> dict[str, int]:
    joins = {peer: parse(Join, document.text) for peer, document in attempt.joins.items()}
    return {peer: join.tokens for peer, join in joins.items() if peer not in rounds.shunned}


def _waitable(rounds: Rounds, attempt: Attempt, now_s: float) -> list[str]:
    """Live members, less those in another round, who come back by themselves, and those who joined and are shunned."""
    tip = rounds.chain.tip
    # One that has just slept through the others' news does not know yet where they are.
    settled = now_s - tip.anchor_at_s > BEHIND_GRACE_S and not rounds.directory.drowsy()
    members = rounds.directory.members()
    here = [r.peer_id for r in members if r.head == tip.head or (r.round < tip.round and not settled)]
    return [peer for peer in here if peer not in rounds.shunned or peer not in attempt.joins]


def _living(rounds: Rounds) -> set[str]:
    return {record.peer_id for record in rounds.directory.members()}


def _is_overdue(rounds: Rounds) -> bool:
    tip = rounds.chain.tip
    return overdue(rounds.clock() - tip.anchor_at_s, tip.round_s)


def _overtaken(rounds: Rounds) -> bool:
    """A member tells of a later round: this one is over already, and to close it once more would fork the chain."""
    tip = rounds.chain.tip
    return any(
        r.round > tip.round and r.swarm_tokens > tip.state.tokens and rounds.false_claims.get(r.peer_id) != r.head
        for r in rounds.directory.members()
    )


async def _claimed(rounds: Rounds, attempt: Attempt, doubted: set[str]) -> Accepted | None:
    """The newest outcome that a member has accepted: it may be committed, unknown to all that are here.

    Whoever has accepted one holds its chunks, and has seen their mean within its bound. Where that is not so it is
    nobody's result: to propose it would fail, in this attempt and in all that follow. `doubted`: the heads of those.
    """
    for claim in sorted(attempt.proposals.values(), key=lambda claim: claim.attempt, reverse=True):
        outcome = parse(Outcome, claim.outcome.text)
        joins = {join.signer: parse(Join, join.text) for join in outcome.plan.joins}
        if claim.outcome.hash not in doubted:
            try:
                await rounds.adoption.mean_of(outcome, included_joins(outcome, joins), split_hashes(claim.hashes))
            except SwarmError as exc:
                logger.warning("What a member says to have accepted cannot be adopted: %s", exc)
                doubted.add(claim.outcome.hash)
            else:
                return claim
    return None


async def _plan(rounds: Rounds, attempt: Attempt) -> Plan:
    """Fix the group; everybody in it has the plan before anything is sent."""
    live = {record.peer_id for record in rounds.directory.members()}
    joins = [attempt.joins[peer] for peer in sorted(attempt.joins) if peer in live - rounds.shunned]
    declared = {join.signer: parse(Join, join.text) for join in joins}
    alone = list(declared) == [rounds.me]
    reducers = tuple(peer for peer, join in declared.items() if join.reduces or alone)
    if rounds.wronged and rounds.me in rounds.directory.callable_members():
        reducers = (rounds.me,)  # Nobody can tell which reducer was wrong; the next leader may be right.
    if not reducers:  # All that can be called are on slow lines.
        reducers = tuple(peer for peer in rounds.directory.callable_members() if peer in declared)
    if not reducers:
        why = "no member can be reached from outside: one of them must open a port, or a relay must join"
        raise RoundFailed(why, code="reducer_lost")
    plan = Plan(
        run=rounds.rules.run,
        parent=attempt.parent,
        attempt=attempt.number,
        joins=tuple(joins),
        reducers=reducers,
        owners=chunk_owners(len(rounds.grid.bounds), capacities([declared[peer].upload_bytes_s for peer in reducers])),
    )
    document = sign(rounds.directory.identity, plan)
    message = Message(_key(attempt), [document.model_dump_json().encode()])
    await _ask_all(rounds, plan.members, "plan", message, CALL_S, code="leader_lost")
    return plan


async def _collect(rounds: Rounds, attempt: Attempt, plan: Plan) -> list[str]:
    """FREEZE: who arrived whole at every reducer. All or nothing, so every chunk has the same contributors.

    Reducers that contradict each other about a sender exclude nobody: that sender, or one of them, is wrong. They end
    the attempt as `rejected`, and the next leader reduces alone. A sender that died on the way is left out.
    """
    timeout_s = rounds.rules.bulk_s + CALL_S
    replies = await _ask_all(rounds, plan.reducers, "collect", Message(_key(attempt)), timeout_s, code="reducer_lost")
    included, somewhere = set(plan.members), set[str]()
    for peer, reply in replies.items():
        arrived = reply.header.get("arrived")
        if not isinstance(arrived, list) or not all(isinstance(sender, str) for sender in arrived):
            rounds.shunned.add(peer)
            raise RoundFailed(f"{peer[-6:]} does not say what arrived", code="reducer_lost")
        included &= set(arrived)
        somewhere |= set(plan.members).intersection(arrived)
    disputed = await _answering(rounds, attempt, sorted(somewhere - included))
    if disputed:
        names = ", ".join(peer[-6:] for peer in disputed)
        raise RoundFailed(f"the reducers contradict each other about what {names} sent", code="rejected")
    _check_enough(rounds, plan, included)
    return sorted(included)


async def _answering(rounds: Rounds, attempt: Attempt, peers: Sequence[str]) -> list[str]:
    """Those of these members that answer a call now."""

    async def answers(peer: str) -> bool:
        try:
            call = rounds.wire.call(peer, "attempt", Message(_key(attempt)), timeout_s=CALL_S)
            await while_live(rounds.directory, peer, call)
        except PeerError as exc:
            if exc.code not in ("unreachable", "timeout"):
                return True
            rounds.directory.suspect(peer)
            return False
        return True

    here = [peer for peer in peers if rounds.directory.is_member(peer)]
    found = await asyncio.gather(*map(answers, here))
    return [peer for peer, is_there in zip(here, found, strict=True) if is_there]


def _check_enough(rounds: Rounds, plan: Plan, included: Collection[str]) -> None:
    """Raises RoundFailed where the outcome would be refused. This leader's next plans do without the missing."""
    if len(included) >= max(rounds.rules.quorum.min_peers, least_included(plan)):
        return
    rounds.shunned.update(set(plan.members).difference(included, {rounds.me}))
    raise RoundFailed("too few contributions arrived whole at every reducer", code="left_out")


async def _average(rounds: Rounds, attempt: Attempt, plan: Plan, included: list[str]) -> Accepted:
    """Every reducer averages its chunks; the outcome names the hashes of all of them.

    A sum that does not fit the norm that a sender has signed is the fault of the sender or of a reducer. With several
    reducers it ends the attempt. A single reducer is believed: the sender is left out, and the rest averaged once more.
    """
    hashes, liars = await _averages(rounds, attempt, plan, included)
    while liars:
        if len(plan.reducers) > 1 or 2 * len(liars) >= len(included):
            raise RoundFailed("the reducers' sums do not fit what members have signed", code="rejected")
        for peer in liars if plan.reducers == (rounds.me,) else ():
            rounds.shunned.add(peer)
            rounds.wire.traffic.reject(PeerError("a wrong norm", code="bad_norm"))
            logger.warning("Peer %s sent something else than it has signed the norm of: left out.", peer[-6:])
        included = [peer for peer in included if peer not in liars]
        _check_enough(rounds, plan, included)
        hashes, liars = await _averages(rounds, attempt, plan, included)
    ordered = [hashes[chunk] for chunk in range(len(plan.owners))]
    outcome = Outcome(round=rounds.next_round, plan=plan, included=tuple(included), results=results_root(ordered))
    return Accepted(attempt.number, sign(rounds.directory.identity, outcome), b"".join(ordered).hex())


async def _averages(
    rounds: Rounds, attempt: Attempt, plan: Plan, included: list[str]
) -> tuple[dict[int, bytes], list[str]]:
    """The hash of each chunk's mean, and the members whose parts do not add up to the norm that they signed."""
    message = Message(_key(attempt) | {"included": included})
    busy = [peer for peer in plan.reducers if plan.chunks_of(peer)]
    replies = await _ask_all(rounds, busy, "average", message, rounds.rules.bulk_s, code="reducer_lost")
    hashes: dict[int, bytes] = {}
    squares: list[list[float]] = []
    for peer, reply in replies.items():
        chunks = plan.chunks_of(peer)
        given = _values(bytes, reply.header.get("hashes"), len(chunks))
        sums = _values(float, reply.header.get("squares"), len(included))
        if given is None or sums is None or any(len(digest) != HASH_BYTES for digest in given):
            rounds.shunned.add(peer)
            raise RoundFailed(f"{peer[-6:]} does not say what it averaged", code="reducer_lost")
        hashes.update(zip(chunks, given, strict=True))
        squares.append(sums)
    norms = {join.signer: parse(Join, join.text).norm for join in plan.joins}
    by_sender = zip(included, zip(*squares, strict=True), strict=True)
    return hashes, [peer for peer, parts in by_sender if misdeclared(norms[peer], parts)]


def _values(kind: type[V], said: object, count: int) -> list[V] | None:
    """What a peer said, if it is so many values of this kind."""
    if isinstance(said, list) and len(said) == count and all(isinstance(value, kind) for value in said):
        return said
    return None


async def _ratify(rounds: Rounds, attempt: Attempt, accepted: Accepted) -> Proof:
    """Propose to all that have joined or join meanwhile; committed once a quorum of them holds the whole result.

    A member that joins after the group was closed belongs to the group once it has accepted, so that its vote counts
    and its silence does not.
    """
    group = set(attempt.joins) & _living(rounds)
    if len(group) < rounds.rules.quorum.min_peers:
        raise RoundFailed("too few members are left to accept the result", code="too_few_peers")
    proposal = rounds.mishaps.spoil("commit", [accepted.outcome.model_dump_json().encode()])
    message = Message(_key(attempt) | {"hashes": accepted.hashes}, proposal)
    timeout_s = rounds.rules.bulk_s
    asked: set[str] = set()
    calls: set[asyncio.Task[tuple[str, str]]] = set()
    accepts: dict[str, str] = {}
    until_s = rounds.clock() + timeout_s
    try:
        while rounds.clock() < until_s:
            for peer in sorted((set(attempt.joins) & _living(rounds)) - asked):
                asked.add(peer)
                calls.add(asyncio.create_task(_propose(rounds, peer, message, timeout_s)))
            for peer, vote in await _finished(calls):
                if accepted_by(peer, accepted.outcome.hash, attempt.number, vote):
                    accepts[peer] = vote
            ratified = _is_ratified(rounds, group, accepts)
            if ratified:
                until_s = min(until_s, rounds.clock() + MORE_VOTES_S)
            if not calls and (ratified or not _is_majority(accepts, group)):
                break
            if not calls and asked > accepts.keys():
                await asyncio.sleep(ASK_AGAIN_S)
                asked &= accepts.keys()
    finally:
        _let_go(rounds, calls)
    if not _is_majority(accepts, group):
        raise RoundFailed(f"only {len(accepts)} of {len(group)} members accepted the result", code="rejected")
    if not _is_ratified(rounds, group, accepts):
        raise RoundFailed("too few of the last round's members have accepted the result so far", code="timeout")
    group |= accepts.keys()
    return Proof(
        outcome=accepted.outcome,
        attempt=attempt.number,
        group=tuple(sorted(group)),
        accepts=accepts,
        hashes=accepted.hashes,
    )


async def _finished(calls: set[asyncio.Task[V]]) -> list[V]:
    """Take out of `calls` what has ended, after LOOK_S at most."""
    if not calls:
        await asyncio.sleep(LOOK_S)
        return []
    done, _ = await asyncio.wait(calls, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    calls -= done
    return [call.result() for call in done]


async def _propose(rounds: Rounds, peer: str, message: Message, timeout_s: float) -> tuple[str, str]:
    try:
        call = rounds.wire.call(peer, "propose", message, timeout_s=timeout_s)
        reply = await while_live(rounds.directory, peer, call)
    except SwarmError as exc:
        logger.info("Member %s did not accept the result: %s", peer[-6:], exc)
        return peer, ""
    return peer, str(reply.header.get("accept"))


def _is_majority(accepts: Collection[str], group: Collection[str]) -> bool:
    """More than half of the group, and of those that joined later only such as have accepted."""
    return 2 * len(accepts) > len(set(group).union(accepts))


def _is_ratified(rounds: Rounds, group: Collection[str], accepts: Collection[str]) -> bool:
    """By a majority of the group, and by a quorum of the last record's contributors, in the group or not."""
    last = rounds.chain.tip.last_weights
    quorum = is_quorum(accepts, last, _living(rounds), is_overdue=_is_overdue(rounds))
    return _is_majority(accepts, group) and quorum


def _let_go(rounds: Rounds, calls: Iterable[asyncio.Task[Any]]) -> None:
    """The slow minority's proposals go on beside; their result is not waited for."""
    for call in calls:
        if not call.done():
            rounds.spawn(call)


async def _commit(rounds: Rounds, attempt: Attempt, proof: Proof) -> None:
    """Tell everybody there is, member of the group or not; then take the step."""
    began_at_s = rounds.anchor_at_s(attempt.parent, rounds.clock(), is_included=True)
    message = Message({"age_s": float(rounds.clock() - began_at_s)}, [proof.model_dump_json().encode()])
    others = [record.peer_id for record in rounds.directory.members() if record.peer_id != rounds.me]
    for peer in others:
        rounds.spawn(rounds.wire.call(peer, "commit", message, timeout_s=CALL_S))
    await rounds.adopt(proof)


def _give_up(rounds: Rounds, attempt: Attempt, error: SwarmError) -> None:
    """Tell everybody who has joined, and go on to the next attempt."""
    message = Message(_key(attempt) | {"reason": str(error), "code": error.code})
    for peer in attempt.joins:
        if peer != rounds.me:
            rounds.spawn(rounds.wire.call(peer, "failed", message, timeout_s=CALL_S))
    rounds.give_up(attempt, error)


async def _ask_all(
    rounds: Rounds, peers: Sequence[str], verb: str, message: Message, timeout_s: float, *, code: str
) -> dict[str, Message]:
    """The same question to all. One that does not answer it ends the attempt, and is shunned by the leader."""

    async def ask(peer: str) -> Message:
        try:
            call = rounds.wire.call(peer, verb, message, timeout_s=timeout_s)
            return await while_live(rounds.directory, peer, call)
        except PeerError as exc:
            if exc.code in ("unreachable", "timeout"):
                rounds.directory.suspect(peer)
            rounds.shunned.add(peer)
            raise RoundFailed(f"{peer[-6:]} did not answer {verb!r}: {exc}", code=code) from exc

    replies = await asyncio.gather(*(ask(peer) for peer in peers))
    return dict(zip(peers, replies, strict=True))


def _key(attempt: Attempt) -> dict[str, Any]:
    return {"parent": attempt.parent, "attempt": attempt.number}
