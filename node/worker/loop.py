"""DiLoCo, Algorithm 1 (arXiv 2311.08105), from one worker's side. Knows the order of things, not how they are done.

repeat:  H inner steps of AdamW from the anchor
         Delta_i = anchor - local parameters
         Delta   = the others' and ours, averaged by weight           (masterless, `node.swarm`)
         anchor := Nesterov(anchor, Delta)                            (the same bits on every node)
         local  := anchor
"""

from __future__ import annotations

from collections.abc import Callable

from node.worker.trainer import Trainer


def train(trainer: Trainer, round_over: Callable[[], None]) -> None:
    """Until the run is complete, or `trainer`'s check raises. `round_over` is called after every outer step."""
    while not trainer.run_is_complete():
        trainer.show_training()
        while not trainer.round_is_due():
            trainer.inner_step()
            trainer.obey_mail()
            trainer.breathe()
        if trainer.offer():
            trainer.await_commit()
            round_over()
