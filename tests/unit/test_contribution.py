"""The tokens of a node's contributions, and how committed rounds change its parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from node.worker.contribution import MAX_CARRIED, ContributionTracker, FragmentUpdate

LOCAL, OLD, NEW, SENT = (torch.tensor([x]) for x in (10.0, 1.0, 2.0, 8.0))


def send(tracker: ContributionTracker, tokens: int, sent: Tensor | None = None) -> None:
    tracker.add_tokens(tokens)
    tracker.send(0, 5, 0.0, sent)


def merged(update: FragmentUpdate, mix_alpha: float = 0.5) -> float:
    return update.merge(LOCAL, slice(None), OLD, NEW, mix_alpha).item()


def test_tokens_of_an_included_contribution_count_and_later_tokens_stay_pending() -> None:
    tracker = ContributionTracker(1)
    send(tracker, 100)
    assert tracker.pending_tokens(0) == 0 and tracker.in_flight is not None and tracker.in_flight.tokens == 100
    tracker.add_tokens(30)
    update = tracker.round_over(0, recorded=100, steps=2)
    assert update.is_merged and not update.is_carried and tracker.in_flight is None
    assert tracker.pending_tokens(0) == 30
    assert (update.counted_tokens, update.discarded_tokens) == (100, 0)
    carried = tracker.round_over(0, recorded=None, steps=2)
    assert (carried.counted_tokens, carried.discarded_tokens) == (0, 0)
    tracker.send(0, 2, 0.0, None)
    update = tracker.round_over(0, recorded=30, steps=0)
    assert (update.counted_tokens, update.discarded_tokens) == (30, 0)


@pytest.mark.parametrize(
    ("sent", "steps", "expected"),
    [(SENT, 0, 2.0), (None, 1, 0.25 * 10.0 + 0.75 * 2.0), (SENT, 1, 2.0 + (10.0 - 8.0))],
    ids=["no steps since: new anchor", "mix", "correction"],
)
def test_local_parameters_are_reset_mixed_or_corrected_after_an_included_contribution(
    sent: Tensor | None, steps: int, expected: float
) -> None:
    tracker = ContributionTracker(1)
    send(tracker, 100, sent)
    update = tracker.round_over(0, recorded=100, steps=steps)
    assert update.is_merged == (steps > 0) and merged(update, mix_alpha=0.25) == expected
    assert tracker.pending_tokens(0) == 0


def test_an_excluded_contribution_is_carried_for_two_rounds_and_then_discarded() -> None:
    tracker = ContributionTracker(1)
    for carried in range(MAX_CARRIED + 1):
        send(tracker, 100)
        tracker.add_tokens(1)
        update = tracker.round_over(0, recorded=None, steps=1)
        if carried < MAX_CARRIED:
            assert update.is_carried and tracker.pending_tokens(0) == 101 * (carried + 1)
            assert merged(update) == 11.0
        else:
            assert not update.is_carried and tracker.pending_tokens(0) == 0
            assert merged(update) == 2.0 and update.discarded_tokens == 101 * (MAX_CARRIED + 1)


def test_pending_tokens_are_carried_over_a_missed_round() -> None:
    tracker = ContributionTracker(1)
    tracker.add_tokens(50)
    update = tracker.round_over(0, recorded=None, steps=3)
    assert update.contribution is None and update.is_carried and tracker.pending_tokens(0) == 50
    assert not ContributionTracker(1).round_over(0, recorded=None, steps=0).is_carried


def test_several_rounds_that_pass_within_one_inner_step_count_as_one() -> None:
    """If each round counted, the tokens of a step that takes several rounds would be discarded unsent."""
    tracker = ContributionTracker(1)
    for _ in range(2):
        tracker.add_tokens(100)
        for _ in range(5):
            assert tracker.round_over(0, recorded=None, steps=1, is_newest=False).is_carried
        assert tracker.round_over(0, recorded=None, steps=1).is_carried
    assert tracker.pending_tokens(0) == 200
    tracker.send(0, 1, 0.0, None)
    update = tracker.round_over(0, recorded=None, steps=0)
    assert not update.is_carried and update.discarded_tokens == 200


def test_an_included_contribution_is_not_sent_again_after_a_restart() -> None:
    tracker = ContributionTracker(1)
    send(tracker, 100)
    tracker.add_tokens(20)
    steps, saved = tracker.for_checkpoint(0)
    assert steps == 5
    restarted = ContributionTracker(1, saved)
    assert restarted.pending_tokens(0) == 120 and restarted.in_flight is None
    restarted.add_tokens(7)
    update = restarted.round_over(0, recorded=100, steps=7)
    assert merged(update) == 2.0 and restarted.pending_tokens(0) == 0
    assert (update.counted_tokens, update.discarded_tokens) == (100, 27), (
        "the record has 100, and the model no other step"
    )


def test_tokens_of_a_contribution_of_an_earlier_process_count_as_recorded() -> None:
    tracker = ContributionTracker(1)
    send(tracker, 100)
    restarted = ContributionTracker(1, tracker.for_checkpoint(0)[1])
    restarted.add_tokens(30)
    restarted.send(0, 5, 0.0, None)
    restarted.add_tokens(7)
    update = restarted.round_over(0, recorded=100, steps=1)
    assert (update.counted_tokens, update.discarded_tokens) == (100, 30)
    assert restarted.pending_tokens(0) == 7
    saved_before_it_was_sent = ContributionTracker(1, [(60, 0)])
    update = saved_before_it_was_sent.round_over(0, recorded=100, steps=0)
    assert (update.counted_tokens, update.discarded_tokens) == (100, 0)


def test_pending_tokens_are_tracked_separately_for_each_fragment() -> None:
    tracker = ContributionTracker(3)
    tracker.add_tokens(10)
    tracker.send(1, 1, 0.0, None)
    tracker.add_tokens(10)
    assert [tracker.pending_tokens(f) for f in range(3)] == [20, 10, 20]
    tracker.round_over(1, recorded=None, steps=1)
    assert [tracker.pending_tokens(f) for f in range(3)] == [20, 20, 20]
    assert tracker.for_checkpoint(2)[1] == [(20, 0), (20, 1), (20, 0)]


def test_discarded_tokens_are_not_carried_to_the_next_round() -> None:
    tracker = ContributionTracker(1)
    send(tracker, 10)
    tracker.add_tokens(7)
    assert tracker.discard_pending() == 7 and tracker.discard_pending() == 0
    assert tracker.for_checkpoint(0) == (0, [(0, 0)])
    update = tracker.round_over(0, recorded=None, steps=0)
    assert not update.is_carried and update.discarded_tokens == 10


def test_contribution_that_was_lost_in_flight_counts_if_the_round_includes_it() -> None:
    tracker = ContributionTracker(1)
    send(tracker, 10)
    tracker.discard_pending()
    update = tracker.round_over(0, recorded=10, steps=0)
    assert not update.is_merged and (update.counted_tokens, update.discarded_tokens) == (10, 0)


def test_steps_after_a_reset_are_merged_from_the_parameters_after_the_reset() -> None:
    """Those that were sent would put this node's own contribution back, with the wrong sign."""
    tracker = ContributionTracker(1)
    send(tracker, 10, SENT)
    tracker.discard_pending(OLD)
    tracker.add_tokens(3)
    update = tracker.round_over(0, recorded=10, steps=1)
    assert update.is_merged and merged(update) == NEW.item() + (LOCAL.item() - OLD.item())
    assert (update.counted_tokens, tracker.pending_tokens(0)) == (10, 3)


def test_lost_contribution_is_discarded_while_newer_work_is_carried() -> None:
    tracker = ContributionTracker(1)
    send(tracker, 10)
    tracker.discard_pending()
    tracker.add_tokens(3)
    update = tracker.round_over(0, recorded=None, steps=0)
    assert update.is_carried and update.discarded_tokens == 10 and tracker.pending_tokens(0) == 3
