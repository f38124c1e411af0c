"""Text from files and data sets: the same tokens whatever the format, none twice and none lost, and clear faults."""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from node.errors import ConfigError, MachineError
from node.manifest import RunConfig
from node.training.packing import ShardOrder
from node.training.text import Reader, open_library
from node.training.tokenizer import BEGIN, END
from tests.swarm.harness import tiny

B, T = 3, 16
DOCUMENTS = [
    path.read_text(encoding="utf-8")[:400]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if path.stat().st_size > 400
][:60]


def write_parquet(path: Path, texts: Sequence[str], field: str = "text") -> None:
    pq.write_table(pa.table({"url": ["x"] * len(texts), field: list(texts)}), path.with_suffix(".parquet"))


def write_json(path: Path, texts: Sequence[str], field: str = "text") -> None:
    path.with_suffix(".jsonl").write_text("".join(json.dumps({"url": "x", field: text}) + "\n" for text in texts))


def write_text(path: Path, texts: Sequence[str], field: str = "text") -> None:
    (text,) = texts
    path.with_suffix(".txt").write_text(text, encoding="utf-8")


def run_of(*sources: str, batches: int = 0, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        tiny(
            data={"sources": list(sources), **data},
            inner={"batch_size": B, "sequence_length": T},
            evaluation={"batches": batches},
        )
    )


def reader(folder: Path, *sources: str, peer: str = "peer", state: dict[str, Any] | None = None, **data: Any) -> Reader:
    return open_library(run_of(*sources, **data), folder, folder / "cache").reader("run", peer, state)


def batches(source: Reader, count: int) -> torch.Tensor:
    """[count B, T + 1]"""
    try:
        taken = [taken_from(source) for _ in range(count)]
        return torch.cat(taken) if taken else torch.empty(0, T + 1, dtype=torch.int64)
    finally:
        source.close()


def taken_from(source: Reader) -> torch.Tensor:
    deadline = time.monotonic() + 30
    while (batch := source.next_batch()) is None:
        assert time.monotonic() < deadline
    return batch


def split_into(folder: Path, files: int, write: Callable[..., None]) -> None:
    folder.mkdir(exist_ok=True)
    for i in range(files):
        write(folder / f"part-{i:03}", DOCUMENTS[i::files])


def as_tokens(text: str) -> list[int]:
    return [BEGIN, *text.encode(), END]


def test_parquet_json_lines_and_plain_files_give_the_same_tokens(tmp_path: Path) -> None:
    """A file a document, as plain files are."""
    for write in (write_parquet, write_json, write_text):
        split_into(tmp_path / "files", len(DOCUMENTS), write)
    patterns = ("parquet:files/*.parquet", "json:files/*.jsonl", "text:files/*.txt")
    one, two, three = (batches(reader(tmp_path, pattern), 60) for pattern in patterns)
    assert torch.equal(one, two) and torch.equal(one, three)
    assert len(set(one.flatten().tolist())) > 40


