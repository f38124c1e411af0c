"""The sinks: JSON lines, TensorBoard, Trackio, Weights & Biases, and OpenTelemetry.

Each imports its package when it is opened. It writes below `SinkTarget.folder`, and sends nothing to the internet
unless its package's own environment variables say so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from node.sinks.series import Point, SinkTarget

PROJECT = "diloco"
MAX_LINE_BYTES = 2**20
"""More than a line of JSON has."""


class Sink(Protocol):
    """A place for curves. Both calls may block and may raise any exception."""

    def write(self, point: Point) -> None:
        """Write one point so that a crash does not lose it."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class JsonLines:
    """One object per line in `rounds.jsonl`: round, tokens, at_s, and the value of each curve."""

    def __init__(self, target: SinkTarget) -> None:
        path = Path(target.folder) / "rounds.jsonl"
        _drop_partial_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, point: Point) -> None:
        row = {"round": point.round, "tokens": point.tokens, "at_s": point.at_s, **point.values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _drop_partial_line(path: Path) -> None:
    """Remove a last line that a full disk or a kill has cut off. The node writes its point again."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MAX_LINE_BYTES)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)


class TensorBoard:
    """Event files in `tensorboard/`. The step is the number of swarm tokens; the page also shows them by time."""

    def __init__(self, target: SinkTarget) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        name = f"{target.node}-{target.node_id}".replace("/", "_")
        self._writer = EventFileWriter(str(Path(target.folder) / "tensorboard" / name))
        self._tokens = -1

    def write(self, point: Point) -> None:
        if point.values.get("run/round_tokens") == 0:
            return  # In a paused run. The step is that of the last round, whose point the reader would drop.
        if point.tokens <= self._tokens:
            # This node has left its side of a split. The reader then drops the points from these tokens on.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(point, session_log=start)
        self._tokens = point.tokens
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._add(point, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def _add(self, point: Point, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=point.at_s, step=point.tokens, **what))

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """A local database in `trackio/`, or what TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name instead."""

    def __init__(self, target: SinkTarget) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(Path(target.folder) / "trackio"))  # Read when it is imported.
        import trackio

        name = f"{target.node} {target.node_id}"
        self._trackio = trackio
        self._run = trackio.init(
            project=f"{PROJECT}-{target.run_id}",
            name=name,
            config={"run": target.run},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, point: Point) -> None:
        self._run.log({**point.values, "tokens": point.tokens, "round": point.round}, step=point.tokens)

    def close(self) -> None:
        self._trackio.finish()


class WeightsAndBiases:
    """A W&B run in `wandb/`: offline, or as WANDB_MODE says. The curves are drawn over `tokens`."""

    def __init__(self, target: SinkTarget) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=target.folder,
            id=f"{target.run_id}-{target.node_id}",
            name=f"{target.run} {target.node}",
            group=f"{target.run} {target.run_id}",
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
            # Only the curves: nothing about this machine and its programs.
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("*", step_metric="tokens")

    def write(self, point: Point) -> None:
        self._run.log({**point.values, "tokens": point.tokens, "round": point.round, "at_s": point.at_s})

    def close(self) -> None:
        self._run.finish()


class Otlp:
    """OpenTelemetry gauges over OTLP/HTTP, to OTEL_EXPORTER_OTLP_ENDPOINT (http://localhost:4318 by default)."""

    def __init__(self, target: SinkTarget) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import export
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        who = {"service.name": "diloco-node", "service.instance.id": target.node_id, "diloco.node": target.node}
        self._resource = Resource.create(who | {"diloco.run": target.run, "diloco.run_id": target.run_id})
        self._scope = InstrumentationScope("diloco-node")
        self._kinds = export
        self._exporter = OTLPMetricExporter()

    def write(self, point: Point) -> None:
        kinds, at_ns = self._kinds, int(point.at_s * 1e9)
        metrics = []
        for name, value in {**point.values, "run/tokens": point.tokens, "run/round": point.round}.items():
            data = kinds.NumberDataPoint({}, start_time_unix_nano=at_ns, time_unix_nano=at_ns, value=value)
            metrics.append(kinds.Metric(f"diloco.{name.replace('/', '.')}", "", "", kinds.Gauge([data])))
        scope = kinds.ScopeMetrics(self._scope, metrics, schema_url="")
        found = self._exporter.export(
            kinds.MetricsData([kinds.ResourceMetrics(self._resource, [scope], schema_url="")])
        )
        if found is not kinds.MetricExportResult.SUCCESS:
            raise ConnectionError("the collector has not taken the values; is OTEL_EXPORTER_OTLP_ENDPOINT right?")

    def close(self) -> None:
        self._exporter.shutdown()


SINKS: Mapping[str, Callable[[SinkTarget], Sink]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
    "otlp": Otlp,
}
"""Sink by the name in `metrics.sinks`, which is also the name of the extra with its packages."""
