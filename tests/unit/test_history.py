"""Tests of the history's sampling, its bounded storage, and failures of its file and its disk."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from node.api.metrics import Series, flatten
from node.api.node_interface import SERIES, HistoryUnavailable
from node.daemon import history_database
from node.daemon.history import GAP_S, QUEUE_MAX, REOPEN_S, STEP_S, Clocks, HistoryStore, Sampler
from node.daemon.history_database import (
    COLUMNS,
    DAMAGED,
    FILE,
    ROUNDS_KEPT,
    TIERS,
    HistoryDatabase,
    Row,
    Tier,
)
from node.status import (
    Activity,
    Channel,
    Counters,
    Member,
    Outcome,
    PeerRow,
    PeersInfo,
    Phase,
    PhaseState,
    Report,
    RoundRecord,
    RunInfo,
    Seconds,
    TrainingInfo,
)

PEER = PeerRow(
    peer_id="a", short_id="a", name="A", phase="training", round=3, tokens_per_second=40.0, transport="direct",
    version="1", state_digest="", last_seen_s=1.0,
)  # fmt: skip
START_S = 1_800_000_000.0
DAY_S = 86400


class Machine:
    """A clock that the test advances, and a worker's totals."""

    def __init__(self) -> None:
        self.wall_s = START_S
        self.monotonic_s = 1000.0
        self.counters = Counters()

    def advance(
        self, seconds: float, activity: Activity = Activity.COMPUTE, share: float = 1.0, sent: int = 0, tokens: int = 0
    ) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds
        spent = dict(self.counters.activity_seconds)
        spent[activity] = spent.get(activity, 0.0) + share * seconds
        bytes_sent = self.counters.network_sent_bytes.get(Channel.REDUCE, 0) + sent
        self.counters = Counters(
            activity_seconds=spent,
            network_sent_bytes={Channel.REDUCE: bytes_sent},
            tokens_processed=self.counters.tokens_processed + tokens,
            tokens_merged=self.counters.tokens_processed,  # A round merges what was trained before it.
        )

    def totals(self) -> Series:
        return flatten(self.counters)

    def report_to(self, sampler: Sampler, loss: float | None = None) -> None:
        sampler.add_report(self.wall_s, self.monotonic_s, make_report(loss), self.totals())

    def open(self, folder: Path, *, trains: bool = True) -> HistoryStore:
        return HistoryStore(folder, Clocks(lambda: self.wall_s, lambda: self.monotonic_s), self.totals, trains=trains)

    @contextmanager
    def history(self, folder: Path, *, trains: bool = True) -> Iterator[HistoryStore]:
        history = self.open(folder, trains=trains)
        try:
            yield history
        finally:
            history.close()


