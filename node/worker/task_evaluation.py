"""The worker's part of evaluation on tasks: which rounds this node is drawn for, and the medians of all members.

The process `node.worker.evaluator` computes the scores, at low priority and on the CPU. Members tell their scores in
their peer records, and not in the record of a round, which all members would have to agree on.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress

from pydantic import ValidationError

from node.config.schema import Config
from node.host.files import write_whole
from node.status import PeerRow, TaskScore, TaskScores
from node.swarm.chain.chain import Tip
from node.swarm.consensus.leader_election import leader_order
from node.swarm.member import MemberSnapshot
from node.training.checkpoint import CheckpointStore
from node.worker.duty import Duty
from node.worker.duty_process import DutyProcess
from node.worker.evaluator import FOLDER, EvaluatorEvent
from node.worker.reporter import Reporter

logger = logging.getLogger(__name__)

SCORES_FILE = "scores.json"
MOST_TASKS = 32
"""Limit on the names of tasks that one process shows. Those that most members state come first."""
MOST_DIGESTS = 4096
"""States of this node's chain whose scores it believes."""


def draw(state_digest: str, evaluators: Iterable[str], members: int) -> list[str]:
    """The evaluators of a state. All can compute the draw."""
    return leader_order(f"evaluate tasks {state_digest}", sorted(evaluators))[:members]


class TaskMedians:
    """The medians of what drawn members say about the newest evaluated state of this node's chain."""

    def __init__(self, members: int) -> None:
        """`members` is the number of nodes that are drawn for each state."""
        self._members = members
        self._digests: dict[int, str] = {}
        self._newest = -1
        """The newest evaluated round so far."""
        self._names: list[str] = []
        """The tasks that have been shown of it. Each is a time series of the metrics, and a member may name others."""

    def know(self, round_: int, state_digest: str) -> None:
        """Note the state after a round. Later states are of a chain that the node has left."""
        self._digests = {number: digest for number, digest in self._digests.items() if number < round_}
        self._digests[round_] = state_digest
        while len(self._digests) > MOST_DIGESTS:
            del self._digests[min(self._digests)]

    def of(self, rows: Sequence[PeerRow], credit: Container[str]) -> tuple[TaskScore, ...]:
        """The medians by name. Scores of unknown states do not count, so nobody can make up a newer one.

        Of other nodes only those with credit count, as far as they are drawn for the state.
        """
        evaluators = {row.peer_id for row in rows if row.evaluates and (row.this_node or row.peer_id in credit)}
        told = [(row, row.evaluation) for row in rows if row.evaluation is not None and row.peer_id in evaluators]
        known = [(row, one) for row, one in told if self._digests.get(one.round) == one.state_digest]
        draws = {one.state_digest: draw(one.state_digest, evaluators, self._members) for _, one in known}
        counted = [one for row, one in known if row.this_node or row.peer_id in draws[one.state_digest]]
        newest = max((one.round for one in counted), default=-1)
        if newest > self._newest:
            self._newest, self._names = newest, []
        scores = [one.scores for one in counted if one.round == newest]
        counts = Counter(name for one in scores for name in one)
        names = sorted(counts, key=lambda name: (-counts[name], name))
        self._names += [name for name in names if name not in self._names][: MOST_TASKS - len(self._names)]
        return tuple(
            TaskScore(name=name, score=statistics.median(values), round=newest, members=len(values))
            for name in sorted(set(names).intersection(self._names))
            if (values := [one[name] for one in scores if name in one])
        )


class TaskEvaluation(Duty[EvaluatorEvent]):
    """`saved` is called on the checkpointer's thread, all other methods on the main thread."""

    notice, name, done = "evaluate", "Evaluation on tasks", "evaluated on tasks"

    def __init__(
        self,
        config: Config,
        store: CheckpointStore,
        reporter: Reporter,
        view: Callable[[], MemberSnapshot],
        tell_peers: Callable[[TaskScores], None],
        *,
        command: Callable[..., DutyProcess] = DutyProcess,
    ) -> None:
        super().__init__(config.node.data_dir / FOLDER, store, reporter, EvaluatorEvent)
        self._cfg, self._view, self._tell_peers = config.evaluate, view, tell_peers
        self._scores_file = self._folder / SCORES_FILE
        self._medians = TaskMedians(config.evaluate.members)
        self._credit: Container[str] = ()
        self._rows: tuple[PeerRow, ...] | None = None
        self._stored_digest = ""
        """The state that this node has evaluated before a restart."""
        if self.is_on:
            self._tell_stored()
            self.begin(command, "node.worker.evaluator", config.model_dump_json)
        else:
            self.clear()

    @property
    def is_on(self) -> bool:
        return bool(self._cfg.tasks)

    def is_due(self, round_: int) -> bool:
        """Whether the state after this round is evaluated, by this node if it is drawn."""
        return self.is_on and round_ >= 0 and (round_ + 1) % self._cfg.every_rounds == 0

    def saved(self, tip: Tip) -> None:
        """Let the round wait for its evaluation if it is due and this node is drawn. Its checkpoint is on the disk."""
        if not self.is_due(tip.round) or tip.head == self._newest_added or tip.digest == self._stored_digest:
            return
        view = self._view()
        credit = tip.state.credit  # Ignore the claims of peers without credit.
        evaluators = {row.peer_id for row in view.rows if row.evaluates and row.peer_id in credit}
        if view.peer_id in draw(tip.digest, {view.peer_id, *evaluators}, self._cfg.members):
            self.let_wait(tip, 0)

    def know(self, tip: Tip) -> None:
        """Note the newest state of this node's chain."""
        self._medians.know(tip.round, tip.digest)
        self._credit = tip.state.credit

    def attend(self) -> None:
        """Tell the swarm what the process has found, and report the medians of all members."""
        super().attend()
        rows = self._view().rows
        if rows is not self._rows:
            self._rows = rows
            self._reporter.set_task_scores(self._medians.of(rows, self._credit))

    def handle(self, event: EvaluatorEvent) -> None:
        scores = event.scores
        if scores is None:
            self.tell_problem(f"Round {event.round} is not evaluated on tasks: {event.reason}")
            return
        text = ", ".join(f"{name} {score:.4f}" for name, score in scores.scores.items())
        logger.info("Round %d is evaluated on tasks: %s.", scores.round, text)
        if event.left_out:
            left_out = ", ".join(sorted(event.left_out))
            logger.warning("Other nodes do not see these scores, which do not fit into the peer record: %s.", left_out)
        self._tell_peers(scores)
        self.tell_problem("")
        try:
            write_whole(self._scores_file, scores.model_dump_json(), forced=False)
        except OSError as exc:
            logger.warning("The scores could not be written to %s: %s", self._scores_file, exc.strerror)

    def _tell_stored(self) -> None:
        """Tell the scores from before a restart again."""
        with suppress(OSError, ValidationError):
            scores = TaskScores.model_validate_json(self._scores_file.read_bytes())
            self._medians.know(scores.round, scores.state_digest)
            self._stored_digest = scores.state_digest
            self._tell_peers(scores)
