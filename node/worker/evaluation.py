"""Who evaluates the anchor after a round, and what is told of it. Knows the local model and the tip; no wire.

Each value goes into the contribution to the next round, so into the record of that round, where all members find it.
"""

from __future__ import annotations

from collections.abc import Callable

from node.manifest import EvaluationConfig
from node.swarm.chain import Tip
from node.swarm.rendezvous import leader_order
from node.worker.channel import StopAsked
from node.worker.local import Local

MOST = 1e6
"""Of a loss that a record takes."""


def is_drawn(me: str, tip: Tip, members: int) -> bool:
    """Whether this node is among so many that evaluate the tip: any node can tell of any. 0: all do."""
    return not members or me in leader_order(f"evaluate {tip.head}", sorted({me, *tip.last_weights}))[:members]


class Evaluation:
    """One node's. `newest` is of the tip that `follow` has seen last."""

    def __init__(self, cfg: EvaluationConfig, local: Local) -> None:
        self._cfg, self._local = cfg, local
        self.newest: float | None = None
        """Loss of the newest anchor as this node has found it; None where it has not looked."""

    def follow(self, tip: Tip, me: str, between: Callable[[], None]) -> None:
        """A round is over: evaluate its anchor, where that is due and this node is drawn.

        StopAsked from `between` ends the evaluation without a loss, and goes no further: the caller is in the middle of
        applying the round, and obeys the stop after that.
        """
        self.newest = None
        if self._local.evaluates and tip.round % self._cfg.every_rounds == 0 and is_drawn(me, tip, self._cfg.members):
            try:
                loss = self._local.evaluate(tip.state.anchor, between)
            except StopAsked:
                return
            self.newest = loss if loss < MOST else None  # NaN is not below it either, and is told to nobody.
