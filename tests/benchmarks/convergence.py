"""Measures how much fewer bits, overlap and fragments increase the loss, with paired seeds and equal tokens.

    python -m tests.benchmarks.convergence [--seeds 4] [--rounds 24] [--arms fp32,int4,...] [--jobs 2]
    python -m tests.benchmarks.convergence --tune       tunes outer lr and momentum of the arms in TUNED

Eight simulated workers in one process train on the standard library's text. Codecs, clipped mean, outer step, merge,
error feedback and fragments are the node's own code. There is no network and no clock, so tau, the number of steps from
sending to applying, is exact. The loss is that of the anchor. Each finished cell (an arm with a seed) is stored in
results/convergence.json and reused.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from node.config.manifest import RunConfig
from node.diloco.aggregate import clip_scales, square_norm, weighted_mean
from node.diloco.codec import Codec, ErrorFeedback, make_codec
from node.diloco.fragments import Ranges, elements, put_, strided, take
from node.diloco.outer import OuterState, correct, genesis, mix, outer_step, pseudo_gradient
from node.diloco.schedule import learning_rate
from node.training.corpus import Corpus, Stream, held_out_batches, load_corpus
from node.training.inner import InnerLoop, evaluate
from node.training.model import build_model, flatten, load_flat_, unit_elements
from tests.benchmarks.curves import T_95
from tests.benchmarks.figures import RESULTS
from tests.swarm.harness import tiny

WORKERS = 8
INNER_STEPS = 30
CELLS = RESULTS / "convergence.json"
CPU = torch.device("cpu")
ALLOWED_RATIO = 1.01
"""An arm whose loss exceeds this multiple of the loss of blocking fp32 cannot be a default."""


@dataclass(frozen=True)
class Arm:
    """One method of training. All arms train on the same tokens."""

    name: str
    kind: str = "diloco"
    """`diloco`, `data-parallel` (one model, the batches of all workers in each step) or `one` (one worker)."""
    codec: str = "fp32"
    feedback: float = 0.0
    """The factor beta of the error feedback; 0 means no feedback."""
    tau: int = 0
    """Number of inner steps from sending an update to applying it."""
    merge: str = "mix"
    fragments: int = 1
    sign: float = 1.0
    outer_lr: float = 0.7
    momentum: float = 0.6
    """`--tune` found these values of outer lr and momentum to be best for fp32 and int4. All blocking arms use them."""


OVERLAPPED = 0.8
"""The best momentum for overlapped rounds at the same outer lr, found by `--tune`."""

ARMS = {
    arm.name: arm
    for arm in (
        Arm("fp32"),
        Arm("data-parallel", kind="data-parallel"),
        Arm("one", kind="one"),
        Arm("fp16", codec="fp16"),
        Arm("int8", codec="int8"),
        Arm("int4", codec="int4"),
        Arm("int4-feedback", codec="int4", feedback=1.0),
        Arm("e3m0", codec="e3m0"),
        Arm("overlap-5%", codec="int4", tau=round(0.05 * INNER_STEPS), momentum=OVERLAPPED),
        Arm("overlap-20%", codec="int4", tau=round(0.2 * INNER_STEPS), momentum=OVERLAPPED),
        Arm("overlap-40%", codec="int4", tau=round(0.4 * INNER_STEPS), momentum=OVERLAPPED),
        Arm("streaming", codec="int4", fragments=3, tau=round(0.05 * INNER_STEPS), momentum=OVERLAPPED),
        Arm("topk", codec="topk", feedback=1.0),
        Arm("correction-20%", codec="int4", tau=round(0.2 * INNER_STEPS), merge="correction", momentum=OVERLAPPED),
        Arm("wrong sign", sign=-1.0),
    )
}
TUNED = ("fp32", "int4", "overlap-20%")
DEFAULT = tuple(name for name in ARMS if name not in ("int8", "correction-20%", "wrong sign"))
"""The twelve arms that run if `--arms` is not given."""


def config(rounds: int) -> RunConfig:
    model = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    inner = {"batch_size": 4, "sequence_length": 64, "lr": 2e-3}
    tokens = rounds * INNER_STEPS * WORKERS * 4 * 64
    return RunConfig.model_validate(tiny(model=model, inner=inner, total_tokens=tokens))


class Worker:
    """The inner loop of one node. Its text does not depend on the arm."""

    def __init__(self, run: RunConfig, corpus: Corpus, anchor: Tensor, seed: int, number: int) -> None:
        self._run = run
        self._model = build_model(run.model, seed=0)
        load_flat_(self._model, anchor)
        self._inner = InnerLoop(self._model, run.inner, CPU)
        self._stream = Stream(corpus, f"{seed:064x}", f"worker {number}", 0)
        self.flights: dict[int, tuple[Tensor, Tensor]] = {}
        """For each fragment in flight: the parameters that were sent, and the update as it arrives."""
        self.feedback: dict[int, ErrorFeedback] = {}

    def batch(self) -> Tensor:
        return self._stream.next_batch(self._run.inner.batch_size, self._run.inner.sequence_length)

    def step(self, lr: float, batch: Tensor | None = None) -> None:
        self._inner.step(self.batch() if batch is None else batch, lr)

    @property
    def parameters(self) -> Tensor:
        return flatten(self._model)

    def load(self, flat: Tensor) -> None:
        load_flat_(self._model, flat)


class Trial:
    """Trains one arm with one seed."""

    def __init__(self, arm: Arm, seed: int, rounds: int) -> None:
        self.arm, self.rounds, self.run = arm, rounds, config(rounds)
        corpus = load_corpus()
        self.state: OuterState = genesis(flatten(build_model(self.run.model, seed=seed)))
        count = 1 if arm.kind == "one" else WORKERS
        self.workers = [Worker(self.run, corpus, self.state.anchor, seed, i) for i in range(count)]
        inner = self.run.inner
        self._held_out = held_out_batches(corpus, 32, inner.batch_size, inner.sequence_length)
        self._codec: Codec = make_codec(arm.codec)
        self._fragments = strided(unit_elements(self.run.model), arm.fragments)

    def lr(self, step: int, steps: int) -> float:
        tokens = self.run.total_tokens * step // steps
        return learning_rate(
            tokens, peak=self.run.inner.lr, warmup_tokens=0, total_tokens=self.run.total_tokens, min_ratio=0.1
        )

    def play(self) -> float:
        """Train. Returns the anchor's final held-out loss in nats per token, or infinity if training diverged."""
        try:
            {"diloco": self._diloco, "data-parallel": self._data_parallel, "one": self._one}[self.arm.kind]()
        except (ValueError, ArithmeticError, RuntimeError):
            return math.inf
        model = build_model(self.run.model, seed=0)
        load_flat_(model, self.state.anchor)
        return evaluate(InnerLoop(model, self.run.inner, CPU).loss_of, self._held_out)

    def _one(self) -> None:
        steps = self.rounds * INNER_STEPS * WORKERS
        for step in range(steps):
            self.workers[0].step(self.lr(step, steps))
        self.state = replace(self.state, anchor=self.workers[0].parameters)

    def _data_parallel(self) -> None:
        steps, (first, *_) = self.rounds * INNER_STEPS, self.workers
        for step in range(steps):
            first.step(self.lr(step, steps), torch.cat([worker.batch() for worker in self.workers]))
        self.state = replace(self.state, anchor=first.parameters)

    def _diloco(self) -> None:
        """Send fragment f at steps f H / F + H, + 2H, ... (the last time at the end), and apply it tau steps later."""
        steps = self.rounds * INNER_STEPS
        count = len(self._fragments)
        for step in range(1, steps + 1):
            for worker in self.workers:
                worker.step(self.lr(step - 1, steps))
            for f in range(count):
                offset = INNER_STEPS * (f + 1) // count
                since = (step - offset) % INNER_STEPS
                if since == self.arm.tau and self.workers[0].flights.get(f) is not None and self.arm.tau:
                    self._land(f)
                if since == 0 and step >= offset:
                    self._send(f)
                    if not self.arm.tau or step + self.arm.tau > steps:
                        self._land(f)

    def _send(self, f: int) -> None:
        ranges = self._fragments[f]
        anchor = take(self.state.anchor, ranges)
        for worker in self.workers:
            sent = take(worker.parameters, ranges).clone()
            wanted = pseudo_gradient(anchor, sent) * self.arm.sign
            if self.arm.feedback:
                feedback = worker.feedback.setdefault(f, ErrorFeedback(elements(ranges), beta=self.arm.feedback))
                wanted = feedback.add(wanted)
            arrived = self._through_the_wire(wanted)
            if self.arm.feedback:
                feedback.record_error(wanted, arrived)
                feedback.advance()
            worker.flights[f] = (sent, arrived)

    def _through_the_wire(self, x: Tensor) -> Tensor:
        return self._codec.decode(self._codec.encode(x), x.numel())

    def _land(self, f: int) -> None:
        """Apply fragment f: take the clipped mean, encode it once, make the outer step, and merge at each worker."""
        ranges = self._fragments[f]
        parts = [worker.flights[f][1] for worker in self.workers]
        weights = [1] * len(parts)
        scales = clip_scales([math.sqrt(square_norm(part)) for part in parts], weights)
        mean = self._through_the_wire(weighted_mean(parts, weights, scales))
        self.state = self._stepped(ranges, mean)
        new = take(self.state.anchor, ranges)
        for worker in self.workers:
            sent, _ = worker.flights.pop(f)
            whole = worker.parameters
            put_(whole, ranges, self._merged(take(whole, ranges), sent, new))
            worker.load(whole)

    def _stepped(self, ranges: Ranges, mean: Tensor) -> OuterState:
        part = OuterState(take(self.state.anchor, ranges), take(self.state.momentum, ranges), self.state.round, 0)
        stepped = outer_step(part, mean, lr=self.arm.outer_lr, momentum=self.arm.momentum, tokens=0)
        anchor, momentum = self.state.anchor.clone(), self.state.momentum.clone()
        put_(anchor, ranges, stepped.anchor)
        put_(momentum, ranges, stepped.momentum)
        return OuterState(anchor, momentum, self.state.round + 1, 0)

    def _merged(self, local: Tensor, sent: Tensor, new: Tensor) -> Tensor:
        if not self.arm.tau:
            return new
        return mix(local, new, 0.5) if self.arm.merge == "mix" else correct(local, sent, new)