@pytest.mark.parametrize("files", [1, 5, 60])
def test_every_document_comes_once_before_any_comes_twice(tmp_path: Path, files: int) -> None:
    split_into(tmp_path / "files", files, write_json)
    source = reader(tmp_path, "json:files/*.jsonl", held_out_one_in=1_000_000)
    total = sum(len(as_tokens(text)) for text in DOCUMENTS)
    rows = batches(source, total // (B * T) // 2)
    # The rows of one lane follow each other: the last target of each is the first input of the next.
    lanes = 8
    strings = [np.concatenate([row[:-1] for row in rows.numpy()[lane::lanes]]) for lane in range(lanes)]
    found = [text for text in DOCUMENTS for string in strings if _holds(string, as_tokens(text))]
    assert len(found) == len(set(found)) > len(DOCUMENTS) / 4
    for lane in range(lanes):
        own = rows[lane::lanes]
        assert torch.equal(own[:-1, -1], own[1:, 0])


def _holds(tokens: np.ndarray[Any, np.dtype[np.int64]], document: list[int]) -> bool:
    return bytes(np.asarray(document, dtype=">u2")) in bytes(tokens.astype(">u2"))


@pytest.mark.parametrize("at", [0, 1, 7, 40])
def test_a_reader_goes_on_behind_the_last_batch_that_was_taken(tmp_path: Path, at: int) -> None:
    split_into(tmp_path / "files", 5, write_json)
    first = reader(tmp_path, "json:files/*.jsonl")
    whole = batches(reader(tmp_path, "json:files/*.jsonl"), at + 20)
    assert torch.equal(batches(first, at), whole[: at * B])
    state = json.loads(json.dumps(first.state))
    assert torch.equal(batches(reader(tmp_path, "json:files/*.jsonl", state=state), 20), whole[at * B :])


def test_peers_read_different_shards_at_different_times(tmp_path: Path) -> None:
    split_into(tmp_path / "files", 60, write_json)
    one, two = (batches(reader(tmp_path, "json:files/*.jsonl", peer=peer), 10) for peer in ("one", "two"))
    assert not torch.equal(one, two)


def test_sources_come_by_their_weights(tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b")):
        write_text(tmp_path / name, [letter * 5000])
    rows = batches(reader(tmp_path, "text:a.txt", "text:b.txt", weights=[3.0, 1.0], held_out_one_in=1_000_000), 40)
    share = (rows == ord("a")).any(dim=1).double().mean().item()
    assert share == pytest.approx(0.75, abs=0.01)


def test_what_is_held_out_is_never_trained_on_and_the_same_for_all(tmp_path: Path) -> None:
    texts = [f"document number {i:05} of many." for i in range(400)]
    write_json(tmp_path / "many", texts)
    run = run_of("json:many.jsonl", batches=2, held_out_one_in=10)
    library = open_library(run, tmp_path, tmp_path / "cache")
    held_out = library.held_out()
    again = open_library(run, tmp_path, tmp_path / "cache").held_out()
    assert [part.shape for part in held_out] == [(B, T + 1)] * 2
    assert all(torch.equal(a, b) for a, b in zip(held_out, again, strict=True))
    seen = bytes(token if token < 256 else 0 for token in torch.cat(held_out).flatten().tolist()).decode()
    names = {seen[i + 7 : i + 12] for i in range(len(seen)) if seen.startswith("number ", i) and len(seen) > i + 12}
    trained = batches(library.reader("run", "peer"), 400)
    text = bytes(token if token < 256 else 0 for row in trained for token in row[:-1].tolist()).decode()
    assert len(names) >= 3
    assert not [name for name in names if f"number {name} of" in text]


def test_a_validation_source_leaves_all_of_the_text_to_training(tmp_path: Path) -> None:
    write_json(tmp_path / "train", ["train " * 20] * 9)
    write_json(tmp_path / "validation", ["valid " * 20] * 9)
    run = run_of("json:train.jsonl", batches=1, held_out_source="json:validation.jsonl", held_out_one_in=2)
    library = open_library(run, tmp_path, tmp_path / "cache")
    (only,) = library.held_out()
    assert b"valid" in bytes(token for token in only.flatten().tolist() if token < 256)
    assert b"train" in bytes(
        token for token in batches(library.reader("run", "p"), 1).flatten().tolist() if token < 256
    )


def test_overlap_of_a_hundred_peers_that_come_and_go_is_as_expected() -> None:
    """Each reads a random share of the shards; the union is what independent orders give."""
    shards, rng = 1024, np.random.default_rng(0)
    read, missed = set(), 1.0
    for peer in range(100):
        count = int(rng.integers(1, 40))
        order = ShardOrder(f"run\0peer {peer}\0{0}", shards)
        own = {order[i] for i in range(count)}
        assert len(own) == count
        read |= own
        missed *= 1 - count / shards
    expected = shards * (1 - missed)
    assert len(read) == pytest.approx(expected, rel=0.03)


# Bad input


@pytest.mark.parametrize(
    "source",
    [
        "text:/etc/passwd",
        "text:~/mail/*",
        "text:../../secret.txt",
        "json:a/../../b",
        "hub:/etc",
        "hub:./a",
        "hub:../x/y",
    ],
)
def test_a_manifest_names_no_file_of_a_volunteers(source: str) -> None:
    with pytest.raises(ValueError, match=r"in sources (leaves|is no data set)"):
        run_of(source)
    with pytest.raises(ValueError, match="tokenizer"):
        run_of("text:a.txt", tokenizer=source.partition(":")[2] if source.startswith("text") else source)


def test_other_files_than_before_are_read_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    split_into(tmp_path / "files", 40, write_json)
    first = reader(tmp_path, "json:files/*.jsonl")
    batches(first, 20)
    write_json(tmp_path / "files" / "more", ["more " * 50])
    again = batches(reader(tmp_path, "json:files/*.jsonl", state=first.state), 5)
    assert (again[:8, 0] == BEGIN).all(), "each lane begins with a document"
    assert "read anew" in caplog.text


def message(folder: Path, *sources: str, **data: Any) -> str:
    with pytest.raises((MachineError, ConfigError)) as caught:
        batches(reader(folder, *sources, **data), 1)
    assert caught.value.exit_code in (2, 3)
    text = str(caught.value)
    assert text.count(". ") == 0 and ":" in text, "one sentence, with the mend"
    return text


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert "no file on this machine" in message(tmp_path, "parquet:nowhere/*.parquet")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    assert "has no text" in message(tmp_path, "text:empty.txt")


def test_files_without_any_document(tmp_path: Path) -> None:
    write_json(tmp_path / "hollow", ["", ""])
    assert "no text in any of its files" in message(tmp_path, "json:hollow.jsonl")


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("äöü".encode("latin-1"))
    assert "utf-8" in message(tmp_path, "text:latin.txt")


def test_a_damaged_file_among_whole_ones_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(40):
        write_text(tmp_path / f"whole{i}", ["whole " * 30])
    (tmp_path / "latin.txt").write_bytes("äöü".encode("latin-1") * 20)
    batches(reader(tmp_path, "text:*.txt", held_out_one_in=1_000_000), 200)
    assert "left out" in caplog.text and "utf-8" in caplog.text


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_files_that_are_not_what_they_say(tmp_path: Path, kind: str) -> None:
    (tmp_path / "bad").write_text("{nonsense\n")
    assert "mend or remove the file" in message(tmp_path, f"{kind}:bad")


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    write_json(tmp_path / "other", ["abc"], field="body")
    assert "no column 'text', but url, body" in message(tmp_path, "json:other.jsonl")
    assert batches(reader(tmp_path, "json:other.jsonl?field=body", held_out_one_in=1_000_000), 1).shape == (B, T + 1)


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'some/where' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert "cannot be reached" in message(tmp_path, "hub:some/where")


@pytest.mark.parametrize(
    "source", ["", "hub:", "ftp:somewhere", "builtin:poems", "hub:a/b?color=red", "text:a?field=b"]
)
def test_sources_that_are_no_sources(source: str) -> None:
    with pytest.raises(ValueError, match="in sources"):
        run_of(source)


def test_the_built_in_text_stands_alone() -> None:
    with pytest.raises(ValueError, match="stands alone"):
        run_of("builtin:python-stdlib", "text:a.txt")
    with pytest.raises(ValueError, match="as many as sources"):
        run_of("text:a.txt", weights=[1.0, 2.0])
