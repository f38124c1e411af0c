"""Prometheus metrics of one node, on their own registry.

Gauges are read from the node's view at each scrape. The worker reports counters as totals and durations one by one.
All label sets exist from the start, and no label carries a peer id, an address or a serial number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from node.api.node_interface import ProcessUsage, Space, View
from node.status import (
    AMENDMENT_REFUSALS,
    FAILURE_REASONS,
    PUBLISH_RESULTS,
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

STEP_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SYNC_BUCKETS_S = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
STAGES = tuple(stage.value for stage in Stage)
NO_RUN = "no run yet"
"""The run of a node that does not know its manifest."""

Series = dict[tuple[str, str], float]
"""Totals by the counter's name (without prefix and `_total`) and the label's value (empty without a label)."""


@dataclass(frozen=True, slots=True)
class CounterSpec:
    """One counter: its name without prefix and suffix, help text, label, and the field of `Counters` with its total."""

    name: str
    text: str
    field: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    """All values of the label."""
    fallback: str = ""
    """The label value under which unknown values are counted."""


# fmt: off
COUNTERS = (
    CounterSpec("activity_seconds", "Wall time of the trainer by activity; utilisation is its rate.",
                "activity_seconds", "activity", tuple(Activity)),
    CounterSpec("tokens_processed", "Tokens that this node trained on.", "tokens_processed"),
    CounterSpec("tokens_merged", "Tokens of this node that are in round records.", "tokens_merged"),
    CounterSpec("tokens_discarded", "Tokens of this node that no round record will include.", "tokens_discarded"),
    CounterSpec("forwarded_bytes", "Bytes of contributions forwarded for members on slow links.", "forwarded_bytes"),
    CounterSpec("inner_steps", "Inner steps of this node.", "inner_steps"),
    CounterSpec("skipped_steps", "Inner steps whose loss or gradient was not finite.", "skipped_steps"),
    CounterSpec("sync_rounds", "Rounds by result.", "sync_rounds", "result", tuple(Outcome)),
    CounterSpec("sync_failures", "Rounds without a result for this node, by reason.",
                "sync_failures", "reason", FAILURE_REASONS, "round_failed"),
    CounterSpec("contribution_carried", "Contributions carried over into the next round.", "contributions_carried"),
    CounterSpec("digest_mismatch", "Times that this node's state was not on the chain of rounds.", "digest_mismatches"),
    CounterSpec("peer_rejected", "Messages and contributions of peers that were rejected.",
                "peers_rejected", "reason", REJECT_REASONS, "bad_message"),
    CounterSpec("publications", "Tries to publish a round at this node, by their result.",
                "publications", "result", PUBLISH_RESULTS, "failed"),
    CounterSpec("amendments_refused", "Amendments of the run that this node has refused, by reason.",
                "amendments_refused", "reason", AMENDMENT_REFUSALS, "invalid"),
    CounterSpec("network_sent_bytes", "Bytes sent to the swarm.", "network_sent_bytes", "channel", tuple(Channel)),
    CounterSpec("network_received_bytes", "Bytes received from the swarm.",
                "network_received_bytes", "channel", tuple(Channel)),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Build:
    """The labels of `build_info`."""

    version: str
    revision: str = ""
    torch: str = ""
    hivemind: str = ""


def flatten(counters: Counters) -> Series:
    """Return every series of `COUNTERS`, including those at zero."""
    series: Series = {}
    for spec in COUNTERS:
        series.update({(spec.name, value): 0.0 for value in spec.values})
        totals = getattr(counters, spec.field)
        for value, total in (totals if spec.label else {"": totals}).items():
            series[(spec.name, value if value in spec.values else spec.fallback)] += total
    return series


class Metrics(Collector):
    """All metrics on `/metrics`."""

    def __init__(
        self,
        build: Build,
        view: Callable[[], View],
        *,
        space: Callable[[], Space],
        known: Counters,
        processes: Callable[[], ProcessUsage] = ProcessUsage,
    ) -> None:
        """`view`, `space` and `processes` are called at each scrape and must not wait. `known` are the counters from
        before this process."""
        self._build = build
        self._view = view
        self._space, self._processes = space, processes
        self._restarts = 0
        self._totals = flatten(known)
        self._last_sync_at_s = known.last_sync_at_s
        self._step = Histogram(
            "diloco_inner_step_duration_seconds",
            "Wall time of one inner step.",
            buckets=STEP_BUCKETS_S,
            registry=None,
        )
        self._sync = _histogram_by_stage("diloco_sync_duration_seconds", "Wall time of a round's sync, by stage.")
        self._blocked = _histogram_by_stage("diloco_sync_blocked_seconds", "Time the trainer waited, by stage.")
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def worker_crashed(self) -> None:
        """Note that a worker has ended although nobody asked it to."""
        self._restarts += 1

    def update(self, report: Report) -> None:
        # The next worker counts from the totals of the last report, or from a checkpoint that is newer.
        self._totals = {key: max(self._totals[key], total) for key, total in flatten(report.counters).items()}
        self._last_sync_at_s = max(self._last_sync_at_s, report.counters.last_sync_at_s)

    def totals(self) -> Series:
        """Return the totals of all counters over all workers."""
        return dict(self._totals)

    def observe(self, seconds: Mapping[str, Iterable[float]]) -> None:
        """Add durations to the histograms. The keys are `inner_step`, `sync.STAGE` and `blocked.STAGE`."""
        for key, values in seconds.items():
            kind, _, stage = key.partition(".")
            histogram = {"sync": self._sync, "blocked": self._blocked}[kind].labels(stage) if stage else self._step
            for value in values:
                histogram.observe(value)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _process_metrics(self) -> Iterator[Metric]:
        usage = self._processes()
        text = "Resident memory of the node's processes."
        yield _labelled_gauge("process_memory_bytes", text, "process", usage.memory_bytes)
        text = "Processor time of the node's processes."
        yield _counter("process_cpu_seconds", text, usage.cpu_seconds, "process")

    def collect(self) -> Iterator[Metric]:
        view, space, build = self._view(), self._space(), self._build
        info = GaugeMetricFamily(
            "diloco_build_info",
            "Versions of this node; always 1.",
            labels=("version", "revision", "torch", "hivemind"),
        )
        info.add_metric((build.version, build.revision, build.torch, build.hivemind), 1.0)
        yield info
        totals = self._totals
        for spec in COUNTERS:
            yield _counter(
                spec.name, spec.text, {value: totals[(spec.name, value)] for value in spec.values}, spec.label
            )
        yield _counter("log_messages", "Log records by level.", view.log_counts, "level")
        text = "Workers that crashed or were killed because they hung, since the supervisor started."
        yield _counter("worker_restarts", text, {"": float(self._restarts)}, "")
        yield from self._process_metrics()
        for histogram in (self._step, self._sync, self._blocked):
            for family in histogram.collect():
                # The library adds `_created` series that are not part of our interface.
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family
        yield from _node_gauges(view)
        yield from _run_info(view)
        yield from _swarm_gauges(view)
        yield _gauge("last_sync_timestamp_seconds", "Unix time of the last commit; 0 before one.", self._last_sync_at_s)
        yield from _gpu_metrics(view)
        yield _labelled_gauge("disk_used_bytes", "Bytes in the data folder.", "kind", space.used_bytes)
        yield _gauge("disk_free_bytes", "Bytes that the node may use on the data folder's disk.", space.free_bytes)
        yield _gauge("disk_size_bytes", "Size of the data folder's disk.", space.size_bytes)


def _run_info(view: View) -> Iterator[Metric]:
    """The run of this node. There is always one series, so that dashboards find nodes without a run as well.

    The label has the beginning of the hash as well, because anybody may choose any name.
    """
    run = view.status.run
    info = GaugeMetricFamily("diloco_run_info", "The run of this node, by name and hash; always 1.", labels=("run",))
    name = f"{run.name} ({run.manifest_hash[:8]})" if run.manifest_hash else NO_RUN
    info.add_metric((name.strip(),), 1.0)
    yield info


def _node_gauges(view: View) -> Iterator[Metric]:
    status, training = view.status, view.status.training
    phases = {phase.value: float(phase is status.phase) for phase in Phase}
    yield _labelled_gauge("node_phase", "1 for the present phase.", "phase", phases)
    utilization = "Compute time / wall time of the last complete round; NaN before one."
    yield _gauge("compute_utilization_ratio", utilization, status.compute_utilization_ratio)
    yield _gauge("training_loss", "Loss of the last inner step, nats per token; NaN before it.", training.loss)
    evaluation = "Loss of the anchor on the held-out split; NaN before it."
    yield _gauge("evaluation_loss", evaluation, training.evaluation_loss)
    scores = {score.name: score.score for score in training.task_scores}
    text = "Median score of the members in an evaluation task. Series exist only for tasks that members evaluate."
    yield _labelled_gauge("task_score", text, "task", scores)
    yield _gauge("learning_rate", "Inner learning rate.", training.learning_rate)


def _swarm_gauges(view: View) -> Iterator[Metric]:
    status, run, last = view.status, view.status.run, view.status.sync.last
    yield _gauge("local_round", "Last round that this node committed; -1 before the first.", run.round)
    yield _gauge("swarm_round", "Highest committed round that most live members claim.", run.swarm_round)
    tokens = run.swarm_tokens if run.swarm_tokens or run.state_digest else None
    yield _gauge("swarm_tokens", "Tokens of the whole swarm in committed rounds; NaN while unknown.", tokens)
    transports = [row.transport for row in view.swarm if not row.this_node]
    counts = {transport: float(transports.count(transport)) for transport in TRANSPORTS}
    yield _labelled_gauge("peers", "Connected peers.", "transport", counts)
    yield _gauge("swarm_peers", "Live members that train, this node included.", status.peers.training)
    members = sum(member.included for member in last.members) if last is not None else 0
    yield _gauge("round_members", "Contributors of the last round.", members)
    text = "Mean cosine similarity of the last round's contributions."
    yield _gauge("contribution_cosine", text, last.contribution_cosine if last is not None else None)
    reached = {word: float(word == status.reachability) for word in REACHABILITIES}
    text = "Newest round that this node published or found published; -1 before the first."
    yield _gauge("published_round", text, status.publication.round)
    yield _labelled_gauge("reachability", "1 for the way in which other peers reach this node.", "status", reached)


def _gpu_metrics(view: View) -> Iterator[Metric]:
    """Series exist only for the GPUs present and the values they report."""
    gpus = [device for device in view.status.devices if device.kind != "cpu"]

    def by_gpu(values: list[float | None]) -> dict[str, float]:
        return {str(index): value for index, value in enumerate(values) if value is not None}

    for name, text, values in (
        ("gpu_utilization_ratio", "Busy share of the GPU.", by_gpu([g.utilization_ratio for g in gpus])),
        ("gpu_memory_used_bytes", "GPU memory in use.", by_gpu([g.memory_used_bytes for g in gpus])),
        ("gpu_memory_size_bytes", "GPU memory.", by_gpu([g.memory_size_bytes for g in gpus])),
        ("gpu_temperature_celsius", "GPU temperature.", by_gpu([g.temperature_celsius for g in gpus])),
    ):
        yield _labelled_gauge(name, text, "gpu", values)
    yield _counter("gpu_energy_joules", "Energy used by the GPU.", by_gpu([g.energy_joules for g in gpus]), "gpu")


def _histogram_by_stage(name: str, text: str) -> Histogram:
    histogram = Histogram(name, text, ("stage",), buckets=SYNC_BUCKETS_S, registry=None)
    for stage in STAGES:
        histogram.labels(stage)
    return histogram


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    """Make a gauge. The value None becomes NaN."""
    return GaugeMetricFamily(f"diloco_{name}", text, value=math.nan if value is None else value)


def _labelled_gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"diloco_{name}", text, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def _counter(name: str, text: str, values: Mapping[str, float], label: str) -> CounterMetricFamily:
    family = CounterMetricFamily(f"diloco_{name}", text, labels=(label,) if label else ())
    for value, total in values.items():
        family.add_metric((value,) if label else (), total)
    return family