def play(arm: Arm, seed: int, rounds: int) -> tuple[Arm, int, float]:
    torch.set_num_threads(1)
    return arm, seed, Trial(arm, seed, rounds).play()


def key(arm: Arm, seed: int, rounds: int) -> str:
    return json.dumps([asdict(arm), seed, rounds])


def cells_of(arms: Sequence[Arm], seeds: int, rounds: int, jobs: int) -> dict[tuple[Arm, int], float]:
    """Return the losses of all cells. Stored losses are reused, and each new one is stored at once."""
    kept: dict[str, float] = json.loads(CELLS.read_text()) if CELLS.exists() else {}
    wanted = [(arm, seed) for seed in range(seeds) for arm in arms]
    with ProcessPoolExecutor(jobs) as pool:
        todo = [pool.submit(play, arm, seed, rounds) for arm, seed in wanted if key(arm, seed, rounds) not in kept]
        for future in as_completed(todo):
            arm, seed, loss = future.result()
            kept[key(arm, seed, rounds)] = loss
            CELLS.parent.mkdir(parents=True, exist_ok=True)
            draft = CELLS.with_suffix(".new")
            draft.write_text(json.dumps(kept, indent=1))
            draft.replace(CELLS)
            print(f"{arm.name:16} lr {arm.outer_lr} momentum {arm.momentum} seed {seed}: {loss:.4f}", flush=True)
    return {(arm, seed): kept[key(arm, seed, rounds)] for arm, seed in wanted}


