"""Faults on purpose in one try of an inner step, on any rank. Knows the plan and torch's error; no model."""

from __future__ import annotations

import math

import torch

from node.swarm.faults import Faults

NO_ROUND = -1
"""Of ranks other than 0, which know no round: of the plan, what is for every round is theirs, too."""


def spoilt(faults: Faults, round_: int, rows: int) -> float:
    """A factor for the loss. Raises torch.OutOfMemoryError where there is memory for fewer rows only."""
    if faults.has_room_for(rows, round_):
        return math.nan if faults.spoils_loss(round_) else 1.0
    raise torch.OutOfMemoryError("injected")
