"""Tests of the node's state: phase, subscribers, bounded logs and rounds, counters, and the version notice."""

from __future__ import annotations

import asyncio
import logging

import pytest

from node.daemon.log_handlers import NodeStateHandler
from node.daemon.node_state import LOGS_KEPT, ROUNDS_KEPT, NodeState, newer_version_notice
from node.status import (
    ContributionInfo,
    Counters,
    DeviceInfo,
    NodeInfo,
    Outcome,
    PeerRow,
    PeersInfo,
    Phase,
    PhaseState,
    Report,
    RoundRecord,
    RunInfo,
    SavedCounters,
    Status,
    SyncInfo,
    TrainingInfo,
)
from tests.peer_row import peer_row

TRAINING = PhaseState(phase=Phase.TRAINING, code="training", reason="Trains.", since="2026-01-01T00:00:00Z")
PAUSED = PhaseState(phase=Phase.PAUSED, code="paused", reason="Paused.", since="2026-01-02T00:00:00Z")


def make_state(received: list[Status] | None = None) -> NodeState:
    on_status = received.append if received is not None else None
    return NodeState(NodeInfo(version="1"), {"cpu_threads": 2}, state=PhaseState(), on_status=on_status)


def test_phase_of_the_supervisor_takes_precedence_over_that_of_the_worker() -> None:
    state = make_state()
    state.apply_report(Report(state=TRAINING))
    assert state.status.phase is Phase.STARTING
    state.set_phase(None)
    assert (state.status.phase, state.status.since) == (Phase.TRAINING, TRAINING.since)
    state.set_phase(PAUSED)
    state.apply_report(Report(state=TRAINING, run=RunInfo(round=3)))
    assert (state.status.phase, state.status.code, state.status.run.round) == (Phase.PAUSED, "paused", 3)


def test_status_keeps_the_previous_round_until_a_new_worker_knows_its_own() -> None:
    state = make_state()
    state.set_phase(None)
    for run in (RunInfo(), RunInfo(manifest_hash="ab", round=7, swarm_tokens=70), RunInfo()):
        state.apply_report(Report(state=TRAINING, run=run))
    assert (state.status.run.round, state.status.run.swarm_tokens) == (7, 70)
    state.apply_report(Report(state=TRAINING, run=RunInfo(manifest_hash="ab", round=6)))
    assert state.status.run.round == 6


def test_peers_of_a_dead_worker_are_not_shown_as_live() -> None:
    now_s = 100.0
    state = NodeState(NodeInfo(version="1"), {}, state=PhaseState(), clock=lambda: now_s)
    swarm = (peer_row("a", last_seen_s=0.5),)
    report = Report(state=TRAINING, peers=PeersInfo(connected=1, training=2), swarm=swarm)
    state.set_phase(None)
    state.apply_report(report)
    assert [one.last_seen_s for one in state.view(alive=True).swarm] == [0.5]
    now_s += 20.0
    assert [one.last_seen_s for one in state.view(alive=True).swarm] == [20.5], "no report comes"
    state.set_phase(PhaseState(phase=Phase.STARTING, code="worker_crashed"))
    assert (state.view(alive=True).swarm, state.status.peers) == ((), PeersInfo())
    state.worker_started()
    state.apply_report(report)
    state.set_phase(None)
    assert (state.view(alive=True).swarm, state.status.peers) == (swarm, report.peers)


@pytest.mark.parametrize("phase", [Phase.ERROR, Phase.STOPPED])
def test_node_without_a_worker_has_no_peers_and_is_not_reachable(phase: Phase) -> None:
    state = make_state()
    state.set_phase(None)
    state.apply_report(Report(state=TRAINING, peers=PeersInfo(connected=1, training=2), reachability="direct"))
    assert (state.status.peers.connected, state.status.reachability_code) == (1, "not_tested")
    state.set_phase(PhaseState(phase=phase, code="x"))
    status = state.status
    assert (status.peers, status.reachability, status.reachability_code) == (PeersInfo(), "none", "not_tested")
    assert state.view(alive=True).swarm == ()


@pytest.mark.parametrize(("phase", "code"), [(Phase.ERROR, "worker_crashes"), (Phase.PAUSED, "paused")])
def test_status_shows_no_activity_after_the_worker_has_ended(phase: Phase, code: str) -> None:
    state = make_state()
    state.set_phase(None)
    busy = Report(
        state=TRAINING,
        training=TrainingInfo(loss=2.0, tokens_per_second=100.0),
        sync=SyncInfo(stage="reduce", eta_s=3.0),
        devices=(DeviceInfo(kind="cpu", name="some", utilization_ratio=1.0),),
    )
    state.apply_report(busy)
    assert state.status.devices == busy.devices
    state.set_phase(PhaseState(phase=phase, code=code, reason="Repair it.", since=PAUSED.since))
    status = state.status
    assert (status.devices, status.training.tokens_per_second, status.training.loss) == ((), 0.0, 2.0)
    assert (status.sync.stage, status.sync.eta_s) == ("idle", None)


def test_status_callback_receives_changes_only() -> None:
    received: list[Status] = []
    state = make_state(received)
    state.set_phase(None)
    assert received == []
    state.apply_report(Report(state=TRAINING, peer_id="Qm123456789"))
    state.apply_report(Report(state=TRAINING, peer_id="Qm123456789"))
    assert [status.phase for status in received] == [Phase.TRAINING]
    assert received[0].node.name == "456789", "a node without a name is called by the end of its peer id"


