"""One of five members sends what it should not: how much worse does the model get? Knows the maths; no network.

    python -m tests.benchmarks.hostile [--rounds 12] [--seeds 3]

The same members, text, initial parameters and rounds in every arm; the fifth member's pseudo-gradient is multiplied by
a factor, with the norm that it then has. Held-out loss after the last round, against that of the five honest ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from node import reference
from node.diloco.codec import chunk_bounds, make_codec
from node.diloco.outer import pseudo_gradient
from node.manifest import RunConfig
from node.training.data import held_out_batches, load_corpus
from node.training.evaluate import evaluate
from node.training.model import build_model, flatten, load_flat_
from tests.benchmarks.figures import RESULTS, Figure, Result, table
from tests.swarm.harness import tiny

MEMBERS = "abcde"
DEVICE = torch.device("cpu")
ALLOWED_RATIO = 1.05
"""Of the held-out loss, for a norm that is a hundred times too long."""


class Liar(reference.Member):
    """Trains as the others do, and sends a multiple of what it found."""

    factor = 1.0

    def contribute(self) -> tuple[reference.Contribution, float]:
        own, loss = super().contribute()
        delta = pseudo_gradient(self.state.anchor, flatten(self._model)) * self.factor
        codec = make_codec("fp16")
        encoded = b"".join(codec.encode(delta[start:end]) for start, end in chunk_bounds(delta.numel()))
        return reference.Contribution(own.stream_id, own.weight, encoded), loss


def held_out_loss(run: RunConfig, anchor: Tensor) -> Callable[[Tensor], float]:
    batches = held_out_batches(load_corpus(), 16, run.inner.batch_size, run.inner.sequence_length)
    model = build_model(run.model, seed=0)

    def loss(vector: Tensor) -> float:
        load_flat_(model, vector)
        return evaluate(model, batches, DEVICE, "fp32")

    return loss


def train(run: RunConfig, rounds: int, seed: int, factor: float, members: str = MEMBERS) -> float:
    anchor = flatten(build_model(run.model, seed=seed))
    corpus = load_corpus()
    made = [
        Liar(run, corpus, anchor, run_id=f"{seed:032x}", stream_id=name, device=DEVICE, precision="fp32")
        for name in members
    ]
    if len(members) == len(MEMBERS):
        made[-1].factor = factor
    for _ in range(rounds):
        given = [member.contribute()[0] for member in made]
        for member in made:
            member.apply(given)
    return held_out_loss(run, anchor)(made[0].state.anchor)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    run = RunConfig.model_validate(tiny(round={"inner_steps": 40}, total_tokens=10_000_000))
    arms = {"norm x100": (100.0, MEMBERS), "flipped sign": (-1.0, MEMBERS)}
    arms |= {"flipped sign and norm x100": (-100.0, MEMBERS), "without the fifth": (1.0, MEMBERS[:4])}
    honest, losses = [], {name: list[float]() for name in arms}
    for seed in range(options.seeds):
        honest.append(train(run, options.rounds, seed, 1.0))
        for name, (factor, members) in arms.items():
            losses[name].append(train(run, options.rounds, seed, factor, members))
            print(f"seed {seed}, {name}: {losses[name][-1]:.3f}, all honest {honest[-1]:.3f} nats/byte", flush=True)
    figures = [
        Figure(
            f"1 of 5: {name}",
            "nats/byte",
            fmean(values),
            fmean(honest),
            "all honest",
            high=ALLOWED_RATIO if name == "norm x100" else None,
        )
        for name, values in losses.items()
    ]
    print(table(figures))
    Result("hostile", figures, samples={"honest": honest, **losses}).save(options.out)
    return 0 if all(figure.passed for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
