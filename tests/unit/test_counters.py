"""The worker's counters continue from earlier processes and count nothing twice."""

from __future__ import annotations

from node.status import Channel, Outcome, SavedCounters
from node.swarm.member import MemberSnapshot
from node.worker.counters import WorkCounters
from tests.unit.clocks import Clock


def work(counters: WorkCounters, clock: Clock, tokens: int) -> None:
    clock.now_s += 1.0
    counters.step_done(1.0, tokens)
    counters.count_round(counters.last_round + 1, Outcome.COMPLETE, attempted=True, included=True)
    counters.round_done(at_s=0.0)


def test_tokens_of_a_round_count_once_although_the_round_is_replayed() -> None:
    counters = WorkCounters(Clock())
    counters.count_tokens(0, merged=5, discarded=2, is_replayed=False)
    counters.count_round(0, Outcome.COMPLETE, attempted=True, included=True)
    for round_ in (0, 1):
        counters.count_tokens(round_, merged=5, discarded=2, is_replayed=True)
    assert (counters.totals.tokens_merged, counters.totals.tokens_discarded) == (10, 4)


def test_next_worker_process_continues_from_the_newest_saved_totals() -> None:
    clock = Clock()
    first = WorkCounters(clock)
    work(first, clock, 100)
    checkpoint = first.save(first.counters(MemberSnapshot()))
    work(first, clock, 50)
    view = MemberSnapshot(sent_bytes={Channel.REDUCE: 9})
    stored = SavedCounters.model_validate(first.save(first.counters(view)))
    second = WorkCounters(clock)
    second.load(stored)
    second.load(checkpoint)  # This checkpoint is older than the stored totals.
    assert (second.totals.tokens_processed, second.rounds_joined, second.totals.sync_rounds) == (
        150,
        2,
        {Outcome.COMPLETE: 2},
    )
    assert second.last_round == 1, "a replay of rounds 0 and 1 counts neither again"
    assert second.counters(view).network_sent_bytes == {Channel.REDUCE: 18}
    # After a power cut, a checkpoint may be newer than the stored totals.
    work(second, clock, 50)
    checkpoint = second.save(second.counters(MemberSnapshot()))
    third = WorkCounters(clock)
    third.load(stored)
    third.load(checkpoint)
    assert (third.totals.tokens_processed, third.totals.sync_rounds) == (200, {Outcome.COMPLETE: 3})


def test_relayed_bytes_are_part_of_the_reported_contribution_of_a_node() -> None:
    counters = WorkCounters(Clock())
    view = MemberSnapshot(
        sent_bytes={Channel.REDUCE: 10, Channel.RELAY: 7}, received_bytes={Channel.REDUCE: 5, Channel.RELAY: 8}
    )
    contribution = counters.contribution(counters.counters(view))
    assert (contribution.bytes_sent, contribution.bytes_received, contribution.bytes_relayed) == (17, 13, 7)