@pytest.fixture(autouse=True)
def time_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `close` wait for a disk that other tests keep busy."""
    monkeypatch.setattr("node.daemon.history.CLOSE_S", 30.0)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def sampler(machine: Machine) -> Sampler:
    """A sampler that has received its first report."""
    sampler = Sampler(trains=True)
    machine.report_to(sampler)
    return sampler


def make_report(loss: float | None = None) -> Report:
    return Report(
        state=PhaseState(phase=Phase.TRAINING),
        training=TrainingInfo(loss=loss, tokens_per_second=100.0),
        peers=PeersInfo(training=3),
        swarm=(PEER,),
    )


def make_round(number: int, *, head: str = "", dropped: int = 0, peers: str = "ab") -> RoundRecord:
    members = tuple(Member(peer_id=p, name=p.upper(), weight=10, included=True) for p in peers)
    return RoundRecord(
        round=number,
        outcome=Outcome.SKIPPED if dropped else Outcome.COMPLETE,
        members=() if dropped else members,
        head=head or f"head-{number}",
        dropped=dropped,
        seconds=Seconds(reduce=2.0, blocked=3.0),
    )


def rounds(history: HistoryStore, limit: int = 500) -> list[RoundRecord]:
    return asyncio.run(history.rounds(limit))


def work(history: HistoryStore, since_s: float) -> tuple[float, ...]:
    """Seconds on, rounds, seconds of computing, tokens, and merged tokens since a moment."""
    return tuple(asyncio.run(history.work(since_s)).model_dump().values())


def chart(history: HistoryStore, names: str = "") -> dict[str, Any]:
    found = asyncio.run(history.chart(names.split(",") if names else SERIES, None, 300))
    return {"step_s": found.step_s, "at_s": list(found.at_s)} | {name: list(c) for name, c in found.columns.items()}


# sampling


def test_history_adds_up_activities_and_counts_unaccounted_time_as_idle(machine: Machine, sampler: Sampler) -> None:
    for _ in range(10):
        machine.advance(1.0, Activity.COMPUTE, 0.7, sent=100)
        machine.report_to(sampler, 2.5)
    (row,) = sampler.take(machine.wall_s)
    assert row.at_s == START_S and row.seen_s == pytest.approx(10.0)
    assert row.sums["activity_compute"] == pytest.approx(7.0)
    assert row.sums["activity_idle"] == pytest.approx(3.0)
    assert row.sums["sent_bytes"] == pytest.approx(1000)
    assert (row.means["training_loss"], row.means["swarm_peers"]) == (2.5, 3.0)


def test_history_has_a_gap_instead_of_zero_while_a_figure_is_unknown(machine: Machine, sampler: Sampler) -> None:
    def means(report: Report) -> list[float | None]:
        sampler.add_report(machine.wall_s, machine.monotonic_s, report, flatten(machine.counters))
        machine.advance(1.0)
        sampler.add_report(machine.wall_s, machine.monotonic_s, report, flatten(machine.counters))
        (row,) = sampler.take(None)
        machine.advance(1.0)
        return [row.means[name] for name in ("swarm_peers", "swarm_tokens_per_second", "tokens_per_second")]

    known = make_report()
    assert means(known) == [3.0, 40.0, 100.0]
    connecting = known.model_copy(update={"state": PhaseState(phase=Phase.CONNECTING), "peers": PeersInfo()})
    assert means(connecting)[:2] == [None, None]
    assert means(known.model_copy(update={"swarm": (), "peers": PeersInfo()}))[:2] == [None, None]
    untimed = known.model_copy(update={"training": TrainingInfo()})
    assert means(untimed) == [3.0, 40.0, None]
    paused = untimed.model_copy(update={"state": PhaseState(phase=Phase.PAUSED)})
    assert means(paused) == [3.0, 40.0, 0.0], "the speed of a paused node is known"


@pytest.mark.parametrize(("code", "speeds"), [("waiting_for_peers", [0.0, 40.0]), ("run_paused", [0.0, 0.0])])
def test_history_shows_no_speed_while_nobody_makes_inner_steps(
    machine: Machine, sampler: Sampler, code: str, speeds: list[float]
) -> None:
    idle = make_report().model_copy(
        update={"state": PhaseState(phase=Phase.SYNCING, code=code), "run": RunInfo(is_paused=code == "run_paused")}
    )
    sampler.take(None)
    for _ in range(2):
        sampler.add_report(machine.wall_s, machine.monotonic_s, idle, flatten(machine.counters))
        machine.advance(1.0)
    (row,) = sampler.take(None)
    assert [row.means["tokens_per_second"], row.means["swarm_tokens_per_second"]] == speeds


def test_history_limits_counters_that_jump_to_the_elapsed_time(machine: Machine, sampler: Sampler) -> None:
    machine.advance(4.0, share=50.0)
    machine.report_to(sampler)
    (row,) = sampler.take(None)
    assert row.sums["activity_compute"] == pytest.approx(4.0)
    assert row.sums["activity_idle"] == 0.0


def test_late_report_is_spread_over_its_rows_and_longer_silence_is_a_gap(machine: Machine, sampler: Sampler) -> None:
    machine.advance(25.0)
    machine.report_to(sampler)
    assert [row.seen_s for row in sampler.take(None)] == pytest.approx([10.0, 10.0, 5.0])
    machine.advance(GAP_S + 1)
    machine.report_to(sampler)
    assert sampler.take(None) == []


def test_time_during_which_the_machine_sleeps_is_a_gap_in_the_history(machine: Machine, sampler: Sampler) -> None:
    machine.advance(2.0)
    machine.wall_s += 3600  # The monotonic clock does not advance during sleep.
    machine.report_to(sampler)
    rows = sampler.take(None)
    assert sum(row.seen_s for row in rows) == pytest.approx(2.0)
    assert min(row.at_s for row in rows) >= START_S + 3590


def test_history_loses_nothing_when_the_clock_is_set_back(machine: Machine, sampler: Sampler) -> None:
    for _ in range(5):
        machine.advance(1.0)
        machine.report_to(sampler)
    machine.wall_s -= DAY_S
    machine.report_to(sampler)
    assert [row.at_s for row in sampler.take(machine.wall_s)] == [START_S]


def test_history_of_a_relay_has_no_values_about_training(tmp_path: Path, machine: Machine) -> None:
    with machine.history(tmp_path, trains=False) as history:
        for _ in range(3):
            history.add_report(make_report())
            machine.advance(10.0, Activity.IDLE, sent=50)
        history.add_report(make_report())
        found = chart(history)
    assert set(found["activity_idle"]) == set(found["utilization_ratio"]) == set(found["tokens_per_second"]) == {None}
    assert found["sent_bytes_per_second"] == [5.0, 5.0, 5.0]
    assert found["swarm_peers"] == [3.0, 3.0, 3.0]


def test_loss_that_is_not_finite_is_unknown_in_the_history(machine: Machine, sampler: Sampler) -> None:
    for loss in (None, float("nan"), float("inf")):
        machine.advance(1.0)
        machine.report_to(sampler, loss)
    assert all(row.means["training_loss"] is None for row in sampler.take(None))


def test_merged_history_rows_are_weighted_by_the_time_that_they_cover() -> None:
    one, other = Row(0, 8.0), Row(0, 2.0)
    one.means["training_loss"], other.means["training_loss"] = 1.0, 6.0
    other.means["evaluation_loss"] = 3.0
    one.add(other)
    assert (one.means["training_loss"], one.means["evaluation_loss"], one.seen_s) == (2.0, 3.0, 10.0)


# storage


def test_history_survives_a_restart_and_the_time_off_is_a_gap(tmp_path: Path, machine: Machine) -> None:
    for _ in range(2):
        with machine.history(tmp_path) as history:
            for _ in range(3):
                history.add_report(make_report(1.5))
                machine.advance(10.0, share=0.5)
            history.add_report(make_report(1.5))
        machine.advance(60.0)
    with machine.history(tmp_path) as history:
        found = chart(history, "training_loss,utilization_ratio,activity_idle")
    assert found["step_s"] == 10.0
    assert found["at_s"] == [START_S + 10 * i for i in range(18)]
    assert found["training_loss"] == [1.5] * 3 + [None] * 6 + [1.5] * 3 + [None] * 6
    assert found["utilization_ratio"][:4] == [0.5, 0.5, 0.5, None]
    assert set(found) == {"step_s", "at_s", "training_loss", "utilization_ratio", "activity_idle"}


def test_work_since_a_moment_is_counted_over_a_restart(tmp_path: Path, machine: Machine) -> None:
    for night in range(2):
        with machine.history(tmp_path) as history:
            history.add_report(make_report())
            for number in range(3):
                machine.advance(10.0, share=0.5, tokens=100)
                history.add_round(make_round(10 * night + number))
                history.add_report(make_report())
            if night:
                assert work(history, START_S + 3600) == (30.0, 3, 15.0, 300, 200), "with what is not written yet"
        machine.advance(3600.0)
    with machine.history(tmp_path) as history:
        assert work(history, START_S) == (60.0, 6, 30.0, 600, 400)
        assert work(history, START_S + 3600) == (30.0, 3, 15.0, 300, 200)
        assert work(history, machine.wall_s + 60) == (0.0, 0, 0.0, 0, 0)


def test_history_file_of_version_1_gains_the_tokens_and_keeps_its_rows(tmp_path: Path, machine: Machine) -> None:
    HistoryDatabase(tmp_path).close()
    db = sqlite3.connect(tmp_path / FILE)
    for tier in TIERS:
        for name in ("tokens_processed", "tokens_merged"):
            db.execute(f"ALTER TABLE {tier.table} DROP COLUMN {name}")
        marks = ", ".join("?" * (1 + len(COLUMNS)))
        at = int(START_S // tier.step * tier.step)
        db.execute(f"INSERT INTO {tier.table} VALUES ({marks})", (at, 7.0, 2, *[1.0] * (len(COLUMNS) - 2)))
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()
    machine.advance(10.0)
    with machine.history(tmp_path) as history:
        history.add_report(make_report())
        machine.advance(10.0, tokens=40)
        history.add_report(make_report())
    with machine.history(tmp_path) as history:
        assert work(history, START_S) == (17.0, 2, 11.0, 40, 0)
    assert not (tmp_path / DAMAGED).exists()


def test_round_records_survive_a_restart_and_charts_show_their_mean_seconds(tmp_path: Path, machine: Machine) -> None:
    with machine.history(tmp_path) as history:
        history.add_report(make_report())
        for number in range(4):
            history.add_round(make_round(number))
        history.add_round(RoundRecord(round=4, outcome=Outcome.FAILED))
        machine.advance(10.0)
        history.add_report(make_report())
    with machine.history(tmp_path) as history:
        assert [r.round for r in rounds(history, 3)] == [4, 3, 2]
        found = chart(history, "sync_reduce,sync_blocked,sync_commit")
    assert (found["sync_reduce"], found["sync_blocked"], found["sync_commit"]) == ([2.0], [3.0], [0.0])


def test_round_that_is_reported_again_is_stored_again_only_if_it_was_dropped(tmp_path: Path) -> None:
    database = HistoryDatabase(tmp_path)
    for number in range(5):
        database.add_round(make_round(number, head=f"x{number}"))
    database.add_round(make_round(4, head="x4"))  # After a crash the worker reports this round again.
    assert [r.round for r in database.rounds(9)] == [4, 3, 2, 1, 0]
    database.add_round(make_round(4, head="x4", dropped=2))
    database.add_round(make_round(3, head="x3"))
    database.add_round(make_round(2, head="x2"))
    database.close()
    database = HistoryDatabase(tmp_path)
    assert [(r.round, r.dropped) for r in database.rounds(3)] == [(3, 0), (4, 2), (4, 0)]
    database.close()


def test_each_table_of_the_history_keeps_its_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_database, "TIERS", (Tier(10, 5), Tier(120, 3), Tier(3600, 2)))
    database = HistoryDatabase(tmp_path)
    for i in range(1000):
        database.write([Row(int(START_S) + 10 * i, 10.0)])
    database.close()
    db = sqlite3.connect(tmp_path / FILE)
    counts = [db.execute(f"SELECT count(*), max(at) FROM rows_{step}").fetchone() for step in (10, 120, 3600)]
    db.close()
    assert [count for count, _ in counts] == [5, 3, 2]
    assert counts[0][1] == START_S + 9990


def test_history_keeps_a_bounded_number_of_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROUNDS_KEPT >= 1000
    monkeypatch.setattr(history_database, "ROUNDS_KEPT", 20)
    database = HistoryDatabase(tmp_path)
    for number in range(40):
        database.add_round(make_round(number))
    assert len(database.rounds(100)) == 20
    database.close()


def test_failed_attempts_do_not_displace_committed_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_database, "ROUNDS_KEPT", 20)
    database = HistoryDatabase(tmp_path)
    database.add_round(make_round(0))
    for _ in range(25):
        database.add_round(RoundRecord(round=1, outcome=Outcome.FAILED, reason="rejected"))
    assert [(record.round, record.attempts) for record in database.rounds(100)] == [(1, 25), (0, 1)]
    database.close()


@pytest.fixture(scope="module")
def two_years(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The history file of a node that was on for two years, with the largest possible number of rows."""
    folder = tmp_path_factory.mktemp("history")
    database = HistoryDatabase(folder)
    marks = ", ".join("?" * (3 + len(COLUMNS)))
    for tier in TIERS:
        last = int(START_S) // tier.step * tier.step
        rows = [(last - tier.step * i, float(tier.step), 1, *[0.5] * len(COLUMNS)) for i in range(tier.kept)]
        database._db.executemany(f"INSERT INTO {tier.table} VALUES ({marks})", rows)
    database.close()
    return folder


