"""Measures how much worse the model gets if one of five members sends a scaled pseudo-gradient, without a network.

    python -m tests.benchmarks.hostile [--rounds 12] [--seeds 3]

All arms have the same members, text, initial parameters and rounds. The fifth member's pseudo-gradient is multiplied by
a factor, and its stated norm with it. The figure is the held-out loss after the last round, compared with five honest
members.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import torch
from torch import Tensor

from node import reference
from node.config.manifest import RunConfig
from node.diloco.codec import chunk_bounds, make_codec
from node.diloco.outer import pseudo_gradient
from node.training.corpus import held_out_batches, load_corpus
from node.training.inner import InnerLoop, evaluate
from node.training.model import build_model, flatten, load_flat_
from tests.benchmarks.figures import Figure, Result
from tests.swarm.harness import tiny

MEMBERS = "abcde"
DEVICE = torch.device("cpu")
ALLOWED_RATIO = 1.05
"""Largest allowed ratio of the held-out losses if the pseudo-gradient's norm is a hundred times too large."""


class Liar(reference.ReferenceMember):
    """A member that trains like the others and sends a multiple of its pseudo-gradient."""

    factor = 1.0

    def contribute(self) -> tuple[reference.WeightedUpdate, float]:
        own, loss = super().contribute()
        delta = pseudo_gradient(self.state.anchor, flatten(self._model)) * self.factor
        codec = make_codec("fp16")
        encoded = b"".join(codec.encode(delta[start:end]) for start, end in chunk_bounds(delta.numel()))
        return reference.WeightedUpdate(own.stream_id, own.weight, encoded), loss


def held_out_loss(run: RunConfig, anchor: Tensor) -> float:
    """The held-out loss in nats per byte with the parameters `anchor`, fp32 [P]."""
    batches = held_out_batches(load_corpus(), 16, run.inner.batch_size, run.inner.sequence_length)
    model = build_model(run.model, seed=0)

    loop = InnerLoop(model, run.inner, DEVICE)
    load_flat_(model, anchor)
    return evaluate(loop.loss_of, batches)


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
    return held_out_loss(run, made[0].state.anchor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
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
    return Result("hostile", figures, samples={"honest": honest, **losses}).conclude()


if __name__ == "__main__":
    raise SystemExit(main())
