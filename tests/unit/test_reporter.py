"""Tests of how a worker's phases are reported."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from node.status import Phase

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.worker import reporter as reporter_module
    from node.worker.reporter import Reporter


class Link:
    """Receives reports and keeps none."""

    def send(self, message: object) -> None:
        pass


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Reporter:
    """A reporter whose clock is the number of times that it was asked."""
    moments = iter(range(1000))
    monkeypatch.setattr(reporter_module, "utc_now", lambda: str(next(moments)))
    link: Any = Link()
    counters: Any = None
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