@pytest.mark.parametrize("since_s", [0.0, -62e9, START_S - 1, START_S - 3600, START_S - DAY_S, START_S + 1e9, None])
@pytest.mark.parametrize("points", [1, 7, 2000])
def test_every_chart_is_evenly_spaced_and_has_a_bounded_number_of_points(
    two_years: Path, since_s: float | None, points: int
) -> None:
    database = HistoryDatabase(two_years)
    began_s = time.thread_time()
    found = database.chart(SERIES, since_s, START_S, points)
    assert time.thread_time() - began_s < 2.0
    database.close()
    assert len(found.at_s) <= points
    assert {len(column) for column in found.columns.values()} == {len(found.at_s)}
    assert set(found.columns) == set(SERIES)
    assert {b - a for a, b in pairwise(found.at_s)} <= {found.step_s}
    if since_s is not None and since_s < START_S - 3600 and points > 7:
        assert all(value is not None for value in found.columns["training_loss"][1:-1])


def test_charts_of_older_times_use_coarser_rows(two_years: Path) -> None:
    assert TIERS[0].step == STEP_S and all(b.step % a.step == 0 for a, b in pairwise(TIERS))
    database = HistoryDatabase(two_years)
    spans = [3600, DAY_S - 100, 10 * DAY_S, 600 * DAY_S]
    found = [database.chart(SERIES, START_S - span, START_S, 2000) for span in spans]
    assert [c.step_s for c in found] == [10.0, 50.0, 480.0, 28800.0]
    database.close()
    assert (two_years / FILE).stat().st_size < 20e6


