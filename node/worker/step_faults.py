"""Injected faults in inner steps and contributions. Without a fault plan, no hook has an effect."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from node.swarm.chain.chain import Tip
from node.swarm.consensus.leader_election import role_of
from node.swarm.faults import Faults, damage_blobs
from node.training.inner import StepResult
from node.training.replica import Replica

ANY_ROUND = -1
"""The round for ranks 1 and up, which do not know it. Only faults that are planned for every round apply to them."""
SIMULATED_STEPS = 8
SIMULATED_CHANGE_RATIO = 1e-6
"""Every SIMULATED_STEPS steps, the parameters change by this ratio times the step's number, so a change can be sent."""


def loss_factor(faults: Faults, round_: int, rows: int) -> float:
    """Return the factor for the loss of one try of a step, on any rank.

    Raises torch.OutOfMemoryError if the fault plan leaves memory for fewer than `rows`.
    """
    if not faults.has_room_for(rows, round_):
        raise torch.OutOfMemoryError("injected")
    return math.nan if faults.overflows_loss(round_) else 1.0


class StepFaults:
    """Applies the fault plan to one trainer's work on the round after its tip."""

    def __init__(self, faults: Faults, peer_id: Callable[[], str], tip: Callable[[], Tip]) -> None:
        self._faults, self._peer_id, self._tip = faults, peer_id, tip
        self._simulated_steps = 0

    def before_step(self) -> None:
        self._faults.meet("inner", self._round, self._role)

    def before_merge(self) -> None:
        """Called with the committed round as the tip, before the parameters change."""
        self._faults.meet("merge", self._round - 1)

    def simulate_step(self, replica: Replica, tokens: int) -> StepResult | None:
        """Sleep instead of computing, to simulate another device. Returns None at once if the plan has no `rest`."""
        began_at, step_s = time.monotonic(), self._faults.rest_s()
        if not step_s:
            return None
        self._simulated_steps += 1
        if self._simulated_steps % SIMULATED_STEPS == 1:
            replica.perturb(SIMULATED_CHANGE_RATIO * self._simulated_steps)
        time.sleep(max(0.0, began_at + step_s - time.monotonic()))
        return StepResult(0.0, 0.0, tokens)

    def loss_factor(self, rows: int) -> float:
        return loss_factor(self._faults, self._round, rows)

    def slow_down(self, began_at: float) -> None:
        """Sleep at the end of the step that began at `began_at`, by the slowness in the plan."""
        time.sleep(max(0.0, self._faults.slowness() - 1) * (time.monotonic() - began_at))

    def before_contribution(self, replica: Replica) -> Callable[[Sequence[bytes]], Sequence[bytes]]:
        """Damage the parameters to send if the plan says so. The returned function does so with the encoded chunks."""
        kind = self._faults.damage_kind("inner", self._round, self._role)
        if kind in ("nan", "garbage"):
            replica.load(torch.full_like(replica.parameters, math.nan if kind == "nan" else 1.0))
        return lambda chunks: damage_blobs(kind, chunks) if kind == "shape" else chunks

    @property
    def _round(self) -> int:
        return self._tip().round + 1

    def _role(self) -> str:
        tip = self._tip()
        return role_of(self._peer_id(), tip.head, list(tip.last_weights), tip.leader)
