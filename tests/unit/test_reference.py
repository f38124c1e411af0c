"""Reference processes under torchrun agree with each other and with members in one process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from node.config.manifest import RunConfig
from node.diloco.codec import BLOCK, Fp16
from node.diloco.credit import Credit, table_of
from node.diloco.digest import state_digest
from node.diloco.outer import OuterState
from node.reference import ReferenceMember, main, read_run, save
from node.training.corpus import Corpus, Stream, load_corpus
from node.training.inner import InnerLoop
from node.training.model import build_model, flatten, load_flat_
from tests.limited_device import needs_full_device

ROOT = Path(__file__).parents[2]
ROUNDS = 3
RUN_ID = "0" * 32
CPU = torch.device("cpu")
RUN: dict[str, Any] = {
    "total_tokens": 4096,
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "max_position_embeddings": 32},
    "inner": {"batch_size": 2, "sequence_length": 16, "warmup_tokens": 64, "lr": 0.003},
    "round": {"policy": "steps", "inner_steps": 3, "min_peers": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"run": RUN}))
    return file


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def members(corpus: Corpus, stream_ids: list[str]) -> list[ReferenceMember]:
    run = RunConfig.model_validate(RUN)
    anchor = flatten(build_model(run.model, seed=0))
    return [
        ReferenceMember(run, corpus, anchor, run_id=RUN_ID, stream_id=stream_id, device=CPU, precision="fp32")
        for stream_id in stream_ids
    ]


def digests_in_process(corpus: Corpus, stream_ids: list[str]) -> list[str]:
    digests = []
    nodes = members(corpus, stream_ids)
    for _ in range(ROUNDS):
        contributions = [node.contribute()[0] for node in nodes]
        for node in nodes:
            node.apply(contributions)
        (digest,) = {state_digest(node.state) for node in nodes}
        digests.append(digest)
    return digests


def reference(preset: Path, stream_ids: list[str], *options: str) -> list[dict[str, Any]]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(stream_ids))]
    command = [
        sys.executable,
        *(launcher if len(stream_ids) > 1 else []),
        *("-m", "node.reference", "--preset-file", str(preset), "--rounds", str(ROUNDS)),
        *("--threads", "1", "--device", "cpu", "--timeout-s", "150", *options, "--stream-ids", *stream_ids),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.timeout(300)
@needs_full_device
def test_two_reference_processes_agree_with_two_members_in_one(preset: Path, corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "end.safetensors"
    lines = reference(preset, ["b", "a"], "--out", str(out))
    by_stream = {name: [line for line in lines if line["stream_id"] == name] for name in ("a", "b")}
    digests = {name: [line["digest"] for line in found] for name, found in by_stream.items()}
    assert [line["round"] for line in by_stream["a"]] == list(range(ROUNDS))
    assert digests["a"] == digests["b"] == digests_in_process(corpus, ["a", "b"])
    assert by_stream["a"][0]["loss"] != by_stream["b"][0]["loss"], "each reads its own stream"
    assert by_stream["a"][-1]["swarm_tokens"] == 2 * ROUNDS * 3 * 32
    with safe_open(out, "pt") as file:
        assert file.metadata()["digest"] == digests["a"][-1]


def test_reference_members_follow_the_algorithm_with_every_number_written_out(corpus: Corpus) -> None:
    """The test computes two members and three rounds without the code of the reference."""
    run = RunConfig.model_validate(RUN)
    codec = Fp16()
    anchor, momentum = flatten(build_model(run.model, seed=0)), torch.tensor(0.0)
    models = [build_model(run.model, seed=1) for _ in range(2)]
    loops = [InnerLoop(model, run.inner, CPU) for model in models]
    tokens, last_round_tokens = 0, 3 * 32
    for number in range(ROUNDS):
        deltas = []
        for stream_id, model, loop in zip(("a", "b"), models, loops, strict=True):
            load_flat_(model, anchor)
            stream = Stream(corpus, RUN_ID, stream_id, number)
            for k in range(3):
                now = tokens + int(k / 3 * last_round_tokens)
                share = now / 64 if now < 64 else 0.1 + 0.45 * (1 + math.cos(math.pi * (now - 64) / (4096 - 64)))
                loop.step(stream.next_batch(2, 16), 0.003 * share)
            deltas.append(in_chunks(codec, anchor - flatten(model)))
        mean = in_chunks(codec, deltas[0] * 0.5 + deltas[1] * 0.5)
        momentum = momentum * 0.9 + mean
        anchor = anchor - (momentum * 0.9 + mean) * 0.7
        tokens, last_round_tokens = tokens + 2 * 96, 2 * 96
    credit = table_of(dict.fromkeys(("a", "b"), Credit(96 * ROUNDS, ROUNDS, 0, 0, ROUNDS - 1)))
    state = OuterState(anchor, momentum, ROUNDS - 1, tokens, credit)
    assert state_digest(state) == digests_in_process(corpus, ["b", "a"])[-1]


def in_chunks(codec: Fp16, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([codec.decode(codec.encode(part), len(part)) for part in x.split(BLOCK)])


def test_reference_starts_from_given_parameters(preset: Path, corpus: Corpus, tmp_path: Path, capfd: Any) -> None:
    (node,) = members(corpus, ["a"])
    save(node.state, tmp_path / "start.safetensors")
    arguments = ["--preset-file", str(preset), "--rounds", "1", "--device", "cpu", "--stream-ids", "a"]
    assert main([*arguments, "--initial", str(tmp_path / "start.safetensors"), "--seed", "5"]) == 0
    given = json.loads(capfd.readouterr().out)["digest"]
    assert main([*arguments, "--seed", "5"]) == 0
    drawn = json.loads(capfd.readouterr().out)["digest"]
    node.apply([node.contribute()[0]])
    assert given == state_digest(node.state) != drawn


def test_reference_reads_presets_in_toml_or_json_with_or_without_the_run_table(tmp_path: Path, preset: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[run.round]\ninner_steps = 7\n")
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(RUN))
    assert read_run(toml).round.inner_steps == 7
    assert read_run(bare) == read_run(preset)


@pytest.mark.parametrize("text", ["{", '{"run": {"no_such_key": 1}}'])
def test_reference_ends_with_exit_code_2_after_a_bad_preset(tmp_path: Path, text: str, capfd: Any) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    assert main(["--preset-file", str(file), "--rounds", "1", "--stream-ids", "a"]) == 2
    assert "is not a readable preset" in capfd.readouterr().err


def test_reference_needs_one_stream_id_for_each_process(preset: Path, capfd: Any) -> None:
    assert main(["--preset-file", str(preset), "--rounds", "1", "--stream-ids", "a", "b"]) == 2
    assert "1 processes need" in capfd.readouterr().err