# failures


@pytest.mark.parametrize("content", [b"not a database at all " * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_damaged_history_file_is_set_aside(
    tmp_path: Path, machine: Machine, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(content)
    with machine.history(tmp_path) as history:
        history.add_round(make_round(1))
        assert [r.round for r in rounds(history)] == [1]
    assert (tmp_path / DAMAGED).read_bytes() == content
    assert [r.levelno for r in caplog.records if "set aside" in r.message] == [logging.WARNING]


def test_history_file_that_is_damaged_while_in_use_is_set_aside(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with machine.history(tmp_path) as history:
        for number in range(200):
            history.add_round(make_round(number))
        assert len(rounds(history)) == 200
    size = (tmp_path / FILE).stat().st_size
    with machine.history(tmp_path) as history:
        rounds(history, 1)
        with (tmp_path / FILE).open("r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * (size - 4096))
        assert history._database is not None
        history._database._db.execute("PRAGMA shrink_memory")  # Otherwise SQLite answers from its cache.
        for number in range(200, 230):
            history.add_round(make_round(number))
        assert rounds(history, 1)[0].round == 229
        assert len(rounds(history)) < 30
    assert (tmp_path / DAMAGED).exists()
    assert "set aside" in caplog.text


def test_full_disk_pauses_the_history_with_one_warning(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with machine.history(tmp_path) as history:
        history.add_round(make_round(0))
        rounds(history, 1)
        assert history._database is not None
        db = history._database._db
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite reports SQLITE_FULL beyond this limit.
        for number in range(1, 200):
            history.add_round(make_round(number, peers="abcdefghijklmnopq"))
        kept = len(rounds(history))
        assert kept < 200
        db.execute("PRAGMA max_page_count = 1000000")
        history.add_round(make_round(200))
        assert len(rounds(history)) == kept + 1
    messages = [r.message for r in caplog.records if r.name == "node.daemon.history"]
    assert (
        sum("is not recorded" in message for message in messages)
        == sum("continues." in message for message in messages)
        >= 1
    )


def test_unusable_history_folder_is_retried(tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "history").write_text("a file where the folder should be")
    with machine.history(tmp_path / "history") as history:
        for number in range(5):
            history.add_round(make_round(number))
        with pytest.raises(HistoryUnavailable):
            rounds(history, 1)
        (tmp_path / "history").unlink()
        machine.monotonic_s += REOPEN_S + 1
        history.add_round(make_round(7))
        assert [r.round for r in rounds(history)] == [7]
    assert sum("is not recorded" in r.message for r in caplog.records) == 1


def test_hanging_disk_blocks_neither_callers_nor_the_closing_of_the_history(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_works = threading.Event()
    monkeypatch.setattr("node.daemon.history.ANSWER_S", 0.2)
    monkeypatch.setattr("node.daemon.history.CLOSE_S", 0.2)
    monkeypatch.setattr(HistoryDatabase, "add_round", lambda self, record: disk_works.wait(30))
    history = machine.open(tmp_path)
    began_s = time.monotonic()
    for number in range(QUEUE_MAX + 50):
        history.add_round(make_round(number))
    with pytest.raises(HistoryUnavailable, match="too slow"):
        rounds(history, 1)
    history.close()
    assert time.monotonic() - began_s < 25, "the disk hangs for 30 s"
    disk_works.set()
    history._thread.join(10)


def test_history_file_of_a_newer_version_is_set_aside_unchanged(tmp_path: Path) -> None:
    HistoryDatabase(tmp_path).close()
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("PRAGMA user_version = 99")
    db.close()
    HistoryDatabase(tmp_path).close()
    db = sqlite3.connect(tmp_path / DAMAGED)
    assert db.execute("PRAGMA user_version").fetchone() == (99,)
    db.close()
