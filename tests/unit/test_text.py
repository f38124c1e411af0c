"""Text from files and data sets has the same tokens in every format, repeats no document, and gives clear errors."""

from __future__ import annotations

import bz2
import json
import sys
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

from node.config.manifest import RunConfig, parse_source
from node.errors import ConfigError, Damaged, MachineError
from node.training.documents import Documents, piece_of
from node.training.packing import ShardOrder
from node.training.text import Reader, drawn_sources, open_text
from node.training.tokenizer import BEGIN, END, open_tokenizer
from tests.swarm.harness import tiny

B, T = 3, 16
NONE_HELD_OUT = 1_000_000
DOCUMENTS = [
    path.read_text(encoding="utf-8")[:400]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if path.stat().st_size > 400
][:60]


def write_parquet(path: Path, texts: Sequence[str]) -> None:
    pq.write_table(pa.table({"url": ["x"] * len(texts), "text": list(texts)}), path.with_suffix(".parquet"))


def write_json(path: Path, texts: Sequence[str], field: str = "text") -> None:
    path.with_suffix(".jsonl").write_text("".join(json.dumps({"url": "x", field: text}) + "\n" for text in texts))


def write_text(path: Path, texts: Sequence[str]) -> None:
    (text,) = texts
    path.with_suffix(".txt").write_text(text, encoding="utf-8")


def split_into(folder: Path, files: int, write: Callable[..., None] = write_json) -> None:
    folder.mkdir(exist_ok=True)
    for i in range(files):
        write(folder / f"part-{i:03}", DOCUMENTS[i::files])


def run_of(*sources: str, batches: int = 0, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        tiny(
            data={"sources": list(sources), **data},
            inner={"batch_size": B, "sequence_length": T},
            evaluation={"batches": batches},
        )
    )


def reader(folder: Path, *sources: str, peer: str = "peer", state: dict[str, Any] | None = None, **data: Any) -> Reader:
    return open_text(run_of(*sources, **data), folder, folder / "cache").reader("run", peer, state)


