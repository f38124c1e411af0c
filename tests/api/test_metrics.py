"""The names, types and labels of the Prometheus metrics are a public interface. PROMISED lists them."""

from __future__ import annotations

import math
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.api.metrics import Build, Metrics
from node.api.node_interface import PROCESS_KINDS, ProcessUsage, Space
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
    DeviceInfo,
    Outcome,
    Phase,
    PhaseState,
    Report,
    RunInfo,
    Stage,
    TaskScore,
)
from tests.api.conftest import FakeNode

PROMISED: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "build_info": ("gauge", {}),
    "run_info": ("gauge", {}),
    "node_phase": ("gauge", {"phase": tuple(Phase)}),
    "activity_seconds_total": ("counter", {"activity": tuple(Activity)}),
    "compute_utilization_ratio": ("gauge", {}),
    "tokens_processed_total": ("counter", {}),
    "tokens_merged_total": ("counter", {}),
    "tokens_discarded_total": ("counter", {}),
    "forwarded_bytes_total": ("counter", {}),
    "inner_steps_total": ("counter", {}),
    "skipped_steps_total": ("counter", {}),
    "inner_step_duration_seconds": ("histogram", {}),
    "training_loss": ("gauge", {}),
    "evaluation_loss": ("gauge", {}),
    "learning_rate": ("gauge", {}),
    "local_round": ("gauge", {}),
    "swarm_round": ("gauge", {}),
    "swarm_tokens": ("gauge", {}),
    "sync_rounds_total": ("counter", {"result": tuple(Outcome)}),
    "sync_failures_total": ("counter", {"reason": FAILURE_REASONS}),
    "sync_duration_seconds": ("histogram", {"stage": tuple(Stage)}),
    "sync_blocked_seconds": ("histogram", {"stage": tuple(Stage)}),
    "last_sync_timestamp_seconds": ("gauge", {}),
    "peers": ("gauge", {"transport": TRANSPORTS}),
    "swarm_peers": ("gauge", {}),
    "round_members": ("gauge", {}),
    "contribution_cosine": ("gauge", {}),
    "contribution_carried_total": ("counter", {}),
    "digest_mismatch_total": ("counter", {}),
    "peer_rejected_total": ("counter", {"reason": REJECT_REASONS}),
    "publications_total": ("counter", {"result": PUBLISH_RESULTS}),
    "published_round": ("gauge", {}),
    "amendments_refused_total": ("counter", {"reason": AMENDMENT_REFUSALS}),
    "reachability": ("gauge", {"status": REACHABILITIES}),
    "network_sent_bytes_total": ("counter", {"channel": tuple(Channel)}),
    "network_received_bytes_total": ("counter", {"channel": tuple(Channel)}),
    "disk_used_bytes": ("gauge", {"kind": ("cache",)}),
    "disk_free_bytes": ("gauge", {}),
    "disk_size_bytes": ("gauge", {}),
    "worker_restarts_total": ("counter", {}),
    "process_memory_bytes": ("gauge", {"process": PROCESS_KINDS}),
    "process_cpu_seconds_total": ("counter", {"process": PROCESS_KINDS}),
    "log_messages_total": ("counter", {"level": ("debug", "info", "warning", "error")}),
}

Key = tuple[str, tuple[tuple[str, str], ...]]


