"""The worker's part of publishing: which rounds are due, whose turn it is, and what the owner is told.

The process `node.worker.publisher` does the work. Its failure never harms the node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from pydantic import ValidationError

from node.config.publish_address import parse_publish_address
from node.config.schema import Config
from node.host.files import write_whole
from node.publication.model_card import CurvePoint, read_curve, with_point, write_curve
from node.publication.publisher import PublishEvent
from node.publication.waiting_rounds import WaitingRounds
from node.status import PublicationInfo, RoundRecord, utc_now
from node.swarm.chain.chain import Tip
from node.swarm.consensus.leader_election import leader_order
from node.swarm.member import MemberSnapshot
from node.training.checkpoint import CheckpointStore
from node.worker.counters import WorkCounters
from node.worker.duty import Duty
from node.worker.duty_process import DutyProcess
from node.worker.publisher import CURVE_FILE, FOLDER, PublisherStart
from node.worker.reporter import Reporter

logger = logging.getLogger(__name__)

PUBLISHED_FILE = "published.json"
"""Name of the file in the folder of waiting rounds with the newest publication that this node knows."""
MOST_RANK = 8
SPARE_TURNS = 2
"""After the run's end, the node waits for its own turn and so many more until the last round is published."""


def rank_of(head: str, peer_id: str, publishers: set[str]) -> int:
    """The place of a node in the order in which the publishers of the round with this head take their turns.

    All from place MOST_RANK on have the same turn, because false publishers must not delay a round for days.
    """
    return min(MOST_RANK, leader_order(f"publish {head}", sorted({peer_id, *publishers})).index(peer_id))


def known_publication(config: Config) -> PublicationInfo:
    """What this node knows of publications from before its start; empty if it does not publish."""
    if not config.publish.to:
        return PublicationInfo()
    place, folder = str(parse_publish_address(config.publish.to)), config.node.data_dir / FOLDER
    known = PublicationInfo(to=place)
    with suppress(OSError, ValidationError):
        stored = PublicationInfo.model_validate_json((folder / PUBLISHED_FILE).read_bytes())
        known = stored if stored.to == place else known
    return known.model_copy(update={"waiting": len(WaitingRounds(folder).all()), "problem": ""})


class Publishing(Duty[PublishEvent]):
    """`saved` is called on the checkpointer's thread, all other methods on the main thread."""

    notice, name, done = "publish", "Publishing", "published"

    def __init__(
        self,
        config: Config,
        store: CheckpointStore,
        reporter: Reporter,
        counters: WorkCounters,
        view: Callable[[], MemberSnapshot],
        is_last: Callable[[Tip], bool],
        *,
        command: Callable[..., DutyProcess] = DutyProcess,
    ) -> None:
        """`is_last` says whether the run ends at a tip."""
        super().__init__(config.node.data_dir / FOLDER, store, reporter, PublishEvent)
        self._config, self._counters, self._view, self._is_last = config, counters, view, is_last
        self._has_changed = False
        """Whether the number of waiting rounds may have changed since it was told."""
        self._ends_at_s = 0.0
        if self.is_on:
            self._place = str(parse_publish_address(config.publish.to))
            reporter.publication = known_publication(config)
            self.begin(command, "node.worker.publisher", self._start)
        else:
            self.clear()

    @property
    def is_on(self) -> bool:
        return bool(self._config.publish.to)

    def is_due(self, tip: Tip) -> bool:
        """Whether the state at this tip is published. It then needs a checkpoint."""
        is_turn = (tip.round + 1) % self._config.publish.every_rounds == 0
        return self.is_on and tip.round >= 0 and (is_turn or self._is_last(tip))

    def saved(self, tip: Tip) -> None:
        """Let the round wait for its publication if it is due. Its checkpoint is on the disk."""
        is_first = tip.proof is None  # The state from which the run was founded.
        if is_first or tip.head == self._newest_added or not self.is_due(tip):
            return
        view = self._view()
        credit = tip.state.credit  # Ignore the claims of peers without credit.
        publishers = {row.peer_id for row in view.rows if row.publishes and row.peer_id in credit}
        rank = rank_of(tip.head, view.peer_id, publishers)
        if self.let_wait(tip, rank):
            logger.info("Round %d is due to be published; this node is number %d in turn.", tip.round, rank + 1)
            self._has_changed = True

    def chain_left(self) -> None:
        super().chain_left()
        self._has_changed = True

    def round_over(self, record: RoundRecord) -> None:
        """Add a committed round to the curve on the card."""
        if not self.is_on or not record.head or record.dropped:
            return
        path = self._folder / CURVE_FILE
        point = CurvePoint(record.round, record.swarm_tokens, record.training_loss, record.evaluation_loss)
        try:
            write_curve(path, with_point(read_curve(path, until_round=record.round), point))
        except OSError as exc:
            logger.warning("The curve could not be written to %s: %s", path, exc.strerror)

    def attend(self) -> None:
        super().attend()
        if self._has_changed:
            self._has_changed = False
            self._tell(waiting=len(self._rounds.all()))

    @property
    def is_over(self) -> bool:
        """Whether the node may end after the run's last round: it is published, or this node has waited too long."""
        if not self.is_on:
            return True
        waiting = self._rounds.all()
        if not self._ends_at_s and waiting:
            turns = max(one.turn.rank for one in waiting) + SPARE_TURNS
            self._ends_at_s = time.monotonic() + turns * self._config.publish.turn_s
        return not waiting or time.monotonic() >= self._ends_at_s

    def _start(self) -> str:
        return PublisherStart(config=self._config, peer_id=self._view().peer_id).model_dump_json()

    def handle(self, event: PublishEvent) -> None:
        self._has_changed = True
        counts = self._counters.totals.publications
        counts[event.result] = counts.get(event.result, 0) + 1
        if event.result == "failed":
            self.tell_problem(f"Round {event.round} is not published yet: {event.reason}")
            return
        if event.result == "given_up":
            self.tell_problem(f"Round {event.round} is not published by this node: {event.reason}")
            return
        if event.result == "superseded":
            text = (
                "Round %d is not published, as a later round is at %s. If that is of another run, name another place."
            )
            logger.warning(text, event.round, self._place)
        else:
            by = "this node" if event.result == "published" else "another node"
            logger.info("Round %d is published at %s as %s by %s.", event.round, self._place, event.revision, by)
            self._tell(round=event.round, revision=event.revision, at=utc_now())
            self._store_newest()
        self.tell_problem("")

    def tell_problem(self, text: str) -> None:
        super().tell_problem(text)
        self._tell(problem=text)

    def _tell(self, **fields: object) -> None:
        self._reporter.publication = self._reporter.publication.model_copy(update=fields)

    def _store_newest(self) -> None:
        path = self._folder / PUBLISHED_FILE
        try:
            self._folder.mkdir(exist_ok=True)
            write_whole(path, self._reporter.publication.model_dump_json(), forced=False)
        except OSError as exc:
            logger.warning("The newest publication could not be noted in %s: %s", path, exc.strerror)