def take(source: Reader, count: int) -> torch.Tensor:
    """The rows of the next batches, [count B, T + 1]. Closes the reader."""
    taken: list[torch.Tensor] = []
    deadline = time.monotonic() + 30
    try:
        while len(taken) < count:
            assert time.monotonic() < deadline
            if (batch := source.next_batch()) is not None:
                taken.append(batch)
    finally:
        source.close()
    return torch.cat(taken) if taken else torch.empty(0, T + 1, dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    return bytes(token if token < 256 else 0 for token in tokens.flatten().tolist()).decode()


def test_parquet_json_lines_and_plain_files_give_the_same_tokens(tmp_path: Path) -> None:
    for write in (write_parquet, write_json, write_text):
        split_into(tmp_path / "files", len(DOCUMENTS), write)
    patterns = ("parquet:files/*.parquet", "json:files/*.jsonl", "text:files/*.txt")
    one, two, three = (take(reader(tmp_path, pattern), 60) for pattern in patterns)
    assert torch.equal(one, two) and torch.equal(one, three)
    assert len(set(one.flatten().tolist())) > 40


@pytest.mark.parametrize("files", [1, 5, 60])
def test_no_document_repeats_before_all_are_read(tmp_path: Path, files: int) -> None:
    split_into(tmp_path / "files", files)
    source = reader(tmp_path, "json:files/*.jsonl", held_out_one_in=NONE_HELD_OUT)
    encoded = [np.asarray([BEGIN, *text.encode(), END], dtype=">u2").tobytes() for text in DOCUMENTS]
    rows = take(source, sum(map(len, encoded)) // 2 // (B * T) // 2)
    # Consecutive rows of a lane overlap by one token: the last target is the next row's first input.
    lanes = [rows[lane::8] for lane in range(8)]
    strings = [lane[:, :-1].numpy().astype(">u2").tobytes() for lane in lanes]
    found = [text for text, data in zip(DOCUMENTS, encoded, strict=True) for string in strings if data in string]
    assert len(found) == len(set(found)) > len(DOCUMENTS) / 4
    assert all(torch.equal(lane[:-1, -1], lane[1:, 0]) for lane in lanes)


@pytest.mark.parametrize("files", [1, 3, 20])
def test_rows_of_few_text_files_differ_within_a_batch_and_between_peers(tmp_path: Path, files: int) -> None:
    for number in range(files):
        text = "".join(f"{number}.{line} " + "\n" * (line % 9 == 0) for line in range(16_000 // files))
        (tmp_path / f"book-{number}.txt").write_text(text)
    peers = (
        take(reader(tmp_path, "text:*.txt", peer=peer, held_out_one_in=NONE_HELD_OUT), 20).tolist() for peer in "bc"
    )
    one, other = ([tuple(row) for row in rows] for rows in peers)
    assert len(set(one)) == len(one) == len(set(other))
    assert len(set(one) & set(other)) < len(one) / 2, "8 of at least 32 pieces are in both"


@pytest.mark.parametrize(
    "text", ["", "a", "one line without an end", "a\nbb\nccc\n", "\n\n\n\n\n\n", "x" * 50 + "\n" + "y" * 9]
)
def test_pieces_make_up_the_text_and_end_with_a_line_if_they_can(text: str) -> None:
    for parts in (1, 2, 7, 32):
        pieces = [piece_of(text, part, parts) for part in range(parts)]
        assert "".join(pieces) == text
    assert [piece_of("aa\nbb\ncc\ndd\n", part, 2) for part in range(2)] == ["aa\nbb\ncc\n", "dd\n"]


@pytest.mark.parametrize("at", [0, 1, 7, 40])
def test_a_text_reader_continues_after_the_last_batch_that_was_taken(tmp_path: Path, at: int) -> None:
    split_into(tmp_path / "files", 5)
    first = reader(tmp_path, "json:files/*.jsonl")
    whole = take(reader(tmp_path, "json:files/*.jsonl"), at + 20)
    assert torch.equal(take(first, at), whole[: at * B])
    state = json.loads(json.dumps(first.state))
    assert torch.equal(take(reader(tmp_path, "json:files/*.jsonl", state=state), 20), whole[at * B :])


def test_peers_read_the_shards_of_a_text_in_different_orders(tmp_path: Path) -> None:
    split_into(tmp_path / "files", 60)
    one, two = (take(reader(tmp_path, "json:files/*.jsonl", peer=peer), 10) for peer in ("one", "two"))
    assert not torch.equal(one, two)


def test_new_weights_hold_from_the_next_batch_on_and_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 5000)
    (tmp_path / "b.txt").write_text("b" * 5000)

    def shares(rows: torch.Tensor) -> float:
        """The share of rows of the source a."""
        return float((rows[:, 1] == ord("a")).float().mean())

    def opened(state: dict[str, Any] | None) -> Reader:
        names = ("text:a.txt", "text:b.txt")
        return reader(tmp_path, *names, weights=[3.0, 1.0], held_out_one_in=NONE_HELD_OUT, state=state)

    first = opened(None)
    assert shares(take(first, 20)) == pytest.approx(0.75, abs=0.01)
    second = opened(first.state)
    second.use_weights((1.0, 3.0))
    assert shares(take(second, 10)) == pytest.approx(0.25, abs=0.05), "the rows before the change do not count"
    third, same = opened(second.state), opened(second.state)
    third.use_weights((1.0, 3.0))
    same.use_weights((1.0, 3.0))
    rest = take(third, 10)
    assert shares(rest) == pytest.approx(0.25, abs=0.05)
    same.use_weights((1.0, 3.0))
    assert torch.equal(take(same, 10), rest), "nothing is read twice or left out"


def test_members_read_different_sources_if_the_manifest_wants_it(tmp_path: Path) -> None:
    """Each member reads one of three sources, and the same one after a restart."""
    texts = "abc"
    for letter in texts:
        write_text(tmp_path / letter, [letter * 5000])
    names = [f"text:{letter}.txt" for letter in texts]
    read = {}
    for peer in ("one", "two", "three", "four"):
        rows = [
            take(reader(tmp_path, *names, peer=peer, sources_per_member=1, held_out_one_in=NONE_HELD_OUT), 2)
            for _ in range(2)
        ]
        assert torch.equal(*rows)
        letters = {chr(token) for token in rows[0].flatten().tolist() if token < 256}
        assert len(letters) == 1
        read[peer] = letters.pop()
    assert len(set(read.values())) > 1, "members read different sources"


def test_text_of_another_number_of_sources_is_read_from_the_beginning(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        split_into(tmp_path / name, 2)
    both, one = ("json:a/*", "json:b/*"), ("json:a/*",)
    for before, after in ((both, one), (one, both)):
        first = reader(tmp_path, *before)
        take(first, 2)
        again, fresh = reader(tmp_path, *after, state=first.state), reader(tmp_path, *after)
        assert torch.equal(take(again, 2), take(fresh, 2))


def test_position_in_the_built_in_text_does_not_count_with_rows_of_another_length(tmp_path: Path) -> None:
    rows = [RunConfig.model_validate(tiny(inner={"batch_size": 2, "sequence_length": n})) for n in (16, 64)]
    first, again, fresh = (
        open_text(run, tmp_path, tmp_path / "cache").reader("run", "peer", {"round": 3, "position": position})
        for run, position in ((rows[0], 0), (rows[1], 32), (rows[1], 0))
    )
    assert take(first, 1).shape == (2, 17)
    assert torch.equal(take(again, 1), take(fresh, 1))


def test_members_draw_all_sources_equally_often() -> None:
    drawn = [drawn_sources(f"run\0{peer}", 3, 2) for peer in range(600)]
    assert all(len(set(chosen)) == 2 for chosen in drawn)
    assert all(sum(i in chosen for chosen in drawn) == pytest.approx(400, rel=0.1) for i in range(3))
    assert drawn_sources("run\0peer", 3, 0) == [0, 1, 2]


def test_held_out_documents_are_the_same_for_all_peers_and_never_trained_on(tmp_path: Path) -> None:
    write_json(tmp_path / "many", [f"document number {i:05} of many." for i in range(400)])
    run = run_of("json:many.jsonl", batches=2, held_out_one_in=10)
    dataset = open_text(run, tmp_path, tmp_path / "cache")
    held_out = dataset.held_out()
    again = open_text(run, tmp_path, tmp_path / "cache").held_out()
    assert [part.shape for part in held_out] == [(B, T + 1)] * 2
    assert all(torch.equal(a, b) for a, b in zip(held_out, again, strict=True))
    seen = decode(torch.cat(held_out))
    names = {seen[i + 7 : i + 12] for i in range(len(seen)) if seen.startswith("number ", i) and len(seen) > i + 12}
    text = decode(take(dataset.reader("run", "peer"), 400)[:, :-1])
    assert len(names) >= 3
    assert not [name for name in names if f"number {name} of" in text]


def test_files_that_cannot_be_read_are_left_out_of_the_text_for_evaluation(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("not JSON\n")
    run = run_of("json:*.jsonl", batches=1, held_out_one_in=2)
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(MachineError, match=r"json:\*\.jsonl cannot be read .*: repair or remove the file"):
        open_text(run, tmp_path, tmp_path / "cache").held_out()
    write_json(tmp_path / "c", [f"good {i}" for i in range(64)])
    (only,) = open_text(run, tmp_path, tmp_path / "cache").held_out()
    assert "good" in decode(only)


def test_names_of_files_and_folders_may_have_brackets(tmp_path: Path) -> None:
    folder = tmp_path / "texts [1]"
    folder.mkdir()
    write_json(folder / "part[2]", ["inside " * 20] * 9)
    assert "inside" in decode(take(reader(folder, "json:*.jsonl", held_out_one_in=NONE_HELD_OUT), 1))


def test_all_of_the_training_text_is_read_if_there_is_a_validation_source(tmp_path: Path) -> None:
    write_json(tmp_path / "train", ["train " * 20] * 9)
    write_json(tmp_path / "validation", ["valid " * 20] * 9)
    run = run_of("json:train.jsonl", batches=1, held_out_source="json:validation.jsonl", held_out_one_in=2)
    dataset = open_text(run, tmp_path, tmp_path / "cache")
    (only,) = dataset.held_out()
    assert "valid" in decode(only)
    assert "train" in decode(take(dataset.reader("run", "p"), 1))


def test_a_hundred_peers_together_read_as_many_shards_as_independent_random_orders() -> None:
    shards, rng = 1024, np.random.default_rng(0)
    read, missed = set(), 1.0
    for peer in range(100):
        count = int(rng.integers(1, 40))
        order = ShardOrder(f"run\0peer {peer}\0{0}", shards)
        own = {order[i] for i in range(count)}
        assert len(own) == count
        read |= own
        missed *= 1 - count / shards
    assert len(read) == pytest.approx(shards * (1 - missed), rel=0.03)


# bad input


@pytest.mark.parametrize(
    "source",
    [
        "text:/etc/passwd", "text:~/mail/*", "text:../../secret.txt", "json:a/../../b",
        "hub:/etc", "hub:./a", "hub:../x/y",
    ],
)  # fmt: skip
def test_a_manifest_cannot_name_files_outside_the_text_folder(source: str) -> None:
    with pytest.raises(ValueError, match=r"in sources is (outside of|not a data set)"):
        run_of(source)
    with pytest.raises(ValueError, match="tokenizer"):
        run_of("text:a.txt", tokenizer=source.partition(":")[2] if source.startswith("text") else source)


@pytest.mark.parametrize("files", [1, 40])
def test_text_source_with_changed_files_is_read_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: int
) -> None:
    split_into(tmp_path / "files", files)
    first = reader(tmp_path, "json:files/*.jsonl")
    take(first, 20)
    write_json(tmp_path / "files" / "more", ["more " * 50])
    again = take(reader(tmp_path, "json:files/*.jsonl", state=first.state), 5)
    assert (again[:8, 0] == BEGIN).all(), "each lane begins with a document"
    assert "have changed" in caplog.text


@pytest.mark.parametrize(("source", "goes_on"), [("json:files/*.jsonl", True), ("text:book.txt", False)])
def test_a_position_of_an_older_version_holds_unless_text_is_cut_now(
    tmp_path: Path, source: str, goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    split_into(tmp_path / "files", 1)
    (tmp_path / "book.txt").write_text("\n".join(DOCUMENTS))
    first = reader(tmp_path, source)
    take(first, 20)
    older = first.state
    del older["layouts"]
    caplog.clear()
    again = take(reader(tmp_path, source, state=older), 2)
    assert ("have changed" in caplog.text) == (not goes_on)
    if goes_on:
        assert torch.equal(again, take(reader(tmp_path, source, state=first.state), 2))
    else:
        assert (again[:, 0] == BEGIN).all(), "each lane begins with a piece"


def test_a_new_column_costs_no_text(tmp_path: Path) -> None:
    """The columns are those of the first part of the first file."""
    rows = [{"text": f"{number} {'x' * 1000}", "meta": {"url": "u"}} for number in range(12_000)]
    rows[11_000]["meta"] = {"url": "u", "license": "by"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b", "id": "name"}) + "\n")
    found = Documents(parse_source("json:*.jsonl"), tmp_path, tmp_path / "cache")
    last = [file * found.shards // found.files for file in range(2)]
    assert [sum(1 for _ in found.read(shard, 0)) for shard in last] == [12_000 // 16, 1]


@pytest.mark.parametrize("content", ["\n", "[]"])
def test_a_first_file_without_a_document_is_passed_over(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    write_json(tmp_path / "b", ["abc " * 200])
    rows = take(reader(tmp_path, "json:*.jsonl", held_out_one_in=NONE_HELD_OUT), 1)
    assert decode(rows[0, 1:]).startswith("abc")


def error_of(folder: Path, *sources: str, **data: Any) -> str:
    with pytest.raises((MachineError, ConfigError)) as caught:
        take(reader(folder, *sources, **data), 1)
    assert caught.value.exit_code in (2, 3)
    text = str(caught.value)
    assert text.count(". ") == 0 and ":" in text, "one sentence, with the remedy"
    return text


@pytest.mark.parametrize(
    ("name", "content", "source", "error"),
    [
        ("other", b"", "parquet:nowhere/*.parquet", "no file on this machine"),
        ("empty.txt", b"", "text:empty.txt", "is empty"),
        ("hollow.jsonl", b'{"text": ""}\n{"text": ""}\n', "json:hollow.jsonl", "no text in any of its files"),
        ("latin.txt", "äöü".encode("latin-1"), "text:latin.txt", "utf-8"),
        ("bad", b"{nonsense\n", "json:bad", "repair or remove the file"),
        ("bad", b"{nonsense\n", "parquet:bad", "repair or remove the file"),
        ("body.jsonl", b'{"url": "x", "body": "abc"}\n', "json:body.jsonl", "no column 'text' (it has url, body)"),
    ],
)
def test_missing_and_bad_text_files_are_errors_with_a_remedy(
    tmp_path: Path, name: str, content: bytes, source: str, error: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert error in error_of(tmp_path, source)


def test_a_text_source_can_name_the_column_of_its_text(tmp_path: Path) -> None:
    write_json(tmp_path / "other", ["abc"], field="body")
    assert take(reader(tmp_path, "json:other.jsonl?field=body", held_out_one_in=NONE_HELD_OUT), 1).shape == (B, T + 1)


def test_a_damaged_text_file_among_intact_ones_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(40):
        write_text(tmp_path / f"whole{i}", ["whole " * 30])
    (tmp_path / "latin.txt").write_bytes("äöü".encode("latin-1") * 20)
    take(reader(tmp_path, "text:*.txt", held_out_one_in=NONE_HELD_OUT), 200)
    assert "left out" in caplog.text and "utf-8" in caplog.text


def test_an_unreachable_hub_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'some/where' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert "cannot be reached" in error_of(tmp_path, "hub:some/where")


def test_a_folder_here_is_not_read_in_place_of_a_repository_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own" / "letters").mkdir(parents=True)
    write_json(tmp_path / "own" / "letters" / "private", ["my private letter"])
    monkeypatch.chdir(tmp_path)
    assert "would be read in its place" in error_of(tmp_path, "hub:own/letters")
    with pytest.raises(MachineError, match="would be read in its place"):
        open_tokenizer("hub:own/letters@main", tmp_path, tmp_path)


def test_a_file_on_which_the_tokenizer_panics_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pattern that needs exponential time makes the Rust library panic, and a panic is no Exception in Python."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<end>": 0, "<other>": 1}, unk_token="<other>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("(a|a)*$"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(tmp_path / "panics")
    for number in range(41):
        (tmp_path / f"{number:02d}.txt").write_text("word " * 50)
    (tmp_path / "10.txt").write_text("a" * 40 + "b")
    take(reader(tmp_path, "text:*.txt", tokenizer="panics", held_out_one_in=NONE_HELD_OUT), 60)
    assert "left out" in caplog.text and "the tokenizer has failed on a document" in caplog.text


def test_a_document_with_a_character_that_the_vocabulary_lacks_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Unigram tokenizer has no token for unknown characters unless its trainer is told to make one."""
    from tokenizers import Tokenizer, models, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(vocab_size=30, special_tokens=["<end>"], show_progress=False)
    inner.train_from_iterator(["common words"] * 20, trainer)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(tmp_path / "unigram")
    for number in range(41):
        write_json(tmp_path / f"{number:02d}", ["common words"] * 20)
    write_json(tmp_path / "10", ["caf\u00e9", "common words"])
    take(reader(tmp_path, "json:*.jsonl", tokenizer="unigram", held_out_one_in=NONE_HELD_OUT), 60)
    assert "A document is left out: the tokenizer has failed" in caplog.text


def test_a_damaged_bz2_file_of_the_hub_is_not_read_again_for_ever(tmp_path: Path) -> None:
    packed = bytearray(bz2.compress(b'{"text": "some text"}\n' * 40_000))
    packed[len(packed) // 2] ^= 0xFF
    good = bz2.compress(b'{"text": "some text"}\n')
    for number in range(41):
        (tmp_path / f"{number:02d}.jsonl.bz2").write_bytes(packed if number == 7 else good)
    documents = Documents(parse_source("json:*.jsonl.bz2"), tmp_path, tmp_path / "cache")
    documents._is_hub = True
    assert [text for _, text in documents.read(6, 0)] == ["some text"]
    with pytest.raises(Damaged, match="Invalid data stream"):
        list(documents.read(7, 0))


def test_a_document_on_which_the_tokenizer_panics_costs_no_other_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"common": 0, "rare": 1, "<end>": 2, "<other>": 3}, unk_token="<other>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("(a|a)*$"), "isolated"), pre_tokenizers.WhitespaceSplit()]
    )
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(tmp_path / "panics")
    for number in range(41):  # So many files are not divided into parts.
        write_json(tmp_path / f"{number:02d}", ["common " * 50])
    write_json(tmp_path / "10", ["a" * 40 + "b", "rare " * 50])
    rows = take(reader(tmp_path, "json:*.jsonl", tokenizer="panics", held_out_one_in=NONE_HELD_OUT), 60)
    assert "A document is left out: the tokenizer has failed" in caplog.text
    assert 1 in rows


def test_a_package_datasets_that_reads_local_files_for_the_hub_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets, "__version__", "5.0.0")
    assert "5.1 or newer, and 5.0.0 is installed" in error_of(tmp_path, "hub:some/where")


def test_only_the_built_in_text_can_be_read_without_the_package_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    write_json(tmp_path / "own", ["abc"])
    assert "install diloco-node[datasets]" in error_of(tmp_path, "json:own.jsonl")
    assert take(reader(tmp_path, "builtin:python-stdlib"), 1).shape == (B, T + 1)


@pytest.mark.parametrize(
    "source", ["", "hub:", "ftp:somewhere", "builtin:poems", "hub:a/b?color=red", "text:a?field=b"]
)
def test_invalid_text_sources_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="in sources"):
        run_of(source)


def test_built_in_text_must_be_the_only_source_and_each_source_needs_a_weight() -> None:
    with pytest.raises(ValueError, match="must be the only source"):
        run_of("builtin:python-stdlib", "text:a.txt")
    with pytest.raises(ValueError, match="as there are sources"):
        run_of("text:a.txt", weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="name more sources"):
        run_of("text:a.txt", sources_per_member=2)
