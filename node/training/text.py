"""The text of a run, on which this node trains and evaluates.

The built-in text is in memory, and each round reads its own stream of it. A thread reads any other text, which
continues across rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.config.manifest import RunConfig, parse_source
from node.errors import ConfigError, Damaged, MachineError, Unreachable
from node.training.corpus import Corpus, Stream, held_out_batches, load_corpus
from node.training.documents import Documents
from node.training.hub import NO_ANSWER, is_on_hub
from node.training.packing import RowPacker, first_rows
from node.training.prefetch import Prefetcher
from node.training.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer


class BuiltinReader:
    """Reads the built-in text for one peer, from the stream that peer id and round determine."""

    problem = ""

    def __init__(self, corpus: Corpus, run: RunConfig, run_id: str, peer_id: str, state: dict[str, Any] | None) -> None:
        self._corpus, self._inner, self._ids = corpus, run.inner, (run_id, peer_id)
        self._seek(**(state or {"round": 0, "position": 0}))
        if self._stream.position % run.inner.sequence_length:  # It was counted in rows of another length.
            self._seek(self._round, 0)

    def _seek(self, round: int, position: int) -> None:
        self._round, self._stream = round, Stream(self._corpus, *self._ids, round, position)

    @property
    def state(self) -> dict[str, Any]:
        """The position as JSON. A new reader with this state continues after the newest batch."""
        return {"round": self._round, "position": self._stream.position}

    def start_round(self, round_: int) -> None:
        if round_ != self._round:
            self._seek(round_, 0)

    def use_weights(self, weights: Sequence[float]) -> None:
        """Do nothing, as there is one source."""

    def next_batch(self) -> Tensor:
        """Return the next batch, int64 cpu [B, T + 1]."""
        return self._stream.next_batch(self._inner.batch_size, self._inner.sequence_length)

    def close(self) -> None:
        pass


class BuiltinDataset:
    """The built-in text. It may have any number of readers, each on one thread."""

    def __init__(self, run: RunConfig) -> None:
        self._run, self._corpus = run, load_corpus()
        self.tokenizer: Tokenizer = ByteTokenizer()

    def reader(self, run_id: str, peer_id: str, state: dict[str, Any] | None = None) -> BuiltinReader:
        return BuiltinReader(self._corpus, self._run, run_id, peer_id, state)

    def held_out(self) -> list[Tensor]:
        """The batches of `run.evaluation`, int64 cpu [B, T + 1], the same on all members."""
        inner = self._run.inner
        return held_out_batches(self._corpus, self._run.evaluation.batches, inner.batch_size, inner.sequence_length)


class PackedDataset:
    """The documents of `run.data.sources`, packed into rows. There may be any number of readers, each on one thread."""

    def __init__(self, run: RunConfig, text_dir: Path, cache: Path, tokenizer: Tokenizer) -> None:
        self._run, self.tokenizer = run, tokenizer
        self._text_dir, self._cache = text_dir, cache
        self._sources = [self._open(text) for text in run.data.sources]
        holds_out = run.evaluation.batches and not run.data.held_out_source
        self._one_in = run.data.held_out_one_in if holds_out else 0

    def _open(self, source: str) -> Documents:
        return Documents(parse_source(source), self._text_dir, self._cache)

    def reader(self, run_id: str, peer_id: str, state: dict[str, Any] | None = None) -> Prefetcher:
        seed = f"{run_id}\0{peer_id}"
        chosen = drawn_sources(seed, len(self._sources), self._run.data.sources_per_member)
        sources = [self._sources[i] for i in chosen]

        def make(state: dict[str, Any] | None, weights: Sequence[float]) -> RowPacker:
            own = [weights[i] for i in chosen]
            return RowPacker(sources, own, self.tokenizer, seed=seed, held_out_one_in=self._one_in, state=state)

        inner = self._run.inner
        return Prefetcher(make, inner.batch_size, inner.sequence_length, state, self._run.weights_at(0))

    def held_out(self) -> list[Tensor]:
        """The batches of `run.evaluation`, int64 cpu [B, T + 1], the same on all members."""
        run, data = self._run, self._run.data
        if not run.evaluation.batches:
            return []
        source = self._open(data.held_out_source) if data.held_out_source else self._sources[0]
        rows = run.evaluation.batches * run.inner.batch_size
        try:
            found = first_rows(source, self.tokenizer, rows, run.inner.sequence_length + 1, self._one_in)
        except (Unreachable, Damaged) as exc:
            raise MachineError(
                f"run.data: the text for evaluation cannot be read ({exc}): check the file, or this machine's network.",
                code=NO_ANSWER if isinstance(exc, Unreachable) else "no_data",
            ) from exc
        return list(torch.split(torch.from_numpy(found), run.inner.batch_size))


def drawn_sources(seed: str, count: int, wanted: int) -> list[int]:
    """The sources, of so many, that the member reads whose run and peer `seed` names, in order. 0 means all."""
    order = sorted(range(count), key=lambda i: hashlib.sha256(f"{seed}\0source {i}".encode()).digest())
    return sorted(order[: wanted or count])


Reader = BuiltinReader | Prefetcher
TextDataset = BuiltinDataset | PackedDataset


def text_lack(run: RunConfig) -> str:
    """Why a stranger may not be able to read the text of a run, as a predicate; empty if anybody can read it.

    The patterns of local files are not looked up, because strangers write them.
    """
    data = run.data
    kinds = {parse_source(text).kind for text in (*data.sources, data.held_out_source) if text}
    if kinds - {"builtin", "hub"} or (data.tokenizer != "bytes" and not is_on_hub(data.tokenizer)):
        return "needs files that its founder gives to the members"
    if kinds != {"builtin"} and find_spec("datasets") is None:
        return "needs the Python package datasets, which is not installed"
    return ""


def open_text(run: RunConfig, text_dir: Path, cache: Path) -> TextDataset:
    """Open the text. Raises MachineError if text or tokenizer cannot be read, ConfigError for a bad configuration."""
    tokenizer = open_tokenizer(run.data.tokenizer, text_dir, cache)
    if tokenizer.size > run.model.vocab_size:
        raise ConfigError(
            f"run.data.tokenizer {run.data.tokenizer} has {tokenizer.size} tokens, more than "
            f"run.model.vocab_size {run.model.vocab_size}: raise that, or name a smaller tokenizer."
        )
    if run.data.is_builtin:
        return BuiltinDataset(run)
    return PackedDataset(run, text_dir, cache, tokenizer)
