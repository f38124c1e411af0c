"""The Prometheus names, types and labels are a promise; this is its text."""

from __future__ import annotations

import math
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.api.metrics import Build, Metrics
from node.api.seam import Space
from node.status import (
    FAILURE_REASONS,
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
)
from tests.api.conftest import StillNode

PROMISED: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "build_info": ("gauge", {}),
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
    "contribution_carried_total": ("counter", {}),
    "digest_mismatch_total": ("counter", {}),
    "peer_rejected_total": ("counter", {"reason": REJECT_REASONS}),
    "reachability": ("gauge", {"status": REACHABILITIES}),
    "network_sent_bytes_total": ("counter", {"channel": tuple(Channel)}),
    "network_received_bytes_total": ("counter", {"channel": tuple(Channel)}),
    "disk_used_bytes": ("gauge", {"kind": ("cache",)}),
    "disk_free_bytes": ("gauge", {}),
    "disk_size_bytes": ("gauge", {}),
    "log_messages_total": ("counter", {"level": ("debug", "info", "warning", "error")}),
}

Key = tuple[str, tuple[tuple[str, str], ...]]


def scrape(node: StillNode) -> tuple[dict[str, str], dict[Key, float]]:
    """(family name -> type), (sample -> value), without the prefix."""
    types: dict[str, str] = {}
    samples: dict[Key, float] = {}
    for family in text_string_to_metric_families(node.metrics.page().decode()):
        assert family.name.startswith("diloco_")
        name = family.name.removeprefix("diloco_") + ("_total" if family.type == "counter" else "")
        types[name] = family.type
        for sample in family.samples:
            key = (sample.name.removeprefix("diloco_"), tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return types, samples


def test_all_series_exist_from_the_start(still_node: StillNode) -> None:
    types, samples = scrape(still_node)
    families = {name: kind for name, (kind, _) in PROMISED.items()}
    assert {name: kind for name, kind in types.items() if not name.startswith("gpu_")} == families
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


def with_a_gpu(node: StillNode) -> None:
    gpu = DeviceInfo(
        kind="cuda", name="x", utilization_ratio=0.5, memory_used_bytes=7, memory_size_bytes=9,
        temperature_celsius=50.0, energy_joules=9.0, power_watts=300.0,
    )  # fmt: skip
    node.board.told(Report(devices=(gpu,)))


def test_a_node_with_one_gpu_has_at_most_220_series(still_node: StillNode) -> None:
    with_a_gpu(still_node)
    lines = still_node.metrics.page().decode().splitlines()
    series = [line for line in lines if line and not line.startswith("#")]
    # A node has three kinds of disk use more than this one.
    print(f"{len(series)} series")
    assert len(series) + 3 <= 220


def test_promtool_finds_nothing_to_say(still_node: StillNode) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it is in Debian's package prometheus")
    with_a_gpu(still_node)
    done = subprocess.run(
        [promtool, "check", "metrics"], input=still_node.metrics.page(), capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_gauges_follow_the_status(still_node: StillNode) -> None:
    gpu = DeviceInfo(kind="cuda", name="x", utilization_ratio=0.5, memory_used_bytes=7, energy_joules=9.0)
    still_node.board.told(
        Report(
            state=PhaseState(phase=Phase.SYNCING),
            devices=(DeviceInfo(kind="cpu", name="c"), gpu),
            reachability="relay",
        )
    )
    still_node.board.decide(None)
    _, samples = scrape(still_node)
    assert samples[("node_phase", (("phase", "syncing"),))] == 1
    assert sum(value for (name, _), value in samples.items() if name == "node_phase") == 1
    assert samples[("gpu_memory_used_bytes", (("gpu", "0"),))] == 7
    assert samples[("gpu_energy_joules_total", (("gpu", "0"),))] == 9
    assert ("gpu_temperature_celsius", (("gpu", "0"),)) not in samples
    assert samples[("reachability", (("status", "relay"),))] == 1


def test_counters_never_fall_and_count_nothing_twice(still_node: StillNode) -> None:
    metrics = still_node.metrics

    def told(phase: Phase, steps: int, paused_s: float = 0.0) -> tuple[float, float]:
        counters = Counters(inner_steps=steps, activity_seconds={Activity.PAUSED: paused_s})
        metrics.told(Report(state=PhaseState(phase=phase), counters=counters))
        samples = scrape(still_node)[1]
        return samples[("inner_steps_total", ())], samples[("activity_seconds_total", (("activity", "paused"),))]

    metrics.worker_started()
    assert told(Phase.CONNECTING, 0) == (0, 0)
    assert told(Phase.TRAINING, 100) == (100, 0)
    assert told(Phase.TRAINING, 150) == (150, 0)
    # Paused, the worker tells from zero.
    metrics.worker_started()
    assert told(Phase.PAUSED, 0, 0.5) == (150, 0.5)
    assert told(Phase.PAUSED, 0, 9.0) == (150, 9.0)
    # The next one tells from zero until it has read its checkpoint, which holds two steps that were never told.
    metrics.worker_started()
    assert told(Phase.CONNECTING, 0) == (150, 9)
    assert told(Phase.TRAINING, 152) == (152, 9)
    assert told(Phase.SYNCING, 160) == (160, 9)
    # After a crash, from an older checkpoint: steps that are done twice count twice.
    metrics.worker_started()
    assert told(Phase.DOWNLOADING, 0) == (160, 9)
    assert told(Phase.TRAINING, 140) == (160, 9)
    assert told(Phase.TRAINING, 160) == (180, 9)
    # One that lost its checkpoint counts on.
    metrics.worker_started()
    assert told(Phase.TRAINING, 0) == (180, 9)
    assert told(Phase.TRAINING, 7) == (187, 9)
    assert told(Phase.TRAINING, 3) == (187, 9)


def test_a_restart_of_the_node_is_no_increase(still_node: StillNode) -> None:
    """From the first scrape on the totals of before are there; the first worker tells them once more."""
    known = Counters(inner_steps=1000, tokens_processed=64_000, last_sync_at_s=5.0)
    still_node.metrics = Metrics(Build("1.2"), still_node.view, space=lambda: Space({}, 1, 4), known=known)

    def told() -> tuple[float, ...]:
        _, samples = scrape(still_node)
        names = ("inner_steps_total", "tokens_processed_total", "last_sync_timestamp_seconds")
        return tuple(samples[(name, ())] for name in names)

    assert told() == (1000, 64_000, 5)
    still_node.metrics.worker_started()
    for phase, counters in ((Phase.STARTING, Counters()), (Phase.TRAINING, known)):
        still_node.metrics.told(Report(state=PhaseState(phase=phase), counters=counters))
        assert told() == (1000, 64_000, 5)
    still_node.metrics.told(Report(state=PhaseState(phase=Phase.TRAINING), counters=Counters(inner_steps=1001)))
    assert told()[0] == 1001


def test_tokens_of_the_swarm_are_unknown_before_they_are_known(still_node: StillNode) -> None:
    assert math.isnan(scrape(still_node)[1][("swarm_tokens", ())])
    still_node.board.told(Report(run=RunInfo(swarm_tokens=0, state_digest="ab")))
    assert scrape(still_node)[1][("swarm_tokens", ())] == 0


def test_unknown_reasons_join_the_general_one(still_node: StillNode) -> None:
    counters = Counters(sync_failures={"cosmic": 2, "timeout": 1}, last_sync_at_s=5.0)
    still_node.metrics.told(Report(counters=counters))
    _, samples = scrape(still_node)
    assert samples[("sync_failures_total", (("reason", "round_failed"),))] == 2
    assert samples[("sync_failures_total", (("reason", "timeout"),))] == 1
    assert samples[("last_sync_timestamp_seconds", ())] == 5


def test_histograms_take_each_duration(still_node: StillNode, caplog: pytest.LogCaptureFixture) -> None:
    still_node.metrics.observe({"inner_step": [0.02, 0.2], "sync.reduce": [3.0], "blocked.apply": [1.0], "sync.x": [1]})
    _, samples = scrape(still_node)
    assert samples[("inner_step_duration_seconds_count", ())] == 2
    assert samples[("inner_step_duration_seconds_sum", ())] == pytest.approx(0.22)
    assert samples[("sync_duration_seconds_sum", (("stage", "reduce"),))] == 3
    assert samples[("sync_blocked_seconds_count", (("stage", "apply"),))] == 1
    assert "sync.x" in caplog.text
