"""The history: what it adds up, what it keeps, and what it does when its file or its disk is at fault."""

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
from node.api.seam import SERIES, HistoryAway
from node.daemon import history as history_module
from node.daemon.history import DAMAGED, FILE, PEERS_KEPT, ROUNDS_KEPT, TIERS, History, Tier
from node.daemon.recorder import QUEUE_MAX, REOPEN_S, Clocks, Recorder
from node.daemon.samples import GAP_S, STEP_S, Row, Sampler
from node.status import (
    Activity,
    Channel,
    Counters,
    Member,
    Outcome,
    PeersInfo,
    Report,
    RoundRecord,
    Seconds,
    TrainingInfo,
)

START_S = 1_800_000_000.0
DAY_S = 86400


class Machine:
    """A clock that tests turn, and a worker's totals."""

    def __init__(self) -> None:
        self.wall_s = START_S
        self.monotonic_s = 1000.0
        self.counters = Counters()

    def pass_(self, seconds: float, doing: Activity = Activity.COMPUTE, share: float = 1.0, sent: int = 0) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds
        spent = dict(self.counters.activity_seconds)
        spent[doing] = spent.get(doing, 0.0) + share * seconds
        bytes_sent = self.counters.network_sent_bytes.get(Channel.REDUCE, 0) + sent
        self.counters = Counters(activity_seconds=spent, network_sent_bytes={Channel.REDUCE: bytes_sent})

    def totals(self) -> Series:
        return flatten(self.counters)

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.wall_s, lambda: self.monotonic_s)


def said(loss: float | None = None) -> Report:
    return Report(training=TrainingInfo(loss=loss, tokens_per_second=100.0), peers=PeersInfo(training=3))


def a_round(number: int, *, head: str = "", tokens: int = 10, dropped: int = 0, peers: str = "ab") -> RoundRecord:
    members = tuple(Member(peer_id=p, name=p.upper(), weight=tokens, included=True) for p in peers)
    return RoundRecord(
        round=number,
        outcome=Outcome.SKIPPED if dropped else Outcome.COMPLETE,
        members=() if dropped else members,
        head=head or f"head-{number}",
        dropped=dropped,
        seconds=Seconds(reduce=2.0, blocked=3.0),
    )


@contextmanager
def recording(folder: Path, machine: Machine, *, trains: bool = True) -> Iterator[Recorder]:
    recorder = Recorder(folder, machine.clocks, trains=trains)
    recorder.totals = machine.totals
    try:
        yield recorder
    finally:
        recorder.close()


def chart(recorder: Recorder, names: str = "", since_s: float | None = None, points: int = 300) -> dict[str, Any]:
    found = asyncio.run(recorder.chart(names.split(",") if names else SERIES, since_s, points))
    return {"step_s": found.step_s, "at_s": list(found.at_s)} | {name: list(c) for name, c in found.columns.items()}


# adding up


def test_shares_of_the_time_add_up_and_what_nobody_accounts_for_is_idle() -> None:
    machine, sampler = Machine(), Sampler(trains=True)
    sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
    for _ in range(10):
        machine.pass_(1.0, Activity.COMPUTE, 0.7, sent=100)
        sampler.told(machine.wall_s, machine.monotonic_s, said(2.5), machine.totals())
    (row,) = sampler.take(machine.wall_s)
    assert (row.at_s, row.seen_s) == (START_S, pytest.approx(10.0))
    assert row.sums["activity_compute"] == pytest.approx(7.0)
    assert row.sums["activity_idle"] == pytest.approx(3.0)
    assert row.sums["sent_bytes"] == pytest.approx(1000)
    assert (row.means["training_loss"], row.means["swarm_peers"]) == (2.5, 3.0)


def test_counters_that_jump_never_make_more_than_the_whole_time() -> None:
    machine, sampler = Machine(), Sampler(trains=True)
    sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
    machine.pass_(4.0, share=50.0)
    sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
    (row,) = sampler.take(None)
    assert row.sums["activity_compute"] == pytest.approx(4.0)
    assert row.sums["activity_idle"] == 0.0


def test_a_report_after_some_silence_is_spread_and_after_a_long_one_there_is_a_gap() -> None:
    machine, sampler = Machine(), Sampler(trains=True)
    sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
    machine.pass_(25.0)
    sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
    assert [row.seen_s for row in sampler.take(None)] == pytest.approx([10.0, 10.0, 5.0])
    machine.pass_(GAP_S + 1)
    sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
    assert sampler.take(None) == []


