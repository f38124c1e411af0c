"""Tests of the detector of half-open connections."""

from __future__ import annotations

import asyncio

import pytest

from node.errors import PeerError
from node.swarm.transport.connection_health import BACKOFF_S, FORGET_S, GrowingPauses, HalfOpenDetector


class Calls:
    """Calls to one peer on a manual clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.dropped: list[str] = []
        self.unanswered = HalfOpenDetector(lambda: self.now_s, self.dropped.append)

    def end(self, error: BaseException, began_s: float, ended_s: float, *, is_bulk: bool = False) -> None:
        """End a call with a timeout of 3 s."""
        with pytest.raises(type(error)):
            self._raise(error, began_s, ended_s, is_bulk)

    def _raise(self, error: BaseException, began_s: float, ended_s: float, is_bulk: bool) -> None:
        with self.unanswered.watch("peer", began_s, timeout_s=3.0, is_bulk=is_bulk):
            self.now_s = ended_s
            raise error

    def time_out(self, began_s: float, *, is_bulk: bool = False) -> None:
        self.end(asyncio.CancelledError(), began_s, began_s + 3.0, is_bulk=is_bulk)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_second_call_timeout_in_a_row_drops_the_connection(calls: Calls) -> None:
    calls.time_out(0.0)
    assert not calls.dropped
    calls.time_out(3.0)
    assert calls.dropped == ["peer"]
    calls.time_out(6.0)
    assert calls.dropped == ["peer"], "the count restarts with the new connection"


@pytest.mark.parametrize("refused", [False, True])
def test_answer_of_a_peer_resets_the_count_of_its_timeouts(calls: Calls, refused: bool) -> None:
    calls.time_out(0.0)
    if refused:
        calls.end(PeerError("no", code="busy"), 3.0, 3.1)
    else:
        calls.unanswered.answered("peer")
    calls.time_out(4.0)
    assert not calls.dropped


def test_timeouts_of_concurrent_calls_count_once(calls: Calls) -> None:
    for began_s in (0.0, 0.5, 1.0):
        calls.time_out(began_s)
    assert not calls.dropped
    calls.time_out(4.5)
    assert calls.dropped == ["peer"]


def test_call_cancelled_before_its_timeout_does_not_count_as_a_timeout(calls: Calls) -> None:
    for began_s in (0.0, 3.0, 6.0):
        calls.end(asyncio.CancelledError(), began_s, began_s + 2.0)
    assert not calls.dropped


def test_a_connection_survives_timeouts_of_bulk_calls_and_lasts_while_one_runs(calls: Calls) -> None:
    for began_s in (0.0, 3.0, 6.0):
        calls.time_out(began_s, is_bulk=True)
    assert not calls.dropped
    with calls.unanswered.bulk("peer"):
        for began_s in (9.0, 12.0, 15.0):
            calls.time_out(began_s)
    assert not calls.dropped
    calls.time_out(18.0)
    assert calls.dropped == ["peer"]


def test_pause_before_the_next_dial_doubles_with_each_failure_and_ends_with_a_success() -> None:
    now_s = [100.0]
    pauses = GrowingPauses(lambda: now_s[0])
    lengths = []
    for _ in range(6):
        began_s = now_s[0]
        pauses.failed("peer")
        while "peer" in pauses:
            now_s[0] += 0.5
        lengths.append(now_s[0] - began_s)
    assert lengths == [2, 4, 8, 16, BACKOFF_S, BACKOFF_S] and "other" not in pauses
    pauses.failed("peer")
    pauses.succeeded("peer")
    assert "peer" not in pauses
    pauses.failed("peer")
    now_s[0] += 2 * FORGET_S
    pauses.failed("other")
    assert list(pauses._failures) == ["other"], "old failures are forgotten"
