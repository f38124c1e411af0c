"""What a node is owed: tokens by fragment, in flight, carried, given up; and what becomes of its parameters."""

from __future__ import annotations

import torch

from node.worker.accounts import MAX_CARRIED, Accounts, Landing

LOCAL, OLD, NEW, SENT = (torch.tensor([x]) for x in (10.0, 1.0, 2.0, 8.0))
ALL = slice(None)


def test_what_is_included_is_no_longer_owed() -> None:
    accounts = Accounts(1)
    accounts.earn(100)
    accounts.send(0, 5, 0.0, None)
    assert accounts.tokens(0) == 0 and accounts.flight is not None and accounts.flight.tokens == 100
    accounts.earn(30)
    landing = accounts.land(0, included=True, steps=2)
    assert landing.is_merged and not landing.is_carried and accounts.flight is None
    assert accounts.tokens(0) == 30, "done since it was sent: for the next one"


def test_without_a_step_since_it_is_the_blocking_algorithm() -> None:
    accounts = Accounts(1)
    accounts.earn(100)
    accounts.send(0, 5, 0.0, SENT)
    landing = accounts.land(0, included=True, steps=0)
    assert not landing.is_merged and torch.equal(landing.moved(LOCAL, ALL, OLD, NEW, 0.5), NEW)
    assert accounts.tokens(0) == 0


def test_what_is_left_out_is_carried_twice_with_all_that_came_since() -> None:
    accounts, total = Accounts(1), 0
    for carried in range(MAX_CARRIED + 1):
        accounts.earn(100)
        total += 100
        accounts.send(0, 5, 0.0, None)
        accounts.earn(1)
        total += 1
        landing = accounts.land(0, included=False, steps=1)
        if carried < MAX_CARRIED:
            assert landing.is_carried and accounts.tokens(0) == total
            assert landing.moved(LOCAL, ALL, OLD, NEW, 0.5).item() == 11.0
        else:
            assert not landing.is_carried and accounts.tokens(0) == 0
            assert torch.equal(landing.moved(LOCAL, ALL, OLD, NEW, 0.5), NEW)


def test_a_round_that_this_node_missed_carries_what_it_has_done() -> None:
    accounts = Accounts(1)
    accounts.earn(50)
    landing = accounts.land(0, included=False, steps=3)
    assert landing.flight is None and landing.is_carried and accounts.tokens(0) == 50
    assert not Accounts(1).land(0, included=False, steps=0).is_carried, "nothing done, nothing to carry"


def test_after_a_restart_a_contribution_that_counted_all_the_same_is_not_offered_again() -> None:
    accounts = Accounts(1)
    accounts.earn(100)
    accounts.send(0, 5, 0.0, None)
    accounts.earn(20)
    steps, owed = accounts.for_checkpoint(0)
    assert steps == 5
    again = Accounts(1, owed)
    assert again.tokens(0) == 120 and again.flight is None
    landing = again.land(0, included=True, steps=7)
    assert torch.equal(landing.moved(LOCAL, ALL, OLD, NEW, 0.5), NEW) and again.tokens(0) == 0


def test_fragments_have_books_of_their_own() -> None:
    accounts = Accounts(3)
    accounts.earn(10)
    accounts.send(1, 1, 0.0, None)
    accounts.earn(10)
    assert [accounts.tokens(f) for f in range(3)] == [20, 10, 20]
    accounts.land(1, included=False, steps=1)
    assert [accounts.tokens(f) for f in range(3)] == [20, 20, 20]
    assert accounts.for_checkpoint(2)[1] == [(20, 0), (20, 1), (20, 0)]


def test_what_is_given_up_can_not_be_carried() -> None:
    accounts = Accounts(1)
    accounts.earn(10)
    accounts.send(0, 1, 0.0, None)
    accounts.give_up()
    assert not accounts.land(0, included=False, steps=0).is_carried


def test_the_merge_is_the_mix_or_where_the_sent_was_kept_the_correction() -> None:
    accounts = Accounts(1)
    for sent, expected in ((None, 0.25 * 10.0 + 0.75 * 2.0), (SENT, 2.0 + (10.0 - 8.0))):
        accounts.earn(1)
        accounts.send(0, 1, 0.0, sent)
        landing: Landing = accounts.land(0, included=True, steps=1)
        assert landing.moved(LOCAL, ALL, OLD, NEW, 0.25).item() == expected


def test_rounds_that_pass_within_one_inner_step_count_as_one() -> None:
    """The work of a step that takes several rounds is not given up before it could be offered."""
    accounts = Accounts(1)
    for _ in range(2):
        accounts.earn(100)
        for _ in range(5):
            assert accounts.land(0, included=False, steps=1, is_newest=False).is_carried
        assert accounts.land(0, included=False, steps=1).is_carried
    assert accounts.tokens(0) == 200
    accounts.send(0, 1, 0.0, None)
    landing = accounts.land(0, included=False, steps=0)
    assert not landing.is_carried and landing.discarded_tokens == 200


def test_each_token_is_counted_or_discarded_once() -> None:
    accounts = Accounts(1)
    accounts.earn(100)
    accounts.send(0, 5, 0.0, None)
    accounts.earn(30)
    landing = accounts.land(0, included=True, steps=2)
    assert (landing.counted_tokens, landing.discarded_tokens) == (100, 0), "30 came after it was sent"
    landing = accounts.land(0, included=False, steps=2)
    assert (landing.counted_tokens, landing.discarded_tokens) == (0, 0), "carried: neither yet"
    accounts.send(0, 2, 0.0, None)
    landing = accounts.land(0, included=True, steps=0)
    assert (landing.counted_tokens, landing.discarded_tokens) == (30, 0)
    accounts.earn(7)
    assert accounts.give_up() == 7 and accounts.give_up() == 0
