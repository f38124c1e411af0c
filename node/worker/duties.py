"""Work after a commit that is not training: publication and evaluation on tasks."""

from __future__ import annotations

from dataclasses import dataclass

from node.status import RoundRecord
from node.swarm.chain.chain import Tip
from node.worker.publishing import Publishing
from node.worker.task_evaluation import TaskEvaluation


@dataclass(frozen=True, slots=True)
class Duties:
    """`saved` is called on the checkpointer's thread, all other methods on the main thread."""

    publishing: Publishing
    evaluation: TaskEvaluation

    def needs_checkpoint(self, tip: Tip) -> bool:
        """Whether the state at this tip has to be on the disk."""
        return self.publishing.is_due(tip) or self.evaluation.is_due(tip.round)

    def saved(self, tip: Tip) -> None:
        """Begin with the round of this tip if it is due. Its checkpoint is on the disk."""
        self.publishing.saved(tip)
        self.evaluation.saved(tip)

    def round_over(self, record: RoundRecord, tip: Tip) -> None:
        """Note a committed round. `tip` is the state after it."""
        self.publishing.round_over(record)
        self.evaluation.know(tip)

    def attend(self) -> None:
        """Report what was done since the last call."""
        self.publishing.attend()
        self.evaluation.attend()

    def chain_left(self) -> None:
        """Forget the rounds that wait, because the node has left their chain."""
        self.publishing.chain_left()
        self.evaluation.chain_left()

    def close(self) -> None:
        self.publishing.close()
        self.evaluation.close()