def scrape(node: FakeNode) -> tuple[dict[str, str], dict[Key, float]]:
    """The type of each metric family and the value of each sample. The names have no prefix `diloco_`."""
    types: dict[str, str] = {}
    samples: dict[Key, float] = {}
    for family in text_string_to_metric_families(node.metrics.render().decode()):
        assert family.name.startswith("diloco_")
        name = family.name.removeprefix("diloco_") + ("_total" if family.type == "counter" else "")
        types[name] = family.type
        for sample in family.samples:
            key = (sample.name.removeprefix("diloco_"), tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return types, samples


def test_all_promised_metric_series_exist_from_the_start(fake_node: FakeNode) -> None:
    types, samples = scrape(fake_node)
    families = {name: kind for name, (kind, _) in PROMISED.items()}
    assert {name: kind for name, kind in types.items() if not name.startswith(("gpu_", "task_"))} == families
    for name, (kind, labels) in PROMISED.items():
        sample = name + "_count" if kind == "histogram" else name
        for label, values in labels.items():
            found = {dict(key)[label] for n, key in samples if n == sample}
            assert found == {str(value) for value in values}, name
        if kind == "counter":
            assert all(value == 0 for (n, _), value in samples.items() if n == name)
    assert not any(name.startswith("gpu_") for name, _ in samples)
    build = (("hivemind", "1.1"), ("revision", "abc"), ("torch", "2.13"), ("version", "1.2"))
    assert samples[("build_info", build)] == 1
    assert math.isnan(samples[("training_loss", ())])


GPU = DeviceInfo(
    kind="cuda", name="x", utilization_ratio=0.5, memory_used_bytes=7, memory_size_bytes=9, temperature_celsius=50.0,
    energy_joules=9.0, power_watts=300.0,
)  # fmt: skip


def test_node_with_one_gpu_has_at_most_240_metric_series(fake_node: FakeNode) -> None:
    fake_node.board.apply_report(Report(devices=(GPU,)))
    lines = fake_node.metrics.render().decode().splitlines()
    series = [line for line in lines if line and not line.startswith("#")]
    # A real node has four more series, for four more kinds of disk use.
    assert len(series) + 4 <= 240


def test_promtool_accepts_the_metrics_page(fake_node: FakeNode) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it is in Debian's package prometheus")
    fake_node.board.apply_report(Report(devices=(GPU,)))
    done = subprocess.run(
        [promtool, "check", "metrics"], input=fake_node.metrics.render(), capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_gauges_follow_the_status_of_the_node(fake_node: FakeNode) -> None:
    gpu = DeviceInfo(kind="cuda", name="x", utilization_ratio=0.5, memory_used_bytes=7, energy_joules=9.0)
    devices = (DeviceInfo(kind="cpu", name="c"), gpu)
    fake_node.board.apply_report(Report(state=PhaseState(phase=Phase.SYNCING), devices=devices, reachability="relay"))
    fake_node.board.set_phase(None)
    _, samples = scrape(fake_node)
    assert samples[("node_phase", (("phase", "syncing"),))] == 1
    assert sum(value for (name, _), value in samples.items() if name == "node_phase") == 1
    assert samples[("gpu_memory_used_bytes", (("gpu", "0"),))] == 7
    assert samples[("gpu_energy_joules_total", (("gpu", "0"),))] == 9
    assert ("gpu_temperature_celsius", (("gpu", "0"),)) not in samples
    assert samples[("reachability", (("status", "relay"),))] == 1


def test_counters_never_decrease_when_workers_restart(fake_node: FakeNode) -> None:
    def update(steps: int) -> float:
        fake_node.metrics.update(Report(counters=Counters(inner_steps=steps)))
        return scrape(fake_node)[1][("inner_steps_total", ())]

    assert update(150) == 150
    assert update(0) == 150, "the next worker has not read the totals yet"
    assert update(152) == 152


def test_restart_of_the_node_does_not_increase_its_counters(fake_node: FakeNode) -> None:
    """The first scrape after the restart has the previous totals, and the first worker reports the same totals."""
    known = Counters(inner_steps=1000, tokens_processed=64_000, last_sync_at_s=5.0)
    fake_node.metrics = Metrics(Build("1.2"), fake_node.view, space=lambda: Space({}, 1, 4), known=known)

    def totals() -> tuple[float, ...]:
        _, samples = scrape(fake_node)
        names = ("inner_steps_total", "tokens_processed_total", "last_sync_timestamp_seconds")
        return tuple(samples[(name, ())] for name in names)

    assert totals() == (1000, 64_000, 5)
    for phase, counters in ((Phase.STARTING, Counters()), (Phase.TRAINING, known)):
        fake_node.metrics.update(Report(state=PhaseState(phase=phase), counters=counters))
        assert totals() == (1000, 64_000, 5)
    fake_node.metrics.update(Report(state=PhaseState(phase=Phase.TRAINING), counters=Counters(inner_steps=1001)))
    assert totals()[0] == 1001


def test_metric_of_the_swarms_tokens_is_nan_until_their_number_is_known(fake_node: FakeNode) -> None:
    assert math.isnan(scrape(fake_node)[1][("swarm_tokens", ())])
    fake_node.board.apply_report(Report(run=RunInfo(swarm_tokens=0, state_digest="ab")))
    assert scrape(fake_node)[1][("swarm_tokens", ())] == 0


def test_run_is_named_with_its_hash_once_it_is_known(fake_node: FakeNode) -> None:
    assert scrape(fake_node)[1][("run_info", (("run", "no run yet"),))] == 1
    fake_node.board.apply_report(Report(run=RunInfo(name="tiny", manifest_hash="ab12cd34" * 8)))
    _, samples = scrape(fake_node)
    assert [key for key in samples if key[0] == "run_info"] == [("run_info", (("run", "tiny (ab12cd34)"),))]


def test_crashes_of_workers_and_the_use_of_processes_are_shown(fake_node: FakeNode) -> None:
    memory, cpu_s = {"worker": 7}, {"worker": 2.5}
    usage = ProcessUsage(dict.fromkeys(PROCESS_KINDS, 0) | memory, dict.fromkeys(PROCESS_KINDS, 0.0) | cpu_s)
    fake_node.metrics = Metrics(
        Build("1"), fake_node.view, space=lambda: Space({}), known=Counters(), processes=lambda: usage
    )
    fake_node.metrics.worker_crashed()
    _, samples = scrape(fake_node)
    assert samples[("worker_restarts_total", ())] == 1
    assert samples[("process_memory_bytes", (("process", "worker"),))] == 7
    assert samples[("process_cpu_seconds_total", (("process", "worker"),))] == 2.5
    assert samples[("process_memory_bytes", (("process", "p2pd"),))] == 0


def test_failures_with_an_unknown_reason_count_under_the_fallback_reason(fake_node: FakeNode) -> None:
    counters = Counters(sync_failures={"cosmic": 2, "timeout": 1}, last_sync_at_s=5.0)
    fake_node.metrics.update(Report(counters=counters))
    _, samples = scrape(fake_node)
    assert samples[("sync_failures_total", (("reason", "round_failed"),))] == 2
    assert samples[("sync_failures_total", (("reason", "timeout"),))] == 1
    assert samples[("last_sync_timestamp_seconds", ())] == 5


def test_histograms_count_each_reported_duration(fake_node: FakeNode) -> None:
    fake_node.metrics.observe({"inner_step": [0.02, 0.2], "sync.reduce": [3.0], "blocked.apply": [1.0]})
    _, samples = scrape(fake_node)
    assert samples[("inner_step_duration_seconds_count", ())] == 2
    assert samples[("inner_step_duration_seconds_sum", ())] == pytest.approx(0.22)
    assert samples[("sync_duration_seconds_sum", (("stage", "reduce"),))] == 3
    assert samples[("sync_blocked_seconds_count", (("stage", "apply"),))] == 1


def test_scores_in_tasks_have_a_series_for_each_task(fake_node: FakeNode) -> None:
    report = Report()
    scores = (TaskScore(name="words/acc", score=0.25, round=4, members=2),)
    training = report.training.model_copy(update={"task_scores": scores})
    publication = report.publication.model_copy(update={"round": 7})
    fake_node.board.apply_report(report.model_copy(update={"training": training, "publication": publication}), -1)
    _, samples = scrape(fake_node)
    assert samples[("task_score", (("task", "words/acc"),))] == 0.25 and samples[("published_round", ())] == 7
