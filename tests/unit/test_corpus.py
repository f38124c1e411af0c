"""The built-in text is complete, split by file name, and reproducible from any position."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from node.errors import MachineError
from node.training.corpus import Corpus, Split, Stream, held_out_batches, is_held_out, load_corpus
from node.training.tokenizer import BEGIN, END


def write_library(folder: Path, files: int) -> Path:
    for i in range(files):
        path = folder / f"package{i % 7}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"x = {i}\n".encode() * (i % 5))
    return folder


def numbered_corpus(lengths: list[int]) -> Corpus:
    """A corpus in which all tokens are different numbers."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    split = Split(tokens=np.arange(offsets[-1], dtype=np.uint16), offsets=offsets)
    return Corpus(train=split, held_out=split)


CORPUS = numbered_corpus([5, 300, 17, 1, 90, 2, 41])
N = 456


def test_documents_are_the_bytes_of_a_file_between_a_begin_and_an_end_token(tmp_path: Path) -> None:
    folder = write_library(tmp_path, 200)
    corpus = load_corpus(folder)
    texts = set()
    for split in (corpus.train, corpus.held_out):
        for start, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
            document = split.tokens[start:end]
            assert document[0] == BEGIN
            assert document[-1] == END
            texts.add(bytes(document[1:-1].astype(np.uint8)))
    assert texts == {path.read_bytes() for path in folder.rglob("*.py")}
    assert corpus.train.documents + corpus.held_out.documents == 200


def test_held_out_split_depends_on_the_file_names_only(tmp_path: Path) -> None:
    folder = write_library(tmp_path, 200)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]
    expected = sum(is_held_out(name) for name in names)
    assert load_corpus(folder).held_out.documents == expected > 0
    assert 0.03 < sum(is_held_out(f"module{i}.py") for i in range(5000)) / 5000 < 0.07


def test_built_in_text_omits_foreign_packages_and_unreadable_files(tmp_path: Path) -> None:
    folder = write_library(tmp_path, 200)
    for other in ("site-packages", "dist-packages", "package0/__pycache__"):
        (folder / other).mkdir()
        (folder / other / "foreign.py").write_text("foreign")
    (folder / "notes.txt").write_text("foreign")
    (folder / "dangling.py").symlink_to(folder / "nowhere.py")
    corpus = load_corpus(folder)
    assert corpus.train.documents + corpus.held_out.documents == 200


def test_an_incomplete_standard_library_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"99 readable source files.*install"):
        load_corpus(write_library(tmp_path, 99))
    with pytest.raises(MachineError):
        load_corpus(tmp_path / "nowhere")


def test_standard_library_of_this_python_has_enough_text_and_loads_within_2_s() -> None:
    load_corpus()  # The first load may wait for the disk.
    begin_s = time.process_time()
    corpus = load_corpus()
    assert time.process_time() - begin_s < 2.0, "CPU time, which excludes other programs"
    assert len(corpus.train.tokens) > 5_000_000
    assert len(corpus.held_out.tokens) > 100_000


@pytest.mark.parametrize("sequence_length", [8, 19, 100])
def test_every_token_is_a_target_in_each_pass_over_the_text(sequence_length: int) -> None:
    rows = -(-N // sequence_length)
    stream = Stream(CORPUS, "run", "peer", 0)
    batch = torch.cat([stream.next_batch(1, sequence_length) for _ in range(rows)])
    seen = np.bincount(batch[:, 1:].flatten().numpy(), minlength=N)
    assert seen.min() == 1
    assert seen.max() <= 2
    assert (seen == 2).sum() == rows * sequence_length - N
    assert stream.position == rows * sequence_length


def test_training_rows_are_packed_documents_and_overlap_by_one_token() -> None:
    stream = Stream(CORPUS, "run", "peer", 0)
    batch = stream.next_batch(46, 10)
    assert batch.shape == (46, 11)
    assert batch.dtype == torch.int64
    begins, ends = set(batch[:, 0].tolist()), set(batch[:, -1].tolist())
    assert len(begins - ends) == 1, "all rows but the first begin with another row's last target"
    starts, lasts = set(CORPUS.train.offsets[:-1].tolist()), set((CORPUS.train.offsets[1:] - 1).tolist())
    for row in batch.tolist():
        for a, b in pairwise(row):
            assert b == a + 1 or (a in lasts and b in starts)


def test_a_token_stream_continues_exactly_from_a_saved_position() -> None:
    whole = Stream(CORPUS, "run", "peer", 3)
    batches = [whole.next_batch(4, 16) for _ in range(40)]  # These are more than five passes over the text.
    for k in (0, 1, 7, 8, 39):
        resumed = Stream(CORPUS, "run", "peer", 3, position=k * 64)
        assert torch.equal(resumed.next_batch(4, 16), batches[k])
    other_size = Stream(CORPUS, "run", "peer", 3, position=64)
    assert torch.equal(torch.cat([other_size.next_batch(2, 16), other_size.next_batch(2, 16)]), batches[1])


def test_order_of_the_text_differs_between_runs_peers_and_rounds() -> None:
    names = [("run", "peer", 0), ("run2", "peer", 0), ("run", "peer2", 0), ("run", "peer", 1), ("runp", "eer", 0)]
    first = [tuple(Stream(CORPUS, *name).next_batch(4, 16).flatten().tolist()) for name in names]
    assert len(set(first)) == len(names)


def test_rows_of_a_batch_come_from_distant_documents() -> None:
    corpus = numbered_corpus([100] * 600)
    batch = Stream(corpus, "run", "peer", 0).next_batch(8, 20)
    assert len(set((batch[:, 0] // 100).tolist())) == 8


def test_making_a_batch_takes_less_than_a_millisecond() -> None:
    stream = Stream(load_corpus(), "run", "peer", 0)
    stream.next_batch(8, 256)
    begin_s = time.thread_time()
    for _ in range(100):
        stream.next_batch(8, 256)
    assert (time.thread_time() - begin_s) / 100 < 0.001, "an inner step on 2,048 tokens takes some 100 ms on a CPU"


def test_held_out_batches_are_spread_evenly_and_reproducible() -> None:
    batches = held_out_batches(CORPUS, 3, 4, 16)
    assert [b.shape for b in batches] == [(4, 17)] * 3
    starts = torch.cat(batches)[:, 0]
    assert starts[0] == 0
    assert torch.cat(batches)[-1, -1] == N - 1
    assert starts.diff().min() >= starts.diff().max() - 1
    assert all(torch.equal(a, b) for a, b in zip(batches, held_out_batches(CORPUS, 3, 4, 16), strict=True))
    assert held_out_batches(CORPUS, 0, 4, 16) == []
    assert held_out_batches(CORPUS, 1, 1, 16)[0].shape == (1, 17)
    assert held_out_batches(numbered_corpus([5]), 1, 2, 16)[0].max() == 4
