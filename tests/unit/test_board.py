"""The board: who has the word about the phase, and what listeners get."""

from __future__ import annotations

import asyncio
import logging

import pytest

from node.daemon.board import LOGS_KEPT, ROUNDS_KEPT, Board, BoardHandler
from node.status import (
    DeviceInfo,
    NodeInfo,
    Outcome,
    Phase,
    PhaseState,
    Report,
    RoundRecord,
    RunInfo,
    Status,
    SyncInfo,
    TrainingInfo,
)

TRAINING = PhaseState(phase=Phase.TRAINING, code="training", reason="Trains.", since="2026-01-01T00:00:00Z")
PAUSED = PhaseState(phase=Phase.PAUSED, code="paused", reason="Paused.", since="2026-01-02T00:00:00Z")


def make_board(heard: list[Status] | None = None) -> Board:
    on_status = heard.append if heard is not None else None
    return Board(NodeInfo(version="1"), {"cpu_threads": 2}, state=PhaseState(), on_status=on_status)


def test_supervisor_has_the_word_over_the_worker() -> None:
    board = make_board()
    board.told(Report(state=TRAINING))
    assert board.status.phase is Phase.STARTING
    board.decide(None)
    assert (board.status.phase, board.status.since) == (Phase.TRAINING, TRAINING.since)
    board.decide(PAUSED)
    board.told(Report(state=TRAINING, run=RunInfo(round=3)))
    assert (board.status.phase, board.status.code, board.status.run.round) == (Phase.PAUSED, "paused", 3)


def test_a_new_worker_stands_where_the_one_before_stood_until_it_knows() -> None:
    board = make_board()
    board.decide(None)
    for run in (RunInfo(), RunInfo(manifest_hash="ab", round=7, swarm_tokens=70), RunInfo()):
        board.told(Report(state=TRAINING, run=run))
    assert (board.status.run.round, board.status.run.swarm_tokens) == (7, 70)
    board.told(Report(state=TRAINING, run=RunInfo(manifest_hash="ab", round=6)))
    assert board.status.run.round == 6


@pytest.mark.parametrize(("phase", "code"), [(Phase.ERROR, "worker_crashes"), (Phase.PAUSED, "paused")])
def test_a_worker_that_is_no_more_computes_nothing(phase: Phase, code: str) -> None:
    board = make_board()
    board.decide(None)
    busy = Report(
        state=TRAINING,
        training=TrainingInfo(loss=2.0, tokens_per_second=100.0),
        sync=SyncInfo(stage="reduce", eta_s=3.0),
        devices=(DeviceInfo(kind="cpu", name="some", utilization_ratio=1.0),),
    )
    board.told(busy)
    assert board.status.devices == busy.devices
    board.decide(PhaseState(phase=phase, code=code, reason="Mend it.", since=PAUSED.since))
    status = board.status
    assert (status.devices, status.training.tokens_per_second, status.training.loss) == ((), 0.0, 2.0)
    assert (status.sync.stage, status.sync.eta_s) == ("idle", None)


def test_listener_hears_changes_only() -> None:
    heard: list[Status] = []
    board = make_board(heard)
    board.decide(None)
    assert heard == []
    board.told(Report(state=TRAINING))
    board.told(Report(state=TRAINING))
    assert [status.phase for status in heard] == [Phase.TRAINING]


def test_name_is_a_short_form_of_the_peer_id_unless_given() -> None:
    board = make_board()
    board.told(Report(peer_id="Qm123456789"))
    assert board.status.node.name == "23456789"


def test_slow_reader_gets_the_newest_and_then_the_end() -> None:
    async def main() -> None:
        board = make_board()
        with board.subscribe() as queue:
            first = queue.get_nowait()
            assert first is not None
            assert first.phase is Phase.STARTING
            for number in range(5):
                board.told(Report(run=RunInfo(round=number)))
            newest = queue.get_nowait()
            assert newest is not None
            assert newest.run.round == 4
            assert queue.empty()
            board.close()
            assert queue.get_nowait() is None
            board.told(Report(run=RunInfo(round=9)))
            assert queue.empty()
        with board.subscribe() as late:
            assert late.get_nowait() is None

    asyncio.run(main())


def test_rounds_and_logs_are_bounded() -> None:
    board = make_board()
    for number in range(ROUNDS_KEPT + 5):
        board.add_round(RoundRecord(round=number, outcome=Outcome.ALONE))
    record = logging.LogRecord("node.x", logging.WARNING, "", 0, "number %d", (7,), None)
    for _ in range(LOGS_KEPT + 5):
        board.add_log(record)
    view = board.view(alive=True)
    assert [r.round for r in view.rounds[:2]] == [ROUNDS_KEPT + 4, ROUNDS_KEPT + 3]
    assert (len(view.rounds), len(view.logs)) == (ROUNDS_KEPT, LOGS_KEPT)
    assert (view.logs[-1].id, view.logs[-1].message) == (LOGS_KEPT + 5, "number 7")
    assert view.log_counts == {"debug": 0, "info": 0, "warning": LOGS_KEPT + 5, "error": 0}


def test_handler_keeps_round_and_traceback() -> None:
    board = make_board()
    log = logging.getLogger("node.test")
    handler = BoardHandler(board)
    log.addHandler(handler)
    try:
        raise RuntimeError("out of cheese")
    except RuntimeError:
        log.critical("failed", exc_info=True, extra={"round": 5})
    finally:
        log.removeHandler(handler)
    line = board.view(alive=True).logs[0]
    assert (line.level, line.round) == ("error", 5)
    assert "out of cheese" in line.message


def test_a_round_that_is_told_again_is_the_same_round() -> None:
    board = make_board()
    for number in (1, 2, 1):
        board.add_round(RoundRecord(round=number, outcome=Outcome.ALONE, head=f"h{number}"))
    board.add_round(RoundRecord(round=3, outcome=Outcome.FAILED))
    board.add_round(RoundRecord(round=3, outcome=Outcome.FAILED))
    assert [record.round for record in board.view(alive=True).rounds] == [3, 3, 2, 1]
    board.add_round(RoundRecord(round=2, outcome=Outcome.SKIPPED, head="h2", dropped=1))
    board.add_round(RoundRecord(round=2, outcome=Outcome.ALONE, head="h2"))
    assert [record.round for record in board.view(alive=True).rounds] == [2, 2, 3, 3, 2, 1]
