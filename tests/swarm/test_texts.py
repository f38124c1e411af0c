"""Real nodes with the user's own text and models: a data set like C4, a start from an exported model, and bad input."""

from __future__ import annotations

import gzip
import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from node.config.manifest import RunConfig
from node.training.prefetch import Prefetcher
from node.training.text import open_text
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, checkpoint_meta, checkpoint_round, command, tiny
from tests.swarm.hub import COMMIT, Hub

FILES, DOCUMENTS = 8, 400
SOURCE = "parquet:c4/en/*.parquet"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with the columns of C4, made from the source text of Python's standard library."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "c4" / "en").mkdir(parents=True)
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        found += [text[i : i + 1500] for i in range(0, min(len(text), 30000), 1500)]
    for i in range(FILES):
        own = found[i : FILES * DOCUMENTS : FILES]
        columns = {
            "text": own,
            "timestamp": ["2019-04-25T12:57:54Z"] * len(own),
            "url": ["https://example.org"] * len(own),
        }
        pq.write_table(pa.table(columns), folder / "c4" / "en" / f"c4-train.{i:05}-of-{FILES:05}.parquet")
    return folder


@pytest.fixture
def swarm_of_texts(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path, tiny(data={"sources": [SOURCE]}, round={"min_peers": 1, "inner_steps": 10})) as swarm:
        yield swarm


def steps_of(meta: dict[str, Any]) -> int:
    return int(meta["extra"]["ledger"]["counters"]["inner_steps"])


def newest(node: Node) -> dict[str, Any]:
    return checkpoint_meta(max(node.checkpoints(), key=checkpoint_round))


def state_after(
    meta: dict[str, Any], steps: int, manifest: dict[str, Any], peer_id: str, texts: Path
) -> dict[str, Any]:
    """Read `steps` batches after a checkpoint. Returns the state of the reader after them."""
    run = RunConfig.model_validate(manifest["run"])
    reader = open_text(run, texts, texts / "cache").reader(manifest["run_id"], peer_id, meta["text"] or None)
    assert isinstance(reader, Prefetcher)
    try:
        for _ in range(steps):
            while reader.next_batch() is None:
                pass
        return reader.state
    finally:
        reader.close()


@pytest.mark.timeout(240)
def test_killed_node_continues_its_data_set_at_the_last_checkpoint(swarm_of_texts: Swarm, texts: Path) -> None:
    """The data set has the format of C4. No batch is skipped; only batches since the last checkpoint are repeated."""
    flags = (f"--node.text_dir={texts}", "--checkpoint.every_s=0.5")
    node = swarm_of_texts.found(*flags)
    node.until_round(4, 2 * START_S)
    peer_id = node.status()["node"]["peer_id"]
    node.end_by_force()
    manifest = json.loads((node.folder / "manifest.json").read_text())
    killed_at = newest(node)
    assert steps_of(killed_at) > 0
    assert state_after({"text": {}}, steps_of(killed_at), manifest, peer_id, texts) == killed_at["text"]

    node.start(*flags)
    node.until_round(killed_at["round"] + 4, 2 * START_S)
    node.running.terminate()
    assert node.wait_end(10 * PATIENCE) == 0
    later = newest(node)
    batches = steps_of(later) - steps_of(killed_at)
    assert batches > 20
    assert state_after(killed_at, batches, manifest, peer_id, texts) == later["text"]


README = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
---
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    (folder / "en").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for i in range(FILES):
        rows = [{"text": f"document {j} of file {i}. " * 5, "url": "https://example.org"} for j in range(40)]
        with gzip.open(folder / "en" / f"c4-train.{i:05}.json.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    with Hub(folder, "own/text") as hub:
        yield hub


@pytest.mark.timeout(240)
def test_training_resumes_after_an_outage_of_the_hugging_face_hub(hub: Hub, tmp_path: Path) -> None:
    """Training continues from the buffer, then waits and says why, and resumes when the hub answers again."""
    run = tiny(data={"sources": ["hub:own/text?config=en&split=train"]}, round={"min_peers": 1, "inner_steps": 10})
    with Swarm(tmp_path / "swarm", run) as swarm:
        node = swarm.found(env=hub.environment)
        node.until_round(2, 2 * START_S)
        hub.close()
        waiting = node.until(lambda s: s["code"] == "no_text", 2 * START_S)
        assert waiting["phase"] == "training" and "text" in waiting["reason"]
        node.until(lambda s: "hub:own/text" in s["reason"], 2 * START_S)
        assert "The next try is in" in node.said()
        hub.open()
        node.until_round(waiting["run"]["round"] + 3, 3 * START_S)
        assert "Traceback" not in node.said()


@pytest.mark.timeout(240)
def test_all_members_read_the_hub_commits_that_the_founder_recorded(hub: Hub, bad_texts: Path, tmp_path: Path) -> None:
    """The branch on the hub changes between the founding of the run and the join."""
    for file in (bad_texts / "words").iterdir():
        shutil.copy(file, hub.folder)
    data = {"sources": ["hub:own/text?config=en&field=text"], "tokenizer": "hub:own/text@main"}
    run = tiny(data=data, model={"vocab_size": 600}, round={"min_peers": 1, "inner_steps": 5})
    with Swarm(tmp_path / "swarm", run) as swarm:
        founder = swarm.found(env=hub.environment)
        founder.until_round(0, 2 * START_S)
        manifest = json.loads((founder.folder / "manifest.json").read_text())
        assert manifest["run"]["data"]["sources"] == [f"hub:own/text?config=en&field=text&revision={COMMIT}"]
        assert manifest["run"]["data"]["tokenizer"] == f"hub:own/text@{COMMIT}"
        hub.commit = "b" * 40
        (second,) = swarm.join("second", env=hub.environment)
        second.until(lambda s: s["contribution"]["rounds_joined"] >= 2, 3 * START_S)
    assert hub.read_at == {COMMIT}


@pytest.mark.parametrize(
    ("source", "mend"),
    [
        ("hub:own/text?config=en&revision=poems", "is not available"),
        ("hub:own/nothing", "is not available"),
        ("hub:own/text?config=de", "is not available"),
        ("hub:own/text?config=en&split=poems", "is not available"),
        ("hub:own/text?config=en&field=body", "no column 'body'"),
    ],
)
def test_node_ends_with_a_reason_if_the_hub_does_not_have_its_data_set(
    hub: Hub, swarm: Swarm, source: str, mend: str
) -> None:
    node = swarm.found(f"--run.data.sources={source}", env=hub.environment)
    assert node.wait_end(2 * START_S) in (2, 3)
    assert mend in node.said() and "Traceback" not in node.said()


def test_node_ends_with_exit_code_3_if_it_cannot_reach_the_hub_at_its_start(hub: Hub, swarm: Swarm) -> None:
    hub.close()
    node = swarm.found("--run.data.sources=hub:own/text", env=hub.environment)
    assert node.wait_end(3 * START_S) == 3
    assert "check this machine's network" in node.said() and "Traceback" not in node.said()


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that has trained a model and was then stopped."""
    run = tiny(round={"min_peers": 1}, evaluation={"batches": 4})
    with Swarm(tmp_path_factory.mktemp("trained"), run) as swarm:
        node = swarm.found("--checkpoint.every_s=0.5")
        node.until(lambda s: s["run"]["round"] >= 8 and (s["training"]["evaluation_loss"] or 9) < 4.5, 4 * START_S)
        node.running.terminate()
        assert node.wait_end(10 * PATIENCE) == 0
        yield node


@pytest.mark.timeout(240)
def test_run_that_starts_from_an_exported_model_begins_near_the_loss_of_that_model(
    trained: Node, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    code, out, err = command("export", str(folder), "--data-dir", str(trained.folder), timeout_s=60)
    assert code == 0, err
    card = (folder / "README.md").read_text()
    assert "perplexity" in card and "hash of its manifest" in card
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer("déf").input_ids == list("déf".encode())
    assert tokenizer.decode(list("déf f(x):".encode())) == "déf f(x):"
    code, out, err = command("generate", "import ", "--data-dir", str(trained.folder), "--tokens", "20", timeout_s=60)
    assert code == 0 and out.startswith("import ") and len(out) > len("import ") + 5, err
    with Swarm(tmp_path / "swarm", tiny(round={"min_peers": 1})) as swarm:
        node = swarm.found(f"--run.model.start={folder}")
        first = node.until(lambda s: s["training"]["loss"], START_S)["training"]["loss"]
        told = float(card.partition("| newest evaluation loss | ")[2].split()[0])
        assert first < told + 0.7, f"the card tells {told}; a model that knows nothing has 5.55"
        manifest = json.loads((node.folder / "manifest.json").read_text())
        assert manifest["run"]["model"]["start"] == "model", "no path of this machine is told to others"


HUGE = ("--run.model.hidden_size=16384", "--run.model.num_hidden_layers=100", "--run.model.intermediate_size=65536")


@pytest.mark.parametrize(
    ("flags", "code", "mend"),
    [
        (("--run.model.type=gpt2",), 2, "'llama', 'mistral', 'qwen2' or 'qwen3'"),
        (("--run.inner.sequence_length=4096",), 2, "max_position_embeddings"),
        (("--run.data.sources=ftp:nowhere",), 2, "in sources"),
        (("--run.data.sources=parquet:nowhere/*.parquet",), 3, "put it there"),
        (("--run.data.sources=text:empty.txt",), 3, "is empty"),
        (("--run.data.sources=text:latin.txt",), 3, "utf-8"),
        (
            ("--run.data.sources=text:good.txt", "--run.data.tokenizer=words", "--run.model.vocab_size=300"),
            2,
            "vocab_size",
        ),
        (("--run.data.sources=text:good.txt", "--run.data.tokenizer=nowhere"), 3, "no folder"),
        (("--run.model.start={texts}/gpt",), 2, "type 'gpt2'"),
        (("--run.model.start={texts}/remote",), 2, "no code"),
        (("--run.model.start={texts}/nowhere",), 3, "no such folder"),
        (HUGE, 3, "are free"),
        (("--devices.device=cuda",), 3, "set devices.device to auto or cpu"),
    ],
    ids=lambda value: value[0].split("=")[0].rpartition(".")[2] if isinstance(value, tuple) else None,
)
def test_node_ends_with_a_reason_if_its_model_text_or_device_cannot_be_used(
    swarm: Swarm, bad_texts: Path, flags: tuple[str, ...], code: int, mend: str
) -> None:
    own = [flag.format(texts=bad_texts) for flag in flags]
    if any("sources" in flag for flag in flags):
        own.append("--run.data.held_out_one_in=2")
    node = swarm.found(f"--node.text_dir={bad_texts}", *own)
    assert node.wait_end(START_S) == code, node.said()
    said = node.said()
    assert mend in said and "Traceback" not in said, said
    lines = [line for line in said.splitlines() if "The worker gave up" in line or line.startswith("diloco-node: ")]
    assert len(lines) == 1 and lines[0].endswith("."), said


@pytest.fixture(scope="module")
def bad_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes("äöü".encode("latin-1"))
    (folder / "good.txt").write_text("good " * 100)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(500)} | {"</s>": 500}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder / "words")
    for name, config in (
        ("gpt", {"model_type": "gpt2"}),
        (
            "remote",
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}},
        ),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "remote" / "own.py").write_text("raise SystemExit('this was run')\n")
    return folder
