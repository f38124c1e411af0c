"""DiLoCo, Algorithm 1 (arXiv 2311.08105), as one worker executes it.

repeat:  H inner steps of AdamW, starting from the anchor
         Delta_i = anchor - local parameters
         Delta   = weighted average of all workers' Delta_i        (without a master, `node.swarm`)
         anchor  = Nesterov(anchor, Delta)                         (the same bits on every node)
         local parameters = anchor

In overlapped modes the inner steps continue while Delta is averaged, and their progress is merged with the new anchor
(Streaming DiLoCo, arXiv 2501.18512).
"""

from __future__ import annotations

from node.worker.trainer import Trainer


def train(trainer: Trainer) -> None:
    """Train until the run is complete. Raises StopAsked on an order to stop, and the errors of the swarm.

    In overlapped modes, the last round may be committed while this node makes steps of the next one. It then makes no
    more of them.
    """
    while not trainer.run_is_complete:
        trainer.report_training()
        while not trainer.must_synchronize:
            trainer.inner_step()
            trainer.apply_committed_rounds()
            trainer.attend()
        if trainer.run_is_paused:
            trainer.wait_for_amendment()
        elif trainer.has_contribution_in_flight:
            trainer.wait_for_outer_step()
        elif not trainer.run_is_complete:
            trainer.send_pseudo_gradient()
