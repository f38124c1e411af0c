"""The journal of a node: which peers joined, left or fell silent, and what happened to the node itself.

It compares successive peer tables. A new worker's table fills within SETTLE_S; until then, a missing peer is not gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from node.status import (
    DepartedPeer,
    GovernanceInfo,
    JournalEntry,
    JournalKind,
    Outcome,
    PeerRow,
    Phase,
    Report,
    RoundRecord,
    Status,
    rfc3339,
)

SETTLE_S = 20.0
DEPARTED_S = 3600.0
"""How long a peer stays among the departed ones."""
ENTRIES_KEPT = 200
DEPARTED_KEPT = 200
WORDS: dict[JournalKind, str] = {
    "joined": "joined", "back": "is back", "left": "left", "gone": "is gone: no answer", "node": "",
}  # fmt: skip
QUIET_PHASES = frozenset({Phase.STARTING, Phase.CONNECTING, Phase.DOWNLOADING, Phase.SYNCING})
"""Phases that are no news by themselves. A node passes them at every start or in every round."""


class Journal:
    """Used by the supervisor's event loop only. `clock` is the wall clock."""

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._entries: deque[JournalEntry] = deque(maxlen=ENTRIES_KEPT)
        self._present: dict[str, PeerRow] = {}
        self._departed: dict[str, DepartedPeer] = {}
        self._settled_at: datetime | None = None
        """None before the first worker."""
        self._knows_peers = False
        """Whether a worker's table was complete once. Before that, every peer is new, but none has just joined."""
        self._told: tuple[Phase, str] | None = None
        """Phase and code of the last entry about this node."""
        self._failed_round: int | None = None
        """The round whose failure was noted last, until it is complete."""

    @property
    def entries(self) -> tuple[JournalEntry, ...]:
        """Newest first."""
        return tuple(reversed(self._entries))

    @property
    def departed(self) -> tuple[DepartedPeer, ...]:
        """The peers that left or fell silent within DEPARTED_S, newest first."""
        since = rfc3339(self._clock() - timedelta(seconds=DEPARTED_S))
        return tuple(one for one in reversed(self._departed.values()) if one.at >= since)

    def worker_started(self) -> None:
        self._settled_at = self._clock() + timedelta(seconds=SETTLE_S)

    def add_report(self, report: Report) -> None:
        """Compare the report's peer table with the previous one."""
        if not any(row.this_node for row in report.swarm):
            return  # The worker is not in the swarm yet.
        rows = {row.peer_id: row for row in report.swarm if not row.this_node}
        is_settling = self._settled_at is not None and self._clock() < self._settled_at
        for peer_id, row in rows.items():
            was_departed = self._departed.pop(peer_id, None) is not None
            if peer_id not in self._present and (self._knows_peers or not is_settling):
                self._add_peer("back" if was_departed else "joined", row)
        missing = {peer_id: row for peer_id, row in self._present.items() if peer_id not in rows}
        self._present = rows
        if is_settling:
            self._present |= missing
            return
        self._knows_peers = True
        for peer_id, row in missing.items():
            kind: JournalKind = "left" if peer_id in report.left else "gone"
            self._add_peer(kind, row)
            self._departed[peer_id] = DepartedPeer(peer=row, at=rfc3339(self._clock()), said_goodbye=kind == "left")
        while len(self._departed) > DEPARTED_KEPT:
            del self._departed[next(iter(self._departed))]

    def add_status(self, status: Status) -> None:
        """Note a new phase of this node, unless it is one that says nothing to the owner."""
        is_crash = status.code == "worker_crashed"
        if (status.phase in QUIET_PHASES and not is_crash) or status.code == "pausing":
            return
        told = (status.phase, status.code)
        if told != self._told:
            self._told = told
            self._add_node("Training." if status.code == "training" else status.reason)

    def add_round(self, record: RoundRecord) -> None:
        """Note a round that failed, that is complete after it failed, or that no longer counts."""
        if record.dropped:
            self._add_node(record.reason or f"{record.dropped} rounds no longer count.")
        elif record.outcome is Outcome.FAILED and not record.head:
            reason = record.reason.removesuffix(".")
            sentence = f" {reason[0].upper()}{reason[1:]}." if reason else ""
            self._add_node(f"Round {record.round} failed and is tried again.{sentence}")
            self._failed_round = record.round
        elif record.head and record.round == self._failed_round:
            self._add_node(f"Round {record.round} is complete after all.")
            self._failed_round = None

    def add_amendments(self, before: GovernanceInfo, after: GovernanceInfo) -> None:
        """Note amendments that are pending or accepted since `before`, and those that were refused."""
        if before.run != after.run:
            return  # The worker has just read the run, with amendments of any age.
        known = {(one.digest, one.accepted_round) for one in before.amendments}
        for one in after.amendments:
            if (one.digest, one.accepted_round) not in known:
                by = ", ".join(signer[-6:] for signer in one.signers)
                what = f"Amendment {one.number} by {by} ({one.change}, from round {one.from_round})"
                is_pending = one.accepted_round is None
                self._add_node(f"{what} is {'pending' if is_pending else f'accepted by round {one.accepted_round}'}.")
        for refused in after.refused:
            if refused not in before.refused:
                what = f"Amendment {refused.number} ({refused.change})" if refused.number else "An amendment"
                self._add_node(f"{what} was refused: {refused.reason}.")

    def _add_peer(self, kind: JournalKind, row: PeerRow) -> None:
        self._add(JournalEntry(at="", kind=kind, peer_id=row.peer_id, name=row.name, text=WORDS[kind]))

    def _add_node(self, text: str) -> None:
        self._add(JournalEntry(at="", kind="node", text=text))

    def _add(self, entry: JournalEntry) -> None:
        self._entries.append(entry.model_copy(update={"at": rfc3339(self._clock())}))
