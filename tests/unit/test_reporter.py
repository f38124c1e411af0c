"""Tests of how a worker's phases are reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from node.config.amendments import Amendment, SignedAmendment
from node.status import Phase
from node.swarm.governance.amendment_pool import DroppedAmendment
from node.swarm.governance.charter import sign_amendment
from node.swarm.identity import new_identity
from node.swarm.member import MemberSnapshot
from node.worker import reporter as reporter_module
from node.worker.reporter import NO_TEXT_S, Reporter


class Link:
    """Receives reports."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Reporter:
    """A reporter whose clock is the number of times that it was asked."""
    moments = iter(range(1000))
    monkeypatch.setattr(reporter_module, "utc_now", lambda: str(next(moments)))
    link: Any = Link()
    counters: Any = SimpleNamespace(utilization_ratio=None)
    found = Reporter(link, counters, lambda: ())
    monkeypatch.setattr(found, "tell", lambda *, now=False: None)
    return found


def test_training_and_the_syncs_in_between_count_as_one_phase(reporter: Reporter) -> None:
    for number in range(3):
        reporter.enter_training(number, overlaps=False)
        began = reporter.state.since
        assert began == "1", "no new beginning after a sync"
        reporter.enter(Phase.SYNCING, f"Averaging round {number}.", "syncing")
        assert reporter.state.since == began


def test_waiting_for_members_and_for_text_begin_anew(reporter: Reporter) -> None:
    reporter.enter_training(0, overlaps=False)
    began = [reporter.state.since]
    for phase, code in (
        (Phase.SYNCING, "waiting_for_peers"),
        (Phase.SYNCING, "syncing"),
        (Phase.TRAINING, "no_text"),
        (Phase.TRAINING, "training"),
        (Phase.PAUSED, "paused"),
    ):
        reporter.enter(phase, "Because.", code)
        began.append(reporter.state.since)
    assert len(set(began)) == len(began)
    reporter.enter(Phase.PAUSED, "Because of something else.", "scheduled")
    assert reporter.state.since == began[-1]


def test_owner_is_told_if_there_is_no_text_for_minutes(reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = [0.0], list[str]()
    monkeypatch.setattr("node.worker.reporter.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(reporter, "notice", lambda _code, text, **_options: told.append(text))
    reporter.enter_no_text("The hub does not answer.")
    reporter.leave_no_text()
    assert told == [""]
    for at_s in (10.0, 20.0, 30.0 + NO_TEXT_S):
        now_s[0] = at_s
        reporter.enter_no_text("The hub does not answer.")
    assert told[1:] == ["This node has not trained for minutes. The hub does not answer. Training waits for text."]
    reporter.leave_no_text()
    assert told[2:] == [""]


def signed_pause(from_round: int) -> SignedAmendment:
    return sign_amendment(new_identity(), Amendment(run="ab" * 32, number=1, from_round=from_round, action="pause"))


def test_dropped_and_refused_amendments_are_told_with_what_they_would_have_changed(reporter: Reporter) -> None:
    swarm: Any = SimpleNamespace(view=MemberSnapshot(pending_amendments=(signed_pause(9),)), say=lambda *_: None)
    reporter.swarm = swarm
    reporter._tell_governance()
    dropped = DroppedAmendment(signed_pause(9), "its round has begun")
    swarm.view = MemberSnapshot(dropped_amendments=(dropped,))
    for _ in range(2):
        reporter._tell_governance()
    reporter.amendment_refused(SignedAmendment(text="{", signatures={}), "it cannot be read")
    reporter._tell_governance()
    told: Any = reporter._link
    assert [len(one.governance.amendments) for one in told.sent] == [1, 0, 0]
    assert [(one.number, one.change, one.reason) for one in told.sent[-1].governance.refused] == [
        (0, "", "it cannot be read"), (1, "pause", "its round has begun"),
    ]  # fmt: skip
