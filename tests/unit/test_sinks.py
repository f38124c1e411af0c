"""What each sink writes is read back by the reader of its package. Without the package, the test is skipped."""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from node.sinks.__main__ import FAILED
from node.sinks.series import NOT_INSTALLED, Point, SinkTarget

POINTS = [
    Point(
        round_, 1000 * (round_ + 1), 1_700_000_000.0 + round_, {"run/training_loss": 5.5 - round_, "node/apply_s": 0.25}
    )
    for round_ in range(3)
]


def write(
    name: str, folder: Path, points: Sequence[Point] = POINTS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Let the process of this sink write the points."""
    target = SinkTarget(str(folder), "a run", "0123456789ab", "my node", "AbCdEfGh")
    lines = "".join(json.dumps(line) + "\n" for line in (asdict(target), *map(asdict, points)))
    command = [sys.executable, "-m", "node.sinks", name]
    environ = {**os.environ, "HOME": str(folder), **variables}
    return subprocess.run(command, input=lines, env=environ, capture_output=True, text=True, timeout=100, check=False)


def assert_written(done: subprocess.CompletedProcess[str], count: int = len(POINTS)) -> None:
    assert (done.returncode, done.stdout) == (0, "written\n" * count), done.stderr


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: install the extra of its sink")


def test_json_lines_has_one_object_for_each_round_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    assert_written(write("jsonl", tmp_path, POINTS[:2]), 2)
    assert_written(write("jsonl", tmp_path, POINTS[2:]), 1)
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert rows == [{"round": p.round, "tokens": p.tokens, "at_s": p.at_s, **p.values} for p in POINTS]


def test_tensorboard_reads_the_curves_by_tokens_and_by_time(tmp_path: Path) -> None:
    package("tensorboard")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    again = Point(3, 2000, 1_700_000_009.0, {"run/training_loss": 1.0})
    assert_written(write("tensorboard", tmp_path, [*POINTS, again]), 4)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "my node-AbCdEfGh"))
    found.Reload()
    losses = [(event.step, event.wall_time, event.value) for event in found.Scalars("run/training_loss")]
    assert losses == [(1000, 1_700_000_000.0, 5.5), (2000, 1_700_000_009.0, 1.0)], "the lost side of a split is gone"
    assert {event.value for event in found.Scalars("node/apply_s")} == {0.25}


def test_tensorboard_keeps_the_round_before_a_pause_of_the_run(tmp_path: Path) -> None:
    package("tensorboard")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    paused = Point(3, POINTS[-1].tokens, 1_700_000_009.0, {"run/members": 2.0, "run/round_tokens": 0.0})
    assert_written(write("tensorboard", tmp_path, [*POINTS, paused]), 4)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "my node-AbCdEfGh"))
    found.Reload()
    assert [event.step for event in found.Scalars("run/training_loss")] == [point.tokens for point in POINTS]


def test_trackio_finds_the_curves_in_its_local_database(tmp_path: Path) -> None:
    package("trackio")
    assert_written(write("trackio", tmp_path, POINTS[:2]), 2)
    assert_written(write("trackio", tmp_path, POINTS[2:]), 1)
    read = (
        "import json; from trackio.sqlite_storage import SQLiteStorage;"
        "print(json.dumps(SQLiteStorage.get_logs('diloco-0123456789ab', 'my node AbCdEfGh')))"
    )
    environ = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run([sys.executable, "-c", read], env=environ, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert [(row["step"], row["tokens"], row["run/training_loss"]) for row in rows] == [
        (1000, 1000, 5.5),
        (2000, 2000, 4.5),
        (3000, 3000, 3.5),
    ]


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline file: a LevelDB log with protobuf messages."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, parts = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _crc, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # Whole, or the last part.
            yield record.FromString(parts)
            parts = b""


def test_weights_and_biases_keeps_the_curves_in_an_offline_file(tmp_path: Path) -> None:
    package("wandb")
    assert_written(write("wandb", tmp_path))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = list(wandb_records(file))
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["tokens"], row["run/training_loss"]) for row in rows] == [(1000, 5.5), (2000, 4.5), (3000, 3.5)]
    assert not any(file.parent.rglob("requirements.txt")), "nothing about this machine"
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.project) == ("0123456789ab-AbCdEfGh", "diloco")


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP collector that answers with a status. Yields its URL, and the bodies that it gets."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_otlp_collector_gets_a_gauge_for_each_curve(tmp_path: Path) -> None:
    package("opentelemetry.exporter.otlp.proto.http")
    service = importlib.import_module("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    with collector() as (url, bodies):
        assert_written(write("otlp", tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_COMPRESSION="none"))
    assert len(bodies) == len(POINTS)
    for point, body in zip(POINTS, bodies, strict=True):
        (resource,) = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
        attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        assert (attributes["diloco.run"], attributes["service.instance.id"]) == ("a run", "AbCdEfGh")
        metrics = {m.name: m.gauge.data_points[0] for scope in resource.scope_metrics for m in scope.metrics}
        values = {name: data.as_double or float(data.as_int) for name, data in metrics.items()}
        assert values["diloco.run.training_loss"] == point.values["run/training_loss"]
        assert values["diloco.run.tokens"] == point.tokens
        assert {data.time_unix_nano for data in metrics.values()} == {int(point.at_s * 1e9)}, "the time of the round"


def test_a_collector_that_refuses_ends_the_sink_with_a_reason(tmp_path: Path) -> None:
    package("opentelemetry.exporter.otlp.proto.http")
    with collector(status=400) as (url, _):
        done = write("otlp", tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert (done.returncode, done.stdout) == (FAILED, "")
    assert "collector" in done.stderr.splitlines()[-1]


def test_a_sink_whose_package_is_missing_says_so_by_its_exit_code(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "tensorboard.py"
    hidden.parent.mkdir()
    hidden.write_text("raise ModuleNotFoundError(\"No module named 'tensorboard'\")\n")
    path = os.pathsep.join([str(hidden.parent), str(Path(__file__).parents[2])])
    done = write("tensorboard", tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (NOT_INSTALLED, "")


def test_a_folder_that_cannot_be_written_ends_the_sink_with_a_reason(tmp_path: Path) -> None:
    done = write("jsonl", tmp_path / "missing")
    assert done.returncode == FAILED
    assert "FileNotFoundError" in done.stderr.splitlines()[-1]


def test_json_lines_drops_a_line_that_a_full_disk_has_cut_off(tmp_path: Path) -> None:
    assert_written(write("jsonl", tmp_path, POINTS[:2]), 2)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "tok')
    assert_written(write("jsonl", tmp_path, POINTS[2:]), 1)
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [p.round for p in POINTS]
