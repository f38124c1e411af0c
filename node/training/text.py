"""The text of a run, opened: what a node trains on, and what it evaluates on. Knows the sources; knows no model.

The built-in text lies in memory, and each round has a stream of its own; other text is read on and on by a thread.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from node.errors import ConfigError, Damaged, MachineError, Unreachable
from node.manifest import RunConfig, parse_source
from node.training.data import Corpus, Stream, held_out_batches, load_corpus
from node.training.documents import Documents
from node.training.packing import Packed, first_rows
from node.training.prefetch import Prefetcher
from node.training.tokenizer import Tokenizer, open_tokenizer

logger = logging.getLogger(__name__)


class Reader(Protocol):
    """One peer's way through the text."""

    @property
    def state(self) -> dict[str, Any]:
        """JSON; with it `Library.reader` goes on behind the last batch that was taken."""
        ...

    @property
    def problem(self) -> str:
        """Why no new text comes just now; one sentence, or empty."""
        ...

    def start_round(self, round_: int) -> None: ...

    def next_batch(self) -> Tensor | None:
        """int64 cpu [B, T + 1] of the run's batch size and sequence length; None where there is none yet."""
        ...

    def close(self) -> None: ...


class Library(Protocol):
    """A run's text. Any number of readers, on one thread each."""

    def reader(self, run_id: str, peer_id: str, state: dict[str, Any] | None = None) -> Reader: ...

    def held_out(self) -> list[Tensor]:
        """The batches of `run.evaluation`, int64 cpu [B, T + 1], the same on all members."""
        ...


class BuiltinReader:
    """No rank, no world size: peer id and round suffice."""

    problem = ""

    def __init__(self, corpus: Corpus, run: RunConfig, run_id: str, peer_id: str, state: dict[str, Any] | None) -> None:
        self._corpus, self._inner, self._ids = corpus, run.inner, (run_id, peer_id)
        self._go_to(**(state or {"round": 0, "position": 0}))

    def _go_to(self, round: int, position: int) -> None:
        self._round, self._stream = round, Stream(self._corpus, *self._ids, round, position)

    @property
    def state(self) -> dict[str, Any]:
        return {"round": self._round, "position": self._stream.position}

    def start_round(self, round_: int) -> None:
        if round_ != self._round:
            self._go_to(round_, 0)

    def next_batch(self) -> Tensor:
        return self._stream.next_batch(self._inner.batch_size, self._inner.sequence_length)

    def close(self) -> None:
        pass


class BuiltinLibrary:
    def __init__(self, run: RunConfig) -> None:
        self._run, self.corpus = run, load_corpus()

    def reader(self, run_id: str, peer_id: str, state: dict[str, Any] | None = None) -> BuiltinReader:
        return BuiltinReader(self.corpus, self._run, run_id, peer_id, state)

    def held_out(self) -> list[Tensor]:
        inner = self._run.inner
        return held_out_batches(self.corpus, self._run.evaluation.batches, inner.batch_size, inner.sequence_length)


class PackedReader:
    """Reads on over the rounds; what is made ahead is not counted as read."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    @property
    def state(self) -> dict[str, Any]:
        return self._prefetcher.state or {}

    @property
    def problem(self) -> str:
        return self._prefetcher.problem

    def start_round(self, round_: int) -> None:
        pass

    def next_batch(self) -> Tensor | None:
        return self._prefetcher.take()

    def close(self) -> None:
        self._prefetcher.close()


class PackedLibrary:
    def __init__(self, run: RunConfig, text_dir: Path, cache: Path, tokenizer: Tokenizer) -> None:
        self._run, self._tokenizer = run, tokenizer
        self._text_dir, self._cache = text_dir, cache
        self._sources = [self._open(text) for text in run.data.sources]
        self._one_in = run.data.held_out_one_in
        if run.data.held_out_source or not run.evaluation.batches:
            self._one_in = 0

    def reader(self, run_id: str, peer_id: str, state: dict[str, Any] | None = None) -> PackedReader:
        data, inner = self._run.data, self._run.inner
        weights = data.weights or [1.0] * len(self._sources)

        def make(state: dict[str, Any] | None) -> Packed:
            return Packed(
                self._sources,
                weights,
                self._tokenizer,
                seed=f"{run_id}\0{peer_id}",
                held_out_one_in=self._one_in,
                state=state,
            )

        return PackedReader(Prefetcher(make, inner.batch_size, inner.sequence_length, state or None))

    def _open(self, source: str) -> Documents:
        return Documents(parse_source(source), self._text_dir, self._cache)

    def held_out(self) -> list[Tensor]:
        run, data = self._run, self._run.data
        if not run.evaluation.batches:
            return []
        source = self._open(data.held_out_source) if data.held_out_source else self._sources[0]
        rows = run.evaluation.batches * run.inner.batch_size
        length = run.inner.sequence_length + 1
        try:
            found = first_rows(source, self._tokenizer, rows, length, self._one_in)
        except (Unreachable, Damaged) as exc:
            raise MachineError(
                f"run.data: the text for evaluation cannot be read ({exc}): check the file, or this machine's network, "
                "then start again.",
                code="no_data",
            ) from exc
        return list(torch.split(torch.from_numpy(found), run.inner.batch_size))


def open_library(run: RunConfig, text_dir: Path, cache: Path) -> Library:
    """Raises MachineError where text or tokenizer are not to be had on this machine, ConfigError for what is wrong."""
    tokenizer = open_tokenizer(run.data.tokenizer, text_dir, cache)
    if tokenizer.size > run.model.vocab_size:
        raise ConfigError(
            f"run.data.tokenizer {run.data.tokenizer} has {tokenizer.size} tokens, more than "
            f"run.model.vocab_size {run.model.vocab_size}: raise that, or name a smaller tokenizer."
        )
    if run.data.is_builtin:
        return BuiltinLibrary(run)
    return PackedLibrary(run, text_dir, cache, tokenizer)
