"""Trains one arm with one seed: simulated workers in one process, without network and clock.

Codecs, clipped mean, outer step, merge, error feedback, fragments, inner loop and text are the node's own code. Without
a clock, tau, the number of inner steps from sending to applying, is exact. The loss is that of the anchor on held-out
text, in nats per token; a token is a byte.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

from node.config.manifest import RunConfig
from node.diloco.aggregate import clip_scales, square_norm, weighted_mean
from node.diloco.codec import Codec, chunk_bounds, make_codec
from node.diloco.feedback import CLASSIC, LOCO, MOST_RESIDUAL_RATIO, FeedbackRule
from node.diloco.fragments import Ranges, put_, strided, take
from node.diloco.fragments import step as fragment_step
from node.diloco.outer import OuterOptimizer, OuterState, carry, correct, genesis, mix, pseudo_gradient
from node.diloco.schedule import learning_rate
from node.errors import TrainingError
from node.training.corpus import Corpus, Stream, held_out_batches, load_corpus
from node.training.inner import InnerLoop, evaluate
from node.training.model import build_model, flatten, load_flat_, unit_elements
from node.worker.encoder import is_encodable
from tests.benchmarks.book.arm import Arm
from tests.benchmarks.book.schedule import active_workers
from tests.benchmarks.book.shards import cluster, shard
from tests.swarm.harness import tiny

RECIPE = 3
"""Raise this number when the training of an unchanged arm changes. Stored cells of another recipe are not used."""
LENGTH = 64
HELD_OUT_BATCHES, HELD_OUT_ROWS = 16, 32
CURVE_BATCHES = 4
"""Held-out batches for each point of a curve; the final loss takes all."""
CURVE_POINTS = 16
DIGITS = 4
"""Decimal places of curves and cosines."""
COMPARED = 8
"""Workers whose pseudo-gradients are compared with each other."""
ADAM_BETAS = 0.9, 0.95
"""Those of the outer Adam."""
FEEDBACK = {"classic": CLASSIC, "loco": LOCO, "decaying": FeedbackRule(decay=0.95)}
CPU = torch.device("cpu")
Place = tuple[int, int]
"""A fragment, and the first element of a part of it that has a residual of its own."""


@dataclass
class Result:
    """What one cell measured."""

    loss: float
    """Held-out loss of the final anchor, nats per token; infinite if the training diverged."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Tokens of all workers together, and the loss after them."""
    cosines: list[float] = field(default_factory=list)
    """For each round, the mean cosine similarity of two workers' pseudo-gradients."""
    tokens: int = 0
    """Tokens that all workers together trained on."""


@cache
def _corpus() -> Corpus:
    return load_corpus()


@cache
def setting() -> str:
    """What all trainings of a book share: its recipe, evaluation and text."""
    text = hashlib.blake2b(_corpus().train.tokens.tobytes(), digest_size=8)
    text.update(_corpus().held_out.tokens.tobytes())
    return f"recipe {RECIPE}, {HELD_OUT_BATCHES} held-out batches, text {text.hexdigest()}"


@cache
def _shards(count: int) -> tuple[Corpus, ...]:
    labels = cluster(_corpus().train, count)
    return tuple(shard(_corpus(), labels, number) for number in range(count))


def config(arm: Arm) -> RunConfig:
    model = {"hidden_size": arm.hidden_size, "intermediate_size": 3 * arm.hidden_size, "num_hidden_layers": arm.layers}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    inner = {"batch_size": arm.batch, "sequence_length": LENGTH, "lr": arm.inner_lr, "optimizer": arm.inner}
    return RunConfig.model_validate(tiny(model=model, inner=inner))


class Worker:
    """The inner loop of one node. Its text depends on the seed and on the shard only."""

    def __init__(self, run: RunConfig, corpus: Corpus, anchor: Tensor, seed: int, number: int) -> None:
        self._run, self._corpus = run, corpus
        self._model = build_model(run.model, seed=0)
        load_flat_(self._model, anchor)
        self.inner = InnerLoop(self._model, run.inner, CPU)
        self._stream = Stream(corpus, f"{seed:064x}", f"worker {number}", 0)
        self.shard_tokens = len(corpus.train.tokens)
        self.steps = 0
        """Inner steps since the last contribution that counted."""
        self.in_flight: dict[int, tuple[Tensor, Tensor]] = {}
        """For each fragment in flight: the parameters that were sent, and the contribution as it arrives."""
        self.residuals: dict[Place, Tensor] = {}

    def batch(self) -> Tensor:
        return self._stream.next_batch(self._run.inner.batch_size, LENGTH)

    def step(self, lr: float, batch: Tensor | None = None) -> None:
        self.inner.step(self.batch() if batch is None else batch, lr)
        self.steps += 1

    @property
    def parameters(self) -> Tensor:
        return flatten(self._model)

    def load(self, flat: Tensor) -> None:
        load_flat_(self._model, flat)