def compare(losses: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """The mean of the paired ratios, and the half width of its 95 % interval (Student's t)."""
    ratios = [one / other for one, other in zip(losses, baseline, strict=True)]
    if len(ratios) < 2 or not all(map(math.isfinite, ratios)):
        return statistics.fmean(ratios), math.inf
    spread = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.fmean(ratios), T_95[len(ratios) - 1] * spread


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of an arm with blocking fp32."""

    arm: str
    loss: float
    """The mean over all seeds, in nats per token."""
    ratio: float
    half: float
    """The half width of the 95 % interval of the ratio."""

    @property
    def may_be_default(self) -> bool:
        return self.ratio <= ALLOWED_RATIO


HEAD = "| arm | loss, mean | of fp32 | 95 % interval | no worse than 1 %? |\n|---|---|---|---|---|"


def row(one: Verdict) -> str:
    interval = f"± {one.half:.4f}" if math.isfinite(one.half) else ""
    judged = "yes" if one.may_be_default else "no"
    return f"| {one.arm} | {one.loss:.4f} | {one.ratio:.4f} | {interval} | {judged} |"


def judge(arms: Sequence[Arm], seeds: int, losses: dict[tuple[Arm, int], float]) -> list[Verdict]:
    baseline = [losses[ARMS["fp32"], seed] for seed in range(seeds)]
    verdicts = []
    for arm in arms:
        own = [losses[arm, seed] for seed in range(seeds)]
        verdicts.append(Verdict(arm.name, statistics.fmean(own), *compare(own, baseline)))
    return verdicts


def tune(rounds: int, jobs: int) -> None:
    grid = [(lr, momentum) for lr in (0.4, 0.7, 1.0) for momentum in (0.6, 0.8)]
    arms = [replace(ARMS[name], outer_lr=lr, momentum=mu) for name in TUNED for lr, mu in grid]
    losses = cells_of(arms, 1, rounds, jobs)
    for name in TUNED:
        best = min((arm for arm in arms if arm.name == name), key=lambda arm: losses[arm, 0])
        print(f"{name}: best at outer lr {best.outer_lr}, momentum {best.momentum}: {losses[best, 0]:.4f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--arms", default=",".join(DEFAULT), help=", ".join(ARMS))
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    if options.tune:
        tune(options.rounds, options.jobs)
        return 0
    names = dict.fromkeys(["fp32", *options.arms.split(",")])
    arms = [ARMS[name] for name in names]
    losses = cells_of(arms, options.seeds, options.rounds, options.jobs)
    verdicts = judge(arms, options.seeds, losses)
    print(HEAD, *map(row, verdicts), sep="\n")
    (RESULTS / "convergence_arms.json").write_text(json.dumps([asdict(one) for one in verdicts], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
