"""For how long a reducer waits for a member of which nothing is on its way."""

from __future__ import annotations

from node.swarm.allreduce.incoming import START_S, Incoming


def test_a_sender_is_silent_only_if_nothing_of_it_has_been_on_its_way_for_long() -> None:
    now_s = 0.0
    incoming = Incoming(lambda: now_s)
    assert not incoming.is_silent("a", 0.0, [])
    now_s = START_S
    assert incoming.is_silent("a", 0.0, []), "it has not begun"
    assert not incoming.is_silent("a", 1.0, []), "the reducer is ready for a shorter time"
    with incoming.receive("a"), incoming.receive("a"):
        now_s = 100 * START_S
        assert not incoming.is_silent("a", 0.0, []), "a slow line may take long"
    assert not incoming.is_silent("a", 0.0, []), "it may be sent again over a relay"
    now_s += START_S
    assert incoming.is_silent("a", 0.0, [])


def test_a_body_of_a_member_whose_own_contribution_is_here_may_be_that_of_the_sender() -> None:
    incoming = Incoming(lambda: 2 * START_S)
    with incoming.receive("depositary"):
        assert not incoming.is_silent("a", 0.0, ["depositary"])
        assert incoming.is_silent("a", 0.0, []), "the depositary sends its own"
    assert incoming.is_silent("a", 0.0, ["depositary"])
