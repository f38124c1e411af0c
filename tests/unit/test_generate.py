"""Text from the current model: from the folder of a node, without a swarm."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from node.cli import main
from node.diloco.outer import genesis
from node.manifest import Manifest, RunConfig
from node.training.checkpoint import FORMAT_VERSION, META, CheckpointStore
from node.training.model import build_model, flatten
from tests.swarm.harness import tiny

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.swarm.chain import tip_at
    from node.worker.session import rules_of
    from node.worker.snapshot import initial_checkpoint

RUN = RunConfig.model_validate(tiny())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder as its founder leaves it."""
    path = tmp_path_factory.mktemp("node")
    state = genesis(flatten(build_model(RUN.model, seed=5)))
    draft = Manifest(run_id="ab" * 16, initial_digest="0" * 64, parameters=state.anchor.numel(), run=RUN)
    tip = tip_at(state, draft.hash, None, rules_of(draft).outer, {}, 0.0)
    manifest = draft.model_copy(update={"initial_digest": tip.digest})
    CheckpointStore(path / "checkpoints", 2).save(initial_checkpoint(manifest, tip))
    (path / "manifest.json").write_bytes(manifest.canonical())
    return path


def generate(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["generate", "def f(", "--data-dir", str(folder), "--tokens", "24", *flags]) == 0
    return capsys.readouterr().out


def test_a_text_is_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = generate(folder, capsys, "--seed", "1")
    assert said.startswith("def f(") and len(said) > len("def f(\n")
    assert generate(folder, capsys, "--seed", "1") == said
    assert generate(folder, capsys, "--seed", "2") != said


def test_at_temperature_0_it_is_the_likeliest_token_each_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, capsys, "--temperature", "0") == generate(folder, capsys, "--temperature", "0")
    model = build_model(RUN.model, seed=5).eval()
    tokens = [256, *b"def f("]
    with torch.inference_mode():
        while len(tokens) < 7 + 24:
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == 257:
                break
    expected = bytes(token for token in tokens if token < 256).decode(errors="replace")
    assert generate(folder, capsys, "--temperature", "0") == f"{expected}\n"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--tokens", "0"), "--tokens must be at least 1"),
        (("--temperature", "-1"), "--temperature not below 0"),
    ],
)
def test_bad_flags(folder: Path, flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--data-dir", str(folder), *flags]) == 2
    assert problem in capsys.readouterr().err


def test_a_text_that_leaves_no_room(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x" * RUN.model.max_position_embeddings, "--data-dir", str(folder)]) == 2
    assert "too long" in capsys.readouterr().err


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--data-dir", str(tmp_path)]) == 2
    assert "belongs to no run yet" in capsys.readouterr().err


def test_a_checkpoint_of_a_newer_version_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
