"""DiLoCo, Algorithm 1 (arXiv 2311.08105), from one worker's side. Knows the order of things, not how they are done.

repeat:  H inner steps of AdamW from the anchor
         Delta_i = anchor - local parameters
         Delta   = the others' and ours, averaged by weight           (masterless, `node.swarm`)
         anchor := Nesterov(anchor, Delta)                            (the same bits on every node)
         local  := anchor

Overlapped, the inner steps go on while Delta is averaged, and what they did is merged with the new anchor when it comes
(Streaming DiLoCo, arXiv 2501.18512).
"""

from __future__ import annotations

from node.worker.trainer import Trainer


def train(trainer: Trainer) -> None:
    """Until the run is complete, or the trainer's check raises."""
    while not trainer.run_is_complete():
        trainer.show_training()
        while not trainer.must_sync():
            trainer.inner_step()
            trainer.obey_all_mail()
            trainer.breathe()
        if trainer.in_flight:
            trainer.await_commit()
        else:
            trainer.offer()
