"""Each benchmark runs to its end at a tiny size. The tests fail only if it crashes, whatever its figures are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.errors import MachineError
from tests.benchmarks.processes import ROOT

SMOKE = {
    "beside": "--seconds 1 --slice 1",
    "churn": "--rounds 2 --inner-steps 8",
    "codecs": "--parameters 65536 --repeats 2",
    "data": "--turns 1 --seconds 0.2",
    "first_run": "--learnt-nats 6",
    "gossip_model": "32",
    "homes": "--scenarios all --homes 3 --rounds 1 --step-s 0.05 --inner-steps 20",
    "hostile": "--rounds 1 --seeds 1",
    "inner": "--pairs 2 --seconds 0.5 --threads 1",
    "join": "--hidden 64 --layers 2 --inner-steps 12",
    "kills": "--kills 2",
    "link_drop": "--phase 5 --nodes 2",
    "load": "--seconds 4 --slice 1 --streams 4 --rate 20",
    "memory": "--seconds 1",
    "pause": "--times 1",
    "publishing": "--kills 1 --places folder",
    "rounds": "--peers 2 --parameters 100000 --rounds 1 --warm-up 0",
    "scaling": "--p2p 2 --local 4 --model 32 --rounds 2 --idle 1",
    "slow_line": "--parts line --rounds 1 --beside 1 --mbit 20 --round-s 2",
    "slow_peer": "--seeds 1 --seconds 5 --inner-steps 5",
    "stops": "--stops 3 --hidden 64 --layers 2 --span 1",
    "sync": "--cells 500:2:blocking:fp16:2,500:2:hivemind:fp16:2 --rounds 1",
    "tab": "--seconds 2",
}
OPTIONS = {
    "load_public": ("load", "--public --seconds 2 --slice 1 --rate 20"),
    "shared_cpu": ("shared_gpu", "--cpu --nodes 2 --rounds 2"),
}
"""Other measurements of a benchmark, by the name of their result."""
CASES = {**{name: (name, words) for name, words in SMOKE.items()}, **OPTIONS}
WITHOUT_RESULT = {"gossip_model", "sync"}
"""Benchmarks that write no file, or a file in another format."""


@pytest.fixture
def short_path() -> Iterator[str]:
    """A folder for temporary files with a short path, as paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="smoke-") as path:
        yield path


@pytest.mark.nightly
@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", CASES)
def test_each_benchmark_runs_to_its_end_at_a_tiny_size(name: str, tmp_path: Path, short_path: str) -> None:
    module, words = CASES[name]
    with subprocess.Popen(
        [sys.executable, "-m", f"tests.benchmarks.{module}", *words.split()],
        cwd=ROOT,
        env={**os.environ, "BENCHMARK_RESULTS": str(tmp_path), "TMPDIR": short_path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # The benchmark then ends its nodes and namespaces.
            output, _ = process.communicate(timeout=60)
            pytest.fail(f"{name} did not end within 240 s:\n{output[-3000:]}")
    if process.returncode == MachineError.exit_code:
        pytest.skip(output.strip().splitlines()[-1])
    # Exit code 1 may mean that a figure misses its limit, which is no failure of this test.
    assert process.returncode in (0, 1) and "Traceback" not in output, output
    if name not in WITHOUT_RESULT:
        assert json.loads((tmp_path / f"{name}.json").read_text())["figures"]


def test_each_benchmark_is_listed_with_a_tiny_size() -> None:
    modules = {path.stem for path in Path(__file__).parent.glob("*.py") if "add_argument" in path.read_text()}
    helpers = {"__main__", "bare_loop", "round_peer_hivemind", "round_peer_ours", "test_smoke"}
    listed = {*SMOKE, *(module for module, _ in OPTIONS.values())}
    assert modules - helpers == {*listed, "gpu"}, "tests/swarm/test_gpu_benchmark.py runs gpu"
