"""The node in Prometheus' words, on a registry of its own. Knows names, types and labels; knows no worker, no HTTP.

Gauges are read from the node's view at each scrape, counters come as totals from the worker, durations one by one. All
label sets exist from the start; labels never carry peer ids, addresses or serials.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from node.api.seam import Space, View
from node.status import (
    FAILURE_REASONS,
    REACHABILITIES,
    REJECT_REASONS,
    TRANSPORTS,
    Activity,
    Channel,
    Counters,
    Outcome,
    Phase,
    Report,
    Stage,
)

logger = logging.getLogger(__name__)

STEP_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SYNC_BUCKETS_S = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

UNSETTLED = frozenset({Phase.STARTING, Phase.CONNECTING, Phase.DOWNLOADING})
"""A worker in these may not have read its checkpoint yet."""
STAGES = tuple(stage.value for stage in Stage)

Series = dict[tuple[str, str], float]
"""(counter without prefix and `_total`, label value or empty) -> total."""

COUNTERS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("activity_seconds", "Wall time of the trainer by activity; utilisation is its rate.", "activity", tuple(Activity)),
    ("tokens_processed", "Tokens that this node trained on.", "", ()),
    ("tokens_merged", "Tokens of this node that are in the records of rounds.", "", ()),
    ("tokens_discarded", "Tokens of this node that never will be in one.", "", ()),
    ("forwarded_bytes", "Bytes of contributions that were sent for members on slow lines.", "", ()),
    ("inner_steps", "Inner steps of this node.", "", ()),
    ("skipped_steps", "Inner steps whose loss or gradient was no finite number.", "", ()),
    ("sync_rounds", "Rounds by result.", "result", tuple(Outcome)),
    ("sync_failures", "Rounds without a result for this node, by reason.", "reason", FAILURE_REASONS),
    ("contribution_carried", "Contributions that were carried into the next round.", "", ()),
    ("digest_mismatch", "Times this node found itself off the chain of rounds.", "", ()),
    ("peer_rejected", "Messages and contributions of peers that were rejected.", "reason", REJECT_REASONS),
    ("network_sent_bytes", "Bytes sent to the swarm.", "channel", tuple(Channel)),
    ("network_received_bytes", "Bytes received from the swarm.", "channel", tuple(Channel)),
)


@dataclass(frozen=True, slots=True)
class Build:
    """What `build_info` says."""

    version: str
    revision: str = ""
    torch: str = ""
    hivemind: str = ""


def flatten(counters: Counters) -> Series:
    """Every series of `COUNTERS`, with 0 where the worker has nothing to tell; unknown reasons join the general one."""
    series: Series = {(name, value): 0.0 for name, _help, _label, values in COUNTERS for value in values or ("",)}
    told: tuple[tuple[str, Mapping[str, float], str], ...] = (
        ("activity_seconds", {k.value: v for k, v in counters.activity_seconds.items()}, ""),
        ("tokens_processed", {"": counters.tokens_processed}, ""),
        ("tokens_merged", {"": counters.tokens_merged}, ""),
        ("tokens_discarded", {"": counters.tokens_discarded}, ""),
        ("forwarded_bytes", {"": counters.forwarded_bytes}, ""),
        ("inner_steps", {"": counters.inner_steps}, ""),
        ("skipped_steps", {"": counters.skipped_steps}, ""),
        ("sync_rounds", {k.value: v for k, v in counters.sync_rounds.items()}, ""),
        ("sync_failures", counters.sync_failures, "round_failed"),
        ("contribution_carried", {"": counters.contributions_carried}, ""),
        ("digest_mismatch", {"": counters.digest_mismatches}, ""),
        ("peer_rejected", counters.peers_rejected, "bad_message"),
        ("network_sent_bytes", {k.value: v for k, v in counters.network_sent_bytes.items()}, ""),
        ("network_received_bytes", {k.value: v for k, v in counters.network_received_bytes.items()}, ""),
    )
    for name, values, general in told:
        for value, total in values.items():
            series[(name, value) if (name, value) in series else (name, general)] += total
    return series


class Totals:
    """Totals that never fall and count nothing twice, over workers that each go on from a checkpoint, or from nothing.

    A worker first tells totals from zero, and those of its checkpoint once it has read it. So each worker is tied twice
    to what was told before: at its first report, and at its first settled one.
    """

    def __init__(self, known: Counters) -> None:
        """`known`: from before this process, else Prometheus would take the first worker's word for an increase."""
        self._told = flatten(Counters())
        self._base = flatten(known)
        self._tied = self._settled = False

    def worker_started(self) -> None:
        self._tied = self._settled = False

    def told(self, counters: Counters, *, settled: bool) -> None:
        """`settled`: the worker is past reading its checkpoint."""
        before, fresh = self.read(), flatten(counters)
        if not self._tied or (settled and not self._settled):
            self._base = {key: max(0.0, before[key] - total) for key, total in fresh.items()}
        else:
            for key, total in fresh.items():
                self._base[key] += max(0.0, self._told[key] - total)
        self._told, self._tied, self._settled = fresh, True, self._settled or settled

    def read(self) -> Series:
        return {key: self._base[key] + total for key, total in self._told.items()}


