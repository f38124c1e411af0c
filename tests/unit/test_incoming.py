"""For how long a reducer waits for a member of which nothing is on its way."""

from __future__ import annotations

from node.swarm.allreduce.incoming import START_S, Incoming


def test_a_sender_is_silent_only_if_nothing_of_it_has_been_on_its_way_for_long() -> None:
    now_s = 0.0
    incoming = Incoming(lambda: now_s)
    assert not incoming.is_silent("a", 0.0, {"a"})
    now_s = START_S
    assert incoming.is_silent("a", 0.0, {"a"}), "it has not begun"
    assert not incoming.is_silent("a", 1.0, {"a"}), "the reducer is ready for a shorter time"
    with incoming.receive("a"), incoming.receive("a"):
        now_s = 100 * START_S
        assert not incoming.is_silent("a", 0.0, {"a"}), "a slow line may take long"
    assert not incoming.is_silent("a", 0.0, {"a"}), "it may be sent again over a relay"
    now_s += START_S
    assert incoming.is_silent("a", 0.0, {"a"})


def test_a_body_of_a_peer_that_sends_nothing_of_its_own_may_be_that_of_the_sender() -> None:
    now_s = 2 * START_S
    incoming = Incoming(lambda: now_s)
    with incoming.receive("depositary"):
        assert not incoming.is_silent("a", 0.0, {"a"}), "its own contribution is here, or it is not in the plan"
        assert incoming.is_silent("a", 0.0, {"a", "depositary"}), "it sends its own"
    assert not incoming.is_silent("a", 0.0, {"a"}), "the next one that it forwards may be that of the sender"
    now_s += START_S
    assert incoming.is_silent("a", 0.0, {"a"})
