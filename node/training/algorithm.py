"""The parts of DiLoCo that follow from a run's manifest."""

from __future__ import annotations

from node.config.manifest import OuterConfig, RunConfig, SyncConfig
from node.diloco.codec import make_codec
from node.diloco.feedback import FeedbackRule
from node.diloco.outer import OuterOptimizer
from node.diloco.schedule import learning_rate


def optimizer_of(outer: OuterConfig) -> OuterOptimizer:
    return OuterOptimizer(outer.optimizer, outer.momentum, outer.beta2, outer.eps)


def inner_learning_rate(run: RunConfig, tokens: int) -> float:
    """The run's inner learning rate at so many swarm tokens, as its schedule and phases say. The same on all nodes."""
    inner, number = run.inner, run.phase_at(tokens)
    start, end, warmup, schedule, peak = 0, run.total_tokens, inner.warmup_tokens, inner.schedule, inner.lr
    if number:
        phase = run.phases[number - 1]
        peak *= phase.lr_ratio
        if phase.schedule is not None:
            schedule, warmup, start = phase.schedule, phase.warmup_tokens, phase.from_tokens
            end = run.phases[number].from_tokens if number < len(run.phases) else run.total_tokens
    return learning_rate(
        tokens - start,
        peak=peak,
        warmup_tokens=warmup,
        total_tokens=end - start,
        min_ratio=inner.min_lr_ratio,
        schedule=schedule,
        decay_ratio=inner.decay_ratio,
        cycles=inner.cycles,
    )


def payload_bytes(sync: SyncConfig, elements: int) -> float:
    """The mean encoded size of a contribution and of a mean. A round moves as many of both."""
    names = sync.codec, sync.encoding_of_results
    return sum(make_codec(name).encoded_bytes(elements) for name in names) / 2


def feedback_of(sync: SyncConfig) -> FeedbackRule | None:
    """The error feedback of members and reducers; None without one."""
    if sync.feedback == "none":
        return None
    if sync.feedback == "classic":
        return FeedbackRule(sync.feedback_decay)
    return FeedbackRule(sync.feedback_decay, sync.err_beta, is_8bit=True, reset_rounds=sync.feedback_reset_rounds)
