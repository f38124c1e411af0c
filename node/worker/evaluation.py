"""Evaluation of a round's anchor by a few members, which are drawn anew for each anchor.

An evaluator sends the loss with its contribution to the next round, so the next round's record contains the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from node.swarm.chain.chain import Tip
from node.swarm.consensus.leader_election import leader_order
from node.swarm.messages import MOST_LOSS
from node.worker.inner_trainer import InnerTrainer
from node.worker.supervisor_link import StopAsked

logger = logging.getLogger(__name__)


def is_evaluator(peer_id: str, tip: Tip, evaluators: int) -> bool:
    """Whether `peer_id` is drawn for this tip. Every node can compute the draw of `evaluators` members; 0 draws all."""
    order = leader_order(f"evaluate {tip.head}", sorted({peer_id, *tip.last_weights}))
    return not evaluators or peer_id in order[:evaluators]


class Evaluation:
    def __init__(self, inner: InnerTrainer) -> None:
        self._inner = inner
        self.loss: float | None = None
        """Loss of the newest anchor; None if this node did not evaluate it."""

    def round_over(self, tip: Tip, peer_id: str, before_micro_batch: Callable[[], None]) -> None:
        """Evaluate the tip's anchor if an evaluation is due and this node is drawn.

        If `before_micro_batch` raises StopAsked, the evaluation ends without a loss. StopAsked is not passed on, as the
        caller is still applying the round; the caller's next check raises it again.
        """
        self.loss, cfg = None, self._inner.run.evaluation
        is_due = self._inner.can_evaluate and tip.round % cfg.every_rounds == 0
        if is_due and is_evaluator(peer_id, tip, cfg.members):
            try:
                loss = self._inner.evaluate(tip.state.anchor, before_micro_batch)
            except StopAsked:
                return
            except torch.OutOfMemoryError:
                if self._inner.replica.is_shared:  # The other ranks wait in a collective.
                    raise
                logger.warning("Round %d is not evaluated: another program has taken the device's memory.", tip.round)
                return
            self.loss = loss if loss < MOST_LOSS else None  # Also None for NaN.