def test_a_machine_that_sleeps_leaves_a_gap() -> None:
    machine, sampler = Machine(), Sampler(trains=True)
    sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
    machine.pass_(2.0)
    machine.wall_s += 3600  # The monotonic clock stands still meanwhile.
    sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
    rows = sampler.take(None)
    assert sum(row.seen_s for row in rows) == pytest.approx(2.0)
    assert min(row.at_s for row in rows) >= START_S + 3590


def test_a_clock_that_is_set_back_loses_nothing_and_stops_nothing() -> None:
    machine, sampler = Machine(), Sampler(trains=True)
    for _ in range(5):
        sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
        machine.pass_(1.0)
    machine.wall_s -= DAY_S
    sampler.told(machine.wall_s, machine.monotonic_s, said(), machine.totals())
    assert [row.at_s for row in sampler.take(machine.wall_s)] == [START_S]


def test_what_does_not_apply_to_a_relay_is_unknown(tmp_path: Path) -> None:
    machine = Machine()
    with recording(tmp_path, machine, trains=False) as recorder:
        for _ in range(3):
            recorder.told(said())
            machine.pass_(10.0, Activity.IDLE, sent=50)
        recorder.told(said())
        found = chart(recorder)
    assert set(found["activity_idle"]) == set(found["utilization_ratio"]) == set(found["tokens_per_second"]) == {None}
    assert found["sent_bytes_per_second"] == [5.0, 5.0, 5.0]
    assert found["swarm_peers"] == [3.0, 3.0, 3.0]


def test_a_loss_that_is_no_number_is_unknown() -> None:
    machine, sampler = Machine(), Sampler(trains=True)
    for loss in (None, float("nan"), float("inf")):
        sampler.told(machine.wall_s, machine.monotonic_s, said(loss), machine.totals())
        machine.pass_(1.0)
    assert all(row.means["training_loss"] is None for row in sampler.take(None))


def test_rows_of_one_time_merge_by_the_time_they_saw() -> None:
    one, other = Row(0, 8.0), Row(0, 2.0)
    one.means["training_loss"], other.means["training_loss"] = 1.0, 6.0
    other.means["evaluation_loss"] = 3.0
    one.add(other)
    assert (one.means["training_loss"], one.means["evaluation_loss"], one.seen_s) == (2.0, 3.0, 10.0)


# over restarts


def test_history_survives_a_restart_and_time_off_is_a_gap(tmp_path: Path) -> None:
    machine = Machine()
    for _ in range(2):
        with recording(tmp_path, machine) as recorder:
            for _ in range(3):
                recorder.told(said(1.5))
                machine.pass_(10.0, share=0.5)
            recorder.told(said(1.5))
        machine.pass_(60.0)
    with recording(tmp_path, machine) as recorder:
        found = chart(recorder, "training_loss,utilization_ratio,activity_idle")
    assert found["step_s"] == 10.0
    assert found["at_s"] == [START_S + 10 * i for i in range(18)]
    assert found["training_loss"] == [1.5] * 3 + [None] * 6 + [1.5] * 3 + [None] * 6
    assert found["utilization_ratio"][:4] == [0.5, 0.5, 0.5, None]
    assert set(found) == {"step_s", "at_s", "training_loss", "utilization_ratio", "activity_idle"}


def test_round_records_survive_and_their_seconds_are_means(tmp_path: Path) -> None:
    machine = Machine()
    with recording(tmp_path, machine) as recorder:
        recorder.told(said())
        for number in range(4):
            recorder.add_round(a_round(number))
        recorder.add_round(RoundRecord(round=4, outcome=Outcome.FAILED))
        machine.pass_(10.0)
        recorder.told(said())
    with recording(tmp_path, machine) as recorder:
        assert [r.round for r in asyncio.run(recorder.rounds(3))] == [4, 3, 2]
        found = chart(recorder, "sync_reduce,sync_blocked,sync_commit")
    assert (found["sync_reduce"], found["sync_blocked"], found["sync_commit"]) == ([2.0], [3.0], [0.0])