class Metrics(Collector):
    """Everything on `/metrics`."""

    def __init__(
        self,
        build: Build,
        view: Callable[[], View],
        *,
        space: Callable[[], Space],
        known: Counters,
    ) -> None:
        """`view` and `space` are called at scrapes, so they may not wait for anything. `known`: what the node had done
        before this process."""
        self._build = build
        self._view = view
        self._space = space
        self._totals = Totals(known)
        self._last_sync_at_s = known.last_sync_at_s
        self._registry = CollectorRegistry()
        self._step = Histogram(
            "diloco_inner_step_duration_seconds",
            "Wall time of one inner step.",
            buckets=STEP_BUCKETS_S,
            registry=None,
        )
        self._sync = _by_stage("diloco_sync_duration_seconds", "Wall time of a round's sync, by stage.")
        self._blocked = _by_stage("diloco_sync_blocked_seconds", "Time the trainer stood still, by stage.")
        self._registry.register(self)

    def worker_started(self) -> None:
        """Another worker's totals follow."""
        self._totals.worker_started()

    def told(self, report: Report) -> None:
        self._totals.told(report.counters, settled=report.state.phase not in UNSETTLED)
        self._last_sync_at_s = max(self._last_sync_at_s, report.counters.last_sync_at_s)

    def totals(self) -> Series:
        """Of all counters, over workers."""
        return self._totals.read()

    def observe(self, seconds: Mapping[str, Iterable[float]]) -> None:
        """Durations under the keys of `link.Observed`."""
        for key, values in seconds.items():
            kind, _, stage = key.partition(".")
            by_stage = {"sync": self._sync, "blocked": self._blocked}.get(kind)
            if key == "inner_step":
                histogram = self._step
            elif by_stage is not None and stage in STAGES:
                histogram = by_stage.labels(stage)
            else:
                logger.warning("The worker observed %r, which is no histogram", key)
                continue
            for value in values:
                histogram.observe(value)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield _gauge(
            "build_info",
            "Versions of this node; always 1.",
            {(self._build.version, self._build.revision, self._build.torch, self._build.hivemind): 1.0},
            ("version", "revision", "torch", "hivemind"),
        )
        totals = self._totals.read()
        for name, text, label, values in COUNTERS:
            yield _counter(name, text, {value: totals[(name, value)] for value in values or ("",)}, label)
        yield _counter("log_messages", "Log records by level.", view.log_counts, "level")
        for histogram in (self._step, self._sync, self._blocked):
            for family in histogram.collect():
                # The library adds a `_created` series to each; nobody was promised it.
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family
        yield from _state_gauges(view)
        yield from _swarm_gauges(view)
        yield _gauge("last_sync_timestamp_seconds", "Unix time of the last commit; 0 before.", self._last_sync_at_s)
        yield from _gpus(view)
        space = self._space()
        yield _one("disk_used_bytes", "Bytes in the data folder.", "kind", space.used_bytes)
        free = "Bytes that the node may still fill on its data folder's disk."
        yield _gauge("disk_free_bytes", free, space.free_bytes)
        yield _gauge("disk_size_bytes", "Bytes of that disk.", space.size_bytes)


