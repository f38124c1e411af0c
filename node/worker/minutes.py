"""A committed round, told for people. Knows the swarm's words and the status's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from node.errors import RoundFailed
from node.status import Member, Outcome, RoundRecord, Seconds, Stage, utc_now
from node.swarm.catchup import Loss
from node.swarm.records import Join, parse
from node.swarm.rounds import Committed


def record_of(
    done: Committed,
    me: str,
    names: Mapping[str, str],
    *,
    blocked_s: float,
    apply_s: float,
    moved_bytes: tuple[int, int],
) -> RoundRecord:
    """What this node saw of a round. `moved_bytes`: sent and received since the round before."""
    plan = done.outcome.plan
    joins = [parse(Join, join.text) for join in plan.joins]
    losses = [join.evaluation_loss for join in joins if join.evaluation_loss is not None]
    left_out = [peer for peer in plan.members if peer not in done.outcome.included]
    stages = {stage: done.stage_s.get(stage, 0.0) for stage in Stage}
    return RoundRecord(
        round=done.outcome.round,
        outcome=_outcome(done, me),
        members=tuple(
            Member(
                peer_id=join.signer,
                name=names.get(join.signer, join.signer[-6:]),
                weight=content.tokens,
                included=join.signer in done.outcome.included,
            )
            for join, content in zip(plan.joins, joins, strict=True)
        ),
        started_at=utc_now(ago_s=sum(done.stage_s.values()) + apply_s),
        seconds=Seconds(
            rendezvous=stages[Stage.RENDEZVOUS],
            reduce=stages[Stage.REDUCE],
            commit=stages[Stage.COMMIT],
            apply=stages[Stage.APPLY] + apply_s,
            blocked=blocked_s,
        ),
        bytes_sent=moved_bytes[0],
        bytes_received=moved_bytes[1],
        head=done.tip.head,
        state_digest=done.tip.digest,
        swarm_tokens=done.tip.state.tokens,
        evaluation_loss=statistics.median(losses) if losses else None,
        reason=_reason(done, left_out, names),
    )


def failed_record(round_: int, error: RoundFailed, swarm_tokens: int) -> RoundRecord:
    """An attempt that came to nothing; the round goes on with another."""
    return RoundRecord(
        round=round_, outcome=Outcome.FAILED, started_at=utc_now(), swarm_tokens=swarm_tokens, reason=str(error)
    )


def dropped_record(loss: Loss) -> RoundRecord:
    """Rounds of this node's side of a split, that do not hold."""
    first, last, tokens = loss.dropped[0].round, loss.dropped[-1].round, sum(link.tokens for link in loss.dropped)
    which = f"round {first}" if first == last else f"rounds {first} to {last}"
    return RoundRecord(
        round=last,
        outcome=Outcome.SKIPPED,
        started_at=utc_now(),
        head=loss.dropped[-1].head,
        dropped=last - first + 1,
        reason=f"Dropped {which} of this side of a split, {tokens} tokens: {loss.reason}.",
    )


def _outcome(done: Committed, me: str) -> Outcome:
    plan = done.outcome.plan
    if me not in plan.members:
        return Outcome.SKIPPED
    if len(plan.members) == 1:
        return Outcome.ALONE
    return Outcome.COMPLETE if len(done.outcome.included) == len(plan.members) else Outcome.PARTIAL


def _reason(done: Committed, left_out: list[str], names: Mapping[str, str]) -> str:
    if left_out:
        who = ", ".join(names.get(peer, peer[-6:]) for peer in left_out)
        return f"Left out, as not all of it arrived in time: {who}."
    return "" if done.offered or done.is_replayed else "This node had nothing to give to it."
