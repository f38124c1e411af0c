"""The GPU benchmark runs on a CPU, reports a missing GPU, and counts correctly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from node.config.manifest import RunConfig
from node.training.model import build_model, next_token_loss
from tests.benchmarks.gpu import flops_a_token, peak_flops
from tests.benchmarks.processes import ROOT
from tests.swarm.harness import environment, tiny

pytestmark = pytest.mark.nightly


def run(results: Path, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command, variables = [sys.executable, "-m", *words], environment({"BENCHMARK_RESULTS": str(results)})
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.timeout(240)
def test_gpu_benchmark_runs_with_tiny_models_on_a_cpu(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "tests.benchmarks.gpu",
        "--cpu",
        "--cases",
        "tiny,less-tiny",
        "--pairs",
        "1",
        "--seconds",
        "1",
        timeout_s=220,
    )
    assert done.returncode == 0, done.stderr
    for words in ("tokens/s", "a pseudo-gradient of", "topk", "merge", "less-tiny: a step", "not measured on a CPU"):
        assert words in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("words", [("tests.benchmarks", "gpu"), ("tests.benchmarks.gpu",)])
def test_gpu_benchmark_ends_with_exit_code_3_without_a_gpu_and_keeps_an_earlier_result(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "gpu.json").write_text("from a machine with a GPU")
    done = run(tmp_path, *words, timeout_s=100)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (3, "no GPU here: not measured"), done.stderr
    assert (tmp_path / "gpu.json").read_text() == "from a machine with a GPU"


@pytest.mark.parametrize("tied", [True, False])
def test_computed_operations_per_token_agree_with_the_count_by_torch(tied: bool) -> None:
    model = {"tie_word_embeddings": tied, "num_key_value_heads": 1, "max_position_embeddings": 512}
    run = RunConfig.model_validate(tiny(model=model, inner={"batch_size": 2, "sequence_length": 256}))
    built = build_model(run.model, seed=0)
    built.set_attn_implementation("eager")  # type: ignore[operator]
    with FlopCounterMode(display=False) as counter:
        next_token_loss(built, torch.zeros(2, 257, dtype=torch.int64)).backward()
    assert counter.get_total_flops() / 512 == pytest.approx(flops_a_token(run), rel=0.02)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L40S", 362e12),
     ("NVIDIA L4", 121e12), ("Tesla T4", None)],
)  # fmt: skip
def test_peak_rate_of_a_gpu_is_found_by_its_device_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
