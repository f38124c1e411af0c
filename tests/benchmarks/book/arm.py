"""One way to train, as the fields that differ from a common default. A cell of the book is an arm with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from node.config.manifest import Schedule as LearningRateSchedule
from tests.benchmarks.book.schedule import active_workers

WORKERS = 8
INNER_STEPS = 30
STEPS = 960
"""Inner steps of each worker: 32 rounds of 30, or 2 rounds of 480."""
BATCH = 4


@dataclass(frozen=True)
class Arm:
    """Settings of one training. Fields that are no concern of an arm keep their default."""

    kind: str = "diloco"
    """`diloco`, `data-parallel` (one model, and each step has the batches of all workers) or `plain` (one worker
    without an outer step)."""
    workers: int = WORKERS
    """K."""
    inner_steps: int = INNER_STEPS
    """H, inner steps from one round to the next."""
    steps: int = STEPS
    """Inner steps of each worker."""
    batch: int = BATCH
    """Rows of a worker's batch, each of 64 tokens."""
    hidden_size: int = 64
    layers: int = 2

    optimizer: Literal["nesterov", "momentum", "sgd", "adam"] = "nesterov"
    """The outer optimizer."""
    outer_lr: float = 0.7
    momentum: float = 0.6
    adam_eps: float = 1e-8
    """The epsilon of the outer Adam."""
    inner: str = "adamw"
    """The inner optimizer: `adamw` or `muon`."""
    inner_lr: float = 2e-3
    inner_schedule: LearningRateSchedule = "cosine"
    """The inner learning-rate schedule, as in `run.inner.schedule`, without warm-up."""
    adam: str = "local"
    """`synced` averages the state of the inner optimizer over all workers after each round."""

    codec: str = "fp32"
    result_codec: str = ""
    """The codec of the mean; empty means that of the contributions."""
    feedback: str = "none"
    """`none`, `classic`, `loco`, or `decaying` (classic, with SparseLoCo's decay of 0.95)."""
    result_feedback: str = "none"
    """The feedback of the reducers, who encode the mean, of the same kinds."""
    prune: float = 0.0
    """Share of the elements of each contribution that sign pruning sets to zero."""
    clip: bool = True
    """Whether the mean clips contributions of an unusual norm, as the node does."""
    tau: int = 0
    """Inner steps from sending a contribution to applying the mean."""
    merge: str = "mix"
    fragments: int = 1

    drop: float = 0.0
    """Probability that a contribution is lost."""
    drop_rule: str = "carry"
    """What a worker does whose contribution was lost. `carry`: it moves its progress to the new anchor. `stay`: it
    trains on from its own parameters, as in the paper. It always keeps its progress for the next contribution."""
    schedule: str = "constant"
    """How many of the workers train in each round: see `schedule.active_workers`."""
    pretrain: float = 0.0
    """Share of the steps that one worker makes alone before the others start from its parameters."""

    shards: str = "iid"
    """`clusters` gives each worker its own cluster of documents."""
    weights: str = "tokens"
    """Weights of the mean: `tokens`, `uniform`, or `shard` (tokens of the worker's shard)."""
    speeds: Sequence[float] = ()
    """Speed of each worker relative to the fastest; empty means that all are equal."""
    policy: str = "time"
    """With unequal speeds: `time` ends a round when the fastest worker has made H steps; `steps` waits for all."""
    sign: float = 1.0
    """-1 is a wrong sign of the pseudo-gradient, which the benchmark must notice."""

    @property
    def rounds(self) -> int:
        return self.steps // self.inner_steps

    @property
    def cost_s(self) -> float:
        """An estimate of the computing time on one core, seconds."""
        alone = self.steps * self.pretrain
        steps, workers = self.steps - alone, 1 if self.kind == "plain" else self.workers
        if self.kind == "data-parallel":
            return alone * self._step_s(1) + steps * self._step_s(workers)
        rounds = active_workers(self.schedule, workers, max(1, round(steps / self.inner_steps)))
        training = sum(rounds) / len(rounds)
        if self.speeds:
            training = sum(self.speeds) if self.policy == "time" else workers * min(self.speeds)
        return (alone + steps * training) * self._step_s(1)

    def _step_s(self, batches: int) -> float:
        """Seconds of one step on so many batches, as measured: 9 ms for 4 rows of 64 tokens, 43 ms for 32."""
        return (0.004 + 0.0012 * batches * self.batch) * self.hidden_size**2 / 64**2

    def but(self, **changes: object) -> Arm:
        """This arm with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]
