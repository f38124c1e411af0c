"""The log file is bounded, shows phase and round in its lines, and never blocks its callers."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest

from node.daemon import log_handlers
from node.daemon.log_handlers import FILE, FILES, RECORDS_WAITING_MAX, LogFile
from node.host.logs import Stamp


@pytest.fixture(autouse=True)
def time_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `close` wait for a disk that other tests keep busy."""
    monkeypatch.setattr(log_handlers, "CLOSE_S", 30.0)


def record(message: str, **extra: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "node.x", "levelno": 20, "levelname": "INFO", "msg": message, **extra})


def test_log_file_in_json_has_phase_and_round_in_every_line(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs", "json")
    log.addFilter(Stamp(lambda: ("training", 7)))
    log.handle(record("one"))
    log.handle(record("two", round=3))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "logs" / FILE).read_text().splitlines()]
    assert [(x["message"], x["phase"], x["round"]) for x in lines] == [("one", "training", 7), ("two", "training", 3)]


def test_log_file_in_text_has_day_phase_and_round_in_every_line(tmp_path: Path) -> None:
    log = LogFile(tmp_path, "console")
    log.addFilter(Stamp(lambda: ("paused", None)))
    log.handle(record("one"))
    log.handle(record("two", round=3))
    log.close()
    one, two = (tmp_path / FILE).read_text().splitlines()
    assert one.endswith("INFO    node.x: [paused] one")
    assert two.endswith("[paused, round 3] two")
    assert one[:4].isdigit() and one[4] == "-"


def test_total_size_of_all_log_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_handlers, "LOG_BYTES_MAX", 40_000)
    log = LogFile(tmp_path, "json")
    for number in range(1500):
        log.handle(record(f"{number} " + "x" * 100))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [FILE, *(f"{FILE}.{i}" for i in range(1, FILES))]
    assert sum(file.stat().st_size for file in files) <= 40_000
    assert "1499 x" in (tmp_path / FILE).read_text()


def test_unwritable_log_folder_is_reported_once_and_used_after_it_is_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("in the way")
    log = LogFile(tmp_path / "logs", "json")
    for _ in range(5):
        log.handle(record("lost"))
    end_s = time.monotonic() + 10
    while "is paused" not in caplog.text and time.monotonic() < end_s:
        time.sleep(0.01)
    (tmp_path / "logs").unlink()
    log.handle(record("found"))
    log.close()
    assert caplog.text.count("is paused") == 1
    assert "found" in (tmp_path / "logs" / FILE).read_text()


def test_hanging_disk_blocks_neither_callers_nor_the_closing_of_the_log_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_works = threading.Event()
    monkeypatch.setattr(log_handlers, "CLOSE_S", 0.2)
    monkeypatch.setattr(log_handlers._RotatingFile, "emit", lambda self, record: disk_works.wait(30))
    log = LogFile(tmp_path, "json")
    began_s = time.monotonic()
    for _ in range(RECORDS_WAITING_MAX + 100):
        log.handle(record("x"))
    log.close()
    assert time.monotonic() - began_s < 25, "the disk hangs for 30 s"
    disk_works.set()
    for thread in threading.enumerate():
        if thread.name == "logfile-stop":
            thread.join(10)


def test_dropped_log_records_are_counted_when_the_disk_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk_works, file = threading.Event(), tmp_path / FILE
    write = log_handlers._RotatingFile.emit

    def emit(self: log_handlers._RotatingFile, record: logging.LogRecord) -> None:
        disk_works.wait(30)
        write(self, record)

    monkeypatch.setattr(log_handlers._RotatingFile, "emit", emit)
    log = LogFile(tmp_path, "json")
    for _ in range(RECORDS_WAITING_MAX + 100):
        log.handle(record("x"))
    disk_works.set()
    end_s = time.monotonic() + 10
    while not (file.exists() and file.read_text().count("\n") >= RECORDS_WAITING_MAX) and time.monotonic() < end_s:
        time.sleep(0.01)
    log.handle(record("after"))
    log.close()
    (line,) = [line for line in caplog.messages if "lacks" in line]
    assert 90 <= int(line.split()[4]) <= 100, "one record may be at the disk already"
