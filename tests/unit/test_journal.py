"""Tests of the journal on a clock that each test advances."""

from __future__ import annotations

from datetime import UTC, datetime

from node.daemon.journal import DEPARTED_S, SETTLE_S, Journal
from node.daemon.node_state import NodeState
from node.status import (
    AmendmentInfo,
    GovernanceInfo,
    NodeInfo,
    Outcome,
    PeerRow,
    Phase,
    PhaseState,
    RefusedAmendment,
    Report,
    RoundRecord,
)
from tests.peer_row import peer_row
from tests.unit.clocks import WallClock


def row(name: str) -> PeerRow:
    return peer_row(f"id of {name}", name=name, this_node=name == "me")


def table(*names: str, left: str = "") -> Report:
    return Report(swarm=tuple(map(row, ("me", *names))), left=(f"id of {left}",) if left else ())


def started(*names: str) -> tuple[Journal, WallClock]:
    """A journal that knows these peers from its start."""
    clock = WallClock(datetime(2026, 11, 25, 13, 0, tzinfo=UTC))
    journal = Journal(clock)
    journal.worker_started()
    journal.add_report(table(*names))
    clock.add(seconds=SETTLE_S)
    journal.add_report(table(*names))
    return journal, clock


def told(journal: Journal) -> list[str]:
    return [f"{entry.name} {entry.text}".strip() for entry in reversed(journal.entries)]


def test_peers_that_were_there_before_this_node_did_not_join() -> None:
    journal, _ = started("attic", "garage")
    assert told(journal) == []
    journal.add_report(table("attic", "garage", "cellar"))
    assert told(journal) == ["cellar joined"]


def test_journal_tells_a_goodbye_from_silence_and_knows_who_returns() -> None:
    journal, clock = started("attic", "garage")
    clock.add(seconds=240)
    journal.add_report(table("garage", left="attic"))
    clock.add(seconds=60)
    journal.add_report(table())
    assert told(journal) == ["attic left", "garage is gone: no answer"]
    assert [entry.at for entry in journal.entries] == ["2026-11-25T13:05:20Z", "2026-11-25T13:04:20Z"]
    assert [(one.peer.name, one.said_goodbye) for one in journal.departed] == [("garage", False), ("attic", True)]
    journal.add_report(table("attic"))
    assert told(journal)[-1] == "attic is back"
    assert [one.peer.name for one in journal.departed] == ["garage"]


def test_departed_peer_is_forgotten_after_an_hour() -> None:
    journal, clock = started("attic")
    journal.add_report(table())
    clock.add(seconds=DEPARTED_S - 1)
    assert len(journal.departed) == 1
    clock.add(seconds=2)
    assert not journal.departed


def test_new_worker_with_an_empty_table_does_not_make_all_peers_gone() -> None:
    journal, clock = started("attic", "garage")
    journal.worker_started()
    journal.add_report(Report())
    journal.add_report(table())
    clock.add(seconds=SETTLE_S / 2)
    journal.add_report(table("attic", "cellar"))
    assert told(journal) == ["cellar joined"], "a newcomer is told at once, a missing peer is waited for"
    clock.add(seconds=SETTLE_S)
    journal.add_report(table("attic", "cellar"))
    assert told(journal) == ["cellar joined", "garage is gone: no answer"]


def test_journal_notes_what_happens_to_this_node_but_not_each_round() -> None:
    journal, _ = started()
    state = NodeState(NodeInfo(), {}, state=PhaseState(), journal=journal)
    state.set_phase(None)

    def report(phase: Phase, code: str, reason: str) -> None:
        state.apply_report(Report(state=PhaseState(phase=phase, code=code, reason=reason)))

    for number in range(3):
        report(Phase.TRAINING, "training", f"Training towards round {number}.")
        report(Phase.SYNCING, "syncing", f"Averaging round {number}.")
    state.set_phase(PhaseState(phase=Phase.PAUSED, code="scheduled", reason="The node is outside of its hours."))
    state.set_phase(None)
    report(Phase.TRAINING, "training", "Training towards round 3.")
    state.set_phase(PhaseState(phase=Phase.STARTING, code="worker_crashed", reason="The worker crashed (x)."))
    assert told(journal) == [
        "Training.", "The node is outside of its hours.", "Training.", "The worker crashed (x).",
    ]  # fmt: skip
    for _ in range(2):
        state.add_round(RoundRecord(round=7, outcome=Outcome.FAILED, reason="Too few members."))
    assert told(journal)[-1] == "Round 7 failed and is tried again. Too few members."
    assert len(told(journal)) == 5
    state.add_round(RoundRecord(round=8, outcome=Outcome.FAILED, reason="the leader does not answer"))
    assert told(journal)[-1] == "Round 8 failed and is tried again. The leader does not answer."
    for number in (8, 9):
        state.add_round(RoundRecord(round=number, outcome=Outcome.COMPLETE, head=f"head-{number}"))
    assert told(journal)[-1] == "Round 8 is complete after all."
    assert len(told(journal)) == 7


def test_journal_tells_who_amended_what_but_not_what_was_amended_before_the_start() -> None:
    journal, _ = started()
    old, new = (
        AmendmentInfo(digest=str(n), number=n, from_round=9, change=change, signers=("key of ada",), accepted_round=5)
        for n, change in ((1, "pause"), (2, "inner.lr = 0.1"))
    )
    first = GovernanceInfo(run="a run", amendments=(old,))
    journal.add_amendments(GovernanceInfo(), first)
    pending = new.model_copy(update={"accepted_round": None})
    second = first.model_copy(update={"amendments": (old, pending)})
    refused = (RefusedAmendment(digest="3", reason="it is late", number=3, change="pause"),)
    third = first.model_copy(update={"amendments": (old, new), "refused": refused})
    journal.add_amendments(first, second)
    journal.add_amendments(second, third)
    journal.add_amendments(third, third)
    assert told(journal) == [
        "Amendment 2 by of ada (inner.lr = 0.1, from round 9) is pending.",
        "Amendment 2 by of ada (inner.lr = 0.1, from round 9) is accepted by round 5.",
        "Amendment 3 (pause) was refused: it is late.",
    ]
