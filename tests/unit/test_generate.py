"""Sampling from the newest checkpoint of a data folder, without a swarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.cli import main
from node.config.manifest import RunConfig
from node.training.checkpoint import FORMAT_VERSION, META
from node.training.model import build_model
from node.training.tokenizer import END
from tests.swarm.harness import tiny
from tests.unit.data_folder import make_data_folder
from tests.unit.greedy_sample import likeliest_tokens

RUN = RunConfig.model_validate(tiny())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the initial checkpoint of a run."""
    path = tmp_path_factory.mktemp("node")
    make_data_folder(path, RUN)
    return path


def generate(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["generate", "def f(", "--data-dir", str(folder), "--tokens", "24", *flags]) == 0
    return capsys.readouterr().out


def test_generate_continues_a_text_and_repeats_it_per_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = generate(folder, capsys, "--seed", "1")
    assert output.startswith("def f(") and len(output) > len("def f(\n")
    assert generate(folder, capsys, "--seed", "1") == output
    assert generate(folder, capsys, "--seed", "2") != output


def test_generate_at_temperature_0_picks_the_likeliest_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = likeliest_tokens(build_model(RUN.model, seed=5).eval(), [256, *b"def f("], 24, END)
    expected = bytes(token for token in found if token < 256).decode(errors="replace")
    assert generate(folder, capsys, "--temperature", "0") == f"def f({expected}\n"


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        ("x", ("--tokens", "0"), "--tokens must be at least 1"),
        ("x", ("--temperature", "-1"), "--temperature from 0 to 100"),
        ("x", ("--temperature", "nan"), "--temperature from 0 to 100"),
        ("x", ("--seed", str(2**70)), "--seed from 0 to 2^63"),
        ("x" * RUN.model.max_position_embeddings, (), "too long"),
        ("x", ("--data-dir", "nowhere"), "belongs to no run yet"),
    ],
    ids=["tokens", "temperature", "no temperature", "seed", "text too long", "no run"],
)
def test_generate_command_refuses_bad_arguments(
    folder: Path, text: str, flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", text, "--data-dir", str(folder), *flags]) == 2
    assert problem in capsys.readouterr().err


def test_generate_and_export_refuse_a_checkpoint_of_a_newer_version_and_keep_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = folder / "checkpoints" / "round--0000001" / META
    was = meta.read_text()
    meta.write_text(was.replace(f'"format": {FORMAT_VERSION}', f'"format": {FORMAT_VERSION + 1}'))
    try:
        for words in (("generate", "x"), ("export", str(folder / "out"))):
            assert main([*words, "--data-dir", str(folder)]) == 10
            assert "upgrade diloco-node" in capsys.readouterr().err
        assert [path.name for path in (folder / "checkpoints").iterdir()] == [meta.parent.name]
    finally:
        meta.write_text(was)
