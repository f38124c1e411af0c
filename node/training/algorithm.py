"""The parts of DiLoCo that follow from a run's manifest."""

from __future__ import annotations

from node.config.manifest import OuterConfig, SyncConfig
from node.diloco.codec import make_codec
from node.diloco.feedback import FeedbackRule
from node.diloco.outer import OuterOptimizer


def optimizer_of(outer: OuterConfig) -> OuterOptimizer:
    return OuterOptimizer(outer.optimizer, outer.momentum, outer.beta2, outer.eps)


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
