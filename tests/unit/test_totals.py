"""What a node has done outlives it: kept in a file, read once, and never exchanged for something older."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from node.link import TOTALS_FILE
from node.status import Channel, Outcome

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.swarm.member import View
    from node.worker.ledger import Ledger
    from node.worker.totals import EVERY_S, Totals


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made(folder: Path, clock: Clock) -> tuple[Ledger, Totals]:
    ledger = Ledger(clock)
    return ledger, Totals(folder, ledger, View, clock)


def test_a_replayed_round_that_was_counted_counts_once() -> None:
    ledger = Ledger(Clock())
    ledger.count_tokens(0, merged=5, discarded=2, is_replayed=False)
    ledger.count_round(0, Outcome.COMPLETE, attempted=True, included=True)
    for round_ in (0, 1):
        ledger.count_tokens(round_, merged=5, discarded=2, is_replayed=True)
    assert (ledger.tokens_merged, ledger.tokens_discarded) == (10, 4)


def work(ledger: Ledger, clock: Clock, tokens: int) -> None:
    clock.now_s += 1.0
    ledger.step_done(1.0, tokens)
    ledger.count_round(ledger.last_round + 1, Outcome.COMPLETE, attempted=True, included=True)
    ledger.round_done(at_s=0.0)


def test_another_process_goes_on_from_it(tmp_path: Path) -> None:
    clock = Clock()
    ledger, totals = made(tmp_path, clock)
    totals.load()
    assert ledger.tokens == 0
    work(ledger, clock, 100)
    older = ledger.save(ledger.counters(View()))
    work(ledger, clock, 50)
    totals.keep()
    again, loads = made(tmp_path, clock)
    loads.load()
    again.load(older)  # that of a checkpoint, taken before
    assert (again.tokens, again.rounds_joined, again.rounds) == (150, 2, {Outcome.COMPLETE: 2})
    # A checkpoint that knows of more, as a folder has it that an older version went on with.
    work(again, clock, 50)
    newer = again.save(again.counters(View()))
    third, loads = made(tmp_path, clock)
    loads.load()
    assert third.last_round == 1, "a replay of rounds 0 and 1 counts neither again"
    third.load(newer)
    assert (third.tokens, third.rounds) == (200, {Outcome.COMPLETE: 3})


def test_what_was_relayed_is_a_contribution_of_its_own_kind() -> None:
    ledger = Ledger(Clock())
    view = View(sent_bytes={Channel.REDUCE: 10, Channel.RELAY: 7}, received_bytes={Channel.REDUCE: 5, Channel.RELAY: 8})
    told = ledger.contribution(ledger.counters(view))
    assert (told.bytes_sent, told.bytes_received, told.bytes_relayed) == (17, 13, 7)


def test_it_is_kept_now_and_then(tmp_path: Path) -> None:
    clock = Clock()
    ledger, totals = made(tmp_path, clock)
    work(ledger, clock, 1)
    totals.keep_if_due()
    assert not (tmp_path / TOTALS_FILE).exists()
    clock.now_s = EVERY_S
    totals.keep_if_due()
    assert (tmp_path / TOTALS_FILE).exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b'{"counters": {"tokens_processed": -1}}', b"\xff"])
def test_a_damaged_file_is_as_none(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / TOTALS_FILE).write_bytes(damage)
    ledger, totals = made(tmp_path, Clock())
    totals.load()
    assert ledger.tokens == ledger.rounds_joined == 0
    assert "cannot be read" in caplog.text


def test_a_disk_that_does_not_take_it_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, totals = made(tmp_path / "gone", Clock())
    with caplog.at_level(logging.WARNING):
        totals.keep()
        totals.keep()
    assert caplog.text.count("cannot be written") == 1