def test_what_each_peer_gave_is_counted_once_and_not_for_rounds_that_were_dropped(tmp_path: Path) -> None:
    history = History(tmp_path)
    for number in range(5):
        history.add_round(a_round(number, head=f"x{number}"))
    history.add_round(a_round(4, head="x4"))  # Told again after a crash.
    assert [(s.peer_id, s.rounds, s.tokens, s.last_round) for s in history.shares(9)] == [
        ("a", 5, 50, 4), ("b", 5, 50, 4),
    ]  # fmt: skip
    history.add_round(a_round(4, head="x4", dropped=2))
    history.add_round(a_round(3, head="y3", peers="bc", tokens=7))
    history.close()
    history = History(tmp_path)
    assert [(s.peer_id, s.rounds, s.tokens) for s in history.shares(9)] == [("b", 4, 37), ("a", 3, 30), ("c", 1, 7)]
    assert [(r.round, r.dropped) for r in history.rounds(3)] == [(3, 0), (4, 2), (4, 0)]
    history.close()


# bounds


def test_each_table_keeps_its_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "TIERS", (Tier(10, 5), Tier(120, 3), Tier(3600, 2)))
    history = History(tmp_path)
    for i in range(1000):
        history.write([Row(int(START_S) + 10 * i, 10.0)])
    db = sqlite3.connect(":memory:")
    history.close()
    db = sqlite3.connect(tmp_path / FILE)
    counts = [db.execute(f"SELECT count(*), max(at) FROM rows_{step}").fetchone() for step in (10, 120, 3600)]
    db.close()
    assert [count for count, _ in counts] == [5, 3, 2]
    assert counts[0][1] == START_S + 9990


def test_rounds_and_peers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROUNDS_KEPT >= 1000
    monkeypatch.setattr(history_module, "ROUNDS_KEPT", 20)
    monkeypatch.setattr(history_module, "PEERS_KEPT", 10)
    history = History(tmp_path)
    for number in range(40):
        history.add_round(a_round(number, peers="a" + chr(1000 + number)))
    assert len(history.rounds(PEERS_KEPT)) == 20
    shares = history.shares(PEERS_KEPT)
    assert len(shares) == 10
    assert (shares[0].peer_id, shares[0].rounds) == ("a", 40)
    history.close()