def test_slow_status_subscriber_gets_the_newest_status_and_then_the_end() -> None:
    async def main() -> None:
        state = make_state()
        with state.subscribe() as queue:
            first = queue.get_nowait()
            assert first is not None and first.phase is Phase.STARTING
            for number in range(5):
                state.apply_report(Report(run=RunInfo(round=number)))
            newest = queue.get_nowait()
            assert newest is not None and newest.run.round == 4
            assert queue.empty()
            state.close()
            assert queue.get_nowait() is None
            state.apply_report(Report(run=RunInfo(round=9)))
            assert queue.empty()
        with state.subscribe() as late:
            assert late.get_nowait() is None

    asyncio.run(main())


def test_node_state_keeps_a_bounded_number_of_rounds_and_log_records() -> None:
    state = make_state()
    for number in range(ROUNDS_KEPT + 5):
        state.add_round(RoundRecord(round=number, outcome=Outcome.ALONE))
    record = logging.LogRecord("node.x", logging.WARNING, "", 0, "number %d", (7,), None)
    for _ in range(LOGS_KEPT + 5):
        state.add_log(record)
    view = state.view(alive=True)
    assert [r.round for r in view.rounds[:2]] == [ROUNDS_KEPT + 4, ROUNDS_KEPT + 3]
    assert (len(view.rounds), len(view.logs)) == (ROUNDS_KEPT, LOGS_KEPT)
    assert (view.logs[-1].id, view.logs[-1].message) == (LOGS_KEPT + 5, "number 7")
    assert view.log_counts == {"debug": 0, "info": 0, "warning": LOGS_KEPT + 5, "error": 0}


def test_log_handler_of_the_node_state_keeps_round_and_traceback() -> None:
    state = make_state()
    log = logging.getLogger("node.test")
    handler = NodeStateHandler(state)
    log.addHandler(handler)
    try:
        raise RuntimeError("out of cheese")
    except RuntimeError:
        log.critical("failed", exc_info=True, extra={"round": 5})
    finally:
        log.removeHandler(handler)
    line = state.view(alive=True).logs[0]
    assert (line.level, line.round) == ("error", 5)
    assert "out of cheese" in line.message


def test_round_that_is_reported_twice_is_added_once() -> None:
    state = make_state()
    for number in (1, 2, 1):
        state.add_round(RoundRecord(round=number, outcome=Outcome.ALONE, head=f"h{number}"))
    state.add_round(RoundRecord(round=3, outcome=Outcome.FAILED))
    state.add_round(RoundRecord(round=3, outcome=Outcome.FAILED))
    assert [record.round for record in state.view(alive=True).rounds] == [3, 2, 1]
    state.add_round(RoundRecord(round=2, outcome=Outcome.SKIPPED, head="h2", dropped=1))
    state.add_round(RoundRecord(round=2, outcome=Outcome.ALONE, head="h2"))
    assert [record.round for record in state.view(alive=True).rounds] == [2, 2, 3, 2, 1]


def test_failed_attempts_at_one_round_share_a_record() -> None:
    state = make_state()
    state.add_round(RoundRecord(round=0, outcome=Outcome.COMPLETE, head="h0"))
    for number in range(ROUNDS_KEPT + 5):
        started_at = f"2026-01-01T00:00:{number % 60:02}Z"
        state.add_round(RoundRecord(round=1, outcome=Outcome.FAILED, started_at=started_at, reason=f"reason {number}"))
    newest, oldest = state.view(alive=True).rounds
    assert (newest.round, newest.attempts, oldest.head) == (1, ROUNDS_KEPT + 5, "h0")
    assert (newest.started_at, newest.reason) == ("2026-01-01T00:00:00Z", f"reason {ROUNDS_KEPT + 4}")
    state.add_round(RoundRecord(round=2, outcome=Outcome.FAILED))
    assert [record.attempts for record in state.view(alive=True).rounds] == [1, ROUNDS_KEPT + 5, 1]


def test_counters_of_the_node_state_are_those_of_the_newest_report() -> None:
    counters = Counters(tokens_processed=70)
    earlier = SavedCounters(counters=counters, rounds_joined=1, rounds_attempted=2, last_round=3)
    state = NodeState(NodeInfo(), {}, state=PhaseState())
    state.restore_counters(earlier)
    assert state.counters == earlier
    contribution = ContributionInfo(rounds_joined=2, rounds_attempted=3)
    state.apply_report(Report(counters=counters, contribution=contribution), last_round=4)
    assert state.counters == SavedCounters(counters=counters, rounds_joined=2, rounds_attempted=3, last_round=4)


def peers(*versions: str) -> list[PeerRow]:
    own = [("0.2.0", True)]
    return [
        peer_row(str(i), version=version, this_node=this_node)
        for i, (version, this_node) in enumerate([*own, *((version, False) for version in versions)])
    ]


@pytest.mark.parametrize(
    ("versions", "beginning"),
    [
        ((), ""),
        (("0.3.0",), "The other peer runs "),
        (("0.10.0", "0.2.0"), ""),
        (("0.10.0", "0.2.0", "0.3.0rc1"), "2 of 3 peers run "),
        (("0.2.0", "0.1.9", "0.2.0rc1"), ""),
        (("<script>", "1" * 40, "v" * 40, "", "0.3.0"), ""),
        (("<script>",) * 9, ""),
    ],
)
def test_owner_gets_a_notice_if_most_peers_run_a_newer_version(versions: tuple[str, ...], beginning: str) -> None:
    notice = newer_version_notice("0.2.0", peers(*versions))
    assert (notice is not None) is bool(beginning)
    assert notice is None or (notice.text.startswith(beginning) and "<" not in notice.text)