class Trial:
    """Trains one arm with one seed."""

    def __init__(self, arm: Arm, seed: int) -> None:
        self.arm, self._run = arm, config(arm)
        start = flatten(build_model(self._run.model, seed=seed))
        self._optimizer = OuterOptimizer(arm.optimizer, arm.momentum)
        if arm.optimizer == "adam":
            self._optimizer = OuterOptimizer("adam", *ADAM_BETAS, arm.adam_eps)
        self.state: OuterState = genesis(start, self._optimizer.moments)
        count = 1 if arm.kind == "plain" else arm.workers
        texts = _shards(count) if arm.shards == "clusters" else (_corpus(),) * count
        self.workers = [Worker(self._run, texts[i], start, seed, i) for i in range(count)]
        self._held_out = held_out_batches(_corpus(), HELD_OUT_BATCHES, HELD_OUT_ROWS, LENGTH)
        self._batch_tokens = arm.batch * LENGTH
        self._codec: Codec = make_codec(arm.codec)
        self._result_codec: Codec = make_codec(arm.result_codec or arm.codec)
        self._mean_residuals: dict[Place, Tensor] = {}
        self._fragments = strided(unit_elements(self._run.model), arm.fragments)
        self._lost = random.Random(f"lost {seed}")
        self._probe = build_model(self._run.model, seed=0)
        self.result = Result(math.inf)

    def run(self) -> Result:
        try:
            {"diloco": self._diloco, "data-parallel": self._data_parallel, "plain": self._plain}[self.arm.kind]()
            self.result.loss = self._loss(self._held_out)
        except TrainingError:  # The training diverged, which is a result.
            self.result.loss = math.inf
        return self.result

    def _lr(self, step: int, steps: int) -> float:
        return learning_rate(
            step,
            peak=self.arm.inner_lr,
            warmup_tokens=0,
            total_tokens=steps,
            min_ratio=0.1,
            schedule=self.arm.inner_schedule,
        )

    def _loss(self, batches: Sequence[Tensor]) -> float:
        """The anchor's loss on these batches; infinite if it is not a number."""
        load_flat_(self._probe, self.state.anchor)
        loss = evaluate(InnerLoop(self._probe, self._run.inner, CPU).loss_of, batches)
        return loss if math.isfinite(loss) else math.inf

    def _note(self, step: int, steps: int) -> None:
        """Add a point to the curve of losses, at most CURVE_POINTS of them in `steps` steps."""
        if step * CURVE_POINTS // steps > len(self.result.curve):
            some = self._held_out[:: HELD_OUT_BATCHES // CURVE_BATCHES]
            self.result.curve.append((self.result.tokens, round(self._loss(some), DIGITS)))

    # -- without an outer step ------------------------------------------------------------------------------------

    def _plain(self) -> None:
        self._train_alone(0, self.arm.steps)

    def _train_alone(self, start: int, end: int) -> None:
        first = self.workers[0]
        for step in range(start, end):
            first.step(self._lr(step, self.arm.steps))
            self.result.tokens += self._batch_tokens
            self.state = replace(self.state, anchor=first.parameters)
            self._note(step + 1, self.arm.steps)

    def _data_parallel(self) -> None:
        first = self.workers[0]
        begin = round(self.arm.pretrain * self.arm.steps)
        self._train_alone(0, begin)
        for step in range(begin, self.arm.steps):
            first.step(self._lr(step, self.arm.steps), torch.cat([worker.batch() for worker in self.workers]))
            self.result.tokens += len(self.workers) * self._batch_tokens
            self.state = replace(self.state, anchor=first.parameters)
            self._note(step + 1, self.arm.steps)

    # -- DiLoCo ---------------------------------------------------------------------------------------------------

    def _diloco(self) -> None:
        """Send fragment f at steps f H / F + H, + 2H, ... (the last time at the end), and apply it tau steps later."""
        arm = self.arm
        begin = round(arm.pretrain * arm.steps)
        self._train_alone(0, begin)
        if begin:
            self._start_others()
        steps = round(arm.steps * min(arm.speeds)) if arm.speeds and arm.policy == "steps" else arm.steps
        speeds = arm.speeds if arm.speeds and arm.policy == "time" else (1.0,) * len(self.workers)
        active = active_workers(arm.schedule, len(self.workers), -(-(steps - begin) // arm.inner_steps))
        training: list[Worker] = []
        for number in range(1, steps - begin + 1):
            if (number - 1) % arm.inner_steps == 0:
                wanted = self.workers[: active[(number - 1) // arm.inner_steps]]
                for worker in wanted[len(training) :]:
                    worker.load(self.state.anchor)
                training = wanted
            for worker, speed in zip(training, speeds, strict=False):
                if math.floor(number * speed) > math.floor((number - 1) * speed):
                    worker.step(self._lr(begin + number - 1, steps))
                    self.result.tokens += self._batch_tokens
            for fragment in range(len(self._fragments)):
                self._sync(fragment, number, steps - begin, training)
            self._note(begin + number, steps)

    def _start_others(self) -> None:
        """Let all workers continue from the first one's parameters (the anchor) and inner optimizer."""
        first, *others = self.workers
        first.steps = 0  # They are in the anchor, so they are no contribution.
        for worker in others:
            worker.load(self.state.anchor)
            worker.inner.load_state_tensors(first.inner.state_tensors())

    def _sync(self, fragment: int, number: int, last: int, training: Sequence[Worker]) -> None:
        """Send the fragment, or apply it, if this step is the one to do so."""
        period, tau = self.arm.inner_steps, self.arm.tau
        offset = period * (fragment + 1) // len(self._fragments)
        since = (number - offset) % period
        if tau and since == tau and any(fragment in worker.in_flight for worker in training):
            self._apply(fragment, training)
        if since == 0 and number >= offset:
            self._send(fragment, training)
            if not tau or number + tau > last:
                self._apply(fragment, training)

    def _send(self, fragment: int, training: Sequence[Worker]) -> None:
        ranges = self._fragments[fragment]
        anchor = take(self.state.anchor, ranges)
        deltas = []
        for worker in training:
            sent = take(worker.parameters, ranges).clone()
            if not is_encodable(sent):
                raise TrainingError("The training diverged: a parameter is too large to be encoded.")
            deltas.append(pseudo_gradient(anchor, sent))
            worker.in_flight[fragment] = sent, self._encoded(worker, fragment, deltas[-1] * self.arm.sign)
        if len(self._fragments) == 1 and len(deltas) > 1:
            self.result.cosines.append(round(pairwise_cosine(deltas[:COMPARED]), DIGITS))

    def _encoded(self, worker: Worker, fragment: int, delta: Tensor) -> Tensor:
        """The contribution as the reducers decode it."""
        if self.arm.prune:
            delta = sign_pruned(delta, self._rows(), self.arm.prune)
        return self._fed_back(worker.residuals, (fragment, 0), self.arm.feedback, self._codec, delta)

    def _mean_as_sent(self, fragment: int, mean: Tensor) -> Tensor:
        """The mean as it arrives. Its reducers bound the residual of each chunk."""
        codec, most_ratio = self._result_codec, MOST_RESIDUAL_RATIO.get(self._result_codec.name, math.inf)
        parts = [
            self._fed_back(
                self._mean_residuals, (fragment, start), self.arm.result_feedback, codec, mean[start:end], most_ratio
            )
            for start, end in chunk_bounds(mean.numel())
        ]
        return torch.cat(parts)

    def _fed_back(
        self,
        residuals: dict[Place, Tensor],
        place: Place,
        kind: str,
        codec: Codec,
        vector: Tensor,
        most_ratio: float = math.inf,
    ) -> Tensor:
        """The vector as it arrives, with the error feedback of this sender."""
        if kind == "none":
            return through(codec, vector)
        rule, stored = FEEDBACK[kind], residuals.get(place)
        wanted = rule.add(vector, stored, most_ratio)
        arrived = through(codec, wanted)
        residuals[place] = rule.residual_after(wanted, arrived, stored)
        if rule.is_reset_after((self.state.round + 1) // len(self._fragments)):
            del residuals[place]
        return arrived

    def _apply(self, fragment: int, training: Sequence[Worker]) -> None:
        """Apply the fragment: take the clipped mean, encode it once, make the outer step, and merge at each worker."""
        ranges = self._fragments[fragment]
        sending = [worker for worker in training if fragment in worker.in_flight]
        included = [worker for worker in sending if self._lost.random() >= self.arm.drop]
        if not included:
            return
        parts = [worker.in_flight[fragment][1] for worker in included]
        weights = [self._weight(worker) for worker in included]
        norms = [math.sqrt(square_norm(part)) for part in parts]
        scales = clip_scales(norms, weights) if self.arm.clip else [1.0] * len(parts)
        mean = self._mean_as_sent(fragment, weighted_mean(parts, weights, scales))
        old = take(self.state.anchor, ranges).clone()
        self.state = self.stepped(ranges, mean)
        new = take(self.state.anchor, ranges)
        for worker in sending:
            sent, _ = worker.in_flight.pop(fragment)
            whole = worker.parameters
            local = take(whole, ranges)
            if worker in included:
                worker.steps = 0
                put_(whole, ranges, self._merged(local, sent, new))
            elif self.arm.drop_rule == "carry":
                put_(whole, ranges, carry(local, old, new))
            worker.load(whole)
        if self.arm.adam == "synced":
            average_states(included)

    def _weight(self, worker: Worker) -> int:
        by = {"tokens": worker.steps * self._batch_tokens, "uniform": 1, "shard": worker.shard_tokens}
        return max(1, by[self.arm.weights])

    def stepped(self, ranges: Ranges, mean: Tensor) -> OuterState:
        """The state after one outer step on the mean of these ranges, fp32 [P_f]."""
        number = (self.state.round + 1) // len(self._fragments)
        return fragment_step(self.state, ranges, mean, self._optimizer, lr=self.arm.outer_lr, tokens=0, number=number)

    def _merged(self, local: Tensor, sent: Tensor, new: Tensor) -> Tensor:
        if not self.arm.tau:
            return new
        return mix(local, new, 0.5) if self.arm.merge == "mix" else correct(local, sent, new)

    def _rows(self) -> list[int]:
        """Elements of each row (a neuron's weights), in the order of the flat vector."""
        if len(self._fragments) > 1:
            raise ValueError("Pruning is measured without fragments.")
        return [
            parameter.shape[-1] if parameter.dim() > 1 else parameter.numel()
            for parameter in self._probe.parameters()
            for _ in range(parameter.shape[0] if parameter.dim() > 1 else 1)
        ]


def through(codec: Codec, x: Tensor) -> Tensor:
    """The vector as it arrives."""
    return codec.decode(codec.encode(x), x.numel())


def pairwise_cosine(vectors: Sequence[Tensor]) -> float:
    """The mean cosine similarity of all pairs of these vectors, fp32 [P] each."""
    unit = torch.stack([vector / vector.norm().clamp(min=1e-30) for vector in vectors])
    similar = unit @ unit.T
    count = len(vectors)
    return float((similar.sum() - similar.diagonal().sum()) / (count * (count - 1)))


def sign_pruned(delta: Tensor, rows: Sequence[int], ratio: float) -> Tensor:
    """Set this share of each row's elements to zero: first those against the row's sign, the smallest of them first.

    The sign of a row is that of its sum, after TIES merging (arXiv 2306.01708), which DiLoCo names as its source.
    """
    out, done = [], 0
    for length, group in groupby(rows):
        count = len(list(group))
        block = delta[done : done + count * length].view(count, length)
        against = block.sign() != block.sum(1, keepdim=True).sign()
        rank = block.abs() - against * (2 * block.abs().amax(1, keepdim=True) + 1)
        dropped = rank.argsort(1)[:, : round(ratio * length)]
        out.append(block.scatter(1, dropped, 0.0).flatten())
        done += count * length
    return torch.cat(out)


def average_states(workers: Sequence[Worker]) -> None:
    """Give each worker the mean of all workers' inner optimizer states."""
    states = [worker.inner.state_tensors() for worker in workers]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    for worker in workers:
        worker.inner.load_state_tensors(mean)
