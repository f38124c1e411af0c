"""Whether peers hold the same state as this node, by the digests that both have told. Knows records; no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from node.status import PeerRow, RoundRecord, RunInfo


def with_agreement(rows: Iterable[PeerRow], records: Sequence[RoundRecord], run: RunInfo) -> tuple[PeerRow, ...]:
    """The rows with `digest_agrees`. `records`: this node's, newest first; `run`: where it stands."""
    digests = known_digests(records)
    if run.state_digest:
        digests[run.round] = run.state_digest
    return tuple(row.model_copy(update={"digest_agrees": _agrees(row, digests)}) for row in rows)


def known_digests(records: Sequence[RoundRecord]) -> dict[int, str]:
    """By round, without those that a split has made void."""
    digests: dict[int, str] = {}
    for record in reversed(records):
        for round_ in range(record.round - record.dropped + 1, record.round + 1):
            digests.pop(round_, None)
        if record.state_digest:
            digests[record.round] = record.state_digest
    return digests


def _agrees(row: PeerRow, digests: dict[int, str]) -> bool | None:
    own = digests.get(row.round)
    return row.state_digest == own if own and row.state_digest else None