@pytest.fixture(scope="module")
def two_years(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a node that has always been on: as many rows as there can be."""
    folder = tmp_path_factory.mktemp("history")
    history = History(folder)
    end = int(START_S)
    columns = ", ".join("?" * (3 + len(history_module.COLUMNS)))
    for tier in TIERS:
        last = end // tier.step * tier.step
        rows = [
            (last - tier.step * i, float(tier.step), 1, *[0.5] * len(history_module.COLUMNS)) for i in range(tier.kept)
        ]
        history._db.executemany(f"INSERT INTO {tier.table} VALUES ({columns})", rows)
    history.close()
    return folder


@pytest.mark.parametrize("since_s", [0.0, -62e9, START_S - 1, START_S - 3600, START_S - DAY_S, START_S + 1e9, None])
@pytest.mark.parametrize("points", [1, 7, 2000])
def test_whatever_is_asked_for_the_answer_is_bounded_and_even(
    two_years: Path, since_s: float | None, points: int
) -> None:
    history = History(two_years)
    began_s = time.thread_time()
    found = history.chart(SERIES, since_s, START_S, points)
    took_s = time.thread_time() - began_s
    history.close()
    assert took_s < 2.0
    assert len(found.at_s) <= points
    assert {len(column) for column in found.columns.values()} == {len(found.at_s)}
    assert set(found.columns) == set(SERIES)
    steps = {b - a for a, b in pairwise(found.at_s)}
    assert steps <= {found.step_s}
    if since_s is not None and since_s < START_S - 3600 and points > 7:
        assert all(value is not None for value in found.columns["training_loss"][1:-1])


def test_old_times_are_told_by_coarser_rows(two_years: Path) -> None:
    history = History(two_years)
    spans = [3600, DAY_S - 100, 10 * DAY_S, 600 * DAY_S]
    found = [history.chart(SERIES, START_S - span, START_S, 2000) for span in spans]
    assert [c.step_s for c in found] == [10.0, 50.0, 480.0, 28800.0]
    history.close()
    assert (two_years / FILE).stat().st_size < 20e6


# faults


@pytest.mark.parametrize("rubbish", [b"not a database at all " * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_set_aside_and_a_new_one_begun(
    tmp_path: Path, rubbish: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(rubbish)
    machine = Machine()
    with recording(tmp_path, machine) as recorder:
        recorder.add_round(a_round(1))
        assert [r.round for r in asyncio.run(recorder.rounds(9))] == [1]
    assert (tmp_path / DAMAGED).read_bytes() == rubbish
    assert [r.levelno for r in caplog.records if "set aside" in r.message] == [logging.WARNING]


def test_a_file_that_is_damaged_while_in_use_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    with recording(tmp_path, machine) as recorder:
        for number in range(200):
            recorder.add_round(a_round(number))
        assert len(asyncio.run(recorder.rounds(500))) == 200
    size = (tmp_path / FILE).stat().st_size
    with recording(tmp_path, machine) as recorder:
        asyncio.run(recorder.rounds(1))
        with (tmp_path / FILE).open("r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * (size - 4096))
        assert recorder._history is not None
        recorder._history._db.execute("PRAGMA shrink_memory")  # Else it would not look at the file for long.
        for number in range(200, 230):
            recorder.add_round(a_round(number))
        assert asyncio.run(recorder.rounds(1))[0].round == 229
        assert len(asyncio.run(recorder.rounds(500))) < 30
    assert (tmp_path / DAMAGED).exists()
    assert "set aside" in caplog.text


def test_a_full_disk_pauses_the_history_with_one_warning_and_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine()
    with recording(tmp_path, machine) as recorder:
        recorder.add_round(a_round(0))
        asyncio.run(recorder.rounds(1))
        assert recorder._history is not None
        db = recorder._history._db
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to SQLITE_FULL.
        for number in range(1, 200):
            recorder.add_round(a_round(number, peers="abcdefghijklmnopq"))
        kept = len(asyncio.run(recorder.rounds(500)))
        assert kept < 200
        db.execute("PRAGMA max_page_count = 1000000")
        recorder.add_round(a_round(200))
        assert len(asyncio.run(recorder.rounds(500))) == kept + 1
    said_ = [r.message for r in caplog.records if r.name == "node.daemon.recorder"]
    assert sum("pauses" in message for message in said_) == sum("goes on." in message for message in said_) >= 1


def test_a_folder_that_cannot_be_had_is_tried_again_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "history").write_text("a file where the folder should be")
    machine = Machine()
    with recording(tmp_path / "history", machine) as recorder:
        for number in range(5):
            recorder.add_round(a_round(number))
        with pytest.raises(HistoryAway):
            asyncio.run(recorder.rounds(1))
        (tmp_path / "history").unlink()
        machine.monotonic_s += REOPEN_S + 1
        recorder.add_round(a_round(7))
        assert [r.round for r in asyncio.run(recorder.rounds(9))] == [7]
    assert sum("pauses" in r.message for r in caplog.records) == 1


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    let_go = threading.Event()
    monkeypatch.setattr("node.daemon.recorder.ANSWER_S", 0.2)
    monkeypatch.setattr("node.daemon.recorder.CLOSE_S", 0.2)
    monkeypatch.setattr(History, "add_round", lambda self, record: let_go.wait(30))
    recorder = Recorder(tmp_path, machine.clocks, trains=True)
    recorder.totals = machine.totals
    began_s = time.monotonic()
    for number in range(QUEUE_MAX + 50):
        recorder.add_round(a_round(number))
    with pytest.raises(HistoryAway, match="too slow"):
        asyncio.run(recorder.rounds(1))
    recorder.close()
    assert time.monotonic() - began_s < 25, "the disk hangs for 30 s"
    let_go.set()
    recorder._thread.join(10)


def test_a_newer_version_s_file_is_left_as_it_is_and_set_aside(tmp_path: Path) -> None:
    History(tmp_path).close()
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("PRAGMA user_version = 99")
    db.close()
    History(tmp_path).close()
    db = sqlite3.connect(tmp_path / DAMAGED)
    assert db.execute("PRAGMA user_version").fetchone() == (99,)
    db.close()


def test_the_steps_fit_into_each_other() -> None:
    assert TIERS[0].step == STEP_S
    assert all(b.step % a.step == 0 for a, b in pairwise(TIERS))