def _state_gauges(view: View) -> Iterator[Metric]:
    status, training = view.status, view.status.training
    phases = {phase.value: float(phase is status.phase) for phase in Phase}
    yield _one("node_phase", "1 for the present phase.", "phase", phases)
    yield _gauge(
        "compute_utilization_ratio",
        "Compute / wall of the last complete round; NaN before it.",
        status.compute_utilization_ratio,
    )
    yield _gauge("training_loss", "Loss of the last inner step, nats per token; NaN before it.", training.loss)
    yield _gauge(
        "evaluation_loss", "Loss of the anchor on the held-out split; NaN before it.", training.evaluation_loss
    )
    yield _gauge("learning_rate", "Inner learning rate.", training.learning_rate)


def _swarm_gauges(view: View) -> Iterator[Metric]:
    status, run = view.status, view.status.run
    yield _gauge("local_round", "Last round committed here; -1 before the first.", run.round)
    yield _gauge("swarm_round", "Highest committed round that a live peer claims.", run.swarm_round)
    tokens = run.swarm_tokens if run.swarm_tokens or run.state_digest else None
    yield _gauge("swarm_tokens", "Tokens of the whole swarm in committed rounds; NaN while unknown.", tokens)
    transports = [row.transport for row in view.swarm if not row.this_node]
    yield _one("peers", "Connected peers.", "transport", {t: float(transports.count(t)) for t in TRANSPORTS})
    yield _gauge("swarm_peers", "Live members that train, this node included.", status.peers.training)
    last = status.sync.last
    members = sum(member.included for member in last.members) if last is not None else 0
    yield _gauge("round_members", "Contributors of the last round.", members)
    reached = {word: float(word == status.reachability) for word in REACHABILITIES}
    yield _one("reachability", "1 for how others reach this node.", "status", reached)


def _by_stage(name: str, text: str) -> Histogram:
    histogram = Histogram(name, text, ("stage",), buckets=SYNC_BUCKETS_S, registry=None)
    for stage in STAGES:
        histogram.labels(stage)
    return histogram


def _gpus(view: View) -> Iterator[Metric]:
    """Series exist only for the GPUs that are there, and for what they tell."""
    gpus = [device for device in view.status.devices if device.kind == "cuda"]
    told: tuple[tuple[str, str, list[float | None]], ...] = (
        ("gpu_utilization_ratio", "Busy share of the GPU.", [g.utilization_ratio for g in gpus]),
        ("gpu_memory_used_bytes", "GPU memory in use.", [g.memory_used_bytes for g in gpus]),
        ("gpu_memory_size_bytes", "GPU memory.", [g.memory_size_bytes for g in gpus]),
        ("gpu_temperature_celsius", "GPU temperature.", [g.temperature_celsius for g in gpus]),
    )
    for name, text, values in told:
        yield _one(name, text, "gpu", {str(i): v for i, v in enumerate(values) if v is not None})
    energies = {str(i): g.energy_joules for i, g in enumerate(gpus) if g.energy_joules is not None}
    yield _counter("gpu_energy_joules", "Energy that the GPU used.", energies, "gpu")


def _gauge(
    name: str,
    text: str,
    value: Mapping[tuple[str, ...], float] | float | None,
    labels: tuple[str, ...] = (),
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"diloco_{name}", text, labels=labels)
    values = value if isinstance(value, Mapping) else {(): math.nan if value is None else value}
    for label_values, number in values.items():
        family.add_metric(label_values, number)
    return family


def _one(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    """A gauge with one label."""
    return _gauge(name, text, {(value,): number for value, number in values.items()}, (label,))


def _counter(name: str, text: str, values: Mapping[str, float], label: str) -> CounterMetricFamily:
    family = CounterMetricFamily(f"diloco_{name}", text, labels=(label,) if label else ())
    for value, number in values.items():
        family.add_metric((value,) if label else (), number)
    return family
