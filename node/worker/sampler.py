"""Samples of the model's text every few rounds, kept on disk so that people can compare rounds.

A sample takes a small part of a round's time. A node whose model is too slow for that has no samples.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from node.config.manifest import SampleConfig
from node.errors import Damaged
from node.host.files import write_whole
from node.host.printable import CONTROLS
from node.status import Sample
from node.swarm.chain.chain import Tip
from node.worker.inner_trainer import InnerTrainer
from node.worker.supervisor_link import StopAsked

logger = logging.getLogger(__name__)

SAMPLES_FILE = "samples.json"
MOST_SHARE, MOST_ROUND_SHARE = 0.005, 0.05
"""Samples take at most this share of all time, and of the time of their round, and at most one token longer."""
MOST_ROUNDS = 64
"""Limit on the rounds in the file. Beyond it, the one with the nearest neighbours is given up."""
LONGEST_TEXT = 2000
_UNPRINTABLE = re.compile(f"[{CONTROLS}]")


class TextSampler:
    """Makes and keeps the samples. Used by the main thread only."""

    def __init__(self, cfg: SampleConfig, inner: InnerTrainer, folder: Path) -> None:
        self._cfg, self._inner, self._path = cfg, inner, folder / SAMPLES_FILE
        self._samples = self._read()

    @property
    def newest(self) -> tuple[Sample, ...]:
        return tuple(one for one in self._samples if one.round == self._samples[-1].round)

    def round_over(self, tip: Tip, before_token: Callable[[], None]) -> None:
        """Sample from the tip's anchor if a sample is due. Keeps nothing if `before_token` raises StopAsked.

        StopAsked is not passed on, as in `Evaluation.round_over`.
        """
        is_due = tip.round % self._cfg.every_rounds == 0
        if not (is_due and self._cfg.prompts and tip.round_s and self._inner.replica.can_sample):
            return
        try:
            texts = self._inner.continue_prompts(tip.state.anchor, self._budget_s(tip.round_s), before_token)
        except StopAsked:
            return
        except Damaged as exc:
            logger.warning("No text is sampled: %s.", exc)
            return
        except torch.OutOfMemoryError:
            logger.warning("No text is sampled, as another program has taken the device's memory.")
            return
        found = [
            Sample(round=tip.round, prompt=prompt, text=_UNPRINTABLE.sub("\ufffd", text[:LONGEST_TEXT]))
            for prompt, text in zip(self._cfg.prompts, texts, strict=True)
            if text is not None
        ]
        if found:
            # Later rounds in the file are of a chain that this node has left.
            self._samples = thinned([*(one for one in self._samples if one.round < tip.round), *found])
            self._write()

    def _budget_s(self, round_s: float) -> float:
        return round_s * min(MOST_ROUND_SHARE, MOST_SHARE * self._cfg.every_rounds)

    def _read(self) -> list[Sample]:
        try:
            return [Sample.model_validate(one) for one in json.loads(self._path.read_bytes())["samples"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError):
            logger.warning("%s cannot be read and is replaced at the next sample.", self._path)
            return []

    def _write(self) -> None:
        try:
            text = json.dumps({"samples": [one.model_dump() for one in self._samples]}, ensure_ascii=False)
            write_whole(self._path, text, forced=False)
        except OSError as exc:
            logger.warning("The samples could not be written to %s: %s", self._path, exc.strerror)


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of at most MOST_ROUNDS rounds: of the first, of the newest, and of rounds in even ratios between."""
    rounds = sorted({one.round for one in samples})
    while len(rounds) > MOST_ROUNDS:
        rounds.pop(min(range(1, len(rounds) - 1), key=lambda i: (rounds[i + 1] + 1) / (rounds[i - 1] + 1)))
    return [one for one in samples if one.round in rounds]
