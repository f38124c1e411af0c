"""The process that evaluates waiting rounds on tasks: `python -m node.worker.evaluator`.

It reads one line of JSON from stdin, the configuration, writes an `EvaluatorEvent` as a line of JSON to stdout, and
ends. Of several waiting rounds it evaluates the newest and forgets the others. The last line of stderr says why it
failed.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from node.config.manifest import manifest_of
from node.config.schema import Config
from node.errors import NodeError
from node.host.disk_quota import Quota, quota_bytes
from node.host.priority import serve_parent
from node.publication.waiting_rounds import SCRATCH, WaitingRounds
from node.status import MOST_SCORE, MOST_SCORES, TASK_NAME, TaskScores, Value

FOLDER = "evaluate"
"""Folder of the waiting rounds, in the data folder."""


class EvaluatorEvent(Value):
    round: int
    scores: TaskScores | None
    reason: str = ""
    """Why there are no scores, with the remedy."""
    left_out: tuple[str, ...] = ()
    """The scores that the peer record has no room for, or cannot express."""


def evaluate_waiting(config: Config, tell: Callable[[EvaluatorEvent], None]) -> None:
    """Evaluate the newest waiting round. It is not tried again, whether it can be evaluated or not."""
    folder = config.node.data_dir / FOLDER
    rounds = WaitingRounds(folder)
    waiting = rounds.all()
    for older in waiting[:-1]:
        rounds.remove(older)
    if not waiting:
        return
    from node.publication.model_folder import write_model_folder
    from node.publication.tasks import evaluate_folder
    from node.training.checkpoint import read_outer
    from node.training.tokenizer import open_tokenizer

    newest, scratch = waiting[-1], folder / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        checkpoint = read_outer(newest.folder)
        manifest = manifest_of(config.node.data_dir)
        tokenizer = open_tokenizer(manifest.run.data.tokenizer, config.node.text_folder, config.node.hub_cache)
        quota = Quota(config.node.data_dir, quota_bytes(config.limits.disk_gb), config.node.text_folder)
        with quota.room(checkpoint.anchor.nbytes):
            write_model_folder(manifest, checkpoint, scratch, tokenizer=tokenizer, command="")
        rounds.remove(newest)  # Now, so that a task that crashes this process does so once.
        found = evaluate_folder(scratch, config.evaluate)
        told = choose_scores(found, config.evaluate.tasks)
        scores = TaskScores(round=checkpoint.round, state_digest=checkpoint.state_digest, scores=told)
        event = EvaluatorEvent(round=newest.round, scores=scores, left_out=tuple(found.keys() - told.keys()))
    except NodeError as exc:
        event = EvaluatorEvent(round=newest.round, scores=None, reason=str(exc))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    rounds.remove(newest)
    tell(event)


def choose_scores(found: Mapping[str, float], tasks: Sequence[str]) -> dict[str, float]:
    """The scores for the peer record. Those of the named `tasks` come first, before those of their subtasks."""

    def rank(label: str) -> int:
        return next((n for n, task in enumerate(tasks) if label.startswith(f"{task}/")), len(tasks))

    valid = [name for name in found if re.fullmatch(TASK_NAME, name) and abs(found[name]) <= MOST_SCORE]
    return {name: found[name] for name in sorted(valid, key=rank)[:MOST_SCORES]}


def main() -> int:
    with serve_parent() as answers:
        config = Config.model_validate_json(sys.stdin.readline())
        import torch

        from node.training.device import threads_per_rank

        torch.set_num_threads(threads_per_rank(config.limits.cpu_threads, 1))
        evaluate_waiting(config, lambda event: print(event.model_dump_json(), file=answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
